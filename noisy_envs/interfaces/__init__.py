"""One file for each API (Gymnasium, PettingZoo, vector, functional): clocks, seeds, auto-reset; no rule of any game."""

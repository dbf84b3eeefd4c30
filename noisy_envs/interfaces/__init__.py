"""One module for each API (Gymnasium, PettingZoo, vector, functional): time limits, seeds, auto-reset."""

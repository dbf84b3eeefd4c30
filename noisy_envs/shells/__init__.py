"""One file for each foreign API: clocks, seeds, auto-reset, spaces, dictionaries; no rule of any game."""

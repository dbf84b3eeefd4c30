"""The games as others call them, one API a file: Gymnasium, PettingZoo, vector, functional. They hold no rules."""

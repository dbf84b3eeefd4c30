"""The games as others call them, one API a file: Gymnasium, PettingZoo, vector, functional. No rule of a game is here."""

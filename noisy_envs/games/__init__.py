"""The rules of the games, over a batch of environments, in NumPy or torch; `game.Game` is their common protocol."""

"""The rules of the games, over a batch of environments, in NumPy or torch. `game` says what a game must offer."""

"""Images and films of environments, the viewer, and trained agents to watch. Needs pygame, which opens no window here."""

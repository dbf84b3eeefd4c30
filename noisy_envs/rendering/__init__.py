"""Images and films of environments (pygame), the viewer, and trained agents to watch."""

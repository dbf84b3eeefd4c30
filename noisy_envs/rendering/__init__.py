"""Images and videos of environments (pygame), the viewer, and trained agents to watch."""

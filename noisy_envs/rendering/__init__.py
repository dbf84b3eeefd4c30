"""Pictures: environments drawn by pygame, the viewer's window, films, and trained agents to be watched."""

"""Rendering: pictures by pygame, the viewer and its window, videos, and policies to watch."""

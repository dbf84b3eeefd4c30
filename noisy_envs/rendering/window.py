"""A window for pictures, and the keys pressed in it: all code for pygame's windows and events."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

if TYPE_CHECKING:
    import pygame


class Window:
    """Shows pictures of one size at a limited frame rate; it opens with the first picture.

    After a pygame.quit() anywhere in the program, the next picture opens a new window. A copy starts closed.

    Attributes:
        opened: pygame's window and clock, if the window is open.
        dismissed: whether the user has closed the window.
    """

    def __init__(self, title: str, size: tuple[int, int], fps: int) -> None:
        """Set title, width and height, and the maximum number of pictures per second; nothing opens yet."""
        self.title, self.size, self.fps = title, size, fps
        self.opened: tuple[pygame.Window, pygame.time.Clock] | None = None
        self.dismissed = False

    def show(self, picture: pygame.Surface) -> None:
        """Show a picture, wait until the next one is due, and check whether the user has closed the window."""
        import pygame

        window, clock = self._open()
        window.get_surface().blit(picture, (0, 0))
        window.flip()
        clock.tick(self.fps)
        for event in pygame.event.get((pygame.WINDOWCLOSE, pygame.MOUSEMOTION)):  # mouse motion fills the queue
            own = getattr(event, "window", None) is window
            if not own or event.type == pygame.WINDOWCLOSE:  # the program may wait for it too, see `key_events`
                pygame.event.post(event)
            if own and event.type == pygame.WINDOWCLOSE:
                self.close()
                self.dismissed = True

    def close(self) -> None:
        """Close the window; another picture opens a new one."""
        if self.opened is not None:
            self.opened[0].destroy()
        self.opened = None
        self.dismissed = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open window."""
        return {**self.__dict__, "opened": None, "dismissed": False}

    def _open(self) -> tuple[pygame.Window, pygame.time.Clock]:
        """Return the window and its clock; open one where there is none."""
        import pygame

        if self.opened is not None:
            return self.opened
        # without this, SDL turns SIGTERM into an event, and `kill` does not end the program
        os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")
        self.opened = pygame.Window(self.title, self.size), pygame.time.Clock()
        pygame.register_quit(partial(_forget, ref(self)))
        return self.opened


def _forget(window: ref[Window]) -> None:
    """Drop the window after a pygame.quit() anywhere: using it would read freed memory."""
    existing = window()
    if existing is not None:
        existing.opened = None


def key_events() -> list[tuple[str, bool]]:
    """Return the keys pressed (True) and released (False) since the last call, in order, by pygame's names.

    Closing a window counts as pressing "quit". All other events are dropped, so this is for programs without windows
    of their own.
    """
    import pygame

    keys = []
    for event in pygame.event.get():
        if event.type in (pygame.QUIT, pygame.WINDOWCLOSE):
            keys.append(("quit", True))
        elif event.type in (pygame.KEYDOWN, pygame.KEYUP):
            keys.append((pygame.key.name(event.key), event.type == pygame.KEYDOWN))
    return keys


def has_display() -> bool:
    """Tell whether a window would be visible; SDL also opens windows without a screen, silently."""
    if _no_screen():
        return False  # SDL would give the same answer, but after a warning from Wayland
    import pygame

    requested = os.environ.get("SDL_VIDEODRIVER")
    os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")
    try:
        pygame.display.init()
    except pygame.error:
        return False
    return bool(requested) or pygame.display.get_driver() != "offscreen"


@contextlib.contextmanager
def headless_pygame() -> Iterator[None]:
    """Select SDL's dummy driver where there is no screen, for code that would search for one and print warnings."""
    if not _no_screen():
        yield
        return
    os.environ["SDL_VIDEODRIVER"] = "dummy"
    try:
        yield
    finally:
        del os.environ["SDL_VIDEODRIVER"]


def _no_screen() -> bool:
    """Tell from the environment variables whether there is no screen."""
    variables = ("SDL_VIDEODRIVER", "DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform == "linux" and not any(map(os.environ.get, variables))

"""A window for pictures, and the keys that are pressed: what knows pygame's windows and events is here."""

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
    """Shows pictures of one size at a pace, and closes no window but its own; opens with the first picture.

    A pygame.quit() anywhere ends it; the next picture opens a new one. A copy begins afresh.
    """

    def __init__(self, title: str, size: tuple[int, int], fps: int) -> None:
        """Choose title, width and height, and the most pictures a second; nothing opens yet."""
        self.title, self.size, self.fps = title, size, fps
        self.opened: tuple[pygame.Window, pygame.time.Clock] | None = None
        self.dismissed = False  # the person closed it

    def show(self, picture: pygame.Surface) -> None:
        """Show a picture, wait until the next is due, and see whether the person closes the window."""
        import pygame

        window, clock = self._open()
        window.get_surface().blit(picture, (0, 0))
        window.flip()
        clock.tick(self.fps)
        for event in pygame.event.get((pygame.WINDOWCLOSE, pygame.MOUSEMOTION)):  # motion fills the queue
            own = getattr(event, "window", None) is window
            if not own or event.type == pygame.WINDOWCLOSE:  # which the program may wait for too, see `strokes`
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
        """Leave out what is open."""
        return {**self.__dict__, "opened": None, "dismissed": False}

    def _open(self) -> tuple[pygame.Window, pygame.time.Clock]:
        """Return the window and its clock; open one where there is none."""
        import pygame

        if self.opened is not None:
            return self.opened
        # without this, SDL turns SIGTERM into an event, and a run no longer obeys `kill`
        os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")
        self.opened = pygame.Window(self.title, self.size), pygame.time.Clock()
        pygame.register_quit(partial(_forget, ref(self)))
        return self.opened


def _forget(window: ref[Window]) -> None:
    """Let go of a window that a pygame.quit() anywhere has ended; touching it would read freed memory."""
    living = window()
    if living is not None:
        living.opened = None


def strokes() -> list[tuple[str, bool]]:
    """Return the keys pressed (True) and let go (False) since the last call, in order, by pygame's names of them.

    To close a window counts as a press of "quit". All other events are dropped: for programs with no windows but ours.
    """
    import pygame

    found = []
    for event in pygame.event.get():
        if event.type in (pygame.QUIT, pygame.WINDOWCLOSE):
            found.append(("quit", True))
        elif event.type in (pygame.KEYDOWN, pygame.KEYUP):
            found.append((pygame.key.name(event.key), event.type == pygame.KEYDOWN))
    return found


def has_display() -> bool:
    """Tell whether a window would be seen; SDL opens them without a screen too, and does not say so."""
    if _no_screen():
        return False  # SDL would come to the same, but not without a complaint of Wayland's
    import pygame

    asked = os.environ.get("SDL_VIDEODRIVER")
    os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")
    try:
        pygame.display.init()
    except pygame.error:
        return False
    return bool(asked) or pygame.display.get_driver() != "offscreen"


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Let others draw with pygame, who begin by looking for a screen: without one that ends in the same complaint."""
    if not _no_screen():
        yield
        return
    os.environ["SDL_VIDEODRIVER"] = "dummy"
    try:
        yield
    finally:
        del os.environ["SDL_VIDEODRIVER"]


def _no_screen() -> bool:
    """Tell whether the environment already says that there is none."""
    named = ("SDL_VIDEODRIVER", "DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform == "linux" and not any(map(os.environ.get, named))

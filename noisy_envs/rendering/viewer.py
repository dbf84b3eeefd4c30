"""The viewer: a window in which a baseline policy or a trained agent plays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from noisy_envs.arrays import Array
from noisy_envs.interfaces.episode import RENDER_FPS
from noisy_envs.registration import GAMES, find, noise_option, same_start
from noisy_envs.rendering.playback import Playback, add_noise
from noisy_envs.rendering.window import Window, key_events
from noisy_envs.validation import check_choice

if TYPE_CHECKING:
    import pygame

NOISE_STEP = 4  # tokens; the paper's levels of noise are multiples of it
END_HOLD_FRAMES = RENDER_FPS  # the end of an episode stays for a second
PANEL, MARGIN = 52, 16  # pixels: height of the panel below the picture, and space left of its text
MIN_WINDOW_WIDTH = 600  # pixels, which the panel's text needs
TEXT, INK, PAPER = 19, (30, 30, 30), (242, 242, 242)  # font height in pixels, and colours, of the panel


class Policy(Protocol):
    """Who acts in the episodes that are watched.

    Attributes:
        name: name to show.
        env_id: environment ID.
        env_kwargs: options of the environment, added to those of the ID.
        learners: the team of agents that the policy controls.
        seed: seed of the episodes, unless the user chooses another.
        overlay: what the weights are: "attention" or "saliency".
    """

    name: str
    env_id: str
    env_kwargs: dict[str, Any]
    learners: str
    seed: int
    overlay: str

    def act(self, playback: Playback) -> tuple[Array, Array | None]:
        """Return actions (n, ...) of the controlled agents, and weights (N,) of the first one's tokens, if any."""


class BaselinePolicy:
    """A baseline policy of the game, which controls the first agent.

    Args:
        name: one of the game's `game.policies`; in other Gymnasium environments "random".
        env_id: environment ID.
        noise: number of noise tokens; None for that of the ID. It moves no other entity.
        seed: seed of the episodes, and of the policy.

    Raises:
        ValueError: the game has no such policy.
    """

    learners, overlay = "first", "attention"

    def __init__(self, name: str, env_id: str, noise: int | None, seed: int) -> None:
        """Check the arguments; see the class."""
        check_choice("policy", name, baseline_names(env_id))
        self.name, self.env_id, self.seed = name, env_id, seed
        requested = {} if noise is None else {noise_option(env_id): noise}
        self.env_kwargs = requested | same_start(env_id, requested, (env_id, {}))
        self._generator = np.random.default_rng(seed)

    def act(self, playback: Playback) -> tuple[Array, None]:
        """Return the action (1, ...) of the first agent."""
        return playback.baseline_actions(self.name, self._generator), None


def baseline_names(env_id: str | None) -> tuple[str, ...]:
    """Return the names of an environment ID's baseline policies; none without an ID.

    Raises:
        ValueError: the environment ID is unknown.
    """
    if env_id is None:
        return ()
    game: Any = GAMES.get(find(env_id)[0])
    return ("random",) if game is None else game.policies


class Viewer:
    """A window in which a policy plays episodes; keys control it: space, s, r, + and −, q.

    Attributes:
        window: the window.
        playback: the environment being played.
        paused: whether the environment waits.
    """

    def __init__(self, policy: Policy, playback: Playback) -> None:
        """Prepare; `run` opens the window."""
        self.paused, self.playback = False, playback
        self._policy, self._closed, self._frames_held = policy, False, 0
        self._act()
        height, width, _ = self.picture().shape
        size = max(width, MIN_WINDOW_WIDTH), height + PANEL
        self.window = Window(f"{playback.env_id}: {policy.name}", size, RENDER_FPS)
        # fmt: off
        self._keys: dict[str, Callable[[], None]] = {
            "space": self._pause, "s": self._pause_and_step, "r": self._next_episode,
            **dict.fromkeys(("+", "=", "[+]"), partial(self._add_noise, NOISE_STEP)),
            **dict.fromkeys(("-", "[-]"), partial(self._add_noise, -NOISE_STEP)),
            **dict.fromkeys(("q", "escape", "quit"), self._quit),
        }
        # fmt: on

    def run(self) -> None:
        """Show episodes until the user closes the window."""
        try:
            while not self._closed:
                self.window.show(self._paint())
                commands = [self._keys[key] for key, down in key_events() if down and key in self._keys]
                for command in commands:
                    command()
                if not commands and not self.paused:
                    self._play_on()
                self._closed = self._closed or self.window.dismissed
        finally:
            self.window.close()

    def picture(self) -> Array:
        """Return an image (H, W, 3) uint8 of the environment, with the policy's weights for the action to come."""
        return self.playback.render(self._weights, self._policy.overlay)

    def captions(self) -> tuple[str, str]:
        """Return the two lines below the picture: what is shown, and what the keys do."""
        playback = self.playback
        status = [playback.env_id.removeprefix("noisy_envs/"), self._policy.name, f"episode {playback.episode}"]
        status.append(f"noise {playback.noise}")
        keys = ["space: pause", "s: step", "r: next episode", "+/-: noise", "q: quit"]
        if self.paused:
            status.append("paused")
        return "     ".join(status), "     ".join(keys)

    def _paint(self) -> pygame.Surface:
        """Paint picture and captions."""
        import pygame

        picture = self.picture()
        height, width, _ = picture.shape
        canvas = pygame.Surface(self.window.size, depth=32)
        canvas.fill(PAPER)
        left = (canvas.get_width() - width) // 2
        canvas.blit(pygame.image.frombuffer(picture.tobytes(), (width, height), "RGB"), (left, 0))
        pygame.font.init()  # Gymnasium's environments may have quit it
        font = pygame.font.Font(None, TEXT)
        for line, text in enumerate(self.captions()):
            caption = font.render(text, True, INK)
            canvas.blit(caption, caption.get_rect(midleft=(MARGIN, height + (2 * line + 1) * PANEL // 4)))
        return canvas

    def _play_on(self) -> None:
        """Play a step, or hold the end of an episode for a while before the next one starts."""
        self._frames_held = self._frames_held + 1 if self.playback.done else 0
        if not 0 < self._frames_held < END_HOLD_FRAMES:
            self._step()

    def _step(self) -> None:
        """Play a step; after the end of an episode start the next."""
        if self.playback.done:
            self._next_episode()
            return
        self.playback.step(self._actions)
        self._act()

    def _next_episode(self) -> None:
        self.playback.reset(self.playback.episode + 1)
        self._act()

    def _add_noise(self, number: int) -> None:
        """Start the episode again with more noise tokens, if they fit."""
        # the old environment is not closed: Gymnasium's own would quit pygame, and with it our window
        self.playback, old = add_noise(self.playback, number), self.playback
        if self.playback is not old:
            self._act()

    def _act(self) -> None:
        """Ask the policy for its next actions now, so that the picture shows the weights that lead to them."""
        self._actions, self._weights = self._policy.act(self.playback)

    def _pause(self) -> None:
        self.paused = not self.paused

    def _pause_and_step(self) -> None:
        self.paused = True
        self._step()

    def _quit(self) -> None:
        self._closed = True

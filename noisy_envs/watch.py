"""Watching: episodes of one world, played by a reference policy or a trained agent, in a window or as a film."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from noisy_envs.arrays import Array
from noisy_envs.cores import Core
from noisy_envs.options import Count, build, check_choice, highest
from noisy_envs.registry import CORES, ENVIRONMENTS, NOISE
from noisy_envs.shells.common import casting, driven, follow
from noisy_envs.shells.episode import RENDER_FPS, Episode
from noisy_envs.window import Window, strokes

if TYPE_CHECKING:
    import pygame

Picture = Array

NOISE_STEP = 4  # tokens; the paper's levels of noise are multiples of it
HOLD = RENDER_FPS  # pictures for which the end of an episode stays: a second
PANEL, MARGIN = 52, 16  # pixels of height below the picture, and left of its words
TEXT, INK, PAPER = 19, (30, 30, 30), (242, 242, 242)  # height and colours of the panel's words


class Player(Protocol):
    """Who acts in the episodes that are watched."""

    name: str
    team: str  # of the agents that it drives, or "first"
    options: dict[str, Any]  # of the environment, beside the id's own
    seed: int  # of its episodes, unless another is asked for

    def act(self, core: Core, state: Any, agents: slice) -> tuple[Array, Array | None]:
        """Return actions (1, n, ...) of n agents in a batch of one world, and the first one's weights (N,), if any."""


class Reference:
    """A reference policy of the game, which drives the first agent.

    Args:
        name: one of the game's `core.policies`.
        env_id: an id of this package.
        noise: how many noise tokens, if not as many as the id has.
        seed: of its episodes, and of what it draws itself.

    Raises:
        ValueError: the game has no such policy, or no noise to choose.
    """

    team = "first"

    def __init__(self, name: str, env_id: str, noise: int | None, seed: int) -> None:
        """Check what is asked for; see the class."""
        game, _ = ENVIRONMENTS[env_id]
        core: Any = CORES[game]
        check_choice("policy", name, core.policies)
        if noise is not None and game not in NOISE:
            noisy = ", ".join(known for known in CORES if known in NOISE)
            raise ValueError(f"num_noise={noise}: {env_id} has none, only {noisy}")
        self.name, self.seed = name, seed
        self.options = {} if noise is None else {NOISE[game]: noise}
        self._random = np.random.default_rng(seed)

    def act(self, core: Core, state: Any, agents: slice) -> tuple[Array, None]:
        """Return actions (1, 1, ...) of the first agent."""
        shape = (1, 1, core.num_actions) if core.continuous_actions else (1, 1)
        return core.policy(self.name, state, self._random.random(shape, dtype=np.float32), agents), None


class Show:
    """Episodes of one world, step by step.

    Args:
        env_id: an id of this package.
        player: who acts.
        seed: of the episodes; with this and their number the environment plays the same.

    Attributes:
        episode: what is played now.
    """

    def __init__(self, env_id: str, player: Player, seed: int) -> None:
        """Begin the first episode; see the class."""
        game, parameters = ENVIRONMENTS[env_id]
        self.env_id, self.player = env_id, player
        self._game, self._dial, self._seed = game, NOISE.get(game), seed
        self._options = parameters | player.options
        self._begin(0)

    @property
    def noise(self) -> Count | None:
        """How many noise tokens there are, or the range they are drawn from; None where the game has no such option."""
        return None if self._dial is None else getattr(self.episode.core, self._dial)

    def picture(self) -> Picture:
        """Return an image (H, W, 3) uint8, with a halo for each token where the player weighs them."""
        picture: Any = self.episode.draw(self._weights)
        return picture

    def step(self) -> None:
        """Play a step; after the end of an episode begin the next."""
        episode = self.episode
        if episode.ended:
            self.restart()
            return
        chance = episode.chance()
        episode.advance(follow(episode.core, self._cast, episode.state, self._action, chance), chance)
        self._look()

    def restart(self) -> None:
        """Begin the next episode."""
        self.episode.begin(None, None)
        self._look()

    def add_noise(self, number: int) -> None:
        """Begin the episode of this number anew with so many more noise tokens; in a game without them do nothing."""
        if self._dial is not None and self.noise is not None:
            self._options[self._dial] = max(0, highest(self.noise) + number)
            self._begin(self.episode.number)

    def _begin(self, number: int) -> None:
        core = build(CORES[self._game], self._options)
        self._agents = driven(core, self.player.team, ("first", *core.teams))
        self._cast = casting(core, self._agents)
        self.episode = Episode(core, self._agents, "rgb_array")
        self.episode.begin(self._seed, {"episode": number})
        self._look()

    def _look(self) -> None:
        """Let the player decide, so that a picture shows the weights of the action to come."""
        episode = self.episode
        self._action, self._weights = self.player.act(episode.core, episode.state, self._agents)


def film(show: Show) -> list[Picture]:
    """Return the pictures of an episode, from the present to its end."""
    pictures = [show.picture()]
    while not show.episode.ended:
        show.step()
        pictures.append(show.picture())
    return pictures


class Viewer:
    """A window on a show, steered by keys: space, s, r, + and −, q.

    Attributes:
        window: where it is shown.
        paused: whether the world waits.
    """

    def __init__(self, show: Show) -> None:
        """Prepare; `run` opens the window."""
        height, width, _ = show.picture().shape
        self.window = Window(f"{show.env_id}: {show.player.name}", (width, height + PANEL), RENDER_FPS)
        self.paused = False
        self._show, self._over, self._held = show, False, 0
        # fmt: off
        self._keys: dict[str, Callable[[], None]] = {
            "space": self._pause, "s": self._step, "r": show.restart,
            **dict.fromkeys(("+", "=", "[+]"), partial(show.add_noise, NOISE_STEP)),
            **dict.fromkeys(("-", "[-]"), partial(show.add_noise, -NOISE_STEP)),
            **dict.fromkeys(("q", "escape", "quit"), self._quit),
        }
        # fmt: on

    def run(self) -> None:
        """Show episodes until the person has seen enough."""
        try:
            while not self._over:
                self.window.show(self._paint())
                pressed = [self._keys[key] for key, down in strokes() if down and key in self._keys]
                for act in pressed:
                    act()
                if not pressed and not self.paused:
                    self._go_on()
                self._over = self._over or self.window.dismissed
        finally:
            self.window.close()

    def words(self) -> tuple[str, str]:
        """Return what stands below the picture: what is shown, and what the keys do."""
        show = self._show
        told = [show.env_id.removeprefix("noisy_envs/"), show.player.name, f"episode {show.episode.number}"]
        keys = ["space: pause", "s: step", "r: next episode", "q: quit"]
        if show.noise is not None:
            told.append(f"noise {show.noise}")
            keys.insert(-1, "+/-: noise")
        if self.paused:
            told.append("paused")
        return "     ".join(told), "     ".join(keys)

    def _paint(self) -> pygame.Surface:
        """Paint picture and words."""
        import pygame

        picture = self._show.picture()
        height, width, _ = picture.shape
        canvas = pygame.Surface((width, height + PANEL), depth=32)
        canvas.fill(PAPER)
        canvas.blit(pygame.image.frombuffer(picture.tobytes(), (width, height), "RGB"), (0, 0))
        font = pygame.font.Font(None, TEXT)
        for line, text in enumerate(self.words()):
            words = font.render(text, True, INK)
            canvas.blit(words, words.get_rect(midleft=(MARGIN, height + (2 * line + 1) * PANEL // 4)))
        return canvas

    def _go_on(self) -> None:
        """Play a step, once the end of an episode has been shown for a while."""
        self._held = self._held + 1 if self._show.episode.ended else 0
        if not 0 < self._held < HOLD:
            self._show.step()

    def _pause(self) -> None:
        self.paused = not self.paused

    def _step(self) -> None:
        self.paused = True
        self._show.step()

    def _quit(self) -> None:
        self._over = True

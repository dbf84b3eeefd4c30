"""Watching: episodes of one world, played by a reference policy or a trained agent, in a window or as a film."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from noisy_envs.arrays import Array
from noisy_envs.games.game import Game
from noisy_envs.interfaces.episode import RENDER_FPS, Episode
from noisy_envs.interfaces.scripted import assign_policies, complete_actions, controlled_agents
from noisy_envs.registration import GAMES, NOISE, OTHER, find, join_names, same_start
from noisy_envs.rendering.window import Window, strokes
from noisy_envs.training.gymnasium_envs import GymnasiumGame, OneForeign
from noisy_envs.validation import Count, build, check_choice, highest

if TYPE_CHECKING:
    import pygame

Picture = Array

NOISE_STEP = 4  # tokens; the paper's levels of noise are multiples of it
HOLD = RENDER_FPS  # pictures for which the end of an episode stays: a second
PANEL, MARGIN = 52, 16  # pixels of height below the picture, and left of its words
LEAST = 600  # pixels of the window's width, which the words need
TEXT, INK, PAPER = 19, (30, 30, 30), (242, 242, 242)  # height and colours of the panel's words


class Player(Protocol):
    """Who acts in the episodes that are watched."""

    name: str
    env_id: str
    team: str  # of the agents that it drives, or "first"
    options: dict[str, Any]  # of the environment, beside the id's own
    seed: int  # of its episodes, unless another is asked for
    meaning: str  # of the weights that it gives: "weight" or "influence"

    def act(self, game: Game, state: Any, agents: slice) -> tuple[Array, Array | None]:
        """Return actions (1, n, ...) of n agents in a batch of one world, and the first one's weights (N,), if any."""

    def act_in(self, world: OneForeign) -> tuple[Any, Array | None]:
        """Return an action that an environment of others takes, and the weights (N,) of its tokens, if any."""


class Watched(Protocol):
    """Episodes of one world, step by step: `Show` and `ForeignShow`."""

    env_id: str
    player: Player
    episode: Any  # with `number`, `clock`, `ended` and `total_return`

    @property
    def noise(self) -> Count | None:
        """How many noise tokens there are, or the range they are drawn from; None where the game has no such option."""

    def picture(self) -> Picture:
        """Return an image (H, W, 3) uint8, with the weight of each token where the player weighs them."""

    def signal_share(self) -> float | None:
        """Return which share of these weights signal has; None where the player weighs nothing."""

    def step(self) -> None:
        """Play a step; after the end of an episode begin the next."""

    def restart(self) -> None:
        """Begin the next episode."""

    def add_noise(self, number: int) -> None:
        """Begin the episode of this number anew with so many more noise tokens; in a game without them do nothing."""


class Reference:
    """A reference policy, which drives the first agent; in other Gymnasium environments there is "random" alone.

    Args:
        name: one of the game's `game.policies`.
        env_id: any id.
        noise: how many noise tokens, if not as many as the id has; nobody else starts elsewhere by it.
        seed: of its episodes, and of what it draws itself.

    Raises:
        ValueError: the game has no such policy, or no noise to choose.
    """

    team, meaning = "first", "weight"

    def __init__(self, name: str, env_id: str, noise: int | None, seed: int) -> None:
        """Check what is asked for; see the class."""
        game, _ = find(env_id)
        check_choice("policy", name, policies(env_id))
        if noise is not None and game not in NOISE:
            raise ValueError(f"num_noise={noise}: {env_id} has none, only {join_names(NOISE)}")
        self.name, self.env_id, self.seed = name, env_id, seed
        asked = {} if noise is None else {NOISE[game]: noise}
        self.options = asked | same_start(env_id, asked, (env_id, {}))
        self._random = np.random.default_rng(seed)

    def act(self, game: Game, state: Any, agents: slice) -> tuple[Array, None]:
        """Return actions (1, 1, ...) of the first agent."""
        shape = (1, 1, game.num_actions) if game.continuous_actions else (1, 1)
        return game.policy(self.name, state, self._random.random(shape, dtype=np.float32), agents), None

    def act_in(self, world: OneForeign) -> tuple[Any, None]:
        """Return an action that the space draws, by a seed of ours."""
        world.action_space.seed(int(self._random.integers(2**31)))
        return world.action_space.sample(), None


def policies(env_id: str | None) -> tuple[str, ...]:
    """Return the names of an id's reference policies; there are none without an id.

    Raises:
        ValueError: nobody knows the id.
    """
    if env_id is None:
        return ()
    game: Any = GAMES.get(find(env_id)[0])
    return ("random",) if game is None else game.policies


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
        game, parameters = find(env_id)
        self.env_id, self.player = env_id, player
        self._game, self._dial, self._seed = game, NOISE.get(game), seed
        self._options = parameters | player.options
        self._begin(0)

    @property
    def noise(self) -> Count | None:
        """How many noise tokens there are, or the range they are drawn from; None where the game has no such option."""
        return None if self._dial is None else getattr(self.episode.game, self._dial)

    def picture(self) -> Picture:
        """Return an image (H, W, 3) uint8, with a halo for each token where the player weighs them."""
        picture: Any = self.episode.draw(self._weights, self.player.meaning)
        return picture

    def signal_share(self) -> float | None:
        """Return which share of these weights signal has; None where the player weighs nothing."""
        game, state = self.episode.game, self.episode.state
        return share(self._weights, game.signal_mask(game.observe(state, self._agents)[0])[0])

    def step(self) -> None:
        """Play a step; after the end of an episode begin the next."""
        episode = self.episode
        if episode.ended:
            self.restart()
            return
        randomness = episode.step_randomness()
        episode.advance(
            complete_actions(episode.game, self._assignment, episode.state, self._action, randomness), randomness
        )
        self._look()

    def restart(self) -> None:
        """Begin the next episode."""
        self.episode.begin(None, None)
        self._look()

    def add_noise(self, number: int) -> None:
        """Begin the episode of this number anew with so many more noise tokens; in a game without them do nothing."""
        if self._dial is not None and self.noise is not None:
            asked = self._options | {self._dial: max(0, highest(self.noise) + number)}
            self._options = asked | same_start(self.env_id, asked, (self.env_id, self._options))
            self._begin(self.episode.number)

    def _begin(self, number: int) -> None:
        game = build(GAMES[self._game], self._options)
        self._agents = controlled_agents(game, self.player.team, ("first", *game.teams))
        self._assignment = assign_policies(game, self._agents)
        self.episode = Episode(game, self._agents, "rgb_array")
        self.episode.begin(self._seed, {"episode": number})
        self._look()

    def _look(self) -> None:
        """Let the player decide, so that a picture shows the weights of the action to come."""
        episode = self.episode
        self._action, self._weights = self.player.act(episode.game, episode.state, self._agents)


class ForeignShow:
    """Episodes of one world of an environment of others, step by step; the weights are bars under its picture.

    Args and attributes are those of `Show`; episode n is that of seed + n.
    """

    def __init__(self, env_id: str, player: Player, seed: int) -> None:
        """Begin the first episode; see the class."""
        self.env_id, self.player, self._seed = env_id, player, seed
        self._begin(GymnasiumGame(env_id, player.options), 0)

    @property
    def noise(self) -> Count:
        """How many noise tokens there are, or the range they are drawn from."""
        noise: Count = self._game.num_noise
        return noise

    def picture(self) -> Picture:
        """Return an image (H, W, 3) uint8."""
        return self.episode.render(self._weights, self.player.meaning)

    def signal_share(self) -> float | None:
        """Return which share of these weights signal has; None where the player weighs nothing."""
        return share(self._weights, self.episode.signal)

    def step(self) -> None:
        """Play a step; after the end of an episode begin the next."""
        if self.episode.ended:
            self.restart()
            return
        self.episode.play(self._action)
        self._look()

    def restart(self) -> None:
        """Begin the next episode."""
        self.episode.reset(self._seed, self.episode.number + 1)
        self._look()

    def add_noise(self, number: int) -> None:
        """Begin the episode of this number anew with so many more noise tokens."""
        noise = max(0, highest(self.noise) + number)
        # what was played before is not closed: Gymnasium's own games would end pygame, and our window with it
        self._begin(GymnasiumGame(self.env_id, {**self._game.options, "num_noise": noise}), self.episode.number)

    def _begin(self, game: GymnasiumGame, number: int) -> None:
        if not game.draws:
            raise ValueError(f"watch={self.env_id!r}: it cannot be drawn as an image")
        self._game, self.episode = game, OneForeign(game)
        self.episode.reset(self._seed, number)
        self._look()

    def _look(self) -> None:
        """Let the player decide, so that a picture shows the weights of the action to come."""
        self._action, self._weights = self.player.act_in(self.episode)


def show_of(player: Player, seed: int) -> Watched:
    """Return a player's episodes of `seed`."""
    foreign = find(player.env_id)[0] == OTHER
    return (ForeignShow if foreign else Show)(player.env_id, player, seed)


def share(weights: Array | None, signal: Array) -> float | None:
    """Return which share of weights (N,) or (w, w) signal has, bool of as many; None without weights."""
    return None if weights is None else float(weights.ravel() @ signal.ravel() / (weights.sum() or 1.0))


class Film(NamedTuple):
    """An episode that was watched."""

    pictures: list[Picture]
    signal_share: float | None  # of the weights, a mean over the pictures


def film(show: Watched) -> Film:
    """Watch an episode, from the present to its end."""
    pictures, shares = [show.picture()], [show.signal_share()]
    while not show.episode.ended:
        show.step()
        pictures.append(show.picture())
        shares.append(show.signal_share())
    known = [one for one in shares if one is not None]
    return Film(pictures, sum(known) / len(known) if known else None)


class Viewer:
    """A window on a show, steered by keys: space, s, r, + and −, q.

    Attributes:
        window: where it is shown.
        paused: whether the world waits.
    """

    def __init__(self, show: Watched) -> None:
        """Prepare; `run` opens the window."""
        height, width, _ = show.picture().shape
        width = max(width, LEAST)
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
        canvas = pygame.Surface(self.window.size, depth=32)
        canvas.fill(PAPER)
        left = (canvas.get_width() - width) // 2
        canvas.blit(pygame.image.frombuffer(picture.tobytes(), (width, height), "RGB"), (left, 0))
        pygame.font.init()  # others' games may have ended it
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

"""BoxWorld (paper, section 4.4; Zambaldi et al. 2018): open a chain of boxes with matching keys to reach the gem.

`B` environments, at most `K` boxes, `M = 2 + 2K` objects, pictures of `w` × `w` cells, `N` tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import repeat
from typing import Any, ClassVar, NamedTuple

import numpy as np

from noisy_envs.arrays import Array, as_numpy, gather_rows, namespace, outside_inference_mode
from noisy_envs.games import box_world_levels, box_world_noise
from noisy_envs.games.box_world_levels import (
    ABSENT,
    AGENT,
    CORNER,
    EMPTY,
    FRAME,
    GEM,
    Level,
    LevelCache,
    LevelConfig,
)
from noisy_envs.games.box_world_noise import NoiseConfig
from noisy_envs.games.single_agent import SingleAgentGame
from noisy_envs.randomness import MAX_SEED
from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import (
    Count,
    check_choice,
    check_count,
    check_fields,
    check_number,
    highest,
    lowest,
    plain,
    unexpected,
)

# outcomes of a step; SOLVED and DEAD_END end the episode
MOVED, BLOCKED, TOOK_KEY, OPENED_BOX, SOLVED, DEAD_END = range(6)
MIN_KNOWN_RATIO, LEVELS_AT_ONCE = 100, 4096  # see `known_share`
KEY_REWARD, BOX_REWARD, GEM_REWARD, DISTRACTOR_REWARD = 1.0, 1.0, 10.0, -1.0
PALETTE = np.array([
    (0, 0, 117), (230, 190, 255), (170, 255, 195), (255, 250, 200), (255, 216, 177), (250, 190, 190), (240, 50, 230),
    (145, 30, 180), (67, 99, 216), (66, 212, 244), (60, 180, 75), (191, 239, 69), (255, 255, 25), (245, 130, 49),
    (230, 25, 75), (128, 0, 0), (154, 99, 36), (128, 128, 0), (70, 153, 144),  # keys and locks
    (255, 255, 255), (128, 128, 128), (220, 220, 220), (0, 0, 0), (0, 0, 0),  # gem, agent, empty, frame, absent
    (220, 100, 140),  # clutter, see `BoxWorld.signal_mask`
], np.uint8)  # fmt: skip


class State(NamedTuple):
    """States of B environments, int64. Cells are numbered row by row over the picture: field and frame."""

    objects: Array  # (B, M, 2) cell, colour: agent, key (cell 0 if held), content and lock of each box; absent last
    box_outcomes: Array  # (B, K) outcome of opening each box: OPENED_BOX, SOLVED or DEAD_END; 0 for absent boxes
    size: Array  # (B,) cells along a side of the field
    level: Array  # (B,) number of the level, −1 for one given as text
    outcome: Array  # (B,) of the last step
    noise: Array  # (B, T, 2) cell, colour of noise tokens, see `noisy_envs.games.box_world_noise`


@dataclass(frozen=True)
class BoxWorld(SingleAgentGame):
    """The agent must open a chain of boxes with keys to reach the gem; distractor boxes are dead ends.

    ## Description
    A grid holds the agent, a loose key and boxes. A box occupies two cells of a row: the content (a key or the gem) on
    the left, the lock on the right. Moving onto the loose key picks it up. Moving onto a lock with the held key's
    colour opens the box: the content replaces the held key, and both cells become free. One chain of boxes leads from
    the loose key to the gem. A distractor branches off: its first lock fits a key of the chain, but its keys do not
    lead to the gem. In the paper's game (`goal_length` 2) the loose key opens all three boxes, and only the contents
    show which is right; real chains need `goal_length` 3. The oracle follows a shortest solution.

    ## Noise
    `num_noise` adds noise entities to each level. They lie on cells that the level leaves free, and change neither the
    level nor its rewards. By which cue they can be found depends on two options:

    | `noise_role` | `noise_motion` | noise | cue |
    |---|---|---|---|
    | "own" | "still" | clutter in a colour of its own | colour |
    | "own" | "wander" | the same, moving | colour, motion |
    | "signal" | "wander" | clutter in the colours of keys, locks and gem | motion |
    | "signal" | "still" | decoys: loose keys, and boxes | logic: what opens what |

    Clutter occupies one cell and blocks nothing. If it wanders, it moves at each step to a random neighbouring cell,
    unless an object of the level or the border is there. Objects hide clutter on their cell. A single token tells
    nothing about clutter in the colours of signal; in one step it differs in that it is no part of a box.

    Decoys are alternately a key and a box; where no box fits, a key. No decoy key has the colour of a lock, and no key
    that can be held opens a decoy box, though the gem may be inside. Decoy boxes block like others, keep the distance
    of other boxes and leave all free cells connected: every level can be solved, though the way may be longer. An agent
    without a real key picks up decoy keys, which earns nothing; a held decoy is lost to the next key. An agent that
    holds a real key walks over decoys, so that no real key is lost.

    The first entities do not change when more are added. In "entities" noise comes last, so an agent that uses the
    order of tokens can tell it; an agent that pools them cannot.

    ## Action Space
    `Discrete(4)`: up, down, left, right. Moves off the grid, onto a content, or onto a lock whose colour differs from
    the held key's are blocked: the agent stays.

    ## Observation Space
    `observation="entities"`: `Box((2 + 2K + T, 5), float32)`, for at most K boxes and T noise tokens: one for each
    clutter entity, two for each decoy, of which a key leaves one as padding. `"pixels"`: `Box((size² + 1, 5),
    float32)`, the same game with many more noise tokens. A token is red, green, blue in [0, 1], and row and column
    relative to the agent, divided by size + 1. Order:

    | index | entities | pixels |
    |---|---|---|
    | 0 | the agent | the agent's cell |
    | 1 | the key: loose, or held, in the corner of the frame | the corner of the frame: the held key, or black |
    | then | content and lock of each box, boxes row by row | the other cells, row by row |
    | then | padding: −1, −1, −1, −1, −1 | the same, if `size` is a range |
    | last | noise, or padding | |

    `"rgb"`: `Box((size + 2, size + 2, 3), uint8)`, a picture of the grid in a black frame, whose top left cell shows
    the held key; smaller levels are placed at the top left. There is no `token_spec`, and `signal_mask` is
    (size + 2, size + 2).

    Positions are relative, as in the paper. "entities" therefore do not show the borders of the grid, and a level with
    a loose key can look like another one with a held key. `info["signal_mask"]` marks the agent, keys, locks and the
    gem, but neither empty cells nor noise.

    The agent is (128, 128, 128), the gem (255, 255, 255), empty cells (220, 220, 220), clutter (220, 100, 140); keys
    and locks have 19 other colours. In text `%` is noise.

    ## Rewards
    +1 for the loose key and each box of the chain, +10 for the box with the gem, −1 for a distractor box, minus
    `step_cost` at each step and `blocked_cost` for each blocked move. The optimal return is goal_length − 1 + 10.

    ## Starting State
    A level drawn uniformly from `start_level` … `start_level + num_levels − 1`. Objects are at random places, but boxes
    share no edge with each other or the loose key, and all free cells are connected, so that every level can be solved,
    though maybe not within `max_steps`. A number gives the same level on every machine. Small grids with one box have
    few distinct levels (2,280 for size 3): different numbers can give the same level, see `BoxWorld.known_share`.

    ## Episode End
    An episode terminates when the box with the gem (`info["is_success"]` is True) or a distractor box is opened.
    Otherwise it is truncated after `max_steps`.

    ## Arguments
    * `observation`: "entities", "pixels" or "rgb".
    * `size`: width and height of the grid, 3 to 32. This and the next three options are a number, or a range
      (low, high) from which each level draws.
    * `goal_length`: length of the chain, at least 2: the loose key and goal_length − 1 boxes, the last with the gem.
    * `num_distractors`: number of distractors.
    * `distractor_length`: number of boxes in each distractor.
    * `start_level`, `num_levels`: first number and count of the levels. Train and evaluate on disjoint sets.
    * `step_cost`, `blocked_cost`: subtracted from the reward at each step, for each blocked move.
    * `max_steps`: time limit, by default the paper's; Gymnasium's `max_episode_steps` can only shorten it. Raise it
      with `size` and `goal_length`: with `goal_length=6` the oracle's return is 8.5 of 15 in 30 steps, and 15 in 200.
    * `num_noise`: number of noise entities, or a range (low, high) from which each level draws.
    * `noise_role`: "own", or "signal".
    * `noise_motion`: "still", or "wander"; see "Noise".

    A level has goal_length − 1 + num_distractors · distractor_length boxes: at most 1 for sizes 3 and 4, 5 for 5 and 6,
    7 for 7, 11 for 8, 14 for 9 and 10, and 19, the number of colours, from 11 on. In a range the smallest size counts.
    Noise takes at most size² − 2 − 2 · boxes cells, of which a decoy takes two; decoys allow at most 17 boxes.

    `reset` accepts `options={"level": n}`, a level with any number, and `options={"state": {"text": ...}}`, a level
    drawn in characters, see `noisy_envs.games.box_world_levels.read`.

    ## Differences
    From the paper's code: the number of distractors is exactly `num_distractors`, not drawn from 0 to 2; the positions
    of boxes are independent of their roles; the agent's token is always first, the key second, and neither can be
    confused with padding; the time limit is not one step late; truncation and termination are distinguished; longer
    distractors have a chain of colours. From Zambaldi et al. 2018: the content replaces the key as soon as the lock
    opens; the grid is 7×7, not 14×14.

    ## Version History
    * v0: first version.
    """

    observation: str = "entities"
    size: Count = 7
    goal_length: Count = 2
    num_distractors: Count = 2
    distractor_length: Count = 1
    start_level: int = 0
    num_levels: int = 100_000
    step_cost: float = 0.0
    blocked_cost: float = 0.0
    max_steps: int = 30
    num_noise: Count = 0
    noise_role: str = "own"
    noise_motion: str = "still"

    name: ClassVar[str] = "box_world"
    num_actions: ClassVar[int] = 4
    terminates: ClassVar[bool] = True
    render_modes: ClassVar[tuple[str, ...]] = ("human", "rgb_array", "ansi")
    policies: ClassVar[tuple[str, ...]] = ("random", "oracle")
    reset_options: ClassVar[tuple[str, ...]] = ("level",)
    num_reset_uniforms: ClassVar[tuple[int, ...]] = (2,)

    def __post_init__(self) -> None:
        """Validate the options.

        Raises:
            ValueError, TypeError: naming the option, its value and what is expected.
        """
        for name, value in vars(self).copy().items():
            object.__setattr__(self, name, plain(value))
        check_choice("observation", self.observation, ("entities", "pixels", "rgb"))
        NoiseConfig(self.num_noise, self.noise_role, self.noise_motion).check(
            LevelConfig(self.size, self.goal_length, self.num_distractors, self.distractor_length)
        )
        check_count("start_level", self.start_level, minimum=0, may_be_range=False)
        # a level is drawn by two uniforms of 24 bits
        check_count("num_levels", self.num_levels, minimum=1, may_be_range=False, maximum=2**48)
        check_count("max_steps", self.max_steps, minimum=1, may_be_range=False)
        if self.start_level + self.num_levels > MAX_SEED:
            raise unexpected("start_level", self.start_level, f"at most {MAX_SEED} - num_levels")
        for option in ("step_cost", "blocked_cost"):
            check_number(option, getattr(self, option))

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle the options only; cached values are recomputed."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @cached_property
    def level_config(self) -> LevelConfig:
        """Sizes of a level."""
        return LevelConfig(self.size, self.goal_length, self.num_distractors, self.distractor_length)

    @cached_property
    def noise_config(self) -> NoiseConfig:
        """Number and kind of noise entities."""
        return NoiseConfig(self.num_noise, self.noise_role, self.noise_motion)

    @cached_property
    def num_noise_tokens(self) -> int:
        """Largest number of noise tokens, T."""
        return self.noise_config.num_tokens

    @cached_property
    def num_step_uniforms(self) -> tuple[int, ...]:
        """Random numbers of a step: one for each noise entity that moves."""
        return (self.num_noise_tokens,) if self.noise_config.wanders else ()

    @cached_property
    def level_cache(self) -> LevelCache:
        """Rows of levels by number, as `_draw_row` returns them."""
        length = self.level_length + 2 * self.num_noise_tokens
        return LevelCache(self.start_level, self.num_levels, length, self._draw_row)

    @cached_property
    def level_length(self) -> int:
        """Length of a level's row without noise."""
        return 1 + self.num_boxes + 2 * self.num_objects

    @cached_property
    def width(self) -> int:
        """Width of the picture in cells, w."""
        return self.level_config.width

    @cached_property
    def num_boxes(self) -> int:
        """Largest number of boxes, K."""
        return self.level_config.max_boxes

    @cached_property
    def num_objects(self) -> int:
        """Largest number of objects: agent, key, contents and locks; M."""
        return 2 + 2 * self.num_boxes

    @cached_property
    def nowhere(self) -> int:
        """Cell of absent objects, the last one of the frame."""
        return self.width * self.width - 1

    @cached_property
    def pads_pixels(self) -> bool:
        """Whether pictures can be larger than the level."""
        return lowest(self.size) < highest(self.size)

    @cached_property
    def token_spec(self) -> TokenSpec:
        """Meaning of an observation; AttributeError for pictures."""
        if self.observation == "rgb":
            raise AttributeError("observation='rgb' has no tokens: use 'entities' or 'pixels'")
        entities = self.num_objects + self.num_noise_tokens
        num_tokens = entities if self.observation == "entities" else highest(self.size) ** 2 + 1
        padded = self.observation == "entities" or self.pads_pixels  # an opened box leaves padding
        return TokenSpec(num_tokens, ("red", "green", "blue", "row", "column"), {}, padding_feature=0, padded=padded)

    @cached_property
    def observation_bounds(self) -> tuple[Array, Array]:
        """Lowest and highest values of an observation, as arrays of its shape and dtype."""
        if self.observation == "rgb":
            shape = self.width, self.width, 3
            return np.zeros(shape, np.uint8), np.full(shape, 255, np.uint8)
        ones = np.ones((self.token_spec.num_tokens, self.token_spec.num_features), np.float32)
        low = -ones
        if not self.token_spec.padded:
            low[:, :3] = 0  # tight bounds: wrappers must see that no token can equal padding
        return low, ones

    def initial(self, u: tuple[Array, ...]) -> State:
        """Draw levels by uniforms (B, 2) of 24 bits each."""
        words = namespace(u[0]).astype(u[0] * 2.0**24, namespace(u[0]).int64)
        numbers = self.start_level + ((words[:, 0] << 24) + words[:, 1]) % self.num_levels
        table = self._cache.get(words.device, {}).get("levels")
        if table is not None:
            return self._unpack(table[numbers - self.start_level], numbers)
        return self._state_of_levels(as_numpy(numbers), like=words)

    def prepare(self, like: Array) -> None:
        """Cache all levels on the device of `like`, so that `initial` does not wait for the host.

        Raises:
            ValueError: too many levels.
        """
        check_count("num_levels", self.num_levels, minimum=1, maximum=box_world_levels.MAX_CACHED_LEVELS)
        table = self.tables(like)
        if "levels" not in table:
            rows = self.level_cache.rows(self.start_level + np.arange(self.num_levels))
            with outside_inference_mode(like):
                table["levels"] = namespace(like).asarray(rows, device=like.device)

    def _state_of_levels(self, numbers: np.ndarray, like: Array) -> State:
        """Return the levels `numbers` (B,) as states in the library and on the device of `like`."""
        rows = self.level_cache.rows(numbers)
        if isinstance(like, np.ndarray):
            return self._unpack(rows, numbers)
        return self._unpack(*(namespace(like).asarray(x, device=like.device, copy=True) for x in (rows, numbers)))

    def _unpack(self, rows: Array, numbers: Array) -> State:
        """Turn rows (B, ...) of `_draw_row` into starting states."""
        first, end = 1 + self.num_boxes, self.level_length  # columns of the objects
        objects, box_outcomes = rows[:, first:end].reshape(-1, self.num_objects, 2), rows[:, 1:first]
        outcome = namespace(rows).where(objects[:, 1, 1] == GEM, SOLVED, MOVED)
        noise = rows[:, end:].reshape(rows.shape[0], self.num_noise_tokens, 2)
        return State(objects, box_outcomes, rows[:, 0], numbers, outcome, noise)

    def _draw_row(self, number: int) -> list[int]:
        """Draw a level and its noise as a row of integers."""
        level = box_world_levels.draw_level(self.level_config, number)
        return self._pack(level) + self._pack_noise(level, number)

    def _pack_noise(self, level: Level, number: int) -> list[int]:
        """Draw the noise of a level as integers."""
        return [x for token in self.noise_config.draw(level, self.width, number) for x in token]

    def _pack(self, level: Level) -> list[int]:
        """Turn a level into a row of integers: size, box outcomes, objects."""
        path = box_world_levels.on_path(level.boxes)
        missing = self.num_boxes - len(level.boxes)
        row = [level.size]
        for box in level.boxes:
            row.append(SOLVED if box.content == GEM else OPENED_BOX if box in path else DEAD_END)
        row += [MOVED] * missing + [level.agent, AGENT, *level.key]
        for box in level.boxes:
            row += [box.cell, box.content, box.cell + 1, box.lock]
        return row + [self.nowhere, ABSENT] * (2 * missing)

    def levels(self, state: State) -> list[Level]:
        """Return the level of each environment, without opened boxes."""
        levels = []
        for size, objects in zip(as_numpy(state.size).tolist(), as_numpy(state.objects).tolist(), strict=True):
            (agent, _), key, *rest = objects
            pairs = zip(rest[::2], rest[1::2], strict=True)
            boxes = (
                box_world_levels.Box(cell, content, lock) for (cell, content), (_, lock) in pairs if content != ABSENT
            )
            levels.append(Level(size, agent, tuple(key), tuple(boxes)))
        return levels

    def sample_randomness(self, u: tuple[Array, ...]) -> Any:
        """Turn uniforms into actions (B, L) of clutter that wanders; there is no other randomness."""
        return namespace(u[0]).astype(self.num_actions * u[0], namespace(u[0]).int64) if u else ()

    def transition(self, state: State, action: Array, randomness: Any) -> State:
        """Return the states after one step of actions (B, 1)."""
        xp, agent = namespace(action), state.objects[:, 0, 0]
        move = self.tables(action)["moves"][state.size, agent, action[:, 0]]  # (B, 2) target, outcome
        if self.noise_config.decoys:
            move = box_world_noise.block(state.noise, move, agent, BLOCKED)
        target, outcome = move[:, 0], move[:, 1]
        met = state.objects[:, 1:, 0] == move[:, :1]  # (B, M - 1), all False if the agent stays
        if xp is np and not np.count_nonzero(met):  # fast path for most steps of a single environment
            objects, box_outcomes = state.objects.copy(), state.box_outcomes
            objects[:, 0, 0] = target
        else:
            objects, box_outcomes, blocked, met_outcome = self._meet(state, met)
            objects[:, 0, 0] = xp.where(blocked, agent, target)
            outcome = outcome + met_outcome
        noise = self._next_noise(state, objects, randomness) if self.num_noise_tokens else state.noise
        return State(objects, box_outcomes, state.size, state.level, outcome, noise)

    def _next_noise(self, state: State, objects: Array, randomness: Any) -> Array:
        """Return the noise (B, T, 2) after the agents' moves, which led to the `objects`."""
        if self.noise_config.wanders:
            return box_world_noise.wander(state.noise, objects, self.tables(objects)["moves"], state.size, randomness)
        if self.noise_config.decoys:
            held = objects[:, 1, 0] == CORNER
            return box_world_noise.take(state.noise, objects[:, 0, 0], held, self.nowhere)
        return state.noise

    def _meet(self, state: State, met: Array) -> tuple[Array, Array, Array, Array]:
        """Resolve which objects (B, M - 1), without the agent, the agents move onto.

        Returns:
            New objects and box outcomes, whether the move is blocked (B,), and the outcome (B,).
        """
        xp = namespace(met)
        cell, colour = state.objects[..., 0], state.objects[..., 1]
        key = colour[:, 1:2]  # (B, 1)
        held = cell[:, 1:2] == CORNER
        fits = held & (colour[:, 3::2] == key)  # (B, K), as the next two

        on_key = met[:, :1]
        on_content = met[:, 1::2]
        on_lock = met[:, 2::2]
        opened = on_lock & fits
        blocked = (on_content | (on_lock & ~fits)).any(axis=1)

        objects = xp.asarray(state.objects, copy=True)
        objects[:, 1:2, 0] = xp.where(on_key, CORNER, cell[:, 1:2])
        outcome = BLOCKED * blocked + TOOK_KEY * on_key[:, 0]
        if xp is np and not np.count_nonzero(opened):
            return objects, state.box_outcomes, blocked, outcome
        outcome = outcome + (opened * state.box_outcomes).sum(axis=1)
        opens = opened.any(axis=1)
        objects[:, 1, 1] = xp.where(opens, (opened * colour[:, 2::2]).sum(axis=1), key[:, 0])
        return *self._remove(objects, state.box_outcomes, opened), blocked, outcome

    def _remove(self, objects: Array, box_outcomes: Array, opened: Array) -> tuple[Array, Array]:
        """Remove the opened box (B, K), at most one in each environment, and close the gap."""
        xp, table = namespace(objects), self.tables(objects)
        box = objects[:, 2:].reshape(-1, self.num_boxes, 4)
        opens = xp.any(opened, axis=1, keepdims=True)
        moved = opens & (table["slots"] >= xp.argmax(xp.astype(opened, xp.int64), axis=1, keepdims=True))
        next_box = xp.concat([box[:, 1:], xp.zeros_like(box[:, :1]) + table["absent"]], axis=1)
        next_outcome = xp.concat([box_outcomes[:, 1:], xp.zeros_like(box_outcomes[:, :1])], axis=1)
        box = xp.where(moved[..., None], next_box, box)
        objects = xp.concat([objects[:, :2], box.reshape(-1, 2 * self.num_boxes, 2)], axis=1)
        return objects, xp.where(moved, next_outcome, box_outcomes)

    def terminated(self, state: State) -> Array:
        """Tell which states are terminal (B,): solved, or at a dead end."""
        return state.outcome >= SOLVED

    def success(self, state: State) -> Array:
        """Tell which states are solved (B,)."""
        return state.outcome == SOLVED

    def reward(self, state: State, agents: slice = slice(None)) -> Array:
        """Return the rewards (B, 1) for the step that led to `state`."""
        return self.tables(state.outcome)["rewards"][state.outcome][:, None]

    def observe(self, state: State, agents: slice = slice(None)) -> Array:
        """Return the tokens (B, 1, N, 5) float32, or for "rgb" pictures (B, 1, w, w, 3) uint8."""
        table = self.tables(state.objects)
        if self.observation == "rgb":
            return gather_rows(table["palette"], self.picture(state)).reshape(-1, 1, self.width, self.width, 3)
        if self.observation == "entities":
            tokens = state.objects  # (B, N, 2)
            if self.num_noise_tokens:
                tokens = namespace(tokens).concat([tokens, state.noise], axis=1)
            return draw_tokens(table, state.size, tokens[..., 0], tokens[..., 1])[:, None]
        # The plain version is `draw_tokens` of all w² cells. This one looks up the tokens of an empty grid (`bare`) by
        # the agent's position and paints only objects and noise, which are far fewer.
        place = table["place"][table["first"][state.size] + state.objects[:, 0, 0]]  # (B,)
        tokens = gather_rows(table["bare"], place)  # (B, N, 5)
        index = namespace(place).arange(place.shape[0], device=place.device)[:, None]
        for cells, colours in self._layers(state):
            tokens[index, table["row"][place[:, None], cells], :3] = gather_rows(table["paint"], colours)
        return tokens[:, None]

    def _layers(self, state: State) -> list[tuple[Array, Array]]:
        """Return cells and colours (B, n) of the noise, and of the objects, which hide it."""
        layers = [(state.objects[..., 0], state.objects[..., 1])]
        if self.num_noise_tokens:
            layers.insert(0, box_world_noise.shown(state.noise))
        return layers

    def token_cells(self, state: State) -> Array:
        """Return the cells (B, N) that the tokens describe, or for "rgb" all cells (B, w²)."""
        xp, cell = namespace(state.objects), state.objects[..., 0]
        if self.observation == "entities":
            return xp.concat([cell, state.noise[..., 0]], axis=1)
        if self.observation == "pixels":
            table = pixel_tables(lowest(self.size), highest(self.size))
            size, agent = as_numpy(state.size), as_numpy(cell[:, 0])
            order = table["order"][table["place"][table["first"][size] + agent]]
            return xp.asarray(order, dtype=xp.int64, device=cell.device)
        return xp.zeros_like(cell[:, :1]) + xp.arange(self.nowhere + 1, device=cell.device)

    def picture(self, state: State) -> Array:
        """Return the colours (B, w²) int64 of all cells."""
        xp = namespace(state.objects)
        picture = gather_rows(self.tables(state.size)["ground"], state.size)
        index = xp.arange(picture.shape[0], device=picture.device)[:, None]
        for cells, colours in self._layers(state):
            picture[index, cells] = colours
        return picture

    def token_mask(self, tokens: Array) -> Array:
        """Return the padding mask (..., N) of tokens; of pictures (..., w, w) True in the grid and for the held key."""
        if self.observation != "rgb":
            return self.token_spec.mask(tokens)
        mask = namespace(tokens).any(tokens != 0, axis=-1)
        mask[..., 0, 0] = True
        return mask

    def signal_mask(self, tokens: Array, state: State) -> Array:
        """Tell which tokens (..., N, 5) or pixels (..., w, w, 3) of states are signal, bool (..., N) or (..., w, w).

        The agent, keys, locks and the gem are signal; noise, empty cells, and the corner while no key is held, are not.
        """
        if self.observation == "entities":
            mask = self.token_mask(tokens)
            if self.num_noise_tokens:
                mask[..., self.num_objects :] = False
            return mask
        xp = namespace(tokens)
        if not self.noise_config.looks_like_signal:
            table = self.tables(tokens)["palette" if self.observation == "rgb" else "look"]
            empty, black = table[EMPTY, 0, ...], table[FRAME, 0, ...]  # 0-d arrays: faster to compare with than numbers
            red, blue = tokens[..., 0], tokens[..., 2]  # clutter has the red of empty cells, no object has; of black …
            return (red != empty) & (xp.maximum(red, blue) > black)  # … or padding neither red nor blue is positive
        cell = state.objects[..., 0]
        mask = xp.zeros(tokens.shape[:-1], dtype=xp.bool, device=cell.device)
        rows = xp.reshape(mask, (cell.shape[0], -1))
        if self.observation == "pixels":
            table = self.tables(cell)
            place = table["place"][table["first"][state.size] + cell[:, 0]]
            cell = table["row"][place[:, None], cell]  # absent objects have the agent's token
        rows[xp.arange(cell.shape[0], device=cell.device)[:, None], cell] = True
        if self.observation == "rgb":
            rows[:, self.nowhere] = False
        return mask

    def policy(self, name: str, state: State, u: Array, agents: slice = slice(None)) -> Array:
        """Return actions (B, 1) int64 by a built-in policy, from uniforms (B, 1).

        "random" is uniform over the actions; "oracle" follows a shortest solution, found by breadth-first search.
        """
        if name == "random":
            return super().policy(name, state, u, agents)
        walls = box_world_noise.walls(as_numpy(state.noise)) if self.noise_config.decoys else repeat(0)
        levels = zip(self.levels(state), walls, strict=False)
        moves = [[box_world_levels.next_move(level, self.width, cells)] for level, cells in levels]
        return namespace(u).asarray(moves, dtype=namespace(u).int64, device=u.device)

    def known_share(self, drawings: list[str]) -> float:
        """Return the fraction of levels, drawn as by `render_text`, that equal a level of this game, of any number.

        It is 0 if fewer than one distinct level in MIN_KNOWN_RATIO could be known. At most
        `box_world_levels.MAX_CACHED_LEVELS` levels are compared, in a few seconds.
        """
        if self.level_config.least_levels > MIN_KNOWN_RATIO * self.num_levels:
            return 0.0
        given: list[bytes] = []
        for drawing in drawings:
            try:
                row = self._pack(self._validate_level(box_world_levels.read(drawing, self.width)))
            except ValueError:  # not a level of this game
                row = []
            given.append(np.array(row, np.int64).tobytes())
        unknown, count = set(given), min(self.num_levels, box_world_levels.MAX_CACHED_LEVELS)
        for first in range(0, count, LEVELS_AT_ONCE):
            numbers = self.start_level + np.arange(first, min(first + LEVELS_AT_ONCE, count))
            unknown -= set(map(bytes, self.level_cache.rows(numbers)[:, : self.level_length]))
            if not unknown:
                break
        return sum(row not in unknown for row in given) / len(given)

    def render_text(self, state: State) -> list[str]:
        """Draw each environment in characters, see `noisy_envs.games.box_world_levels.read`."""
        noise = as_numpy(state.noise)
        cells = [tokens[tokens[:, 1] != ABSENT, 0].tolist() for tokens in noise]
        levels = zip(self.levels(state), cells, strict=True)
        return [box_world_levels.render_text(level, self.width, hidden) for level, hidden in levels]

    def validate_state(self, given: State | Mapping[str, Any], batch: tuple[int, ...]) -> State:
        """Validate a user-supplied state, and return it as NumPy arrays with one batch axis.

        Args:
            given: a value of `env.unwrapped.state`; or a mapping with either `level`, a level's number, or `text`, a
                level as `noisy_envs.games.box_world_levels.read` takes it, one for all environments or one for each.
            batch: leading shape, () for one environment or (B,).

        Raises:
            ValueError, TypeError: naming the invalid field.
        """
        count = batch[0] if batch else 1
        if isinstance(given, State):
            return self._validate_fields(given, batch)
        check_fields("state", given, required=(), known=("level", "text"))
        if len(given) != 1:
            raise ValueError(f"state: expected either level or text, got {', '.join(given) or 'nothing'}")
        if "level" in given:
            try:
                numbers = as_numpy(given["level"])
            except ValueError:  # a ragged list
                numbers = np.array(None)
            if numbers.dtype.kind not in "iu" or numbers.shape not in ((), batch):
                allowed = "an integer" if batch == () else f"an integer or {count} integers"
                raise unexpected("level", given["level"], allowed, TypeError)
            if (numbers < 0).any() or (numbers > MAX_SEED).any():
                raise unexpected("level", given["level"], f"0 to {MAX_SEED}")
            return self._state_of_levels(np.broadcast_to(numbers, count).astype(np.int64), like=np.empty(0))
        texts = [given["text"]] * count if isinstance(given["text"], str) else given["text"]
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
            raise unexpected("text", texts, f"a string or a list of {count} strings", TypeError)
        if len(texts) != count:
            raise ValueError(f"text: expected 1 or {count} levels, got {len(texts)}")
        levels = [self._validate_level(box_world_levels.read(text, self.width)) for text in texts]
        rows = [self._pack(level) + self._pack_noise(level, -1) for level in levels]
        return self._unpack(np.array(rows), np.full(count, -1))

    def _validate_fields(self, given: State, batch: tuple[int, ...]) -> State:
        """Validate the fields of a state, and its levels."""
        shapes = ((self.num_objects, 2), (self.num_boxes,), (), (), (), (self.num_noise_tokens, 2))
        fields = []
        for name, value, shape in zip(State._fields, given, shapes, strict=True):
            array = as_numpy(value)
            if array.dtype.kind not in "iu" or array.shape != (*batch, *shape):
                expected = f"integers {(*batch, *shape)}"
                raise ValueError(f"state: {name}: expected {expected}, got {array.dtype} {array.shape}")
            if (array > MAX_SEED).any():
                raise ValueError(f"state: {name}={array.max()}: expected at most {MAX_SEED}")
            fields.append(array.reshape(*(batch or (1,)), *shape).astype(np.int64))
        state = State(*fields)
        if not ((state.outcome >= MOVED) & (state.outcome <= DEAD_END)).all():
            raise unexpected("state: outcome", state.outcome.tolist(), f"{MOVED} to {DEAD_END}")
        if ((state.outcome == SOLVED) & (state.objects[:, 1, 1] != GEM)).any():
            raise unexpected("state: outcome", state.outcome.tolist(), f"{SOLVED} only where the gem is held")
        if not (state.level >= -1).all():
            raise unexpected("state: level", state.level.tolist(), "at least 0, or -1 for a level given as text")
        levels = [self._validate_level(level) for level in self.levels(state)]
        for level, tokens in zip(levels, state.noise.tolist(), strict=True):
            self.noise_config.check_tokens(tokens, level, self.width)
        noise = state.noise.reshape(len(levels), -1)
        same = self._unpack(np.hstack([[self._pack(level) for level in levels], noise]), state.level)
        if not np.array_equal(state.objects, same.objects):
            raise ValueError(f"state: objects: expected {same.objects.tolist()} for these levels")
        # outcomes are those of the complete level: with equal keys the remaining boxes may imply others
        keys = OPENED_BOX, DEAD_END
        undecided = np.isin(state.box_outcomes, keys) & np.isin(same.box_outcomes, keys)
        if not (undecided | (state.box_outcomes == same.box_outcomes)).all():
            raise ValueError(f"state: box_outcomes: expected {same.box_outcomes.tolist()} for these levels")
        return state

    def _validate_level(self, level: Level) -> Level:
        """Return a level, or raise ValueError unless it fits the options."""
        if not lowest(self.size) <= level.size <= highest(self.size):
            raise ValueError(f"level: expected size={self.size}, got {level.size}")
        if len(level.boxes) > self.num_boxes:
            chains = ("goal_length", "num_distractors", "distractor_length")
            options = ", ".join(f"{option}={getattr(self, option)}" for option in chains)
            raise ValueError(f"level: expected at most {self.num_boxes} boxes ({options}), got {len(level.boxes)}")
        box_world_levels.check(level, self.width)
        return level

    def tables(self, like: Array) -> dict[str, Array]:
        """Return constant arrays by name in the library and on the device of `like`, cached."""
        tables = self._cache.get(like.device)
        if tables is None:
            xp = namespace(like)
            with outside_inference_mode(like):
                tables = {name: xp.asarray(table, device=like.device) for name, table in self._tables.items()}
            self._cache[like.device] = tables
        return tables

    @cached_property
    def _cache(self) -> dict[Any, dict[str, Array]]:
        return {}

    @cached_property
    def _tables(self) -> dict[str, np.ndarray]:
        """Constant arrays by name."""
        width, cells = self.width, self.width * self.width
        row, column = np.divmod(np.arange(cells), width)
        size = np.arange(width - 1)[:, None]
        inside = (row >= 1) & (row <= size) & (column >= 1) & (column <= size)  # (sizes from 0, cells)
        target = np.arange(cells)[:, None] + box_world_levels.moves(width)  # (cells, actions)
        onto = inside[:, target % cells]
        moves = np.stack([np.where(onto, target, np.arange(cells)[:, None]), np.where(onto, MOVED, BLOCKED)], axis=3)
        ground = np.where(inside, EMPTY, FRAME)
        ground[:, self.nowhere] = ABSENT
        rewards = np.array([0, 0 - self.blocked_cost, KEY_REWARD, BOX_REWARD, GEM_REWARD, DISTRACTOR_REWARD])
        tables = {
            "absent": np.array([self.nowhere, ABSENT] * 2),
            "slots": np.arange(self.num_boxes),
            "moves": moves,
            "ground": ground,
            "palette": PALETTE,
            "rewards": (rewards - self.step_cost).astype(np.float32),
            **token_tables(width),
        }
        if self.observation == "pixels":
            tables |= pixel_tables(lowest(self.size), highest(self.size))
            del tables["order"]  # needed for rendering only
        return tables


def draw_tokens(table: Mapping[str, Array], size: Array, cell: Array, colour: Array) -> Array:
    """Return tokens (B, N, 5) from cells and colours (B, N), the agent's first, and sizes of the grid (B,)."""
    tokens, point = gather_rows(table["look"], colour), gather_rows(table["point"], cell)
    origin = table["origin"][size] - point[:, 0]
    tokens[..., 3:] = gather_rows(table["relative"], point + origin[:, None])
    return tokens


@lru_cache(maxsize=8)
def token_tables(width: int) -> Mapping[str, np.ndarray]:
    """Return the tables of `draw_tokens`, shared by all games.

    `look[colour]` is a token without its position, which is `relative[origin[size] + point[cell] - point[agent]]`, row
    and column, or −1 for absent objects: differences of `point` are unique for each offset between cells.
    """
    look = np.concatenate([PALETTE / 255, np.zeros((len(PALETTE), 2))], axis=1, dtype=np.float32)
    look[ABSENT] = -1
    wide = 2 * width  # rows twice as long, so that offsets of columns do not reach the next row
    row, column = np.divmod(np.arange(width * width), width)
    point = row * wide + column
    farthest = point[-1]
    point[-1] = 3 * farthest + 1  # absent
    place = np.arange(-farthest, 4 * farthest + 2)  # differences
    rows = np.floor_divide(place + width, wide)
    relative = np.stack([rows, place - rows * wide], axis=1) / np.arange(1, width, dtype=np.float32)[:, None, None]
    relative[:, place > farthest] = -1
    origin = np.arange(width - 1) * len(place) + farthest
    return {"look": look, "point": point, "origin": origin, "relative": relative.reshape(-1, 2).astype(np.float32)}


@lru_cache(maxsize=8)
def pixel_tables(smallest: int, largest: int) -> Mapping[str, np.ndarray]:
    """Return the tables for observations of pixels, shared by all games.

    `place[first[size] + agent]` numbers the P positions of the agent in grids of all sizes. For each position `order`
    (P, N) holds the cells of the tokens, `bare` (P, N, 5) the tokens of an empty grid, and `row` (P, w²) the index of
    each cell's token. `paint` gives absent objects the agent's colour, as `row` maps their cell to the agent's token.
    """
    width = largest + 2
    cells, nowhere = width * width, width * width - 1
    first, place = np.zeros(largest + 1, np.int64), np.zeros((largest + 1 - smallest) * cells, np.int64)
    sizes = np.repeat(np.arange(smallest, largest + 1), np.arange(smallest, largest + 1) ** 2)  # (P,)
    order = np.full((len(sizes), largest**2 + 1), nowhere, np.int16)
    row = np.zeros((len(sizes), cells), np.int64)  # torch needs int64 indices, and NumPy would convert smaller ones
    count = 0
    for size in range(smallest, largest + 1):
        line, column = np.divmod(np.arange(size * size), size)
        field = (line + 1) * width + column + 1
        first[size] = (size - smallest) * cells
        for agent in field:
            shown = np.array([agent, CORNER, *field[field != agent]])
            order[count, : len(shown)], row[count, shown] = shown, np.arange(len(shown))
            place[first[size] + agent] = count
            count += 1
    colour = np.where(order == nowhere, ABSENT, EMPTY)
    colour[:, :2] = AGENT, FRAME
    tables = token_tables(width)
    paint = tables["look"][:, :3].copy()
    paint[ABSENT] = paint[AGENT]
    bare = draw_tokens(tables, sizes, order, colour)
    return {"first": first, "place": place, "order": order, "bare": bare, "row": row, "paint": paint}

"""BoxWorld (paper, section 4.4; Zambaldi et al. 2018): find the key, the box that it opens, the next, and the gem.

`B` worlds, `K` boxes at most, `w` cells along a side of the picture, `N` tokens of an observation, `M = 2 + 2K` things.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from noisy_envs.arrays import Array, as_numpy, gather_rows, namespace, outside_inference_mode
from noisy_envs.games import box_world_levels
from noisy_envs.games.box_world_levels import ABSENT, AGENT, CORNER, EMPTY, FRAME, GEM, Level, LevelCache, LevelConfig
from noisy_envs.games.single_agent import SingleAgentGame
from noisy_envs.randomness import MAX_SEED
from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import Count, check_choice, check_count, check_fields, check_number, highest, lowest, plain

# what a step brings about; from SOLVED on, the episode is over
MOVED, BLOCKED, TOOK_KEY, OPENED_BOX, SOLVED, DEAD_END = range(6)
RARE, CHUNK = 100, 4096  # a level that one in so many is like does not count; levels drawn at once
KEY_REWARD, BOX_REWARD, GEM_REWARD, DISTRACTOR_REWARD = 1.0, 1.0, 10.0, -1.0
PALETTE = np.array([
    (0, 0, 117), (230, 190, 255), (170, 255, 195), (255, 250, 200), (255, 216, 177), (250, 190, 190), (240, 50, 230),
    (145, 30, 180), (67, 99, 216), (66, 212, 244), (60, 180, 75), (191, 239, 69), (255, 255, 25), (245, 130, 49),
    (230, 25, 75), (128, 0, 0), (154, 99, 36), (128, 128, 0), (70, 153, 144),  # keys and locks
    (255, 255, 255), (128, 128, 128), (220, 220, 220), (0, 0, 0), (0, 0, 0),  # gem, agent, empty, frame, absent
], np.uint8)  # fmt: skip


class State(NamedTuple):
    """A batch of worlds, int64. Cells are numbered row by row over the picture, field and frame."""

    objects: (
        Array  # (B, M, 2) cell, colour: the agent, the key (cell 0 if held), each box's content and lock; absent last
    )
    box_outcomes: Array  # (B, K) what opening a box brings about: OPENED_BOX, SOLVED, DEAD_END; 0 for none
    size: Array  # (B,) cells along a side of the field
    level: Array  # (B,) number of the level, −1 for a drawn one
    outcome: Array  # (B,) what the step that led here brought about


@dataclass(frozen=True)
class BoxWorld(SingleAgentGame):
    """Keys open boxes that hold further keys, one of them the gem; distractor boxes are dead ends.

    ## Description
    A field of cells holds the agent, a loose key and boxes: two cells in a row, the content (a key, or the gem) on the
    left and the lock on the right. Walking onto the loose key takes it. Walking onto a lock of the held key's colour
    opens the box: what is in it becomes the held key, and both its cells are free. One chain of boxes leads from the
    loose key to the gem. A distractor's first lock fits a key of that chain too, but none of its keys leads on. In the
    paper's game (`goal_length` 2) the loose key fits all three boxes, and only what is inside tells the right one;
    chains begin with `goal_length` 3. The oracle follows a shortest solution.

    ## Action Space
    `Discrete(4)`: up, down, left, right. A move off the field, onto a content, or onto a lock of another colour than
    the held key's is blocked: the agent stays.

    ## Observation Space
    `observation="entities"`: `Box((2 + 2K, 5), float32)`, K boxes at most. `"pixels"`: `Box((size² + 1, 5), float32)`,
    the same game with far more noise. A token is red, green, blue in 0 … 1, and row and column relative to the agent,
    divided by size + 1. Rows:

    | | entities | pixels |
    |---|---|---|
    | 0 | the agent | the agent's cell |
    | 1 | the key: loose, or held, at the frame's corner | the frame's corner: the held key, black without one |
    | others | content and lock of each box, boxes row by row | the other cells, row by row |
    | padding, last | −1, −1, −1, −1, −1 | the same, where `size` is a range |

    `"rgb"`: `Box((size + 2, size + 2, 3), uint8)`, the picture: the field in a black frame, whose top left cell shows
    the held key; a smaller level lies at the top left. It is no set of tokens, so there is no `token_spec`, and
    `signal_mask` is (size + 2, size + 2).

    Positions are relative, as in the paper, so "entities" do not show where the field ends, and two levels can look
    alike of which one has the key loose and the other has it held. Signal, in `info["signal_mask"]`, are agent, keys,
    locks and gem, not empty cells.

    Agent 128, 128, 128; gem 255, 255, 255; empty 220, 220, 220; keys and locks have 19 other colours.

    ## Rewards
    Loose key +1, a box of the chain +1, the gem's box +10, a distractor's −1; less `step_cost` for each step and
    `blocked_cost` for each blocked move. Perfect play returns goal_length − 1 + 10.

    ## Starting State
    A level of the bank, each as likely. All is at random places, but no two boxes share an edge, nor a box and the
    loose key, and each free cell can be reached from each other, so that every level can be solved, if not within
    `max_steps`. A level's number makes the same level everywhere; of small fields with one box several numbers make one
    level (2,280 on size 3), so that banks of other numbers are not of other levels, see `BoxWorld.known_share`.

    ## Episode End
    Terminated when the gem's box (`info["is_success"]` is True) or a distractor's is opened; truncated after
    `max_steps`, unless terminated by the same step.

    ## Arguments
    * `observation`: "entities", "pixels" or "rgb".
    * `size`: cells along a side, 3 to 32. It and the next three: a number, or a range (low, high) drawn for each level.
    * `goal_length`: keys of the chain, from 2, the gem being the last: the loose one and goal_length − 1 boxes.
    * `num_distractors`: chains of dead ends.
    * `distractor_length`: boxes in each of them.
    * `start_level`, `num_levels`: the bank, levels start_level … start_level + num_levels − 1. Banks that do not
      overlap are for training and for evaluation.
    * `step_cost`, `blocked_cost`: taken from the reward of each step, of each blocked move.
    * `max_steps`: steps of an episode, the paper's; Gymnasium's `max_episode_steps` can only be fewer. Raise it with
      `size` and `goal_length`: with `goal_length=6` the oracle gets 8.5 of 15 in 30 steps, all in 200
      (`noisy_envs.baselines`).

    A level has goal_length − 1 + num_distractors · distractor_length boxes. At most 1 fits on size 3 and 4, 5 on 5 and
    6, 7 on 7, 11 on 8, 14 on 9 and 10, 19 (there are 19 colours) from 11 on; of a range the smallest size counts.

    `reset` takes `options={"level": n}`, a level by number, in the bank or not; `{"state": {"text": ...}}` a drawn
    one, see `noisy_envs.games.box_world_levels.read`.

    ## Differences
    From the paper's code: exactly `num_distractors` distractors, where it draws 0 to 2; roles and places of boxes are
    independent; the agent's token is always first and the held key second, and padding cannot be taken for either; the
    time limit is not one step late; a time-out and an end are told apart; longer distractors are coloured as chains.
    From Zambaldi et al. 2018: the key is taken when the lock opens; 7×7 cells, not 14×14.

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

    name: ClassVar[str] = "box_world"
    num_actions: ClassVar[int] = 4
    terminates: ClassVar[bool] = True
    render_modes: ClassVar[tuple[str, ...]] = ("human", "rgb_array", "ansi")
    policies: ClassVar[tuple[str, ...]] = ("random", "oracle")
    reset_options: ClassVar[tuple[str, ...]] = ("level",)
    num_reset_uniforms: ClassVar[tuple[int, ...]] = (2,)

    def __post_init__(self) -> None:
        """Refuse what the game cannot play.

        Raises:
            ValueError, TypeError: naming the option, its value and what is allowed.
        """
        for name, value in vars(self).copy().items():
            object.__setattr__(self, name, plain(value))
        check_choice("observation", self.observation, ("entities", "pixels", "rgb"))
        LevelConfig(self.size, self.goal_length, self.num_distractors, self.distractor_length)
        check_count("start_level", self.start_level, minimum=0, may_be_range=False)
        check_count("num_levels", self.num_levels, minimum=1, may_be_range=False, maximum=2**48)  # two draws of 24 bits
        check_count("max_steps", self.max_steps, minimum=1, may_be_range=False)
        if self.start_level + self.num_levels > MAX_SEED:
            raise ValueError(f"start_level={self.start_level}: must be at most {MAX_SEED} - num_levels")
        for option in ("step_cost", "blocked_cost"):
            check_number(option, getattr(self, option))

    def __getstate__(self) -> dict[str, Any]:
        """Copy the options alone; what follows from them is made anew."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @cached_property
    def level_config(self) -> LevelConfig:
        """What a level consists of."""
        return LevelConfig(self.size, self.goal_length, self.num_distractors, self.distractor_length)

    @cached_property
    def level_cache(self) -> LevelCache:
        """The levels that are drawn from, and all others."""
        return LevelCache(self.start_level, self.num_levels, 1 + self.num_boxes + 2 * self.num_objects, self._draw_row)

    @cached_property
    def width(self) -> int:
        """Cells along a side of the picture, w."""
        return self.level_config.width

    @cached_property
    def num_boxes(self) -> int:
        """Most boxes of a level, K."""
        return self.level_config.max_boxes

    @cached_property
    def num_objects(self) -> int:
        """Most things of a level: the agent, the key, contents and locks; M."""
        return 2 + 2 * self.num_boxes

    @cached_property
    def nowhere(self) -> int:
        """Cell of what is absent, the last of the frame."""
        return self.width * self.width - 1

    @cached_property
    def pads_pixels(self) -> bool:
        """Whether a field can be smaller than the picture."""
        return lowest(self.size) < highest(self.size)

    @cached_property
    def token_spec(self) -> TokenSpec:
        """What an observation means."""
        if self.observation == "rgb":
            raise AttributeError("observation='rgb' is no set of tokens: ask for 'entities' or 'pixels'")
        num_tokens = self.num_objects if self.observation == "entities" else highest(self.size) ** 2 + 1
        padded = self.observation == "entities" or self.pads_pixels  # an opened box leaves padding
        return TokenSpec(num_tokens, ("red", "green", "blue", "row", "column"), {}, padding_feature=0, padded=padded)

    @cached_property
    def observation_bounds(self) -> tuple[Array, Array]:
        """Lowest and highest values of an observation, of its shape and type."""
        if self.observation == "rgb":
            shape = self.width, self.width, 3
            return np.zeros(shape, np.uint8), np.full(shape, 255, np.uint8)
        ones = np.ones((self.token_spec.num_tokens, self.token_spec.num_features), np.float32)
        low = -ones
        if not self.token_spec.padded:
            low[:, :3] = 0  # no colour is below: wrappers must see that none is taken for padding
        return low, ones

    def initial(self, u: tuple[Array, ...]) -> State:
        """Draw levels of the bank by uniforms (B, 2) of 24 bits each."""
        words = namespace(u[0]).astype(u[0] * 2.0**24, namespace(u[0]).int64)
        numbers = self.start_level + ((words[:, 0] << 24) + words[:, 1]) % self.num_levels
        table = self._made.get(words.device, {}).get("levels")
        if table is not None:
            return self._unpack(table[numbers - self.start_level], numbers)
        return self._deal(as_numpy(numbers), like=words)

    def prepare(self, like: Array) -> None:
        """Draw all levels and keep them on the device of an array, so that `initial` need not ask the host.

        Raises:
            ValueError: if there are too many.
        """
        if self.num_levels > box_world_levels.MAX_CACHED_LEVELS:
            raise ValueError(
                f"num_levels={self.num_levels}: at most {box_world_levels.MAX_CACHED_LEVELS} can be kept on a device"
            )
        table = self.tables(like)
        if "levels" not in table:
            rows = self.level_cache.rows(self.start_level + np.arange(self.num_levels))
            with outside_inference_mode(like):
                table["levels"] = namespace(like).asarray(rows, device=like.device)

    def _deal(self, numbers: np.ndarray, like: Array) -> State:
        """Return the levels `numbers` (B,) as states in the library and on the device of an array."""
        rows = self.level_cache.rows(numbers)
        if isinstance(like, np.ndarray):
            return self._unpack(rows, numbers)
        return self._unpack(*(namespace(like).asarray(x, device=like.device, copy=True) for x in (rows, numbers)))

    def _unpack(self, rows: Array, numbers: Array) -> State:
        """Turn rows as `_pack` makes them (B, ...) into starting states."""
        things = 1 + self.num_boxes  # columns before them
        objects, box_outcomes = rows[:, things:].reshape(-1, self.num_objects, 2), rows[:, 1:things]
        outcome = namespace(rows).where(objects[:, 1, 1] == GEM, SOLVED, MOVED)
        return State(objects, box_outcomes, rows[:, 0], numbers, outcome)

    def _draw_row(self, number: int) -> list[int]:
        """Draw a level as a row of integers."""
        return self._pack(box_world_levels.draw_level(self.level_config, number))

    def _pack(self, level: Level) -> list[int]:
        """Turn a level into a row of integers: size, outcomes, things."""
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
        """Return what lies where in each world, one by one."""
        found = []
        for size, things in zip(as_numpy(state.size).tolist(), as_numpy(state.objects).tolist(), strict=True):
            (agent, _), key, *rest = things
            pairs = zip(rest[::2], rest[1::2], strict=True)
            boxes = (
                box_world_levels.Box(cell, content, lock) for (cell, content), (_, lock) in pairs if content != ABSENT
            )
            found.append(Level(size, agent, tuple(key), tuple(boxes)))
        return found

    def transition(self, state: State, action: Array, randomness: Any) -> State:
        """Play one step of the actions (B, 1)."""
        xp, agent = namespace(action), state.objects[:, 0, 0]
        move = self.tables(action)["moves"][state.size, agent, action[:, 0]]  # (B, 2) target, outcome
        target, outcome = move[:, 0], move[:, 1]
        met = state.objects[:, 1:, 0] == move[:, :1]  # (B, M - 1); none off the field, where the target is the agent's
        if xp is np and not np.count_nonzero(met):  # most steps of a single world
            objects = state.objects.copy()
            objects[:, 0, 0] = target
            return State(objects, state.box_outcomes, state.size, state.level, outcome)
        objects, box_outcomes, in_the_way, outcome_met = self._meet(state, met)
        objects[:, 0, 0] = xp.where(in_the_way, agent, target)
        return State(objects, box_outcomes, state.size, state.level, outcome + outcome_met)

    def _meet(self, state: State, met: Array) -> tuple[Array, Array, Array, Array]:
        """Let the agents meet things (B, M - 1), all but themselves.

        Returns:
            Things and outcomes then, whether one is in the way (B,), and events (B,).
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
        in_the_way = (on_content | (on_lock & ~fits)).any(axis=1)

        objects = xp.asarray(state.objects, copy=True)
        objects[:, 1:2, 0] = xp.where(on_key, CORNER, cell[:, 1:2])
        outcome = BLOCKED * in_the_way + TOOK_KEY * on_key[:, 0]
        if xp is np and not np.count_nonzero(opened):
            return objects, state.box_outcomes, in_the_way, outcome
        outcome = outcome + (opened * state.box_outcomes).sum(axis=1)
        opens = opened.any(axis=1)
        objects[:, 1, 1] = xp.where(opens, (opened * colour[:, 2::2]).sum(axis=1), key[:, 0])
        return *self._remove(objects, state.box_outcomes, opened), in_the_way, outcome

    def _remove(self, objects: Array, box_outcomes: Array, opened: Array) -> tuple[Array, Array]:
        """Take out the box of each world that opened one (B, K), and close the gap."""
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
        """Tell which worlds (B,) are over: solved, or at a dead end."""
        return state.outcome >= SOLVED

    def success(self, state: State) -> Array:
        """Tell which worlds (B,) are solved."""
        return state.outcome == SOLVED

    def reward(self, state: State, agents: slice = slice(None)) -> Array:
        """Return the rewards (B, 1) of the step that led here."""
        return self.tables(state.outcome)["rewards"][state.outcome][:, None]

    def observe(self, state: State, agents: slice = slice(None)) -> Array:
        """Return what the agent sees, (B, 1, N, 5) float32, or (B, 1, w, w, 3) uint8 for "rgb"."""
        table = self.tables(state.objects)
        if self.observation == "rgb":
            return gather_rows(table["palette"], self.picture(state)).reshape(-1, 1, self.width, self.width, 3)
        cell, colour = state.objects[..., 0], state.objects[..., 1]  # (B, M)
        if self.observation == "entities":
            return draw_tokens(table, state.size, cell, colour)[:, None]
        place = table["place"][table["first"][state.size] + cell[:, 0]]  # (B,)
        tokens = gather_rows(table["bare"], place)  # (B, N, 5)
        world = namespace(cell).arange(cell.shape[0], device=cell.device)
        tokens[world[:, None], table["row"][place[:, None], cell], :3] = gather_rows(table["paint"], colour)
        return tokens[:, None]

    def token_cells(self, state: State) -> Array:
        """Return the cells (B, N) that the tokens show, or for "rgb" the pixels (B, w²)."""
        xp, cell = namespace(state.objects), state.objects[..., 0]
        if self.observation == "entities":
            return cell
        if self.observation == "pixels":
            table = pixel_tables(lowest(self.size), highest(self.size))
            size, agent = as_numpy(state.size), as_numpy(cell[:, 0])
            order = table["order"][table["place"][table["first"][size] + agent]]
            return xp.asarray(order, dtype=xp.int64, device=cell.device)
        return xp.zeros_like(cell[:, :1]) + xp.arange(self.nowhere + 1, device=cell.device)

    def picture(self, state: State) -> Array:
        """Return the colours (B, w²) of all cells, int64."""
        xp = namespace(state.objects)
        picture = gather_rows(self.tables(state.size)["ground"], state.size)
        world = xp.arange(picture.shape[0], device=picture.device)[:, None]
        picture[world, state.objects[..., 0]] = state.objects[..., 1]
        return picture

    def token_mask(self, tokens: Array) -> Array:
        """Tell tokens (..., N, 5) from padding, bool (..., N), or field and held key from the frame (..., w, w)."""
        if self.observation != "rgb":
            return self.token_spec.mask(tokens)
        mask = namespace(tokens).any(tokens != 0, axis=-1)
        mask[..., 0, 0] = True
        return mask

    def signal_mask(self, tokens: Array) -> Array:
        """Tell which tokens (..., N, 5) carry signal, bool (..., N), or which pixels (..., w, w).

        That is the agent, keys, locks and the gem; not what is empty, nor the slot of the held key while it is black.
        """
        if self.observation == "entities":
            return self.token_mask(tokens)
        table = self.tables(tokens)["palette" if self.observation == "rgb" else "look"]
        empty, black = table[EMPTY, 0, ...], table[FRAME, 0, ...]  # arrays of (): dearer to compare with are numbers
        red, blue = tokens[..., 0], tokens[..., 2]  # no other's red is that of empty, without both only black is
        return (red != empty) & (namespace(tokens).maximum(red, blue) > black)

    def policy(self, name: str, state: State, u: Array, agents: slice = slice(None)) -> Array:
        """Return actions (B, 1) int64 by a reference policy, from uniforms u (B, 1).

        "random" is uniform over the actions; "oracle" follows a shortest solution, found by breadth-first search.
        """
        if name == "random":
            return super().policy(name, state, u, agents)
        best = [[box_world_levels.next_move(world, self.width)] for world in self.levels(state)]
        return namespace(u).asarray(best, dtype=namespace(u).int64, device=u.device)

    def known_share(self, drawings: list[str]) -> float:
        """Return which share of levels, drawn as `text` does, are in the bank too, whatever their numbers.

        It is 0 where less than one in a hundred could be: there are far more levels than the bank holds. Of a bank of
        more than `box_world_levels.MAX_CACHED_LEVELS` levels only so many are looked at, which takes seconds.
        """
        if self.level_config.least_levels > RARE * self.num_levels:
            return 0.0
        asked: list[bytes] = []
        for drawing in drawings:
            try:
                row = self._pack(self._check(box_world_levels.read(drawing, self.width)))
            except ValueError:  # a level that this game does not have
                row = []
            asked.append(np.array(row, np.int64).tobytes())
        unknown, count = set(asked), min(self.num_levels, box_world_levels.MAX_CACHED_LEVELS)
        for first in range(0, count, CHUNK):
            numbers = self.start_level + np.arange(first, min(first + CHUNK, count))
            unknown -= set(map(bytes, self.level_cache.rows(numbers)))
            if not unknown:
                break
        return sum(row not in unknown for row in asked) / len(asked)

    def render_text(self, state: State) -> list[str]:
        """Draw each world in characters, see `noisy_envs.games.box_world_levels.read`."""
        return [box_world_levels.render_text(world, self.width) for world in self.levels(state)]

    def validate_state(self, given: State | Mapping[str, Any], batch: tuple[int, ...]) -> State:
        """Check a state that a user hands over, and return it as NumPy arrays with one batch axis.

        Args:
            given: what `env.unwrapped.state` returned; or a mapping with either `level`, a level's number, or `text`, a
                level as `noisy_envs.games.box_world_levels.read` takes it; one for all environments, or one for each.
            batch: leading shape, () for one world or (B,).

        Raises:
            ValueError, TypeError: naming the field, its value and what is allowed.
        """
        count = batch[0] if batch else 1
        if isinstance(given, State):
            return self._validate_fields(given, batch)
        check_fields("state", given, required=(), known=("level", "text"))
        if len(given) != 1:
            raise ValueError(f"state: {', '.join(given) or 'nothing'} given, must be one of level, text")
        if "level" in given:
            try:
                numbers = as_numpy(given["level"])
            except ValueError:  # a ragged list
                numbers = np.array(None)
            allowed = "one integer" if batch == () else f"an integer, or {count} of them,"
            if numbers.dtype.kind not in "iu" or numbers.shape not in ((), batch):
                raise TypeError(f"level={given['level']!r}: must be {allowed} from 0 to {MAX_SEED}")
            if (numbers < 0).any() or (numbers > MAX_SEED).any():
                raise ValueError(f"level={given['level']!r}: must be from 0 to {MAX_SEED}")
            return self._deal(np.broadcast_to(numbers, count).astype(np.int64), like=np.empty(0))
        texts = [given["text"]] * count if isinstance(given["text"], str) else given["text"]
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"text={texts!r}: must be a text, or a list of {count}")
        if len(texts) != count:
            raise ValueError(f"text: {len(texts)} levels given, must be one or {count}")
        rows = [self._pack(self._check(box_world_levels.read(text, self.width))) for text in texts]
        return self._unpack(np.array(rows), np.full(count, -1))

    def _validate_fields(self, given: State, batch: tuple[int, ...]) -> State:
        """Check a state's shapes, and that its levels are such as this game has."""
        shapes = ((self.num_objects, 2), (self.num_boxes,), (), (), ())
        fields = []
        for name, value, shape in zip(State._fields, given, shapes, strict=True):
            array = as_numpy(value)
            if array.dtype.kind not in "iu" or array.shape != (*batch, *shape):
                raise ValueError(f"state: {name} {array.dtype} {array.shape} must be integers {(*batch, *shape)}")
            if (array > MAX_SEED).any():
                raise ValueError(f"state: {name}={array.max()}: must be at most {MAX_SEED}")
            fields.append(array.reshape(-1, *shape).astype(np.int64))
        state = State(*fields)
        if not ((state.outcome >= MOVED) & (state.outcome <= DEAD_END)).all():
            raise ValueError(f"state: outcome={state.outcome.tolist()}: must be from {MOVED} to {DEAD_END}")
        if ((state.outcome == SOLVED) & (state.objects[:, 1, 1] != GEM)).any():
            raise ValueError(f"state: outcome={state.outcome.tolist()}: must be {SOLVED} only where the gem is held")
        if not (state.level >= -1).all():
            raise ValueError(f"state: level={state.level.tolist()}: must be at least 0, or -1 for a drawn one")
        rows = np.array([self._pack(self._check(world)) for world in self.levels(state)])
        same = self._unpack(rows, state.level)
        if not np.array_equal(state.objects, same.objects):
            raise ValueError(f"state: objects must be {same.objects.tolist()} for these worlds")
        # an outcome stays what it was at the start: where keys are alike, the boxes that are left may tell another
        leads = OPENED_BOX, DEAD_END
        other = np.isin(state.box_outcomes, leads) & np.isin(same.box_outcomes, leads)
        if not (other | (state.box_outcomes == same.box_outcomes)).all():
            raise ValueError(f"state: box_outcomes must be {same.box_outcomes.tolist()} for these worlds")
        return state

    def _check(self, level: Level) -> Level:
        """Return a level, or raise ValueError unless this game can hold it."""
        if not lowest(self.size) <= level.size <= highest(self.size):
            raise ValueError(f"level: size {level.size} must be size={self.size}")
        if len(level.boxes) > self.num_boxes:
            chains = ("goal_length", "num_distractors", "distractor_length")
            asked = ", ".join(f"{option}={getattr(self, option)}" for option in chains)
            raise ValueError(f"level: {len(level.boxes)} boxes, must be at most {self.num_boxes}, as {asked} have")
        box_world_levels.check(level, self.width)
        return level

    def tables(self, like: Array) -> dict[str, Array]:
        """Return the constants by their names in the library and on the device of an array; they are made once."""
        made = self._made.get(like.device)
        if made is None:
            xp = namespace(like)
            with outside_inference_mode(like):
                made = {name: xp.asarray(table, device=like.device) for name, table in self._tables.items()}
            self._made[like.device] = made
        return made

    @cached_property
    def _made(self) -> dict[Any, dict[str, Array]]:
        return {}

    @cached_property
    def _tables(self) -> dict[str, np.ndarray]:
        """Constants by their names."""
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
            del tables["order"]  # for drawing
        return tables


def draw_tokens(table: Mapping[str, Array], size: Array, cell: Array, colour: Array) -> Array:
    """Return tokens (B, N, 5) of cells and colours (B, N), the agent's first, in fields of sizes (B,)."""
    tokens, point = gather_rows(table["look"], colour), gather_rows(table["point"], cell)
    origin = table["origin"][size] - point[:, 0]
    tokens[..., 3:] = gather_rows(table["relative"], point + origin[:, None])
    return tokens


@lru_cache(maxsize=8)
def token_tables(width: int) -> Mapping[str, np.ndarray]:
    """Return what `draw_tokens` looks up; cores share it.

    By colour `look`, a token without its place; by cell `point`, where differences tell how cells lie; by size
    `origin`. A token says `relative[origin[size] + point[cell] - point[agent]]`, row and column, and −1 of nowhere.
    """
    look = np.concatenate([PALETTE / 255, np.zeros((len(PALETTE), 2))], axis=1, dtype=np.float32)
    look[ABSENT] = -1
    wide = 2 * width  # rows twice as long: no difference of columns reaches the next
    row, column = np.divmod(np.arange(width * width), width)
    point = row * wide + column
    farthest = point[-1]
    point[-1] = 3 * farthest + 1  # nowhere
    place = np.arange(-farthest, 4 * farthest + 2)  # differences
    rows = np.floor_divide(place + width, wide)
    relative = np.stack([rows, place - rows * wide], axis=1) / np.arange(1, width, dtype=np.float32)[:, None, None]
    relative[:, place > farthest] = -1
    origin = np.arange(width - 1) * len(place) + farthest
    return {"look": look, "point": point, "origin": origin, "relative": relative.reshape(-1, 2).astype(np.float32)}


@lru_cache(maxsize=8)
def pixel_tables(smallest: int, largest: int) -> Mapping[str, np.ndarray]:
    """Return what "pixels" look up; cores share it.

    `place[first[size] + agent]` numbers the P places of the agent in fields of all sizes. Of each, `order` (P, N) are
    the cells that the rows show, `bare` (P, N, 5) the tokens of an empty field, and `row` (P, w²) the rows that show
    the cells. What is nowhere is painted, by `paint`, as the agent over the agent.
    """
    width = largest + 2
    cells, nowhere = width * width, width * width - 1
    first, place = np.zeros(largest + 1, np.int64), np.zeros((largest + 1 - smallest) * cells, np.int64)
    sizes = np.repeat(np.arange(smallest, largest + 1), np.arange(smallest, largest + 1) ** 2)  # (P,)
    order = np.full((len(sizes), largest**2 + 1), nowhere, np.int16)
    row = np.zeros((len(sizes), cells), np.int64)  # torch takes no smaller ones as indices, NumPy converts them first
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

"""Gymnasium's vector view: many worlds at once, in NumPy arrays or torch tensors, without a loop over worlds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from types import FunctionType
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from noisy_envs.arrays import Array, as_numpy, namespace, put_rows
from noisy_envs.cores import Core
from noisy_envs.options import build, check_choice, check_count, check_flag
from noisy_envs.randomness import MAX_SEED, episode_key, uniforms
from noisy_envs.registry import CORES
from noisy_envs.shells.common import (
    action_space,
    casting,
    check_episode,
    check_seed,
    check_start,
    driven,
    fresh_seed,
    observation_box,
)
from noisy_envs.shells.pure import Outcome, Worlds, judge, on_gpu, play, pure_step
from noisy_envs.tokens import TokenSpec


class TokenVectorEnv(VectorEnv[Any, Any, Any]):
    """`num_envs` worlds of a game in step, each seen by its first agent: tokens (B, N, D).

    World i seeded s is exactly the single environment seeded s + i, in each auto-reset mode. With `learners`, n agents
    of each world are driven, for one network that all of them share: tokens (B, n, N, D), actions and rewards (B, n).

    Args:
        game: a key of `noisy_envs.registry.CORES`; the core's docstring describes the game and its options.
        num_envs: number of worlds, B.
        max_episode_steps: a time limit; the smaller of it and the game's `max_steps` counts.
        backend: "numpy", or "torch" for tensors in and out.
        device: of the tensors, for example "cuda"; torch only.
        learners: "first", the first agent alone, without an agent axis; or a team of `core.teams` ("all"; in SimpleTag
            also "predators" and "prey"). The other agents follow their policies.
        autoreset_mode: NEXT_STEP (the step after an end resets and ignores its action), SAME_STEP (the last
            observation is in `info["final_obs"]`) or DISABLED (`reset(options={"reset_mask": mask})` resets some).
        compile: compile the step with `torch.compile`; torch only. The first step then takes a while.
        check_actions: look for NaN, infinity and numbers of no action; by default on NumPy only, since on a
            GPU it waits for the device. Shape, dtype and device are always checked.
        render_mode: None or "rgb_array".
        render_envs: draw at most so many worlds.
        options: the game's; an unknown one raises TypeError and names what is allowed.

    Rewards are float64 on NumPy, as Gymnasium's own vector environments give, float32 on torch. `info` holds
    `signal_mask` (B, N) and `snr` (B,), or (B, n, N) and (B, n), and of games that terminate `is_success` (B,), each
    with a mask (B,) in Gymnasium's manner, `_signal_mask` and so on. On torch `final_obs` and `final_info` are dense
    tensors, valid where their masks say.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012  Gymnasium declares it so

    def __init__(
        self,
        game: str,
        num_envs: int = 1,
        *,
        max_episode_steps: int | None = None,
        backend: str = "numpy",
        device: Any = None,
        learners: str = "first",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        compile: bool = False,
        check_actions: bool | None = None,
        render_mode: str | None = None,
        render_envs: int = 16,
        **options: Any,
    ) -> None:
        """Make the environments; see the class."""
        check_count("num_envs", num_envs, minimum=1, may_be_range=False)
        check_count("render_envs", render_envs, minimum=1, may_be_range=False)
        check_choice("backend", backend, ("numpy", "torch"))
        check_choice("render_mode", render_mode, (None, "rgb_array"))
        check_flag("compile", compile)
        if backend == "numpy" and (device is not None or compile):
            raise ValueError(f"device={device!r}, compile={compile}: only for backend='torch'")
        self.core: Core = build(CORES[game], options)
        self.num_envs, self.backend, self.render_mode, self.render_envs = num_envs, backend, render_mode, render_envs
        self.max_steps = self.core.max_steps
        if max_episode_steps is not None:
            check_count("max_episode_steps", max_episode_steps, minimum=1, may_be_range=False)
            self.max_steps = min(self.max_steps, max_episode_steps)
        self._time_limit = max_episode_steps
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {**type(self).metadata, "autoreset_mode": self.autoreset_mode}
        self.check_actions = backend == "numpy" if check_actions is None else check_actions
        if backend == "torch":
            import torch

            self.device = torch.empty(0, device=device or "cpu").device  # "cuda" becomes "cuda:0", as tensors say
        self.learners = driven(self.core, learners, ("first", *self.core.teams))
        self._cast = casting(self.core, self.learners)
        self._squeeze = learners == "first"
        agents = None if self._squeeze else self.learners.stop - self.learners.start
        self.single_observation_space = observation_box(self.core, agents)
        self.single_action_space = action_space(self.core, agents)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._compile = compile
        self._step: Any = None
        self._renderer: Any = None
        self._state: Any = None
        self._key: Array = None
        self._clock: Array = None
        self._facts: dict[str, Array] = {}  # what `info` tells of each world
        self._returns = np.zeros(num_envs)
        self._steps_to_end = 0
        self._seeds = np.full(num_envs, -1)
        self._numbers = np.full(num_envs, -1)

    @cached_property
    def observation_space(self) -> spaces.Space[Any]:  # type: ignore[override]
        """Space of all observations; made on demand, since it is as large as they are."""
        return batch_space(self.single_observation_space, self.num_envs)

    @property
    def token_spec(self) -> TokenSpec:
        """What an observation means; AttributeError where it is no set of tokens."""
        return self.core.token_spec

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents that are driven, in the order of the agent axis."""
        return self.core.agents[self.learners]

    @property
    def state(self) -> Any:
        """A copy of the worlds' state; `reset(options={"state": ...})` takes it."""
        self._check_playing()
        xp = namespace(self._clock)
        return type(self._state)._make(xp.asarray(field, copy=True) for field in self._state)

    @property
    def episodes(self) -> tuple[np.ndarray, np.ndarray]:
        """Seed and number (B,) of the episodes in play."""
        return self._seeds.copy(), self._numbers.copy()

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Start the next episodes, or the first ones of `seed`: tokens (B, N, D), info.

        Args:
            seed: of world 0, and world i takes seed + i; or one for each world.
            options: `reset_mask`, bool (B,), to reset some worlds only; `state`, a batch of states to start from, or
                those of `core.start_options`; `episode`, the number of the episode to start at. Others are ignored.
        """
        self._check_open()
        options = options or {}
        mask = self._reset_mask(options.get("reset_mask"))
        rows = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        # all checks come first: a refused reset changes nothing
        if self._state is None and mask is not None:
            raise RuntimeError("the first reset must be of all worlds: leave out options['reset_mask']")
        state = check_start(self.core, options, (self.num_envs,))
        seeds, numbers = self._next_episodes(seed, check_episode(options.get("episode")))
        if not isinstance(seed, Sequence):
            super().reset(seed=seed)
        self._seeds[rows], self._numbers[rows] = seeds[rows], numbers[rows]
        self._begin(rows, state)
        tokens = self._observe(self._state)
        self._facts = self._describe(self._state, tokens)
        return tokens, self._info(self._array(np.isin(np.arange(self.num_envs), rows)))

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Play actions (B, 5), or (B,) integers: tokens (B, N, D), reward, terminated, truncated (B,), info.

        With an agent axis: actions (B, n, 5), or (B, n): tokens (B, n, N, D), reward (B, n), and the rest as above.
        """
        self._check_playing()
        actions = self._read(actions)
        ended = self._ended()
        if ended is not None and self.autoreset_mode is AutoresetMode.DISABLED:
            raise RuntimeError(f"worlds {ended.tolist()} have ended: reset them with options={{'reset_mask': ...}}")
        self._state, self._clock, tokens, reward = self._advance(self._state, self._key, self._clock, actions)
        self._steps_to_end -= 1
        if self.core.signal_moves or self.core.terminates:
            self._facts = self._describe(self._state, tokens)
        if ended is not None:
            tokens = self._restart(ended, tokens)
            reward = put_rows(reward, self._array(ended), 0.0)
        terminated, truncated = judge(self.core, self.max_steps, self._time_limit, self._state, self._clock)
        if self.render_mode is not None:
            self._returns += as_numpy(reward).reshape(self.num_envs, -1)[:, 0]
        info: dict[str, Any] = {}
        if self.autoreset_mode is AutoresetMode.SAME_STEP and (ended := self._ended()) is not None:
            info = self._final(tokens, terminated | truncated)
            tokens = self._restart(ended, tokens)
        if self.backend == "numpy":
            reward = reward.astype(np.float64)
        return tokens, reward, terminated, truncated, info | self._info()

    @property
    def worlds(self) -> Worlds:
        """The worlds in play, for `pure_step`, which then needs no answer of the host.

        Raises:
            ValueError: on a GPU, if the game has too many levels to keep them there.
        """
        self._check_playing()
        xp = namespace(self._clock)
        if on_gpu(self._clock):
            self.core.prepare(self._clock)
        clock, key = (xp.asarray(x, copy=True) for x in (self._clock, self._key))
        seeds, numbers = (self._array(x) for x in self.episodes)
        return Worlds(self.state, clock, seeds, numbers, key)

    @property
    def pure_step(self) -> Callable[[Worlds, Array], tuple[Worlds, Outcome]]:
        """The step as a pure function of worlds and actions, see `noisy_envs.shells.pure.pure_step`."""
        return partial(pure_step, self.core, self.learners, self._cast, self.max_steps, self._time_limit)

    def render(self) -> tuple[np.ndarray, ...] | None:
        """Draw the first `render_envs` worlds: a tuple of images (H, W, 3) uint8."""
        self._check_playing()
        if self.render_mode is None:
            raise RuntimeError("render() needs render_mode='rgb_array' when the environments are made")
        if self._renderer is None:
            from noisy_envs.render import Renderer

            self._renderer = Renderer(self.core, self.render_mode)
        clocks = as_numpy(self._clock).tolist()
        state = [as_numpy(field) for field in self._state]
        return tuple(
            self._renderer.draw(type(self._state)._make(x[i] for x in state), clocks[i], float(self._returns[i]))
            for i in range(min(self.num_envs, self.render_envs))
        )

    def close_extras(self, **kwargs: Any) -> None:
        """Release what drawing holds; Gymnasium's `close` calls this once, and its signature asks for keywords."""
        if self._renderer is not None:
            self._renderer.close()

    def snapshot(self) -> dict[str, Any]:
        """Return arrays and numbers from which `restore` goes on exactly here, also in another process."""
        self._check_playing()
        copies = [namespace(x).asarray(x, copy=True) for x in (self._key, self._clock)]
        return {
            "options": self._options(),
            "state": tuple(self.state),
            "arrays": copies,
            "episodes": [x.tolist() for x in self.episodes],
            "returns": self._returns.tolist(),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go on where `snapshot` was taken, of environments with the same options and number of worlds.

        Raises:
            ValueError: naming what differs.
        """
        for option, value in self._options().items():
            if snapshot["options"].get(option) != value:
                taken_of = snapshot["options"].get(option, "none")
                raise ValueError(f"snapshot of {option}={taken_of}: must be of {option}={value}")
        seeds, numbers = snapshot["episodes"]
        if len(seeds) != self.num_envs:
            raise ValueError(f"snapshot of {len(seeds)} worlds: must be of num_envs={self.num_envs}")
        self._seeds, self._numbers = np.array(seeds), np.array(numbers)
        self._begin(np.arange(self.num_envs))
        taken = [self._array(np.array(as_numpy(x))) for x in (*snapshot["state"], *snapshot["arrays"])]
        self._state = type(self._state)._make(taken[:-2])
        self._key, self._clock = taken[-2:]
        self._facts = self._describe(self._state, self._observe(self._state))
        self._returns = np.array(snapshot["returns"])
        self._steps_to_end = self.max_steps - int(self._clock.max())

    def _options(self) -> dict[str, str]:
        """Tell what worlds these are: the game and its options, functions by their names."""
        options = {"game": self.core.name}
        for field in dataclasses.fields(self.core):  # type: ignore[arg-type]
            value = getattr(self.core, field.name)
            options[field.name] = (
                getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)
            )
        return options

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the compiled step, which cannot be copied; it is made again when needed."""
        return {**self.__dict__, "_step": None}

    def _advance(self, state: Any, key: Array, clock: Array, actions: Array) -> tuple[Any, Array, Array, Array]:
        """Play a step, compiled if asked for."""
        inputs = self.core, self.learners, self._cast, state, key, clock, actions[:, None] if self._squeeze else actions
        step = play
        if self._compile:
            if self._step is None:
                import torch

                play(*inputs)  # fills the core's cached properties: Python 3.11 locks them, which bars compiling
                # a copy of the code: dynamo counts variants by code, and refuses the ninth
                own = FunctionType(play.__code__.replace(), play.__globals__)
                self._step = torch.compile(own, fullgraph=True)
            step = self._step
        state, clock, tokens, rewards = step(*inputs)
        return (state, clock, tokens[:, 0], rewards[:, 0]) if self._squeeze else (state, clock, tokens, rewards)

    def _observe(self, state: Any) -> Array:
        """Return what the learners see of worlds in `state`."""
        tokens = self.core.observe(state, self.learners)
        return tokens[:, 0] if self._squeeze else tokens

    def _next_episodes(
        self, seed: int | Sequence[int | None] | None, number: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return seeds and numbers (B,) of the episodes that a reset of all worlds would begin."""
        if isinstance(seed, Sequence):
            if len(seed) != self.num_envs:
                raise ValueError(f"seed: {len(seed)} seeds given, must be num_envs={self.num_envs}")
            given = np.array([one is not None for one in seed])
            fresh = np.array([fresh_seed() if one is None else check_seed(one) for one in seed])
        else:
            base = fresh_seed() if seed is None else check_seed(seed)
            if base > MAX_SEED - self.num_envs:
                raise ValueError(f"seed={seed}: must be at most {MAX_SEED - self.num_envs} for {self.num_envs} worlds")
            given = np.full(self.num_envs, seed is not None)
            fresh = base + np.arange(self.num_envs)
        anew = given | (self._seeds < 0)
        numbers = np.where(anew, 0, self._numbers + 1) if number is None else np.full(self.num_envs, number)
        return np.where(anew, fresh, self._seeds), numbers

    def _begin(self, rows: np.ndarray, admitted: Any = None) -> None:
        """Start the episodes `_seeds`, `_numbers` in the worlds `rows`."""
        key = self._array(episode_key(self._seeds[rows], self._numbers[rows]))
        clock = namespace(key).zeros_like(key[:, 0])
        if admitted is None:
            state = self.core.initial(uniforms(key, clock, self.core.start_draws))
        else:
            state = type(admitted)._make(self._array(x[rows]) for x in admitted)
        if len(rows) == self.num_envs:
            self._state, self._key, self._clock = state, key, clock
            self._returns = np.zeros(self.num_envs)
        else:
            places = self._array(rows)
            fields = zip(self._state, state, strict=True)
            self._state = type(state)._make(put_rows(old, places, new) for old, new in fields)
            self._key, self._clock = put_rows(self._key, places, key), put_rows(self._clock, places, clock)
            self._returns[rows] = 0.0
        self._steps_to_end = self.max_steps - int(self._clock.max())

    def _restart(self, rows: np.ndarray, tokens: Array) -> Array:
        """Start the next episode in the worlds `rows`, and return `tokens` with their first observations."""
        self._numbers[rows] += 1
        self._begin(rows)
        if len(rows) == self.num_envs:
            tokens = self._observe(self._state)
            self._facts = self._describe(self._state, tokens)
            return tokens
        places = self._array(rows)
        state = type(self._state)._make(x[places] for x in self._state)
        fresh = self._observe(state)
        self._facts = {
            name: put_rows(self._facts[name], places, fact) for name, fact in self._describe(state, fresh).items()
        }
        return put_rows(tokens, places, fresh)

    def _ended(self) -> np.ndarray | None:
        """Return the rows of worlds whose episode is over, or None: known without asking the device where all last."""
        if self._steps_to_end > 0 and not self.core.terminates:
            return None
        rows = np.flatnonzero(as_numpy(self._over()))
        return rows if len(rows) else None

    def _over(self) -> Array:
        """Tell which worlds (B,) have ended."""
        over = self._clock >= self.max_steps
        return over | self.core.terminated(self._state) if self.core.terminates else over

    def _describe(self, state: Any, tokens: Array) -> dict[str, Array]:
        """Return what `info` tells of R worlds and what they show, (R, N, D) or (R, n, N, D).

        That is which tokens carry signal, their share of all that are not padding, and whether the goal is reached.
        """
        xp = namespace(tokens)
        mask = self.core.signal_mask(tokens)
        lead = tokens.shape[: 1 if self._squeeze else 2]
        masks = (xp.reshape(x, (*lead, -1)) for x in (mask, self.core.token_mask(tokens)))
        signal, present = (xp.sum(xp.astype(x, xp.int64), axis=-1) for x in masks)
        snr = xp.astype(signal, xp.float64 if self.backend == "numpy" else xp.float32) / present
        return {"signal_mask": mask, "snr": snr} | (
            {"is_success": self.core.success(state)} if self.core.terminates else {}
        )

    def _info(self, where: Array | None = None) -> dict[str, Any]:
        """Lay out what there is to tell of the worlds `where`, or of all, as Gymnasium does."""
        xp = namespace(self._clock)
        info = {}
        for name, fact in self._facts.items():
            told = xp.asarray(fact, copy=True)
            if where is not None:
                told = told * xp.reshape(where, (-1, *[1] * (fact.ndim - 1)))
            info[name] = told
            info[f"_{name}"] = (
                xp.ones_like(self._clock, dtype=xp.bool) if where is None else xp.asarray(where, copy=True)
            )
        return info

    def _final(self, tokens: Array, ended: Array) -> dict[str, Any]:
        """Lay out the last observations of the worlds `ended` as Gymnasium does, or densely on torch."""
        final_obs = tokens
        if self.backend == "numpy":
            final_obs = np.full(self.num_envs, None, dtype=object)
            for i in np.flatnonzero(ended):
                final_obs[i] = tokens[i].copy()
        ended, again, info_ended = (namespace(tokens).asarray(ended, copy=True) for _ in range(3))
        final_info = self._info(info_ended)
        return {"final_obs": final_obs, "_final_obs": ended, "final_info": final_info, "_final_info": again}

    def _array(self, array: np.ndarray) -> Array:
        """Move a NumPy array to the backend."""
        if self.backend == "numpy":
            return array
        import torch

        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _reset_mask(self, mask: Any) -> np.ndarray | None:
        if mask is None:
            return None
        array = as_numpy(mask)
        if array.shape != (self.num_envs,) or array.dtype != np.bool_ or not array.any():
            raise ValueError(f"reset_mask={mask!r}: must be bool ({self.num_envs},) with at least one True")
        return array

    def _read(self, actions: Any) -> Array:
        """Return actions as an array of the backend, or raise."""
        core = self.core
        shape = self.action_space.shape
        if self.backend == "numpy":
            actions = np.asarray(actions, dtype=np.float32 if core.continuous_actions else None)
            good_type = core.continuous_actions or actions.dtype.kind in "iu"
            if good_type and actions.dtype.kind == "u":  # arithmetic with uint64 would end in floats
                actions = actions.astype(np.int64)
        else:
            kind = "real floating" if core.continuous_actions else "integral"
            good_type = getattr(actions, "device", None) == self.device and (
                namespace(actions).isdtype(actions.dtype, kind)
            )
        if not good_type or tuple(actions.shape) != shape:
            kind = "float" if core.continuous_actions else "integer"
            where = f", a Tensor on {self.device}" if self.backend == "torch" else ""
            got = f"{type(actions).__name__} {getattr(actions, 'dtype', '')} {tuple(getattr(actions, 'shape', ()))}"
            raise ValueError(f"actions: {got} must be {kind} {shape}{where}")
        if self.backend == "torch":  # float32 whatever comes, and no graph of gradients that grows with each step
            actions = actions.detach().float() if core.continuous_actions else actions.detach().long()
        if self.check_actions:
            self._check_values(actions)
        if not core.continuous_actions:  # an unchecked number must not reach out of a table: a GPU would not recover
            actions = namespace(actions).clip(actions, 0, core.num_actions - 1)
        return actions

    def _check_values(self, actions: Array) -> None:
        """Raise on a number that no action has; worlds about to reset ignore theirs."""
        xp = namespace(actions)
        if self.core.continuous_actions:
            good = xp.isfinite(actions)
        else:
            good = (actions >= 0) & (actions < self.core.num_actions)
        good = xp.all(xp.reshape(good, (self.num_envs, -1)), axis=1)
        if not bool(xp.all(good | self._over())):
            bad = int(xp.argmin(xp.astype(good, xp.int64)))
            allowed = "finite numbers" if self.core.continuous_actions else f"from 0 to {self.core.num_actions - 1}"
            raise ValueError(f"action {actions[bad]} of world {bad}: must be {allowed}")

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("the environments are closed: make new ones")

    def _check_playing(self) -> None:
        self._check_open()
        if self._state is None:
            raise RuntimeError("no episode has begun: call reset() first")

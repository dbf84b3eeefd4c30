"""Gymnasium's vector interface: many environments at once, in NumPy or torch, without a loop over environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from types import FunctionType
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from noisy_envs.arrays import Array, as_numpy, namespace, scatter_rows
from noisy_envs.games.game import Game
from noisy_envs.interfaces.checks import (
    check_episode,
    check_game,
    check_initial_state,
    check_options,
    check_render_mode,
    check_reset_mask,
    next_episodes,
    requested_state,
    seeds_as_list,
)
from noisy_envs.interfaces.functional import (
    BatchState,
    EnvParams,
    StepResult,
    VectorStep,
    done,
    expand_like,
    make_info,
    on_gpu,
    play,
    pure_step,
    step_with_autoreset,
    termination,
)
from noisy_envs.interfaces.scripted import assign_policies, controlled_agents
from noisy_envs.interfaces.spaces import TimeLimitSpec, action_space, observation_box
from noisy_envs.randomness import episode_key, uniforms
from noisy_envs.registration import GameLike, game_class
from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import build, check_choice, check_count, check_flag, plain, unexpected


class TokenVectorEnv(TimeLimitSpec, VectorEnv[Any, Any, Any]):
    """`num_envs` environments of a game, in which the first agents are controlled; observations are tokens (B, N, D).

    Environment i seeded s equals the single environment seeded s + i, in all auto-reset modes. With `learners`, n
    agents of each environment are controlled, as by a shared network: tokens (B, n, N, D), actions and rewards (B, n).

    Args:
        game: a key of `noisy_envs.registration.GAMES`, a class that follows `noisy_envs.games.game.Game`, or
            "module:Class". The class docstring describes the game and its options.
        num_envs: number of environments, B.
        max_episode_steps: time limit, at most the game's `max_steps`.
        backend: "numpy", or "torch" for tensors in and out.
        device: of the tensors, for example "cuda".
        learners: the controlled agents: "first", without an agent axis, or a key of `game.teams`, for example "all" or
            SimpleTag's "predators". The other agents follow their scripted policies.
        autoreset_mode: NEXT_STEP (the step after the end of an episode resets and ignores its action), SAME_STEP (the
            last observation is in `info["final_obs"]`) or DISABLED (use `reset(options={"reset_mask": mask})`).
        compile: compile the step with `torch.compile`, and on a GPU record it as a CUDA graph. The first step is then
            slow, as is the first one with resets.
        copy: False saves time and memory: the next step may overwrite what a step returns, including `info`.
        check_actions: check for NaN, infinity and actions out of range; by default only in NumPy, since it waits for a
            GPU. Shape, dtype and device are always checked.
        render_mode: None or "rgb_array".
        render_envs: largest number of environments to render.
        options: of the game; unknown ones raise TypeError.

    Rewards are float64 in NumPy, as in Gymnasium's vector environments, and float32 in torch. `info` contains
    `signal_mask` (B, N) and `snr` (B,), or (B, n, N) and (B, n), and, if the game terminates, `is_success` (B,), each
    with Gymnasium's mask (B,), for example `_signal_mask`. In torch `final_obs` and `final_info` are dense tensors,
    valid where their masks are True.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012  Gymnasium declares it so
    _renderer: Any = None  # a class attribute: Gymnasium before 1.3 calls `close` even if `__init__` failed

    def __init__(
        self,
        game: GameLike,
        num_envs: int = 1,
        *,
        max_episode_steps: int | None = None,
        backend: str = "numpy",
        device: Any = None,
        learners: str = "first",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        compile: bool = False,
        copy: bool = True,
        check_actions: bool | None = None,
        render_mode: str | None = None,
        render_envs: int = 16,
        **options: Any,
    ) -> None:
        """Make the environments; see the class."""
        num_envs, max_episode_steps, render_envs = map(plain, (num_envs, max_episode_steps, render_envs))
        compile, copy, check_actions = map(plain, (compile, copy, check_actions))
        for name, count in (("num_envs", num_envs), ("render_envs", render_envs)):
            check_count(name, count, minimum=1, may_be_range=False)
        check_choice("backend", backend, ("numpy", "torch"))
        for name, flag in (("compile", compile), ("copy", copy)):
            check_flag(name, flag)
        if backend == "numpy" and (device is not None or compile):
            raise ValueError(f"device={device!r}, compile={compile}: expected backend='torch'")
        self.game: Game = build(game_class(game), options)
        check_render_mode(self.game, render_mode, ("rgb_array",))
        self.num_envs, self.backend, self.render_mode, self.render_envs = num_envs, backend, render_mode, render_envs
        max_steps = self.game.max_steps
        if max_episode_steps is not None:
            check_count("max_episode_steps", max_episode_steps, minimum=1, may_be_range=False)
            if max_episode_steps > max_steps:
                allowed = f"at most max_steps={max_steps}; for longer episodes set max_steps={max_episode_steps}"
                raise unexpected("max_episode_steps", max_episode_steps, allowed)
            max_steps = max_episode_steps
        modes = tuple(mode.value for mode in AutoresetMode)
        check_choice("autoreset_mode", getattr(autoreset_mode, "value", autoreset_mode), modes)
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        render_modes = [mode for mode in type(self).metadata["render_modes"] if mode in self.game.render_modes]
        self.metadata = {**type(self).metadata, "render_modes": render_modes, "autoreset_mode": self.autoreset_mode}
        self.check_actions = backend == "numpy" if check_actions is None else check_actions
        if backend == "torch":
            import torch

            try:
                number = torch.zeros((), device=device or "cpu")
                number.item()  # fails on the device "meta"
            except (RuntimeError, AssertionError) as error:
                raise unexpected("device", device, f"a device of torch ({str(error).splitlines()[0]})") from None
            self.device = number.device  # "cuda:0" for "cuda", as in tensors
        self.learners = controlled_agents(self.game, learners, ("first", *self.game.teams))
        assignment = assign_policies(self.game, self.learners)
        self._params = EnvParams(self.game, self.learners, assignment, max_steps, max_episode_steps)
        self._spec_kwargs = {"max_episode_steps": max_episode_steps}
        self._squeeze = learners == "first"
        self._lead = 1 if self._squeeze else 2  # axes before those of one observation
        agents = None if self._squeeze else self.learners.stop - self.learners.start
        self.single_observation_space = observation_box(self.game, agents)
        self.single_action_space = action_space(self.game, agents)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._compile, self._copy = compile, copy
        self._steps: dict[str | bool, Any] = {}  # compiled functions, and steps on a device with and without resets
        self._batch: Any = None
        self._last_info: dict[str, Array] = {}  # of all environments, without masks
        self._returns = np.zeros(num_envs)
        self._steps_to_end = 0  # steps in which no episode is truncated
        self._in_step = True  # whether all episodes started at the same time
        self._on_device = False  # whether the device resets environments without waiting for the host

    @cached_property
    def observation_space(self) -> spaces.Space[Any]:  # type: ignore[override]
        """Space of all observations; made on demand, since it is as large as they are."""
        return batch_space(self.single_observation_space, self.num_envs)

    @property
    def max_steps(self) -> int:
        """Steps after which an episode is truncated."""
        return self._params.max_steps

    @property
    def token_spec(self) -> TokenSpec:
        """Meaning of an observation; AttributeError if it is not a set of tokens."""
        return self.game.token_spec

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the controlled agents, in the order of the agent axis."""
        return self.game.agents[self.learners]

    @property
    def state(self) -> Any:
        """A copy of the states, as `reset(options={"state": ...})` accepts them."""
        self._check_playing()
        state = self._batch.state
        return type(state)._make(namespace(field).asarray(field, copy=True) for field in state)

    @property
    def episodes(self) -> tuple[np.ndarray, np.ndarray]:
        """Seeds and numbers (B,) of the current episodes."""
        if self._batch is None:
            return np.full(self.num_envs, -1), np.full(self.num_envs, -1)
        return np.array(as_numpy(self._batch.seed)), np.array(as_numpy(self._batch.number))

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Start the next episodes, or the first ones of `seed`, and return tokens (B, N, D) and info.

        Args:
            seed: of environment 0, where environment i has seed + i, or a list or array of B seeds.
            options: `reset_mask`, bool (B,), to reset some environments only; `state`, starting states, or one of
                `game.reset_options`; `episode`, the number of the episode. Others are ignored.
        """
        self._check_open()
        seed = seeds_as_list(seed)
        options = check_options(options)
        mask = check_reset_mask(options.get("reset_mask"), self.num_envs)
        rows = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        # all checks come first: a failed reset changes nothing
        if self._batch is None and mask is not None:
            raise RuntimeError("the first reset must be of all environments: leave out options['reset_mask']")
        state = requested_state(self.game, options, (self.num_envs,))
        seeds, numbers = next_episodes(seed, check_episode(options.get("episode")), *self.episodes)
        self._begin(rows, seeds[rows], numbers[rows], state)
        if not isinstance(seed, Sequence):
            super().reset(seed=None if seed is None else int(seed))  # Gymnasium rejects NumPy integers
        self._returns[rows] = 0.0
        tokens = self._observe(self._batch.state)
        self._last_info = self._make_info(self._batch.state, tokens)
        return tokens, self._with_masks(self._last_info, self._array(np.isin(np.arange(self.num_envs), rows)))

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Play actions (B, ...), and return tokens (B, N, D), reward, terminated and truncated (B,), and info.

        With an agent axis: actions (B, n, ...), tokens (B, n, N, D) and reward (B, n).
        """
        self._check_playing()
        actions = self._as_actions(actions)
        play_all = self._step_on_device if self._on_device else self._step_by_host
        tokens, reward, terminated, truncated, info = play_all(actions[:, None] if self._squeeze else actions)
        if self.render_mode is not None:
            self._returns += as_numpy(reward).reshape(self.num_envs, -1)[:, 0]
            self._returns[as_numpy(self._batch.clock) == 0] = 0.0
        return tokens, reward, terminated, truncated, info | self._with_masks(self._last_info)

    def _step_by_host(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Play actions (B, n, ...), and let the host reset the environments whose episodes have ended.

        This is the plain version, and the faster one on a CPU: next episodes are computed only where they are needed.
        """
        ended = self._ended()
        self._refuse_ended(ended)
        batch = self._batch
        state, clock, tokens, reward = self._play(self._params, batch.state, batch.key, batch.clock, actions)
        if self._squeeze:
            tokens, reward = tokens[:, 0], reward[:, 0]
        self._batch = batch._replace(state=state, clock=clock)
        self._steps_to_end -= 1
        if self.game.signal_moves or self.game.terminates:
            self._last_info = self._make_info(state, tokens)
        if ended is not None:
            tokens = self._restart(ended, tokens)
            reward = scatter_rows(reward, self._array(ended), 0.0)
        terminated, truncated = termination(self._params, self._batch.state, self._batch.clock)
        info: dict[str, Any] = {}
        if self.autoreset_mode is AutoresetMode.SAME_STEP and (ended := self._ended()) is not None:
            info = self._final(tokens, terminated | truncated, self._last_info)
            tokens = self._restart(ended, tokens)
        return tokens, reward.astype(np.float64) if self.backend == "numpy" else reward, terminated, truncated, info

    def _step_on_device(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Play actions (B, n, ...), and let the device reset environments.

        The host does not wait for the GPU. In return every step that may end an episode computes the next episodes of
        all environments; in the particle games these are few steps, as episodes that started together end together.
        """
        mode = self.autoreset_mode
        if mode is AutoresetMode.DISABLED:
            self._refuse_ended(self._ended())
        last = 1 if mode is AutoresetMode.SAME_STEP else 0
        resets = mode is not AutoresetMode.DISABLED and (self.game.terminates or self._steps_to_end <= last)
        result = self._play_with_resets(resets, actions)
        self._steps_to_end -= 1
        if resets:
            self._steps_to_end = self.max_steps if self._in_step else 0
        self._last_info = result.info or self._last_info
        arrays: tuple[Any, ...] = result[:5]
        if self._compile and self._copy:
            arrays = tuple(x if x is None else x.clone() for x in arrays)
        tokens, reward, final_tokens, terminated, truncated = arrays
        info: dict[str, Any] = {}
        if final_tokens is not None:
            info = self._final(final_tokens, result.terminated | result.truncated, result.final_info)
        return tokens, reward, terminated, truncated, info

    @property
    def batch_state(self) -> BatchState:
        """A copy of the state for `pure_step`.

        Raises:
            ValueError: on a GPU, if the game has too many levels to cache them there.
        """
        self._check_playing()
        _, *others = self._batch
        if on_gpu(self._batch.clock):
            self.game.prepare(self._batch.clock)
        return BatchState(self.state, *(namespace(x).asarray(x, copy=True) for x in others))

    @property
    def pure_step(self) -> Callable[[BatchState, Array], tuple[BatchState, StepResult]]:
        """The step as a pure function of state and actions, see `noisy_envs.interfaces.functional.pure_step`."""
        return partial(pure_step, self._params)

    def render(self) -> tuple[np.ndarray, ...] | None:
        """Render the first `render_envs` environments: a tuple of images (H, W, 3) uint8."""
        self._check_playing()
        if self.render_mode is None:
            raise RuntimeError("render() needs render_mode='rgb_array' when the environments are made")
        if self._renderer is None:
            from noisy_envs.rendering.renderer import Renderer

            self._renderer = Renderer(self.game, self.render_mode)
        clocks = as_numpy(self._batch.clock).tolist()
        state = type(self._batch.state)._make(as_numpy(field) for field in self._batch.state)
        return tuple(
            self._renderer.draw(type(state)._make(x[i] for x in state), clocks[i], float(self._returns[i]))
            for i in range(min(self.num_envs, self.render_envs))
        )

    def close_extras(self, **kwargs: Any) -> None:
        """Release the renderer; called by Gymnasium's `close`, whose signature has keywords."""
        if self._renderer is not None:
            self._renderer.close()

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without compiled steps, which are compiled again when needed."""
        return {**self.__dict__, "_steps": {}}

    def _play(self, *inputs: Any) -> Any:
        """Play a step without resets, compiled if requested."""
        if not self._compile:
            return play(*inputs)
        if "play" not in self._steps:
            self._steps["play"] = compiled(play, *inputs)
        return self._steps["play"](*inputs)

    def _play_with_resets(self, resets: bool, actions: Array) -> VectorStep:
        """Play a step on the device, with `resets` if True; if compiled, it overwrites the arrays of the last one."""
        if resets not in self._steps:
            fixed = self._params, self.autoreset_mode, resets, self._lead
            step: Callable[..., Any] = partial(step_with_autoreset, *fixed)
            if self._compile:
                from noisy_envs.nn.cuda_graph import CudaGraph

                whole = compiled(step_with_autoreset, *fixed, self._batch, actions)
                step = CudaGraph(partial(in_place, partial(whole, *fixed)))
            self._steps[resets] = step
        self._batch, result = self._steps[resets](self._batch, actions)
        return result

    def _observe(self, state: Any) -> Array:
        """Return the observations of the controlled agents."""
        tokens = self.game.observe(state, self.learners)
        return tokens[:, 0] if self._squeeze else tokens

    def _begin(self, rows: np.ndarray, seeds: np.ndarray, numbers: np.ndarray, given: Any = None) -> None:
        """Start episodes of `seeds` and `numbers` (R,) in the environments `rows` (R,)."""
        key = self._array(episode_key(seeds, numbers))
        clock = namespace(key).zeros_like(key[:, 0])
        self._on_device = on_gpu(key) and self._prepare(key)
        if given is None:
            state = self.game.initial(uniforms(key, clock, self.game.num_reset_uniforms))
        else:
            state = type(given)._make(self._array(x[rows]) for x in given)
        if self._batch is None:
            check_game(self.game, state, self.learners, key)
        if given is None:
            check_initial_state(self.game, state, seeds, numbers)
        batch = BatchState(state, clock, self._array(seeds), self._array(numbers), key)
        self._in_step = len(rows) == self.num_envs
        self._batch = batch if self._in_step else scatter_batch(self._batch, self._array(rows), batch)
        self._steps_to_end = self.max_steps - int(self._batch.clock.max())

    def _prepare(self, like: Array) -> bool:
        """Let the game cache what starting states need on the device of `like`; return False if it cannot."""
        try:
            self.game.prepare(like)
        except ValueError:
            return False
        return True

    def _restart(self, rows: np.ndarray, tokens: Array) -> Array:
        """Start the next episode in the environments `rows`, and return `tokens` with their first observations."""
        seeds, numbers = (x[rows] for x in self.episodes)
        self._begin(rows, seeds, numbers + 1)
        if len(rows) == self.num_envs:
            tokens = self._observe(self._batch.state)
            self._last_info = self._make_info(self._batch.state, tokens)
            return tokens
        indices = self._array(rows)
        state = type(self._batch.state)._make(x[indices] for x in self._batch.state)
        fresh = self._observe(state)
        for name, value in self._make_info(state, fresh).items():
            self._last_info[name] = scatter_rows(self._last_info[name], indices, value)
        return scatter_rows(tokens, indices, fresh)

    def _ended(self) -> np.ndarray | None:
        """Return the environments whose episode has ended, or None; waits for the device only if there may be some."""
        if self._steps_to_end > 0 and not self.game.terminates:
            return None
        rows = np.flatnonzero(as_numpy(done(self._params, self._batch)))
        return rows if len(rows) else None

    def _refuse_ended(self, ended: np.ndarray | None) -> None:
        if ended is not None and self.autoreset_mode is AutoresetMode.DISABLED:
            raise RuntimeError(
                f"environments {ended.tolist()} have ended: reset them with options={{'reset_mask': ...}}"
            )

    def _make_info(self, state: Any, tokens: Array) -> dict[str, Array]:
        """Return the info of environments in `state`, without masks."""
        xp = namespace(tokens)
        return make_info(self.game, state, tokens, self._lead, xp.float64 if self.backend == "numpy" else xp.float32)

    def _with_masks(self, values: dict[str, Array], where: Array | None = None) -> dict[str, Any]:
        """Return info with Gymnasium's masks, for the environments `where`, bool (B,), or for all."""
        info = {}
        for name, value in values.items():
            info[name] = self._own(value) if where is None else value * expand_like(where, value)
            info[f"_{name}"] = self._own(self._everywhere if where is None else where)
        return info

    @cached_property
    def _everywhere(self) -> Array:
        return self._array(np.ones(self.num_envs, np.bool_))

    def _own(self, array: Array) -> Array:
        """Return a copy for the caller, unless `copy` is False."""
        if not self._copy:
            return array
        return array.copy() if self.backend == "numpy" else array.clone()

    def _final(self, tokens: Array, ended: Array, info: dict[str, Array]) -> dict[str, Any]:
        """Return last observations and info where `ended`, in Gymnasium's format, or dense in torch."""
        final_obs = tokens
        if self.backend == "numpy":
            final_obs = np.full(self.num_envs, None, dtype=object)
            for i in np.flatnonzero(ended):
                final_obs[i] = tokens[i].copy()
        final_info = self._with_masks(info, ended)
        return {"final_obs": final_obs, "_final_obs": ended, "final_info": final_info, "_final_info": self._own(ended)}

    def _array(self, array: np.ndarray) -> Array:
        """Convert a NumPy array to the backend."""
        if self.backend == "numpy":
            return array
        import torch

        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _as_actions(self, actions: Any) -> Array:
        """Return actions as an array of the backend, or raise."""
        game = self.game
        shape = self.action_space.shape
        if self.backend == "numpy":
            actions = np.asarray(actions, dtype=np.float32 if game.continuous_actions else None)
            good_type = game.continuous_actions or actions.dtype.kind in "iu"
            if good_type and actions.dtype.kind == "u":  # arithmetic with uint64 would give floats
                actions = actions.astype(np.int64)
        else:
            kind = "real floating" if game.continuous_actions else "integral"
            good_type = getattr(actions, "device", None) == self.device and (
                namespace(actions).isdtype(actions.dtype, kind)
            )
        if not good_type or tuple(actions.shape) != shape:
            kind = "float" if game.continuous_actions else "integer"
            where = f" on {self.device}" if self.backend == "torch" else ""
            got = f"{type(actions).__name__} {getattr(actions, 'dtype', '')} {tuple(getattr(actions, 'shape', ()))}"
            raise ValueError(f"actions: expected {kind} {shape}{where}, got {got}")
        if self.backend == "torch":  # detached, or the autograd graph would grow with every step
            actions = actions.detach().float() if game.continuous_actions else actions.detach().long()
        if self.check_actions:
            self._check_values(actions)
        return actions

    def _check_values(self, actions: Array) -> None:
        """Raise on invalid actions, but not in environments that are reset and ignore them."""
        xp = namespace(actions)
        if self.game.continuous_actions:
            good = xp.isfinite(actions)
        else:
            good = (actions >= 0) & (actions < self.game.num_actions)
        good = xp.all(xp.reshape(good, (self.num_envs, -1)), axis=1)
        if not bool(xp.all(good | done(self._params, self._batch))):
            bad = int(xp.argmin(xp.astype(good, xp.int64)))
            allowed = "finite numbers" if self.game.continuous_actions else f"0 to {self.game.num_actions - 1}"
            raise ValueError(f"actions: expected {allowed}, got {as_numpy(actions[bad]).tolist()} in environment {bad}")

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("the environments are closed: make new ones")

    def _check_playing(self) -> None:
        self._check_open()
        if self._batch is None:
            raise RuntimeError("no episode has started: call reset() first")


def compiled(function: Any, *inputs: Any) -> Any:
    """Compile a function after calling it once, to fill the game's cached properties: Python 3.11 locks them."""
    import torch

    function(*inputs)
    # a copy of the code, since dynamo limits the number of variants of one code object to eight
    return torch.compile(FunctionType(function.__code__.replace(), function.__globals__), fullgraph=True)


def in_place(step: Callable[..., Any], batch: BatchState, actions: Array) -> tuple[BatchState, VectorStep]:
    """Play a step that overwrites the state, as the replay of a CUDA graph requires."""
    after, result = step(batch, actions)
    for old, new in zip((*batch.state, *batch[1:]), (*after.state, *after[1:]), strict=True):
        if new is not old:  # constants are passed through
            old.copy_(new)
    return batch, result


def scatter_batch(batch: BatchState, rows: Array, fresh: BatchState) -> BatchState:
    """Return a copy of `batch` in which `rows` (R,) are replaced by `fresh`."""

    def put(old: Any, new: Any) -> Any:
        return (scatter_rows(x, rows, y) for x, y in zip(old, new, strict=True))

    return BatchState(type(batch.state)._make(put(batch.state, fresh.state)), *put(batch[1:], fresh[1:]))

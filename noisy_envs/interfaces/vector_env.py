"""Gymnasium's vector view: many worlds at once, in NumPy arrays or torch tensors, without a loop over worlds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from types import FunctionType
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
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
from noisy_envs.interfaces.spaces import action_space, observation_box
from noisy_envs.randomness import episode_key, uniforms
from noisy_envs.registration import GameLike, game_class
from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import build, check_choice, check_count, check_flag, plain


class TokenVectorEnv(VectorEnv[Any, Any, Any]):
    """`num_envs` worlds of a game in step, each seen by its first agent: tokens (B, N, D).

    World i seeded s is exactly the single environment seeded s + i, in each auto-reset mode. With `learners`, n agents
    of each world are driven, for one network that all of them share: tokens (B, n, N, D), actions and rewards (B, n).

    Args:
        game: a key of `noisy_envs.registration.GAMES`, a class that follows `noisy_envs.games.game.Game`, or
            "module:Class". The class docstring describes the game and its options.
        num_envs: number of worlds, B.
        max_episode_steps: a time limit, at most the game's `max_steps`.
        backend: "numpy", or "torch" for tensors in and out.
        device: of the tensors, for example "cuda"; torch only.
        learners: "first", the first agent alone, without an agent axis; or a team of `game.teams` ("all"; in SimpleTag
            also "predators" and "prey"). The other agents follow their policies.
        autoreset_mode: NEXT_STEP (the step after an end resets and ignores its action), SAME_STEP (the last
            observation is in `info["final_obs"]`) or DISABLED (`reset(options={"reset_mask": mask})` resets some).
        compile: compile the step with `torch.compile`, and on a GPU record it as a CUDA graph; torch only. The first
            step then takes a while, and so does the first that resets.
        copy: False saves time and memory: what a step returns may be overwritten by the next, `info` included.
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
    _spec: EnvSpec | None = None
    _renderer: Any = None  # here, since Gymnasium before 1.3 closes also what could not be made

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
            raise ValueError(f"device={device!r}, compile={compile}: only for backend='torch'")
        self.game: Game = build(game_class(game), options)
        check_render_mode(self.game, render_mode, ("rgb_array",))
        self.num_envs, self.backend, self.render_mode, self.render_envs = num_envs, backend, render_mode, render_envs
        max_steps = self.game.max_steps
        if max_episode_steps is not None:
            check_count("max_episode_steps", max_episode_steps, minimum=1, may_be_range=False)
            if max_episode_steps > max_steps:
                raise ValueError(
                    f"max_episode_steps={max_episode_steps}: must be at most max_steps={max_steps}; "
                    f"for longer episodes give max_steps={max_episode_steps}"
                )
            max_steps = max_episode_steps
        modes = tuple(mode.value for mode in AutoresetMode)
        check_choice("autoreset_mode", getattr(autoreset_mode, "value", autoreset_mode), modes)
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        drawn = [mode for mode in type(self).metadata["render_modes"] if mode in self.game.render_modes]
        self.metadata = {**type(self).metadata, "render_modes": drawn, "autoreset_mode": self.autoreset_mode}
        self.check_actions = backend == "numpy" if check_actions is None else check_actions
        if backend == "torch":
            import torch

            try:
                number = torch.zeros((), device=device or "cpu")
                number.item()  # "meta" holds none
            except (RuntimeError, AssertionError) as error:
                raise ValueError(f"device={device!r}: must be one of torch's ({str(error).splitlines()[0]})") from None
            self.device = number.device  # "cuda" becomes "cuda:0", as tensors say
        self.learners = controlled_agents(self.game, learners, ("first", *self.game.teams))
        assignment = assign_policies(self.game, self.learners)
        self._params = EnvParams(self.game, self.learners, assignment, max_steps, max_episode_steps)
        self._squeeze = learners == "first"
        self._lead = 1 if self._squeeze else 2  # axes before those of one observation
        agents = None if self._squeeze else self.learners.stop - self.learners.start
        self.single_observation_space = observation_box(self.game, agents)
        self.single_action_space = action_space(self.game, agents)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._compile, self._copy = compile, copy
        self._steps: dict[str | bool, Any] = {}  # compiled, and on a device with and without resets
        self._batch: Any = None
        self._facts: dict[str, Array] = {}  # what `info` tells of each world
        self._returns = np.zeros(num_envs)
        self._steps_to_end = 0  # in which no world ends, unless the game terminates
        self._in_step = True  # whether all worlds began at once
        self._on_device = False  # whether the device resets worlds, without asking the host

    @cached_property
    def observation_space(self) -> spaces.Space[Any]:  # type: ignore[override]
        """Space of all observations; made on demand, since it is as large as they are."""
        return batch_space(self.single_observation_space, self.num_envs)

    @property
    def spec(self) -> EnvSpec | None:
        """How `gymnasium.make_vec` made them; its `max_episode_steps` is `max_steps`."""
        return self._spec

    @spec.setter
    def spec(self, spec: EnvSpec | None) -> None:
        """Keep what `gymnasium.make_vec` says, and add the time limit; the one that was given stays an argument."""
        if spec is not None:
            kwargs = {name: plain(value) for name, value in spec.kwargs.items()}  # JSON knows no numbers of NumPy
            kwargs["max_episode_steps"] = self._params.time_limit
            spec = dataclasses.replace(spec, max_episode_steps=self.max_steps, kwargs=kwargs)
        self._spec = spec

    @property
    def max_steps(self) -> int:
        """Steps after which an episode is truncated."""
        return self._params.max_steps

    @property
    def token_spec(self) -> TokenSpec:
        """What an observation means; AttributeError where it is no set of tokens."""
        return self.game.token_spec

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents that are driven, in the order of the agent axis."""
        return self.game.agents[self.learners]

    @property
    def state(self) -> Any:
        """A copy of the worlds' state; `reset(options={"state": ...})` takes it."""
        self._check_playing()
        state = self._batch.state
        return type(state)._make(namespace(field).asarray(field, copy=True) for field in state)

    @property
    def episodes(self) -> tuple[np.ndarray, np.ndarray]:
        """Seed and number (B,) of the episodes in play."""
        if self._batch is None:
            return np.full(self.num_envs, -1), np.full(self.num_envs, -1)
        return np.array(as_numpy(self._batch.seed)), np.array(as_numpy(self._batch.number))

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Start the next episodes, or the first ones of `seed`: tokens (B, N, D), info.

        Args:
            seed: of world 0, and world i takes seed + i; or one for each world, in a list or an array.
            options: `reset_mask`, bool (B,), to reset some worlds only; `state`, a batch of states to start from, or
                those of `game.reset_options`; `episode`, the number of the episode to start at. Others are ignored.
        """
        self._check_open()
        seed = seeds_as_list(seed)
        options = check_options(options)
        mask = check_reset_mask(options.get("reset_mask"), self.num_envs)
        rows = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        # all checks come first: a refused reset changes nothing
        if self._batch is None and mask is not None:
            raise RuntimeError("the first reset must be of all worlds: leave out options['reset_mask']")
        state = requested_state(self.game, options, (self.num_envs,))
        seeds, numbers = next_episodes(seed, check_episode(options.get("episode")), *self.episodes)
        self._begin(rows, seeds[rows], numbers[rows], state)
        if not isinstance(seed, Sequence):
            super().reset(seed=None if seed is None else int(seed))  # Gymnasium refuses NumPy's integers
        self._returns[rows] = 0.0
        tokens = self._observe(self._batch.state)
        self._facts = self._make_info(self._batch.state, tokens)
        return tokens, self._info(self._facts, self._array(np.isin(np.arange(self.num_envs), rows)))

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Play actions (B, 5), or (B,) integers: tokens (B, N, D), reward, terminated, truncated (B,), info.

        With an agent axis: actions (B, n, 5), or (B, n): tokens (B, n, N, D), reward (B, n), and the rest as above.
        """
        self._check_playing()
        actions = self._read(actions)
        play_all = self._step_on_device if self._on_device else self._step_by_host
        tokens, reward, terminated, truncated, info = play_all(actions[:, None] if self._squeeze else actions)
        if self.render_mode is not None:
            self._returns += as_numpy(reward).reshape(self.num_envs, -1)[:, 0]
            self._returns[as_numpy(self._batch.clock) == 0] = 0.0
        return tokens, reward, terminated, truncated, info | self._info(self._facts)

    def _step_by_host(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Play actions (B, n, ...), and reset those worlds that the host knows to have ended."""
        ended = self._ended()
        self._refuse_ended(ended)
        batch = self._batch
        state, clock, tokens, reward = self._play(self._params, batch.state, batch.key, batch.clock, actions)
        if self._squeeze:
            tokens, reward = tokens[:, 0], reward[:, 0]
        self._batch = batch._replace(state=state, clock=clock)
        self._steps_to_end -= 1
        if self.game.signal_moves or self.game.terminates:
            self._facts = self._make_info(state, tokens)
        if ended is not None:
            tokens = self._restart(ended, tokens)
            reward = scatter_rows(reward, self._array(ended), 0.0)
        terminated, truncated = termination(self._params, self._batch.state, self._batch.clock)
        info: dict[str, Any] = {}
        if self.autoreset_mode is AutoresetMode.SAME_STEP and (ended := self._ended()) is not None:
            info = self._final(tokens, terminated | truncated, self._facts)
            tokens = self._restart(ended, tokens)
        return tokens, reward.astype(np.float64) if self.backend == "numpy" else reward, terminated, truncated, info

    def _step_on_device(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Play actions (B, n, ...), and let the device reset worlds where some may have ended."""
        mode = self.autoreset_mode
        if mode is AutoresetMode.DISABLED:
            self._refuse_ended(self._ended())
        last = 1 if mode is AutoresetMode.SAME_STEP else 0
        resets = mode is not AutoresetMode.DISABLED and (self.game.terminates or self._steps_to_end <= last)
        result = self._play_with_resets(resets, actions)
        self._steps_to_end -= 1
        if resets:
            self._steps_to_end = self.max_steps if self._in_step else 0
        self._facts = result.info or self._facts
        seen: tuple[Any, ...] = result[:5]
        if self._compile and self._copy:
            seen = tuple(x if x is None else x.clone() for x in seen)
        tokens, reward, final_tokens, terminated, truncated = seen
        info: dict[str, Any] = {}
        if final_tokens is not None:
            info = self._final(final_tokens, result.terminated | result.truncated, result.final_info)
        return tokens, reward, terminated, truncated, info

    @property
    def batch_state(self) -> BatchState:
        """The worlds in play, for `pure_step`, which then needs no answer of the host.

        Raises:
            ValueError: on a GPU, if the game has too many levels to keep them there.
        """
        self._check_playing()
        _, *others = self._batch
        if on_gpu(self._batch.clock):
            self.game.prepare(self._batch.clock)
        return BatchState(self.state, *(namespace(x).asarray(x, copy=True) for x in others))

    @property
    def pure_step(self) -> Callable[[BatchState, Array], tuple[BatchState, StepResult]]:
        """The step as a pure function of worlds and actions, see `noisy_envs.interfaces.functional.pure_step`."""
        return partial(pure_step, self._params)

    def render(self) -> tuple[np.ndarray, ...] | None:
        """Draw the first `render_envs` worlds: a tuple of images (H, W, 3) uint8."""
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
        """Release what drawing holds; Gymnasium's `close` calls this once, and its signature asks for keywords."""
        if self._renderer is not None:
            self._renderer.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out compiled steps, which cannot be copied; they are made again when needed."""
        return {**self.__dict__, "_steps": {}}

    def _play(self, *inputs: Any) -> Any:
        """Play a step without resets, compiled if asked for."""
        if not self._compile:
            return play(*inputs)
        if "play" not in self._steps:
            self._steps["play"] = compiled(play, *inputs)
        return self._steps["play"](*inputs)

    def _play_with_resets(self, resets: bool, actions: Array) -> VectorStep:
        """Play a step that resets worlds on the device if `resets`; compiled, it overwrites what the last one gave."""
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
        """Return what the learners see of worlds in `state`."""
        tokens = self.game.observe(state, self.learners)
        return tokens[:, 0] if self._squeeze else tokens

    def _begin(self, rows: np.ndarray, seeds: np.ndarray, numbers: np.ndarray, given: Any = None) -> None:
        """Start the episodes of `seeds` and `numbers` (R,) in the worlds `rows` (R,)."""
        key = self._array(episode_key(seeds, numbers))
        clock = namespace(key).zeros_like(key[:, 0])
        self._on_device = on_gpu(key) and self._prepared(key)
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

    def _prepared(self, like: Array) -> bool:
        """Tell whether the device can draw starting states by itself, and make it ready."""
        try:
            self.game.prepare(like)
        except ValueError:
            return False
        return True

    def _restart(self, rows: np.ndarray, tokens: Array) -> Array:
        """Start the next episode in the worlds `rows`, and return `tokens` with their first observations."""
        seeds, numbers = (x[rows] for x in self.episodes)
        self._begin(rows, seeds, numbers + 1)
        if len(rows) == self.num_envs:
            tokens = self._observe(self._batch.state)
            self._facts = self._make_info(self._batch.state, tokens)
            return tokens
        places = self._array(rows)
        state = type(self._batch.state)._make(x[places] for x in self._batch.state)
        fresh = self._observe(state)
        self._facts = {
            name: scatter_rows(self._facts[name], places, fact) for name, fact in self._make_info(state, fresh).items()
        }
        return scatter_rows(tokens, places, fresh)

    def _ended(self) -> np.ndarray | None:
        """Return the rows of worlds whose episode is over, or None: known without asking the device where all last."""
        if self._steps_to_end > 0 and not self.game.terminates:
            return None
        rows = np.flatnonzero(as_numpy(done(self._params, self._batch)))
        return rows if len(rows) else None

    def _refuse_ended(self, ended: np.ndarray | None) -> None:
        if ended is not None and self.autoreset_mode is AutoresetMode.DISABLED:
            raise RuntimeError(f"worlds {ended.tolist()} have ended: reset them with options={{'reset_mask': ...}}")

    def _make_info(self, state: Any, tokens: Array) -> dict[str, Array]:
        """Return what `info` tells of worlds in `state` and what they show."""
        xp = namespace(tokens)
        return make_info(self.game, state, tokens, self._lead, xp.float64 if self.backend == "numpy" else xp.float32)

    def _info(self, facts: dict[str, Array], where: Array | None = None) -> dict[str, Any]:
        """Lay out `facts` of the worlds `where`, or of all, as Gymnasium does."""
        info = {}
        for name, fact in facts.items():
            info[name] = self._own(fact) if where is None else fact * expand_like(where, fact)
            info[f"_{name}"] = self._own(self._everywhere if where is None else where)
        return info

    @cached_property
    def _everywhere(self) -> Array:
        return self._array(np.ones(self.num_envs, np.bool_))

    def _own(self, array: Array) -> Array:
        """Return a copy for the user to keep, unless that is not asked for."""
        if not self._copy:
            return array
        return array.copy() if self.backend == "numpy" else array.clone()

    def _final(self, tokens: Array, ended: Array, facts: dict[str, Array]) -> dict[str, Any]:
        """Lay out the last observations of the worlds `ended` as Gymnasium does, or densely on torch."""
        final_obs = tokens
        if self.backend == "numpy":
            final_obs = np.full(self.num_envs, None, dtype=object)
            for i in np.flatnonzero(ended):
                final_obs[i] = tokens[i].copy()
        final_info = self._info(facts, ended)
        return {"final_obs": final_obs, "_final_obs": ended, "final_info": final_info, "_final_info": self._own(ended)}

    def _array(self, array: np.ndarray) -> Array:
        """Move a NumPy array to the backend."""
        if self.backend == "numpy":
            return array
        import torch

        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _read(self, actions: Any) -> Array:
        """Return actions as an array of the backend, or raise."""
        game = self.game
        shape = self.action_space.shape
        if self.backend == "numpy":
            actions = np.asarray(actions, dtype=np.float32 if game.continuous_actions else None)
            good_type = game.continuous_actions or actions.dtype.kind in "iu"
            if good_type and actions.dtype.kind == "u":  # arithmetic with uint64 would end in floats
                actions = actions.astype(np.int64)
        else:
            kind = "real floating" if game.continuous_actions else "integral"
            good_type = getattr(actions, "device", None) == self.device and (
                namespace(actions).isdtype(actions.dtype, kind)
            )
        if not good_type or tuple(actions.shape) != shape:
            kind = "float" if game.continuous_actions else "integer"
            where = f", a Tensor on {self.device}" if self.backend == "torch" else ""
            got = f"{type(actions).__name__} {getattr(actions, 'dtype', '')} {tuple(getattr(actions, 'shape', ()))}"
            raise ValueError(f"actions: {got} must be {kind} {shape}{where}")
        if self.backend == "torch":  # float32 whatever comes, and no graph of gradients that grows with each step
            actions = actions.detach().float() if game.continuous_actions else actions.detach().long()
        if self.check_actions:
            self._check_values(actions)
        return actions

    def _check_values(self, actions: Array) -> None:
        """Raise on a number that no action has; worlds about to reset ignore theirs."""
        xp = namespace(actions)
        if self.game.continuous_actions:
            good = xp.isfinite(actions)
        else:
            good = (actions >= 0) & (actions < self.game.num_actions)
        good = xp.all(xp.reshape(good, (self.num_envs, -1)), axis=1)
        if not bool(xp.all(good | done(self._params, self._batch))):
            bad = int(xp.argmin(xp.astype(good, xp.int64)))
            allowed = "finite numbers" if self.game.continuous_actions else f"from 0 to {self.game.num_actions - 1}"
            raise ValueError(f"action {actions[bad]} of world {bad}: must be {allowed}")

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("the environments are closed: make new ones")

    def _check_playing(self) -> None:
        self._check_open()
        if self._batch is None:
            raise RuntimeError("no episode has begun: call reset() first")


def compiled(function: Any, *inputs: Any) -> Any:
    """Compile a function, after a call of it: that fills caches of the core, which Python 3.11 locks meanwhile."""
    import torch

    function(*inputs)
    # a copy of the code: dynamo counts variants by code, and refuses the ninth
    return torch.compile(FunctionType(function.__code__.replace(), function.__globals__), fullgraph=True)


def in_place(step: Callable[..., Any], batch: BatchState, actions: Array) -> tuple[BatchState, VectorStep]:
    """Play a step whose worlds take the places of those before it, as a CUDA graph needs that is played again."""
    after, result = step(batch, actions)
    for old, new in zip((*batch.state, *batch[1:]), (*after.state, *after[1:]), strict=True):
        if new is not old:  # what never changes is handed through
            old.copy_(new)
    return batch, result


def scatter_batch(batch: BatchState, rows: Array, fresh: BatchState) -> BatchState:
    """Return a copy of `worlds` in which `rows` (R,) are the worlds `fresh`."""

    def put(old: Any, new: Any) -> Any:
        return (scatter_rows(x, rows, y) for x, y in zip(old, new, strict=True))

    return BatchState(type(batch.state)._make(put(batch.state, fresh.state)), *put(batch[1:], fresh[1:]))

"""The environments of a run: made from its settings, and stepped as functions of tensors.

Shapes: `R` controlled agents in all environments together, `N` tokens, `D` features.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import gymnasium
import torch
from torch import Tensor

from noisy_envs import baselines, registration
from noisy_envs.baselines import BaselineReturns
from noisy_envs.randomness import derive_seed
from noisy_envs.tokens import TokenSpec
from noisy_envs.training import gymnasium_envs
from noisy_envs.training.checkpoint import from_tuples
from noisy_envs.training.distributed import RANK
from noisy_envs.validation import build


@dataclass
class EnvArgs:
    """The environment of a run."""

    env_id: str = "noisy_envs/SimpleCentroid-v0"
    """environment ID; `python -m noisy_envs` lists this package's"""
    preset: Literal["fast", "paper", "paper-text"] = "fast"
    """table of presets.toml that sets the other defaults; "paper-text" for the IDs of the paper's experiments"""
    num_noise: tuple[int, ...] = ()
    """number of noise tokens (obstacles in SimpleTag); pass several values with --evaluate"""
    env_kwargs: tuple[str, ...] = ()
    """other keyword arguments of the environment, such as num_signal=5 or num_noise=(0,28)"""
    learners: Literal["first", "all", "predators", "prey"] = "first"
    """agents that learn: the first one, or a team that shares one network"""
    seed: int = 1
    """random seed of weights, environments, actions and minibatches"""


class EnvState(NamedTuple):
    """Where the environments stand: all that a step changes."""

    envs: Any  # state of the environments, as their pure step takes it
    tokens: Tensor  # (R, N, D) observed by the controlled agents
    episode_return: Tensor  # (R,) of the episode so far
    episode_length: Tensor  # (R,)


class Step(NamedTuple):
    """Outcome of a step."""

    reward: Tensor  # (R,)
    final_tokens: Tensor  # (R, N, D) after the step, before any reset
    terminated: Tensor  # (R,) bool
    truncated: Tensor  # (R,) bool
    episode_return: Tensor  # (R,) of the episode up to and including the step
    episode_length: Tensor  # (R,)


class Envs:
    """Vector environments as functions of tensors: `step` maps a state and actions to the next state.

    Attributes:
        token_spec: the meaning of an observation.
        action_space: of one controlled agent, or of those of one environment.
        num_learners: R.
        start: the state at the start of the first episodes.
    """

    def __init__(self, args: Any, envs: Any, first_env: int) -> None:
        """Take the environments of a run, and reset them; the first has the number `first_env`."""
        self.token_spec: TokenSpec = envs.token_spec
        self.action_space = envs.single_action_space
        self._args, self._envs = args, envs
        tokens, _ = envs.reset(seed=derive_seed(args.seed, "train") + first_env)
        tokens = tokens.flatten(0, -3)
        self.num_learners = len(tokens)
        zeros = torch.zeros(len(tokens), device=tokens.device)
        self.start = EnvState(envs.batch_state, tokens, zeros, zeros.clone())
        self._pure_step: Callable[..., Any] = envs.pure_step

    def compile_step(self, compiler: Callable[[Any], Any], state: EnvState) -> None:
        """Compile `step` for states like this one at once, where it runs on a GPU.

        Elsewhere the network takes most of the time.
        """
        if not on_gpu(self._args):
            return
        shape: tuple[int, ...] = (len(state.tokens),)
        if isinstance(self.action_space, gymnasium.spaces.Box):
            shape = (*shape, self.action_space.shape[-1])
        dtype = torch.float32 if len(shape) > 1 else torch.int64
        # Python 3.11 computes cached properties under a lock, which cannot be compiled: a first step fills them.
        action = torch.zeros(shape, dtype=dtype, device=state.tokens.device)
        self.step(state, action)
        self.step = compiler(self.step)  # type: ignore[method-assign]
        with torch.no_grad():  # as in a rollout
            self.step(state, action)  # now, while threads compile kernels

    def step(self, state: EnvState, action: Tensor) -> tuple[EnvState, Step]:
        """Play the actions (R, ...) of all controlled agents; episodes that end are followed by the next one."""
        envs, result = self._pure_step(state.envs, action)
        returns, lengths = state.episode_return + result.reward, state.episode_length + 1
        ongoing = ~(result.terminated | result.truncated)
        step = Step(result.reward, result.final_tokens, result.terminated, result.truncated, returns, lengths)
        return EnvState(envs, result.tokens, returns * ongoing, lengths * ongoing), step

    def close(self) -> None:
        """Release what the environments hold."""
        self._envs.close()

    def restore(self, saved: Any, step: int) -> EnvState:
        """Return the state that a checkpoint holds after `step` environment steps.

        The state of other Gymnasium environments cannot be saved: they start new episodes.
        """
        if not is_other(self._args):
            return EnvState(*from_tuples(self.start, saved))
        seed = derive_seed(self._args.seed, f"train from step {step}, process {RANK}")
        return self.start._replace(tokens=self._envs.reset(seed=seed)[0])


def make_envs(args: Any, like: Envs | None = None) -> Envs:
    """Make the environments in which this process trains: `args.num_envs` is its share of them.

    With `like`, the environments of equal settings but for the seed, nothing is made: they start with this seed.
    """
    envs = make_vec(args, args.num_envs, env_kwargs(args)) if like is None else like._envs
    return Envs(args, envs, RANK * args.num_envs)


def make_vec(args: Any, num_envs: int, options: dict[str, Any]) -> Any:
    """Make vector environments in torch with auto-reset in the same step."""
    if is_other(args):
        return gymnasium_envs.GymnasiumVectorEnv(game_of(args), num_envs, args.device)
    return gymnasium.make_vec(
        args.env_id,
        num_envs,
        backend="torch",
        device=args.device,
        learners=args.learners,
        autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP,
        **options,
    )


def make_eval_envs(args: Any, num_envs: int, trained: Any = None) -> tuple[Any, Tensor]:
    """Make environments on seeds and levels that training never uses; return them and the first tokens (R, N, D).

    `trained` are the settings of the training run, where `args` are others.
    """
    envs = make_vec(args, num_envs, eval_env_kwargs(args, trained))
    tokens, _ = envs.reset(seed=derive_seed(args.seed, "evaluate"))
    return envs, tokens.flatten(0, -3)


def requested_env_kwargs(args: Any) -> dict[str, Any]:
    """Return the keyword arguments that the settings ask for.

    Raises:
        ValueError: naming what this environment lacks, or what cannot be read.
    """
    options: dict[str, Any] = {}
    for argument in args.env_kwargs:
        name, equals, value = argument.partition("=")
        if not equals:
            raise ValueError(f"env_kwargs={argument!r}: expected NAME=VALUE")
        if name in options:
            raise ValueError(f"env_kwargs={argument!r}: {name} is given twice")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # the last three for odd nesting
            options[name] = value  # a plain string
    if args.num_noise:
        name = registration.noise_option(args.env_id)
        if name in options and not args.evaluate:  # an evaluation may ask for other noise than its run had
            raise ValueError(f"num_noise={args.num_noise[0]}: {name} is in env_kwargs too; give one of them")
        options[name] = args.num_noise[0]
    return options


def env_kwargs(args: Any) -> dict[str, Any]:
    """Return the keyword arguments of the environment; where they are ranges, starts do not reveal the numbers.

    Raises:
        ValueError, TypeError: as `requested_env_kwargs` and `registration.same_start` do.
    """
    options = requested_env_kwargs(args)
    return options | registration.same_start(args.env_id, options)


def eval_env_kwargs(args: Any, trained: Any = None) -> dict[str, Any]:
    """Return the keyword arguments of an evaluation: its levels are none that a run of `trained` draws from."""
    options = env_kwargs(args)
    return options | registration.eval_levels(args.env_id, options, env_kwargs(trained or args))


def with_start_of(args: Any, trained: Any) -> Any:
    """Return the settings of an evaluation whose episodes start as those of training, at any noise level."""
    start = registration.same_start(args.env_id, requested_env_kwargs(args), (trained.env_id, env_kwargs(trained)))
    added = tuple(f"{name}={value}" for name, value in start.items())
    return dataclasses.replace(args, env_kwargs=(*args.env_kwargs, *added))


def game_of(args: Any) -> Any:
    """Return the rules of the environment, with its options.

    Raises:
        ValueError: naming an option that is unknown, or a value that is not allowed.
    """
    game, parameters = registration.find(args.env_id)
    if game == registration.OTHER:
        return gymnasium_envs.GymnasiumGame(args.env_id, env_kwargs(args))
    try:
        return build(registration.GAMES[game], parameters | env_kwargs(args))
    except TypeError as error:
        raise ValueError(str(error)) from None


def is_other(args: Any) -> bool:
    """Tell whether the environment is another package's, made noisy by the wrappers."""
    return registration.find(args.env_id)[0] == registration.OTHER


def on_gpu(args: Any) -> bool:
    """Tell whether environments and network live on one GPU, so that a rollout needs no answer from the host."""
    return torch.device(args.device).type == "cuda" and not is_other(args)


def can_render(args: Any) -> bool:
    """Tell whether the environment can be drawn as an image."""
    return not is_other(args) or game_of(args).can_render


def num_learners(args: Any) -> int:
    """Return how many agents of one environment learn."""
    if args.learners == "first":
        return 1
    team = game_of(args).teams[args.learners]
    return int(team.stop - team.start)


def steps_per_update(args: Any) -> int:
    """Return the number of environment steps of all controlled agents in a rollout."""
    return int(args.num_envs * args.num_steps * num_learners(args))


def num_noise(args: Any) -> Any:
    """Return the number of noise tokens, or its range."""
    return getattr(game_of(args), registration.noise_option(args.env_id))


def baseline_returns(args: Any) -> BaselineReturns:
    """Return the mean returns of the random policy and of the oracle (of other environments: the reward threshold).

    They are NaN, and so is every score, where the learners play against each other, or the oracle is no better.
    """
    unknown = BaselineReturns(math.nan, math.nan)
    if args.learners == "all" and registration.find(args.env_id)[0] == "simple_tag":
        return unknown
    if is_other(args):
        returns = game_of(args).baselines
    else:
        as_registered = game_of(args) == game_of(dataclasses.replace(args, env_kwargs=(), num_noise=()))
        returns = baselines.baseline_returns(args.env_id, None if as_registered else env_kwargs(args))
    return returns if returns.oracle > returns.random else unknown

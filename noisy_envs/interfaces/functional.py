"""The step of many environments as pure functions, for `torch.compile` and CUDA graphs."""

from __future__ import annotations

from typing import Any, NamedTuple

from gymnasium.vector import AutoresetMode

from noisy_envs.arrays import Array, namespace
from noisy_envs.games.game import Game
from noisy_envs.interfaces.scripted import PolicyAssignment, clip_action, complete_actions
from noisy_envs.randomness import episode_key, uniforms


class EnvParams(NamedTuple):
    """What a step needs besides the state."""

    game: Game
    learners: slice  # the n controlled agents
    assignment: PolicyAssignment
    max_steps: int
    time_limit: int | None  # Gymnasium's `max_episode_steps`, if set


class BatchState(NamedTuple):
    """The state of `B` environments: everything that a step changes, as arrays of one library and device."""

    state: Any  # of the game
    clock: Array  # (B,) int64, steps since the reset
    seed: Array  # (B,) int64
    number: Array  # (B,) int64, of the episode
    key: Array  # (B, 2) int64, the hash of seed and number


class StepResult(NamedTuple):
    """The result of a step with auto-reset: one row for each controlled agent of each environment, R = B · n."""

    tokens: Array  # (R, N, D), of the next episode where one ended
    final_tokens: Array  # (R, N, D) before any reset: the last observation of an episode that ended
    reward: Array  # (R,)
    terminated: Array  # (R,) bool
    truncated: Array  # (R,) bool


class VectorStep(NamedTuple):
    """The result of a vector environment's step; without the axis n if `learners` is "first"."""

    tokens: Array  # (B, n, N, D)
    reward: Array  # (B, n)
    final_tokens: Array | None  # before a reset in the same step
    terminated: Array  # (B,) bool
    truncated: Array  # (B,) bool
    info: dict[str, Array]  # see `make_info`; empty if unchanged
    final_info: dict[str, Array]  # before a reset in the same step


def play(params: EnvParams, state: Any, key: Array, clock: Array, action: Array) -> tuple[Any, Array, Array, Array]:
    """Play one step without resets.

    Args:
        params: game and agents.
        state: of `B` environments.
        key: (B, 2) keys of the episodes.
        clock: (B,) int64 steps since the reset.
        action: (B, n, ...) of the controlled agents; invalid ones are clipped.

    Returns:
        State, clock, tokens (B, n, N, D) and rewards (B, n) after the step.
    """
    game, learners = params.game, params.learners
    if not game.continuous_actions:  # an index out of range would crash a GPU
        action = clip_action(game, action)
    randomness = game.sample_randomness(uniforms(key, clock + 1, game.num_step_uniforms))
    joint = complete_actions(game, params.assignment, state, action, randomness)
    state = game.transition(state, joint, randomness)
    return state, clock + 1, game.observe(state, learners), game.reward(state, learners)


def termination(params: EnvParams, state: Any, clock: Array) -> tuple[Array, Array]:
    """Tell which environments are terminated and which truncated, (B,) each."""
    truncated = clock >= params.max_steps
    if not params.game.terminates:
        return namespace(clock).zeros_like(truncated), truncated
    terminated = params.game.terminated(state)
    truncated = truncated & ~terminated
    if params.time_limit is not None:  # like Gymnasium's TimeLimit, which can set both
        truncated = truncated | (clock >= params.time_limit)
    return terminated, truncated


def make_info(game: Game, state: Any, tokens: Array, lead: int, dtype: Any) -> dict[str, Array]:
    """Return the `info` of R environments: signal mask, SNR and, if the game terminates, success.

    Tokens are (R, N, D) with `lead` 1, or (R, n, N, D) with `lead` 2.
    """
    xp = namespace(tokens)
    mask = game.signal_mask(tokens, state)
    masks = (xp.reshape(x, (*tokens.shape[:lead], -1)) for x in (mask, game.token_mask(tokens)))
    signal, present = (xp.sum(xp.astype(x, xp.int64), axis=-1) for x in masks)
    info = {"signal_mask": mask, "snr": xp.astype(signal, dtype) / present}
    if game.terminates:
        info["is_success"] = game.success(state)
    return info


def pure_step(params: EnvParams, batch: BatchState, actions: Array) -> tuple[BatchState, StepResult]:
    """Play actions (R, ...) of all controlled agents, and reset environments whose episode ended in the same step.

    Nothing is checked. On a GPU nothing waits for the host, so that policy and environments can run without it; there
    the next episode of every environment is computed, and mostly discarded. `TokenVectorEnv.pure_step` binds the
    parameters; start from `TokenVectorEnv.batch_state`.
    """
    xp = namespace(batch.clock)
    count = params.learners.stop - params.learners.start
    actions = xp.reshape(actions, (-1, count, *actions.shape[1:]))
    state, clock, tokens, reward = play(params, batch.state, batch.key, batch.clock, actions)
    terminated, truncated = termination(params, state, clock)
    ended = terminated | truncated
    final_tokens = tokens
    batch = _advance(batch, state, clock)
    if on_gpu(ended) or bool(xp.any(ended)):
        batch, tokens = reset_done(params, batch, tokens, ended)
    rows = (tokens, final_tokens, reward, *(xp.repeat(x, count) for x in (terminated, truncated)))
    flat = (xp.reshape(x, (-1, *x.shape[2:])) if x.ndim > 1 else x for x in rows)
    return batch, StepResult(*flat)


def step_with_autoreset(
    params: EnvParams, mode: AutoresetMode, resets: bool, lead: int, batch: BatchState, actions: Array
) -> tuple[BatchState, VectorStep]:
    """Play actions (B, n, ...) as a vector environment does, without waiting for the host.

    Args:
        params: see `EnvParams`.
        mode: whether environments that ended are reset in the next step, or in the same.
        resets: whether this step may reset any; if not, the next episodes are not computed.
        lead: axes of tokens before those of one observation, see `make_info`; 1 if `learners` is "first".
        batch: state before the step.
        actions: of the controlled agents.
    """
    xp = namespace(batch.clock)
    ended = done(params, batch) if resets and mode is AutoresetMode.NEXT_STEP else None
    state, clock, tokens, reward = play(params, batch.state, batch.key, batch.clock, actions)
    batch = _advance(batch, state, clock)
    if ended is not None:
        batch, tokens = reset_done(params, batch, tokens, ended)
        reward = xp.where(ended[:, None], xp.zeros_like(reward), reward)
    terminated, truncated = termination(params, batch.state, batch.clock)
    final_tokens, final_info = None, {}
    if resets and mode is AutoresetMode.SAME_STEP:
        final_tokens, final_info = tokens, _make_info(params, batch, tokens, lead)
        batch, tokens = reset_done(params, batch, tokens, terminated | truncated)
    changes = resets or params.game.signal_moves or params.game.terminates
    info = _make_info(params, batch, tokens, lead) if changes else {}
    if lead == 1:
        tokens, reward = tokens[:, 0], reward[:, 0]
        final_tokens = None if final_tokens is None else final_tokens[:, 0]
    return batch, VectorStep(tokens, reward, final_tokens, terminated, truncated, info, final_info)


def _advance(batch: BatchState, state: Any, clock: Array) -> BatchState:
    """Return the batch after a step: torch 2.11 miscompiles `_replace`, and torch 2.6 cannot compile `*batch[2:]`."""
    return BatchState(state, clock, batch.seed, batch.number, batch.key)


def done(params: EnvParams, batch: BatchState) -> Array:
    """Tell in which environments (B,) the episode has ended."""
    terminated, truncated = termination(params, batch.state, batch.clock)
    return terminated | truncated


def reset_done(params: EnvParams, batch: BatchState, tokens: Array, ended: Array) -> tuple[BatchState, Array]:
    """Start the next episode where `ended`, bool (B,), and return the batch and tokens (B, n, N, D) with it."""
    xp = namespace(ended)
    number = batch.number + xp.astype(ended, xp.int64)
    key, start = episode_key(batch.seed, number), xp.zeros_like(batch.clock)
    fresh = params.game.initial(uniforms(key, start, params.game.num_reset_uniforms))
    state = type(fresh)(*(_choose(ended, new, old) for new, old in zip(fresh, batch.state, strict=True)))
    batch = BatchState(state, xp.where(ended, start, batch.clock), batch.seed, number, key)
    return batch, _choose(ended, params.game.observe(fresh, params.learners), tokens)


def _make_info(params: EnvParams, batch: BatchState, tokens: Array, lead: int) -> dict[str, Array]:
    xp = namespace(tokens)
    return make_info(params.game, batch.state, tokens[:, 0] if lead == 1 else tokens, lead, xp.float32)


def on_gpu(array: Array) -> bool:
    """Tell whether an array is a tensor on a GPU."""
    return getattr(array, "is_cuda", False)


def expand_like(rows: Array, like: Array) -> Array:
    """Return `rows` (B,) with as many axes as `like` (B, ...), for broadcasting."""
    return namespace(rows).reshape(rows, (-1, *[1] * (like.ndim - 1)))


def _choose(rows: Array, new: Array, old: Array) -> Array:
    """Return `new` (B, ...) where `rows`, bool (B,), and `old` elsewhere."""
    return namespace(rows).where(expand_like(rows, old), new, old)

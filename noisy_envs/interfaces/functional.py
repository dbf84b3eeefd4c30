"""The step of many worlds as pure functions: what `torch.compile` takes whole and a CUDA graph can record."""

from __future__ import annotations

from typing import Any, NamedTuple

from gymnasium.vector import AutoresetMode

from noisy_envs.arrays import Array, namespace
from noisy_envs.games.game import Game
from noisy_envs.interfaces.scripted import PolicyAssignment, clip_action, complete_actions
from noisy_envs.randomness import episode_key, uniforms


class EnvParams(NamedTuple):
    """What a step needs to know beside the worlds."""

    game: Game
    learners: slice  # the n agents that are driven
    assignment: PolicyAssignment  # who acts how, see `noisy_envs.interfaces.scripted.assign_policies`
    max_steps: int
    time_limit: int | None  # Gymnasium's, if any


class BatchState(NamedTuple):
    """`B` worlds in play: all that a step changes, as arrays of one library and device."""

    state: Any  # the core's
    clock: Array  # (B,) int64, steps played of the episode
    seed: Array  # (B,) int64, as is the next
    number: Array  # (B,) of the episode
    key: Array  # (B, 2) which follows from the two


class StepResult(NamedTuple):
    """What a step with auto-reset gives, a row for each of the n learners of each world: R = B · n."""

    tokens: Array  # (R, N, D) after it, of the next episode where one ended
    final_tokens: Array  # (R, N, D) before any reset: what an episode that ended showed last
    reward: Array  # (R,)
    terminated: Array  # (R,) bool
    truncated: Array  # (R,) bool


class VectorStep(NamedTuple):
    """What a step of a vector environment shows of B worlds: without the axis n if there is but one learner to see."""

    tokens: Array  # (B, n, N, D)
    reward: Array  # (B, n)
    final_tokens: Array | None  # before a reset in the same step
    terminated: Array  # (B,) bool
    truncated: Array  # (B,) bool
    info: dict[str, Array]  # see `make_info`; empty where they are as before
    final_info: dict[str, Array]  # before a reset in the same step


def play(params: EnvParams, state: Any, key: Array, clock: Array, action: Array) -> tuple[Any, Array, Array, Array]:
    """Play one step of all worlds, a pure function that `torch.compile` takes whole.

    Args:
        rules: the game, and who acts.
        state: of `B` worlds.
        key: (B, 2) keys of the episodes.
        clock: (B,) int64 steps played so far.
        action: (B, n, ...) of the learners; numbers of no action are taken for the nearest that is one.

    Returns:
        State, clock, tokens (B, n, N, D) and rewards (B, n) after the step.
    """
    game, learners = params.game, params.learners
    if not game.continuous_actions:  # a number must not reach out of a table: a GPU would not recover
        action = clip_action(game, action)
    randomness = game.sample_randomness(uniforms(key, clock + 1, game.num_step_uniforms))
    state = game.transition(state, complete_actions(game, params.assignment, state, action, randomness), randomness)
    return state, clock + 1, game.observe(state, learners), game.reward(state, learners)


def termination(params: EnvParams, state: Any, clock: Array) -> tuple[Array, Array]:
    """Tell which worlds are terminated, and which truncated, (B,) each."""
    truncated = clock >= params.max_steps
    if not params.game.terminates:
        return namespace(clock).zeros_like(truncated), truncated
    terminated = params.game.terminated(state)
    truncated = truncated & ~terminated
    if params.time_limit is not None:  # Gymnasium's TimeLimit, around a single world, sets both
        truncated = truncated | (clock >= params.time_limit)
    return terminated, truncated


def make_info(game: Game, state: Any, tokens: Array, lead: int, dtype: Any) -> dict[str, Array]:
    """Return what `info` tells of R worlds and what they show, (R, N, D) with `lead` 1, (R, n, N, D) with 2.

    That is which tokens carry signal, their share of all that are not padding, and whether the goal is reached.
    """
    xp = namespace(tokens)
    mask = game.signal_mask(tokens)
    masks = (xp.reshape(x, (*tokens.shape[:lead], -1)) for x in (mask, game.token_mask(tokens)))
    signal, present = (xp.sum(xp.astype(x, xp.int64), axis=-1) for x in masks)
    info = {"signal_mask": mask, "snr": xp.astype(signal, dtype) / present}
    if game.terminates:
        info["is_success"] = game.success(state)
    return info


def pure_step(params: EnvParams, batch: BatchState, actions: Array) -> tuple[BatchState, StepResult]:
    """Play the actions (R, ...) of all learners, and start the next episode where one ended, in the same step.

    It checks nothing and, on a GPU, waits for nothing, so that a policy can act between steps without the host;
    there, the next episode of every world is made and, mostly, dropped. `TokenVectorEnv.pure_step` binds the rules,
    and `TokenVectorEnv.batch_state` is where to begin.
    """
    xp = namespace(batch.clock)
    count = params.learners.stop - params.learners.start
    actions = xp.reshape(actions, (-1, count, *actions.shape[1:]))
    state, clock, tokens, reward = play(params, batch.state, batch.key, batch.clock, actions)
    terminated, truncated = termination(params, state, clock)
    ended = terminated | truncated
    final_tokens = tokens
    batch = _played(batch, state, clock)
    if on_gpu(ended) or bool(xp.any(ended)):
        batch, tokens = reset_done(params, batch, tokens, ended)
    rows = (tokens, final_tokens, reward, *(xp.repeat(x, count) for x in (terminated, truncated)))
    flat = (xp.reshape(x, (-1, *x.shape[2:])) if x.ndim > 1 else x for x in rows)
    return batch, StepResult(*flat)


def step_with_autoreset(
    params: EnvParams, mode: AutoresetMode, resets: bool, lead: int, batch: BatchState, actions: Array
) -> tuple[BatchState, VectorStep]:
    """Play actions (B, n, ...) as a vector environment does, without asking the host which worlds end.

    Args:
        rules: see `EnvParams`.
        mode: whether worlds that ended are reset in the next step, or in the same.
        renews: whether any is reset in this step; if not, the next episodes are not made.
        lead: axes of tokens before those of one observation, see `make_info`: 1 if there is but one learner to see.
        worlds: before the step.
        actions: of the learners.
    """
    xp = namespace(batch.clock)
    ended = done(params, batch) if resets and mode is AutoresetMode.NEXT_STEP else None
    state, clock, tokens, reward = play(params, batch.state, batch.key, batch.clock, actions)
    batch = _played(batch, state, clock)
    if ended is not None:
        batch, tokens = reset_done(params, batch, tokens, ended)
        reward = xp.where(ended[:, None], xp.zeros_like(reward), reward)
    terminated, truncated = termination(params, batch.state, batch.clock)
    final_tokens, final_info = None, {}
    if resets and mode is AutoresetMode.SAME_STEP:
        final_tokens, final_info = tokens, _make_info(params, batch, tokens, lead)
        batch, tokens = reset_done(params, batch, tokens, terminated | truncated)
    info = (
        _make_info(params, batch, tokens, lead) if resets or params.game.signal_moves or params.game.terminates else {}
    )
    if lead == 1:
        tokens, reward = tokens[:, 0], reward[:, 0]
        final_tokens = None if final_tokens is None else final_tokens[:, 0]
    return batch, VectorStep(tokens, reward, final_tokens, terminated, truncated, info, final_info)


def _played(batch: BatchState, state: Any, clock: Array) -> BatchState:
    """Return the worlds after a step: torch 2.11 loses what `_replace` returns, 2.6 does not compile `*worlds[2:]`."""
    return BatchState(state, clock, batch.seed, batch.number, batch.key)


def done(params: EnvParams, batch: BatchState) -> Array:
    """Tell which worlds (B,) have ended."""
    terminated, truncated = termination(params, batch.state, batch.clock)
    return terminated | truncated


def reset_done(params: EnvParams, batch: BatchState, tokens: Array, ended: Array) -> tuple[BatchState, Array]:
    """Start the next episode in the worlds `ended`, bool (B,), and put in what the learners see of it (B, n, N, D)."""
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
    """Return `rows` (B,) with as many axes as `like` (B, ...) has."""
    return namespace(rows).reshape(rows, (-1, *[1] * (like.ndim - 1)))


def _choose(rows: Array, new: Array, old: Array) -> Array:
    """Return `new` (B, ...) in `rows`, bool (B,), and `old` elsewhere."""
    return namespace(rows).where(expand_like(rows, old), new, old)

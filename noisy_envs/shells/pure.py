"""The step of many worlds as pure functions: what `torch.compile` takes whole and a CUDA graph can record."""

from __future__ import annotations

from typing import Any, NamedTuple

from noisy_envs.arrays import Array, namespace
from noisy_envs.cores import Core
from noisy_envs.randomness import episode_key, uniforms
from noisy_envs.shells.common import Casting, follow


class Worlds(NamedTuple):
    """`B` worlds in play: all that a step changes, as arrays of one library and device."""

    state: Any  # the core's
    clock: Array  # (B,) int64, steps played of the episode
    seed: Array  # (B,) int64, as is the next
    number: Array  # (B,) of the episode
    key: Array  # (B, 2) which follows from the two


class Outcome(NamedTuple):
    """What a step with auto-reset gives, a row for each of the n learners of each world: R = B · n."""

    tokens: Array  # (R, N, D) after it, of the next episode where one ended
    final_tokens: Array  # (R, N, D) before any reset: what an episode that ended showed last
    reward: Array  # (R,)
    terminated: Array  # (R,) bool
    truncated: Array  # (R,) bool


def play(
    core: Core, learners: slice, cast: Casting, state: Any, key: Array, clock: Array, action: Array
) -> tuple[Any, Array, Array, Array]:
    """Play one step of all worlds, a pure function that `torch.compile` takes whole.

    Args:
        core: the game.
        learners: the n agents that are driven, and `cast`, who acts how.
        cast: see `noisy_envs.shells.common.casting`.
        state: of `B` worlds.
        key: (B, 2) keys of the episodes.
        clock: (B,) int64 steps played so far.
        action: (B, n, ...) of the learners.

    Returns:
        State, clock, tokens (B, n, N, D) and rewards (B, n) after the step.
    """
    chance = core.chance(uniforms(key, clock + 1, core.step_draws))
    state = core.transition(state, follow(core, cast, state, action, chance), chance)
    return state, clock + 1, core.observe(state, learners), core.reward(state, learners)


def judge(core: Core, max_steps: int, time_limit: int | None, state: Any, clock: Array) -> tuple[Array, Array]:
    """Tell which worlds are terminated, and which truncated, (B,) each; `time_limit` is Gymnasium's, if any."""
    truncated = clock >= max_steps
    if not core.terminates:
        return namespace(clock).zeros_like(truncated), truncated
    terminated = core.terminated(state)
    truncated = truncated & ~terminated
    if time_limit is not None:  # Gymnasium's TimeLimit, around a single world, sets both
        truncated = truncated | (clock >= time_limit)
    return terminated, truncated


def pure_step(
    core: Core,
    learners: slice,
    cast: Casting,
    max_steps: int,
    time_limit: int | None,
    worlds: Worlds,
    actions: Array,
) -> tuple[Worlds, Outcome]:
    """Play the actions (R, ...) of all learners, and start the next episode where one ended, in the same step.

    It checks nothing and, on a GPU, waits for nothing, so that a policy can act between steps without the host;
    there, the next episode of every world is made and, mostly, dropped. `TokenVectorEnv.pure_step` binds all but the
    last two arguments, and `TokenVectorEnv.worlds` is where to begin.
    """
    xp = namespace(worlds.clock)
    count = learners.stop - learners.start
    actions = xp.reshape(actions, (-1, count, *actions.shape[1:]))
    state, clock, tokens, reward = play(core, learners, cast, worlds.state, worlds.key, worlds.clock, actions)
    terminated, truncated = judge(core, max_steps, time_limit, state, clock)
    ended = terminated | truncated
    final_tokens = tokens
    worlds = worlds._replace(state=state, clock=clock)
    if on_gpu(ended) or bool(xp.any(ended)):
        number = worlds.number + xp.astype(ended, xp.int64)
        key, start = episode_key(worlds.seed, number), xp.zeros_like(clock)
        fresh = core.initial(uniforms(key, start, core.start_draws))
        state = type(state)(*(_choose(ended, new, old) for new, old in zip(fresh, state, strict=True)))
        worlds = Worlds(state, xp.where(ended, start, clock), worlds.seed, number, key)
        tokens = _choose(ended, core.observe(fresh, learners), tokens)
    rows = (tokens, final_tokens, reward, *(xp.repeat(x, count) for x in (terminated, truncated)))
    flat = (xp.reshape(x, (-1, *x.shape[2:])) if x.ndim > 1 else x for x in rows)
    return worlds, Outcome(*flat)


def on_gpu(array: Array) -> bool:
    """Tell whether an array is a tensor on a GPU."""
    return getattr(array, "is_cuda", False)


def _choose(rows: Array, new: Array, old: Array) -> Array:
    """Return `new` (B, ...) in `rows`, bool (B,), and `old` elsewhere."""
    xp = namespace(rows)
    return xp.where(xp.reshape(rows, (-1, *[1] * (old.ndim - 1))), new, old)

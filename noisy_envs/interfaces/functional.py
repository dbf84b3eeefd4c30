"""The step of many worlds as pure functions: what `torch.compile` takes whole and a CUDA graph can record."""

from __future__ import annotations

from typing import Any, NamedTuple

from gymnasium.vector import AutoresetMode

from noisy_envs.arrays import Array, namespace
from noisy_envs.games.game import Core
from noisy_envs.interfaces.common import Casting, follow, legal
from noisy_envs.randomness import episode_key, uniforms


class Rules(NamedTuple):
    """What a step needs to know beside the worlds."""

    core: Core
    learners: slice  # the n agents that are driven
    cast: Casting  # who acts how, see `noisy_envs.interfaces.common.casting`
    max_steps: int
    time_limit: int | None  # Gymnasium's, if any


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


class Shown(NamedTuple):
    """What a step of a vector environment shows of B worlds: without the axis n if there is but one learner to see."""

    tokens: Array  # (B, n, N, D)
    reward: Array  # (B, n)
    final_tokens: Array | None  # before a reset in the same step
    terminated: Array  # (B,) bool
    truncated: Array  # (B,) bool
    facts: dict[str, Array]  # see `describe`; empty where they are as before
    final_facts: dict[str, Array]  # before a reset in the same step


def play(rules: Rules, state: Any, key: Array, clock: Array, action: Array) -> tuple[Any, Array, Array, Array]:
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
    core, learners = rules.core, rules.learners
    if not core.continuous_actions:  # a number must not reach out of a table: a GPU would not recover
        action = legal(core, action)
    chance = core.chance(uniforms(key, clock + 1, core.step_draws))
    state = core.transition(state, follow(core, rules.cast, state, action, chance), chance)
    return state, clock + 1, core.observe(state, learners), core.reward(state, learners)


def judge(rules: Rules, state: Any, clock: Array) -> tuple[Array, Array]:
    """Tell which worlds are terminated, and which truncated, (B,) each."""
    truncated = clock >= rules.max_steps
    if not rules.core.terminates:
        return namespace(clock).zeros_like(truncated), truncated
    terminated = rules.core.terminated(state)
    truncated = truncated & ~terminated
    if rules.time_limit is not None:  # Gymnasium's TimeLimit, around a single world, sets both
        truncated = truncated | (clock >= rules.time_limit)
    return terminated, truncated


def describe(core: Core, state: Any, tokens: Array, lead: int, dtype: Any) -> dict[str, Array]:
    """Return what `info` tells of R worlds and what they show, (R, N, D) with `lead` 1, (R, n, N, D) with 2.

    That is which tokens carry signal, their share of all that are not padding, and whether the goal is reached.
    """
    xp = namespace(tokens)
    mask = core.signal_mask(tokens)
    masks = (xp.reshape(x, (*tokens.shape[:lead], -1)) for x in (mask, core.token_mask(tokens)))
    signal, present = (xp.sum(xp.astype(x, xp.int64), axis=-1) for x in masks)
    facts = {"signal_mask": mask, "snr": xp.astype(signal, dtype) / present}
    if core.terminates:
        facts["is_success"] = core.success(state)
    return facts


def pure_step(rules: Rules, worlds: Worlds, actions: Array) -> tuple[Worlds, Outcome]:
    """Play the actions (R, ...) of all learners, and start the next episode where one ended, in the same step.

    It checks nothing and, on a GPU, waits for nothing, so that a policy can act between steps without the host;
    there, the next episode of every world is made and, mostly, dropped. `TokenVectorEnv.pure_step` binds the rules,
    and `TokenVectorEnv.worlds` is where to begin.
    """
    xp = namespace(worlds.clock)
    count = rules.learners.stop - rules.learners.start
    actions = xp.reshape(actions, (-1, count, *actions.shape[1:]))
    state, clock, tokens, reward = play(rules, worlds.state, worlds.key, worlds.clock, actions)
    terminated, truncated = judge(rules, state, clock)
    ended = terminated | truncated
    final_tokens = tokens
    worlds = _played(worlds, state, clock)
    if on_gpu(ended) or bool(xp.any(ended)):
        worlds, tokens = renew(rules, worlds, tokens, ended)
    rows = (tokens, final_tokens, reward, *(xp.repeat(x, count) for x in (terminated, truncated)))
    flat = (xp.reshape(x, (-1, *x.shape[2:])) if x.ndim > 1 else x for x in rows)
    return worlds, Outcome(*flat)


def renewing_step(
    rules: Rules, mode: AutoresetMode, renews: bool, lead: int, worlds: Worlds, actions: Array
) -> tuple[Worlds, Shown]:
    """Play actions (B, n, ...) as a vector environment does, without asking the host which worlds end.

    Args:
        rules: see `Rules`.
        mode: whether worlds that ended are reset in the next step, or in the same.
        renews: whether any is reset in this step; if not, the next episodes are not made.
        lead: axes of tokens before those of one observation, see `describe`: 1 if there is but one learner to see.
        worlds: before the step.
        actions: of the learners.
    """
    xp = namespace(worlds.clock)
    ended = over(rules, worlds) if renews and mode is AutoresetMode.NEXT_STEP else None
    state, clock, tokens, reward = play(rules, worlds.state, worlds.key, worlds.clock, actions)
    worlds = _played(worlds, state, clock)
    if ended is not None:
        worlds, tokens = renew(rules, worlds, tokens, ended)
        reward = xp.where(ended[:, None], xp.zeros_like(reward), reward)
    terminated, truncated = judge(rules, worlds.state, worlds.clock)
    final_tokens, final_facts = None, {}
    if renews and mode is AutoresetMode.SAME_STEP:
        final_tokens, final_facts = tokens, _facts(rules, worlds, tokens, lead)
        worlds, tokens = renew(rules, worlds, tokens, terminated | truncated)
    facts = _facts(rules, worlds, tokens, lead) if renews or rules.core.signal_moves or rules.core.terminates else {}
    if lead == 1:
        tokens, reward = tokens[:, 0], reward[:, 0]
        final_tokens = None if final_tokens is None else final_tokens[:, 0]
    return worlds, Shown(tokens, reward, final_tokens, terminated, truncated, facts, final_facts)


def _played(worlds: Worlds, state: Any, clock: Array) -> Worlds:
    """Return the worlds after a step: torch 2.11 loses what `_replace` returns, 2.6 does not compile `*worlds[2:]`."""
    return Worlds(state, clock, worlds.seed, worlds.number, worlds.key)


def over(rules: Rules, worlds: Worlds) -> Array:
    """Tell which worlds (B,) have ended."""
    terminated, truncated = judge(rules, worlds.state, worlds.clock)
    return terminated | truncated


def renew(rules: Rules, worlds: Worlds, tokens: Array, ended: Array) -> tuple[Worlds, Array]:
    """Start the next episode in the worlds `ended`, bool (B,), and put in what the learners see of it (B, n, N, D)."""
    xp = namespace(ended)
    number = worlds.number + xp.astype(ended, xp.int64)
    key, start = episode_key(worlds.seed, number), xp.zeros_like(worlds.clock)
    fresh = rules.core.initial(uniforms(key, start, rules.core.start_draws))
    state = type(fresh)(*(_choose(ended, new, old) for new, old in zip(fresh, worlds.state, strict=True)))
    worlds = Worlds(state, xp.where(ended, start, worlds.clock), worlds.seed, number, key)
    return worlds, _choose(ended, rules.core.observe(fresh, rules.learners), tokens)


def _facts(rules: Rules, worlds: Worlds, tokens: Array, lead: int) -> dict[str, Array]:
    xp = namespace(tokens)
    return describe(rules.core, worlds.state, tokens[:, 0] if lead == 1 else tokens, lead, xp.float32)


def on_gpu(array: Array) -> bool:
    """Tell whether an array is a tensor on a GPU."""
    return getattr(array, "is_cuda", False)


def beside(rows: Array, like: Array) -> Array:
    """Return `rows` (B,) with as many axes as `like` (B, ...) has."""
    return namespace(rows).reshape(rows, (-1, *[1] * (like.ndim - 1)))


def _choose(rows: Array, new: Array, old: Array) -> Array:
    """Return `new` (B, ...) in `rows`, bool (B,), and `old` elsewhere."""
    return namespace(rows).where(beside(rows, old), new, old)

"""What games of one agent have in common, so that a new one consists of its own rules."""

from __future__ import annotations

from typing import Any, ClassVar

from noisy_envs.arrays import Array, namespace

AGENT = slice(0, 1)


class SingleAgentGame:
    """Base class of games with one agent: a `noisy_envs.games.game.Game` without rules.

    A game is a frozen dataclass whose fields are its options. It defines `name`, `num_actions`, `max_steps`,
    `token_spec`, `observation_bounds`, `num_reset_uniforms`, `initial`, `transition`, `observe`, `reward` and
    `signal_mask`. A game that terminates adds `terminated`; one with random transitions `num_step_uniforms` and,
    to name the random variables, `sample_randomness`; one that can be rendered `render_modes` and `render_scene`.
    """

    name: ClassVar[str]
    num_actions: ClassVar[int]
    terminates: ClassVar[bool] = False
    signal_moves: ClassVar[bool] = True
    render_modes: ClassVar[tuple[str, ...]] = ()
    reset_options: ClassVar[tuple[str, ...]] = ()
    policies: ClassVar[tuple[str, ...]] = ("random",)
    agents: ClassVar[tuple[str, ...]] = ("agent_0",)
    teams: ClassVar[dict[str, slice]] = {"all": AGENT}
    scripted_policies: ClassVar[tuple[tuple[slice, Any], ...]] = ()

    # a game's own: options of the dataclass, constants or properties
    continuous_actions: Any = False  # bool
    num_step_uniforms: Any = ()  # tuple[int, ...]
    token_spec: Any  # TokenSpec

    def prepare(self, like: Array) -> None:
        """Make ready to draw starting states: there is nothing to do."""

    def sample_randomness(self, u: tuple[Array, ...]) -> Any:
        """Return what chance decides in a step: the uniforms as they are."""
        return u

    def validate_state(self, given: Any, batch: tuple[int, ...]) -> Any:
        """Refuse a state that a user hands over: a game that takes one must check it."""
        raise ValueError(f"options: {self.name} takes no state to start from")

    def observe(self, state: Any, agents: slice = AGENT) -> Array:
        """Return the tokens (B, 1, N, D) that the agent sees."""
        raise NotImplementedError

    def terminated(self, state: Any) -> Array:
        """Tell which worlds (B,) are over."""
        raise NotImplementedError

    def success(self, state: Any) -> Array:
        """Tell in which worlds (B,) the goal is reached: wherever it is over."""
        return self.terminated(state)

    def token_mask(self, tokens: Array) -> Array:
        """Tell tokens (..., N, D) from padding, bool (..., N)."""
        mask: Array = self.token_spec.mask(tokens)
        return mask

    def world_tokens(self, state: Any) -> Array:
        """Return what a centralised critic sees (B, N, D): the only agent sees all."""
        return self.observe(state)[:, 0]

    def policy(self, name: str, state: Any, u: Array, agents: slice = AGENT) -> Array:
        """Return uniformly random actions (B, 1, ...) from uniforms of their shape."""
        xp = namespace(u)
        return u if self.continuous_actions else xp.astype(xp.floor(u * self.num_actions), xp.int64)

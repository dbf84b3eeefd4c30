"""What games of one agent have in common, so that a new one consists of its own rules."""

from __future__ import annotations

from typing import Any, ClassVar

from noisy_envs.arrays import Array, namespace

AGENT = slice(0, 1)


class SingleAgentGame:
    """A core (`noisy_envs.games.game.Core`) but for its rules: the base of a frozen dataclass whose fields are the options.

    A game adds `name`, `num_actions`, `max_steps`, `token_spec`, `observation_bounds`, `start_draws`, `initial`,
    `transition`, `observe`, `reward` and `signal_mask`; if it terminates, `terminated`; if chance enters a step,
    `step_draws`, and a `chance` that names what comes of them in a `NamedTuple`; if it is drawn, `render_modes` and
    `scene`. It may replace whatever is here.
    """

    name: ClassVar[str]
    num_actions: ClassVar[int]
    terminates: ClassVar[bool] = False
    signal_moves: ClassVar[bool] = True
    render_modes: ClassVar[tuple[str, ...]] = ()
    start_options: ClassVar[tuple[str, ...]] = ()
    policies: ClassVar[tuple[str, ...]] = ("random",)
    agents: ClassVar[tuple[str, ...]] = ("agent_0",)
    teams: ClassVar[dict[str, slice]] = {"all": AGENT}
    scripts: ClassVar[tuple[tuple[slice, Any], ...]] = ()

    # a game's own: options of the dataclass, constants or properties
    continuous_actions: Any = False  # bool
    step_draws: Any = ()  # tuple[int, ...]
    token_spec: Any  # TokenSpec

    def prepare(self, like: Array) -> None:
        """Make ready to draw starting states: there is nothing to do."""

    def chance(self, u: tuple[Array, ...]) -> Any:
        """Return what chance decides in a step: the uniforms as they are."""
        return u

    def admit(self, given: Any, batch: tuple[int, ...]) -> Any:
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

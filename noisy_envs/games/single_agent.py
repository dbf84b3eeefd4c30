"""Base class of games with one agent: a new game adds only its rules."""

from __future__ import annotations

from typing import Any, ClassVar

from noisy_envs.arrays import Array, namespace

AGENT = slice(0, 1)


class SingleAgentGame:
    """A `noisy_envs.games.game.Game` of one agent, without rules.

    Subclasses are frozen dataclasses whose fields are the options. They define `name`, `num_actions`, `max_steps`,
    `token_spec`, `observation_bounds`, `num_reset_uniforms`, `initial`, `transition`, `observe`, `reward` and
    `signal_mask`; if the game terminates, `terminated`; if transitions are random, `num_step_uniforms` and, to name the
    random variables, `sample_randomness`; if it can be rendered, `render_modes` and `render_scene`.
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

    # defined by the game: options of the dataclass, constants or properties
    continuous_actions: Any = False  # bool
    num_step_uniforms: Any = ()  # tuple[int, ...]
    token_spec: Any  # TokenSpec

    def prepare(self, like: Array) -> None:
        """Cache nothing."""

    def sample_randomness(self, u: tuple[Array, ...]) -> Any:
        """Return the uniforms as they are."""
        return u

    def validate_state(self, given: Any, batch: tuple[int, ...]) -> Any:
        """Refuse every state; a game that accepts states must validate them."""
        raise ValueError(f"options: {self.name} accepts no state to start from")

    def observe(self, state: Any, agents: slice = AGENT) -> Array:
        """Return the tokens (B, 1, N, D) that the agent observes."""
        raise NotImplementedError

    def terminated(self, state: Any) -> Array:
        """Tell which states are terminal (B,)."""
        raise NotImplementedError

    def success(self, state: Any) -> Array:
        """Tell in which states the goal is reached (B,): all terminal ones."""
        return self.terminated(state)

    def token_mask(self, tokens: Array) -> Array:
        """Return the padding mask of tokens (..., N, D): bool (..., N), False for padding."""
        mask: Array = self.token_spec.mask(tokens)
        return mask

    def world_tokens(self, state: Any) -> Array:
        """Return the input of a centralised critic (B, N, D): the observation of the only agent."""
        return self.observe(state)[:, 0]

    def policy(self, name: str, state: Any, u: Array, agents: slice = AGENT) -> Array:
        """Return uniformly random actions (B, 1, ...) from uniforms of their shape."""
        xp = namespace(u)
        return u if self.continuous_actions else xp.astype(xp.floor(u * self.num_actions), xp.int64)

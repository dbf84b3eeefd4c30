"""The games: rules only, over a batch of worlds, in NumPy or torch."""

from __future__ import annotations

from typing import Any, Protocol

from noisy_envs.arrays import Array
from noisy_envs.tokens import TokenSpec


class Game(Protocol):
    """What a shell asks of a game: frozen parameters and pure functions over `B` worlds.

    A state is a `NamedTuple` of arrays with leading axis B, and so is a step's chance, or a plain tuple. All arrays of
    a call belong to one library and device, and floats keep the dtype of the state.

    Attributes:
        name: a word.
        num_actions: how many there are.
        terminates: whether an episode can end before its time limit.
        signal_moves: whether other tokens can carry the signal in the course of an episode.
        render_modes: of "human", "rgb_array" (see `render_scene`) and "ansi" (see `text`).
        reset_options: options of a reset that `validate_state` takes, beside a state.
        policies: names that `policy` knows.
    """

    name: str
    num_actions: int
    terminates: bool
    signal_moves: bool
    render_modes: tuple[str, ...]
    reset_options: tuple[str, ...]
    policies: tuple[str, ...]

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents, A of them; the first is the one that learns in a single-agent view."""

    @property
    def teams(self) -> dict[str, slice]:
        """Sets of agents that may be driven together, by name; one is "all"."""

    @property
    def scripted_policies(self) -> tuple[tuple[slice, Any], ...]:
        """What agents do that are not driven: consecutive sets of them, each with a policy's name or a function."""

    @property
    def max_steps(self) -> int:
        """Steps after which an episode is truncated."""

    @property
    def continuous_actions(self) -> bool:
        """Whether an action is `num_actions` numbers, which the shells clip to 0 … 1, or one of as many integers."""

    @property
    def token_spec(self) -> TokenSpec:
        """What an observation means; AttributeError where it is no set of tokens."""

    @property
    def observation_bounds(self) -> tuple[Array, Array]:
        """Lowest and highest values of an observation, of its shape and type."""

    @property
    def num_reset_uniforms(self) -> tuple[int, ...]:
        """Uniforms that `initial` takes, for each stream."""

    @property
    def num_step_uniforms(self) -> tuple[int, ...]:
        """Uniforms that `sample_randomness` takes, for each stream."""

    def prepare(self, like: Array) -> None:
        """Make ready to draw starting states on the device of an array without asking the host."""

    def initial(self, u: tuple[Array, ...]) -> Any:
        """Draw starting states, none of them over: the shells refuse one that is when they reset."""

    def validate_state(self, given: Any, batch: tuple[int, ...]) -> Any:
        """Check a state that a user hands over."""

    def sample_randomness(self, u: tuple[Array, ...]) -> Any:
        """Turn uniforms into what chance decides in a step, and for `scripted_policies` two fields (B, A, ...).

        They are `policy`, uniforms, and `random`, uniformly random actions.
        """

    def transition(self, state: Any, action: Array, randomness: Any) -> Any:
        """Play one step of the joint action (B, A, ...)."""

    def observe(self, state: Any, agents: slice) -> Array:
        """Return the tokens (B, n, N, D) of n agents, or whatever they see (B, n, ...)."""

    def reward(self, state: Any, agents: slice) -> Array:
        """Return the rewards (B, n) of n agents for the step that led here."""

    def terminated(self, state: Any) -> Array:
        """Tell which worlds (B,) are over; asked of games that terminate, as is `success`."""

    def render_scene(self, state: Any, halos: Array) -> Any:
        """Show a world, `state` without the axis B, as a `noisy_envs.rendering.renderer.Scene` or `Board`.

        Asked, in NumPy, of games of your own that have the render modes "human" and "rgb_array". `halos` are the
        strengths (N,), 0 to 1, of glows around what the first agent's tokens show.
        """

    def render_text(self, state: Any) -> list[str]:
        """Draw each world in characters; asked of games that have the render mode "ansi"."""

    def success(self, state: Any) -> Array:
        """Tell in which worlds (B,) the goal is reached."""

    def token_mask(self, tokens: Array) -> Array:
        """Tell tokens (..., N, D) from padding, bool (..., N)."""

    def signal_mask(self, tokens: Array) -> Array:
        """Tell which tokens (..., N, D) carry signal, bool (..., N)."""

    def world_tokens(self, state: Any) -> Array:
        """Return all entities (B, N, D) as no agent sees them, for a centralised critic."""

    def policy(self, name: str, state: Any, u: Array, agents: slice) -> Array:
        """Return the actions (B, n, ...) of n agents by a reference policy, from uniforms u of their shape."""

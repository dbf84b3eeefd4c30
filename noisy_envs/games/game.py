"""The protocol that every game follows: rules only, over a batch of environments, in NumPy or torch."""

from __future__ import annotations

from typing import Any, Protocol

from noisy_envs.arrays import Array
from noisy_envs.tokens import TokenSpec


class Game(Protocol):
    """A game is a frozen dataclass of options with pure functions over `B` environments.

    A state is a `NamedTuple` of arrays with leading axis B. All arrays of a call belong to one library and device, and
    floats keep the dtype of the state.

    Attributes:
        name: identifier of the game.
        num_actions: number of discrete actions, or of components of a continuous action.
        terminates: whether an episode can end before its time limit.
        signal_moves: whether the signal mask can change during an episode.
        render_modes: among "human", "rgb_array" (both by `render_scene`) and "ansi" (by `render_text`).
        reset_options: options of `reset`, besides `state`, that `validate_state` accepts.
        policies: names of the built-in policies.
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
        """Names of the A agents; single-agent interfaces control the first one."""

    @property
    def teams(self) -> dict[str, slice]:
        """Sets of agents that can be controlled together, by name; one is "all"."""

    @property
    def scripted_policies(self) -> tuple[tuple[slice, Any], ...]:
        """Policies of agents that are not controlled: consecutive sets of agents, each with a name or a function."""

    @property
    def max_steps(self) -> int:
        """Steps after which an episode is truncated."""

    @property
    def continuous_actions(self) -> bool:
        """Whether an action is `num_actions` floats, which the interfaces clip to [0, 1], or an integer below it."""

    @property
    def token_spec(self) -> TokenSpec:
        """Meaning of an observation; AttributeError if it is not a set of tokens."""

    @property
    def observation_bounds(self) -> tuple[Array, Array]:
        """Lowest and highest values of an observation, as NumPy arrays of its shape and dtype."""

    @property
    def num_reset_uniforms(self) -> tuple[int, ...]:
        """Number of uniforms that `initial` needs from each stream."""

    @property
    def num_step_uniforms(self) -> tuple[int, ...]:
        """Number of uniforms that `sample_randomness` needs from each stream."""

    def prepare(self, like: Array) -> None:
        """Cache what `initial` needs on the device of `like`, so that it does not wait for the host."""

    def initial(self, u: tuple[Array, ...]) -> Any:
        """Draw starting states from uniforms (B, count), one array for each stream; none may be terminal."""

    def validate_state(self, given: Any, batch: tuple[int, ...]) -> Any:
        """Validate a user-supplied state with leading shape `batch`, and return it with one batch axis."""

    def sample_randomness(self, u: tuple[Array, ...]) -> Any:
        """Turn uniforms (B, count) into the random variables of one step, arrays (B, ...).

        If there are scripted policies, two of them are `policy`, uniforms of the shape of the joint action, and
        `random`, uniformly random actions.
        """

    def transition(self, state: Any, action: Array, randomness: Any) -> Any:
        """Return the states after one step of the joint action (B, A, ...)."""

    def observe(self, state: Any, agents: slice) -> Array:
        """Return the tokens (B, n, N, D), or other observations (B, n, ...), of n agents."""

    def reward(self, state: Any, agents: slice) -> Array:
        """Return the rewards (B, n) of n agents for the step that led to `state`."""

    def terminated(self, state: Any) -> Array:
        """Tell which states are terminal (B,); needed if the game terminates, as is `success`."""

    def success(self, state: Any) -> Array:
        """Tell in which states the goal is reached (B,)."""

    def render_scene(self, state: Any, halos: Array) -> Any:
        """Describe one environment, a NumPy state without batch axis, as a `rendering.renderer.Scene` or `Board`.

        Needed for the render modes "human" and "rgb_array". `halos` (N,) are the strengths, 0 to 1, of glows around
        what the tokens of the first agent show.
        """

    def render_text(self, state: Any) -> list[str]:
        """Draw each environment in characters; needed for the render mode "ansi"."""

    def token_mask(self, tokens: Array) -> Array:
        """Return the padding mask of tokens (..., N, D): bool (..., N), False for padding."""

    def signal_mask(self, tokens: Array, state: Any) -> Array:
        """Tell which tokens (..., N, D) are signal, bool (..., N), from them or from the states (B, ...) they show."""

    def world_tokens(self, state: Any) -> Array:
        """Return all entities (B, N, D) in absolute coordinates, for a centralised critic."""

    def policy(self, name: str, state: Any, u: Array, agents: slice) -> Array:
        """Return actions (B, n, ...) of n agents by a built-in policy, from uniforms of the same shape."""

"""Write your own game once; single, vector, NumPy, torch and GPU environments follow. Needs: pip install -e .

The agent walks along a line to the fruit and ignores pebbles. python examples/own_environment.py plays it.
To train on it, with this file's folder on PYTHONPATH: python agents/ppo_adapool.py --env-id own_environment:Fruit-v0
`B` environments, `N` tokens. `noisy_envs.games.game.Game` describes what else a game can do.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from noisy_envs.arrays import Array, namespace
from noisy_envs.games.single_agent import AGENT, SingleAgentGame
from noisy_envs.rendering.renderer import BLACK, BLUE, GREEN, Item, Marker, Scene
from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import check_count

MARKERS = (
    Marker("agent", 0.05, GREEN),
    Marker("fruit", 0.05, BLUE, shape="diamond"),
    Marker("pebble", 0.03, BLACK, shape="ring"),
)


class State(NamedTuple):
    """`B` environments: positions on the line from −1 to 1."""

    agent: Array  # (B, 1)
    things: Array  # (B, N - 1): the fruit, then pebbles


@dataclass(frozen=True)
class Fruit(SingleAgentGame):
    """The rules. Fields are the options: gymnasium.make("Fruit-v0", num_pebbles=28)."""

    num_pebbles: int = 7
    max_steps: int = 40

    name = "fruit"
    num_actions = 3  # left, stay, right
    terminates = True
    render_modes = ("human", "rgb_array")

    def __post_init__(self) -> None:
        """Check the options, so that errors appear when the environment is made."""
        check_count("num_pebbles", self.num_pebbles, minimum=0, may_be_range=False)

    @cached_property
    def token_spec(self) -> TokenSpec:
        """Describe the tokens."""
        return TokenSpec(2 + self.num_pebbles, ("x", "role"), {"self": 0, "fruit": 1, "pebble": 2}, padded=False)

    @cached_property
    def observation_bounds(self) -> tuple[Array, Array]:
        """Lowest and highest values (N, 2)."""
        low, high = (np.array([row] * self.token_spec.num_tokens, np.float32) for row in ([-2, 0], [2, 2]))
        return low, high

    @cached_property
    def num_reset_uniforms(self) -> tuple[int, ...]:
        """Random numbers for `initial`, in two streams, so that more pebbles move neither agent nor fruit."""
        return 1, 1 + self.num_pebbles

    def initial(self, u: tuple[Array, ...]) -> State:
        """Return random starting states, never at the fruit, from numbers between 0 and 1, (B, 1) and (B, N - 1)."""
        xp = namespace(u[0])
        fruit = (2 * u[0] + 0.1 + 1.8 * u[1][:, :1]) % 2  # at least 0.1 from the agent, wrapped around the line
        return State(2 * u[0] - 1, xp.concat([fruit - 1, 2 * u[1][:, 1:] - 1], axis=1))

    def transition(self, state: State, action: Array, randomness: Any) -> State:
        """Walk by actions (B, 1)."""
        xp = namespace(action)
        step = 0.1 * xp.astype(action - 1, state.agent.dtype)
        return State(xp.clip(state.agent + step, -1.0, 1.0), state.things)

    def observe(self, state: State, agents: slice = AGENT) -> Array:
        """Return agent, fruit and pebbles relative to the agent: tokens (B, 1, N, 2)."""
        xp = namespace(state.agent)
        x = xp.concat([state.agent, state.things], axis=1) - state.agent
        role = xp.clip(xp.arange(x.shape[1], dtype=x.dtype, device=x.device), 0, 2)  # 0, 1, 2, 2, 2, …
        return xp.stack([x, role + xp.zeros_like(x)], axis=-1)[:, None]

    def reward(self, state: State, agents: slice = AGENT) -> Array:
        """Return 1 for the fruit minus 0.02 for each step: (B, 1)."""
        return namespace(state.agent).astype(self.terminated(state), state.agent.dtype)[:, None] - 0.02

    def terminated(self, state: State) -> Array:
        """Return whether the agent is at the fruit, (B,)."""
        return abs(state.things - state.agent)[:, 0] <= 0.05

    def signal_mask(self, tokens: Array, state: State) -> Array:
        """Return the signal among tokens (..., N, 2): agent and fruit."""
        return tokens[..., 1] < 2

    def render_scene(self, state: State, halos: Array) -> Scene:
        """Draw one environment, without the axis B, 1.2 to each side; halos (N,) are weights of tokens."""
        markers = [MARKERS[min(token, 2)] for token in range(len(halos))]
        places = np.concatenate([state.agent, state.things])
        return Scene(1.2, MARKERS, [Item(*item) for item in zip(markers, places, 0 * places, halos, strict=True)])


gymnasium.register(
    "Fruit-v0",
    entry_point="noisy_envs.interfaces.gymnasium_env:TokenEnv",
    vector_entry_point="noisy_envs.interfaces.vector_env:TokenVectorEnv",
    kwargs={"game": f"{__name__}:Fruit"},  # or the class itself, which a spec in JSON cannot hold
)

if __name__ == "__main__":
    envs = gymnasium.make_vec("Fruit-v0", num_envs=1000, num_pebbles=28)
    envs.action_space.seed(0)
    for walk in (False, True):
        tokens, info = envs.reset(seed=0)  # (1000, 30, 2)
        total = 0.0
        for _ in range(200):
            actions = 1 + np.sign(tokens[:, 1, 0]).astype(int) if walk else envs.action_space.sample()
            tokens, reward, terminated, truncated, info = envs.step(actions)
            total += reward.sum()
        print(f"{'towards the fruit' if walk else 'at random'}: reward {total / 200_000:.3f} a step")

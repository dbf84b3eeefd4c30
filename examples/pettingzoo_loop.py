"""Control the predators of SimpleTag with PettingZoo; the prey act at random: python examples/pettingzoo_loop.py."""

import numpy as np

from noisy_envs import simple_tag_v0

env = simple_tag_v0.parallel_env(
    num_predators=3,
    num_prey=1,
    num_obstacles=(0, 8),
    learners="predators",
    prey_policy="random",
    reward_sharing="shared",
)
PREY = env.token_spec.roles["prey"]


def chase(tokens: np.ndarray) -> int:
    """Step along the longer axis towards the nearest prey."""
    prey = tokens[tokens[:, 4] == PREY, :2]
    x, y = prey[np.hypot(*prey.T).argmin()]
    if abs(x) > abs(y):
        return 2 if x > 0 else 1
    return 4 if y > 0 else 3


observations, infos = env.reset(seed=0)
total = dict.fromkeys(env.agents, 0.0)
while env.agents:  # empty once the episode is over
    actions = {agent: chase(tokens) for agent, tokens in observations.items()}
    observations, rewards, terminations, truncations, infos = env.step(actions)
    for agent, reward in rewards.items():
        total[agent] += reward
print("returns:", total)
env.close()

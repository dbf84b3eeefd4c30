"""Play a random episode and print the contents of `info`: python examples/random_agent.py."""

from typing import Any

import gymnasium

import noisy_envs  # noqa: F401  registers the environments

# a fixed spread: otherwise the starting positions reveal how much noise there is
env: Any = gymnasium.make("noisy_envs/SimpleCentroid-v0", num_noise=(0, 28), spread=2.5)
env.action_space.seed(0)
tokens, info = env.reset(seed=0)
total, ended = 0.0, False
while not ended:
    tokens, reward, terminated, truncated, info = env.step(env.action_space.sample())
    total += float(reward)
    ended = terminated or truncated
present = env.unwrapped.token_spec.mask(tokens).sum()  # the other rows are padding: the noise varies by episode
print(f"return {total:.3f}, {info['signal_mask'].sum()} of {present} tokens carry signal: {info['snr']:.2f}")
env.close()

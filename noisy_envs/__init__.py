"""Reinforcement-learning environments whose observations are sets of tokens, with a tunable share of noise tokens.

Importing this package registers its ids with Gymnasium: `gymnasium.make("noisy_envs/SimpleCentroid-v0")`.
`ENVIRONMENTS` lists the ids. All other modules are imported on first use:

* `games`: rules. `interfaces`: Gymnasium, PettingZoo, vector environments, and the step as a pure function.
* `simple_centroid_v0`, `simple_tag_v0`: PettingZoo modules. `baselines`: returns of a random and an oracle policy.
* `wrappers`: noise for any environment. `tokens.TokenSpec`: the meaning of an observation.
* `nn`: pooling heads and their theory, in torch. `training`: what a run needs besides the algorithm.
* `rendering`: images and videos, by pygame, and the viewer.
"""

from noisy_envs.registration import ENVIRONMENTS, register

__version__ = "0.1.0"
__all__ = ["ENVIRONMENTS", "__version__"]

register()

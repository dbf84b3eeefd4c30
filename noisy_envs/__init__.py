"""Reinforcement-learning environments whose observations are sets of tokens, most of them noise if you wish.

Importing this package registers its ids with Gymnasium: `gymnasium.make("noisy_envs/SimpleCentroid-v0")`.
`ENVIRONMENTS` lists them. What else there is, each imported when first used:

* `games`: the rules. `interfaces`: Gymnasium, PettingZoo and vector environments, and the step as a pure function.
* `simple_centroid_v0`, `simple_tag_v0`: PettingZoo's way in. `reference`: returns of random play and of an oracle.
* `wrappers`: noise for any environment. `tokens.TokenSpec`: what an observation means.
* `nn`: pooling heads and the theory, in torch. `training`: what a run needs beside its algorithm.
* `rendering`: pictures, by pygame, and the viewer.
"""

from noisy_envs.registration import ENVIRONMENTS, register

__version__ = "0.1.0"
__all__ = ["ENVIRONMENTS", "__version__"]

register()

"""Reinforcement-learning environments whose observations are sets of tokens, most of them noise if you wish.

Importing this package registers its ids with Gymnasium. `pooling` needs torch, `simple_centroid_v0` PettingZoo,
drawing pygame: each is imported when first used.
"""

from noisy_envs.registry import ENVIRONMENTS, register

__version__ = "0.1.0"
__all__ = ["ENVIRONMENTS", "__version__"]

register()

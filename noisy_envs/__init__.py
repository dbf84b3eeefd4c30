"""Reinforcement-learning environments whose observations are sets of tokens, with a tunable share of noise tokens.

Importing this package registers its environments: `gymnasium.make("noisy_envs/SimpleCentroid-v0")`. Its names:

* `ENVIRONMENTS`: all environment IDs, with their games and options.
* `TokenSpec`: the meaning of the tokens of an observation.

Folders, each imported when first used:

* `games`: the rules of the games.
* `interfaces`: Gymnasium, PettingZoo and vector environments; a step as a pure function.
* `wrappers`: tokens and noise for any environment, `wrappers.noisy_tokens(env, num_noise)`.
* `nn`: pooling heads, the paper's theory, and the encoder of the agents (torch).
* `training`: what a training run needs besides its algorithm (torch).
* `rendering`: images, videos and the viewer (pygame).
"""

from noisy_envs.registration import ENVIRONMENTS, register
from noisy_envs.tokens import TokenSpec

__version__ = "0.1.0"
__all__ = ["ENVIRONMENTS", "TokenSpec", "__version__"]

register()

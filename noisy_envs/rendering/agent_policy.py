"""Trained agents as players: a checkpoint of agents/ppo_*.py, played by the file that made it.

The agents are single files of no package. A checkpoint names its pooling head, and the head names the file, which is
imported from a folder that the user trusts; of the checkpoint itself only weights and settings are read, never code.
"""

from __future__ import annotations

import dataclasses
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from noisy_envs.arrays import Array
from noisy_envs.games.game import Core
from noisy_envs.randomness import derive_seed
from noisy_envs.registration import FOREIGN, find
from noisy_envs.tokens import TokenSpec
from noisy_envs.training.checkpoint import checkpoint_path, load_checkpoint
from noisy_envs.training.gymnasium_envs import OneForeign
from noisy_envs.validation import check_choice

AGENTS = Path(__file__).parents[2] / "agents"  # of the checkout
MEANINGS = ("weight", "influence")


class Trained:
    """The agent of a checkpoint, as the run's own evaluation plays it, on the CPU.

    Of its files it uses `load_args`, `check`, `as_trained`, `unseen`, `team`, `make_envs`, `plain_agent`,
    `load_weights`, `decide` and the agent's `token_weights`.

    Args:
        path: a run's folder, or its checkpoint.
        env_id: an id of the game that it learned; None for the very one.
        noise: how many noise tokens; None for as many as in training, or, where the id is another, as that has. All
            others start as in training.
        agents: the folder of agents/ppo_*.py.
        meaning: what it gives of each token, "weight" in the pool, or "influence" on the action.

    Raises:
        ValueError, OSError: naming what is missing or does not fit.
    """

    def __init__(
        self, path: Path, env_id: str | None, noise: int | None, agents: Path = AGENTS, meaning: str = "weight"
    ) -> None:
        """Load the agent; see the class."""
        check_choice("meaning", meaning, MEANINGS)
        self.meaning = meaning
        checkpoint = checkpoint_path(path)
        content: Any = load_checkpoint(checkpoint)
        self.name = _head(checkpoint, content)
        self._file = load_file(self.name, agents)
        saved = self._file.load_args(checkpoint)
        self.env_id = env_id = env_id or saved.env_id
        game, _ = find(env_id)
        if find(saved.env_id)[0] != game or (game == FOREIGN and saved.env_id != env_id):
            raise ValueError(f"policy={str(path)!r}: learned another game than {env_id}, {saved.env_id}")
        trained_with = saved.num_noise if env_id == saved.env_id else ()
        num_noise = trained_with if noise is None else (noise,)
        here = {"env_id": env_id, "num_noise": num_noise, "evaluate": (path,), "device": "cpu", "track": False}
        args = dataclasses.replace(saved, **here)
        self._file.check(args)
        self._args = args = self._file.as_trained(args, saved)
        self.team, self.options = self._file.team(args), self._file.unseen(args, saved)
        self.seed = derive_seed(args.seed, "evaluate")
        self._agent = self._file.plain_agent(args, self._file.make_envs(args, 1, "evaluate")[0])
        self._file.load_weights(self._agent, checkpoint, content)
        self._generator = self._file.torch.Generator().manual_seed(args.seed)

    def act(self, core: Core, state: Any, agents: slice) -> tuple[Array, Array]:
        """Return actions (1, n, ...) of n agents in a batch of one world, and the first one's weights (N,)."""
        actions, weights = self._decide(core.observe(state, agents)[0], core.token_spec)
        return actions[None], weights

    def act_in(self, world: OneForeign) -> tuple[Any, Array]:
        """Return an action that an environment of others takes, and the weights (N,) of its tokens."""
        actions, weights = self._decide(world.tokens[None], world.token_spec)
        return world.to_range(actions[0]), weights

    def _decide(self, tokens: Array, spec: TokenSpec) -> tuple[Array, Array]:
        """Return actions (n, ...) for what n agents see (n, N, D), and the first one's weights (N,)."""
        torch = self._file.torch
        self._agent.spec = spec
        seen = torch.from_numpy(tokens)
        with torch.inference_mode():
            actions = self._file.decide(self._agent, seen, self._args, self._generator).numpy()
            if self.meaning == "weight":
                return actions, self._agent.token_weights(seen)[0].numpy()
        return actions, self._influence(seen[:1])

    def _influence(self, seen: Any) -> Array:
        """Return how much the action moves with what a token says (1, N, D), its role aside: (N,), 1 in all.

        It is the norm of the derivative of the mean action, or of the logarithms of the probabilities, by a token.
        """
        torch = self._file.torch
        seen = seen.clone().requires_grad_()
        parameters, _ = self._agent(seen)
        found = self._agent.normal(parameters)[0] if self._agent.continuous else parameters.log_softmax(-1)
        slopes = torch.stack([torch.autograd.grad(one, seen, retain_graph=True)[0][0] for one in found[0]])
        norms = slopes.square().sum(dim=(0, 2)).sqrt()
        influence: Array = (norms / norms.sum().clamp(min=1e-30)).numpy()
        return influence


def load_file(head: str, agents: Path) -> ModuleType:
    """Import the file of a pooling head from the folder of agents.

    Raises:
        FileNotFoundError: it is not there.
    """
    path = agents / f"ppo_{head.lower()}.py"
    spec = spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise FileNotFoundError(
            f"no {path}, which plays checkpoints of the head {head}: say where it is by --agents-dir, "
            "the folder agents of a checkout"
        )
    module = module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look up its annotations
    spec.loader.exec_module(module)
    return module


def _head(checkpoint: Path, content: Any) -> str:
    """Return the pooling head of a checkpoint, the name of a class and no path."""
    head = content.get("head") if isinstance(content, dict) else None
    if not isinstance(head, str) or not head.isidentifier():
        raise ValueError(f"{checkpoint} is no checkpoint of agents/ppo_*.py: it names no pooling head")
    return head

"""Trained agents as policies: a checkpoint of agents/ppo_*.py, played by the file that wrote it.

The agents are single files of no package. A checkpoint names its file, which is imported from a folder that the user
trusts; from the checkpoint itself only weights and settings are read, never code.
"""

from __future__ import annotations

import dataclasses
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from noisy_envs.arrays import Array
from noisy_envs.games.game import Game
from noisy_envs.randomness import derive_seed
from noisy_envs.registration import OTHER, find
from noisy_envs.tokens import TokenSpec
from noisy_envs.training import envs, evaluation, settings
from noisy_envs.training.checkpoint import checkpoint_path, load_checkpoint
from noisy_envs.training.gymnasium_envs import OneForeign
from noisy_envs.validation import check_choice

AGENTS = Path(__file__).parents[2] / "agents"  # of the checkout
MEANINGS = ("attention", "saliency")


class Trained:
    """The agent of a checkpoint, as the run's own evaluation plays it, on the CPU.

    Args:
        path: a run's folder, or its checkpoint.
        env_id: an id of the game that it was trained on; None for the same id.
        noise: number of noise tokens; None for as many as in training, or, if the id is another, as that has. Episodes
            start as in training, whatever the noise.
        agents: the folder of agents/ppo_*.py.
        meaning: the weights of tokens: "attention", those in the pool, or "saliency", how much each moves the action.

    Raises:
        ValueError, OSError: naming what is missing or does not fit.
    """

    def __init__(
        self, path: Path, env_id: str | None, noise: int | None, agents: Path = AGENTS, meaning: str = "attention"
    ) -> None:
        """Load the agent; see the class."""
        check_choice("meaning", meaning, MEANINGS)
        self.meaning = meaning
        checkpoint = checkpoint_path(path)
        content: Any = load_checkpoint(checkpoint)
        self.name = _file_name(checkpoint, content)
        module = load_file(self.name, agents)
        trained = settings.load_args(module, checkpoint)
        self.env_id = env_id = env_id or trained.env_id
        game, _ = find(env_id)
        if find(trained.env_id)[0] != game or (game == OTHER and trained.env_id != env_id):
            raise ValueError(f"policy={str(path)!r}: trained on another game than {env_id}, {trained.env_id}")
        trained_noise = trained.num_noise if env_id == trained.env_id else ()
        num_noise = trained_noise if noise is None else (noise,)
        changes = {"env_id": env_id, "num_noise": num_noise, "evaluate": (path,), "device": "cpu", "track": False}
        args = dataclasses.replace(trained, **changes)
        settings.validate(args)
        self._args = args = envs.with_start_of(args, trained)
        self.team, self.options = args.learners, envs.eval_env_kwargs(args, trained)
        self.seed = derive_seed(args.seed, "evaluate")
        self._agent = evaluation.make_eval_agent(module, args, envs.make_eval_envs(args, 1)[0])
        evaluation.load_weights(self._agent, module, checkpoint, content)
        self._generator = torch.Generator().manual_seed(args.seed)

    def act(self, game: Game, state: Any, agents: slice) -> tuple[Array, Array]:
        """Return actions (1, n, ...) of n agents in a batch of one environment, and the first one's weights (N,)."""
        actions, weights = self._decide(game.observe(state, agents)[0], game.token_spec)
        return actions[None], weights

    def act_in(self, world: OneForeign) -> tuple[Any, Array]:
        """Return an action that another Gymnasium environment takes, and the weights (N,) of its tokens."""
        actions, weights = self._decide(world.tokens[None], world.token_spec)
        return world.to_range(actions[0]), weights

    def _decide(self, tokens: Array, spec: TokenSpec) -> tuple[Array, Array]:
        """Return actions (n, ...) for the tokens (n, N, D) of n agents, and the first one's weights (N,)."""
        self._agent.spec = spec
        observed = torch.from_numpy(tokens)
        with torch.inference_mode():
            actions = evaluation.select_action(self._agent, observed, self._args, self._generator).numpy()
            if self.meaning == "attention":
                return actions, evaluation.token_weights(self._agent, observed)[0].numpy()
        return actions, evaluation.saliency(self._agent, observed[:1])[0].numpy()


def load_file(name: str, agents: Path) -> ModuleType:
    """Import an agent's file from the folder of agents.

    Raises:
        FileNotFoundError: it is not there.
    """
    path = agents / f"{name}.py"
    spec = spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise FileNotFoundError(
            f"no {path}, which wrote the checkpoint: give its folder, agents in a checkout, by --agents-dir"
        )
    module = module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look up its annotations
    spec.loader.exec_module(module)
    return module


def _file_name(checkpoint: Path, content: Any) -> str:
    """Return the name of the file that wrote a checkpoint, which is no path."""
    name = content.get("file") if isinstance(content, dict) else None
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{checkpoint} is no checkpoint of agents/ppo_*.py: it names no agent")
    return name

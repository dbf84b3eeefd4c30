"""Trained agents as policies: a checkpoint of agents/ppo_*.py, played by the file that wrote it.

The agents are single files outside any package. A checkpoint names its file, which is imported from a folder that the
user trusts; from the checkpoint itself only weights and settings are read, never code.
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
from noisy_envs.randomness import derive_seed
from noisy_envs.registration import OTHER, find
from noisy_envs.rendering.playback import Playback
from noisy_envs.training import envs, evaluation, settings
from noisy_envs.training.checkpoint import agent_name, checkpoint_path, load_checkpoint
from noisy_envs.validation import check_choice

AGENTS = Path(__file__).parents[2] / "agents"  # of the checkout
OVERLAYS = ("attention", "saliency")


class Trained:
    """The agent of a checkpoint, as the run's own evaluation plays it, on the CPU.

    Args:
        path: a run's folder, or its checkpoint.
        env_id: an environment ID of the game that it was trained on; None for the same ID.
        noise: number of noise tokens; None for as many as in training, or, with another ID, for the number of that ID.
            Episodes start as in training, at any noise level.
        agents: the folder of agents/ppo_*.py.
        overlay: the weights of tokens: "attention", those in the pool, or "saliency", how much each moves the action.

    Raises:
        ValueError, OSError: naming what is missing or does not fit.
    """

    def __init__(
        self, path: Path, env_id: str | None, noise: int | None, agents: Path = AGENTS, overlay: str = "attention"
    ) -> None:
        """Load the agent; see the class."""
        check_choice("overlay", overlay, OVERLAYS)
        self.overlay = overlay
        checkpoint = checkpoint_path(path)
        content: Any = load_checkpoint(checkpoint)
        self.name = agent_name(checkpoint, content)
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
        self.learners, self.env_kwargs = args.learners, envs.eval_env_kwargs(args, trained)
        self.seed = derive_seed(args.seed, "evaluate")
        self._agent = evaluation.load_agent(module, args, checkpoint, content)
        self._generator = torch.Generator().manual_seed(args.seed)

    def act(self, playback: Playback) -> tuple[Array, Array]:
        """Return actions (n, ...) of the controlled agents, and the weights (N,) of the first one's tokens."""
        self._agent.spec = playback.token_spec
        tokens = torch.from_numpy(playback.tokens)
        with torch.inference_mode():
            actions = evaluation.select_action(self._agent, tokens, self._args, self._generator).numpy()
            if self.overlay == "attention":
                return actions, evaluation.token_weights(self._agent, tokens)[0].numpy()
        return actions, evaluation.saliency(self._agent, tokens[:1])[0].numpy()


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

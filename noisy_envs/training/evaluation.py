"""Evaluation of agents: returns on held-out seeds, scores, videos, tables over several runs and noise levels.

Shapes: `E` episodes, `R` controlled agents in all environments together, `N` tokens, `D` features.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noisy_envs.baselines import BaselineReturns
from noisy_envs.randomness import derive_seed
from noisy_envs.rendering.playback import Playback, make_playback, record
from noisy_envs.rendering.video import write_video
from noisy_envs.tokens import TokenSpec
from noisy_envs.training import envs as environments
from noisy_envs.training.checkpoint import agent_name, checkpoint_path, load_checkpoint, write_summary
from noisy_envs.training.files import new_folder
from noisy_envs.training.plots import plot_scores
from noisy_envs.training.process import timestamp
from noisy_envs.training.settings import load_args, merge_eval_args, validate
from noisy_envs.training.statistics import bootstrap_interval
from noisy_envs.training.versions import library_versions

NOT_FINITE = "{} returned an observation that is not finite"


def make_eval_agent(module: ModuleType, args: Any, spec: TokenSpec, action_space: Any) -> Any:
    """Make an agent that neither learns nor is compiled, for the tokens and actions of an environment."""
    with torch.random.fork_rng(devices=[]):
        agent = module.Agent(dataclasses.replace(args, compile=False), spec, action_space)
    return agent.to(args.device).requires_grad_(False).eval()


def load_weights(agent: Any, module: ModuleType, path: Path, content: dict[str, Any]) -> None:
    """Load the weights of the checkpoint at `path`, whose `content` has been read.

    Raises:
        ValueError: another agent wrote it (some have weights of the same shapes), or its network differs.
    """
    own, saved = Path(str(module.__file__)).stem, agent_name(path, content)
    if saved != own:
        other = Path(str(module.__file__)).with_name(f"{saved}.py")
        hint = f"; use {other.parent.name}/{other.name}" if other.is_file() else ""
        raise ValueError(f"{path} is a checkpoint of {saved}.py: expected one of {own}.py{hint}")
    try:
        agent.load_state_dict(content["agent"])
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()[:200]  # the first of dozens
        raise ValueError(f"{path} holds the weights of another network than these settings define: {reason}") from None


def load_agent(module: ModuleType, args: Any, path: Path, content: dict[str, Any]) -> Any:
    """Return the agent of a checkpoint, as `load_weights` takes it, for the environment of `args`."""
    envs, _ = environments.make_eval_envs(args, 1)
    envs.close()
    agent = make_eval_agent(module, args, envs.token_spec, envs.single_action_space)
    load_weights(agent, module, path, content)
    return agent


def select_action(agent: Any, tokens: Tensor, args: Any, generator: torch.Generator) -> Tensor:
    """Return the actions of an evaluation for tokens (R, N, D).

    Raises:
        FloatingPointError: an observation is not finite.
    """
    if not agent.spec.finite(tokens):
        raise FloatingPointError(NOT_FINITE.format(args.env_id))
    parameters, _ = agent(tokens)
    if args.eval_deterministic:
        return agent.distribution.mode(parameters)
    noise = agent.distribution.noise((len(tokens),), args.device, generator)
    return agent.distribution.sample(parameters, noise)


def evaluate(agent: Any, args: Any, episodes: int, trained: Any = None) -> np.ndarray:
    """Play one episode in each of `episodes` environments that training never sees.

    Args:
        agent: what plays.
        args: settings of the evaluation.
        episodes: E.
        trained: settings of the training run, if they are others.

    Returns:
        Returns (E,), means over the controlled agents.

    Raises:
        FloatingPointError: an observation, or a return, is not finite.
    """
    envs, tokens = environments.make_eval_envs(args, episodes, trained)
    agent.spec = envs.token_spec
    generator = torch.Generator(args.device).manual_seed(args.seed)
    returns = play_episodes(envs, tokens, lambda tokens: select_action(agent, tokens, args, generator))
    envs.close()
    if not np.isfinite(returns).all():
        raise FloatingPointError(f"{args.env_id} returned rewards that are not finite")
    return returns


def play_episodes(envs: Any, tokens: Tensor, act: Callable[[Tensor], Tensor]) -> np.ndarray:
    """Play one episode in each of E vector environments; return the returns (E,), means over the controlled agents.

    `act` maps tokens (R, N, D), at first `tokens`, to the actions of all controlled agents.
    """
    total = torch.zeros(envs.num_envs, device=tokens.device)
    running = torch.ones(envs.num_envs, dtype=torch.bool, device=tokens.device)
    with torch.inference_mode():
        while running.any():
            tokens, reward, terminated, truncated, info = envs.step(act(tokens).reshape(envs.action_space.shape))
            tokens, reward = tokens.flatten(0, -3), info.get("true_reward", reward)
            total += reward.reshape(envs.num_envs, -1).mean(dim=1).where(running, 0)
            running &= ~(terminated | truncated)
    return total.cpu().numpy()


def token_weights(agent: Any, tokens: Tensor) -> Tensor:
    """Return the weight of each token (R, N, D) in the pool, a mean over heads or features: (R, N)."""
    x, mask = agent.embed(tokens)
    embeddings, attention = agent.encoder.with_attention(x, mask)
    weights: Tensor = agent.pool.weights(embeddings, mask, attention)
    return weights


def check_token_weights(agent: Any, tokens: Tensor) -> None:
    """Raise ValueError unless the head weighs each of the tokens (R, N, D) by a finite number that is not negative."""
    with torch.no_grad():
        weights = token_weights(agent, tokens)
    if weights.shape != tokens.shape[:2] or not (weights.isfinite() & (weights >= 0)).all():
        raise ValueError(
            f"PoolingHead.weights: expected finite numbers >= 0 of shape {tuple(tokens.shape[:2])}, "
            f"got {tuple(weights.shape)} from {weights.min():g} to {weights.max():g}"
        )


def saliency(agent: Any, tokens: Tensor) -> Tensor:
    """Return how much the action changes with each token (R, N, D): (R, N), summing to 1.

    It is the norm of the derivative of the mean action, or of the log probabilities, by a token without its role.
    """
    with torch.enable_grad():
        tokens = tokens.clone().requires_grad_()
        outputs = agent.distribution.saliency_outputs(agent(tokens)[0])
        slopes = torch.stack([torch.autograd.grad(x.sum(), tokens, retain_graph=True)[0] for x in outputs.unbind(-1)])
    norms = slopes.square().sum(dim=(0, 3)).sqrt()
    return norms / norms.sum(1, keepdim=True).clamp(min=1e-30)


def record_episode(agent: Any, args: Any, trained: Any = None) -> list[np.ndarray]:
    """Draw an episode of the evaluation, each token with a halo as strong as its weight in the pool."""
    env_kwargs = environments.eval_env_kwargs(args, trained)
    playback = make_playback(args.env_id, env_kwargs, args.learners, derive_seed(args.seed, "evaluate"))
    agent.spec = playback.token_spec
    generator = torch.Generator(args.device).manual_seed(args.seed)

    def act(playback: Playback) -> tuple[np.ndarray, np.ndarray]:
        tokens = torch.from_numpy(playback.tokens).to(args.device)
        with torch.inference_mode():
            actions = select_action(agent, tokens, args, generator)
            return actions.cpu().numpy(), token_weights(agent, tokens)[0].cpu().numpy()

    frames = record(playback, act).frames
    playback.close()
    return frames


def known_levels(args: Any, trained: Any) -> dict[str, float]:
    """Return the share of an evaluation's levels whose content occurs in training; {} where there are no levels."""
    levels = environments.game_of(trained)
    if not hasattr(levels, "known_share"):
        return {}
    envs, _ = environments.make_eval_envs(dataclasses.replace(args, device="cpu"), args.eval_episodes, trained)
    return {"known_levels": levels.known_share(envs.game.render_text(envs.state))}


def evaluation_summary(returns: np.ndarray, args: Any, trained: Any, baselines: BaselineReturns) -> dict[str, Any]:
    """Summarise returns (E,): mean and normalised score, with bootstrapped 95% confidence intervals."""
    low, high = bootstrap_interval(returns, args.seed)
    return {
        "score": baselines.normalized_score(float(returns.mean())),
        "score_95": [baselines.normalized_score(low), baselines.normalized_score(high)],
        "return": float(returns.mean()),
        "return_95": [low, high],
        "return_random": baselines.random,
        "return_oracle": baselines.oracle,
        **known_levels(args, trained),
    }


def solved_label(args: Any) -> str:
    """Return what a score of 1 stands for."""
    return "solved" if environments.is_other(args) else "oracle"


def format_score(summary: dict[str, Any], args: Any) -> str:
    """Describe the result of an evaluation in a line."""
    name, scale = ("return", "") if math.isnan(summary["score"]) else ("score", f"; 0 random, 1 {solved_label(args)}")
    low, high = summary[f"{name}_95"]
    interval = "no interval from one episode" if math.isnan(low) else f"95% interval {low:.3f} to {high:.3f}"
    total = "" if name == "return" else f", return {summary['return']:.3f}"
    known = summary.get("known_levels")
    episodes = f"episodes, {100 * known:.3g}% on levels of training" if known else "unseen episodes"
    return f"{name} {summary[name]:.3f} ({interval}{scale}){total} over {args.eval_episodes} {episodes}"


def evaluate_runs(module: ModuleType, args: Any, argv: Sequence[str]) -> list[dict[str, Any]]:
    """Evaluate each checkpoint at each noise level; write a table, a matrix and a video; return the rows of the table.

    Arguments of the command line apply to all checkpoints; other settings are those of each run.

    Raises:
        ValueError, OSError: before an episode is played, naming a checkpoint or setting that does not fit.
    """
    cases = eval_cases(module, args, argv)
    folder = new_folder(args.run_dir, f"evaluation__{timestamp()}")
    rows = []
    for path, trained, eval_args, agent in cases:
        returns = evaluate(agent, eval_args, args.eval_episodes, trained)
        summary = evaluation_summary(returns, eval_args, trained, environments.baseline_returns(eval_args))
        row = {"run": str(path), "seed": trained.seed, "env_id": eval_args.env_id}
        row |= {"trained": environments.num_noise(trained), "evaluated": environments.num_noise(eval_args)}
        row |= {"env_kwargs": environments.env_kwargs(eval_args), "eval_deterministic": eval_args.eval_deterministic}
        rows.append(row | summary)
        print(f"{case_name(path, eval_args)}: {format_score(summary, eval_args)}")
    header = {"command": ["python", *sys.argv], "eval_episodes": args.eval_episodes, "versions": library_versions()}
    write_summary(folder / "evaluation.json", {**header, "results": rows})
    if args.num_noise:
        plot_scores(folder / "matrix.png", rows, solved_label(cases[0][2]))
    print(f"see {', '.join(sorted(path.name for path in folder.iterdir()))} in {folder}")
    if args.record is not None:  # last: an error in drawing must not cost the result
        path, trained, eval_args, agent = cases[0]
        write_video(args.record, record_episode(agent, eval_args, trained), fps=10)
        print(f"see an episode of {case_name(path, eval_args)}, in {args.record}")
    return rows


def eval_cases(module: ModuleType, args: Any, argv: Sequence[str]) -> list[tuple[Path, Any, Any, Any]]:
    """Return path, settings of training, settings of the evaluation and agent for each checkpoint and noise level."""
    common = {name: getattr(args, name) for name in ("device", "num_threads", "eval_episodes")}
    cases = []
    for path in dict.fromkeys(args.evaluate):
        trained = load_args(module, path)
        merged = dataclasses.replace(merge_eval_args(module, argv, path), **common)
        content = load_checkpoint(checkpoint_path(path))
        for noise in [(number,) for number in args.num_noise] or [trained.num_noise]:
            eval_args = dataclasses.replace(merged, num_noise=noise)
            validate(eval_args)
            eval_args = environments.with_start_of(eval_args, trained)
            cases.append((path, trained, eval_args, load_agent(module, eval_args, checkpoint_path(path), content)))
    return cases


def case_name(path: Path, args: Any) -> str:
    """Name an evaluated run, and its noise level."""
    return f"{path}, noise {environments.num_noise(args)}"

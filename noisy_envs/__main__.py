"""List the environments, or watch one: python -m noisy_envs --help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from noisy_envs.baselines import baseline_returns
from noisy_envs.interfaces.checks import check_seed
from noisy_envs.interfaces.episode import RENDER_FPS
from noisy_envs.registration import ENVIRONMENTS, canonical_id
from noisy_envs.rendering.playback import make_playback, record
from noisy_envs.rendering.video import check_video_path, write_video
from noisy_envs.rendering.viewer import BaselinePolicy, Policy, Viewer, baseline_names
from noisy_envs.rendering.window import has_display
from noisy_envs.training.process import EXIT_INTERRUPTED, ignore_broken_pipe, memory_errors
from noisy_envs.validation import did_you_mean

COLUMNS = ("ID", "tokens", "actions", "noise", "random", "oracle")
LEGEND = """
tokens: (N, features); noise: number of noise tokens in the first episode;
random, oracle: mean returns per episode.

python -m noisy_envs --watch ID [--policy oracle|random]
python -m noisy_envs --policy RUN
python -m noisy_envs --help"""


def row(env_id: str) -> tuple[str, ...]:
    """Return the row of an environment ID in the table, a text for each of `COLUMNS`."""
    env: Any = gymnasium.make(env_id).unwrapped
    tokens, info = env.reset(seed=0)
    actions = f"{env.game.num_actions} floats" if env.game.continuous_actions else f"one of {env.game.num_actions}"
    noise = int(np.count_nonzero(env.game.token_mask(tokens) & ~info["signal_mask"]))
    returns = [f"{value:.3f}" for value in baseline_returns(env_id)]
    return env_id, str(env.observation_space.shape), actions, str(noise), *returns


def table() -> str:
    """Return a table of all environment IDs with their tokens, actions and returns, at most 80 characters wide."""
    rows = [COLUMNS, *map(row, ENVIRONMENTS)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    num_texts = 3  # columns of text, aligned left; numbers are aligned right
    lines = [
        "  ".join(x.ljust(w) if i < num_texts else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return "\n".join(lines)


def check_policy(policy: str, env_id: str | None) -> None:
    """Raise ValueError unless `policy` is a baseline policy of the environment ID, or an existing file or folder."""
    known = baseline_names(env_id)
    if policy not in known and not Path(policy).exists():
        baselines = f"one of {', '.join(known)}, or " if known else ""
        expected = f"expected {baselines}the folder or checkpoint of a run, but there is no such file"
        raise ValueError(f"policy={policy!r}: {did_you_mean(policy, known)}{expected}")


def make_policy(
    policy: str, env_id: str | None, noise: int | None, seed: int, agents: Path | None, overlay: str
) -> Policy:
    """Return a baseline policy by its name, or a trained agent by the path of its run or checkpoint.

    Raises:
        ValueError, OSError: naming the argument that does not fit.
    """
    if env_id is not None and policy in baseline_names(env_id):
        if overlay != "attention":
            raise ValueError(f"overlay={overlay!r}: expected a trained agent, --policy RUN; {policy!r} has no weights")
        return BaselinePolicy(policy, env_id, noise, seed)
    try:
        from noisy_envs.rendering.agent_policy import AGENTS, Trained

        return Trained(Path(policy), env_id, noise, agents or AGENTS, overlay)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"policy={policy!r}: agents require more packages ({error}): pip install -e '.[agents]'"
        ) from None


def watch(args: argparse.Namespace) -> None:
    """Write a video, or open a window until the user closes it.

    Raises:
        ValueError, TypeError, OSError: naming what cannot be watched or written, before an episode is played.
    """
    env_id = None if args.watch is None else canonical_id(args.watch, "watch")
    name = args.policy or ("oracle" if "oracle" in baseline_names(env_id) else "random")
    check_policy(name, env_id)
    if args.out is not None:
        check_video_path(args.out)
    elif not has_display():
        raise ValueError("there is no display for a window: write a video with --out FILE.gif or --out FILE.mp4")
    seed = None if args.seed is None else check_seed(args.seed)
    policy = make_policy(name, env_id, args.num_noise, seed or 0, args.agents_dir, args.overlay)
    seed = policy.seed if seed is None else seed
    playback = make_playback(policy.env_id, policy.env_kwargs, policy.learners, seed)
    if args.out is None:
        Viewer(policy, playback).run()
        return
    frames, share = record(playback, policy.act, args.overlay)
    write_video(args.out, frames, RENDER_FPS)
    on_signal = "" if share is None else f"; signal has {share:.1%} of the {args.overlay}"
    print(f"see {args.out}: return {playback.total_return:.3f} in {playback.clock} steps{on_signal}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        "python -m noisy_envs",
        description="List the environments, or watch one. Keys in the window: space pauses, s plays one step, r starts "
        "the next episode, + and - change the noise, q quits.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--watch",
        metavar="ID",
        help="environment to watch: an ID of this package, another Gymnasium ID, or module:Id-v0 (default: the run's)",
    )
    parser.add_argument(
        "--policy",
        help="a baseline policy of the game, such as oracle or random, or the folder or checkpoint.pt of a run of "
        "agents/ppo_*.py, whose token weights are drawn as halos, or as bars in other Gymnasium environments "
        "(default: oracle, or random in other Gymnasium environments)",
    )
    parser.add_argument(
        "--seed", type=int, help="seed of the episodes (default: 0, or the seed of the run's evaluation)"
    )
    parser.add_argument("--num-noise", type=int, metavar="N", help="number of noise tokens, or obstacles in SimpleTag")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write an episode to FILE.gif or FILE.mp4 instead of opening a window"
    )
    parser.add_argument(
        "--overlay", choices=("attention", "saliency"), default="attention",
        help="what to show of a trained agent: attention, the pooling weight of each token, or saliency, how strongly "
        "each token influences the action (default: attention)",
    )  # fmt: skip
    parser.add_argument(
        "--agents-dir", type=Path, metavar="DIR", help="folder of ppo_*.py (default: agents in the checkout)"
    )
    args = parser.parse_args(argv)
    options = [argument for argument in argv if argument.startswith("--")]
    if args.watch is None and args.policy is None and options:
        parser.error(f"{options[0]} requires --watch ID or --policy RUN")
    return args


@memory_errors()
def main(argv: Sequence[str]) -> None:
    """Print the table, or watch an environment, as the arguments say."""
    args = parse(argv)
    try:
        if args.watch is None and args.policy is None:
            print(f"{table()}\n{LEGEND}")
        else:
            watch(args)
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, OSError, FloatingPointError) as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


if __name__ == "__main__":
    with ignore_broken_pipe():
        main(sys.argv[1:])

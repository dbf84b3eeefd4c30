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
from noisy_envs.rendering.video import check_video_path, write_video
from noisy_envs.rendering.viewer import Player, Reference, Viewer, film, policies, show_of
from noisy_envs.rendering.window import has_display
from noisy_envs.training.process import EXIT_INTERRUPTED, ignore_broken_pipe, memory_errors
from noisy_envs.validation import did_you_mean

HEADS = ("id", "tokens", "actions", "noise", "random", "oracle")
LEGEND = """
tokens (N, features); noise: those of them that say nothing about the task, in
the first episode; random, oracle: mean returns of an episode.

python -m noisy_envs --watch ID [--policy oracle|random]
python -m noisy_envs --policy RUN
python -m noisy_envs --help"""


def row(env_id: str) -> tuple[str, ...]:
    """Return what the table says of an id, a text for each of `HEADS`."""
    env: Any = gymnasium.make(env_id).unwrapped
    tokens, info = env.reset(seed=0)
    actions = f"{env.game.num_actions} floats" if env.game.continuous_actions else f"one of {env.game.num_actions}"
    noise = int(np.count_nonzero(env.game.token_mask(tokens) & ~info["signal_mask"]))
    returns = [f"{value:.3f}" for value in baseline_returns(env_id)]
    return env_id, str(env.observation_space.shape), actions, str(noise), *returns


def table() -> str:
    """Return all ids with what they show, take and pay: lines of 80 characters at most."""
    rows = [HEADS, *map(row, ENVIRONMENTS)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = 3  # columns of words; those of numbers stand at the right
    lines = [
        "  ".join(x.ljust(w) if i < left else x.rjust(w) for i, (x, w) in enumerate(zip(cells, widths, strict=True)))
        for cells in rows
    ]
    return "\n".join(lines)


def check_policy(policy: str, env_id: str | None) -> None:
    """Raise ValueError unless a policy is one of the id's reference policies, or a file or folder that exists."""
    known = policies(env_id)
    if policy not in known and not Path(policy).exists():
        one_of = f"one of {', '.join(known)}, or " if known else ""
        allowed = f"{one_of}the folder or checkpoint of a run, and there is no such file"
        raise ValueError(f"policy={policy!r}: {did_you_mean(policy, known)}must be {allowed}")


def make_player(
    policy: str, env_id: str | None, noise: int | None, seed: int, agents: Path | None, halos: str
) -> Player:
    """Return a reference policy by its name, or the agent of a checkpoint by its path.

    Raises:
        ValueError, OSError: naming what does not fit.
    """
    if env_id is not None and policy in policies(env_id):
        if halos != "weight":
            raise ValueError(f"halos={halos!r}: are of a trained agent, --policy RUN, and {policy!r} has none")
        return Reference(policy, env_id, noise, seed)
    try:
        from noisy_envs.rendering.agent_policy import AGENTS, Trained

        return Trained(Path(policy), env_id, noise, agents or AGENTS, halos)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"policy={policy!r}: agents need more packages ({error}): pip install -e '.[agents]'"
        ) from None


def watch(args: argparse.Namespace) -> None:
    """Write a film, or open a window until the person closes it.

    Raises:
        ValueError, TypeError, OSError: naming what cannot be watched, or written, before anything is played.
    """
    env_id = None if args.watch is None else canonical_id(args.watch, "watch")
    policy = args.policy or ("oracle" if "oracle" in policies(env_id) else "random")
    check_policy(policy, env_id)
    if args.out is not None:
        check_video_path(args.out)
    elif not has_display():
        raise ValueError("there is no display for a window: write a film instead, --out FILE.gif or FILE.mp4")
    seed = None if args.seed is None else check_seed(args.seed)
    player = make_player(policy, env_id, args.num_noise, seed or 0, args.agents_dir, args.halos)
    show = show_of(player, player.seed if seed is None else seed)
    if args.out is None:
        Viewer(show).run()
        return
    pictures, share = film(show)
    write_video(args.out, pictures, RENDER_FPS)
    told = "" if share is None else f"; signal has {share:.1%} of the {args.halos}"
    print(f"see {args.out}: return {show.episode.total_return:.3f} in {show.episode.clock} steps{told}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        "python -m noisy_envs",
        description="List the environments, or watch one. In the window: space pauses, s steps, r begins the next "
        "episode, + and - change the noise, q quits.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--watch",
        metavar="ID",
        help="the environment to watch: one of ours, another of Gymnasium or module:Id-v0 (default: that of the run)",
    )
    parser.add_argument(
        "--policy",
        help="a reference policy of the game, oracle or random say, or a run of agents/ppo_*.py, its folder or its "
        "checkpoint.pt, whose pooling weights are drawn as halos, or in an environment of others as bars "
        "(default: oracle, and random in an environment of others)",
    )
    parser.add_argument(
        "--seed", type=int, help="of the episodes (default: 0, or for a run that of its own evaluation)"
    )
    parser.add_argument("--num-noise", type=int, metavar="N", help="noise entities, or obstacles, if the game has any")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write an episode as FILE.gif or FILE.mp4 instead of opening a window"
    )
    parser.add_argument(
        "--halos", choices=("weight", "influence"), default="weight",
        help="what they show of a token: its weight in the pool, or how much the action moves with what it says",
    )  # fmt: skip
    parser.add_argument(
        "--agents-dir", type=Path, metavar="DIR", help="where ppo_*.py lie (default: agents of the checkout)"
    )
    args = parser.parse_args(argv)
    asked = [word for word in argv if word.startswith("--")]
    if args.watch is None and args.policy is None and asked:
        parser.error(f"{asked[0]} needs --watch ID or --policy RUN")
    return args


@memory_errors()
def main(argv: Sequence[str]) -> None:
    """List or watch, as the words say."""
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

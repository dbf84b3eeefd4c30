"""Settings of a run: their defaults by environment, the command line, and what is checked before anything is made."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from noisy_envs import registration
from noisy_envs.games.simple_tag import MPE
from noisy_envs.rendering.video import check_video_path
from noisy_envs.training.accelerate import CPU_PIECE
from noisy_envs.training.arguments import parse_arguments
from noisy_envs.training.checkpoint import checkpoint_path, load_checkpoint, only_runs
from noisy_envs.training.distributed import WORLD_SIZE
from noisy_envs.training.envs import EnvArgs, can_render, game_of, steps_per_update
from noisy_envs.training.metrics import import_wandb
from noisy_envs.training.process import check_memory, device_memory
from noisy_envs.validation import did_you_mean


@dataclass
class RunArgs(EnvArgs):
    """How a run is started, saved and evaluated: nothing here changes what is learned."""

    device: str = "cpu"
    """device of environments and network: cpu, cuda, cuda:1, ..."""
    num_threads: int = 1
    """CPU threads of torch; two are faster on idle cores, but far slower if other programs use them"""
    compile: bool = False
    """compile network and environments, in about a minute; the default on a GPU and for the paper's networks"""
    kernel: Literal["auto", "fused", "torch"] = "auto"
    """on a GPU, compute policy and gradient of small networks in one kernel ("fused"); "auto" does where it fits"""
    cuda_graphs: bool = True
    """on a GPU, record rollout and gradient as CUDA graphs"""
    torch_deterministic: bool = False
    """use deterministic kernels only (torch.use_deterministic_algorithms)"""
    run_dir: Path = Path("runs")
    """parent directory of the run's folder"""
    resume: Path | None = None
    """folder of a run to resume with its settings; those that affect learning cannot be changed"""
    checkpoint_interval: int = 10
    """updates between checkpoints; the first update is always followed by one"""
    track: bool = False
    """log to Weights & Biases"""
    wandb_project: str = "noisy-envs"
    """project in Weights & Biases"""
    evaluate: tuple[Path, ...] = ()
    """evaluate these checkpoints, or folders of runs, at each --num-noise instead of training"""
    record: Path | None = None
    """with --evaluate: GIF or MP4 file of an episode with pooling weights, of the first run at the first noise level"""
    eval_episodes: int = 100
    """episodes of an evaluation, on seeds that training never uses"""
    eval_deterministic: bool = True
    """evaluate the most probable actions; otherwise sample actions as in training"""
    capture_video: bool = True
    """record an episode at the end of training"""


PAPER = "paper-text"  # the default preset of the IDs of the paper's experiments
# what may change when a run is resumed, because learning does not depend on it
MAY_CHANGE = {field.name for field in fields(RunArgs)} - {field.name for field in fields(EnvArgs)} | {"total_timesteps"}
# lowest and highest values of settings; other numbers, of a copied agent for example, need only be finite
LIMITS: dict[str, tuple[float, float]] = {
    "learning_rate": (0, 1e6), "gamma": (0, 1), "gae_lambda": (0, 1), "clip_coef": (0, math.inf), "dropout": (0, 0.99),
    "ent_coef": (0, 1e6), "vf_coef": (0, 1e6), "kl_coef": (0, 1e6), "kl_target": (1e-9, math.inf),
    "max_grad_norm": (1e-9, math.inf), "adam_eps": (1e-12, 1), "dual_clip": (0, math.inf), "max_kl": (0, math.inf),
    "init_std": (0, 100), "log_std_min": (-20, 20), "log_std_max": (-20, 20),
    **dict.fromkeys(("total_timesteps", "num_envs", "num_steps", "minibatch_size", "update_epochs"), (1, math.inf)),
    **dict.fromkeys(("num_heads", "checkpoint_interval"), (1, math.inf)),
    "seed": (0, 2**63 - 1), "num_threads": (1, 1024), "eval_episodes": (1, 10**6), "num_layers": (1, 1000),
    "embed_dim": (1, 2**14), "feedforward_dim": (1, 2**14), "mlp_dim": (1, 2**14), "role_dim": (1, 2**14),
}  # fmt: skip


def parse(module: ModuleType, argv: Sequence[str]) -> Any:
    """Read the settings of an agent, `module.Args`.

    Defaults are those of `--env-id` and `--preset` in presets.toml next to the agent's file, or those of the run that
    `--resume` or `--evaluate` names.

    Raises:
        ValueError, OSError: naming the setting, its value and what is expected.
    """
    first = argparse.ArgumentParser(usage="%(prog)s [OPTIONS]", add_help=False, allow_abbrev=False)
    for option in ("env-id", "preset", "device", "resume"):
        first.add_argument(f"--{option}", f"--{option.replace('-', '_')}")
    first.add_argument("--evaluate", nargs="+", default=[])  # an empty list would train the demo
    chosen = first.parse_known_args(argv)[0]
    if chosen.evaluate:
        paths = only_runs([Path(path) for path in chosen.evaluate])
        args = dataclasses.replace(merge_eval_args(module, argv, paths[0]), evaluate=tuple(paths))
    elif chosen.resume is not None:
        path = checkpoint_path(Path(chosen.resume))
        if path.name != "checkpoint.pt":
            raise ValueError(f"resume={chosen.resume!r}: expected a run's folder, whose checkpoint.pt is resumed")
        saved = load_args(module, path)
        args = dataclasses.replace(parse_arguments(module.Args, argv, saved), resume=path.parent)
        check_resume(saved, args)
    else:
        env_id = chosen.env_id or module.Args.env_id
        defaults = preset_args(module, env_id, chosen.preset, chosen.device or "cpu")
        args = parse_arguments(module.Args, argv, defaults)
    args = dataclasses.replace(args, env_id=registration.canonical_id(args.env_id))
    validate(args)
    return args


def preset_args(module: ModuleType, env_id: str, preset: str | None, device: str) -> Any:
    """Return the default settings for an environment ID.

    The default `preset` is "paper-text" for the IDs of the paper's experiments, and "fast" for all others. A file that
    was copied without presets.toml has its own defaults for every ID.

    Raises:
        ValueError: there is no such preset for this environment, or presets.toml holds an unknown setting.
    """
    game, parameters = registration.find(env_id)
    path = Path(str(module.__file__)).with_name("presets.toml")
    if preset and not path.is_file():
        raise ValueError(f"preset={preset!r}: expected none, as {path} is missing")
    presets = load_presets(path)
    name = "gymnasium" if game == registration.OTHER else game
    if preset is None:
        in_paper = name in presets.get(PAPER, {}) and parameters not in ({}, MPE)
        preset = PAPER if in_paper else "fast"
    known = ["fast", *(other for other in presets if name in presets[other] and other != "fast")]
    if preset not in known:
        raise ValueError(f"preset={preset!r}: expected {' or '.join(map(repr, known))} for {env_id}")
    values = presets.get(preset, {}).get(name, {})
    check_types(module, values, f"presets.toml, [{preset}.{name}]")
    on_gpu = device.startswith("cuda")
    can_compile = on_gpu or shutil.which(os.environ.get("CXX", "g++")) is not None
    compiled = can_compile and (on_gpu or values.get("compile", False))
    return module.Args(**{**values, "env_id": env_id, "preset": preset, "compile": compiled})


def load_presets(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Read presets: preset -> game -> settings; `inherits = "preset.game"` takes the settings of another table.

    If the file is missing, no game has settings.

    Raises:
        ValueError: naming the file, and what is wrong there.
    """
    if not path.is_file():
        return {}
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None

    def resolved(table: dict[str, Any]) -> dict[str, Any]:
        if "inherits" not in table:
            return table
        preset, _, game = table["inherits"].partition(".")
        if game not in tables.get(preset, {}):
            raise ValueError(f"{path}: inherits={table['inherits']!r}: expected the name of a table")
        return resolved(tables[preset][game]) | {name: x for name, x in table.items() if name != "inherits"}

    return {preset: {game: resolved(table) for game, table in games.items()} for preset, games in tables.items()}


def merge_eval_args(module: ModuleType, argv: Sequence[str], path: Path) -> Any:
    """Return the settings of a run's evaluation: its own, except for those given on the command line.

    Raises:
        ValueError: the run was trained on another game.
    """
    saved = load_args(module, path)
    args = parse_arguments(module.Args, argv, dataclasses.replace(saved, num_noise=()))
    args = dataclasses.replace(args, env_id=registration.canonical_id(args.env_id))
    game, _ = registration.find(args.env_id)
    if args.env_id != saved.env_id and (game != registration.find(saved.env_id)[0] or game == registration.OTHER):
        raise ValueError(f"env_id={args.env_id!r}: {path} was trained on another game, {saved.env_id}")
    return args


def load_args(module: ModuleType, path: Path) -> Any:
    """Read the settings of a run from its checkpoint.

    Raises:
        ValueError, OSError: there is no checkpoint of this agent's version, naming the path.
    """
    path = checkpoint_path(path)
    content: Any = load_checkpoint(path)
    saved = content.get("args") if isinstance(content, dict) else None
    if not isinstance(saved, dict) or not isinstance(content.get("agent"), dict):
        raise ValueError(f"{path}: expected a checkpoint of an agent, but it holds no settings or no weights")
    known = vars(module.Args())
    saved = {name: known[name] for name in MAY_CHANGE - {"total_timesteps"}} | saved  # newer settings may be missing
    if saved.keys() != known.keys():
        differing = sorted(saved.keys() ^ known.keys())
        raise ValueError(
            f"{path} was written by another version of this agent: the settings {differing} differ; start a new run"
        )
    check_types(module, saved, path)
    return module.Args(**{**saved, "run_dir": Path(saved["run_dir"])})


def check_types(module: ModuleType, values: dict[str, Any], source: Any) -> None:
    """Raise ValueError, naming the `source`, unless values are settings of an agent and of the settings' types."""
    defaults, hints = vars(module.Args()), get_type_hints(module.Args)
    for name, value in values.items():
        if name not in defaults:
            hint = did_you_mean(name, defaults)
            raise ValueError(
                f"{source}: {name}={value!r}: {hint}expected a setting of {Path(str(module.__file__)).name}"
            )
        kind = str if isinstance(defaults[name], Path) else type(defaults[name])
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"{source}: {name}={value!r}: expected a value of type {kind.__name__}")
        choices = get_args(hints[name]) if get_origin(hints[name]) is Literal else (value,)
        if value not in choices:
            raise ValueError(f"{source}: {name}={value!r}: expected one of {', '.join(map(repr, choices))}")


def check_resume(saved: Any, args: Any) -> None:
    """Raise ValueError if a setting that learning depends on differs from that of the run to resume."""
    for field in fields(args):
        old, new = getattr(saved, field.name), getattr(args, field.name)
        if old != new and field.name not in MAY_CHANGE:
            raise ValueError(f"{field.name}={new!r}: the run to resume has {old!r}")
    if args.anneal_lr and args.total_timesteps != saved.total_timesteps:
        raise ValueError(
            f"total_timesteps={args.total_timesteps}: expected {saved.total_timesteps}; only runs with --no-anneal-lr "
            "can be extended"
        )
    if torch.device(args.device).type != torch.device(saved.device).type:
        raise ValueError(f"device={args.device!r}: a run must be resumed on the same type of device, {saved.device!r}")


def validate(args: Any) -> None:
    """Raise ValueError, naming the setting, its value and what is expected."""
    registration.find(args.env_id)
    for field in fields(args):
        value = getattr(args, field.name)
        lowest, highest = LIMITS.get(field.name, (-math.inf, math.inf))
        if type(value) in (int, float) and not lowest <= value <= highest:  # NaN fails too
            raise ValueError(f"{field.name}={value}: expected a number from {lowest} to {highest}")
    game = game_of(args)
    if not hasattr(game, "token_spec"):
        raise ValueError(f"env_kwargs={args.env_kwargs}: expected observations that are tokens, not pictures")
    teams = ("first", *getattr(game, "teams", ()))
    if args.learners not in teams:
        raise ValueError(f"learners={args.learners!r}: expected one of {', '.join(teams)} in {args.env_id}")
    try:
        torch.zeros((), device=args.device).item()  # refuses the device "meta" too
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={args.device!r}: {str(error).splitlines()[0]}") from None
    check_mode(args)
    check_sizes(args, game.token_spec)


def check_mode(args: Any) -> None:
    """Check what is to be done, as `validate` does."""
    if len(args.num_noise) > 1 and not args.evaluate:
        raise ValueError(f"num_noise={args.num_noise}: expected one number for training; several need --evaluate")
    if args.record is not None:
        if not args.evaluate:
            raise ValueError(f"record={str(args.record)!r}: needs --evaluate; training records its episode.gif itself")
        if not can_render(args):
            raise ValueError(f"record={str(args.record)!r}: {args.env_id} cannot be drawn as an image")
        check_video_path(args.record)
    if args.evaluate and args.resume is not None:
        raise ValueError(f"resume={str(args.resume)!r}: not together with --evaluate, which trains nothing")
    if args.track:
        import_wandb()


def check_sizes(args: Any, spec: Any) -> None:
    """Check what must fit together, and into memory, as `validate` does; `spec` is the game's `TokenSpec`."""
    size = steps_per_update(args)
    if not args.evaluate:
        if args.total_timesteps < size:
            raise ValueError(f"total_timesteps={args.total_timesteps}: expected at least the {size} of one update")
        if args.minibatch_size < 2 or size % args.minibatch_size:
            raise ValueError(f"minibatch_size={args.minibatch_size}: expected at least 2, and a divisor of {size}")
    for setting in ("num_envs", "minibatch_size"):
        if getattr(args, setting) % WORLD_SIZE:
            raise ValueError(f"{setting}={getattr(args, setting)}: expected a multiple of the {WORLD_SIZE} processes")
    check_memory(memory_needs(args, spec, size), args.device)
    values = vars(args)  # a copied agent may have other settings
    if values.get("embed_dim", 0) % values.get("num_heads", 1):
        raise ValueError(f"embed_dim={args.embed_dim}: expected a multiple of num_heads={args.num_heads}")
    if 0 < values.get("dual_clip", 0) <= 1:
        raise ValueError(f"dual_clip={args.dual_clip}: expected more than 1, or 0 for none")
    if values.get("log_std_min", 0) > values.get("log_std_max", 0):
        raise ValueError(f"log_std_min={args.log_std_min}: expected at most log_std_max={args.log_std_max}")


def max_runs(args: Any) -> int:
    """Return how many runs of these settings may share arrays on their device, in half of its memory."""
    spec, values = game_of(args).token_spec, vars(args)
    needs = memory_needs(args, spec, steps_per_update(args))
    scores = values.get("num_layers", 1) * values.get("num_heads", 1) * spec.num_tokens**2  # of a sample's attention
    pieces = args.minibatch_size if args.device.startswith("cuda") else 1
    return int(max(1, device_memory(args.device) / 2 / (4 * (sum(needs.values()) + 4 * pieces * scores))))


def memory_needs(args: Any, spec: Any, size: int) -> dict[str, int]:
    """Return the float32 numbers that settings ask for, at least; `size` is the number of steps in an update."""
    dim, num_layers, feedforward_dim = (
        vars(args).get(name, 1) for name in ("embed_dim", "num_layers", "feedforward_dim")
    )
    layers = num_layers * (4 * dim + 2 * feedforward_dim)  # kept for each token's gradient
    needs = {
        "num_layers, embed_dim and feedforward_dim": 4 * dim * layers,  # weights, gradients, two moments of Adam
        "eval_episodes": args.eval_episodes * spec.num_tokens * max(spec.num_features, dim),
    }
    if not args.evaluate:
        rows = args.minibatch_size // WORLD_SIZE
        rows = rows if args.device.startswith("cuda") else min(rows, CPU_PIECE)
        rollout = 2 * size * spec.num_tokens * spec.num_features  # before and after each step
        needs |= {"num_envs and num_steps": rollout // WORLD_SIZE, "minibatch_size": rows * spec.num_tokens * layers}
    return needs

"""Compare pooling heads over seeds and noise levels: run what is missing, then plot curves and write a table.

    python agents/compare.py                                   # SimpleCentroid at the paper's four noise levels
    python agents/compare.py --out results/tag --env-ids noisy_envs/SimpleTag-1v3v0-v0 noisy_envs/SimpleTag-1v3v28-v0
    python agents/compare.py --out results/noise --env-ids noisy_envs/SimpleCentroid-v0 --num-noise 0 28
    python agents/compare.py --jobs 2 -- --total-timesteps 1000000 --dropout 0    # after --: arguments for every agent
    python agents/compare.py --together --seeds 1 2 3 4 5 6 7 8 9 10              # side by side in one process
    python agents/compare.py -- --device cuda                                     # side by side in four processes
    python agents/compare.py --ray --gpus-per-run 0.25 -- --device cuda           # four processes on each GPU
    python agents/compare.py --plot-only                                          # from the runs that exist
    python agents/compare.py --plot-only --out results/dropout --compare-with results/without-dropout  # same IDs

A job is one agent, seed and noise level; its folder OUT/LEVEL/AGENT/seed-S holds the run and `log.txt`. The same
command again starts missing runs and resumes stopped ones. While it runs, a second command with this OUT is refused. On
Ctrl-C the runs save checkpoints (exit status 130); if the machine fails, the steps since the last checkpoints are lost.
OUT gets `curves.png`, `table.md` and `results.json`. All machines of a Ray cluster need OUT and this checkout under the
same paths.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium

from noisy_envs import registration
from noisy_envs.baselines import BaselineReturns, baseline_returns
from noisy_envs.training.arguments import parse_arguments
from noisy_envs.training.checkpoint import checkpoint_errors, read_summary, write_summary
from noisy_envs.training.files import lock_folder, write_atomically
from noisy_envs.training.metrics import read_metrics
from noisy_envs.training.plots import Panel, format_table, plot_panels
from noisy_envs.training.process import (
    ignore_broken_pipe,
    last_message,
    memory_errors,
    on_stop_signal,
    sweep_errors,
)
from noisy_envs.training.statistics import Rows, difference, estimate
from noisy_envs.training.sweep import STOPPED, JobResult, check_settings, find_run, run_in_threads, run_jobs, run_on_ray
from noisy_envs.training.versions import current_commit, merge_versions

if TYPE_CHECKING:
    from noisy_envs.training.gymnasium_envs import GymnasiumGame

GPU_JOBS = 4  # processes on a GPU: while one starts or evaluates, others train
RESERVED = (  # agents' settings that this program sets itself, or with which agents do not train
    "env_id", "seed", "run_dir", "resume", "num_noise", "evaluate", "record", "help",
)  # fmt: skip


@dataclass
class Args:
    """Settings of a comparison. Arguments after -- are passed to every agent."""

    out: Path = Path("runs/compare")
    """folder of all runs, figures and the table"""
    agents: tuple[str, ...] = ("avgpool", "maxpool", "clstoken", "adapool")
    """agents: NAME for agents/ppo_NAME.py, also a file of your own"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds of the runs"""
    env_ids: tuple[str, ...] = tuple(
        f"noisy_envs/SimpleCentroid-{sizes}-v0" for sizes in ("1v31v0", "1v15v16", "1v3v28", "1v1v30")
    )
    """environment IDs of one game, at several noise levels"""
    num_noise: tuple[int, ...] = ()
    """noise levels for a single environment ID, instead of several IDs"""
    jobs: int = 1
    """runs at a time on this machine, without Ray; with --together, processes at a time, on a GPU 4 by default"""
    together: bool = False
    """train runs side by side, by many_runs.py: on Ray in a process for each agent and level; the default on a GPU"""
    ray: bool = False
    """run on Ray"""
    address: str | None = None
    """address of a Ray cluster, "auto" for this machine's; by default Ray is started on this machine"""
    cpus_per_run: float = 1
    """CPUs that Ray reserves per run, or per process with --together"""
    gpus_per_run: float = 0
    """GPUs that Ray reserves per run or process, 0.25 for four on each; with 0 they see no GPU"""
    plot_only: bool = False
    """start no runs; make the figures and the table from those that exist"""
    compare_with: tuple[Path, ...] = ()
    """with --plot-only, folders of runs with other arguments; OUT/comparison.png shows them next to OUT"""
    agents_dir: Path = Path(__file__).parent
    """folder of the agents' files"""


class Setting(NamedTuple):
    """An environment at a noise level."""

    env_id: str
    num_noise: int | None

    @property
    def name(self) -> str:
        """Name of its folder."""
        return registration.short_name(self.env_id) + ("" if self.num_noise is None else f"-noise-{self.num_noise}")

    @property
    def game(self) -> str:
        """Name of its game."""
        return registration.find(self.env_id)[0]

    @property
    def start_kwargs(self) -> dict[str, Any]:
        """The option with which all noise levels of one ID start in the same states."""
        return {} if self.num_noise is None else registration.fixed_start(self.env_id, {})

    @property
    def env_kwargs(self) -> dict[str, Any]:
        """Options of the environment, in addition to those of the ID."""
        return (
            {}
            if self.num_noise is None
            else {registration.noise_option(self.env_id): self.num_noise, **self.start_kwargs}
        )

    def agent_args(self, shared: Sequence[str]) -> list[str]:
        """Add `start_kwargs` to the arguments of all agents, unless they set the option themselves."""
        args = [part for arg in shared for part in (arg.split("=", 1) if arg.startswith("--env-kwargs=") else [arg])]
        if not self.start_kwargs or any(arg.startswith("spread=") for arg in args):
            return args
        if "--env-kwargs" not in args:
            args.append("--env-kwargs")
        place = args.index("--env-kwargs") + 1
        return [*args[:place], *(f"{name}={value}" for name, value in self.start_kwargs.items()), *args[place:]]

    @property
    def gymnasium_game(self) -> GymnasiumGame | None:
        """The game of another Gymnasium environment, or None for this package's."""
        if self.game != registration.OTHER:
            return None
        from noisy_envs.training.gymnasium_envs import GymnasiumGame

        return GymnasiumGame(self.env_id, self.env_kwargs)

    def baselines(self) -> BaselineReturns:
        """Returns with scores of 0 and 1."""
        game = self.gymnasium_game
        return game.baselines if game else baseline_returns(self.env_id, self.env_kwargs)

    def snr(self, env_kwargs: Mapping[str, Any] | None = None) -> float:
        """Share of signal tokens at the start of an episode, with `env_kwargs` of a run if they are given."""
        game = self.gymnasium_game
        options = {name: tuple(x) if isinstance(x, list) else x for name, x in (env_kwargs or self.env_kwargs).items()}
        env = game.make() if game else gymnasium.make(self.env_id, **options)  # type: ignore[arg-type]
        snr: float = env.reset(seed=0)[1]["snr"]
        env.close()
        return snr


class Job(NamedTuple):
    """One run: where, which agent, which seed, with which arguments."""

    setting: Setting
    agent: str
    seed: int
    folder: Path
    agents_dir: Path
    agent_args: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Name the run in messages."""
        return f"{self.setting.name} {self.agent} seed {self.seed}"

    @property
    def log(self) -> Path:
        """Output of the run; of a run in a process with others, their folder with the output of each process."""
        own = self.folder / "log.txt"
        return own if own.exists() or not self.folder.exists() else self.folder.parents[2] / "together"

    def run(self) -> Path | None:
        """Return the folder of the run, as `find_run` finds it."""
        return find_run(self.folder)

    def summary(self) -> dict[str, Any] | None:
        """Return the summary of the finished run, or None."""
        path = (self.run() or self.folder) / "summary.json"
        return read_summary(path) if path.is_file() else None

    def command(self) -> list[str]:
        """Return the command that starts or resumes the run."""
        command, run = [sys.executable, str(self.agents_dir / f"ppo_{self.agent}.py")], self.run()
        if run is not None:
            return [*command, "--resume", str(run)]
        noise = [] if self.setting.num_noise is None else ["--num-noise", str(self.setting.num_noise)]
        command += ["--env-id", self.setting.env_id, *noise, "--seed", str(self.seed), "--run-dir", str(self.folder)]
        return [*command, "--no-capture-video", *self.setting.agent_args(self.agent_args)]

    def check_settings(self, summary: Mapping[str, Any]) -> None:
        """Raise ValueError if the finished run has other settings than this job, naming one."""
        path = (self.run() or self.folder) / "summary.json"
        requested = parse_agent_args(self.setting.agent_args(self.agent_args))
        requested |= {"env_id": self.setting.env_id, "seed": str(self.seed), "agent": f"ppo_{self.agent}"}
        requested["num_noise"] = "" if self.setting.num_noise is None else str(self.setting.num_noise)
        with checkpoint_errors(path):
            saved = {**summary["settings"], **{name: summary[name] for name in ("env_id", "seed", "agent")}}
            saved = {name: saved[name] for name in requested if name in saved}
            check_settings(path, saved, {name: requested[name] for name in saved}, means)


class Batch(NamedTuple):
    """Jobs that one process runs, in a folder for its log."""

    jobs: tuple[Job, ...]
    folder: Path

    def __str__(self) -> str:
        """Name the process in messages."""
        return f"{len(self.jobs)} runs in one process"

    def summary(self) -> dict[str, Any] | None:
        """Return an empty summary if all runs are finished, or None."""
        return {} if all(job.summary() for job in self.jobs) else None

    def command(self) -> list[str]:
        """Return the command that starts or resumes the runs."""
        path = self.folder / "commands.json"
        write_atomically(path, json.dumps([job.command()[1:] for job in self.jobs], indent=1) + "\n")
        return [sys.executable, str(Path(__file__).with_name("many_runs.py")), "--commands", str(path)]


def run_together(
    jobs: list[Job], execute: Callable[[list[Batch]], Iterable[JobResult]], args: Args
) -> Iterator[JobResult]:
    """Run jobs in few processes: --jobs of them, or on Ray one for each agent and level."""
    cells: dict[Any, list[Job]] = {}
    for job in jobs:
        cells.setdefault((job.setting, job.agent), []).append(job)
    count = len(cells) if args.ray else min(args.jobs, len(cells))
    ends = [len(cells) * i // count for i in range(count + 1)]  # neighbours share a level and its compiled step
    shares = [[job for cell in list(cells.values())[a:b] for job in cell] for a, b in pairwise(ends)]
    folder = args.out.resolve() / "together"
    for result in execute([Batch(tuple(share), folder / str(i)) for i, share in enumerate(shares)]):
        log = result.job.folder / "log.txt"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        lines = text.rpartition("$ ")[2].splitlines()  # of the last command
        for job in result.job.jobs:
            if (summary := job.summary()) is not None:
                yield JobResult(job, summary, seconds=result.seconds)
                continue
            places = f"{job.folder}{os.sep}", f"{job.folder}:"
            own = [line for line in lines if line.startswith(places) and ": FAILED, " in line]
            problem = own[-1].partition(": FAILED, ")[2] if own and result.problem != STOPPED else result.problem
            yield JobResult(job, problem=problem, seconds=result.seconds)


def parse_agent_args(args: Sequence[str]) -> dict[str, str]:
    """Return the settings in an agent's arguments: `--a-b 1 2 --no-c` is a_b="1 2", c="False".

    Raises:
        ValueError: an argument belongs to no setting, or sets one that is reserved.
    """
    settings: dict[str, str] = {}
    name = None
    for arg in args:
        if arg.startswith("--"):
            flag, _, value = arg.removeprefix("--").partition("=")
            name, value = flag.replace("-", "_"), value or "True"
            if name.startswith("no_"):
                name, value = name.removeprefix("no_"), "False"
            settings[name] = value
        elif name is None:
            raise ValueError(f"{arg!r} after --: expected a setting of the agents first, such as --total-timesteps")
        else:
            settings[name] = arg if settings[name] == "True" else f"{settings[name]} {arg}"
    for name in RESERVED:
        if name in settings:
            raise ValueError(f"--{name.replace('_', '-')} after --: this program sets it itself, or it trains nothing")
    return settings


def means(argument: str, saved: Any) -> bool:
    """Return whether an argument means the value in a summary, in which null stands for infinity too."""
    if isinstance(saved, list):
        return argument == " ".join(map(str, saved))
    if isinstance(saved, (int, float)) and not isinstance(saved, bool):
        with contextlib.suppress(ValueError):
            return float(argument) == saved
    return argument in ("None", "inf") if saved is None else argument == str(saved)


def parse(argv: Sequence[str]) -> tuple[Args, tuple[str, ...]]:
    """Return this program's settings and the agents' arguments.

    Raises:
        ValueError: names the setting, its value and what is allowed.
    """
    end = list(argv).index("--") if "--" in argv else len(argv)
    args, agent_args = parse_arguments(Args, argv[:end], Args(), __doc__), tuple(argv[end + 1 :])
    settings = parse_agent_args(agent_args)
    args = replace(args, env_ids=tuple(registration.canonical_id(env_id, "env_ids") for env_id in args.env_ids))
    if settings.get("device", "").startswith("cuda") and (args.together or may_share_processes(args, settings)):
        on_gpu = parse_arguments(Args, argv[:end], Args(together=True, jobs=GPU_JOBS), __doc__)
        args = replace(args, together=True, jobs=on_gpu.jobs) if on_gpu.together else args
    check(args)
    return args, agent_args


def may_share_processes(args: Args, settings: Mapping[str, str]) -> bool:
    """Tell whether many_runs.py trains the runs by itself.

    An agent of another file might need its own loop, and PyTorch's gradients are faster in runs alone, which compile.
    """
    known = set(args.agents) <= set(Args.agents) and args.agents_dir == Args.agents_dir
    known = known and "track" not in settings and settings.get("kernel") != "torch"
    return known and all(registration.find(env_id)[0] != registration.OTHER for env_id in args.env_ids)


def check(args: Args) -> None:
    """Raise ValueError, naming the setting, its value and what is allowed."""
    check_numbers(args)
    games, ids = {registration.find(env_id)[0] for env_id in args.env_ids}, " ".join(args.env_ids)
    if len(games) > 1:
        raise ValueError(f"env_ids={ids}: expected IDs of one game, got {registration.join_names(sorted(games))}")
    if games == {registration.OTHER} and len(set(args.env_ids)) > 1:
        raise ValueError(f"env_ids={ids}: expected one ID, with noise levels in --num-noise")
    if args.num_noise and len(args.env_ids) > 1:
        raise ValueError(f"num_noise={args.num_noise}: expected with one ID in --env-ids")
    if args.compare_with and not args.plot_only:
        raise ValueError(f"compare_with={' '.join(map(str, args.compare_with))}: expected together with --plot-only")
    if args.together and games == {registration.OTHER}:
        raise ValueError(f"together={args.together}: expected with environments of this package")
    if args.address is not None and not args.ray:
        raise ValueError(f"address={args.address!r}: expected together with --ray")
    if args.ray and find_spec("ray") is None:
        raise ValueError("ray: expected the package ray; in the checkout run: pip install -e '.[ray]'")
    for agent in args.agents:
        if not (args.agents_dir / f"ppo_{agent}.py").is_file():
            raise ValueError(f"agents={agent!r}: expected the file {args.agents_dir / f'ppo_{agent}.py'}")


def check_numbers(args: Args) -> None:
    """Raise ValueError for a number out of range, or a setting without values."""
    for name in ("agents", "seeds", "env_ids"):
        if not getattr(args, name):
            raise ValueError(f"{name}: expected at least one value")
    for name, minimum in (("seeds", 0), ("num_noise", 0), ("jobs", 1), ("gpus_per_run", 0), ("cpus_per_run", 0)):
        value = getattr(args, name)
        for number in value if isinstance(value, tuple) else (value,):
            if not minimum <= number < math.inf:  # NaN fails too
                raise ValueError(f"{name}={number}: expected a number from {minimum}")
            if number > 1 and number % 1:
                raise ValueError(f"{name}={number}: expected a whole number, or one below 1")


CHECK_AGENT_ARGS = """import importlib, sys
from noisy_envs.training.settings import parse
sys.path.insert(0, sys.argv[1])
try:
    parse(importlib.import_module(sys.argv[2]), sys.argv[3:])
except (ValueError, OSError) as error:
    sys.exit(str(error))
"""


def check_agent_args(job: Job) -> None:
    """Raise ValueError if the agent refuses its arguments."""
    file, *arguments = job.command()[1:]
    command = [sys.executable, "-c", CHECK_AGENT_ARGS, str(job.agents_dir), Path(file).stem, *arguments]
    environment = {**os.environ, "COLUMNS": "200"}  # wide, so that no line of the message is broken
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if process.returncode:
        raise ValueError(f"{shlex.join(job.agent_args)!r} after --: {last_message(process.stdout + process.stderr)}")


def plan(args: Args, agent_args: Sequence[str] = ()) -> dict[Setting, list[Job]]:
    """Return the jobs of each setting, the agents in order, each with its seeds; settings have decreasing SNR."""
    settings = [Setting(env_id, noise) for env_id in dict.fromkeys(args.env_ids) for noise in args.num_noise or (None,)]
    settings = sorted(dict.fromkeys(settings), key=Setting.snr, reverse=True)
    out, agents_dir = args.out.resolve(), args.agents_dir.resolve()
    return {
        setting: [
            Job(setting, agent, seed, out / setting.name / agent / f"seed-{seed}", agents_dir, tuple(agent_args))
            for agent in dict.fromkeys(args.agents)
            for seed in dict.fromkeys(args.seeds)
        ]
        for setting in settings
    }


def record_arguments(out: Path, agent_args: Sequence[str], command: str, plot_only: bool) -> list[str]:
    """Record the agents' arguments in a folder without runs; return those recorded.

    Raises:
        ValueError: the folder's runs have other arguments, or there are none to plot.
    """
    path, has_runs = out / "command.json", any(path.is_dir() for path in out.glob("*/*/seed-*/*"))
    if plot_only and not has_runs:
        raise ValueError(f"out={out}: expected a folder with runs")
    if not has_runs or not path.exists():  # arguments with which no run started, mistyped perhaps, do not count
        write_summary(path, {"command": command, "agent_args": agent_args, "commit": current_commit()})
    recorded: list[str] = read_summary(path).get("agent_args", [])
    if agent_args or not plot_only:
        remedy = f"give `-- {shlex.join(recorded)}` or another --out"
        check_settings(path, parse_agent_args(recorded), parse_agent_args(agent_args), remedy=remedy)
    return recorded


def flatten(jobs: Mapping[Setting, list[Job]]) -> list[Job]:
    """Return the jobs of all settings."""
    return [job for group in jobs.values() for job in group]


def check_has_runs(name: str, out: Path, jobs: Mapping[Setting, list[Job]]) -> None:
    """Raise ValueError if no job has a run to plot."""
    if not any(job.run() for job in flatten(jobs)):
        raise ValueError(f"{name}={out}: expected a folder with runs of these agents, IDs and seeds")


def score(summary: Mapping[str, Any] | None) -> float:
    """Return the normalized score in a summary; NaN if it is null, or if there is no summary."""
    return math.nan if summary is None or summary["score"] is None else float(summary["score"])


def run_missing(jobs: list[Job], args: Args) -> list[JobResult]:
    """Run what is missing, and return the results of the runs that failed.

    Raises:
        ValueError: a finished run has other settings.
        KeyboardInterrupt: after Ctrl-C, when the agents have ended.
    """
    summaries = {job: job.summary() for job in jobs}
    for job, summary in summaries.items():
        if summary is not None:
            job.check_settings(summary)
    if args.plot_only:
        return []
    execute: Any = (
        partial(run_on_ray, address=args.address, cpus_per_run=args.cpus_per_run, gpus_per_run=args.gpus_per_run)
        if args.ray
        else partial(run_in_threads, num_threads=args.jobs)
    )
    if args.together:
        execute = partial(run_together, execute=execute, args=args)
    results = run_jobs(summaries, execute, lambda summary: f"score {score(summary):.3f}")
    return [result for result in results if result.summary is None]


def baselines_and_snr(jobs: list[Job]) -> tuple[BaselineReturns, float]:
    """Return baselines and SNR of a setting's jobs: those of a finished run, because arguments can change the game."""
    setting = jobs[0].setting
    summary = next((summary for job in jobs if (summary := job.summary())), None)
    if summary is None:
        return setting.baselines(), setting.snr()
    returns = (math.nan if summary[name] is None else summary[name] for name in ("return_random", "return_oracle"))
    return BaselineReturns(*returns), setting.snr(summary["env_kwargs"])


def make_panels(jobs: dict[Setting, list[Job]], note: str = "") -> list[Panel]:
    """Return a panel of learning curves for each setting, titled with a note, or with the SNR.

    Unfinished runs are included.
    """
    panels = []
    for setting, group in jobs.items():
        curves: dict[str, list[Rows]] = {}
        for job in group:
            metrics = (job.run() or job.folder) / "metrics.csv"
            if metrics.is_file():
                curves.setdefault(job.agent, []).append(read_metrics(metrics))
        baselines, snr = baselines_and_snr(group)
        title = f"{setting.name}\n{note or f'SNR {snr:.3g}'}"
        panels.append(Panel(title, *baselines, curves, "solved" if setting.gymnasium_game else "oracle"))
    return panels


def comparison_panels(args: Args) -> list[Panel]:
    """Return the panels of OUT and of the other folders, titled with the arguments in which they differ."""
    jobs = {out: plan(replace(args, out=out)) for out in dict.fromkeys((args.out, *args.compare_with))}
    settings = {out: parse_agent_args(record_arguments(out, (), "", plot_only=True)) for out in jobs}
    names = dict.fromkeys(name for own in settings.values() for name in own)
    different = [name for name in names if len({own.get(name) for own in settings.values()}) > 1]
    panels = []
    for out, own in settings.items():
        check_has_runs("compare_with", out, jobs[out])
        summary = next((summary for job in flatten(jobs[out]) if (summary := job.summary())), None)
        # a setting without argument has the value of the preset
        values = {**(summary["settings"] if summary else {}), **own}
        note = ", ".join(f"{name} {values.get(name, 'by default')}" for name in different)
        panels += make_panels(jobs[out], note)
    return panels


def collect_results(jobs: dict[Setting, list[Job]]) -> dict[str, Any]:
    """Return what `results.json` holds: versions, SNRs, scores, their estimates and drops, and what is missing."""
    summaries = {job: job.summary() for job in flatten(jobs)}
    names = [setting.name for setting in jobs]
    scores: dict[str, dict[str, dict[int, float]]] = {job.agent: {name: {} for name in names} for job in summaries}
    missing: dict[str, str] = {}
    for job, summary in summaries.items():
        if math.isfinite(score(summary)):
            scores[job.agent][job.setting.name][job.seed] = score(summary)
        elif summary is not None:
            missing[str(job)] = "its score is NaN"
        else:
            missing[str(job)] = f"not finished, see {job.log}" if job.log.exists() else "not started"
    estimates: dict[str, dict[str, Any]] = {}
    drops: dict[str, Any] = {}
    for agent, by_name in scores.items():
        values = {name: list(seeds.values()) for name, seeds in by_name.items() if seeds}
        estimates[agent] = {name: estimate(seeds)._asdict() for name, seeds in values.items()}
        if len(names) > 1 and names[0] in values and names[-1] in values:
            drops[agent] = difference((values[names[0]], values[names[-1]]))._asdict()
    return {
        "versions": merge_versions(summary for summary in summaries.values() if summary is not None),
        "snr": {setting.name: baselines_and_snr(group)[1] for setting, group in jobs.items()},
        "scores": scores,
        "iqm": estimates,
        "drop": drops,
        "missing": missing,
    }


def run_and_plot(
    args: Args, jobs: dict[Setting, list[Job]], agent_args: Sequence[str], command: str
) -> list[JobResult]:
    """Run what is missing, write the figures and the table, and return the results of the runs that failed."""
    recorded = record_arguments(args.out, agent_args, command, args.plot_only)
    if args.plot_only:
        check_has_runs("out", args.out, jobs)
    failed = run_missing([job._replace(agent_args=tuple(recorded)) for job in flatten(jobs)], args)
    plot_panels(args.out / "curves.png", make_panels(jobs))
    if args.compare_with:
        plot_panels(args.out / "comparison.png", comparison_panels(args))
    command += f" -- {shlex.join(recorded)}" if recorded and not agent_args else ""
    origin = {"command": command, "agent_args": recorded, "plotted_at_commit": current_commit()}
    results = {**origin, **collect_results(jobs)}
    write_summary(args.out / "results.json", results)
    write_atomically(args.out / "table.md", format_table(results))
    return failed


@memory_errors()
def main(argv: Sequence[str]) -> None:
    """Run what is missing and plot; the exit status is 1 if a run failed, 130 after Ctrl-C."""
    with sweep_errors():
        args, agent_args = parse(argv)
        jobs = plan(args, agent_args)
        new = next((job for job in flatten(jobs) if job.run() is None), None)
        if agent_args and new and not args.plot_only and args.address is None:  # a cluster may have other packages
            check_agent_args(new)
        with contextlib.nullcontext() if args.plot_only else lock_folder(args.out):
            failed = run_and_plot(args, jobs, agent_args, shlex.join(["python", "agents/compare.py", *argv]))
    if args.plot_only or any(job.summary() for job in flatten(jobs)):
        comparison = "comparison.png, " if args.compare_with else ""
        print(f"see {comparison}curves.png, table.md and results.json in {args.out}")
    if failed:
        lines = [f"{result.job}: {result.problem}, see {result.job.log}" for result in failed]
        raise SystemExit("\n".join([f"{len(failed)} of {len(flatten(jobs))} runs failed or were stopped:", *lines]))


if __name__ == "__main__":
    # the end of a terminal or of the machine stops the runs like Ctrl-C
    with on_stop_signal(signal.default_int_handler), ignore_broken_pipe():
        main(sys.argv[1:])

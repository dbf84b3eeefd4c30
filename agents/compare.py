"""Compare pooling heads over seeds and noise levels: runs what is missing, then draws the curves and the table.

    python agents/compare.py                                   # SimpleCentroid at the paper's four noise levels
    python agents/compare.py --out results/tag --env-ids noisy_envs/SimpleTag-1v3v0-v0 noisy_envs/SimpleTag-1v3v28-v0
    python agents/compare.py --out results/noise --env-ids noisy_envs/SimpleCentroid-v0 --num-noise 0 28
    python agents/compare.py --jobs 2 -- --total-timesteps 1000000 --dropout 0    # after --, words for every agent
    python agents/compare.py --ray --gpus-per-run 0.25 -- --device cuda           # four runs on each GPU
    python agents/compare.py --draw-only                                          # of what is there
    python agents/compare.py --draw-only --out results/dropout --beside results/without-dropout  # with the same ids

A cell is one head, seed and noise level; OUT/LEVEL/HEAD/seed-S holds its run and `log.txt`. The same command again
starts only what is missing and resumes what was stopped; while it runs, a second one with this OUT is refused. Ctrl-C
loses nothing (exit status 130); a machine that dies loses the steps since the last checkpoint. OUT gets `curves.png`,
`table.md` and `results.json`. The machines of a Ray cluster must see OUT and this checkout under the same paths.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

import gymnasium

from noisy_envs import registration
from noisy_envs.baselines import BaselineReturns, baseline_returns
from noisy_envs.training.arguments import parse_arguments
from noisy_envs.training.checkpoint import checkpoint_errors, read_summary, write_summary
from noisy_envs.training.files import lock_folder, write_atomically
from noisy_envs.training.metrics import read_metrics
from noisy_envs.training.plots import Panel, format_table, plot_panels
from noisy_envs.training.process import (
    EXIT_INTERRUPTED,
    format_error,
    ignore_broken_pipe,
    memory_errors,
    on_stop_signal,
)
from noisy_envs.training.statistics import Rows, drop, estimate
from noisy_envs.training.versions import current_commit

if TYPE_CHECKING:
    from noisy_envs.training.gymnasium_envs import GymnasiumGame

Head = Literal["avgpool", "maxpool", "clstoken", "adapool"]
OURS = (  # words of the agents that a cell decides, or that train nothing
    "env_id", "seed", "run_dir", "resume", "num_noise", "evaluate", "record", "help",
)  # fmt: skip
RETRIES = 3  # of a run that a signal killed, as a machine out of memory does


@dataclass
class Args:
    """What to compare. Words after -- go to every agent."""

    out: Path = Path("runs/compare")
    """folder of all runs, the figure and the table"""
    heads: tuple[Head, ...] = ("avgpool", "maxpool", "clstoken", "adapool")
    """pooling heads; each is an agent, ppo_HEAD.py"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds of the runs"""
    env_ids: tuple[str, ...] = tuple(
        f"noisy_envs/SimpleCentroid-{x}-v0" for x in ("1v31v0", "1v15v16", "1v3v28", "1v1v30")
    )
    """environments of one game: its noise levels"""
    num_noise: tuple[int, ...] = ()
    """noise levels of a single environment, instead"""
    jobs: int = 1
    """runs at a time on this machine, without Ray"""
    ray: bool = False
    """whether to hand the runs to Ray"""
    address: str | None = None
    """Ray cluster to join, "auto" for the one that this machine is part of; else Ray is started here"""
    cpus_per_run: float = 1
    """CPUs that Ray keeps for a run"""
    gpus_per_run: float = 0
    """GPUs that Ray keeps for a run, 0.25 for four runs on each; with 0 a run sees none"""
    draw_only: bool = False
    """run nothing; make the figure and the table of what is there"""
    beside: tuple[Path, ...] = ()
    """with --draw-only, folders of runs of other words: OUT/beside.png shows their levels next to those of OUT"""
    agents_dir: Path = Path(__file__).parent
    """where the agents' files are"""


# reads an agent's settings, and runs nothing
PARSE = """import importlib, sys
sys.path.insert(0, sys.argv[1])
try:
    importlib.import_module(sys.argv[2]).parse(sys.argv[3:])
except (ValueError, OSError) as error:
    sys.exit(str(error))
"""


class Level(NamedTuple):
    """An environment at a noise level."""

    env_id: str
    num_noise: int | None

    @property
    def name(self) -> str:
        """Name it as a folder."""
        return registration.short_name(self.env_id) + ("" if self.num_noise is None else f"-noise-{self.num_noise}")

    @property
    def noise(self) -> dict[str, Any]:
        """The option that sets the noise, if not the id does."""
        return {} if self.num_noise is None else {registration.NOISE[registration.find(self.env_id)[0]]: self.num_noise}

    @property
    def start(self) -> dict[str, Any]:
        """The option by which all levels of one id start alike, as the id itself, whatever the words for the agents."""
        return registration.fixed_start(self.env_id, {}) if self.noise else {}

    @property
    def options(self) -> dict[str, Any]:
        """The game's options, beside the id's own."""
        return self.noise | self.start

    def words(self, common: Sequence[str]) -> list[str]:
        """Return the words of an agent: the common ones, and among their options how the level starts."""
        words = [part for word in common for part in (word.split("=", 1) if word.startswith("--options=") else [word])]
        if not self.start or any(word.startswith("spread=") for word in words):
            return words
        if "--options" not in words:
            words.append("--options")
        place = words.index("--options") + 1
        return [*words[:place], *(f"{name}={value}" for name, value in self.start.items()), *words[place:]]

    @property
    def foreign(self) -> GymnasiumGame | None:
        """The game, if it is not of this project."""
        if registration.find(self.env_id)[0] != registration.OTHER:
            return None
        from noisy_envs.training.gymnasium_envs import GymnasiumGame

        return GymnasiumGame(self.env_id, self.options)

    def references(self) -> BaselineReturns:
        """Returns that scores of 0 and 1 stand for."""
        game = self.foreign
        return game.references if game else baseline_returns(self.env_id, self.options)

    def snr(self, played: Mapping[str, Any] | None = None) -> float:
        """Signal's share of the tokens when an episode starts, with the options that a run played, if it had others."""
        game = self.foreign
        options = {name: tuple(x) if isinstance(x, list) else x for name, x in (played or self.options).items()}
        env = game.make() if game else gymnasium.make(self.env_id, **options)  # type: ignore[arg-type]
        share: float = env.reset(seed=0)[1]["snr"]
        env.close()
        return share


class Cell(NamedTuple):
    """One run: where, which head, which seed."""

    level: Level
    head: str
    seed: int
    folder: Path

    def __str__(self) -> str:
        """Name it in messages."""
        return f"{self.level.name} {self.head} seed {self.seed}"

    @property
    def log(self) -> Path:
        """File of what its agent prints."""
        return self.folder / "log.txt"

    def run(self) -> Path | None:
        """Return the folder of its run: the finished one, else the last one that can be resumed, else None.

        Raises:
            ValueError: if two are finished.
        """
        finished = sorted(self.folder.glob("*/summary.json"))
        if len(finished) > 1:
            raise ValueError(f"{self.folder}: two runs are finished, {finished[0].parent.name} and others; keep one")
        begun = sorted(self.folder.glob("*/checkpoint.pt"), key=lambda path: path.stat().st_mtime)
        return next((path.parent for path in [*finished, *reversed(begun)]), None)

    def summary(self) -> dict[str, Any] | None:
        """Return the summary of its finished run, or None."""
        path = (self.run() or self.folder) / "summary.json"
        return read_summary(path) if path.is_file() else None


class Outcome(NamedTuple):
    """How a cell went: `problem` is empty if all is well."""

    cell: Cell
    problem: str
    seconds: float


@dataclass
class Stop:
    """How often the user asked to stop."""

    times: int = 0


def settings(words: Sequence[str]) -> dict[str, str]:
    """Read words as settings of an agent: `--a-b 1 2 --no-c` is a_b="1 2", c="False".

    Raises:
        ValueError: a word that belongs to no setting, or one that each cell decides itself.
    """
    found: dict[str, str] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            flag, _, value = word.removeprefix("--").partition("=")
            name, value = flag.replace("-", "_"), value or "True"
            if name.startswith("no_"):
                name, value = name.removeprefix("no_"), "False"
            found[name] = value
        elif name is None:
            raise ValueError(f"{word!r} after --: must follow a setting of the agents, such as --total-timesteps")
        else:
            found[name] = word if found[name] == "True" else f"{found[name]} {word}"
    for name in OURS:
        if name in found:
            raise ValueError(f"--{name.replace('_', '-')} after --: must be left to this program's own options")
    return found


def agrees(asked: str, recorded: Any) -> bool:
    """Tell whether a word means the value that a summary holds, where null stands for infinity too."""
    if isinstance(recorded, list):
        return asked == " ".join(map(str, recorded))
    if isinstance(recorded, (int, float)) and not isinstance(recorded, bool):
        with contextlib.suppress(ValueError):
            return float(asked) == recorded
    return asked in ("None", "inf") if recorded is None else asked == str(recorded)


def parse(argv: Sequence[str]) -> tuple[Args, list[str]]:
    """Return our settings and the words for the agents.

    Raises:
        ValueError: naming the setting, its value and what is allowed.
    """
    end = list(argv).index("--") if "--" in argv else len(argv)
    args, words = parse_arguments(Args, argv[:end], Args(), __doc__), list(argv[end + 1 :])
    settings(words)
    args = replace(args, env_ids=tuple(registration.canonical_id(env_id, "env_ids") for env_id in args.env_ids))
    check(args)
    return args, words


def check(args: Args) -> None:
    """Raise ValueError, naming the setting, its value and what is allowed."""
    for name in ("heads", "seeds", "env_ids"):
        if not getattr(args, name):
            raise ValueError(f"{name}: must be at least one")
    games = {registration.find(env_id)[0] for env_id in args.env_ids}
    if len(games) > 1:
        raise ValueError(
            f"env_ids={' '.join(args.env_ids)}: must be of one game, not {registration.join_names(sorted(games))}"
        )
    if games == {registration.OTHER} and len(set(args.env_ids)) > 1:
        raise ValueError(f"env_ids={' '.join(args.env_ids)}: must be one, whose noise --num-noise sets")
    if args.num_noise and (len(args.env_ids) > 1 or not games <= registration.NOISE.keys()):
        raise ValueError(
            f"num_noise={args.num_noise}: must come with one id in --env-ids, of "
            f"{registration.join_names(registration.NOISE)}"
        )
    check_numbers(args)
    if args.beside and not args.draw_only:
        raise ValueError(f"beside={' '.join(map(str, args.beside))}: must come with --draw-only")
    if args.address is not None and not args.ray:
        raise ValueError(f"address={args.address!r}: must come with --ray")
    if args.ray and find_spec("ray") is None:
        raise ValueError("ray: must be installed first, in the checkout with: pip install -e '.[ray]'")
    for head in args.heads:
        if not (args.agents_dir / f"ppo_{head}.py").is_file():
            raise ValueError(f"heads={head!r}: there is no {args.agents_dir / f'ppo_{head}.py'}")


def check_numbers(args: Args) -> None:
    """Raise ValueError, naming the number and what is allowed."""
    for name, least in (("seeds", 0), ("num_noise", 0), ("jobs", 1), ("gpus_per_run", 0), ("cpus_per_run", 0)):
        value = getattr(args, name)
        for number in value if isinstance(value, tuple) else (value,):
            if not least <= number < math.inf:  # NaN fails too
                raise ValueError(f"{name}={number}: must be from {least}")
            if number > 1 and number % 1:
                raise ValueError(f"{name}={number}: must be whole above 1")


def plan(args: Args) -> list[Cell]:
    """Return all cells, noise levels in order of falling signal, each with its heads in order, and their seeds."""
    levels = [Level(env_id, noise) for env_id in dict.fromkeys(args.env_ids) for noise in args.num_noise or (None,)]
    levels = sorted(dict.fromkeys(levels), key=Level.snr, reverse=True)
    out = args.out.resolve()
    return [
        Cell(level, head, seed, out / level.name / head / f"seed-{seed}")
        for level in levels
        for head in dict.fromkeys(args.heads)
        for seed in dict.fromkeys(args.seeds)
    ]


def claim(out: Path, words: list[str], command: str, draw_only: bool) -> list[str]:
    """Record the words of a folder's first runs; later return those recorded.

    Raises:
        ValueError: if its runs had other words, naming them, or if there is nothing to draw.
    """
    path, begun = out / "command.json", any(path.is_dir() for path in out.glob("*/*/seed-*/*"))
    if draw_only and not begun:
        raise ValueError(f"out={out}: holds no runs")
    if not begun or not path.exists():  # words that no agent took, mistyped perhaps, bind nobody
        write_summary(path, {"command": command, "words": words, "commit": current_commit()})
    recorded: list[str] = read_summary(path).get("words", [])
    there, asked = settings(recorded), settings(words)
    names = [name for name in {**there, **asked} if there.get(name) != asked.get(name)]
    if names and (words or not draw_only):
        differ = ", ".join(
            f"{name} {asked.get(name, 'by default')} (there {there.get(name, 'by default')})" for name in names
        )
        raise ValueError(
            f"out={out}: holds runs of other words: {differ}; give `-- {shlex.join(recorded)}` or another --out"
        )
    return recorded


def check_finished(cell: Cell, words: list[str]) -> bool:
    """Tell whether a cell is done.

    Raises:
        ValueError: if its run was one of other settings, naming them.
    """
    summary = cell.summary()
    if summary is None:
        return False
    with checkpoint_errors((cell.run() or cell.folder) / "summary.json"):
        recorded = {**summary["settings"], **{name: summary[name] for name in ("env_id", "seed", "agent")}}
    asked = settings(cell.level.words(words))
    asked |= {"env_id": cell.level.env_id, "seed": str(cell.seed), "agent": f"ppo_{cell.head}"}
    asked["num_noise"] = "" if cell.level.num_noise is None else str(cell.level.num_noise)
    for name, value in asked.items():
        if name in recorded and not agrees(value, recorded[name]):
            raise ValueError(
                f"{cell.folder}: its run has {name}={recorded[name]}, {value or 'none'} is asked; use another --out"
            )
    return True


@contextlib.contextmanager
def locked(folder: Path, stop: Stop) -> Iterator[int | None]:
    """Hold the lock of a folder and yield its descriptor, or None if the user stops the waiting for it.

    An agent inherits the descriptor: while one runs on, whose parent was killed, no other takes up its run (on Windows
    it inherits none; there the lock of its own folder refuses the other).
    """
    file, told = None, False
    while file is None and not stop.times:
        try:
            file = lock_folder(folder)
        except BlockingIOError:
            if not told:
                print(f"{folder}: waiting for the agent that runs on there, its compare.py was killed", flush=True)
            told = True
            time.sleep(0.2)
    with file or contextlib.nullcontext():
        yield None if file is None else file.fileno()


def run_cell(cell: Cell, words: list[str], agents_dir: Path, stop: Stop) -> Outcome:
    """Run a cell's agent, or resume it, and again if a signal kills it."""
    start = time.perf_counter()

    def outcome(problem: str) -> Outcome:
        return Outcome(cell, problem, time.perf_counter() - start)

    cell.folder.mkdir(parents=True, exist_ok=True)
    with locked(cell.folder, stop) as lock:
        code, attempts = -1, 0
        # an agent that held the lock may have made the summary in the meantime
        while lock is not None and code < 0 and attempts <= RETRIES and not stop.times and cell.summary() is None:
            print(f"{'resuming' if cell.run() else 'starting'} {cell}, see {cell.log}", flush=True)
            code, attempts = launch(agent_command(cell, words, agents_dir), cell.log, lock, stop), attempts + 1
    if cell.summary() is not None:
        return outcome("")
    if stop.times or code == EXIT_INTERRUPTED:
        return outcome("stopped")
    told = reason(cell.log.read_text(encoding="utf-8", errors="replace"))
    return outcome(f"{f'killed by {signal.Signals(-code).name}' if code < 0 else f'exit status {code}'}: {told}")


def reason(text: str) -> str:
    """Return the line that says what went wrong: an agent's last, or what is first in the box at its end."""
    lines = [line for line in text.splitlines() if line.strip()] or ["no word"]
    if lines[-1].startswith("╰"):
        top = max(number for number, line in enumerate(lines) if line.startswith("╭"))
        return lines[top + 1].strip("│ ")
    return lines[-1]


def check_words(cell: Cell, words: list[str], agents_dir: Path) -> None:
    """Raise ValueError if an agent does not take the words, before any run starts."""
    file, *asked = agent_command(cell, words, agents_dir)[1:]
    command = [sys.executable, "-c", PARSE, str(agents_dir), Path(file).stem, *asked]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"}
    )  # wide, so that no line is broken
    if done.returncode:
        raise ValueError(f"{shlex.join(words)!r} after --: {reason(done.stdout + done.stderr)}")


def agent_command(cell: Cell, words: list[str], agents_dir: Path) -> list[str]:
    """Return the command that starts or resumes a cell's run."""
    command, run = [sys.executable, str(agents_dir / f"ppo_{cell.head}.py")], cell.run()
    if run is not None:
        return [*command, "--resume", str(run)]
    noise = [] if cell.level.num_noise is None else ["--num-noise", str(cell.level.num_noise)]
    command += ["--env-id", cell.level.env_id, *noise, "--seed", str(cell.seed)]
    return [*command, "--run-dir", str(cell.folder), "--no-gif", *cell.level.words(words)]


def begin(command: list[str], file: IO[bytes], lock: int) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own: it does not hear the terminal's Ctrl-C, which would make two of one.

    What it prints goes to the file, as UTF-8. It inherits the lock, but on Windows, where none is inherited.
    """
    alone: dict[str, Any]
    if sys.platform == "win32":
        alone = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    else:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks it, and children inherit that
        alone = {"pass_fds": (lock,), "start_new_session": True}
    env = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, **alone)


def ask_to_stop(process: subprocess.Popen[bytes]) -> None:
    """Send Ctrl-C, or on Windows Ctrl-Break, which is all that one process can send another there."""
    if sys.platform == "win32":
        process.send_signal(signal.CTRL_BREAK_EVENT)
    else:
        process.send_signal(signal.SIGINT)


def launch(command: list[str], log: Path, lock: int, stop: Stop) -> int:
    """Run a command, what it prints going to the log, and return its exit status, −s if signal s ended it.

    Ctrl-C here, or Ray's cancelling, is handed on once each time: at the first an agent saves and ends, at a second
    it just ends.
    """
    with log.open("ab") as file:
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        process = begin(command, file, lock)
    told = 0
    while True:
        try:
            while told < stop.times:
                ask_to_stop(process)
                told += 1
            return process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue
        except KeyboardInterrupt:  # Ray's cancelling
            stop.times += 1


def run_here(cells: list[Cell], words: list[str], args: Args, report: Callable[[Outcome], None]) -> bool:
    """Run cells on this machine, `args.jobs` at a time, and tell whether the user stopped it."""
    stop = Stop()
    with futures.ThreadPoolExecutor(args.jobs) as pool:
        cell_of = {pool.submit(run_cell, cell, words, args.agents_dir, stop): cell for cell in cells}
        pending = set(cell_of)
        while pending:
            try:
                done, pending = futures.wait(pending, return_when=futures.FIRST_COMPLETED)
                for future in done:
                    error = future.exception()  # a folder that cannot be written, say: the others go on
                    report(Outcome(cell_of[future], str(error), 0.0) if error else future.result())
            except KeyboardInterrupt:
                stop.times += 1
                print("stopping; the runs save (once more: they do not)", flush=True)
    return stop.times > 0


def run_on_ray(cells: list[Cell], words: list[str], args: Args, report: Callable[[Outcome], None]) -> bool:
    """Run cells as Ray tasks, and tell whether the user stopped it.

    The task of a worker that dies starts again elsewhere, and resumes the run.

    Raises:
        ValueError: if there is no cluster at the address, or too little of what a run needs.
    """
    import ray

    path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    dashboard = None if args.address else False
    try:
        ray.init(
            args.address or "local", log_to_driver=False, include_dashboard=dashboard, runtime_env={"env_vars": path}
        )
    except ConnectionError as error:
        raise ValueError(f"address={args.address!r}: must be that of a running Ray cluster: {error}") from None
    for name, asked in (("CPU", args.cpus_per_run), ("GPU", args.gpus_per_run)):
        there = ray.cluster_resources().get(name, 0)
        if asked > there:  # Ray would wait for ever, and say nothing
            raise ValueError(f"{name.lower()}s_per_run={asked}: must be at most {there:g}, which Ray has")
    task = ray.remote(num_cpus=args.cpus_per_run, num_gpus=args.gpus_per_run, max_retries=RETRIES)(run_cell)
    cell_of = {task.remote(cell, words, args.agents_dir.resolve(), Stop()): cell for cell in cells}
    pending, stopped = list(cell_of), False
    while pending:
        try:
            (done, *_), pending = ray.wait(pending)
            try:
                report(ray.get(done))
            except ray.exceptions.RayError as error:
                report(Outcome(cell_of[done], "stopped" if stopped else str(error).splitlines()[-1], 0.0))
        except KeyboardInterrupt:
            print("stopping; the runs save (once more: they do not)", flush=True)
            stopped = True
            for ref in pending:
                ray.cancel(ref)
    ray.shutdown()
    return stopped


def run_missing(missing: list[Cell], total: int, words: list[str], args: Args) -> list[Outcome]:
    """Run cells, a line of progress for each, and return those that failed.

    Raises:
        KeyboardInterrupt: after Ctrl-C, once the agents have ended.
    """
    finished = total - len(missing)
    failed: list[Outcome] = []
    print(f"{total} runs, {finished} of them done before", flush=True)

    def report(outcome: Outcome) -> None:
        nonlocal finished
        finished += not outcome.problem
        told = f"FAILED, {outcome.problem}" if outcome.problem else f"score {score(outcome.cell.summary()):.3f}"
        if outcome.problem != "stopped":
            print(f"[{finished}/{total}] {outcome.cell}: {told}, {outcome.seconds:.0f} s", flush=True)
        if outcome.problem:
            failed.append(outcome)

    if missing and (run_on_ray if args.ray else run_here)(missing, words, args, report):
        raise KeyboardInterrupt
    return failed


def score(summary: dict[str, Any] | None) -> float:
    """Return the normalised score of a summary; NaN stands for null, and for no summary."""
    return math.nan if summary is None or summary["score"] is None else float(summary["score"])


def as_played(cells: list[Cell]) -> tuple[BaselineReturns, float]:
    """Return what scores of 0 and 1 stand for at a level, and its SNR, by a run if there is one.

    Words after -- may have changed the game, and with it both.
    """
    level = cells[0].level
    summary = next((found for cell in cells if (found := cell.summary())), None)
    if summary is None:
        return level.references(), level.snr()
    returns = (math.nan if summary[name] is None else summary[name] for name in ("return_random", "return_oracle"))
    return BaselineReturns(*returns), level.snr(summary["options"])


def of_levels(cells: list[Cell]) -> dict[Level, list[Cell]]:
    """Return the cells of each level, in order."""
    found: dict[Level, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.level, []).append(cell)
    return found


def panels(cells: list[Cell], note: str = "") -> list[Panel]:
    """Return the learning curves of each level, of unfinished runs too, under its name and a note, else its SNR."""
    found = []
    for level, own in of_levels(cells).items():
        curves: dict[str, list[Rows]] = {}
        for cell in own:
            metrics = (cell.run() or cell.folder) / "metrics.csv"
            if metrics.is_file():
                curves.setdefault(cell.head, []).append(read_metrics(metrics))
        references, snr = as_played(own)
        title = f"{level.name}\n{note or f'SNR {snr:.3g}'}"
        found.append(Panel(title, *references, curves, "solved" if level.foreign else "oracle"))
    return found


def panels_beside(args: Args) -> list[Panel]:
    """Return the panels of OUT, then those of the other folders, each noting in which words the folders differ."""
    cells = {out: plan(replace(args, out=out)) for out in dict.fromkeys((args.out, *args.beside))}
    words = {out: settings(claim(out, [], "", draw_only=True)) for out in cells}
    names = {name: None for own in words.values() for name in own}
    differ = [name for name in names if len({own.get(name) for own in words.values()}) > 1]
    found = []
    for out, own in words.items():
        if not any(cell.run() for cell in cells[out]):
            raise ValueError(f"beside={out}: holds none of these runs")
        summaries = [summary for cell in cells[out] if (summary := cell.summary())]
        # a word that was not given has the value of the agents' preset
        told = {**(summaries[0]["settings"] if summaries else {}), **own}
        found += panels(cells[out], ", ".join(f"{name} {told.get(name, 'by default')}" for name in differ))
    return found


def gather(cells: list[Cell]) -> dict[str, Any]:
    """Sum up what is there: scores and their estimates by head and level, drops by head, missing runs, versions."""
    levels = list(dict.fromkeys(cell.level for cell in cells))
    scores: dict[str, dict[str, dict[int, float]]] = {cell.head: {level.name: {} for level in levels} for cell in cells}
    missing: dict[str, str] = {}
    versions: dict[str, dict[str, None]] = {}
    for cell in cells:
        summary = cell.summary()
        for name, version in (summary["versions"] if summary else {}).items():
            versions.setdefault(name, {})[version] = None
        if math.isfinite(score(summary)):
            scores[cell.head][cell.level.name][cell.seed] = score(summary)
        elif summary is not None:
            missing[str(cell)] = "its score is NaN"
        else:
            missing[str(cell)] = f"not finished, see {cell.log}" if cell.log.exists() else "not run yet"
    estimates: dict[str, dict[str, Any]] = {}
    drops: dict[str, Any] = {}
    for head, by_level in scores.items():
        found = {name: list(one.values()) for name, one in by_level.items() if one}
        estimates[head] = {name: estimate(one)._asdict() for name, one in found.items()}
        least, most = levels[0].name, levels[-1].name
        if least != most and least in found and most in found:
            drops[head] = drop(found[least], found[most])._asdict()
    return {
        "versions": {name: ", ".join(texts) for name, texts in versions.items()},
        "snr": {level.name: as_played(own)[1] for level, own in of_levels(cells).items()},
        "scores": scores,
        "iqm": estimates,
        "drop": drops,
        "missing": missing,
    }


@contextlib.contextmanager
def alone(args: Args) -> Iterator[None]:
    """Keep every other process that runs cells from OUT; a mere drawing keeps and asks nobody.

    Raises:
        BlockingIOError: another one runs there, naming it.
    """
    if args.draw_only:
        yield
        return
    args.out.mkdir(parents=True, exist_ok=True)
    with lock_folder(args.out):
        yield


def run_and_draw(args: Args, cells: list[Cell], words: list[str], command: str) -> list[Outcome]:
    """Run what is missing, write figures and table, and return what failed.

    Raises:
        ValueError, OSError: as `claim`, `check_finished` and `run_on_ray` do.
        KeyboardInterrupt: after Ctrl-C.
    """
    recorded = claim(args.out, words, command, args.draw_only)
    missing = [cell for cell in cells if not check_finished(cell, recorded)]
    if args.draw_only and not any(cell.run() for cell in cells):
        raise ValueError(f"out={args.out}: holds none of these runs")
    failed = [] if args.draw_only else run_missing(missing, len(cells), recorded, args)
    plot_panels(args.out / "curves.png", panels(cells))
    if args.beside:
        plot_panels(args.out / "beside.png", panels_beside(args))
    command += f" -- {shlex.join(recorded)}" if recorded and not words else ""
    found = {"command": command, "words": recorded, "drawn_at_commit": current_commit(), **gather(cells)}
    write_summary(args.out / "results.json", found)
    write_atomically(args.out / "table.md", format_table(found))
    return failed


@memory_errors()
def main(argv: Sequence[str]) -> None:
    """Run what is missing, draw, and end with exit status 1 if a run failed, 130 after Ctrl-C."""
    try:
        args, words = parse(argv)
        cells = plan(args)
        fresh = [cell for cell in cells if cell.run() is None]
        if words and fresh and not args.draw_only and args.address is None:  # a cluster may have what is not here
            check_words(fresh[0], words, args.agents_dir)
        with alone(args):
            failed = run_and_draw(args, cells, words, shlex.join(["python", "agents/compare.py", *argv]))
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {format_error(error)}") from None
    except KeyboardInterrupt:
        print("stopped; go on with the same command", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None
    if args.draw_only or any(cell.summary() for cell in cells):
        print(f"see {'beside.png, ' if args.beside else ''}curves.png, table.md and results.json in {args.out}")
    if failed:
        lines = [f"{outcome.cell}: {outcome.problem}, see {outcome.cell.log}" for outcome in failed]
        raise SystemExit("\n".join([f"{len(failed)} of {len(cells)} runs failed or were stopped:", *lines]))


if __name__ == "__main__":
    # a machine that shuts down, a terminal that closes, is a Ctrl-C too
    with on_stop_signal(signal.default_int_handler), ignore_broken_pipe():
        main(sys.argv[1:])

"""Train many runs in one process, side by side in the same arrays: seeds and settings, of one agent or of several.

    python agents/many_runs.py --seeds 1 2 3 4                                   # AdaPool on SimpleCentroid
    python agents/many_runs.py --agents adapool avgpool -- --device cuda         # after --: arguments for every agent
    python agents/many_runs.py --vary learning_rate=1e-3,4e-3 num_noise=0,28     # all combinations of all values

The network, the loss and the rollout are those of `ppo_*.py`; `collect`, `update` and `train` are those of this file,
for many runs. Each run is the run of its agent's file with the same settings, up to rounding, in the folder
OUT/AGENT/SETTINGS/seed-S; `python agents/ppo_AGENT.py` resumes and evaluates it as its own. Runs share arrays if they
have the same agent, differ only in `OWN_SETTINGS` (seed, rates, coefficients, dropout and the like), and have reached
the same update. Other runs follow one another. A run that fails ends alone. The same command again resumes what was
stopped or failed, and keeps what is finished.

`noisy_envs.training.many_runs` does everything else: weights in rows, generators, checkpoints, metrics, evaluation.

Shapes: S runs, T steps, E controlled agents in the environments of one run, R = S E, M = T E samples, N tokens,
D features, P parameters of an action distribution.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from noisy_envs.rendering.agent_policy import load_file
from noisy_envs.training import kernel
from noisy_envs.training.accelerate import Gradient, use_deterministic
from noisy_envs.training.arguments import parse_arguments
from noisy_envs.training.distributed import WORLD_SIZE
from noisy_envs.training.envs import EnvState, is_other
from noisy_envs.training.evaluation import format_score
from noisy_envs.training.files import lock_folder
from noisy_envs.training.many_runs import OWN_SETTINGS, ManyRuns, begin
from noisy_envs.training.process import format_error, ignore_broken_pipe, memory_errors, on_stop_signal, sweep_errors
from noisy_envs.training.run import Run, is_complete, saved_updates
from noisy_envs.training.settings import check_resume, load_args, max_runs, parse
from noisy_envs.training.sweep import find_run

# functions of an agent's file that are called here, and those that this program replaces
NEEDED = ("rollout", "next_values", "prepare", "ppo_loss", "make_optimizer", "learning_rate", "adapt")
REPLACED = ("collect", "update", "train")
RESERVED = ("seed", "run-dir", "resume", "evaluate", "record", "track", "capture-video", "help")  # settings of an agent
Policy = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass
class Args:
    """Settings of this program. Arguments after -- are passed to every agent."""

    out: Path = Path("runs/many")
    """folder of all runs"""
    agents: tuple[str, ...] = ("adapool",)
    """agents: NAME for ppo_NAME.py in --agents-dir"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds of the runs"""
    vary: tuple[str, ...] = ()
    """other settings of the agents with their values, such as learning_rate=1e-3,4e-3"""
    commands: Path | None = None
    """JSON file with a list of command lines, each an agent's file and its arguments; replaces all settings above"""
    agents_dir: Path = Path(__file__).parent
    """folder of the agents' files"""


def map_policy(runs: ManyRuns, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Call each run's agent with its own tokens, (S, any, N, D): parameters (S, any, P) and values (S, any)."""
    if runs.kernels is not None:
        return runs.kernels.policy(tokens)
    with sdpa_kernel(SDPBackend.MATH):  # the only one that torch.vmap batches
        outputs: tuple[Tensor, Tensor] = torch.vmap(
            lambda weights, x: runs.stack.call(weights, lambda agent, x: agent(x), x)
        )(runs.stack.weights, tokens)
    return outputs


def make_policy(runs: ManyRuns) -> Policy:
    """Return the policy of the agents' rollout: of tokens (R, N, D), or on a GPU of T steps together, (T R, N, D)."""
    shape = len(runs), len(runs.state.tokens) // len(runs)  # (S, E)

    def policy(tokens: Tensor) -> tuple[Tensor, Tensor]:
        steps = tokens.unflatten(0, (-1, *shape)).transpose(0, 1)  # (S, T, E, N, D)
        outputs = map_policy(runs, steps.flatten(1, 2))  # (S, T E, ...)
        parameters, values = (x.unflatten(1, (-1, shape[1])).transpose(0, 1).flatten(0, 2) for x in outputs)
        return parameters, values  # (T R, ...)

    return policy


def collect(
    module: ModuleType, runs: ManyRuns, policy: Policy, state: EnvState, noise: Tensor
) -> tuple[EnvState, Any, dict[str, Tensor]]:
    """Play a rollout of all runs: the next state, samples (S, M, ...), and statistics to log (S,)."""
    shape = len(runs), len(state.tokens) // len(runs)  # (S, E)

    def prepare_one(numbers: dict[str, Tensor], batch: Any, next_value: Tensor) -> Any:
        return module.prepare(dataclasses.replace(runs.args, **numbers), runs.agent, batch, next_value)

    state, batch = module.rollout(runs.agent, policy, runs.envs, state, noise)  # (T, R, ...)
    next_value = module.next_values(policy, batch, state.tokens).unflatten(1, shape)
    batch = type(batch)(*(x.unflatten(1, shape) for x in batch))  # (T, S, E, ...)
    return state, *torch.vmap(prepare_one, in_dims=(0, 1, 1))(runs.numbers, batch, next_value)


def make_loss(module: ModuleType, runs: ManyRuns) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """Return a function of samples (S, M, ...) to the sum of all runs' losses, and to their parts (S,).

    The gradient of the sum is that of each run's own loss, since no weight has a part in two of them.
    """

    def loss_of_one(weights: Tensor, numbers: dict[str, Tensor], *inputs: Any) -> Any:
        args = dataclasses.replace(runs.args, **numbers)  # some settings are tensors here
        return runs.stack.call(weights, lambda agent: module.ppo_loss(args, agent, *inputs))

    def loss(samples: Any, keep: Tensor | None, kl_coef: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        axes = 0, 0, 0, None if keep is None else 0, 0  # of the runs, in each input
        with sdpa_kernel(SDPBackend.MATH):
            losses, parts = torch.vmap(loss_of_one, in_dims=axes)(
                runs.stack.weights, runs.numbers, samples, keep, kl_coef
            )
        return losses.sum(), parts

    return loss


def update(runs: ManyRuns, gradient: Gradient, samples: Any, iteration: int) -> dict[str, Tensor]:
    """Learn from samples (S, M, ...) for several epochs; return what the agents' `update` does, (S,) each."""
    log, counts, coefficients = [], [], runs.kl_coefs()
    for batch in runs.minibatches(samples, iteration):
        losses = gradient(batch, runs.dropout_masks(), coefficients)
        norms, counted = runs.step(losses["approx_kl"])  # a run may have ended its update before the others
        log.append(torch.stack([*losses.values(), norms]).where(counted, 0.0))
        counts.append(counted)
    means = torch.stack(log).sum(0) / torch.stack(counts).sum(0)
    return dict(zip((*losses, "grad_norm"), means, strict=True))


def train(module: ModuleType, runs: ManyRuns) -> None:
    """Train and evaluate runs of one agent: the loop of the agent's file."""
    gradient = runs.gradient(make_loss(module, runs))
    policy, state = make_policy(runs), runs.state
    collect_rollout = runs.record(lambda state, noise: collect(module, runs, policy, state, noise))
    for iteration in runs.iterations():
        state, samples, stats = collect_rollout(state, runs.noise())
        losses = update(runs, gradient, samples, iteration)
        runs.log(iteration, losses, stats)
        runs.checkpoint(state)
    runs.evaluate(lambda tokens: map_policy(runs, tokens.unflatten(0, (len(runs), -1)))[0].flatten(0, 1))


class Failure(NamedTuple):
    """A run that ended before its time, and why."""

    folder: Path
    reason: str


def plan(args: Args, agent_args: Sequence[str]) -> list[list[str]]:
    """Return the command lines of all runs, without repetitions.

    Raises:
        ValueError: names what cannot be read, or is set by this program itself.
    """
    if args.commands is not None:
        return read_commands(args.commands)
    for name in ("agents", "seeds"):
        if not getattr(args, name):
            raise ValueError(f"{name}: expected at least one value")
    settings = {}
    for setting in args.vary:
        name, equals, values = setting.partition("=")
        name = name.replace("_", "-")
        if not (equals and name and values) or name in settings:
            raise ValueError(f"vary={setting!r}: expected NAME=VALUE,VALUE, each name once")
        settings[name] = re.split(r",(?![^(]*\))", values)  # not within parentheses
    flags = [word.partition("=")[0].replace("_", "-") for word in agent_args if word.startswith("--")]
    for name in [*settings, *(flag.removeprefix("--").removeprefix("no-") for flag in flags)]:
        if name in RESERVED:
            raise ValueError(f"--{name}: this program sets it itself, or it trains nothing")
    commands: dict[tuple[str, ...], None] = {}  # an ordered set
    for agent, combination, seed in product(args.agents, product(*settings.values()), args.seeds):
        chosen = list(zip(settings, combination, strict=True))
        folder = args.out / agent / "_".join(f"{name}-{value}" for name, value in chosen) / f"seed-{seed}"
        file = args.agents_dir / f"ppo_{agent}.py"
        if not file.is_file():
            raise ValueError(f"agents={agent!r}: expected the file {file}")
        words = [word for name, value in chosen for word in words_of(name, value)]
        commands[(str(file), *agent_args, *words, "--seed", str(seed), "--run-dir", str(folder))] = None
    return [list(command) for command in commands]


def words_of(name: str, value: str) -> list[str]:
    """Return the words of a command line that set an agent's setting."""
    if value in ("True", "False"):
        return [f"--{name}" if value == "True" else f"--no-{name}"]
    return [f"--{name}", value]


def read_commands(path: Path) -> list[list[str]]:
    """Read the file of --commands; see `plan`."""
    try:
        commands = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"commands={str(path)!r}: expected JSON ({error})") from None
    if not isinstance(commands, list) or not commands:
        raise ValueError(f"commands={str(path)!r}: expected a list of command lines")
    for command in commands:
        if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
            raise ValueError(f"commands={str(path)!r}: expected an agent's file and its arguments, got {command!r}")
    return commands


def load(file: str, modules: dict[Path, ModuleType]) -> ModuleType:
    """Import an agent's file once.

    Raises:
        ValueError: it lacks a function that is needed here, or changes one that this program replaces.
    """
    path = Path(file).resolve()
    if path in modules:
        return modules[path]
    like = load_file("ppo_adapool", Path(__file__).parent)
    module = load_file(path.stem, path.parent)
    for name in (*NEEDED, *REPLACED):
        if not hasattr(module, name):
            raise ValueError(f"{path}: expected a function {name}, as in ppo_adapool.py")
    for name in REPLACED:
        if inspect.getsource(getattr(module, name)) != inspect.getsource(getattr(like, name)):
            raise ValueError(f"{path}: expected {name} of ppo_adapool.py, which many_runs.py replaces; train it alone")
    modules[path] = module
    return module


def find(module: ModuleType, words: Sequence[str]) -> Any:
    """Return the settings of a run, which is resumed if its folder holds one.

    Raises:
        ValueError, OSError: naming a setting that is not allowed, or differs from that of the run that is there.
    """
    args = dataclasses.replace(parse(module, words), capture_video=False)
    if is_other(args):
        raise ValueError(f"env_id={args.env_id!r}: expected an environment of this package")
    if args.evaluate or args.track or WORLD_SIZE > 1:
        raise ValueError("--evaluate, --track and torchrun: expected with the agent's own program")
    if args.resume is not None:
        return args
    found, saved = find_run(args.run_dir), None
    if found is not None:
        with contextlib.suppress(ValueError, OSError):  # of a damaged file, which `group` reports
            saved = load_args(module, found)
    if saved is not None:
        check_resume(saved, args)
    return dataclasses.replace(args, resume=found)


def group(commands: Iterable[Sequence[str]]) -> tuple[list[tuple[ModuleType, list[Any]]], list[Failure]]:
    """Return agents and the settings of runs that train together, and the runs that cannot be resumed.

    Finished runs are left out.

    Raises:
        ValueError, OSError: naming a setting.
    """
    modules: dict[Path, ModuleType] = {}
    groups: dict[Any, tuple[ModuleType, list[Any]]] = {}
    failures = []
    for file, *words in commands:
        module = load(file, modules)
        args = find(module, words)
        try:
            if is_complete(module, args) is not None:
                continue
            updates = saved_updates(args)
        except (ValueError, OSError) as error:  # of a damaged file
            failures.append(Failure(args.resume, format_error(error)))
            continue
        common = tuple((name, x) for name, x in vars(args).items() if name not in OWN_SETTINGS)
        _, members = groups.setdefault((module.__file__, common, updates), (module, []))
        members.append(args)
    parts = []
    for module, members in groups.values():
        size = max_runs(members[0])  # that fit into memory
        parts += [(module, members[i : i + size]) for i in range(0, len(members), size)]
    return parts, failures


def run_group(module: ModuleType, settings: list[Any]) -> tuple[list[Run], list[Failure]]:
    """Train runs together; return those that are finished, and those that are not.

    A run that cannot begin, or diverges, ends alone.
    """
    torch.set_num_threads(settings[0].num_threads)
    use_deterministic(settings[0].torch_deterministic)
    runs = [Run(module, args, alone=False) for args in settings]
    try:
        with torch.random.fork_rng(devices=[]):  # torch's layers draw from the global state when they are made
            members = begin(module, runs)
            together = [member for member in members if not member.error]
            if together:
                train(module, ManyRuns(module, together))
    except OSError as error:  # a full disk, for example
        return [], [Failure(run.folder, format_error(error)) for run in runs]
    finally:
        for run in runs:
            run.close()
    finished = [member.run for member in members if not member.error]
    return finished, [Failure(member.run.folder, member.error) for member in members if member.error]


def run_all(commands: list[list[str]]) -> list[Failure]:
    """Train what is missing, print a line as each run ends, and return the failures."""
    groups, failures = group(commands)
    done = len(commands) - len(failures) - sum(len(settings) for _, settings in groups)
    print(f"{len(commands)} runs, {done} already finished", flush=True)
    for failure in failures:
        print(f"{failure.folder}: FAILED, {failure.reason}", flush=True)
    for number, (module, settings) in enumerate(groups):
        for group_to_start in groups[number : number + 2]:  # the next one's kernels are compiled while this one trains
            kernel.start(*group_to_start)
        finished, failed = run_group(module, settings)
        for run in finished:
            done += 1
            print(f"[{done}/{len(commands)}] {run.folder}: {format_score(run.summary, run.args)}", flush=True)
        for failure in failed:
            print(f"{failure.folder}: FAILED, {failure.reason}", flush=True)
        failures += failed
    return failures


@memory_errors()
def main(argv: Sequence[str]) -> None:
    """Train what is missing; the exit status is 1 if a run failed, 130 after Ctrl-C."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    with sweep_errors():
        args = parse_arguments(Args, argv[:end], Args(), __doc__)
        if args.commands is not None and argv[end + 1 :]:
            raise ValueError(f"commands={str(args.commands)!r}: expected without arguments after --")
        commands = plan(args, argv[end + 1 :])
        # the runs of --commands lie anywhere; each has a lock of its own
        with lock_folder(args.out) if args.commands is None else contextlib.nullcontext():
            failures = run_all(commands)
    if failures:
        lines = [f"{failure.folder}: {failure.reason}" for failure in failures]
        raise SystemExit("\n".join([f"{len(failures)} of {len(commands)} runs failed:", *lines]))


if __name__ == "__main__":
    # the end of a terminal or of the machine stops the runs like Ctrl-C
    with on_stop_signal(signal.default_int_handler), ignore_broken_pipe():
        main(sys.argv[1:])

"""Train many runs in one process, side by side in the same arrays: seeds and settings, of one agent or of several.

    python agents/many_runs.py --seeds 1 2 3 4                                   # AdaPool on SimpleCentroid
    python agents/many_runs.py --agents adapool avgpool -- --device cuda         # after --: arguments for every agent
    python agents/many_runs.py --vary learning_rate=1e-3,4e-3 num_noise=0,28     # all combinations of all values

The network, the loss and the rollout are those of `ppo_*.py`. Each run is the run of its agent's file with the same
settings, up to rounding, in the folder OUT/AGENT/SETTINGS/seed-S; `python agents/ppo_AGENT.py` resumes and evaluates it
as its own. Runs share arrays if they have the same agent and the same settings but for seeds, rates, coefficients and
dropout; otherwise they follow one another. A run that diverges ends alone. The same command again resumes what was
stopped, and keeps what is finished.

Shapes: S runs, R controlled agents in all environments of all runs, M samples, N tokens, D features, P parameters of an
action distribution.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from noisy_envs.rendering.agent_policy import load_file
from noisy_envs.training.accelerate import Gradient, use_deterministic
from noisy_envs.training.arguments import parse_arguments
from noisy_envs.training.envs import EnvState, is_other
from noisy_envs.training.evaluation import format_score
from noisy_envs.training.files import lock_folder
from noisy_envs.training.many_runs import OWN_SETTINGS, ManyRuns
from noisy_envs.training.process import EXIT_INTERRUPTED, format_error, ignore_broken_pipe, memory_errors
from noisy_envs.training.run import Run, is_complete, saved_updates
from noisy_envs.training.settings import max_runs, parse
from noisy_envs.training.sweep import find_run

NEEDED = ("rollout", "next_values", "prepare", "ppo_loss", "make_optimizer", "learning_rate", "adapt")  # of an agent
Policy = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass
class Args:
    """Settings of this program. Arguments after -- are passed to every agent."""

    out: Path = Path("runs/many")
    """folder of all runs"""
    agents: tuple[str, ...] = ("adapool",)
    """agents: NAME for agents/ppo_NAME.py, also a file of your own"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds of the runs"""
    vary: tuple[str, ...] = ()
    """other settings of the agents with their values, such as learning_rate=1e-3,4e-3"""
    commands: Path | None = None
    """instead of these, a JSON file with a list of command lines, each a list of an agent's file and its arguments"""
    agents_dir: Path = Path(__file__).parent
    """folder of the agents' files"""


def map_policy(runs: ManyRuns, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Call each run's agent with its tokens, (S, R', N, D): parameters (S, R', P) and values (S, R')."""
    if runs.kernels is not None:
        return runs.kernels.policy(tokens)
    with sdpa_kernel(SDPBackend.MATH):  # the only one that torch.vmap batches
        outputs: tuple[Tensor, Tensor] = torch.vmap(
            lambda weights, x: runs.stack.call(weights, lambda agent, x: agent(x), x)
        )(runs.stack.weights, tokens)
    return outputs


def make_policy(runs: ManyRuns) -> Policy:
    """Return the policy of the agents' rollout, which maps the tokens of a step, or of several, step after step."""
    shape = len(runs), len(runs.state.tokens) // len(runs)

    def policy(tokens: Tensor) -> tuple[Tensor, Tensor]:
        steps = tokens.unflatten(0, (-1, *shape)).transpose(0, 1)  # runs first
        outputs = map_policy(runs, steps.flatten(1, 2))
        parameters, values = (x.unflatten(1, (-1, shape[1])).transpose(0, 1).flatten(0, 2) for x in outputs)
        return parameters, values

    return policy


def collect(
    module: ModuleType, runs: ManyRuns, policy: Policy, state: EnvState, noise: Tensor
) -> tuple[EnvState, Any, dict[str, Tensor]]:
    """Play a rollout of all runs: the next state, samples (S, M, ...), and statistics to log (S,)."""
    shape = len(runs), len(state.tokens) // len(runs)
    state, batch = module.rollout(runs.agent, policy, runs.envs, state, noise)
    next_value = module.next_values(policy, batch, state.tokens)

    def prepare(numbers: dict[str, Tensor], batch: Any, next_value: Tensor) -> Any:
        return module.prepare(dataclasses.replace(runs.args, **numbers), runs.agent, batch, next_value)

    batch, next_value = type(batch)(*(x.unflatten(1, shape) for x in batch)), next_value.unflatten(1, shape)
    return state, *torch.vmap(prepare, in_dims=(0, 1, 1))(runs.numbers, batch, next_value)


def make_loss(module: ModuleType, runs: ManyRuns) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """Return a function of samples (S, M, ...) to the sum of all runs' losses, and to their parts (S,)."""

    def own_loss(weights: Tensor, numbers: dict[str, Tensor], *inputs: Any) -> Any:
        args = dataclasses.replace(runs.args, **numbers)
        return runs.stack.call(weights, lambda agent: module.ppo_loss(args, agent, *inputs))

    def loss(samples: Any, keep: Tensor | None, kl_coef: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        with sdpa_kernel(SDPBackend.MATH):
            losses, parts = torch.vmap(own_loss, in_dims=(0, 0, 0, None if keep is None else 0, 0))(
                runs.stack.weights, runs.numbers, samples, keep, kl_coef
            )
        return losses.sum(), parts

    return loss


def update(runs: ManyRuns, gradient: Gradient, samples: Any, iteration: int) -> dict[str, Tensor]:
    """Learn from samples (S, M, ...) for several epochs; return what the agents' `update` does, (S,) each."""
    log, coefficients = [], runs.kl_coefs()
    for _ in range(runs.args.update_epochs):
        for batch in runs.minibatches(samples):
            losses = gradient(batch, runs.dropout_masks(), coefficients)
            log.append(torch.stack([*losses.values(), runs.step(iteration)]))
    return dict(zip((*losses, "grad_norm"), torch.stack(log).mean(0), strict=True))


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


def plan(args: Args, agent_args: Sequence[str]) -> list[list[str]]:
    """Return the command lines of all runs.

    Raises:
        ValueError: names what cannot be read.
    """
    if args.commands is not None:
        try:
            commands = json.loads(args.commands.read_text(encoding="utf-8"))
            return [list(map(str, command)) for command in commands if isinstance(command, list) and command]
        except ValueError as error:
            raise ValueError(f"commands={str(args.commands)!r}: expected lists in JSON ({error})") from None
    settings = []
    for setting in args.vary:
        name, equals, values = setting.partition("=")
        if not (equals and name and values):
            raise ValueError(f"vary={setting!r}: expected NAME=VALUE,VALUE")
        settings.append([(name.replace("_", "-"), value) for value in values.split(",")])
    commands = []
    for agent, chosen, seed in product(args.agents, product(*settings), args.seeds):
        folder = args.out / agent / "_".join(f"{name}-{value}" for name, value in chosen) / f"seed-{seed}"
        given = [word for name, value in chosen for word in (f"--{name}", value)]
        command = [str(args.agents_dir / f"ppo_{agent}.py"), *agent_args, *given, "--seed", str(seed)]
        commands.append([*command, "--run-dir", str(folder)])
    return commands


def find(command: Sequence[str]) -> list[str]:
    """Return a command line that resumes the run in its --run-dir, if there is one."""
    file, *words = command
    found = find_run(Path(words[words.index("--run-dir") + 1])) if "--run-dir" in words else None
    return [*command] if found is None else [file, "--resume", str(found)]


def group(commands: Iterable[Sequence[str]]) -> list[tuple[ModuleType, list[Any]]]:
    """Return agents and the settings of runs that train together; finished runs are left out.

    Raises:
        ValueError, OSError: naming a setting, or a run that cannot be resumed.
    """
    modules: dict[Path, ModuleType] = {}
    groups: dict[Any, tuple[ModuleType, list[Any]]] = {}
    for file, *words in map(find, commands):
        path = Path(file).resolve()
        module = modules.setdefault(path, modules.get(path) or load_file(path.stem, path.parent))
        for name in NEEDED:
            if not hasattr(module, name):
                raise ValueError(f"{path}: expected a function {name}, as in ppo_adapool.py")
        args = dataclasses.replace(parse(module, words), capture_video=False)
        if is_other(args) or args.evaluate:
            raise ValueError(f"env_id={args.env_id!r}: expected an environment of this package, to be trained in")
        if is_complete(module, args) is None:
            common = tuple((name, x) for name, x in vars(args).items() if name not in OWN_SETTINGS)
            groups.setdefault((path, common, saved_updates(args)), (module, []))[1].append(args)
    return [
        (module, members[i : i + most])
        for module, members in groups.values()
        for most in [max_runs(members[0])]
        for i in range(0, len(members), most)
    ]


def run_group(module: ModuleType, settings: list[Any]) -> list[tuple[Run, str]]:
    """Train runs together; return them, each with the reason why it failed, if it did."""
    torch.set_num_threads(settings[0].num_threads)
    use_deterministic(settings[0].torch_deterministic)
    runs = [Run(module, args, alone=False) for args in settings]
    try:
        with torch.random.fork_rng(devices=[]):  # torch's layers draw from the global state when they are made
            together = ManyRuns(module, runs)
            train(module, together)
    finally:
        for run in runs:
            run.close()
    return [(member.run, member.error) for member in together.members]


@memory_errors()
def main(argv: Sequence[str]) -> None:
    """Train what is missing; the exit status is 1 if a run failed, 130 after Ctrl-C."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    failed = []
    try:
        args = parse_arguments(Args, argv[:end], Args(), __doc__)
        commands = plan(args, argv[end + 1 :])
        with lock_folder(args.out) if args.commands is None else contextlib.nullcontext():
            groups = group(commands)
            count = finished = len(commands) - sum(len(settings) for _, settings in groups)
            print(f"{len(commands)} runs, {finished} already finished", flush=True)
            for module, settings in groups:
                for run, error in run_group(module, settings):
                    count += not error
                    result = f"FAILED, {error}" if error else format_score(run.summary, run.args)
                    print(f"[{count}/{len(commands)}] {run.folder}: {result}", flush=True)
                    failed += [run.folder] if error else []
    except BrokenPipeError:
        raise
    except (ValueError, OSError, FloatingPointError) as error:
        raise SystemExit(f"error: {format_error(error)}") from None
    except KeyboardInterrupt:
        print("stopped; resume with the same command", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None
    if failed:
        raise SystemExit("\n".join([f"{len(failed)} of {len(commands)} runs failed:", *map(str, failed)]))


if __name__ == "__main__":
    with ignore_broken_pipe():
        main(sys.argv[1:])

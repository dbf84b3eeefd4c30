"""Check and time the fused kernels (`noisy_envs.nn.fused`) on a GPU.

    python benchmarks/fused_check.py                        # compile, check 40 random networks, time the main ones
    python benchmarks/fused_check.py --compare              # torch.compile of the agent's loss beside it
    python benchmarks/fused_check.py --variants             # other divisions of a warp beside the chosen ones
    python benchmarks/fused_check.py --compile-only         # needs no GPU
    compute-sanitizer python benchmarks/fused_check.py --sanitize

Errors are parts of the largest number of each result, against the agents' own loss by autograd in float64, beside the
largest of several draws of torch's error in float32. Times are nanoseconds per sample: the median, the least and the
most of several repeats, each over several sets of 8,192 samples, replayed as a CUDA graph. The first line of each
section says what is new in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "nn")]

import fused_cases  # noqa: E402  (beside the tests, which compare the same way)
from helpers import load_agent  # noqa: E402

from noisy_envs.nn import cuda_program, fused  # noqa: E402
from noisy_envs.nn.cuda_graph import CudaGraph  # noqa: E402
from noisy_envs.nn.distributions import Gaussian  # noqa: E402
from noisy_envs.nn.fused_source import HIDDEN_UNITS, Lanes, Network, choose_lanes, source  # noqa: E402
from noisy_envs.training import evaluation  # noqa: E402
from noisy_envs.training.checkpoint import agent_name, checkpoint_path, load_checkpoint  # noqa: E402
from noisy_envs.training.settings import load_args  # noqa: E402

SAMPLES, SETS, REPEATS, THREADS = 8192, 4, 7, os.cpu_count()
RUNS = 1, 10, 32
DEVICE = torch.device("cuda:0")
FMA_RATE, EXP_RATE = 128, 16  # of a multiprocessor in a cycle, compute capability 8.6 and newer
TAG = {"width": 3, "layers": 6, "continuous": False, "actions": 5}
BOX = {"width": 6, "layers": 6, "continuous": False, "actions": 4, "roles": 0, "padded": True}
CENTROID = {"tokens": 32, "width": 8, "layers": 3, "actions": 5}
SIZES: dict[str, dict[str, Any]] = {
    "centroid, AdaPool": CENTROID,
    "centroid, AvgPool": CENTROID | {"pool": "AvgPool"},
    "centroid, MaxPool": CENTROID | {"pool": "MaxPool"},
    "centroid, ClsToken": CENTROID | {"pool": "ClsToken"},
    "tag, AdaPool": TAG | {"tokens": 32},
    "box world, 8 tokens, AdaPool": BOX | {"tokens": 8},
    "box world, 50 tokens, AdaPool": BOX | {"tokens": 50},
}
VARIANTS: dict[str, list[tuple[int, int, int]]] = {  # tokens of a lane, lanes of a sample, warps
    "centroid, AdaPool": [(2, 16, 8), (2, 16, 12), (2, 16, 16), (1, 32, 16)],
    "centroid, ClsToken": [(3, 16, 8), (3, 16, 10), (2, 32, 16)],
    "tag, AdaPool": [(2, 16, 8), (2, 16, 12), (2, 16, 16), (4, 8, 8)],
    "box world, 8 tokens, AdaPool": [(2, 4, 8), (2, 4, 12), (1, 8, 16)],
    "box world, 50 tokens, AdaPool": [(2, 32, 8), (2, 32, 12), (2, 32, 16)],
}


class Times(NamedTuple):
    """Nanoseconds per sample of several repeats."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        """Format the times."""
        return f"{self.median:.1f} ({self.least:.1f} to {self.most:.1f})"

    @classmethod
    def of(cls, times: list[float]) -> Times:
        """Summarise the times of all repeats."""
        return cls(statistics.median(times), min(times), max(times))


@contextmanager
def section(name: str) -> Iterator[None]:
    """Print what a part of the program takes, and go on with the next part after an error."""
    start = time.perf_counter()
    print(f"== {name}", flush=True)
    try:
        yield
    except Exception:
        traceback.print_exc(file=sys.stdout)
    print(f"   ({time.perf_counter() - start:.1f} s)", flush=True)


def problem_of(size: dict[str, Any], runs: int, samples: int) -> Any:
    """Draw a problem of a size: agents, samples and what the kernels are given, on the CPU."""
    return fused_cases.make_problem(fused_cases.Case(**size, runs=runs, samples=samples))


def trained_problem(run: Path, dropout: float, samples: int = 64) -> Any:
    """Return a problem of a trained run's weights, with random samples, on the CPU."""
    path = checkpoint_path(run)
    content: Any = load_checkpoint(path)
    head = agent_name(path, content).removeprefix("ppo_")
    module = load_agent(head)
    args = dataclasses.replace(load_args(module, path), device="cpu", evaluate=(run,), dropout=dropout)
    agent = evaluation.load_agent(module, args, path, content).requires_grad_()
    (pool,) = (pool for pool, own in fused_cases.POOLS.items() if own == head)
    case = fused_cases.Case(
        pool=pool, tokens=agent.spec.num_tokens, features=agent.spec.num_features, roles=len(agent.spec.roles),
        padded=agent.spec.padded, query=agent.spec.query_index, width=args.embed_dim, layers=args.num_layers,
        continuous=isinstance(agent.distribution, Gaussian), actions=agent.distribution.num_actions, dropout=dropout,
        samples=samples,
    )  # fmt: skip
    return fused_cases.make_problem(case, (module, args, [agent]))


def report_compilation(architecture: str, sizes: list[str]) -> None:
    """Compile both kernels of each size, and load them again from the disk; print the seconds."""
    for name in sizes:
        problem = problem_of(SIZES[name], 1, 4)
        for only, samples in (("GRADIENT", SAMPLES // 132), ("FORWARD", 1)):
            lanes = choose_lanes(problem.network, samples)
            assert lanes is not None
            text = source(problem.network, lanes, problem.offsets, cast(Any, only)) + f"// {time.time()}\n"  # new
            start = time.perf_counter()
            code = cuda_program.compile_source(text, architecture)
            middle = time.perf_counter()
            cuda_program.compile_source(text, architecture)
            times = f"compiled in {middle - start:.2f} s, read in {time.perf_counter() - middle:.4f} s"
            print(f"{name}, {only.lower()}, {lanes}: {times}, {len(code)} bytes")


def operations(network: Network, tokens: float, pairs: float) -> tuple[float, float]:
    """Return the multiply-adds and the exponentials of a sample's gradient, at least.

    Args:
        network: sizes.
        tokens: of a sample, those of the encoder without padding.
        pairs: of tokens in a layer's attention.
    """
    width, units, layers = network.embed_dim, HIDDEN_UNITS, network.num_layers
    # Queries, keys, values and outputs take 4 width², the feed-forward network of 4 width hidden units 8 width².
    scores, products, gelus = layers * pairs, layers * tokens * 12 * width**2, layers * tokens * 4 * width
    if network.pool == "ClsToken":  # in the last layer one token has more than keys and values
        scores -= pairs - tokens
        products -= (tokens - 1) * 10 * width**2
        gelus -= (tokens - 1) * 4 * width
    elif network.pool == "AdaPool":  # which is attention with one query
        scores += tokens
        products += (tokens + 1) * 2 * width**2
    # Forward: a score, a weighted value and the sum of weights. Backward: the score again, the slope of the weight, its
    # part in the score, and gradients of query, key and value.
    attention = width * scores * (3 + 6)
    products += tokens * width * (network.numbers + network.role_dim)
    products += 2 * (width * units + units**2) + units * (network.num_parameters + 1)
    gelus += tokens * width + 4 * units
    # The gradient of a matrix product is two of them. Each weight of attention is an exponential, and one again
    # backward, since keeping it takes more time; each GELU takes one in both directions.
    return attention + 3 * products, 2 * width * scores + 2 * gelus


def limits(problem: Any) -> dict[str, float]:
    """Return the multiply-adds and exponentials of a problem's samples."""
    spec, network = problem.agents[0].spec, problem.network
    tokens = spec.mask(problem.samples.tokens).sum(-1).double() + (network.pool == "ClsToken")
    fma, exp = operations(network, float(tokens.mean()), float(tokens.square().mean()))
    return {"multiply-adds": fma, "exponentials": exp}


def add_limits(found: dict[str, float]) -> None:
    """Add the nanoseconds that a GPU takes at least, at its highest clock."""
    from cuda.bindings import driver

    multiprocessors = cuda_program.device_limits(DEVICE).multiprocessors  # starts CUDA
    _, kilohertz = driver.cuDeviceGetAttribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 0)
    for name, rate in (("multiply-adds", FMA_RATE), ("exponentials", EXP_RATE)):
        found[f"{name}, ns"] = found[name] / (rate * multiprocessors * kilohertz * 1e-6)


def kernels_of(problem: Any, samples: int, lanes: Lanes | None = None) -> tuple[Any, Any]:
    """Return the gradient and the policy of a problem."""
    runs = problem.case.runs
    gradient = fused.FusedGradient(problem.network, problem.offsets, (runs, samples), DEVICE, lanes)
    return gradient, fused.FusedPolicy(problem.network, problem.offsets, runs, DEVICE, lanes)


def compile_all(problems: list[tuple[Any, int, Lanes | None]]) -> None:
    """Compile kernels, as `kernels_of` is called, side by side, for later calls to find on the disk."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda arguments: kernels_of(*arguments) and None, problems))


def check(problem: Any) -> tuple[float, float, str]:
    """Return the worst error of a problem, torch's own one there, and its name."""
    gradient, policy = kernels_of(problem, problem.case.samples)
    grads, parts = gradient(problem.weights, problem.samples, problem.keys, problem.coefficients)
    found, own = fused_cases.errors(problem, grads, parts, *policy(problem.weights, problem.samples.tokens))
    name, part = fused_cases.worst(found, own, 2e-5)
    return (found[name], own[name], name) if part <= 1 else (found[name], own[name], f"{name}: MORE THAN ALLOWED")


def check_all(problems: list[Any]) -> tuple[float, int]:
    """Print problems with errors that are too large; print and return the worst error, and how many failed."""
    worst, failed = 0.0, 0
    for problem in problems:
        try:
            error, own, name = check(problem.to(DEVICE))
        except Exception as problem_error:
            print(f"FAILED {problem.case}: {problem_error!r}", flush=True)
            failed += 1
            continue
        worst = max(worst, error)
        if "ALLOWED" in name:
            failed += 1
            print(f"{error:.1e}, torch {own:.1e}, {name}, {problem.case}", flush=True)
    print(f"{len(problems)} networks: worst error {worst:.1e}, {failed} failed", flush=True)
    return worst, failed


def nanoseconds(call: Callable[[int], Any], samples: int) -> Times:
    """Time calls on several sets of samples, recorded together."""

    def all_sets() -> torch.Tensor:
        for number in range(SETS):
            result: torch.Tensor = call(number)
        return result

    graph = CudaGraph(all_sets)
    graph()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    times = []
    for _ in range(REPEATS):
        events[0].record()
        for _ in range(5):
            graph()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]) * 1e6 / (5 * SETS * samples))
    return Times.of(times)


@cache
def large_problem(name: str) -> Any:
    """Return a size's problem on the GPU, with many samples of one run."""
    return problem_of(SIZES[name], 1, SAMPLES).to(DEVICE)


def many(name: str, runs: int) -> Any:
    """Return a size's problem with the number of runs set."""
    problem = large_problem(name)
    return dataclasses.replace(problem, case=dataclasses.replace(problem.case, runs=runs))


def sets_of(problem: Any, runs: int) -> list[tuple[Any, torch.Tensor]]:
    """Return weights and samples of several runs, with their keys: the problem's in other orders, copied."""
    sets = []
    for number in range(SETS):
        order = torch.randperm(SAMPLES, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(number))
        samples = [x[:, order].expand(runs, *x.shape[1:]).contiguous() for x in problem.samples]
        sets.append((samples, torch.randint(2**32, (runs, 2), device=DEVICE)))
    return sets


def time_size(name: str, lanes: Lanes | None = None, all_runs: tuple[int, ...] = RUNS) -> list[Times]:
    """Print the times of a size's gradient and policy; return those of the gradient, for each number of runs."""
    problem, times = large_problem(name), []
    for runs in all_runs:
        sets = sets_of(problem, runs)
        weights = problem.weights.expand(runs, -1) * torch.linspace(0.9, 1.1, runs, device=DEVICE)[:, None]
        coefficients = problem.coefficients.expand(runs, -1).contiguous()
        gradient, policy = kernels_of(many(name, runs), SAMPLES, lanes)

        def learn(number: int, gradient: Any = gradient, given: Any = (weights, sets, coefficients)) -> torch.Tensor:
            samples, keys = given[1][number]
            grad: torch.Tensor = gradient(given[0], samples, keys, given[2])[0]
            return grad

        def act(number: int, policy: Any = policy, given: Any = (weights, sets)) -> torch.Tensor:
            parameters: torch.Tensor = policy(given[0], given[1][number][0][0])[0]
            return parameters

        total = runs * SAMPLES
        times.append(nanoseconds(learn, total))
        text = f"gradient {times[-1]}, forward {nanoseconds(act, total)}"
        print(f"{name}, {gradient._kernels.lanes}, {runs} runs: {text}", flush=True)
    return times


def time_rollout(name: str) -> None:
    """Print the time of a policy's step in 64 environments."""
    problem = problem_of(SIZES[name], 1, 64).to(DEVICE)
    policy = kernels_of(problem, 64)[1]
    time_step = nanoseconds(lambda number: policy(problem.weights, problem.samples.tokens)[0], 64)
    print(f"{name}, 64 samples: forward {time_step} ns per sample", flush=True)


def time_torch(name: str) -> Times:
    """Print and return the times of torch.compile of the agent's loss, with its gradient."""
    problem = large_problem(name)
    agent, case = problem.agents[0], problem.case
    sizes = case.layers, SAMPLES, problem.network.encoder_tokens, case.width
    keep = fused_cases.hashed_masks(problem.keys[0], sizes, case.dropout)
    batches = [type(problem.samples)(*(x[0] for x in samples)) for samples, _ in sets_of(problem, 1)]
    torch.compiler.reset()
    options: Any = {"unroll_reductions_threshold": 64}
    loss = torch.compile(problem.module.ppo_loss, fullgraph=True, dynamic=False, options=options)
    penalty = torch.tensor(0.4, device=DEVICE)
    weights = list(agent.parameters())

    def learn(number: int) -> torch.Tensor:
        value, _ = loss(problem.args, agent, batches[number], keep, penalty)
        grad: torch.Tensor = torch.autograd.grad(value, weights)[0]
        return grad

    times = nanoseconds(learn, SAMPLES)
    print(f"{name}: torch.compile {times}", flush=True)
    return times


def sanitize(sizes: list[str]) -> None:
    """Launch each kernel once on a small problem of each size."""
    for name in sizes:
        problem = problem_of(SIZES[name], 2, 37).to(DEVICE)
        gradient, policy = kernels_of(problem, 37)
        gradient(problem.weights, problem.samples, problem.keys, problem.coefficients)
        policy(problem.weights, problem.samples.tokens)
        torch.cuda.synchronize()
        print(f"{name}: done", flush=True)


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=40, help="random networks to check")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES), help="networks to time")
    parser.add_argument("--compare", action="store_true", help="time torch.compile too")
    parser.add_argument("--variants", action="store_true", help="time other divisions of a warp too")
    parser.add_argument("--sanitize", action="store_true", help="launch each kernel once, and no more")
    parser.add_argument("--compile-only", action="store_true", help="compile for sm_90, and no more")
    args = parser.parse_args()
    if args.compile_only:
        report_compilation("sm_90", args.sizes)
        return
    major, minor = torch.cuda.get_device_capability(DEVICE)
    architecture = f"sm_{major}{minor}"
    print(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}")
    print(f"shared memory of a block: {cuda_program.device_limits(DEVICE).shared_memory} bytes", flush=True)
    if args.sanitize:
        sanitize(args.sizes)
        return
    variants = {name: [Lanes(*x) for x in VARIANTS.get(name, []) if args.variants] for name in args.sizes}
    with section("seconds to compile"):
        report_compilation(architecture, args.sizes[:1])
    with section("compile all networks"):
        problems = [fused_cases.make_problem(fused_cases.random_case(seed)) for seed in range(args.networks)]
        jobs: list[tuple[Any, int, Lanes | None]] = [(problem, problem.case.samples, None) for problem in problems]
        for name in args.sizes:
            for runs in RUNS:
                jobs += [(many(name, runs), SAMPLES, lanes) for lanes in [None, *variants[name]]]
        compile_all(jobs)
    with section("errors"):
        check_all(problems)
    for name in args.sizes:
        with section(f"ns per sample: {name}"):
            time_size(name)
        for lanes in variants[name]:
            with section(f"ns per sample: {name}, {lanes}"):
                time_size(name, lanes)
    with section("a step of a rollout"):
        time_rollout("centroid, AdaPool")
    if args.compare:
        for name in args.sizes:
            with section(f"ns per sample: torch, {name}"):
                time_torch(name)


if __name__ == "__main__":
    main()

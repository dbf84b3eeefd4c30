"""Compare NumPy, eager torch, torch.compile and CUDA graphs on the step of one game: results and speed.

    python benchmarks/compile_core.py [--game simple_tag] [--device cuda] [--worlds 65536] [--noise 28]
    python benchmarks/compile_core.py --game box_world [--observation pixels]

A step includes random numbers, dynamics, tokens and reward, but no reset. `hand-written` is SimpleCentroid as a torch
user would write it for this size, with torch's own generator. Graph breaks are errors (`fullgraph=True`). On CUDA, host
synchronisation is an error, and a copy from the host makes the graph capture fail. Memory limits the speed: the last
column divides the bytes of the state read and written and of the tokens written by the time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from noisy_envs.games.particles import State
from noisy_envs.games.simple_centroid import SimpleCentroid
from noisy_envs.interfaces.functional import EnvParams, play
from noisy_envs.interfaces.scripted import assign_policies
from noisy_envs.randomness import episode_key, uniforms
from noisy_envs.registration import GAMES
from noisy_envs.validation import highest

LEARNER = slice(0, 1)


def make_step(game: Any) -> Callable[..., Any]:
    """Return the game's step: (state, key, clock, action) -> state, clock, tokens, reward."""
    return partial(play, EnvParams(game, LEARNER, assign_policies(game, LEARNER), game.max_steps, None))


def hand_written(game: SimpleCentroid) -> Callable[..., Any]:
    """Return the step in plain torch, for one agent and continuous actions, without padding or contacts."""
    signal = highest(game.num_signal)

    def step(state: State, role: Any, speed: Any, action: Any) -> Any:
        position, velocity = state.mover[..., :2], state.mover[..., 2:]
        angle = torch.rand(position.shape[0], signal, device=position.device) * (2 * torch.pi)
        push = torch.stack([angle.cos(), angle.sin()], -1)
        slots = action.clamp(0, 1)
        force = torch.cat([(slots[..., 2::2] - slots[..., 1::2]) * 5.0, push], 1)
        position = position + 0.1 * velocity
        velocity = 0.75 * velocity + 0.1 * force
        velocity = velocity * (speed / torch.maximum(velocity.norm(dim=-1, keepdim=True), speed))
        mover = torch.cat([position, velocity], -1)
        body = torch.cat([mover[:, :1], state.landmark, mover[:, 1:]], 1)
        tokens = torch.cat([(body - mover[:, :1]) / 5.0, role.expand(len(mover), -1, -1)], -1)
        reward = -0.01 * (position[:, 0] - position[:, 1:].mean(1)).norm(dim=-1).sqrt()
        return State(mover, state.landmark), role, tokens, reward

    return step


def capture(step: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """Capture one step in a CUDA graph whose replay advances the state in place."""
    state, first, second, action = inputs
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(state, first, second, action)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outcome = step(state, first, second, action)
        for field, new in zip(state, outcome[0], strict=True):
            if new is not field:  # constant fields are returned unchanged
                field.copy_(new)
        if second.dtype == torch.int64:
            second.copy_(outcome[1])
    return graph.replay


def seconds(run: Callable[[], Any], device: str, repeats: int = 7, least: float = 0.2) -> list[float]:
    """Time calls of `run` after a warm-up, synchronised: one figure per repeat, in seconds per call."""
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for _ in range(3):
        run()
    sync()
    count = 1
    timings: list[float] = []
    while len(timings) < repeats:
        start = time.perf_counter()
        for _ in range(count):
            run()
        sync()
        elapsed = time.perf_counter() - start
        if elapsed < least / 4:
            count *= 4
        else:
            timings.append(elapsed / count)
    return timings


def main() -> None:
    """Measure each implementation and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", choices=GAMES, default="simple_centroid")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--worlds", type=int, default=65536, help="number of parallel environments")
    parser.add_argument("--noise", type=int, default=28, help="noise entities (particle games)")
    parser.add_argument("--observation", choices=("entities", "pixels"), default="entities", help="BoxWorld only")
    args = parser.parse_args()
    options: dict[str, dict[str, Any]] = {
        "simple_centroid": {"num_noise": args.noise},
        "simple_tag": {"num_obstacles": args.noise},
        "box_world": {"observation": args.observation},
    }
    game = GAMES[args.game](**options[args.game])
    batch = args.worlds

    seeds, zeros = np.arange(batch), np.zeros(batch, np.int64)
    key = episode_key(seeds, zeros)
    start = game.initial(uniforms(key, zeros, game.num_reset_uniforms))
    random = np.random.default_rng(0)
    action: np.ndarray = random.integers(0, game.num_actions, (batch, 1))
    if game.continuous_actions:
        action = random.random((batch, 1, game.num_actions), dtype=np.float32)

    def on_device() -> tuple[Any, ...]:
        state = type(start)(*(torch.tensor(x, device=args.device) for x in start))
        clock = torch.zeros(batch, dtype=torch.int64, device=args.device)
        return state, torch.tensor(key, device=args.device), clock, torch.tensor(action, device=args.device)

    def on_device_by_hand() -> tuple[Any, ...]:
        state, _, _, actions = on_device()
        role = game.observe(state)[:1, 0, :, 4:]
        speed = torch.tensor([5.0] + [2.0] * highest(game.num_signal), device=args.device)[None, :, None]
        bodies = State(*(field[..., :4].contiguous() for field in state))  # without roles, which are constant
        return bodies, role.clone(), speed, actions

    runs: dict[str, Callable[[], Any]] = {}
    steps = [("shared rules", make_step(game), on_device())]
    if args.game == "simple_centroid":
        steps.append(("hand-written", hand_written(game), on_device_by_hand()))
    for name, step, inputs in steps:
        step(*inputs)  # fills the game's caches
        compiled = torch.compile(step, fullgraph=True)
        runs[f"{name}, eager"] = partial(step, *inputs)
        runs[f"{name}, compiled"] = partial(compiled, *inputs)
        if args.device == "cuda":
            runs[f"{name}, eager in a CUDA graph"] = capture(step, tuple(inputs))
            compiled(*inputs)
            runs[f"{name}, compiled in a CUDA graph"] = capture(compiled, tuple(inputs))
    if args.device == "cpu":
        numpy_step = make_step(game)
        runs["shared rules, NumPy"] = lambda: numpy_step(start, key, zeros, action)

    # the same step from the same state, in NumPy and in compiled torch
    expected = make_step(game)(start, key, zeros, action)
    got = torch.compile(make_step(game), fullgraph=True)(*on_device())
    worst = max(float(np.abs(expected[i] - got[i].cpu().numpy()).max()) for i in (2, 3))

    report(args, game, worst, start, action)
    for label, run in runs.items():
        measure(label, run, args.device, batch, bytes_of(game, start, action))


def bytes_of(game: Any, start: Any, action: np.ndarray) -> int:
    """Return the bytes that a step of one environment must read and write."""
    read = sum(field[0].nbytes for field in start)
    fixed = sum(getattr(start, name)[0].nbytes for name in ("landmark", "size", "level") if hasattr(start, name))
    tokens = 4 * game.token_spec.num_tokens * game.token_spec.num_features
    return int(2 * read - fixed + tokens + 4 + 32 + action[0].nbytes)  # reward; key and clock


def report(args: argparse.Namespace, game: Any, worst: float, start: Any, action: np.ndarray) -> None:
    """Print the setup, the largest difference and the bytes per step."""
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    what = args.observation if args.game == "box_world" else f"1v3v{args.noise}"
    print(f"{args.game} {what}, {args.worlds} environments, {name}, torch {torch.__version__}")
    print(f"largest difference between NumPy and compiled torch, tokens and reward: {worst:.1e}")
    print(f"bytes per environment step: {bytes_of(game, start, action)}")


def measure(label: str, run: Callable[[], Any], device: str, worlds: int, bytes_per_world: int) -> None:
    """Time one implementation and print a row; on CUDA, host synchronisation raises an error."""
    if device == "cuda" and "CUDA graph" not in label:
        run()
        torch.cuda.set_sync_debug_mode("error")
    timings = seconds(run, device)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    median = statistics.median(timings)
    spread = (max(timings) - min(timings)) / median
    rate, bandwidth = worlds / median / 1e6, worlds * bytes_per_world / median / 1e9
    print(f"{label:42s} {rate:9.2f} M steps/s  spread {spread:4.0%}  {bandwidth:7.1f} GB/s")


if __name__ == "__main__":
    main()

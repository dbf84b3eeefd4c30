"""Measure how the time of pooling grows with the number of tokens n and of features d, alone and on an encoder.

    python benchmarks/pooling_speed.py [--device cuda] [--out pooling_speed.png] [--batch 64]
        [--n 16 32 64 128 256] [--d 8 16 32 64 128 256] [--fixed-n 32] [--fixed-d 32]

n varies at --fixed-d and d at --fixed-n. Multiplications (products) per set and forward pass, with h attention heads:

    AvgPool              n d             MaxPool: as many comparisons. ClsToken: none, but it copies n d numbers.
    AdaPool              2 n d h + 4 d²  scores and weighted sum; W_Q, W_K at the query; W_V, W_O at the pooled value
    MultiheadAttention   2 n d² + 2 n d + 2 d²  torch's, with one query: it multiplies each token by W_K and W_V, as the
                         paper counts (appendix, "Time Complexity of AdaPool": O(n d + n d²))

With equal weights the last two return equal numbers. AdaPool takes O(n d h + d²), because it applies W_K to the query
and W_V to the pooled value. At n = 32, d = 256, batch 64, forward and backward take 5.6 ms, torch's attention 28.6 ms.
"Least" is a lower limit of the forward pass: the time of reading the tokens once (`sum`), or of the multiplications at
the speed of a large matrix product, whichever is longer. At small sizes the overhead of calls dominates.

The encoder is torch's, in training mode, with h heads, a feed-forward layer of 4 d and no dropout. ClsToken's encoder
has n + 1 tokens. Times are float32 medians over --repeats; the heads take turns. With one thread on a CPU they are
process time, which depends less on the load of the machine; otherwise they are wall time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from noisy_envs.nn.pooling import AdaPool, AvgPool, ClsToken, MaxPool
from noisy_envs.training.plots import COLOURS, MARKERS, write_png
from noisy_envs.training.versions import library_versions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LAYERS, HEADS = 3, 4
Call = Callable[[], object]


class Projected(nn.Module):
    """Pool by torch's attention with the first token as the query, which projects every token."""

    def __init__(self, dim: int) -> None:
        """Create the projections."""
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, HEADS, bias=False, batch_first=True)

    def extend(self, tokens: Tensor) -> tuple[Tensor, None]:
        """Return tokens (B, N, D) unchanged, and no mask."""
        return tokens, None

    def forward(self, embeddings: Tensor) -> Tensor:
        """Pool embeddings (B, N, D) to (B, D)."""
        query = embeddings[:, :1]
        pooled: Tensor = self.attention(query, embeddings, embeddings, need_weights=False)[0]
        return (pooled + query).squeeze(1)


# constructor of each head, given d; multiplications per set, given n and d
POOLS: dict[str, tuple[Callable[[int], Any], Callable[[int, int], int]]] = {
    "AvgPool": (lambda d: AvgPool(), lambda n, d: n * d),
    "MaxPool": (lambda d: MaxPool(), lambda n, d: n * d),
    "ClsToken": (ClsToken, lambda n, d: 0),
    "AdaPool": (lambda d: AdaPool(d, HEADS), lambda n, d: 2 * n * d * HEADS + 4 * d * d),
    "MultiheadAttention": (Projected, lambda n, d: 2 * n * d * d + 2 * n * d + 2 * d * d),
}
# the paper's costs, drawn below these heads
GUIDES: dict[str, tuple[str, str, Callable[[int, int], int]]] = {
    "AvgPool": ("O(n d)", "--", lambda n, d: n * d),
    "MultiheadAttention": ("O(n d + n d²)", ":", lambda n, d: n * d + n * d * d),
}


class Row(NamedTuple):
    """Multiplications and seconds per batch."""

    pool: str
    n: int
    d: int
    products: int
    least: float
    forward: float
    both: float  # forward and backward
    encoder_forward: float
    encoder_both: float


def medians(calls: Sequence[Call], repeats: int, device: str) -> list[float]:
    """Return the median seconds of each call; calls take turns, so that other load affects all equally."""
    sync = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter

    def seconds(call: Call, number: int) -> float:
        sync()
        start = clock()
        for _ in range(number):
            call()
        sync()
        return (clock() - start) / number

    for call in calls:
        call()
    numbers = [max(1, min(50, int(2e-3 / seconds(call, 1)))) for call in calls]  # 2 ms, or one call
    timings = [[seconds(call, number) for call, number in zip(calls, numbers, strict=True)] for _ in range(repeats)]
    return [statistics.median(times) for times in zip(*timings, strict=True)]


def make_calls(head: Any, encoder: nn.Module, tokens: Tensor) -> tuple[Call, Call]:
    """Return functions that pass tokens (B, N, D) through encoder and head: forward, and forward and backward."""
    leaf = tokens.clone().requires_grad_()
    inputs = [leaf, *encoder.parameters(), *head.parameters()]

    def run(tokens: Tensor) -> Tensor:
        pooled: Tensor = head(encoder(head.extend(tokens)[0]))
        return pooled

    def forward() -> Tensor:
        with torch.inference_mode():
            return run(tokens)

    return forward, lambda: torch.autograd.grad(run(leaf).sum(), inputs)


def measure(n: int, d: int, rate: float, args: argparse.Namespace) -> list[Row]:
    """Return a row per head at one size; `rate` is the machine's, in multiplications per second."""
    tokens = torch.randn(args.batch, n, d, generator=torch.Generator().manual_seed(0)).to(args.device)
    layer = nn.TransformerEncoderLayer(d, HEADS, 4 * d, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).to(args.device)
    heads = [make(d).to(args.device) for make, _ in POOLS.values()]
    calls = [[*make_calls(head, nn.Identity(), tokens), *make_calls(head, encoder, tokens)] for head in heads]
    columns = [medians(column, args.repeats, args.device) for column in zip(*calls, strict=True)]
    read = medians([tokens.sum], args.repeats, args.device)[0]
    rows = []
    for (pool, (_, count)), *times in zip(POOLS.items(), *columns, strict=True):
        products = args.batch * count(n, d)
        rows.append(Row(pool, n, d, products, max(read, products / rate), *times))
    return rows


def show(row: Row) -> str:
    """Format a row of the table, with times in microseconds."""
    times = " | ".join(f"{1e6 * seconds:,.0f}" for seconds in row[4:])
    return f"| {row.pool} | {row.n} | {row.d} | {row.products / 1e6:.2f} | {times} |"


def plot(axes: Axes, rows: Sequence[Row], column: str, axis: str) -> None:
    """Draw one line per head against "n" or "d", and, for heads alone, the paper's slopes slightly lower."""
    for pool in POOLS:
        line = sorted((row for row in rows if row.pool == pool), key=lambda row: (row.n, row.d))
        x, y = ([getattr(row, name) for row in line] for name in (axis, column))
        milliseconds = [1e3 * seconds for seconds in y]
        look: dict[str, Any] = {"color": COLOURS.get(pool.lower(), "0.45"), "marker": MARKERS.get(pool.lower(), "v")}
        axes.plot(x, milliseconds, **look, markersize=4, label=pool)
        if pool in GUIDES and column == "both":
            name, style, cost = GUIDES[pool]
            scale = 0.7 * milliseconds[-1] / cost(line[-1].n, line[-1].d)
            axes.plot(x, [scale * cost(row.n, row.d) for row in line], style, color="black", linewidth=1, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(x, map(str, x))
    axes.set(xlabel=f"{axis}, number of {'tokens' if axis == 'n' else 'features'}")
    axes.grid(alpha=0.25)


def draw(path: Path, rows: Sequence[Row], fixed: dict[str, int], title: str) -> None:
    """Plot forward and backward time against n and d, for the head alone and on the encoder, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 7.5), dpi=120, layout="constrained")
    panels = figure.subplots(2, 2, sharey="row")
    places = {"both": "head alone", "encoder_both": f"head on a {LAYERS}-layer encoder"}
    for row, (column, place) in zip(panels, places.items(), strict=True):
        row[0].set_ylabel("forward and backward, ms per batch")
        for axes, (axis, other) in zip(row, (("n", "d"), ("d", "n")), strict=True):
            plot(axes, [point for point in rows if getattr(point, other) == fixed[other]], column, axis)
            axes.set_title(f"{place}, {other} = {fixed[other]}")
    figure.suptitle(title, fontsize=10)
    lines = sorted(panels[0, 0].get_lines(), key=lambda line: line.get_label().startswith("O("))  # guides last
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), fontsize=9, frameon=False)
    write_png(path, figure)


def main() -> None:
    """Measure, print the table and plot it if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="PNG to write (default: none)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--n", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--d", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256], help=f"multiples of {HEADS}")
    parser.add_argument("--fixed-n", type=int, default=32)
    parser.add_argument("--fixed-d", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    matrix = torch.randn(1024, 1024, device=args.device)
    rate = 1024**3 / medians([lambda: matrix @ matrix], args.repeats, args.device)[0]
    versions = library_versions()
    print(f"{versions}\nbatch {args.batch}, {args.device}, {rate / 1e9:,.0f}e9 products/s; times in µs per batch\n")
    print("| head | n | d | products, millions | least | forward | and backward | on encoder: forward | and backward |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows: list[Row] = []
    for n, d in dict.fromkeys([*((n, args.fixed_d) for n in args.n), *((args.fixed_n, d) for d in args.d)]):
        rows += measure(n, d, rate, args)
        print(*map(show, rows[-len(POOLS) :]), sep="\n", flush=True)
    if args.out:
        title = f"batch {args.batch}, {args.device}, torch {versions['torch']}, commit {versions['commit']}"
        draw(args.out, rows, {"n": args.fixed_n, "d": args.fixed_d}, title)


if __name__ == "__main__":
    main()

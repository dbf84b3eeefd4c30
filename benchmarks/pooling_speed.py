"""How long pooling takes over the number of tokens n and of features d: each head alone, and on an encoder.

    python benchmarks/pooling_speed.py [--device cuda] [--out pooling_speed.png] [--batch 64]
        [--n 16 32 64 128 256] [--d 8 16 32 64 128 256] [--fixed-n 32] [--fixed-d 32]

n varies at --fixed-d and d at --fixed-n. Products that the forward pass of a set needs, with h attention heads:

    AvgPool              n d             MaxPool: as many comparisons. ClsToken: none, but it copies the n d numbers.
    AdaPool              2 n d h + 4 d²  scores and weighted sum; W_Q, W_K at the query; W_V, W_O at the pooled value
    MultiheadAttention   2 n d² + 2 n d + 2 d²  torch's, with one query: W_K and W_V meet each token, as the paper
                         counts it (appendix, "Time Complexity of AdaPool": O(n d + n d²))

With equal weights the last two give equal numbers; ours is of O(n d h + d²), as it moves W_K to the query's side and
W_V behind the sum. "Least" is the larger of what torch takes to read the tokens once (`sum`) and of the products at the
speed of a large matrix product: what forward alone could reach. On small sizes all is the price of calls.
Measured at n = 32, d = 256, batch 64, forward and backward: 5.6 ms for ours, 28.6 ms for torch's; from d = 128 to 256
forward alone grows 2.8 and 4.7 times (one core of an AMD EPYC, commit 4f6e2b0a52ca; tests ran beside it).

The encoder is torch's, in training mode, with h heads, a feed-forward layer of 4 d and no dropout; ClsToken's has n + 1
tokens. Times are medians over --repeats, in which the heads take turns, in float32. With one thread on a CPU they are
the process's own time, which others that use the machine lengthen less; else, and on a GPU, they are wall time.
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
    """Pool by torch's own attention, the first token being the query: it projects every token."""

    def __init__(self, dim: int) -> None:
        """Make the projections."""
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, HEADS, bias=False, batch_first=True)

    def extend(self, tokens: Tensor) -> tuple[Tensor, None]:
        """Return tokens (B, N, D) as they are, and no mask."""
        return tokens, None

    def forward(self, embeddings: Tensor) -> Tensor:
        """Pool embeddings (B, N, D) to (B, D)."""
        query = embeddings[:, :1]
        pooled: Tensor = self.attention(query, embeddings, embeddings, need_weights=False)[0]
        return (pooled + query).squeeze(1)


# each head, given d, and the products that a set needs, given n and d
POOLS: dict[str, tuple[Callable[[int], Any], Callable[[int, int], int]]] = {
    "AvgPool": (lambda d: AvgPool(), lambda n, d: n * d),
    "MaxPool": (lambda d: MaxPool(), lambda n, d: n * d),
    "ClsToken": (ClsToken, lambda n, d: 0),
    "AdaPool": (lambda d: AdaPool(d, HEADS), lambda n, d: 2 * n * d * HEADS + 4 * d * d),
    "MultiheadAttention": (Projected, lambda n, d: 2 * n * d * d + 2 * n * d + 2 * d * d),
}
# the paper's costs, beside the head that is drawn above each
GUIDES: dict[str, tuple[str, str, Callable[[int, int], int]]] = {
    "AvgPool": ("O(n d)", "--", lambda n, d: n * d),
    "MultiheadAttention": ("O(n d + n d²)", ":", lambda n, d: n * d + n * d * d),
}


class Row(NamedTuple):
    """Products and seconds for a batch."""

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
    """Return the median seconds of each call; they take turns, so that other work on the machine hits all alike."""
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
    found = [[seconds(call, number) for call, number in zip(calls, numbers, strict=True)] for _ in range(repeats)]
    return [statistics.median(times) for times in zip(*found, strict=True)]


def make_calls(head: Any, encoder: nn.Module, tokens: Tensor) -> tuple[Call, Call]:
    """Return the forward pass, and forward and backward, of tokens (B, N, D) through the encoder and the head."""
    leaf = tokens.clone().requires_grad_()
    wanted = [leaf, *encoder.parameters(), *head.parameters()]

    def run(tokens: Tensor) -> Tensor:
        pooled: Tensor = head(encoder(head.extend(tokens)[0]))
        return pooled

    def forward() -> Tensor:
        with torch.inference_mode():
            return run(tokens)

    return forward, lambda: torch.autograd.grad(run(leaf).sum(), wanted)


def measure(n: int, d: int, rate: float, args: argparse.Namespace) -> list[Row]:
    """Return a row for each head at one size; `rate` is the machine's, in products a second."""
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
    """Return a line of the table, times in microseconds."""
    times = " | ".join(f"{1e6 * seconds:,.0f}" for seconds in row[4:])
    return f"| {row.pool} | {row.n} | {row.d} | {row.products / 1e6:.2f} | {times} |"


def plot(axes: Axes, rows: Sequence[Row], column: str, axis: str) -> None:
    """Draw one line a head over "n" or "d", and, for heads alone, the paper's slopes a bit below theirs."""
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
    """Draw forward and backward over n and over d, of the head alone and on the encoder, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 7.5), dpi=120, layout="constrained")
    panels = figure.subplots(2, 2, sharey="row")
    places = {"both": "head alone", "encoder_both": f"head on a {LAYERS}-layer encoder"}
    for row, (column, place) in zip(panels, places.items(), strict=True):
        row[0].set_ylabel("forward and backward, ms a batch")
        for axes, (axis, other) in zip(row, (("n", "d"), ("d", "n")), strict=True):
            plot(axes, [found for found in rows if getattr(found, other) == fixed[other]], column, axis)
            axes.set_title(f"{place}, {other} = {fixed[other]}")
    figure.suptitle(title, fontsize=10)
    lines = sorted(panels[0, 0].get_lines(), key=lambda line: line.get_label().startswith("O("))  # guides last
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), fontsize=9, frameon=False)
    write_png(path, figure)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a PNG; none is drawn if not given")
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
    about = library_versions()
    print(f"{about}\nbatch {args.batch}, {args.device}, {rate / 1e9:,.0f}e9 products/s; times in µs a batch\n")
    print("| head | n | d | products, millions | least | forward | and backward | on encoder: forward | and backward |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows: list[Row] = []
    for n, d in dict.fromkeys([*((n, args.fixed_d) for n in args.n), *((args.fixed_n, d) for d in args.d)]):
        rows += measure(n, d, rate, args)
        print(*map(show, rows[-len(POOLS) :]), sep="\n", flush=True)
    if args.out:
        title = f"batch {args.batch}, {args.device}, torch {about['torch']}, commit {about['commit']}"
        draw(args.out, rows, {"n": args.fixed_n, "d": args.fixed_d}, title)


if __name__ == "__main__":
    main()

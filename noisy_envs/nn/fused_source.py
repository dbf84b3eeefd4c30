"""The constants and the source of the fused kernels (`noisy_envs/nn/cuda/`), and the layout of the weights they read.

Nothing here needs a GPU. `noisy_envs.nn.fused` compiles and launches the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from noisy_envs.nn.distributions import Categorical, Gaussian
from noisy_envs.validation import check_choice

Pool = Literal["AdaPool", "AvgPool", "MaxPool", "ClsToken"]
POOLS: dict[Pool, str] = {
    "AdaPool": "ADA_POOL",
    "AvgPool": "AVG_POOL",
    "MaxPool": "MAX_POOL",
    "ClsToken": "CLS_TOKEN",
}
SOURCES = Path(__file__).parent / "cuda"
FILES = "layout.cuh", "warp.cuh", "encoder.cuh", "pooling.cuh", "heads.cuh", "kernels.cu"
WIDTHS, MAX_LAYERS, MAX_TOKENS, MAX_ACTIONS = (3, 6, 8), 6, 65, 8
MAX_TABLE_ROWS = 16  # numeric features and roles: the columns of a matrix fragment
H100_SHARED_MEMORY = 227 * 1024  # bytes of a block
# Measured on an H200. A round of w warps, which take a sample each, takes as long as w + 2 warps one after another;
# speeds are by the tokens of a lane, which share what is read from shared memory, but need registers and code.
ROW_SPEEDS = {1: 0.88, 2: 1.0, 3: 0.83}
WAITING_WARPS = 2
WARPS = 16, 12, 10, 8, 6, 4, 3, 2, 1  # of a block, which takes a whole multiprocessor
MAX_WARPS = {1: 16, 2: 16, 3: 10}  # by the tokens of a lane, as registers allow
HIDDEN_UNITS = 32  # of actor and critic: one in each lane of a warp
COEFFICIENTS = "clip_coef", "ent_coef", "vf_coef", "kl_coef", "dropout", "dual_clip"  # columns, (runs, 6)
PARTS = "policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac"  # columns, (runs, 5)
Only = Literal["GRADIENT", "FORWARD"]
Shapes = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Network:
    """All that the kernels are compiled for.

    Attributes:
        pool: the pooling head.
        num_tokens: N, without a class token.
        num_features: D, numbers of a token, with its role.
        num_roles: rows of the role embedding; 0 if the last feature is no role.
        role_dim: width of the role embedding; 0 without roles.
        embed_dim: H, width of an embedding, and the number of attention heads.
        feedforward_dim: width of the feed-forward networks.
        num_layers: layers of the encoder.
        query_index: index of the agent's own token.
        padding_feature: index of the feature that marks padding.
        padding: its value in padding; None if no token is padding.
        scale: factor of attention scores, in the encoder and in AdaPool.
        continuous: whether actions are numbers, of independent normal distributions, or one of several.
        num_actions: A.
        log_std_min: lower bound of the log standard deviations; not used by discrete actions.
        log_std_max: upper bound.
        tanh: whether the means of continuous actions are the hyperbolic tangents of their parameters.
        action_center: continuous action that a mean of 0 stands for.
        action_scale: distance of the action that a mean of 1 stands for.
        dual_clip: whether the objective of negative advantages is bounded below (Ye et al. 2020).
        dropout: whether numbers are dropped after each feed-forward network.
        query_vector: whether learned vectors are added to the query's token and to all others.
    """

    pool: Pool
    num_tokens: int
    num_features: int
    num_roles: int
    role_dim: int
    embed_dim: int
    feedforward_dim: int
    num_layers: int
    query_index: int
    padding_feature: int
    padding: float | None
    scale: float
    continuous: bool
    num_actions: int
    log_std_min: float
    log_std_max: float
    tanh: bool = False
    action_center: float = 0.0
    action_scale: float = 1.0
    dual_clip: bool = False
    dropout: bool = True
    query_vector: bool = False

    @property
    def encoder_tokens(self) -> int:
        """Tokens that the encoder reads."""
        return self.num_tokens + (self.pool == "ClsToken")

    @property
    def numbers(self) -> int:
        """Features of a token that are numbers."""
        return self.num_features - (self.num_roles > 0)

    @property
    def num_parameters(self) -> int:
        """Parameters of the action distribution."""
        return self.num_actions * (2 if self.continuous else 1)


@dataclass(frozen=True)
class Lanes:
    """How a warp is divided: each lane has `rows` tokens, each sample `lanes` lanes, each block `warps` warps."""

    rows: int
    lanes: int
    warps: int

    @property
    def samples(self) -> int:
        """Samples of a warp."""
        return 32 // self.lanes


def network_of(agent: Any, pool: Pool, *, dropout: bool, dual_clip: bool = False) -> Network:
    """Describe an agent of agents/ppo_*.py, whose pooling head is `pool`; see `unsupported` for what is allowed."""
    check_choice("pool", pool, tuple(POOLS))
    spec, encoder, distribution = agent.spec, agent.encoder, agent.distribution
    roles = agent.role.weight.shape if spec.roles else (0, 0)
    gaussian = isinstance(distribution, Gaussian)
    return Network(
        pool=pool,
        num_tokens=spec.num_tokens,
        num_features=spec.num_features,
        num_roles=roles[0],
        role_dim=roles[1],
        embed_dim=encoder.embed_dim,
        feedforward_dim=encoder.layers[0].feedforward[0].out_features,
        num_layers=len(encoder.layers),
        query_index=spec.query_index,
        padding_feature=spec.padding_feature % spec.num_features,
        padding=spec.padding if spec.padded else None,
        scale=encoder.scale,
        continuous=gaussian,
        num_actions=distribution.num_actions,
        log_std_min=distribution.log_std_min if gaussian else 0.0,
        log_std_max=distribution.log_std_max if gaussian else 0.0,
        tanh=gaussian and distribution.bounded,
        action_center=distribution.center if gaussian else 0.0,
        action_scale=distribution.scale if gaussian else 1.0,
        dual_clip=dual_clip,
        dropout=dropout,
        query_vector=agent.query_vector is not None,
    )


def unsupported(agent: Any, network: Network) -> str | None:
    """Return why the kernels do not compute this agent, or None."""
    encoder, distribution, width = agent.encoder, agent.distribution, network.embed_dim
    limits = [
        ("embed_dim", width, width in WIDTHS, f"one of {', '.join(map(str, WIDTHS))}"),
        ("num_heads", encoder.layers[0].num_heads, encoder.layers[0].num_heads == width, f"embed_dim={width}"),
        ("feedforward_dim", network.feedforward_dim, network.feedforward_dim == 4 * width, f"{4 * width}"),
        ("num_layers", network.num_layers, 1 <= network.num_layers <= MAX_LAYERS, f"1 to {MAX_LAYERS}"),
        ("mlp_dim", agent.actor[0].out_features, agent.actor[0].out_features == HIDDEN_UNITS, f"{HIDDEN_UNITS}"),
        ("tokens", network.encoder_tokens, 4 <= network.encoder_tokens <= MAX_TOKENS, f"4 to {MAX_TOKENS}"),
        ("features and roles", network.numbers + max(network.num_roles, 1), _fits_table(network), "2 to 16"),
        ("actions", network.num_actions, network.num_actions <= MAX_ACTIONS, f"at most {MAX_ACTIONS}"),
        ("distribution", type(distribution).__name__, isinstance(distribution, Gaussian | Categorical), "a known one"),
    ]
    for name, value, fits, expected in limits:
        if not fits:
            return f"{name}={value}: the kernel takes {expected}"
    if {str(p.dtype) for p in agent.parameters()} != {"torch.float32"}:
        return "weights: the kernel takes float32"
    try:
        weight_offsets(network, agent.named_parameters())
    except ValueError as error:
        return str(error)
    return None


def _fits_table(network: Network) -> bool:
    return network.numbers >= 1 and network.numbers + max(network.num_roles, 1) <= MAX_TABLE_ROWS


def choose_lanes(network: Network, samples: int, shared_memory: int = H100_SHARED_MEMORY) -> Lanes | None:
    """Choose how a warp is divided, by the time that it takes.

    Args:
        network: the network.
        samples: of a block.
        shared_memory: bytes of a block, at most.

    Returns:
        The choice, or None if not even one warp fits.
    """
    best, least = None, math.inf
    for rows, speed in ROW_SPEEDS.items():
        lanes = next((n for n in (1, 2, 4, 8, 16, 32) if n * rows >= network.encoder_tokens), None)
        if lanes is None:
            continue
        for warps in (n for n in WARPS if n <= MAX_WARPS[rows]):
            choice = Lanes(rows, lanes, warps)
            tasks = -(-samples // choice.samples)
            time = (tasks + WAITING_WARPS * -(-tasks // warps)) * rows / speed
            if time < least and memory_sizes(network, choice).shared_bytes <= shared_memory:
                best, least = choice, time
    return best


def expected_shapes(network: Network) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that the kernels read, by their names in the agent."""
    width, hidden, units = network.embed_dim, network.feedforward_dim, HIDDEN_UNITS
    shapes: dict[str, tuple[int, ...]] = {}
    if network.num_roles:
        shapes["role.weight"] = network.num_roles, network.role_dim
    shapes["project.0.weight"], shapes["project.0.bias"] = (width, network.numbers + network.role_dim), (width,)
    if network.query_vector:
        shapes["query_vector"] = 2, width
    for number in range(network.num_layers):
        layer = f"encoder.layers.{number}."
        for norm in ("norm_attention", "norm_feedforward"):
            shapes[f"{layer}{norm}.weight"] = shapes[f"{layer}{norm}.bias"] = (width,)
        shapes[f"{layer}query_key_value.weight"], shapes[f"{layer}output.weight"] = (3 * width, width), (width, width)
        shapes[f"{layer}feedforward.0.weight"], shapes[f"{layer}feedforward.0.bias"] = (hidden, width), (hidden,)
        shapes[f"{layer}feedforward.2.weight"], shapes[f"{layer}feedforward.2.bias"] = (width, hidden), (width,)
    for head, outputs in (("actor", network.num_parameters), ("critic", 1)):
        sizes = width, units, units, outputs
        for number in range(3):
            shapes[f"{head}.{2 * number}.weight"] = sizes[number + 1], sizes[number]
            shapes[f"{head}.{2 * number}.bias"] = (sizes[number + 1],)
    if network.pool == "AdaPool":
        shapes |= {f"pool.{name}.weight": (width, width) for name in ("query", "key", "value", "output")}
    if network.pool == "ClsToken":
        shapes["pool.token"] = (width,)
    return shapes


def weight_offsets(network: Network, named: Iterable[tuple[str, Any]]) -> dict[str, int]:
    """Return where each weight begins in the flat vector of all weights, in the order of `named_parameters`.

    Args:
        network: what the kernels are compiled for.
        named: names and weights, or their shapes.

    Raises:
        ValueError: a weight is missing, unknown, of another shape, or not where the kernels look for it.
    """
    shapes = {name: tuple(getattr(weight, "shape", weight)) for name, weight in named}
    expected = expected_shapes(network)
    for name in sorted(shapes.keys() | expected.keys()):
        if shapes.get(name) != expected.get(name):
            raise ValueError(f"{name}: the kernel takes the shape {expected.get(name)}, got {shapes.get(name)}")
    offsets, end = {}, 0
    for name, shape in shapes.items():
        offsets[name], end = end, end + math.prod(shape)
    step = _layer_step(network, offsets)
    for name, offset in offsets.items():
        if name.startswith("encoder.layers."):
            number, rest = name.removeprefix("encoder.layers.").split(".", 1)
            if offset != offsets[f"encoder.layers.0.{rest}"] + int(number) * step:
                raise ValueError(f"{name}: the kernel takes equal layers, one after another")
    layers = [f"{number}.{kind}" for number in (0, 2, 4) for kind in ("weight", "bias")]
    together = [[f"{head}.{layer}" for layer in layers] for head in ("actor", "critic")]
    if network.pool == "AdaPool":
        together.append([f"pool.{name}.weight" for name in ("query", "key", "value")])
    names = list(offsets)
    for group in together:
        first = names.index(group[0])
        if names[first : first + len(group)] != group:
            raise ValueError(f"{group[0]}: the kernel takes {', '.join(group)}, one after another")
    return offsets


def _layer_step(network: Network, offsets: dict[str, int]) -> int:
    first = "norm_attention.weight"
    if network.num_layers == 1:
        return 0
    return offsets[f"encoder.layers.1.{first}"] - offsets[f"encoder.layers.0.{first}"]


def num_weights(network: Network) -> int:
    """Return the number of all weights."""
    return sum(math.prod(shape) for shape in expected_shapes(network).values())


WEIGHT_CONSTANTS = {  # AT_... in the source: the weight's name in the agent
    "ROLE": "role.weight",
    "PROJECT": "project.0.weight",
    "PROJECT_BIAS": "project.0.bias",
    "QUERY_VECTOR": "query_vector",
    "NORM_ATTENTION_WEIGHT": "encoder.layers.0.norm_attention.weight",
    "NORM_ATTENTION_BIAS": "encoder.layers.0.norm_attention.bias",
    "NORM_FEEDFORWARD_WEIGHT": "encoder.layers.0.norm_feedforward.weight",
    "NORM_FEEDFORWARD_BIAS": "encoder.layers.0.norm_feedforward.bias",
    "QUERY_KEY_VALUE": "encoder.layers.0.query_key_value.weight",
    "OUTPUT": "encoder.layers.0.output.weight",
    "FIRST": "encoder.layers.0.feedforward.0.weight",
    "FIRST_BIAS": "encoder.layers.0.feedforward.0.bias",
    "SECOND": "encoder.layers.0.feedforward.2.weight",
    "SECOND_BIAS": "encoder.layers.0.feedforward.2.bias",
    "POOL_QUERY": "pool.query.weight",
    "POOL_OUTPUT": "pool.output.weight",
    "CLASS_TOKEN": "pool.token",
    "ACTOR": "actor.0.weight",
    "CRITIC": "critic.0.weight",
}


@dataclass(frozen=True)
class MemorySizes:
    """Memory of the kernels; see `cuda/layout.cuh`, which has the same sums and checks these.

    Attributes:
        shared_bytes: shared memory of a block.
        scratch_floats: scratch in device memory of a warp.
        sums: numbers that a block adds up in device memory.
    """

    shared_bytes: int
    scratch_floats: int
    sums: int


def memory_sizes(network: Network, lanes: Lanes) -> MemorySizes:
    """Return the memory that the kernels need."""
    width, hidden, tokens, units = network.embed_dim, network.feedforward_dim, network.encoder_tokens, HIDDEN_UNITS
    pad, table = _up(width, 4), network.numbers + max(network.num_roles, 1)
    layer = (4 * width + 2 * hidden + 5) * pad + _up(hidden, 4)
    pooling = {"AdaPool": 4 * width * pad, "ClsToken": pad}.get(network.pool, 0)
    heads = sum((width + units + n) * _row_step(units) + 2 * units + _up(n, 4) for n in (network.num_parameters, 1))
    weights = network.num_layers * layer + pooling + table * pad + (2 * pad if network.query_vector else 0) + heads + 12
    rows, head_samples = 32 * lanes.rows, min(lanes.samples, 4)
    padded = network.padding is not None
    stored = _up(tokens, 1 if not padded else 4 if lanes.rows * lanes.lanes % 4 == 0 else 2)
    pairs = max(rows * _row_step(16), lanes.samples * (stored * _row_step(20) + 4))  # queries are larger than keys
    products = 2 * rows * _row_step(8) + 4 + pairs
    head = lanes.samples * 2 * pad + head_samples * (3 * units + 2 * network.num_parameters)
    warp = max(products, _up(head, 4)) + (network.num_layers + (2 if pooling else 0)) * lanes.samples * 2 * pad
    warp += network.num_layers * 32 if network.dropout else 0
    saved_once = {"ClsToken": 3, "AdaPool": 2}.get(network.pool, 1)
    part = num_weights(network) + len(PARTS)
    return MemorySizes(
        shared_bytes=4 * (weights + lanes.warps * warp),
        scratch_floats=(network.num_layers * 5 + saved_once) * rows * pad,
        sums=_up(part + part % 2 + table * width, 32),
    )


def _up(n: int, step: int) -> int:
    """Round up to a multiple."""
    return -(-n // step) * step


def _row_step(n: int) -> int:
    return n + (12 - n % 8) % 8


def constants(network: Network, lanes: Lanes, offsets: dict[str, int]) -> str:
    """Return the source's first lines: the sizes, and where weights lie (`weight_offsets`)."""
    sizes = memory_sizes(network, lanes)
    integers = {
        "INPUTS": network.num_tokens,
        "FEATURES": network.numbers,
        "ROLES": network.num_roles,
        "ROLE_DIM": network.role_dim,
        "WIDTH": network.embed_dim,
        "LAYERS": network.num_layers,
        "HIDDEN": network.feedforward_dim,
        "QUERY_INDEX": network.query_index,
        "PADDING_FEATURE": network.padding_feature,
        "ACTIONS": network.num_actions,
        "ROWS": lanes.rows,
        "LANES": lanes.lanes,
        "WARPS": lanes.warps,
        "PYTHON_SHARED_BYTES": sizes.shared_bytes,
        "PYTHON_SCRATCH_FLOATS": sizes.scratch_floats,
        "PYTHON_SUMS": sizes.sums,
        "WEIGHTS": num_weights(network),
        "LAYER_STEP": _layer_step(network, offsets),
    } | {f"AT_{name}": offsets.get(weight, 0) for name, weight in WEIGHT_CONSTANTS.items()}
    flags = {
        "PADDED": network.padding is not None,
        "CONTINUOUS": network.continuous,
        "TANH": network.tanh,
        "DUAL_CLIP": network.dual_clip,
        "DROPOUT": network.dropout,
        "QUERY_VECTOR": network.query_vector,
    }
    floats = {
        "PADDING": network.padding or 0.0,
        "SCORE_SCALE": network.scale,
        "LOG_STD_MIN": network.log_std_min,
        "LOG_STD_MAX": network.log_std_max,
        "ACTION_CENTER": network.action_center,
        "ACTION_SCALE": network.action_scale,
        "LOG_ACTION_SCALE": math.log(network.action_scale),
    }
    lines = [f"constexpr int {name} = {value};" for name, value in integers.items()]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
    lines += [f"constexpr float {name} = {float(value)!r}f;" for name, value in floats.items()]
    return "\n".join([*lines, f"#define POOL {POOLS[network.pool]}", ""])


@cache
def _file(name: str) -> str:
    return (SOURCES / name).read_text(encoding="utf-8")


def source(network: Network, lanes: Lanes, offsets: dict[str, int], only: Only, machine: str | None = None) -> str:
    """Return the source of a kernel.

    Args:
        network: what it is compiled for.
        lanes: how warps are divided.
        offsets: where the weights lie.
        only: the kernel.
        machine: text that stands in for gpu.cuh, which the tests emulate.
    """
    texts = [f'#line 1 "{name}"\n{_file(name)}' for name in FILES]
    first = f'#line 1 "gpu.cuh"\n{_file("gpu.cuh")}' if machine is None else machine
    return "\n".join([f"#define ONLY_{only}", constants(network, lanes, offsets), first, *texts])

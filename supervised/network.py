"""The transformer of the supervised experiments: an encoder, one of the pooling heads, an output.

`B` sets, `N` tokens, `D` features of a token, `H` width of an embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from noisy_envs.nn.attention import COMPILE_OPTIONS, TRITON_AVAILABLE, narrow_attention
from noisy_envs.nn.pooling import AdaPool, AvgPool, ClsToken, MaxPool
from noisy_envs.nn.small_layers import LayerNorm, Linear
from noisy_envs.validation import check_number

NARROW = 2  # widest heads for which compiled loops are faster than the library's attention
LARGEST = 2**16  # of a network's sizes
SIZES = 64  # of batches that are compiled
Scale = Literal["head", "width"]


@dataclass(frozen=True)
class Shape:
    """Sizes of an encoder."""

    layers: int
    width: int
    heads: int
    feedforward: int
    dropout: float = 0.0  # after the feed-forward
    attention_dropout: float = 0.0
    attention_scale: Scale = "width"  # 1/sqrt of a head's width, or of the whole as in the authors' code now
    init_std: float = 0.02  # of all weights at first (appendix "Supervised KNN Centroid")
    final_norm: bool = False

    def scale(self) -> float:
        """Return the factor of the attention's scores."""
        return 1 / math.sqrt(self.width if self.attention_scale == "width" else self.width / self.heads)

    def output_std(self) -> float:
        """Return the initial deviation of the output projections of attention and pool.

        So the authors' code states it; as it runs, it scales nothing down.
        """
        return self.init_std / math.sqrt(2 * self.layers)

    def check(self) -> None:
        """Raise ValueError, naming the number and what is allowed."""
        for name in ("layers", "width", "heads", "feedforward"):
            if not 1 <= getattr(self, name) <= LARGEST:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1, and at most {LARGEST}")
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads}: must divide width={self.width}")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be from 0 to below 1")
        check_number("init_std", self.init_std, above=0)


class Block(nn.Module):
    """A layer that normalises first: attention without biases, then a feed-forward with GELU."""

    def __init__(self, shape: Shape) -> None:
        """Make the layers, whose weights `Network` draws."""
        super().__init__()
        self.heads, self.scale, self.attention_dropout = shape.heads, shape.scale(), shape.attention_dropout
        self.head_width = shape.width // shape.heads
        self.norm, self.ff_norm = LayerNorm(shape.width), LayerNorm(shape.width)
        self.query_key_value = Linear(shape.width, 3 * shape.width, bias=False)
        self.output = Linear(shape.width, shape.width, bias=False)
        self.ff = Linear(shape.width, shape.feedforward)
        self.ff_output = Linear(shape.feedforward, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map embeddings (B, N, H) to embeddings (B, N, H)."""
        x = x + self.output(self.attend(self.norm(x)))
        forwarded: Tensor = self.dropout(self.ff_output(F.gelu(self.ff(self.ff_norm(x)))))
        return x + forwarded

    def narrow(self, x: Tensor) -> bool:
        """Tell whether our own attention is faster than the library's."""
        return self.head_width <= NARROW and (torch.compiler.is_compiling() or (TRITON_AVAILABLE and x.is_cuda))

    def attend(self, x: Tensor) -> Tensor:
        """Return the heads' outputs side by side (B, N, H)."""
        dropout = self.attention_dropout if self.training else 0.0
        if self.narrow(x) and not dropout:
            return narrow_attention(x, self.query_key_value.weight, scale=self.scale, width=self.head_width)
        heads = self.query_key_value(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads  # each (B, heads, N, H / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=self.scale)
        return mixed.transpose(1, 2).flatten(2)


class Network(nn.Module):
    """Embedding, encoder, pooling head and output.

    The global random state is neither read nor changed: all weights but the head's are drawn first, so that networks
    that differ in the head alone start alike, and the head's from what follows in the same generator.
    """

    def __init__(
        self,
        shape: Shape,
        embed: nn.Module,
        make_head: Callable[[Shape, torch.Generator], Any],
        output: nn.Module,
        seed: int,
    ) -> None:
        """Take an embedding of inputs to (B, N, H), a maker of the head, and an output of (B, H)."""
        super().__init__()
        shape.check()
        with torch.random.fork_rng(devices=[]):  # torch's layers draw from the global state, before ours replace it
            self.embed = embed
            self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
            self.norm = nn.LayerNorm(shape.width) if shape.final_norm else nn.Identity()
            self.output = output
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                of_attention = name.startswith("blocks") and name.endswith(".output.weight")
                nn.init.normal_(weight, 0.0, shape.output_std() if of_attention else shape.init_std, generator)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
        self.head = make_head(shape, generator)

    def compile_blocks(self, tune: bool = False) -> None:
        """Compile the layers, once for all of them, as they are alike.

        On a GPU our kernels are compiled anew for each size of a batch: the last ones of training, validation and test
        differ, and a class token makes all of them longer. Beyond torch's limit of eight layers would run uncompiled.
        """
        torch._dynamo.config.cache_size_limit = max(SIZES, torch._dynamo.config.cache_size_limit)
        for block in self.blocks:
            block.compile(options={**COMPILE_OPTIONS, "max_autotune": tune, "coordinate_descent_tuning": tune})

    def encode(self, inputs: Tensor) -> Tensor:
        """Map inputs to what the head pools, embeddings (B, N, H); ClsToken makes N one larger."""
        tokens, _ = self.head.extend(self.embed(inputs))
        embeddings: Tensor = self.norm(self.blocks(tokens))
        return embeddings

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs to outputs (B, ...)."""
        output: Tensor = self.output(self.head(self.encode(inputs)))
        return output


def ada(query: int | tuple[int, ...] | str) -> Callable[[Shape, torch.Generator], AdaPool]:
    """Return a maker of AdaPool with a query, see `AdaPool`."""

    def make(shape: Shape, generator: torch.Generator) -> AdaPool:
        return AdaPool(
            shape.width, shape.heads, query,
            scale=shape.scale(), init_std=shape.init_std, output_std=shape.output_std(), generator=generator,
        )  # fmt: skip

    return make


HEADS: dict[str, Callable[[Shape, torch.Generator], Any]] = {
    "avgpool": lambda shape, generator: AvgPool(),
    "maxpool": lambda shape, generator: MaxPool(),
    "clstoken": lambda shape, generator: ClsToken(shape.width, shape.init_std, generator),
    "adapool": ada(0),
}


class SetEmbedding(nn.Module):
    """Embed sets (B, N, D), of which the first vector is marked by a learned one; projected only if D is not H."""

    def __init__(self, num_features: int, width: int) -> None:
        """Make the layers."""
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            self.project = nn.Identity() if num_features == width else nn.Linear(num_features, width)
            self.mark = nn.Embedding(1, width)

    def forward(self, sets: Tensor) -> Tensor:
        """Return embeddings (B, N, H)."""
        x: Tensor = self.project(sets)
        return x + F.pad(self.mark.weight, (0, 0, 0, x.shape[1] - 1))


def set_network(shape: Shape, num_features: int, pool: str, seed: int) -> Network:
    """Make a network of sets (B, N, D) to vectors (B, D); the pool itself is the output where D is H."""
    with torch.random.fork_rng(devices=[]):
        output = nn.Identity() if num_features == shape.width else nn.Linear(shape.width, num_features)
    return Network(shape, SetEmbedding(num_features, shape.width), HEADS[pool], output, seed)

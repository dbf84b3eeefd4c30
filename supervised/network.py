"""The transformer of the supervised experiments: an encoder, a pooling head and an output layer.

Shapes: `B` sets, `N` tokens, `D` features of a token, `H` size of an embedding.
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
from noisy_envs.validation import check_count, check_number

MAX_NARROW_HEAD = 2  # size of a head up to which compiled loops are faster than torch's attention
MAX_COMPILED_SIZES = 64  # batch sizes for which the layers are compiled
AttentionScale = Literal["head", "embed"]


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of an encoder."""

    num_layers: int
    embed_dim: int
    num_heads: int
    feedforward_dim: int
    dropout: float = 0.0  # after the feed-forward
    attention_dropout: float = 0.0
    attention_scale: AttentionScale = "embed"  # 1/sqrt of the size of a head, or of the embedding as the authors' code
    init_std: float = 0.02  # of the initial weights (appendix "Supervised KNN Centroid")
    final_norm: bool = False

    def scale(self) -> float:
        """Return the factor of the attention scores."""
        head_dim = self.embed_dim / self.num_heads
        return 1 / math.sqrt(self.embed_dim if self.attention_scale == "embed" else head_dim)

    def output_std(self) -> float:
        """Return the initial standard deviation of the output projections of attention and pooling head.

        The authors' code states it so; when it runs, it scales nothing down.
        """
        return self.init_std / math.sqrt(2 * self.num_layers)

    def check(self) -> None:
        """Raise ValueError, naming the setting, its value and what is allowed."""
        for name in ("num_layers", "embed_dim", "num_heads", "feedforward_dim"):
            check_count(name, getattr(self, name), 1, may_be_range=False)
        if self.embed_dim % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads}: expected a divisor of embed_dim={self.embed_dim}")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected a probability from 0 to below 1")
        check_number("init_std", self.init_std, above=0)


class Block(nn.Module):
    """A pre-norm layer: attention without biases, then a feed-forward with GELU."""

    def __init__(self, config: EncoderConfig) -> None:
        """Make the layers; `Network` draws their weights."""
        super().__init__()
        embed_dim = config.embed_dim
        self.heads, self.scale, self.attention_dropout = config.num_heads, config.scale(), config.attention_dropout
        self.head_dim = embed_dim // config.num_heads
        self.norm, self.ff_norm = LayerNorm(embed_dim), LayerNorm(embed_dim)
        self.query_key_value = Linear(embed_dim, 3 * embed_dim, bias=False)
        self.output = Linear(embed_dim, embed_dim, bias=False)
        self.ff = Linear(embed_dim, config.feedforward_dim)
        self.ff_output = Linear(config.feedforward_dim, embed_dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map embeddings (B, N, H) to embeddings (B, N, H)."""
        x = x + self.output(self.attend(self.norm(x)))
        forwarded: Tensor = self.dropout(self.ff_output(F.gelu(self.ff(self.ff_norm(x)))))
        return x + forwarded

    def narrow(self, x: Tensor) -> bool:
        """Return whether this package's attention is faster than torch's."""
        return self.head_dim <= MAX_NARROW_HEAD and (torch.compiler.is_compiling() or (TRITON_AVAILABLE and x.is_cuda))

    def attend(self, x: Tensor) -> Tensor:
        """Return the heads' outputs side by side (B, N, H)."""
        dropout = self.attention_dropout if self.training else 0.0
        if self.narrow(x) and not dropout:
            return narrow_attention(x, self.query_key_value.weight, scale=self.scale, width=self.head_dim)
        heads = self.query_key_value(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads  # each (B, heads, N, H / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=self.scale)
        return mixed.transpose(1, 2).flatten(2)


MakeHead = Callable[[EncoderConfig, torch.Generator], Any]


class Network(nn.Module):
    """Embedding, encoder, pooling head and output layer.

    All weights but the head's are drawn first, and the head's next, from one generator: networks that differ only in
    the head start with the same encoder. The global random state is neither read nor changed.
    """

    def __init__(
        self, config: EncoderConfig, embed: nn.Module, make_head: MakeHead, output: nn.Module, seed: int
    ) -> None:
        """Take an embedding of inputs to (B, N, H), a maker of the head, and an output layer of (B, H)."""
        super().__init__()
        config.check()
        with torch.random.fork_rng(devices=[]):  # torch's layers draw weights from the global state, replaced below
            self.embed = embed
            self.blocks = nn.Sequential(*(Block(config) for _ in range(config.num_layers)))
            self.norm = nn.LayerNorm(config.embed_dim) if config.final_norm else nn.Identity()
            self.output = output
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                of_attention = name.startswith("blocks") and name.endswith(".output.weight")
                nn.init.normal_(weight, 0.0, config.output_std() if of_attention else config.init_std, generator)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
        self.head = make_head(config, generator)

    def compile_blocks(self, max_autotune: bool = False) -> None:
        """Compile the layers; they are alike, so one compilation serves all.

        On a GPU the kernels are compiled for each batch size: the last batches of training, validation and test differ,
        and a class token adds one token to each. Beyond torch's limit of eight sizes the layers would run uncompiled.
        """
        torch._dynamo.config.cache_size_limit = max(MAX_COMPILED_SIZES, torch._dynamo.config.cache_size_limit)
        options = {**COMPILE_OPTIONS, "max_autotune": max_autotune, "coordinate_descent_tuning": max_autotune}
        for block in self.blocks:
            block.compile(options=options)

    def encode(self, inputs: Tensor) -> Tensor:
        """Map inputs to the embeddings (B, N, H) that the head pools; ClsToken adds one token to N."""
        tokens, _ = self.head.extend(self.embed(inputs))
        embeddings: Tensor = self.norm(self.blocks(tokens))
        return embeddings

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs to outputs (B, ...)."""
        output: Tensor = self.output(self.head(self.encode(inputs)))
        return output


def adapool(query: int | tuple[int, ...] | str) -> MakeHead:
    """Return a maker of AdaPool with a query, see `AdaPool`."""

    def make(config: EncoderConfig, generator: torch.Generator) -> AdaPool:
        return AdaPool(
            config.embed_dim, config.num_heads, query,
            scale=config.scale(), init_std=config.init_std, output_std=config.output_std(), generator=generator,
        )  # fmt: skip

    return make


POOLING: dict[str, MakeHead] = {
    "avgpool": lambda config, generator: AvgPool(),
    "maxpool": lambda config, generator: MaxPool(),
    "clstoken": lambda config, generator: ClsToken(config.embed_dim, config.init_std, generator),
    "adapool": adapool(0),
}


class SetEmbedding(nn.Module):
    """Embed sets (B, N, D), with a learned mark on the first vector; a projection only if D is not H."""

    def __init__(self, num_features: int, embed_dim: int) -> None:
        """Make the layers."""
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            self.project = nn.Identity() if num_features == embed_dim else nn.Linear(num_features, embed_dim)
            self.mark = nn.Embedding(1, embed_dim)

    def forward(self, sets: Tensor) -> Tensor:
        """Return embeddings (B, N, H)."""
        x: Tensor = self.project(sets)
        return x + F.pad(self.mark.weight, (0, 0, 0, x.shape[1] - 1))


def set_network(config: EncoderConfig, num_features: int, pooling: str, seed: int) -> Network:
    """Make a network of sets (B, N, D) to vectors (B, D); it has an output layer only if D is not H."""
    with torch.random.fork_rng(devices=[]):
        same = num_features == config.embed_dim
        output = nn.Identity() if same else nn.Linear(config.embed_dim, num_features)
    return Network(config, SetEmbedding(num_features, config.embed_dim), POOLING[pooling], output, seed)

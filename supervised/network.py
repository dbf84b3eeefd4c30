"""The transformer of the supervised experiments: an encoder, a pooling head and an output layer.

Shapes: `B` sets, `N` tokens, `D` features of a token, `H` size of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from noisy_envs.nn.attention import COMPILE_OPTIONS
from noisy_envs.nn.pooling import AdaPool, AvgPool, ClsToken, MaxPool
from noisy_envs.nn.transformer import AttentionScale, TransformerEncoder, init_weights, residual_std, score_scale
from noisy_envs.validation import check_count, check_number

MAX_COMPILED_SIZES = 64  # batch sizes for which the layers are compiled
ClassTokenInit = Literal["normal", "uniform"]


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
        return score_scale(self.embed_dim, self.num_heads, self.attention_scale)

    def output_std(self) -> float:
        """Return the initial standard deviation of the output projections of attention and pooling head.

        The authors' code states it so; when it runs, it scales nothing down.
        """
        return residual_std(self.init_std, self.num_layers)

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


MakeHead = Callable[[EncoderConfig, torch.Generator], Any]


class Network(nn.Module):
    """Embedding, encoder, pooling head and output layer.

    All weights but the head's are drawn first, and the head's next, from one generator: networks that differ only in
    the head start with the same encoder. The global random state is neither read nor changed.
    """

    def __init__(
        self, config: EncoderConfig, embed: nn.Module, make_head: MakeHead, readout: nn.Module, seed: int
    ) -> None:
        """Take an embedding of inputs to (B, N, H), a maker of the head, and an output layer of (B, H)."""
        super().__init__()
        config.check()
        with torch.random.fork_rng(devices=[]):  # torch's layers draw weights from the global state, replaced below
            self.embed = embed
            self.encoder = TransformerEncoder(
                config.embed_dim,
                config.num_layers,
                config.num_heads,
                config.feedforward_dim,
                attention_scale=config.attention_scale,
                dropout=config.dropout,
                attention_dropout=config.attention_dropout,
            )
            self.norm = nn.LayerNorm(config.embed_dim) if config.final_norm else nn.Identity()
            self.readout = readout
        generator = torch.Generator().manual_seed(seed)
        init_weights(self, config.init_std, config.num_layers, generator)
        self.head = make_head(config, generator)

    def compile_layers(self, max_autotune: bool = False) -> None:
        """Compile the layers; they are alike, so one compilation serves all.

        On a GPU the kernels are compiled for each batch size: the last batches of training, validation and test differ,
        and a class token adds one token to each. Beyond torch's limit of eight sizes the layers would run uncompiled.
        """
        torch._dynamo.config.cache_size_limit = max(MAX_COMPILED_SIZES, torch._dynamo.config.cache_size_limit)
        options = {**COMPILE_OPTIONS, "max_autotune": max_autotune, "coordinate_descent_tuning": max_autotune}
        for layer in self.encoder.layers:
            layer.compile(options=options)

    def tokens(self, inputs: Tensor) -> Tensor:
        """Map inputs to the encoder's input (B, N, H); ClsToken adds one token to N."""
        tokens: Tensor = self.head.extend(self.embed(inputs))[0]
        return tokens

    def encode(self, inputs: Tensor) -> Tensor:
        """Map inputs to the embeddings (B, N, H) that the head pools."""
        embeddings: Tensor = self.norm(self.encoder(self.tokens(inputs)))
        return embeddings

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs to outputs (B, ...)."""
        output: Tensor = self.readout(self.head(self.encode(inputs)))
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


def uniform_class_token(config: EncoderConfig, generator: torch.Generator) -> ClsToken:
    """Make ClsToken with a token drawn uniformly between 0 and 1, as in the authors' code."""
    head = ClsToken(config.embed_dim, config.init_std, generator)
    nn.init.uniform_(head.token, generator=generator)
    return head


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
        return self.add_mark(self.project(sets))

    def add_mark(self, tokens: Tensor) -> Tensor:
        """Add the mark to the first of tokens (B, N, H)."""
        return tokens + F.pad(self.mark.weight, (0, 0, 0, tokens.shape[1] - 1))


class MarkedClassToken(Network):
    """A network of sets that puts the class token first and then marks the first token, as the authors' code does.

    The class token has the mark, so the network cannot tell the target from the other vectors.
    """

    embed: SetEmbedding

    def tokens(self, inputs: Tensor) -> Tensor:
        """Map sets (B, N, D) to the encoder's input (B, N + 1, H)."""
        tokens: Tensor = self.embed.add_mark(self.head.extend(self.embed.project(inputs))[0])
        return tokens


def set_network(
    config: EncoderConfig,
    num_features: int,
    pooling: str,
    seed: int,
    mark_class_token: bool = False,
    class_token_init: ClassTokenInit = "normal",
) -> Network:
    """Make a network of sets (B, N, D) to vectors (B, D); it has an output layer only if D is not H.

    The last two arguments affect ClsToken alone.
    """
    with torch.random.fork_rng(devices=[]):
        same = num_features == config.embed_dim
        output = nn.Identity() if same else nn.Linear(config.embed_dim, num_features)
    kind = MarkedClassToken if mark_class_token else Network
    uniform = (pooling, class_token_init) == ("clstoken", "uniform")
    make_head = uniform_class_token if uniform else POOLING[pooling]
    return kind(config, SetEmbedding(num_features, config.embed_dim), make_head, output, seed)

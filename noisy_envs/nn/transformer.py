"""The transformer encoder of the agents and of the supervised experiments, and how weights are initialised.

Shapes: `B` sets, `N` tokens, `H` width of an embedding (`embed_dim`).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from noisy_envs.nn.attention import TRITON_AVAILABLE, narrow_attention
from noisy_envs.nn.dropout_hash import hashed_masks
from noisy_envs.nn.small_layers import LayerNorm, Linear

MAX_NARROW_WIDTH = 2  # of a head, up to which `narrow_attention` is faster than torch's attention
AttentionScale = Literal["head", "embed"]


class EncoderLayer(nn.Module):
    """A pre-norm layer: self-attention without biases, then a feed-forward network with GELU, both residual."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        feedforward_dim: int,
        scale: float,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        tokens_first: bool = False,
    ) -> None:
        """Make the layer; `init_weights` draws its weights. See `TransformerEncoder` for the arguments."""
        super().__init__()
        self.num_heads, self.head_width, self.scale = num_heads, embed_dim // num_heads, scale
        self.dropout, self.attention_dropout = dropout, attention_dropout
        self.narrow = self.head_width <= MAX_NARROW_WIDTH
        self.token_axis = 0 if tokens_first else 1
        self.norm_attention, self.norm_feedforward = LayerNorm(embed_dim), LayerNorm(embed_dim)
        self.query_key_value = Linear(embed_dim, 3 * embed_dim, bias=False)
        self.output = Linear(embed_dim, embed_dim, bias=False)
        self.feedforward = nn.Sequential(
            Linear(embed_dim, feedforward_dim), nn.GELU(), Linear(feedforward_dim, embed_dim)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None, dropout_factor: Tensor | None = None) -> Tensor:
        """Map embeddings (B, N, H) to (B, N, H), or (N, B, H) to (N, B, H) with `tokens_first`.

        Args:
            x: embeddings.
            mask: bool (B, N), or (N, B); only tokens where it is True are attended to.
            dropout_factor: as x: 0 where dropout drops a number, else 1 / (1 - dropout). Without it dropout acts in
                training mode.
        """
        x = x + self.output(self._attend(self.norm_attention(x), mask))
        change: Tensor = self.feedforward(self.norm_feedforward(x))
        if dropout_factor is not None:
            return x + change * dropout_factor
        return x + F.dropout(change, self.dropout, self.training)

    def _attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the outputs of the heads side by side, as x."""
        dropout = self.attention_dropout if self.training else 0.0
        # Narrow heads waste the matrix units that torch's kernels use; eager loops on a CPU would store all scores.
        if self.narrow and not dropout and (torch.compiler.is_compiling() or (TRITON_AVAILABLE and x.is_cuda)):
            weight = self.query_key_value.weight
            return narrow_attention(x, weight, mask, self.scale, self.token_axis, self.head_width)
        query, key, value = self._project(x)
        allowed = None if mask is None else mask.movedim(self.token_axis, 1)[:, None, None]
        mixed = F.scaled_dot_product_attention(query, key, value, allowed, dropout, scale=self.scale)
        return mixed.movedim(2, self.token_axis).flatten(2)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (B, heads, N, H / heads) of normalised embeddings."""
        heads, axis = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1)), self.token_axis
        query, key, value = heads.permute(2, 1 - axis, 3, axis, 4)
        return query, key, value

    def attention_weights(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the attention weights (B, heads, N, N) of embeddings."""
        query, key, _ = self._project(self.norm_attention(x))
        scores = query @ key.mT * self.scale
        if mask is not None:
            scores = scores.masked_fill(~mask.movedim(self.token_axis, 1)[:, None, None], -math.inf)
        return scores.softmax(-1)


class TransformerEncoder(nn.Module):
    """Pre-norm transformer layers over sets of tokens.

    Args:
        embed_dim: H, a multiple of num_heads.
        num_layers: number of layers.
        num_heads: attention heads in each layer.
        feedforward_dim: width of the feed-forward networks.
        attention_scale: scores are divided by the root of the "head" width, or of the "embed" width as in the
            authors' code since February 2025.
        dropout: probability after each feed-forward network.
        attention_dropout: probability of dropping an attention weight, in training mode.
        tokens_first: compute on (N, B, H) inside, if heads are narrow: compiled loops on a CPU then read the numbers
            of neighbouring sets from neighbouring places.

    Attributes:
        hash_dropout: whether `dropout_masks` draws keys on a CPU too.
    """

    hash_dropout = False

    def __init__(
        self,
        embed_dim: int,
        num_layers: int,
        num_heads: int,
        feedforward_dim: int,
        *,
        attention_scale: AttentionScale = "head",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        tokens_first: bool = False,
    ) -> None:
        """Make the layers; `init_weights` draws their weights."""
        super().__init__()
        self.embed_dim, self.dropout = embed_dim, dropout
        self.tokens_first = tokens_first and embed_dim // num_heads <= MAX_NARROW_WIDTH
        self.scale = score_scale(embed_dim, num_heads, attention_scale)
        sizes = embed_dim, num_heads, feedforward_dim, self.scale, dropout, attention_dropout, self.tokens_first
        self.layers = nn.ModuleList(EncoderLayer(*sizes) for _ in range(num_layers))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, keep: Tensor | None = None, dropout: float | Tensor = 0.0
    ) -> Tensor:
        """Encode tokens (B, N, H) to embeddings (B, N, H).

        Args:
            x: tokens.
            mask: bool (B, N), False for padding; None if there is none.
            keep: which numbers dropout keeps, see `dropout_masks`. Without it dropout acts in training mode.
            dropout: the probability with which `keep` was drawn.
        """
        if keep is not None and keep.dtype == torch.int64:
            keep = hashed_masks(keep, (len(self.layers), *x.shape), dropout)
        if not self.tokens_first:
            return self._layers(x, mask, keep, dropout)
        mask, keep = None if mask is None else mask.mT, None if keep is None else keep.transpose(1, 2)
        return self._layers(x.transpose(0, 1).contiguous(), mask, keep, dropout).transpose(0, 1)

    def _layers(
        self,
        x: Tensor,
        mask: Tensor | None,
        keep: Tensor | None,
        dropout: float | Tensor = 0.0,
        stop: int | None = None,
    ) -> Tensor:
        for number, layer in enumerate(self.layers[:stop]):
            x = layer(x, mask, None if keep is None else keep[number].to(x.dtype) / (1 - dropout))
        return x

    def with_attention(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return embeddings (B, N, H) and the last layer's attention weights (B, heads, N, N) for tokens (B, N, H)."""
        if self.tokens_first:
            x, mask = x.transpose(0, 1), None if mask is None else mask.mT
        last: EncoderLayer = self.layers[-1]  # type: ignore[assignment]
        x = self._layers(x, mask, None, stop=-1)
        embeddings: Tensor = last(x, mask)
        return embeddings.transpose(0, 1) if self.tokens_first else embeddings, last.attention_weights(x, mask)

    def dropout_masks(self, num_sets: int, num_tokens: int, generator: torch.Generator) -> Tensor:
        """Draw which numbers dropout keeps, on the generator's device: bool (layers, B, N, H).

        On a GPU, and with `hash_dropout`, the result is int64 (2,): keys from which `noisy_envs.nn.dropout_hash` and
        the fused kernels compute the same masks.
        """
        if self.hash_dropout or generator.device.type == "cuda":
            return torch.randint(2**32, (2,), generator=generator, device=generator.device)
        rows = (num_tokens, num_sets) if self.tokens_first else (num_sets, num_tokens)
        keep = torch.empty((len(self.layers), *rows, self.embed_dim), dtype=torch.bool, device=generator.device)
        keep.bernoulli_(1 - self.dropout, generator=generator)
        return keep.transpose(1, 2) if self.tokens_first else keep


def residual_std(std: float, num_layers: int) -> float:
    """Return the initial standard deviation of projections that end a residual branch, as in GPT-2."""
    return std / math.sqrt(2 * num_layers)


def score_scale(embed_dim: int, num_heads: int, kind: AttentionScale) -> float:
    """Return the factor of attention scores, see `TransformerEncoder`."""
    return 1 / math.sqrt(embed_dim / num_heads if kind == "head" else embed_dim)


def mlp(*sizes: int) -> nn.Sequential:
    """Return linear layers of the given sizes, with GELU between them."""
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.GELU())]
    return nn.Sequential(*layers[:-1])


def init_weights(module: nn.Module, std: float, num_layers: int | None, generator: torch.Generator) -> None:
    """Draw matrices from Normal(0, std), and set biases to 0.

    Projections that end a residual branch, named `output`, get `residual_std`, unless `num_layers` is None.

    Args:
        module: module whose matrices are drawn; vectors such as those of LayerNorm are not changed.
        std: standard deviation.
        num_layers: layers of the encoder, or None.
        generator: a CPU generator.
    """
    for name, weight in module.named_parameters():
        if weight.dim() > 1:
            own_std = residual_std(std, num_layers) if num_layers and name.endswith("output.weight") else std
            nn.init.normal_(weight, 0.0, own_std, generator)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)

"""Pooling heads: they turn the embeddings of a set of tokens into one vector.

Every head is a global vector pool, C(X) = sum_i w_i * x_i (Definition 3.1); only the weights differ.

Shapes: `B` sets, `N` tokens, `D` features. A mask is True for tokens and False for padding. Padding may hold NaN or
infinity: these reach neither output nor gradients. A set without tokens is pooled to zeros.

Each class is self-contained, so that it can be copied without the rest of the module.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["AdaPool", "AvgPool", "ClsToken", "MaxPool"]


class AvgPool(nn.Module):
    """Global average pooling, w_i = 1/N (Definition 3.4, equations 2 and 3), where N does not count padding.

    Signal-optimal without noise (Corollary 3.5), or if signal and noise have the same centroid (3.6).
    """

    token_axis = 1  # axis of the tokens in `weights`

    def extend(self, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the encoder's input: tokens (B, N, D) and mask (B, N), unchanged."""
        return tokens, mask

    def weights(self, embeddings: Tensor, mask: Tensor | None = None, attention: Tensor | None = None) -> Tensor:
        """Return the weights of the tokens (B, N); `attention` is not used."""
        self._check(embeddings, mask)
        if mask is None:
            mask = torch.ones(embeddings.shape[:2], dtype=torch.bool, device=embeddings.device)
        wide = torch.promote_types(embeddings.dtype, torch.float32)  # float16 cannot count beyond 65,504
        return (mask.to(wide) / mask.sum(dim=1, keepdim=True).clamp(min=1)).to(embeddings.dtype)

    def forward(self, embeddings: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pool embeddings (B, N, D), with a mask (B, N), to (B, D)."""
        weights = self.weights(embeddings, mask).unsqueeze(2)  # (B, N, 1)
        if mask is not None:
            embeddings = embeddings.masked_fill(~mask.unsqueeze(2), 0)  # a weight of 0 times NaN is NaN
        return (weights * embeddings).sum(dim=1)  # a sum before the division could overflow float16

    def _check(self, embeddings: Tensor, mask: Tensor | None) -> None:
        shape = tuple(embeddings.shape)
        if len(shape) != 3 or shape[1] == 0:
            raise ValueError(f"embeddings: expected shape (B, N, D) with N >= 1, got {shape}")
        if mask is not None and (mask.shape != shape[:2] or mask.dtype != torch.bool):
            raise ValueError(f"mask: expected torch.bool {shape[:2]}, got {mask.dtype} {tuple(mask.shape)}")


class MaxPool(nn.Module):
    """Global max pooling: in each feature the largest token has weight 1 (Definition 3.7, equations 4 and 5).

    If m tokens share the maximum, each has weight 1/m, also in the gradient. Signal-optimal if and only if a single
    token is signal and has the maximum of every feature (Corollary 3.8).
    """

    token_axis = 1  # axis of the tokens in `weights`

    def extend(self, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the encoder's input: tokens (B, N, D) and mask (B, N), unchanged."""
        return tokens, mask

    def weights(self, embeddings: Tensor, mask: Tensor | None = None, attention: Tensor | None = None) -> Tensor:
        """Return the weights of the tokens in each feature (B, N, D); `attention` is not used."""
        largest = embeddings == self.forward(embeddings, mask).unsqueeze(1)  # (B, N, D)
        if mask is not None:
            largest = largest & mask.unsqueeze(2)
        wide = torch.promote_types(embeddings.dtype, torch.float32)  # float16 cannot count beyond 65,504
        return (largest.to(wide) / largest.sum(dim=1, keepdim=True).clamp(min=1)).to(embeddings.dtype)

    def forward(self, embeddings: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pool embeddings (B, N, D), with a mask (B, N), to (B, D)."""
        self._check(embeddings, mask)
        if mask is None:
            return embeddings.amax(dim=1)
        largest = embeddings.masked_fill(~mask.unsqueeze(2), -math.inf).amax(dim=1)
        return largest.masked_fill(~mask.any(dim=1, keepdim=True), 0)

    def _check(self, embeddings: Tensor, mask: Tensor | None) -> None:
        shape = tuple(embeddings.shape)
        if len(shape) != 3 or shape[1] == 0:
            raise ValueError(f"embeddings: expected shape (B, N, D) with N >= 1, got {shape}")
        if mask is not None and (mask.shape != shape[:2] or mask.dtype != torch.bool):
            raise ValueError(f"mask: expected torch.bool {shape[:2]}, got {mask.dtype} {tuple(mask.shape)}")


class ClsToken(nn.Module):
    """A learned token precedes the others in the encoder; its embedding is the pooled vector (Section 3.6).

    The token is drawn from Normal(0, init_std) by `generator`, a CPU generator; None stands for a new one
    seeded with 0. The global random state is neither read nor changed.
    """

    token_axis = 2  # axis of the tokens in `weights`

    def __init__(self, dim: int, init_std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw the class token (D,), D = `dim`."""
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim={dim}: expected at least 1")
        if not 0 <= init_std <= 1e18:  # its square fits float32; NaN fails too
            raise ValueError(f"init_std={init_std}: expected a number from 0 to 1e18")
        generator = generator or torch.Generator().manual_seed(0)
        self.token = nn.Parameter(torch.empty(dim, device="cpu").normal_(0.0, init_std, generator=generator))

    def extend(self, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Prepend the class token to tokens (B, N, D) and True to the mask (B, N): (B, N + 1, ...)."""
        self._check("tokens", tokens, mask)
        tokens = torch.cat([self.token.expand(tokens.shape[0], 1, -1), tokens], dim=1)
        return tokens, None if mask is None else torch.cat([mask.new_ones(mask.shape[0], 1), mask], dim=1)

    def weights(self, embeddings: Tensor, mask: Tensor | None = None, attention: Tensor | None = None) -> Tensor:
        """Return the class token's attention to the other tokens (B, heads, N), rescaled to a sum of 1.

        `embeddings` (B, N + 1, D) and `mask` (B, N + 1) are those of `forward`; `attention` (B, heads, N + 1, N + 1)
        are the attention weights of the encoder's last layer.
        """
        self._check("embeddings", embeddings, mask)
        batch, length, _ = embeddings.shape
        shape = None if attention is None else tuple(attention.shape)
        if attention is None or shape != (batch, attention.shape[1], length, length):
            raise ValueError(f"attention: expected shape ({batch}, heads, {length}, {length}), got {shape}")
        row = attention[:, :, 0, 1:]  # (B, heads, N)
        if mask is not None:
            row = row.masked_fill(~mask[:, None, 1:], 0)
        total = row.sum(dim=2, keepdim=True)
        return row / total.masked_fill(total == 0, 1)

    def forward(self, embeddings: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the class token's embedding (B, D), given embeddings (B, N + 1, D) and mask (B, N + 1)."""
        self._check("embeddings", embeddings, mask)
        pooled = embeddings[:, 0]
        if mask is None:
            return pooled
        # a count, not a slice of the mask: with a slice, torch.export cannot leave the number of tokens open
        return pooled.masked_fill(mask.sum(dim=1, keepdim=True) == mask[:, :1], 0)

    def _check(self, name: str, tokens: Tensor, mask: Tensor | None) -> None:
        shape, dim = tuple(tokens.shape), self.token.shape[0]
        if len(shape) != 3 or shape[1] == 0 or shape[2] != dim:
            raise ValueError(f"{name}: expected shape (B, N, {dim}) with N >= 1, got {shape}")
        if mask is not None and (mask.shape != shape[:2] or mask.dtype != torch.bool):
            raise ValueError(f"mask: expected torch.bool {shape[:2]}, got {mask.dtype} {tuple(mask.shape)}")


class AdaPool(nn.Module):
    """Global adaptive pooling: cross-attention with one query (Definition 3.9, equations 6 and 7).

    AdaPool(X) = sum_i w_i x_i W_V with w = softmax(r) and r_i = x_q W_Q W_K' x_i' * scale, in each of
    `num_heads` slices of the features (Appendix B.2); an output projection follows, and `residual` adds x_q.
    AvgPool and MaxPool are special cases (Corollaries 3.10 and 3.11). The position of the tokens named by `query`
    matters; the order of the others does not. Tokens are not projected one by one: only the weights of `key` and
    `value` are used, so hooks on these two modules never fire.

    Args:
        dim: D, a multiple of num_heads.
        num_heads: number of heads, each with its own weights over the tokens.
        query: the query x_q: the index of a token (0, the agent's own), several indices for their mean, "mean" for
            the mean of all tokens, or "learned" for a parameter as in the Set Transformer. A mean leaves out padding;
            if only padding is left, x_q is zero and the weights are uniform.
        residual: whether x_q is added to the output.
        scale: factor of the scores r. None stands for the usual 1/sqrt(dim / num_heads); the authors' code has
            1/sqrt(dim) since February 2025.
        init_std: standard deviation of the initial weights, drawn from Normal(0, init_std).
        output_std: the same for the output projection; None for init_std.
        generator: a CPU generator that draws the weights; None stands for a new one seeded with 0. The
            global random state is neither read nor changed.
    """

    token_axis = 2  # axis of the tokens in `weights`

    def __init__(
        self,
        dim: int,
        num_heads: int = 1,
        query: int | Sequence[int] | str = 0,
        residual: bool = True,
        scale: float | None = None,
        init_std: float = 0.02,
        output_std: float | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Check the options and draw the weights."""
        super().__init__()
        if dim < 1 or num_heads < 1 or dim % num_heads:
            raise ValueError(f"dim={dim}: expected a multiple of num_heads={num_heads}, both at least 1")
        source = query.tolist() if hasattr(query, "tolist") else query  # NumPy's numbers become Python's
        source = (source,) if isinstance(source, int) else source
        if isinstance(source, Sequence) and not isinstance(source, str):
            source = tuple(i.tolist() if hasattr(i, "tolist") else i for i in source)
        indices = isinstance(source, tuple) and source and all(type(i) is int and i >= 0 for i in source)
        if not indices and source not in ("mean", "learned"):
            raise ValueError(f"query={query!r}: expected an index >= 0, several of them, 'mean' or 'learned'")
        output_std = init_std if output_std is None else output_std
        for name, value in (("init_std", init_std), ("output_std", output_std)):
            if not 0 <= value <= 1e18:  # its square fits float32; NaN fails too
                raise ValueError(f"{name}={value}: expected a number from 0 to 1e18")
        if scale is not None and not abs(scale) <= 1e18:
            raise ValueError(f"scale={scale}: expected a number from -1e18 to 1e18")
        self.query_source = source
        self.num_heads = num_heads
        self.residual = residual
        self.scale = 1 / math.sqrt(dim / num_heads) if scale is None else scale
        # Made on "meta", then allocated: on a CPU, Linear would draw its weights from the global generator.
        # Quantization must not replace key and value, since only their weights are used.
        weights_only = nn.modules.linear.NonDynamicallyQuantizableLinear
        self.query, self.key, self.value, self.output = (
            kind(dim, dim, bias=False, device="meta").to_empty(device="cpu")
            for kind in (nn.Linear, weights_only, weights_only, nn.Linear)
        )
        generator = generator or torch.Generator().manual_seed(0)
        for linear in (self.query, self.key, self.value):
            nn.init.normal_(linear.weight, 0.0, init_std, generator)
        nn.init.normal_(self.output.weight, 0.0, output_std, generator)
        if self.query_source == "learned":
            self.learned = nn.Parameter(torch.empty(dim, device="cpu"))
            nn.init.normal_(self.learned, 0.0, init_std, generator)

    def extend(self, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the encoder's input: tokens (B, N, D) and mask (B, N), unchanged."""
        return tokens, mask

    def weights(self, embeddings: Tensor, mask: Tensor | None = None, attention: Tensor | None = None) -> Tensor:
        """Return the weights of the tokens in each head (B, heads, N), which sum to 1; `attention` is not used."""
        return self._attend(embeddings, mask)[2]

    def forward(self, embeddings: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pool embeddings (B, N, D), with a mask (B, N), to (B, D)."""
        embeddings, query, weights = self._attend(embeddings, mask)
        # sum_i w_i (x_i W_V) = (sum_i w_i x_i) W_V: one projection for each set instead of one for each token.
        value = self.value.weight.view(self.num_heads, -1, embeddings.shape[2])
        heads = torch.einsum("bhd,hed->bhe", weights @ embeddings, value)
        output: Tensor = self.output(heads.flatten(1))
        return output + query if self.residual else output

    def _attend(self, embeddings: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the embeddings with padding set to zero, the query (B, D) and the weights (B, heads, N)."""
        self._check(embeddings, mask)
        if mask is None:
            mask = torch.ones(embeddings.shape[:2], dtype=torch.bool, device=embeddings.device)
        else:
            embeddings = embeddings.masked_fill(~mask.unsqueeze(2), 0)
        empty = ~mask.any(dim=1, keepdim=True)  # (B, 1)
        query = self._query(embeddings, mask).masked_fill(empty, 0)
        # (x_q W_Q W_K') x_i', computed from the left, needs no keys: D * heads products for each token, not D * D.
        key = self.key.weight.view(self.num_heads, -1, embeddings.shape[2])
        heads = (self.query(query) * self.scale).unflatten(1, (self.num_heads, -1))
        scores = torch.einsum("bhe,hed->bhd", heads, key) @ embeddings.mT  # (B, heads, N)
        # An empty set attends to its zeros: if all scores were -inf, the softmax and its gradient would be NaN.
        scores = scores.masked_fill(~(mask | empty).unsqueeze(1), -math.inf)
        return embeddings, query, scores.softmax(dim=2).masked_fill(empty.unsqueeze(2), 0)

    def _query(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Return x_q (B, D), given embeddings in which padding is zero."""
        if self.query_source == "learned":
            return self.learned.expand(embeddings.shape[0], -1)
        if isinstance(self.query_source, tuple):  # slices: a list as index would be copied to the device at every call
            embeddings = torch.stack([embeddings[:, i] for i in self.query_source], dim=1)
            mask = torch.stack([mask[:, i] for i in self.query_source], dim=1)
        wide = torch.promote_types(embeddings.dtype, torch.float32)  # float16 cannot count beyond 65,504
        weights = (mask.to(wide) / mask.sum(dim=1, keepdim=True).clamp(min=1)).to(embeddings.dtype)
        return (weights.unsqueeze(2) * embeddings).sum(dim=1)

    def _check(self, embeddings: Tensor, mask: Tensor | None) -> None:
        shape, dim = tuple(embeddings.shape), self.query.in_features
        if len(shape) != 3 or shape[1] == 0 or shape[2] != dim:
            raise ValueError(f"embeddings: expected shape (B, N, {dim}) with N >= 1, got {shape}")
        if mask is not None and (mask.shape != shape[:2] or mask.dtype != torch.bool):
            raise ValueError(f"mask: expected torch.bool {shape[:2]}, got {mask.dtype} {tuple(mask.shape)}")
        if isinstance(self.query_source, tuple) and max(self.query_source) >= shape[1]:
            raise ValueError(
                f"query={max(self.query_source)}: expected an index below {shape[1]}, the number of tokens"
            )

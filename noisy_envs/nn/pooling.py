"""Pooling heads: how the embeddings of a set of tokens become one vector.

Every head is a global vector pool, C(X) = sum_i w_i * x_i (Definition 3.1); only the weights differ.

Shapes: `B` sets, `N` tokens, `D` features. A mask is True where a token is real. A masked token may hold NaN
or infinity: it reaches neither output nor gradients. A set without a real token is pooled to zeros.

Each class can be copied alone, as the single-file agents do: it needs no other name of this module.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["AdaPool", "AvgPool", "ClsToken", "MaxPool"]


class AvgPool(nn.Module):
    """Global average pooling, w_i = 1/N (Definition 3.4, equations 2 and 3), N counting the real tokens.

    Signal-optimal without noise (Corollary 3.5), or where signal and noise share their centroid (3.6).
    """

    token_axis = 1  # of the weights

    def extend(self, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the encoder's input, here the arguments: tokens (B, N, D) and mask (B, N)."""
        return tokens, mask

    def weights(self, embeddings: Tensor, mask: Tensor | None = None, attention: Tensor | None = None) -> Tensor:
        """Return the tokens' weights (B, N); `attention` is not used."""
        self._check(embeddings, mask)
        if mask is None:
            mask = torch.ones(embeddings.shape[:2], dtype=torch.bool, device=embeddings.device)
        wide = torch.promote_types(embeddings.dtype, torch.float32)  # float16 cannot count beyond 65,504
        return (mask.to(wide) / mask.sum(dim=1, keepdim=True).clamp(min=1)).to(embeddings.dtype)

    def forward(self, embeddings: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pool embeddings (B, N, D) under a mask (B, N) to (B, D)."""
        weights = self.weights(embeddings, mask).unsqueeze(2)  # (B, N, 1)
        if mask is not None:
            embeddings = embeddings.masked_fill(~mask.unsqueeze(2), 0)  # a weight of 0 times NaN is NaN
        return (weights * embeddings).sum(dim=1)  # weighted before the sum, which could overflow float16

    def _check(self, embeddings: Tensor, mask: Tensor | None) -> None:
        shape = tuple(embeddings.shape)
        if len(shape) != 3 or shape[1] == 0:
            raise ValueError(f"embeddings must be (B, N, D) with N >= 1, got {shape}")
        if mask is not None and (mask.shape != shape[:2] or mask.dtype != torch.bool):
            raise ValueError(f"mask must be torch.bool {shape[:2]}, got {mask.dtype} {tuple(mask.shape)}")


class MaxPool(nn.Module):
    """Global max pooling: a feature's largest real token has weight 1 (Definition 3.7, equations 4 and 5).

    m tokens that share the maximum weigh 1/m each, in the gradient too. Signal-optimal if and only if one
    token is signal and has the maximum of every feature (Corollary 3.8).
    """

    token_axis = 1  # of the weights

    def extend(self, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the encoder's input, here the arguments: tokens (B, N, D) and mask (B, N)."""
        return tokens, mask

    def weights(self, embeddings: Tensor, mask: Tensor | None = None, attention: Tensor | None = None) -> Tensor:
        """Return the tokens' weights in each feature (B, N, D); `attention` is not used."""
        largest = embeddings == self.forward(embeddings, mask).unsqueeze(1)  # (B, N, D)
        if mask is not None:
            largest = largest & mask.unsqueeze(2)
        wide = torch.promote_types(embeddings.dtype, torch.float32)  # float16 cannot count beyond 65,504
        return (largest.to(wide) / largest.sum(dim=1, keepdim=True).clamp(min=1)).to(embeddings.dtype)

    def forward(self, embeddings: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pool embeddings (B, N, D) under a mask (B, N) to (B, D)."""
        self._check(embeddings, mask)
        if mask is None:
            return embeddings.amax(dim=1)
        largest = embeddings.masked_fill(~mask.unsqueeze(2), -math.inf).amax(dim=1)
        return largest.masked_fill(~mask.any(dim=1, keepdim=True), 0)

    def _check(self, embeddings: Tensor, mask: Tensor | None) -> None:
        shape = tuple(embeddings.shape)
        if len(shape) != 3 or shape[1] == 0:
            raise ValueError(f"embeddings must be (B, N, D) with N >= 1, got {shape}")
        if mask is not None and (mask.shape != shape[:2] or mask.dtype != torch.bool):
            raise ValueError(f"mask must be torch.bool {shape[:2]}, got {mask.dtype} {tuple(mask.shape)}")


class ClsToken(nn.Module):
    """A learned token passes the encoder before the others; its embedding is the pool (Section 3.6).

    The token is drawn from Normal(0, init_std) by `generator`, a CPU generator; None stands for a fresh one
    seeded with 0. The global random state is neither read nor changed.
    """

    token_axis = 2  # of the weights

    def __init__(self, dim: int, init_std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw the class token (D,), D = `dim`."""
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim must be at least 1, got {dim}")
        if not 0 <= init_std <= 1e18:  # what float32 can square; NaN fails too
            raise ValueError(f"init_std must be from 0 to 1e18, got {init_std}")
        generator = generator or torch.Generator().manual_seed(0)
        self.token = nn.Parameter(torch.empty(dim, device="cpu").normal_(0.0, init_std, generator=generator))

    def extend(self, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Put the class token before tokens (B, N, D) and True before the mask (B, N): (B, N + 1, ...)."""
        self._check("tokens", tokens, mask)
        tokens = torch.cat([self.token.expand(tokens.shape[0], 1, -1), tokens], dim=1)
        return tokens, None if mask is None else torch.cat([mask.new_ones(mask.shape[0], 1), mask], dim=1)

    def weights(self, embeddings: Tensor, mask: Tensor | None = None, attention: Tensor | None = None) -> Tensor:
        """Return the class token's attention to the others (B, heads, N), rescaled to sum to 1 over them.

        embeddings (B, N + 1, D) and mask (B, N + 1) are those of `forward`; attention, the weights in the
        encoder's last layer, is (B, heads, N + 1, N + 1).
        """
        self._check("embeddings", embeddings, mask)
        batch, length, _ = embeddings.shape
        shape = None if attention is None else tuple(attention.shape)
        if attention is None or shape != (batch, attention.shape[1], length, length):
            raise ValueError(f"attention must be ({batch}, heads, {length}, {length}), got {shape}")
        row = attention[:, :, 0, 1:]  # (B, heads, N)
        if mask is not None:
            row = row.masked_fill(~mask[:, None, 1:], 0)
        total = row.sum(dim=2, keepdim=True)
        return row / total.masked_fill(total == 0, 1)

    def forward(self, embeddings: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the class token's embedding (B, D), of embeddings (B, N + 1, D) and mask (B, N + 1)."""
        self._check("embeddings", embeddings, mask)
        pooled = embeddings[:, 0]
        if mask is None:
            return pooled
        # counted: a slice of the mask would bar programs for any number of tokens
        return pooled.masked_fill(mask.sum(dim=1, keepdim=True) == mask[:, :1], 0)

    def _check(self, name: str, tokens: Tensor, mask: Tensor | None) -> None:
        shape, dim = tuple(tokens.shape), self.token.shape[0]
        if len(shape) != 3 or shape[1] == 0 or shape[2] != dim:
            raise ValueError(f"{name} must be (B, N, {dim}) with N >= 1, got {shape}")
        if mask is not None and (mask.shape != shape[:2] or mask.dtype != torch.bool):
            raise ValueError(f"mask must be torch.bool {shape[:2]}, got {mask.dtype} {tuple(mask.shape)}")


class AdaPool(nn.Module):
    """Global adaptive pooling: cross-attention with one query (Definition 3.9, equations 6 and 7).

    AdaPool(X) = sum_i w_i x_i W_V with w = softmax(r) and r_i = x_q W_Q W_K' x_i' * scale, in each of
    `num_heads` slices of the features (Appendix B.2); an output projection follows, and `residual` adds x_q.
    AvgPool and MaxPool are special cases (Corollaries 3.10 and 3.11). Where the tokens named by `query` stand
    matters; the order of the others changes nothing. No token is projected by itself: of `key` and `value` only
    the weights are used, so that hooks on these two never fire.

    Args:
        dim: D, a multiple of num_heads.
        num_heads: how many sets of weights.
        query: what x_q is: the token at an index (0, the agent's own), the mean of those at several, "mean"
            of all, or "learned", a parameter as in the Set Transformer. A mean is over real tokens; if there
            is none at those indices, x_q is zero and the weights are uniform.
        residual: whether x_q is added to the output.
        scale: of the scores r. None is the usual 1/sqrt(dim / num_heads); the authors' code has 1/sqrt(dim)
            since February 2025.
        init_std: of the weights, drawn from Normal(0, init_std).
        output_std: that of the output projection, if another.
        generator: a CPU generator that draws the weights; None stands for a fresh one seeded with 0. The
            global random state is neither read nor changed.
    """

    token_axis = 2  # of the weights

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
            raise ValueError(f"dim must be a multiple of num_heads, got dim={dim} and num_heads={num_heads}")
        places = query.tolist() if hasattr(query, "tolist") else query  # NumPy's numbers become Python's
        places = (places,) if isinstance(places, int) else places
        if isinstance(places, Sequence) and not isinstance(places, str):
            places = tuple(i.tolist() if hasattr(i, "tolist") else i for i in places)
        several = isinstance(places, tuple) and places and all(type(i) is int and i >= 0 for i in places)
        if not several and places not in ("mean", "learned"):
            raise ValueError(f"query must be an index >= 0, several, 'mean' or 'learned', got {query!r}")
        output_std = init_std if output_std is None else output_std
        for name, value in (("init_std", init_std), ("output_std", output_std)):
            if not 0 <= value <= 1e18:  # what float32 can square; NaN fails too
                raise ValueError(f"{name} must be from 0 to 1e18, got {value}")
        if scale is not None and not abs(scale) <= 1e18:
            raise ValueError(f"scale must be from -1e18 to 1e18, got {scale}")
        self.places = places
        self.num_heads = num_heads
        self.residual = residual
        self.scale = 1 / math.sqrt(dim / num_heads) if scale is None else scale
        # Made on "meta", then allocated: Linear would draw its weights from the global generator.
        read = nn.modules.linear.NonDynamicallyQuantizableLinear  # stays as it is: only its weights are used
        self.query, self.key, self.value, self.output = (
            kind(dim, dim, bias=False, device="meta").to_empty(device="cpu")
            for kind in (nn.Linear, read, read, nn.Linear)
        )
        generator = generator or torch.Generator().manual_seed(0)
        for linear in (self.query, self.key, self.value):
            nn.init.normal_(linear.weight, 0.0, init_std, generator)
        nn.init.normal_(self.output.weight, 0.0, output_std, generator)
        if self.places == "learned":
            self.learned = nn.Parameter(torch.empty(dim, device="cpu"))
            nn.init.normal_(self.learned, 0.0, init_std, generator)

    def extend(self, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the encoder's input, here the arguments: tokens (B, N, D) and mask (B, N)."""
        return tokens, mask

    def weights(self, embeddings: Tensor, mask: Tensor | None = None, attention: Tensor | None = None) -> Tensor:
        """Return the tokens' weights in each head (B, heads, N), summing to 1; `attention` is not used."""
        return self._attend(embeddings, mask)[2]

    def forward(self, embeddings: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pool embeddings (B, N, D) under a mask (B, N) to (B, D)."""
        embeddings, query, weights = self._attend(embeddings, mask)
        # sum_i w_i (x_i W_V) = (sum_i w_i x_i) W_V: a set is projected once, not token by token.
        value = self.value.weight.view(self.num_heads, -1, embeddings.shape[2])
        heads = torch.einsum("bhd,hed->bhe", weights @ embeddings, value)
        output: Tensor = self.output(heads.flatten(1))
        return output + query if self.residual else output

    def _attend(self, embeddings: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the embeddings, masked ones zeroed, the query (B, D) and the weights (B, heads, N)."""
        self._check(embeddings, mask)
        if mask is None:
            mask = torch.ones(embeddings.shape[:2], dtype=torch.bool, device=embeddings.device)
        else:
            embeddings = embeddings.masked_fill(~mask.unsqueeze(2), 0)
        empty = ~mask.any(dim=1, keepdim=True)  # (B, 1)
        query = self._query(embeddings, mask).masked_fill(empty, 0)
        # (x_q W_Q W_K') x_i', taken from the left, spares the keys: D * heads products a token, not D * D.
        key = self.key.weight.view(self.num_heads, -1, embeddings.shape[2])
        heads = (self.query(query) * self.scale).unflatten(1, (self.num_heads, -1))
        scores = torch.einsum("bhe,hed->bhd", heads, key) @ embeddings.mT  # (B, heads, N)
        # An empty set attends to its zeros: the softmax of nothing but -inf, and its gradient, are NaN.
        scores = scores.masked_fill(~(mask | empty).unsqueeze(1), -math.inf)
        return embeddings, query, scores.softmax(dim=2).masked_fill(empty.unsqueeze(2), 0)

    def _query(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Return x_q (B, D), given embeddings of which the masked are zero."""
        if self.places == "learned":
            return self.learned.expand(embeddings.shape[0], -1)
        if isinstance(self.places, tuple):  # slices: a list as index is copied to the device at every call
            embeddings = torch.stack([embeddings[:, place] for place in self.places], dim=1)
            mask = torch.stack([mask[:, place] for place in self.places], dim=1)
        wide = torch.promote_types(embeddings.dtype, torch.float32)  # float16 cannot count beyond 65,504
        weights = (mask.to(wide) / mask.sum(dim=1, keepdim=True).clamp(min=1)).to(embeddings.dtype)
        return (weights.unsqueeze(2) * embeddings).sum(dim=1)

    def _check(self, embeddings: Tensor, mask: Tensor | None) -> None:
        shape, dim = tuple(embeddings.shape), self.query.in_features
        if len(shape) != 3 or shape[1] == 0 or shape[2] != dim:
            raise ValueError(f"embeddings must be (B, N, {dim}) with N >= 1, got {shape}")
        if mask is not None and (mask.shape != shape[:2] or mask.dtype != torch.bool):
            raise ValueError(f"mask must be torch.bool {shape[:2]}, got {mask.dtype} {tuple(mask.shape)}")
        if isinstance(self.places, tuple) and max(self.places) >= shape[1]:
            raise ValueError(f"query {max(self.places)} must be below {shape[1]}, the number of tokens")

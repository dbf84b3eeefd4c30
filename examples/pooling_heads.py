"""Put a pooling head on your own model: PyTorch's encoder over padded sets, or a small vision transformer.

    python examples/pooling_heads.py [--model set|vit] [--pool avg|max|cls|ada] [--query corner] [--seed 0]

A head has three methods: `extend` before the encoder (ClsToken adds its token there), `forward` after it, and
`weights`, the weight of each token. Masks are True for real tokens, PyTorch's `src_key_padding_mask` for padding.
With the same seed every head gets the same encoder and data. There are two toy tasks, each with mostly noise:

set: up to 16 tokens of 4 features; the target is the mean of those whose first feature is positive, about a third.
vit: 32 × 32 pixels, a square of one brightness among patches of other brightness; the target is the square's. AdaPool's
    query is the mean of the four central patches, as in the paper for images, or what --query names.

The printed shares of weight refer to embeddings, which the encoder has mixed. A low share can suffice if the encoder
has carried the signal to every token. Takes seconds on one core. `B` sets, `N` tokens, `D` features of an embedding.
"""

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from noisy_envs.nn.pooling import AdaPool, AvgPool, ClsToken, MaxPool

Head = AvgPool | MaxPool | ClsToken | AdaPool
DIM, HEADS, LAYERS = 32, 4, 2
QUERIES: dict[str, int | tuple[int, ...] | str] = {
    "corner": 0,
    "centre": (27, 28, 35, 36),  # of 8 × 8 patches, row by row
    "mean": "mean",
    "learned": "learned",
}


def make_head(pool: str, query: str, generator: torch.Generator) -> Head:
    """Return the named head; nothing else in this file depends on the choice."""
    if pool == "cls":
        return ClsToken(DIM, generator=generator)
    if pool == "ada":
        return AdaPool(DIM, HEADS, QUERIES[query], init_std=0.2, generator=generator)
    return MaxPool() if pool == "max" else AvgPool()


class Patches(nn.Module):
    """Embed 8 × 8 patches of 4 × 4 pixels and add learned positions: images (B, 32, 32) to tokens (B, 64, D)."""

    def __init__(self) -> None:
        """Draw weights and positions."""
        super().__init__()
        self.embed = nn.Conv2d(1, DIM, kernel_size=4, stride=4)
        self.positions = nn.Parameter(torch.randn(64, DIM))

    def forward(self, images: Tensor) -> Tensor:
        """Return the tokens."""
        patches: Tensor = self.embed(images.unsqueeze(1))  # (B, D, 8, 8)
        return patches.flatten(2).mT + self.positions


class Model(nn.Module):
    """PyTorch's transformer encoder with a pooling head: inputs and a mask (B, N) to targets (B, outputs)."""

    def __init__(self, embed: nn.Module, head: Head, outputs: int) -> None:
        """Store the embedding, inputs to tokens (B, N, D), and the head."""
        super().__init__()
        self.embed, self.head = embed, head
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 4 * DIM, dropout=0.0, batch_first=True)
        # Nested tensors would cut the output of `eval` to the longest set of a batch, which does not fit the mask.
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.readout = nn.Linear(DIM, outputs)

    def enter(self, inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Embed and extend: tokens (B, N, D) and their mask (B, N), with a class token N + 1."""
        if mask is not None:  # attention multiplies padding by 0, and 0 * NaN is NaN
            inputs = inputs.masked_fill(~mask.unsqueeze(2), 0)
        return self.head.extend(self.embed(inputs), mask)

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Embed, extend, encode, pool, read out."""
        tokens, mask = self.enter(inputs, mask)
        padding = None if mask is None else ~mask  # PyTorch's mask is the opposite of ours
        embeddings = self.encoder(tokens, src_key_padding_mask=padding)
        output: Tensor = self.readout(self.head(embeddings, mask))
        return output

    @torch.no_grad()
    def weights(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the pooling weight of each token (B, N), the mean over attention heads or features."""
        tokens, mask = self.enter(inputs, mask)
        padding = None if mask is None else ~mask
        *layers, last = self.encoder.layers
        for layer in layers:
            tokens = layer(tokens, src_key_padding_mask=padding)
        # ClsToken's weights are the last layer's attention (B, heads, N, N), which PyTorch's layers do not return.
        _, attention = last.self_attn(tokens, tokens, tokens, key_padding_mask=padding, average_attn_weights=False)
        embeddings = last(tokens, src_key_padding_mask=padding)
        weights = self.head.weights(embeddings, mask, attention)  # (B, N), (B, N, D) or (B, heads, N)
        weights = weights.movedim(self.head.token_axis, 1)
        return weights.reshape(*weights.shape[:2], -1).mean(dim=2)


Batch = tuple[Tensor, Tensor | None, Tensor, Tensor]  # inputs, mask, targets (B, outputs), which tokens are signal


def draw_sets(generator: torch.Generator, size: int = 64) -> Batch:
    """Return tokens (B, 16, 4), their mask (B, 16), targets (B, 3) and which are signal (B, 16)."""
    tokens = torch.randn(size, 16, 4, generator=generator)
    tokens[..., 0] -= 0.7
    tokens[:, 0, 0] = tokens[:, 0, 0].abs()  # at least one is signal
    lengths = torch.randint(4, 17, (size, 1), generator=generator)
    mask = torch.arange(16) < lengths
    signal = mask & (tokens[..., 0] > 0)
    target = (tokens[..., 1:] * signal.unsqueeze(2)).sum(dim=1) / signal.sum(dim=1, keepdim=True)
    return tokens.masked_fill(~mask.unsqueeze(2), 0), mask, target, signal


def draw_pictures(generator: torch.Generator, size: int = 64) -> Batch:
    """Return images (B, 32, 32), no mask, targets (B, 1) and which patches are signal (B, 64)."""
    levels = torch.randn(size, 8, 8, generator=generator)
    levels[:, 3:5, 3:5] = levels[:, 3:4, 3:4]
    images = levels.repeat_interleave(4, dim=1).repeat_interleave(4, dim=2)
    images += 0.1 * torch.randn(size, 32, 32, generator=generator)
    signal = torch.zeros(size, 64, dtype=torch.bool)
    signal[:, [27, 28, 35, 36]] = True
    return images, None, levels[:, 3, 3:4], signal


def train(model: Model, draw: Callable[[torch.Generator], Batch], steps: int, generator: torch.Generator) -> None:
    """Minimise the mean squared error on new batches."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        inputs, mask, target, _ = draw(generator)
        optimizer.zero_grad()
        F.mse_loss(model(inputs, mask), target).backward()
        optimizer.step()


def report(model: Model, batch: Batch, when: str) -> float:
    """Print the loss and the share of pooling weight on signal; return the loss."""
    inputs, mask, target, signal = batch
    model.eval()
    with torch.no_grad():
        loss = F.mse_loss(model(inputs, mask), target).item()
    share = (model.weights(inputs, mask) * signal).sum(dim=1).mean().item()
    even = (signal.sum(dim=1) / (signal.shape[1] if mask is None else mask.sum(dim=1))).mean().item()
    print(f"{when}: loss {loss:.3f}; {even:.0%} of the tokens are signal, and have {share:.0%} of the weight")
    model.train()
    return loss


def main(words: Sequence[str] | None = None) -> tuple[float, float]:
    """Train one model; return its loss before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("set", "vit"), default="set")
    parser.add_argument("--pool", choices=("avg", "max", "cls", "ada"), default="ada")
    parser.add_argument("--query", choices=QUERIES, help="AdaPool's query (default: mean for sets, centre for images)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    sets = args.model == "set"
    query = args.query or ("mean" if sets else "centre")
    head = make_head(args.pool, query, torch.Generator().manual_seed(args.seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)  # PyTorch's layers draw from the global random state
        model = Model(nn.Linear(4, DIM) if sets else Patches(), head, outputs=3 if sets else 1)
    draw = draw_sets if sets else draw_pictures
    unseen = draw(torch.Generator().manual_seed(args.seed + 1))
    before = report(model, unseen, "before")
    train(model, draw, args.steps, torch.Generator().manual_seed(args.seed + 2))
    return before, report(model, unseen, f"after {args.steps} steps")


if __name__ == "__main__":
    main()

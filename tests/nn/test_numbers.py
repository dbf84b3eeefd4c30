"""Kinds of numbers: float32 on each device, half precision by autocast, and the same bits each time."""

import math

import gymnasium
import pytest
from cases import each_case
from helpers import load_agent

pytest.importorskip("torch")
pytest.importorskip("tyro")
import torch
from test_pooling import DIM, HEADS, B, draw, encode, gradients, masked_tokens
from torch import nn

from noisy_envs.nn.pooling import AdaPool, AvgPool, MaxPool
from noisy_envs.training.accelerate import use_deterministic
from noisy_envs.training.checkpoint import load_checkpoint
from noisy_envs.training.main import main
from noisy_envs.training.metrics import read_metrics

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
each_head = pytest.mark.parametrize("name", HEADS)
# of the largest number: bfloat16 keeps 8 bits, float16 11
HALVES = {torch.bfloat16: 4e-2, torch.float16: 5e-3}


def error(found, expected):
    """Return the largest difference, as a share of the largest number."""
    difference = max(
        (one.cpu().double() - other).abs().max().item() for one, other in zip(found, expected, strict=True)
    )
    return difference / max(one.abs().max().item() for one in expected)


@pytest.fixture
def deterministic():
    use_deterministic(True)
    yield
    use_deterministic(False)


@each_head
@each_device
def test_float32_is_float64_but_for_rounding(name, device):
    """Outputs and gradients, on a GPU too: no product is rounded to TensorFloat-32 unasked."""
    tokens, mask = masked_tokens()
    out, slope, slopes = gradients(HEADS[name]().double(), tokens, mask)
    head, tokens = HEADS[name]().to(device), tokens.float().to(device).requires_grad_()
    inside, seen = head.extend(tokens, mask.to(device))
    found = head(encode(inside, seen)[0], seen)
    upstream = draw(*out.shape, seed=2).to(device, torch.float32)
    first, *others = torch.autograd.grad((found * upstream).sum(), [tokens, *head.parameters()])
    assert error([found], [out]) < 1e-6
    assert error([first], [slope]) < 1e-6
    assert all(error([one], [other]) < 1e-6 for one, other in zip(others, slopes, strict=True))


@each_head
@each_device
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_learns_as_float32_does(name, device, dtype):
    """A model of float32 weights under autocast, float16 with a scaled loss: output and gradients are near."""
    tokens, mask = masked_tokens()
    tokens, mask, upstream = tokens.float().to(device), mask.to(device), draw(B, 3, seed=2).to(device, torch.float32)
    head = HEADS[name]().to(device)
    torch.manual_seed(0)
    before, after = nn.Linear(DIM, DIM).to(device), nn.Linear(DIM, 3).to(device)
    weights = [*before.parameters(), *head.parameters(), *after.parameters()]
    scaler = 1024.0 if dtype == torch.float16 else 1.0

    def learned(enabled):
        with torch.autocast(device, dtype, enabled=enabled):
            inside, seen = head.extend(before(tokens.masked_fill(~mask[..., None], 0)), mask)
            out = after(head(encode(inside, seen)[0], seen))
        loss = (out.float() * upstream).sum() * scaler
        return out.detach(), [slope / scaler for slope in torch.autograd.grad(loss, weights)]

    expected, slopes = learned(enabled=False)
    found, near = learned(enabled=True)
    assert found.dtype == dtype and found.isfinite().all()
    assert error([found], [expected.cpu().double()]) < HALVES[dtype]
    assert error(near, [slope.cpu().double() for slope in slopes]) < 2 * HALVES[dtype]


@each_device
def test_more_tokens_than_float16_can_count(device):
    """65,504 is its largest number, and shares of more tokens are none of infinity."""
    tokens = torch.ones(1, 70_000, 2, dtype=torch.float16, device=device)
    mask = torch.ones(1, 70_000, dtype=torch.bool, device=device)
    ada = AdaPool(2, query="mean").half().to(device)
    for pooled in (AvgPool()(tokens, mask), MaxPool().weights(tokens, mask).sum(1), ada._query(tokens, mask)):
        torch.testing.assert_close(pooled, torch.ones_like(pooled), rtol=0.01, atol=0)


@each_head
@each_device
def test_deterministic_kernels_suffice(name, device, deterministic):
    """Torch's deterministic mode refuses no head, and gives the same bits twice."""
    head = HEADS[name]().to(device)
    tokens, mask = (x.to(device) for x in masked_tokens())
    tokens = tokens.float().repeat(64, 1, 1)

    def learned():
        inside, seen = head.extend(tokens.requires_grad_(), mask.repeat(64, 1))
        out = head(encode(inside, seen)[0], seen)
        return [out, *torch.autograd.grad(out.square().sum(), [tokens, *head.parameters()])]

    torch.testing.assert_close(learned(), learned(), rtol=0, atol=0)


@each_case
@each_device
def test_worlds_repeat_on_deterministic_kernels(env_id, options, device, deterministic):
    """Torch's deterministic mode refuses no game, and gives the same bits twice."""

    def played():
        envs = gymnasium.make_vec(env_id, 64, max_episode_steps=7, backend="torch", device=device, **options)
        envs.action_space.seed(1)
        seen = [envs.reset(seed=1)[0]]
        for _ in range(20):
            seen += envs.step(torch.as_tensor(envs.action_space.sample(), device=device))[:2]
        return seen

    torch.testing.assert_close(played(), played(), rtol=0, atol=0)


NARROW = "--num-layers 2 --embed-dim 8 --num-heads 8 --attention-scale embed --dropout 0.1"  # on our own kernels


@each_device
@pytest.mark.parametrize("settings", ["", NARROW, "--env-id noisy_envs/BoxWorld-v0"], ids=["wide", "narrow", "box"])
def test_training_repeats_on_deterministic_kernels(tmp_path, settings, device, deterministic):
    """Two runs of one seed: the same log and weights, compiled and recorded as they are on a GPU by default."""
    small = "--num-envs 16 --num-steps 16 --minibatch-size 64 --update-epochs 2 --total-timesteps 512"
    words = f"{small} --eval-episodes 3 --no-capture-video --torch-deterministic --device {device} {settings}".split()

    def trained(name):
        main(load_agent("adapool"), [*words, "--run-dir", str(tmp_path / name)])
        (folder,) = (tmp_path / name).iterdir()
        rows = read_metrics(folder / "metrics.csv")
        kept = [[row[key] for key in row if key != "charts/SPS" and not math.isnan(row[key])] for row in rows]
        return kept, load_checkpoint(folder / "checkpoint.pt")["agent"]

    torch.testing.assert_close(trained("one"), trained("other"), rtol=0, atol=0)

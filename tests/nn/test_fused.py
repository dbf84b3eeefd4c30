"""The fused kernels, on an emulated GPU and on a real one, are the agents' own loss and its gradient."""

import dataclasses
import functools
import shutil
import threading

import pytest
import torch
from fused_cases import Case, errors, make_problem, random_case, worst
from fused_emulation import emulate
from gymnasium import spaces

from noisy_envs import randomness
from noisy_envs.nn import cuda_program, fused
from noisy_envs.nn.dropout_hash import hashed_masks
from noisy_envs.nn.fused_source import (
    choose_lanes,
    memory_sizes,
    network_of,
    num_weights,
    unsupported,
    weight_offsets,
)

CASES = {
    "AdaPool, two runs, roles, dual clipping, tanh": Case(runs=2, dual_clip=True, tanh=True, normalize=True),
    "AvgPool, padding, width 6, discrete": Case(
        pool="AvgPool", padded=True, roles=0, width=6, continuous=False, actions=4, tokens=9
    ),
    "MaxPool, padding and roles, width 3": Case(pool="MaxPool", padded=True, width=3, layers=6, scale="head"),
    "ClsToken, 33 tokens, query vectors": Case(pool="ClsToken", tokens=32, query=2, query_vector=True, samples=5),
    "MaxPool, equal tokens": Case(pool="MaxPool", repeated=True, dropout=0.0, samples=5),
    "AdaPool, large scores": Case(sharpness=10, tokens=16, samples=5, layers=1),
    "AdaPool, padding, 50 tokens": Case(tokens=50, padded=True, query=3, roles=0, dropout=0.0, samples=5, layers=1),
}


ON_GPU = torch.cuda.is_available() and cuda_program.missing() is None


@pytest.fixture
def device(monkeypatch, tmp_path):
    """Return the device that computes: a GPU, or an emulated one, whose writes are checked in the end."""
    if ON_GPU:
        yield torch.device("cuda:0")
    elif shutil.which("g++"):
        check_guards = emulate(monkeypatch, tmp_path)
        yield torch.device("cpu")
        check_guards()
    else:
        pytest.skip("needs g++, which compiles the emulated kernels, or a GPU")


def kernels_of(problem, device):
    """Return a problem's gradient and policy."""
    lanes = None if device.type == "cuda" else dataclasses.replace(choose_lanes(problem.network, 1000), warps=2)
    given, shape = (problem.network, problem.offsets), tuple(problem.samples.target.shape)
    gradient = fused.FusedGradient(*given, shape, device, lanes)
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":  # the same source needs no second compilation
            patch.setattr(fused.cuda_program, "load", lambda *_: gradient._kernels.program)
        return gradient, fused.FusedPolicy(*given, shape[0], device, lanes)


def check(case, device, allowed):
    """Compare loss, gradient and policy of a case."""
    problem = make_problem(case).to(device)
    gradient, policy = kernels_of(problem, device)
    grads, parts = gradient(problem.weights, problem.samples, problem.keys, problem.coefficients)
    found, own = errors(problem, grads, parts, *policy(problem.weights, problem.samples.tokens))
    name, part = worst(found, own, allowed)
    assert part <= 1, f"{name}: error {found[name]:.1e}, torch's own {own[name]:.1e}, {case}"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_loss_and_gradient_are_those_of_autograd(case, device):
    check(case, device, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_random_networks(seed, device):
    check(random_case(seed), device, 2e-5)  # some have a single sample, whose loss is a small difference


def test_tensors_that_do_not_fit_are_named(device):
    problem = make_problem(Case(layers=1, samples=3)).to(device)
    gradient, policy = kernels_of(problem, device)
    samples = problem.samples
    given = problem.weights, samples, problem.keys, problem.coefficients
    wrong = [
        ("weights", 0, problem.weights[:, 1:]),
        ("tokens", 1, samples._replace(tokens=samples.tokens.mT)),
        ("action", 1, samples._replace(action=samples.action.double())),
        ("target", 1, samples._replace(target=samples.target[:, :2])),
        ("keys", 2, problem.keys.int()),
        ("coefficients", 3, problem.coefficients[:, :5]),
    ]
    for name, place, tensor in wrong:
        with pytest.raises(ValueError, match=rf"^{name}: expected"):
            gradient(*given[:place], tensor, *given[place + 1 :])
    with pytest.raises(ValueError, match=r"^tokens: expected"):
        policy(problem.weights, samples.tokens[:, :, :2].contiguous())
    few, all_of = policy(problem.weights, samples.tokens[:, :2].contiguous()), policy(problem.weights, samples.tokens)
    torch.testing.assert_close(few, tuple(x[:, :2] for x in all_of))


@pytest.mark.parametrize("continuous", [True, False])
def test_a_run_that_has_diverged_shows_it(device, continuous):
    problem = make_problem(Case(layers=1, samples=3, runs=2, continuous=continuous)).to(device)
    gradient, _ = kernels_of(problem, device)
    problem.weights[0] = torch.nan
    grads, parts = gradient(problem.weights, problem.samples, problem.keys, problem.coefficients)
    assert parts[0, :4].isnan().all() and grads[0].isnan().all()
    assert parts[1].isfinite().all() and grads[1].isfinite().all()


def test_weights_lie_in_the_order_of_named_parameters():
    problem = make_problem(Case(pool="ClsToken", layers=3))
    named = [(name, weight.shape) for name, weight in problem.agents[0].named_parameters()]
    flat = torch.cat([weight.detach().flatten() for weight in problem.agents[0].parameters()])
    offsets = weight_offsets(problem.network, named)
    for name, weight in problem.agents[0].named_parameters():
        assert flat[offsets[name] : offsets[name] + weight.numel()].equal(weight.detach().flatten())
    assert num_weights(problem.network) == len(flat)
    for changed, expected in [
        (named[1:], f"{named[0][0]}: the kernel takes the shape .*, got None"),
        ([*named, ("other", (1,))], "other: the kernel takes the shape None"),
        ([(named[0][0], (7, 7)), *named[1:]], f"{named[0][0]}: .* got \\(7, 7\\)"),
        (sorted(named, key=lambda pair: pair[0][::-1]), "equal layers"),
    ]:
        with pytest.raises(ValueError, match=expected):
            weight_offsets(problem.network, changed)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_heads": 4}, "num_heads=4: the kernel takes embed_dim=8"),
        ({"embed_dim": 16, "num_heads": 16, "feedforward_dim": 64}, "embed_dim=16: the kernel takes one of 3, 6, 8"),
        ({"feedforward_dim": 16}, "feedforward_dim=16: the kernel takes 32"),
        ({"mlp_dim": 64}, "mlp_dim=64: the kernel takes 32"),
        ({"num_layers": 7}, "num_layers=7: the kernel takes 1 to 6"),
    ],
)
def test_other_networks_are_refused_with_a_reason(changes, expected):
    problem = make_problem(Case())
    agent = problem.module.Agent(
        dataclasses.replace(problem.args, **changes), problem.agents[0].spec, spaces.Box(0, 1, (3,))
    )
    network = network_of(agent, "AdaPool", dropout=True)
    assert unsupported(agent, network) == expected
    assert "takes a GPU" in fused.fits(agent, network, "cpu")
    assert unsupported(problem.agents[0].double(), problem.network) == "weights: the kernel takes float32"


@pytest.mark.parametrize("width", [3, 6, 8])
@pytest.mark.parametrize(("memory", "samples"), [(227, 1), (227, 62), (163, 1000), (99, 10)])
def test_every_number_of_tokens_fits_a_warp(width, memory, samples):
    plain = make_problem(Case(width=width, layers=1)).network
    for tokens in range(4, 66):
        network = dataclasses.replace(plain, num_tokens=tokens, num_layers=6, padding=-1.0)
        lanes = choose_lanes(network, samples, memory * 1024)
        assert tokens <= lanes.rows * lanes.lanes and lanes.lanes <= 32
        assert memory_sizes(network, lanes).shared_bytes <= memory * 1024
        assert lanes.warps >= (2 if memory == 99 else 4)


def test_dropout_is_the_hash_of_keys_and_index():
    keys, rate = torch.tensor([2**32 - 1, 12345]), 0.3
    kept = hashed_masks(keys, (3, 4, 5, 7), rate)
    layer, sample, token, feature = 2, 3, 4, 5
    index = ((sample * 3 + layer) * 5 + token) * 4 + feature // 2
    word = randomness._mix(randomness._mix((2**32 - 1 + index * randomness.WEYL) & randomness.MASK) ^ 12345)
    assert kept[layer, sample, token, feature] == (word >> 16 >= round(rate * 2**16))
    assert kept[layer, sample, token, feature - 1] == (word & 0xFFFF >= round(rate * 2**16))
    many = hashed_masks(keys, (2, 500, 10, 8), rate).float()
    assert abs(many.mean() - 0.7) < 0.01
    assert hashed_masks(keys, (1, 2, 3, 3), 0.0).all()


def test_code_is_compiled_in_a_thread_and_once(monkeypatch, tmp_path):
    threads = []

    def compile(source, architecture):
        threads.append(threading.current_thread())
        return f"{source} for {architecture}".encode()

    monkeypatch.setenv("NOISY_ENVS_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda_program, "_compile", compile)
    monkeypatch.setattr(cuda_program, "_nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(cuda_program, "_start", functools.cache(cuda_program._start.__wrapped__))
    monkeypatch.setattr(cuda_program, "Program", lambda code, device: code)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda_program.start("a", torch.device("cuda"))
    for index in (0, 1):
        assert cuda_program.load("a", torch.device("cuda", index)) == b"a for sm_90"
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


def test_compiled_code_is_kept_and_a_damaged_file_is_compiled_again(monkeypatch, tmp_path):
    compiled = []

    def compile(source, architecture):
        compiled.append(source)
        return f"{source} for {architecture}".encode()

    monkeypatch.setenv("NOISY_ENVS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda_program, "_compile", compile)
    monkeypatch.setattr(cuda_program, "_nvrtc_version", lambda: (13, 0))
    for _ in range(2):
        assert cuda_program.compile_source("a", "sm_90") == b"a for sm_90"
    assert compiled == ["a"]
    (file,) = (tmp_path / "cache").glob("*.cubin")
    file.write_bytes(file.read_bytes()[:-1])
    assert cuda_program.compile_source("a", "sm_90") == b"a for sm_90"
    cuda_program.compile_source("a", "sm_80")
    monkeypatch.setattr(cuda_program, "_nvrtc_version", lambda: (13, 1))
    cuda_program.compile_source("a", "sm_90")
    assert compiled == ["a"] * 4
    (tmp_path / "file").touch()
    monkeypatch.setenv("NOISY_ENVS_CACHE", str(tmp_path / "file" / "folder"))
    with pytest.warns(RuntimeWarning, match="compiled kernels are not kept"):
        assert cuda_program.compile_source("b", "sm_90") == b"b for sm_90"

"""Training with the fused kernels, emulated on the CPU, is training by torch; changed agents are recognised."""

import dataclasses
import shlex
import shutil
import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from cases import by_default
from helpers import ROOT, load_agent

torch = pytest.importorskip("torch")
pytest.importorskip("tyro")

sys.path[:0] = [str(ROOT / "agents"), str(ROOT / "tests" / "nn")]
import many_runs  # noqa: E402
from fused_emulation import emulate  # noqa: E402

del sys.path[:2]

from noisy_envs.nn import fused, transformer  # noqa: E402
from noisy_envs.nn.fused_source import unsupported  # noqa: E402
from noisy_envs.training import kernel  # noqa: E402
from noisy_envs.training.checkpoint import load_checkpoint, read_summary  # noqa: E402
from noisy_envs.training.envs import make_envs  # noqa: E402
from noisy_envs.training.main import main  # noqa: E402
from noisy_envs.training.metrics import read_metrics  # noqa: E402
from noisy_envs.training.settings import parse  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which compiles the emulated kernels")
SMALL = """--num-envs 4 --num-steps 8 --minibatch-size 16 --update-epochs 1 --num-layers 1 --embed-dim 3 --num-heads 3
    --feedforward-dim 12 --mlp-dim 32 --eval-episodes 2 --no-capture-video --no-compile --kl-coef 0.2 --ent-coef 0.01
    --env-kwargs max_steps=5"""
SMALL = shlex.split(SMALL)
GAMES = {
    "SimpleCentroid-v0": [],
    "SimpleTag-v0": [],
    "BoxWorldEntities-v0": ["--env-kwargs", "max_steps=5", "num_levels=4"],
}


@pytest.fixture
def emulated(monkeypatch, tmp_path):
    """Put an emulated GPU in the place of a real one, and let dropout follow from a hash as there."""
    folder, programs, started = tmp_path / "kernels", {}, set()
    folder.mkdir()
    check_guards = emulate(monkeypatch, folder)
    compile_source = fused.cuda_program.load

    def load(text, device):  # once
        if text not in programs:
            programs[text] = compile_source(text, device)
        return programs[text]

    monkeypatch.setattr(fused.cuda_program, "load", load)
    monkeypatch.setattr(fused.cuda_program, "start", lambda text, device: started.add(text))
    monkeypatch.setattr(kernel, "fits", lambda agent, network, device: unsupported(agent, network))
    monkeypatch.setattr(transformer.TransformerEncoder, "hash_dropout", True)  # by torch, too
    yield programs
    check_guards()
    assert started <= programs.keys()  # nothing was compiled in vain


def train(folder, *words, head="adapool", module=None):
    """Train, and return the rows of `metrics.csv` without times, and the run's folder."""
    main(module or load_agent(head), [*SMALL, "--total-timesteps", "64", "--run-dir", str(folder), *words])
    (path,) = folder.glob("*/metrics.csv")
    return rows_of(path.parent), path.parent


def rows_of(folder):
    """Return the rows of a run, without times."""
    return [
        {name: x for name, x in row.items() if name != "charts/SPS"} for row in read_metrics(folder / "metrics.csv")
    ]


def assert_close(found, expected):
    """Compare two runs, of which one computed the same in another order."""
    assert len(found) == len(expected) > 0
    for row, other in zip(found, expected, strict=True):
        for name, x in other.items():
            assert row[name] == pytest.approx(x, rel=1e-3, abs=1e-5, nan_ok=True), name


@by_default(
    ("head", "game"),
    [("adapool", "SimpleCentroid-v0"), ("clstoken", "SimpleTag-v0")],
    [(head, game) for head in ("adapool", "avgpool", "clstoken", "maxpool") for game in GAMES],
)
def test_training_with_the_kernels_is_training_by_torch(head, game, emulated, monkeypatch, tmp_path):
    words = ["--env-id", f"noisy_envs/{game}", "--dropout", "0.2", *GAMES[game]]
    plain, reference = train(tmp_path / "torch", *words, "--kernel", "torch", head=head)
    assert not emulated
    began, sizes, policy = [], [], kernel.FusedRuns.policy
    monkeypatch.setattr(fused.cuda_program, "start", lambda text, device: began.append(text))
    monkeypatch.setattr(
        kernel.FusedRuns, "policy", lambda runs, tokens: sizes.append(tokens.shape[1]) or policy(runs, tokens)
    )
    rows, folder = train(tmp_path / "fused", *words, "--kernel", "fused", head=head)
    assert set(began) == emulated.keys()  # in threads, while the environments are made
    assert_close(rows, plain)
    assert sizes[-1] == 2  # the episodes of the evaluation
    returns = [read_summary(path / "summary.json")["return"] for path in (folder, reference)]
    assert returns[0] == pytest.approx(returns[1], rel=1e-3)
    main(load_agent(head), ["--evaluate", str(folder), "--run-dir", str(tmp_path / "evaluation")])


def test_a_run_is_resumed_with_either(emulated, tmp_path):
    words = ["--no-anneal-lr", "--dropout", "0.2"]
    whole, _ = train(tmp_path / "whole", *words, "--kernel", "torch")
    for first, second in (("torch", "fused"), ("fused", "torch")):
        _, folder = train(tmp_path / first, *words, "--kernel", first, "--total-timesteps", "32")
        main(load_agent("adapool"), ["--resume", str(folder), "--kernel", second, "--total-timesteps", "64"])
        rows = [
            {name: x for name, x in row.items() if name != "charts/SPS"} for row in read_metrics(folder / "metrics.csv")
        ]
        assert_close(rows, whole)
        assert load_checkpoint(folder / "checkpoint.pt")["args"]["kernel"] == second


def test_an_optimizer_of_each_weight_learns_what_the_kernels_compute(emulated, tmp_path):
    expected, _ = train(tmp_path / "torch", "--kernel", "torch")
    module = load_agent("adapool")
    module.make_optimizer = lambda args, agent: torch.optim.Adam(agent.parameters(), 1.0, eps=args.adam_eps)
    rows, _ = train(tmp_path / "fused", "--kernel", "fused", module=module)
    assert emulated
    assert_close(rows, expected)


def test_many_runs_with_the_kernels_are_runs_alone(emulated, tmp_path):
    module = load_agent("avgpool")
    own = "--seed 1 --dropout 0.2 --clip-coef 0.01", "--seed 2 --vf-coef 0.1 --kl-coef 0"
    common = [*SMALL, "--total-timesteps", "64", "--kernel", "fused", "--run-dir", str(tmp_path / "many")]
    found, failures = many_runs.run_group(module, [parse(module, [*common, *words.split()]) for words in own])
    assert emulated and not failures
    for i, run in enumerate(found):
        expected, _ = train(tmp_path / f"alone-{i}", *own[i].split(), "--kernel", "torch", head="avgpool")
        assert_close(rows_of(run.folder), expected)


def test_the_kernels_of_the_next_group_are_compiled_while_one_trains(emulated, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(fused, "start", lambda network, offsets, shape, device: seen.append(network.num_tokens))
    monkeypatch.setattr(many_runs, "run_group", lambda module, settings: seen.append(settings[0].num_noise) or ([], []))
    words = [word for word in SMALL if word != "--no-capture-video"]
    words += ["--total-timesteps", "32", "--kernel", "fused"]
    args = many_runs.Args(out=tmp_path, seeds=(1, 2), vary=("num_noise=0,1,2",))
    assert not many_runs.run_all(many_runs.plan(args, words))
    assert seen == [4, 5, (0,), 5, 6, (1,), 6, (2,)]  # each group begins with its own, in case it is the first


def changed_loss(module):
    loss = module.ppo_loss

    def ppo_loss(args, agent, samples, keep, kl_coef):
        value, parts = loss(args, agent, samples, keep, kl_coef)
        return value + 0.01 * parts["value_loss"], parts

    module.ppo_loss = ppo_loss


def more_parts(module):
    loss = module.ppo_loss

    def ppo_loss(*given):
        value, parts = loss(*given)
        return value, parts | {"extra": value}

    module.ppo_loss = ppo_loss


def dual_clipped(module):
    def ppo_loss(args, agent, samples, keep, kl_coef):
        return original(dataclasses.replace(args, dual_clip=3.0), agent, samples, keep, kl_coef)

    original, module.ppo_loss = module.ppo_loss, ppo_loss


def clipped_higher(module):
    def ppo_loss(args, agent, samples, keep, kl_coef):
        loss, parts = original(args, agent, samples, keep, kl_coef)
        parameters, _ = agent(samples.tokens, keep, args.dropout)
        ratio = (agent.distribution.log_prob(parameters, samples.action) - samples.log_prob).exp()
        clipped = ratio.clamp(1 - args.clip_coef, 1 + 1.4 * args.clip_coef)
        policy_loss = -torch.min(samples.advantage * ratio, samples.advantage * clipped).mean()
        return loss + policy_loss - parts["policy_loss"], parts | {"policy_loss": policy_loss}

    original, module.ppo_loss = module.ppo_loss, ppo_loss


def robust_values(module):
    def ppo_loss(args, agent, samples, keep, kl_coef):
        loss, parts = original(args, agent, samples, keep, kl_coef)
        error = agent(samples.tokens, keep, args.dropout)[1] - samples.target
        huber = torch.where(error.abs() < 10, error.square(), 20 * error.abs() - 100).mean()
        return loss + args.vf_coef * (huber - parts["value_loss"]), parts | {"value_loss": huber}

    original, module.ppo_loss = module.ppo_loss, ppo_loss


def other_entropy(module):
    def ppo_loss(args, agent, samples, keep, kl_coef):
        loss, parts = original(args, agent, samples, keep, kl_coef)
        return loss + args.ent_coef * parts["entropy"] * (1 - parts["entropy"]), parts

    original, module.ppo_loss = module.ppo_loss, ppo_loss


def more_samples(module):
    class Samples(NamedTuple):
        tokens: torch.Tensor
        action: torch.Tensor
        parameters: torch.Tensor
        log_prob: torch.Tensor
        advantage: torch.Tensor
        target: torch.Tensor
        value: torch.Tensor

    module.Samples = Samples


def changed_head(module):
    forward = module.PoolingHead.forward
    module.PoolingHead.forward = lambda head, x, mask: 1.1 * forward(head, x, mask)


def other_weights(module):
    init = module.PoolingHead.__init__

    def make(head, *given):
        init(head, *given)
        head.bias = torch.nn.Parameter(torch.zeros(3))

    module.PoolingHead.__init__ = make


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed_loss, "the gradient of .* differs from the file's by"),
        (more_parts, "the loss has the parts policy_loss, .*, extra, in the kernel policy_loss,"),
        (dual_clipped, "the loss's policy_loss differs from the file's by"),
        (clipped_higher, "the loss's policy_loss differs from the file's by"),
        (robust_values, "the loss's value_loss differs from the file's by"),
        (other_entropy, "the gradient of .* differs from the file's by"),
        (more_samples, "Samples has the fields tokens, .*, value, in the kernel tokens,"),
        (changed_head, "the policy differs from the file's by"),
        (other_weights, r"pool\.bias: the kernel takes the shape None, got \(3,\)"),
    ],
)
def test_a_changed_agent_is_not_taken_for_the_same(change, reason, emulated, tmp_path):
    words = ["--ent-coef", "0"]  # a part of the loss that does not count for this run
    module = load_agent("adapool")
    change(module)
    with pytest.raises(SystemExit, match=f"^error: kernel='fused': {reason}"):
        train(tmp_path, "--kernel", "fused", *words, module=module)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--num-heads", "1"], "num_heads=1: the kernel takes embed_dim=3"),
        (["--torch-deterministic"], "torch_deterministic=True: the kernel adds in no fixed order"),
    ],
)
def test_torch_is_used_where_the_kernels_do_not_fit(words, reason, emulated, capsys):
    module = load_agent("adapool")
    args = parse(module, [*SMALL, *words])
    envs = make_envs(args)
    agent = module.Agent(args, envs.token_spec, envs.action_space)
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    args = dataclasses.replace(args, kernel="auto", device="cuda")
    assert kernel.make_fused(module, agent, [args], on_gpu, envs.start.tokens) is None
    assert capsys.readouterr().out == f"kernel: torch, since {reason}\n"


def test_without_a_gpu_torch_is_used_and_the_kernel_refused(tmp_path, capsys):
    train(tmp_path / "auto")
    assert "kernel" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^error: kernel='fused': device=cpu: the kernel takes a GPU of NVIDIA"):
        train(tmp_path / "fused", "--kernel", "fused")

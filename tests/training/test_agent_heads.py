"""The pooling head of each agent's file: the library's general one, in an agent that differs in nothing else."""

import dataclasses
import difflib
import importlib.util
import math
import shutil
import subprocess
import sys
from functools import partial
from itertools import combinations

import pytest
from cases import HEADS
from helpers import ROOT, load_agent

torch = pytest.importorskip("torch")
pytest.importorskip("tyro")
from training_helpers import SMALL, begin, ppo, rollout  # noqa: E402  torch may be missing

from noisy_envs.nn import pooling  # noqa: E402
from noisy_envs.training.accelerate import accumulate_gradient, flatten  # noqa: E402
from noisy_envs.training.main import main  # noqa: E402
from noisy_envs.training.metrics import read_metrics  # noqa: E402
from noisy_envs.training.run import Run  # noqa: E402
from noisy_envs.training.settings import parse  # noqa: E402

each_head = pytest.mark.parametrize("head", HEADS)
AGENTS = ROOT / "agents"
WIDTH, LAYERS, STD = 8, 3, 0.5


def pair(head, query=2, scale="head"):
    """Return the head of an agent's file and the library's, each with its generator."""
    agent = load_agent(head)
    args = agent.Args(embed_dim=WIDTH, num_heads=2, num_layers=LAYERS, init_std=STD, attention_scale=scale)
    generators = [torch.Generator().manual_seed(7) for _ in range(2)]
    factor = None if scale == "head" else WIDTH**-0.5
    general = {
        "adapool": lambda generator: pooling.AdaPool(
            WIDTH, 2, query, scale=factor, init_std=STD, output_std=STD / (2 * LAYERS) ** 0.5, generator=generator
        ),
        "avgpool": lambda _: pooling.AvgPool(),
        "clstoken": lambda generator: pooling.ClsToken(WIDTH, STD, generator),
        "maxpool": lambda _: pooling.MaxPool(),
    }
    return agent.PoolingHead(args, query, generators[0]), general[head](generators[1]), generators


def sets(padded):
    """Draw tokens (5, 7, 8) in float64, of which some are equal, and a mask of at least three in each set."""
    tokens = torch.randn(5, 7, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens[:, 1] = tokens[:, 6] = tokens[:, 0]  # they share a maximum, and the last may be padding
    mask = torch.arange(7) < torch.tensor([7, 3, 5, 4, 6])[:, None] if padded else None
    return tokens.requires_grad_(), mask


def encode(tokens, mask):
    """Stand in for an encoder: embeddings (B, N, H) that depend on all tokens, and its attention (B, 3, N, N)."""
    random = torch.Generator().manual_seed(1)
    mix, scores = (torch.randn(*shape, generator=random, dtype=torch.float64) for shape in ((8, 8), (5, 3, 8, 8)))
    size = tokens.shape[1]
    scores = scores[:, :, :size, :size]
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    return tokens + (tokens @ mix).mean(1, keepdim=True), scores.softmax(3)


# the head of the file, and the library's


@each_head
@pytest.mark.parametrize("scale", ["head", "embed"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_head_is_the_librarys(head, scale, padded):
    own, general, _ = pair(head, scale=scale)
    found, (tokens, mask) = [], sets(padded)
    for pool in (own.double(), general.double()):
        extended, extended_mask = pool.extend(tokens, mask)
        x, attention = encode(extended, extended_mask)
        pooled, weights = pool(x, extended_mask), pool.weights(x, extended_mask, attention)
        if pool is general:
            weights = weights.movedim(pool.token_axis, -1).reshape(5, -1, 7).mean(1)  # over heads or features
        direction = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        slopes = torch.autograd.grad((pooled * direction).sum(), [tokens, *pool.parameters()])
        found.append((extended, extended_mask, pooled, weights, slopes))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)
    assert own.num_extra_tokens == found[0][0].shape[1] - 7
    weights = found[0][3]
    assert weights.shape == (5, 7) and weights.dtype == torch.float64
    torch.testing.assert_close(weights.sum(1), torch.ones(5, dtype=torch.float64))
    assert (weights >= 0).all() and (mask is None or (weights[~mask] == 0).all())


@each_head
def test_a_head_draws_the_librarys_weights(head):
    own, general, generators = pair(head)
    drawn, expected = dict(own.named_parameters()), dict(general.named_parameters())
    assert drawn.keys() == expected.keys() and bool(drawn) == (head in ("adapool", "clstoken"))
    assert all(torch.equal(weight, expected[name]) for name, weight in drawn.items())
    assert torch.equal(*(generator.get_state() for generator in generators))


def test_adapools_query_is_the_row_that_is_asked_for():
    (first, _, _), (third, _, _) = pair("adapool", query=0), pair("adapool", query=2)
    tokens, _ = sets(padded=False)
    order = [2, 1, 0, 3, 4, 5, 6]
    found = third.double()(tokens, None)
    torch.testing.assert_close(first.double()(tokens[:, order], None), found)
    assert (first(tokens, None) - found).abs().max() > 0.1


# agents of one seed


@pytest.mark.parametrize(
    "words", [[], ["--env-id", "noisy_envs/SimpleTag-1v3v28-v0", "--no-compile"]], ids=["fast", "paper"]
)
def test_all_heads_start_alike(words):
    first = None
    for head in HEADS:
        _, _, agent, start = begin([*words, "--seed", "5"], load_agent(head))
        weights = {name: weight for name, weight in agent.named_parameters() if not name.startswith("pool.")}
        first = first or (weights, start.tokens)
        assert weights.keys() == first[0].keys() and torch.equal(start.tokens, first[1])
        assert all(torch.equal(weight, first[0][name]) for name, weight in weights.items())
    again, other = (begin([*words, "--seed", seed])[2] for seed in ("5", "6"))
    assert all(torch.equal(weight, dict(again.named_parameters())[name]) for name, weight in first[0].items())
    assert not torch.equal(other.actor[0].weight, again.actor[0].weight)


@pytest.mark.parametrize("head", ["adapool", "clstoken"])
def test_no_weight_of_a_head_is_one_of_the_encoders_nor_chance_of_the_first_actions(head):
    module = load_agent(head)
    args, _, agent, _ = begin(["--init-std", "1"], module)
    drawn = [(name, x.detach().flatten()) for name, x in agent.named_parameters() if "output" not in name]
    own = torch.cat([x for name, x in drawn if name.startswith("pool")])
    others = torch.cat([x for name, x in drawn if not name.startswith("pool") and "bias" not in name])
    chance = torch.empty(100_000).normal_(generator=Run(module, args).generator())
    for one, other in ((own, others), (own, chance), (others, chance)):
        assert len(one) >= 16 and torch.isin(one, other).float().mean() < 0.05  # by chance a few are


@each_head
def test_each_agent_learns_from_one_batch(head):
    """Sets are padded, and dropout is on: a class token makes its masks longer."""
    module = load_agent(head)
    words = ["--env-kwargs", "num_noise=(0,4)", "max_steps=5", "--num-envs", "16", "--minibatch-size", "128"]
    words += ["--dropout", "0.1", "--update-epochs", "10", "--learning-rate", "0.01"]
    args, envs, agent, start = begin(words, module)
    assert envs.token_spec.padded
    _, _, samples, _ = rollout(args, envs, agent, start, module)

    def losses():
        return module.ppo_loss(args, agent, samples, None, torch.tensor(0.0))[1]

    def gradient(batch, keep, kl_coef):
        assert keep.shape == (1, 128, envs.token_spec.num_tokens + agent.pool.num_extra_tokens, args.embed_dim)
        loss = partial(module.ppo_loss, args, agent)
        return accumulate_gradient(flatten(agent), loss, batch, keep, kl_coef)

    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate)
    before = losses()
    assert before["clipfrac"] == 0 and before["approx_kl"].abs() < 1e-5 and before["policy_loss"].abs() < 1e-5
    module.update(args, agent, optimizer, gradient, samples, 0.0, torch.Generator().manual_seed(0))
    after = losses()
    assert all((weight.grad != 0).any() for weight in agent.parameters())
    assert after["policy_loss"] < -0.05 and after["value_loss"] < 0.9 * before["value_loss"]
    assert after["approx_kl"] > 1e-3


@pytest.mark.slow
@each_head
def test_three_times_the_rate_stays_finite(head, tmp_path):
    words = ["--learning-rate", "0.012", "--no-anneal-lr", "--total-timesteps", str(200 * 2048), "--num-envs", "16"]
    words += ["--minibatch-size", "512", "--run-dir", str(tmp_path), "--eval-episodes", "3", "--no-capture-video"]
    main(load_agent(head), words)  # a loss that is not finite would end it
    (path,) = tmp_path.glob("*/metrics.csv")
    rows = read_metrics(path)
    assert len(rows) == 200 and all(
        math.isfinite(x) for row in rows for name, x in row.items() if name.startswith("losses/")
    )


# files


@each_head
def test_an_agent_is_short(head):
    assert len((AGENTS / f"ppo_{head}.py").read_text().splitlines()) <= 420


@pytest.mark.parametrize(("one", "other"), [*combinations(HEADS, 2)])
def test_two_agents_differ_in_their_heads_alone(one, other):
    texts = [(AGENTS / f"ppo_{head}.py").read_text().splitlines() for head in (one, other)]
    changed = [line for line in difflib.unified_diff(*texts, n=0, lineterm="") if line[0] in "+-"][2:]
    assert 0 < len(changed) <= 60
    rest = []
    for text in texts:
        head, after = (text.index(f"class {name}(nn.Module):") for name in ("PoolingHead", "Agent"))
        rest.append(text[1:head] + text[after:])
    assert rest[0] == rest[1]


def test_copies_are_checked_and_mended(tmp_path):
    for folder in ("agents", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    spec = importlib.util.spec_from_file_location("check_copies", tmp_path / "tools" / "check_copies.py")
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    path = tmp_path / "agents" / "ppo_clstoken.py"
    good = path.read_text()
    assert check.main(fix=False) == 0
    own = good.replace("return x[:, 0]", "return x[:, 0] * 2").replace('"""PPO', '"""Our PPO', 1)
    path.write_text(own)
    assert own != good and check.main(fix=False) == 0  # a head, and the first line, are each agent's own
    for line in ("ongoing[t] * later", "features += args.role_dim - 1", "import sys", '"""Settings of a run.'):
        assert own.count(line) == 1, line
        path.write_text(own.replace(line, line + "  # changed"))
        assert check.main(fix=False) == 1
        assert check.main(fix=True) == 0 and path.read_text() == own
    path.write_text(own + "x = 1\n")
    run = [sys.executable, tmp_path / "tools" / "check_copies.py"]
    wrong = subprocess.run(run, check=False, capture_output=True, text=True)
    assert wrong.returncode == 1 and wrong.stdout.startswith("agents/ppo_clstoken.py: ")
    subprocess.run([*run, "--fix"], check=True, stdout=subprocess.DEVNULL)
    assert path.read_text() == own
    (tmp_path / "agents" / "ppo_mine.py").write_text("x = 1\n")  # a user's copy is left alone
    assert check.main(fix=True) == 0 and (tmp_path / "agents" / "ppo_mine.py").read_text() == "x = 1\n"


@pytest.mark.parametrize(("weights", "given"), [("-x.abs().mean(2)", "from -"), ("x.abs()[:, :2, 0]", r"\(2, 2\)")])
def test_weights_that_no_video_could_show_are_refused_before_training(weights, given, tmp_path, monkeypatch):
    agent = load_agent("avgpool")
    code = f"lambda self, x, mask, attention=None: {weights}"
    plain = agent.PoolingHead.weights
    monkeypatch.setattr(agent.PoolingHead, "weights", eval(code))
    monkeypatch.setattr(
        agent.PoolingHead, "forward", lambda self, x, mask: (plain(self, x, mask)[..., None] * x).sum(1)
    )
    with pytest.raises(SystemExit, match=rf"^error: PoolingHead\.weights: expected [^\n]*\(2, 8\), got [^\n]*{given}"):
        main(agent, [*SMALL, "--capture-video", "--total-timesteps", "64", "--run-dir", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_a_class_token_that_sees_only_itself_weighs_no_token():
    head = load_agent("clstoken").PoolingHead(ppo.Args(), 0, torch.Generator().manual_seed(0))
    attention = torch.eye(5).expand(2, 4, 5, 5)
    assert head.weights(torch.zeros(2, 5, 32), None, attention).tolist() == [[0.0] * 4] * 2


def test_a_setting_that_a_copy_adds_may_be_any_finite_number(tmp_path):
    agent = load_agent("avgpool")
    agent.Args = dataclasses.make_dataclass("Args", [("l2_coef", float, 0.0), ("shift", int, -3)], bases=(agent.Args,))
    assert parse(agent, ["--l2-coef", "1e-4"]).l2_coef == 1e-4 and parse(agent, []).shift == -3
    with pytest.raises(ValueError, match="l2_coef=nan: expected a number from -inf to inf"):
        parse(agent, ["--l2-coef", "nan"])

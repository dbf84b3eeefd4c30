"""The learning loop: what is played, what it was worth, and the gradient that follows."""

from functools import partial

import pytest

pytest.importorskip("torch")
pytest.importorskip("tyro")
import torch
from training_helpers import BOX, begin, ppo, rollout

from noisy_envs.randomness import derive_seed
from noisy_envs.training import accelerate
from noisy_envs.training.accelerate import accumulate_gradient, flatten, minibatches
from noisy_envs.training.envs import env_kwargs, make_vec

WORDS = ["--num-envs", "8", "--minibatch-size", "128"]
GAMES = {"continuous": [], "discrete": ["--env-id", "noisy_envs/SimpleTag-v0"], "terminating": BOX}
games = pytest.mark.parametrize("words", GAMES.values(), ids=GAMES)
EMPTY = ppo.Transition(*[None] * len(ppo.Transition._fields))


def ratio_to(samples, agent, keep=None):
    """Return the probability ratios (M,) of the samples' actions."""
    parameters, _ = agent(samples.tokens, keep)
    return (agent.distribution.log_prob(parameters, samples.action) - samples.log_prob).exp()


# returns and advantages


@pytest.mark.parametrize(
    ("next_value", "expected"), [(0.5, [1.9307975, 0.995]), (0.0, [1.46525, 0.5])], ids=["truncated", "terminated"]
)
@pytest.mark.parametrize("later", [1.0, 1000.0])
def test_advantages_by_hand(next_value, expected, later):
    rewards = torch.tensor([[1.0], [1.0], [later]])
    values = torch.tensor([[0.5], [0.5], [1000.0]])  # the value of the next episode's first state must not enter
    next_values = torch.tensor([[0.5], [next_value], [0.5]])
    ended, never = torch.tensor([[False], [True], [False]]), torch.zeros(3, 1, dtype=torch.bool)
    terminated, truncated = (never, ended) if next_value else (ended, never)
    batch = EMPTY._replace(reward=rewards, value=values, terminated=terminated, truncated=truncated)
    found = ppo.advantages(batch, next_values, 0.99, 0.95)
    torch.testing.assert_close(found[:2, 0], torch.tensor(expected))


def test_advantages_are_those_of_a_plain_loop():
    random = torch.Generator().manual_seed(0)
    rewards, values, next_values = torch.randn(3, 50, 7, generator=random, dtype=torch.float64)
    terminated, truncated = torch.rand(2, 50, 7, generator=random) < 0.05
    batch = EMPTY._replace(reward=rewards, value=values, terminated=terminated, truncated=truncated)
    found, ended = ppo.advantages(batch, next_values, 0.9, 0.8), terminated | truncated
    for world in range(7):
        for t in range(50):
            total, share = 0.0, 1.0
            for later in range(t, 50):
                delta = rewards[later, world] + 0.9 * next_values[later, world] - values[later, world]
                total += share * delta
                share *= 0.9 * 0.8
                if ended[later, world]:
                    break
            assert found[t, world] == pytest.approx(float(total))


def test_both_flags_mean_terminated():
    args, envs, agent, start = begin(WORDS)
    end, batch, _, _ = rollout(args, envs, agent, start)
    both = torch.ones_like(batch.terminated)
    batch = batch._replace(terminated=both, truncated=both)
    assert (ppo.next_values(agent, batch, end.tokens) == 0).all()


@games
def test_a_rollout_plays_the_environments_and_trains_on_no_reset(words):
    args, envs, agent, start = begin([*WORDS, *words])
    end, batch, _, stats = rollout(args, envs, agent, start)
    plain = make_vec(args, 8, env_kwargs(args))  # stepped by themselves
    tokens, _ = plain.reset(seed=derive_seed(args.seed, "train"))
    returns, lengths, finished = torch.zeros(8), torch.zeros(8), []
    for t in range(16):
        torch.testing.assert_close(batch.tokens[t], tokens)
        parameters, values = agent(tokens)
        torch.testing.assert_close(batch.value[t], values.detach())
        torch.testing.assert_close(batch.parameters[t], parameters.detach())
        tokens, rewards, terminated, truncated, info = plain.step(batch.action[t])
        torch.testing.assert_close(batch.reward[t], rewards)
        assert torch.equal(batch.terminated[t], terminated) and torch.equal(batch.truncated[t], truncated)
        over = terminated | truncated
        last = torch.where(over[:, None, None], info.get("final_obs", tokens), tokens)
        torch.testing.assert_close(batch.final_tokens[t], last)
        returns += rewards
        lengths += 1
        torch.testing.assert_close(batch.episode_return[t], returns)
        torch.testing.assert_close(batch.episode_length[t], lengths)
        finished += zip(returns[over].tolist(), lengths[over].tolist(), strict=True)
        returns[over] = lengths[over] = 0
    torch.testing.assert_close(end.tokens, tokens)
    torch.testing.assert_close(end.episode_return, returns)
    torch.testing.assert_close(end.episode_length, lengths)
    sums = [float(stats[name]) for name in ("returns", "lengths", "episodes")]
    assert sums == pytest.approx([*map(sum, zip(*finished, strict=True)), len(finished)])
    assert len(finished) >= 24 and stats["finite"]


@games
def test_a_truncated_episode_goes_on_in_principle_and_a_terminated_one_does_not(words):
    words = [*WORDS, *words, "--num-envs", "64", "--num-steps", "30", "--env-kwargs", "max_steps=9"]
    args, envs, agent, start = begin(words)
    end, batch, _, _ = rollout(args, envs, agent, start)
    with torch.no_grad():
        after = ppo.next_values(agent, batch, end.tokens)
        expected = agent(batch.final_tokens.flatten(0, 1))[1].view(30, 64)
    torch.testing.assert_close(after, expected * ~batch.terminated)
    assert batch.truncated.any() and ("noisy_envs/BoxWorld-v0" not in words or batch.terminated.any())
    assert (after[batch.terminated] == 0).all() and (after[batch.truncated] != 0).all()


def test_eight_episodes_that_end_together_count_eight():
    args, envs, agent, start = begin([*WORDS, "--num-steps", "12", "--minibatch-size", "96"])
    _, batch, _, stats = rollout(args, envs, agent, start)
    assert (batch.truncated.sum(1) == torch.tensor([0, 0, 0, 0, 8, 0, 0, 0, 0, 8, 0, 0])).all()
    assert stats["episodes"] == 16 and stats["lengths"] == 16 * 5
    assert stats["returns"] == pytest.approx(float(batch.reward[:10].sum()))


def test_what_a_gradient_step_learns_from_is_the_rollout():
    args, envs, agent, start = begin(WORDS)
    end, batch, samples, stats = rollout(args, envs, agent, start)
    advantage = ppo.advantages(batch, ppo.next_values(agent, batch, end.tokens), args.gamma, args.gae_lambda)
    for name in ("tokens", "action", "parameters"):
        assert torch.equal(getattr(samples, name), getattr(batch, name).flatten(0, 1))
    torch.testing.assert_close(samples.target, (advantage + batch.value).flatten())  # which is not normalised
    assert samples.advantage.mean().abs() < 1e-6 and samples.advantage.std(correction=0) == pytest.approx(1, abs=1e-5)
    normalized = (advantage - advantage.mean()) / advantage.std(correction=0)
    torch.testing.assert_close(samples.advantage, normalized.flatten(), rtol=1e-4, atol=1e-5)
    explained = 1 - advantage.var() / (advantage + batch.value).var()
    torch.testing.assert_close(stats["explained_variance"], explained)


# the gradient


@games
def test_the_first_ratio_is_one_without_dropout(words):
    args, envs, agent, start = begin([*WORDS, *words, "--dropout", "0.5"])
    _, _, samples, _ = rollout(args, envs, agent, start)
    ratio = ratio_to(samples, agent)
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)
    keep = agent.dropout_masks(128, torch.Generator().manual_seed(0))
    assert (ratio_to(samples, agent, keep) - 1).abs().max() > 1e-4


def test_dropout_scales_up_what_it_keeps():
    args, envs, agent, start = begin([*WORDS, "--dropout", "0.75"])
    _, _, samples, _ = rollout(args, envs, agent, start)
    everything = torch.ones(1, 128, agent.spec.num_tokens, args.embed_dim, dtype=torch.bool)
    _, parts = ppo.ppo_loss(args, agent, samples, everything, torch.tensor(0.0))
    value = agent(samples.tokens, everything, 0.75)[1]
    torch.testing.assert_close(parts["value_loss"], (value - samples.target).square().mean())
    assert (parts["value_loss"] - (agent(samples.tokens)[1] - samples.target).square().mean()).abs() > 1e-4


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_gradient_of_pieces_is_that_of_all(monkeypatch, dropout):
    args, envs, agent, start = begin([*WORDS, "--dropout", str(dropout)])
    _, _, samples, _ = rollout(args, envs, agent, start)
    keep = agent.dropout_masks(128, torch.Generator().manual_seed(0)) if dropout else None
    found = []
    for piece in (1024, 48):  # 128 samples: at once, or 32 at a time
        monkeypatch.setattr(accelerate, "CPU_PIECE", piece)
        calls = []

        def loss(part, mask, kl_coef, calls=calls):
            calls.append(len(part.advantage))
            return ppo.ppo_loss(args, agent, part, mask, kl_coef)

        parts = accumulate_gradient(flatten(agent), loss, samples, keep, torch.tensor(0.3))
        found.append((parts, torch.cat([weight.grad.flatten() for weight in agent.parameters()])))
        assert calls == [128] if piece == 1024 else calls == [32] * 4
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
    loss, _ = ppo.ppo_loss(args, agent, samples, keep, torch.tensor(0.3))
    plain = torch.autograd.grad(loss, list(agent.parameters()))
    torch.testing.assert_close(found[0][1], torch.cat([x.flatten() for x in plain]), rtol=1e-4, atol=1e-6)


def test_minibatches_take_each_sample_once():
    rows = torch.arange(8192)
    samples = ppo.Samples(rows, *(rows + i for i in range(1, 6)))
    pieces = list(minibatches(samples, 2048, torch.Generator().manual_seed(0)))
    assert [len(piece.tokens) for piece in pieces] == [2048] * 4
    order = torch.cat([piece.tokens for piece in pieces])
    assert order.sort().values.tolist() == rows.tolist() != order.tolist()
    for piece in pieces:
        assert type(piece) is ppo.Samples and all(torch.equal(x, piece.tokens + i) for i, x in enumerate(piece))
    (whole,) = minibatches(samples, 8192, torch.Generator())
    assert whole is samples


def test_the_loss_is_ppos():
    args, envs, agent, start = begin([*WORDS, "--ent-coef", "0.1", "--vf-coef", "0.7"])
    _, _, samples, _ = rollout(args, envs, agent, start)
    older = samples.parameters + 0.3 * torch.randn(128, 10, generator=torch.Generator().manual_seed(0))
    samples = samples._replace(log_prob=samples.log_prob + torch.linspace(-0.5, 0.5, 128), parameters=older)
    loss, parts = ppo.ppo_loss(args, agent, samples, None, torch.tensor(0.3))
    split = agent.distribution.split
    old, new = (torch.distributions.Normal(mean, std.exp()) for mean, std in (
        split(samples.parameters), split(agent(samples.tokens)[0])))  # fmt: skip
    ratio = (new.log_prob(samples.action).sum(-1) - samples.log_prob).exp()
    surrogate = torch.min(samples.advantage * ratio, samples.advantage * ratio.clamp(0.8, 1.2)).mean()
    value = (agent(samples.tokens)[1] - samples.target).square().mean()
    kl = torch.distributions.kl_divergence(old, new).sum(-1).mean()
    entropy = new.entropy().sum(-1).mean()
    expected = -surrogate + 0.7 * value - 0.1 * entropy + 0.3 * kl
    torch.testing.assert_close(loss, expected)
    share = ((ratio < 0.8) | (ratio > 1.2)).float().mean()
    assert 0 < share < 1
    named = {"policy_loss": -surrogate, "value_loss": value, "entropy": entropy, "approx_kl": kl, "clipfrac": share}
    torch.testing.assert_close(parts, named)


def test_an_update_takes_each_epoch_and_clips_the_gradient():
    args, envs, agent, start = begin([*WORDS, "--minibatch-size", "32", "--max-grad-norm", "0.01"])
    _, _, samples, _ = rollout(args, envs, agent, start)
    seen = []

    def gradient(batch, keep, kl_coef):
        loss = partial(ppo.ppo_loss, args, agent)
        parts = accumulate_gradient(flatten(agent), loss, batch, keep, kl_coef)
        grads = [weight.grad.clone() for weight in agent.parameters()]
        seen.append((len(batch.tokens), keep, float(kl_coef), grads, parts))
        return parts

    class Steps(torch.optim.SGD):
        def step(self):
            seen[-1] += ([weight.grad.clone() for weight in agent.parameters()],)
            return super().step()

    optimizer = Steps(agent.parameters(), 0.1)
    log = ppo.update(args, agent, optimizer, gradient, samples, 0.25, torch.Generator().manual_seed(0))
    assert [call[:3] for call in seen] == [(32, None, 0.25)] * 8  # two epochs of four
    norms = []
    for *_, raw, _, clipped in seen:
        norms.append(torch.cat([x.flatten() for x in raw]).norm())
        assert norms[-1] > 0.01 and torch.cat([x.flatten() for x in clipped]).norm() == pytest.approx(0.01, rel=1e-3)
    assert log["grad_norm"] == pytest.approx(float(torch.stack(norms).mean()))
    for name in seen[0][4]:
        assert log[name] == pytest.approx(float(torch.stack([call[4][name] for call in seen]).mean()), abs=1e-6)


# the network


def test_tokens_come_first_in_narrow_heads_on_any_cpu():
    narrow = ["--env-id", "noisy_envs/SimpleTag-1v3v0-v0", "--compile", "--num-layers", "6"]
    for device in ("cpu", "cpu:0"):
        _, _, agent, _ = begin(["--device", device, *narrow])
        assert agent.encoder.tokens_first and [layer.token_axis for layer in agent.encoder.layers] == [0] * 6
    _, _, wide, _ = begin(["--compile"])
    assert not wide.encoder.tokens_first and {layer.token_axis for layer in wide.encoder.layers} == {1}


def test_padding_never_reaches_the_network():
    _, envs, agent, start = begin(["--env-kwargs", "num_noise=(0,9)", "max_steps=5"])
    mask = envs.token_spec.mask(start.tokens)
    assert not mask.all() and mask[:, envs.token_spec.query_index].all()
    broken = torch.where(mask[..., None], start.tokens, torch.nan)
    broken[..., -1] = start.tokens[..., -1]  # the role, by which padding is known
    expected = agent(start.tokens)
    torch.testing.assert_close(agent(broken), expected)
    gradients = torch.autograd.grad(sum(x.sum() for x in agent(broken)), list(agent.parameters()))
    assert all(x.isfinite().all() for x in gradients)
    moved = start.tokens.clone()
    moved[:, envs.token_spec.query_index, :-1] += 1
    assert (agent(moved)[0] - expected[0]).abs().max() > 1e-4

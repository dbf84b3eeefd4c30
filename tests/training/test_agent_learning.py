"""The learning loop of the agents: what is played, what it was worth, and the gradient that follows."""

import math
from functools import partial

import pytest
from cases import HEADS
from helpers import load_agent

pytest.importorskip("torch")
pytest.importorskip("tyro")
import torch

ppo = load_agent("adapool")
WORDS = ["--num-envs", "8", "--num-steps", "16", "--minibatch-size", "128"]
BOX = ["--env-id", "noisy_envs/BoxWorld-v0"]
GAMES = {"continuous": [], "discrete": ["--env-id", "noisy_envs/SimpleTag-v0"], "terminating": BOX}


def begin(agent_file=ppo, words=(), num_envs=8, max_steps=None):
    """Return settings, worlds, network and where a rollout begins."""
    args = agent_file.parse([*WORDS, *words])
    envs, _ = agent_file.make_envs(args, num_envs, "train")
    if max_steps is not None:
        envs._params = envs._params._replace(max_steps=max_steps)
    tokens, _ = envs.reset(seed=3)
    agent = agent_file.Agent(args, envs.token_spec, envs.single_action_space)
    tokens = tokens.flatten(0, -3)
    zeros = torch.zeros(len(tokens))
    return args, envs, agent, agent_file.Play(envs.batch_state, tokens, zeros, zeros.clone())


def play(agent_file, args, envs, agent, start, num_steps, seed=0):
    """Collect steps, with noise of a seed: where it ends, the batch, samples, and what is logged."""
    noise = agent.noise((num_steps, len(start.tokens)), "cpu", torch.Generator().manual_seed(seed))
    step = partial(agent_file.play_step, agent, agent, envs.pure_step)
    with torch.no_grad():
        end, batch = agent_file.rollout(step, start, noise)
        _, samples, seen = agent_file.collect(step, agent, agent, args, start, noise)
    return end, batch, samples, seen


# returns and advantages


@pytest.mark.parametrize(
    ("next_value", "expected"), [(0.5, [1.9307975, 0.995]), (0.0, [1.46525, 0.5])], ids=["truncated", "terminated"]
)
@pytest.mark.parametrize("later", [1.0, 1000.0])
def test_advantages_by_hand(next_value, expected, later):
    rewards = torch.tensor([[1.0], [1.0], [later]])
    values = torch.tensor([[0.5], [0.5], [1000.0]])  # the value of the next episode's first state must not enter
    next_values = torch.tensor([[0.5], [next_value], [0.5]])
    ended = torch.tensor([[False], [True], [False]])
    found = ppo.advantages(rewards, values, next_values, ended, 0.99, 0.95)
    torch.testing.assert_close(found[:2, 0], torch.tensor(expected))


def test_advantages_are_those_of_a_plain_loop():
    random = torch.Generator().manual_seed(0)
    rewards, values, next_values = torch.randn(3, 50, 7, generator=random, dtype=torch.float64)
    ended = torch.rand(50, 7, generator=random) < 0.1
    found = ppo.advantages(rewards, values, next_values, ended, 0.9, 0.8)
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
    args, envs, agent, start = begin()
    _, batch, _, _ = play(ppo, args, envs, agent, start, 4)
    both = torch.ones_like(batch.terminated)
    values = ppo.values_after(agent, agent, batch._replace(terminated=both, truncated=both), batch.values[-1])
    assert (values == 0).all()


@pytest.mark.parametrize("words", GAMES.values(), ids=GAMES)
def test_a_rollout_plays_the_worlds_and_trains_on_no_reset(words):
    args, envs, agent, start = begin(words=words, max_steps=5)
    end, batch, _, seen = play(ppo, args, envs, agent, start, 12)
    returns, finished = torch.zeros(8), []
    tokens, _ = envs.reset(seed=3)
    for t in range(12):
        torch.testing.assert_close(batch.tokens[t], tokens)
        _, values = agent(tokens)
        torch.testing.assert_close(batch.values[t], values.detach())
        tokens, rewards, terminated, truncated, info = envs.step(batch.actions[t])
        torch.testing.assert_close(batch.rewards[t], rewards)
        assert torch.equal(batch.terminated[t], terminated) and torch.equal(batch.truncated[t], truncated)
        over = terminated | truncated
        last = torch.where(over[:, None, None], info.get("final_obs", tokens), tokens)
        torch.testing.assert_close(batch.final_tokens[t], last)
        returns += rewards
        finished += returns[over].tolist()
        returns[over] = 0
    torch.testing.assert_close(end.tokens, tokens)
    torch.testing.assert_close(end.returns, returns)
    assert seen[:3].tolist() == pytest.approx(
        [sum(finished), float((batch.lengths * (batch.terminated | batch.truncated)).sum()), len(finished)]
    )
    assert len(finished) >= 16


@pytest.mark.parametrize("words", GAMES.values(), ids=GAMES)
def test_a_cut_episode_goes_on_in_principle_and_a_finished_one_does_not(words):
    args, envs, agent, start = begin(words=words, num_envs=64, max_steps=9)
    end, batch, _, _ = play(ppo, args, envs, agent, start, 30)
    with torch.no_grad():
        after = ppo.values_after(agent, agent, batch, agent(end.tokens)[1])
        expected = agent(batch.final_tokens.flatten(0, 1))[1].view(30, 64)
    torch.testing.assert_close(after, expected * ~batch.terminated)
    assert batch.truncated.any() and (words != BOX or batch.terminated.any())
    assert (after[batch.terminated] == 0).all() and (after[batch.truncated] != 0).all()


def test_eight_episodes_that_end_together_count_eight():
    args, envs, agent, start = begin(max_steps=5)
    _, batch, _, seen = play(ppo, args, envs, agent, start, 12)
    assert (batch.truncated.sum(1) == torch.tensor([0, 0, 0, 0, 8, 0, 0, 0, 0, 8, 0, 0])).all()
    assert seen[2] == 16 and seen[1] == 16 * 5
    assert seen[0] == pytest.approx(float(batch.rewards[:10].sum()))


# the gradient


@pytest.mark.parametrize("words", GAMES.values(), ids=GAMES)
@pytest.mark.parametrize("head", HEADS)
def test_the_first_ratio_is_one_without_dropout(head, words):
    file = load_agent(head)
    args, envs, agent, start = begin(file, words)
    _, _, samples, _ = play(file, args, envs, agent, start, 16)
    parameters, _ = agent(samples.tokens)
    ratio = (agent.log_prob(parameters, samples.actions) - samples.log_probs).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)
    kept = torch.rand(agent.kept_shape, generator=torch.Generator().manual_seed(0)) < 0.5
    parameters, _ = agent(samples.tokens, kept)
    assert (agent.log_prob(parameters, samples.actions) - samples.log_probs).abs().max() > 1e-4


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_gradient_of_pieces_is_that_of_all(monkeypatch, dropout):
    args, envs, agent, start = begin(words=["--dropout", str(dropout)])
    _, _, samples, _ = play(ppo, args, envs, agent, start, 16)
    kept = torch.rand(agent.kept_shape, generator=torch.Generator().manual_seed(0)) >= dropout if dropout else None
    found = []
    for chunk in (1024, 48):  # 128 samples: at once, or 32 at a time
        monkeypatch.setattr(ppo, "CPU_CHUNK", chunk)
        calls = []

        def loss_of(part, kept, kl, calls=calls):
            calls.append(len(part.gains))
            return ppo.ppo_loss(agent, part, kept, args, kl)

        parts = ppo.gradient(loss_of, agent, samples, kept, torch.tensor(0.3))
        found.append((parts, torch.cat([weight.grad.flatten() for weight in agent.parameters()])))
        assert calls == [128] if chunk == 1024 else calls == [32] * 4
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_advantages_are_normalised_over_the_update():
    args, envs, agent, start = begin()
    _, batch, samples, _ = play(ppo, args, envs, agent, start, 16)
    assert samples.gains.mean().abs() < 1e-6 and samples.gains.std(correction=0) == pytest.approx(1, abs=1e-5)
    assert (samples.targets - batch.values.flatten()).std() < 0.5  # the value's targets are not


def test_dropout_scales_up_what_it_keeps():
    block = ppo.Block(ppo.parse(["--dropout", "0.75"]))
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    before = block(x, None, torch.zeros(2, 5, 32, dtype=torch.bool))
    change = block(x, None, None) - before
    torch.testing.assert_close(block(x, None, torch.ones(2, 5, 32, dtype=torch.bool)), before + 4 * change)


def test_tokens_come_first_in_narrow_heads_on_any_cpu():
    words = ["--env-id", "noisy_envs/SimpleTag-1v3v0-v0", "--compile"]
    for device in ("cpu", "cpu:0"):
        _, _, agent, _ = begin(words=["--device", device, *words])
        assert agent.tokens_first and [block.token_axis for block in agent.blocks] == [0] * 6
    wide = begin(words=["--compile"])[2]
    assert not wide.tokens_first and {block.token_axis for block in wide.blocks} == {1}


def test_minibatches_take_each_sample_once():
    args = ppo.parse(["--minibatch-size", "2048"])
    pieces = ppo.minibatches(8192, args, torch.Generator().manual_seed(0))
    assert [len(piece) for piece in pieces] == [2048] * 4
    assert torch.cat(pieces).sort().values.tolist() == list(range(8192)) != torch.cat(pieces).tolist()
    assert ppo.minibatches(2048, args, torch.Generator()) == [None]


def test_the_loss_is_ppos():
    args, envs, agent, start = begin(words=["--ent-coef", "0.1", "--vf-coef", "0.7"])
    _, _, samples, _ = play(ppo, args, envs, agent, start, 16)
    samples = samples._replace(log_probs=samples.log_probs + torch.linspace(-0.5, 0.5, 128))
    loss, parts = ppo.ppo_loss(agent, samples, None, args, torch.tensor(0.3))
    old, new = (torch.distributions.Normal(mean, std.exp()) for mean, std in (
        agent.normal(samples.parameters), agent.normal(agent(samples.tokens)[0])))  # fmt: skip
    ratio = (new.log_prob(samples.actions).sum(-1) - samples.log_probs).exp()
    surrogate = torch.min(samples.gains * ratio, samples.gains * ratio.clamp(0.8, 1.2)).mean()
    value = (agent(samples.tokens)[1] - samples.targets).square().mean()
    kl = torch.distributions.kl_divergence(old, new).sum(-1).mean()
    expected = -surrogate + 0.7 * value - 0.1 * new.entropy().sum(-1).mean() + 0.3 * kl
    torch.testing.assert_close(loss, expected)
    share = float(((ratio < 0.8) | (ratio > 1.2)).float().mean())
    assert parts[4] == pytest.approx(share) and 0 < share < 1


# the distribution of actions


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
def test_the_distribution_is_torchs(kind):
    _, _, agent, _ = begin(words=GAMES[kind])
    random = torch.Generator().manual_seed(0)
    old, new = torch.randn(2, 100, 10 if kind == "continuous" else 5, generator=random)

    def distribution(parameters):
        if kind == "discrete":
            return torch.distributions.Categorical(logits=parameters)
        mean, log_std = parameters.chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(*agent.log_std_range).exp())
        return torch.distributions.Independent(normal, 1)

    actions = agent.sample(new, agent.noise((100,), "cpu", random))
    torch.testing.assert_close(agent.log_prob(new, actions), distribution(new).log_prob(actions))
    torch.testing.assert_close(agent.entropy(new), distribution(new).entropy())
    kl = torch.distributions.kl_divergence(distribution(old), distribution(new))
    torch.testing.assert_close(agent.divergence(old, new), kl)
    many = agent.sample(new[:1].expand(100_000, -1), agent.noise((100_000,), "cpu", random))
    if kind == "discrete":
        shares = many.bincount(minlength=5) / 100_000
        torch.testing.assert_close(shares, distribution(new[0]).probs, rtol=0, atol=0.01)
    else:
        torch.testing.assert_close(many.mean(0), distribution(new[0]).mean, rtol=0, atol=0.02)
        torch.testing.assert_close(many.std(0), distribution(new[0]).stddev, rtol=0, atol=0.02)


# four heads, and what goes wrong


@pytest.mark.parametrize(
    "words", [[], ["--env-id", "noisy_envs/SimpleTag-1v3v28-v0", "--no-compile"]], ids=["fast", "paper"]
)
def test_all_heads_start_alike(words):
    first = None
    for head in HEADS:
        file = load_agent(head)
        _, _, agent, start = begin(file, [*words, "--seed", "5"])
        weights = {name: weight for name, weight in agent.named_parameters() if not name.startswith("pool.")}
        first = first or (weights, start.tokens)
        assert weights.keys() == first[0].keys() and torch.equal(start.tokens, first[1])
        assert all(torch.equal(weight, first[0][name]) for name, weight in weights.items())
    again = begin(ppo, [*words, "--seed", "5"])[2]
    assert all(
        torch.equal(x, y)
        for x, y in zip(begin(ppo, [*words, "--seed", "5"])[2].parameters(), again.parameters(), strict=True)
    )
    assert not torch.equal(begin(ppo, [*words, "--seed", "6"])[2].actor[0].weight, again.actor[0].weight)


@pytest.mark.parametrize("head", ["adapool", "clstoken"])
def test_no_weight_of_a_head_is_one_of_the_encoders_nor_chance_of_the_first_actions(head, tmp_path):
    file = load_agent(head)
    trainer = file.Trainer(file.parse([*WORDS, "--run-dir", str(tmp_path), "--init-std", "1"]))
    trainer.close()
    drawn = [(name, x.detach().flatten()) for name, x in trainer.agent.named_parameters() if "output" not in name]
    own = torch.cat([x for name, x in drawn if name.startswith("pool")])
    others = torch.cat([x for name, x in drawn if not name.startswith("pool") and "bias" not in name])
    chance = torch.empty(100_000).normal_(generator=trainer.generator)
    for one, other in ((own, others), (own, chance), (others, chance)):
        assert len(one) >= 16 and torch.isin(one, other).float().mean() < 0.05  # by chance a few are


def test_an_observation_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    trainer = ppo.Trainer(ppo.parse([*WORDS, "--total-timesteps", "512", "--run-dir", str(tmp_path)]))
    worlds = trainer.play.worlds
    mover = worlds.state.mover.clone()
    mover[0, 1, 0] = torch.nan
    trainer.play = trainer.play._replace(worlds=worlds._replace(state=worlds.state._replace(mover=mover)))
    with pytest.raises(FloatingPointError, match="SimpleCentroid-v0 showed an observation that is not finite"):
        trainer.iterate()
    trainer.close()


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    words = [*WORDS, "--run-dir", str(tmp_path), "--no-gif", "--total-timesteps", "1280"]
    with pytest.raises(SystemExit, match="no longer finite"):
        ppo.main([*words, "--learning-rate", "1e6", "--no-anneal-lr", "--max-grad-norm", "1e30"])


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_three_times_the_rate_stays_finite(head, tmp_path):
    file = load_agent(head)
    words = ["--learning-rate", "0.012", "--no-anneal-lr", "--total-timesteps", str(200 * 2048), "--num-envs", "16"]
    args = file.parse([*words, "--minibatch-size", "512", "--run-dir", str(tmp_path)])
    trainer = file.Trainer(args)
    for _ in range(200):
        assert all(math.isfinite(value) for name, value in trainer.iterate().items() if name.startswith("losses/"))
    trainer.close()

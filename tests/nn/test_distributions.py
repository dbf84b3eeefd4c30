"""Action distributions are torch's, for each kind of action space."""

import math

import gymnasium
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from gymnasium import spaces  # noqa: E402  torch may be missing
from torch import distributions as torchs  # noqa: E402

from noisy_envs.nn.distributions import Categorical, Gaussian, make_distribution  # noqa: E402

LOG_STDS = -0.7, 0.4
SPACES = {
    "one learner, continuous": (spaces.Box(0, 1, (5,)), Gaussian),
    "several learners, continuous": (spaces.Box(0, 1, (3, 5)), Gaussian),
    "one learner, discrete": (spaces.Discrete(5), Categorical),
    "several learners, discrete": (spaces.MultiDiscrete([5, 5, 5]), Categorical),
}
kinds = pytest.mark.parametrize("kind", ["continuous", "bounded", "discrete"])


def drawn(kind):
    """Return a distribution of five actions, old and new parameters (100, P), and torch's distribution of them."""
    distribution = Categorical(5)
    if kind != "discrete":
        bounded = kind == "bounded"
        space = spaces.Box(-1, 4, (5,))
        distribution = make_distribution(space, *LOG_STDS, bounded=bounded, normalize=bounded)
    random = torch.Generator().manual_seed(0)
    old, new = torch.randn(2, 100, distribution.num_parameters, generator=random)

    def usual(parameters):
        if kind == "discrete":
            return torchs.Categorical(logits=parameters)
        mean, log_std = parameters.chunk(2, -1)
        std = log_std.clamp(*LOG_STDS).exp()
        if kind == "bounded":
            mean, std = 1.5 + 2.5 * mean.tanh(), 2.5 * std
        return torchs.Independent(torchs.Normal(mean, std), 1)

    return distribution, old, new, usual, random


@pytest.mark.parametrize(("space", "kind"), SPACES.values(), ids=SPACES)
def test_a_space_has_its_distribution(space: gymnasium.Space, kind):
    distribution = make_distribution(space, *LOG_STDS)
    assert type(distribution) is kind and distribution.num_actions == 5
    assert distribution.num_parameters == (10 if kind is Gaussian else 5)
    if kind is Gaussian:
        assert (distribution.log_std_min, distribution.log_std_max) == LOG_STDS
    action = distribution.sample(
        torch.zeros(7, distribution.num_parameters), distribution.noise((7,), "cpu", torch.Generator())
    )
    assert action.shape == (7,) + (5,) * (kind is Gaussian)
    assert np.asarray(action).dtype.kind == ("f" if kind is Gaussian else "i")


@kinds
def test_numbers_are_torchs(kind):
    distribution, old, new, usual, random = drawn(kind)
    action = distribution.sample(new, distribution.noise((100,), "cpu", random))
    torch.testing.assert_close(distribution.log_prob(new, action), usual(new).log_prob(action))
    torch.testing.assert_close(distribution.entropy(new), usual(new).entropy())
    torch.testing.assert_close(distribution.kl(old, new), torchs.kl_divergence(usual(old), usual(new)))
    assert (distribution.kl(old, old).abs() < 1e-5).all() and (distribution.kl(old, new) > 0).all()
    torch.testing.assert_close(distribution.mode(new), usual(new).mode if kind == "discrete" else usual(new).mean)


@kinds
def test_samples_are_distributed_so(kind):
    distribution, _, new, usual, random = drawn(kind)
    many = distribution.sample(new[:1].expand(100_000, -1), distribution.noise((100_000,), "cpu", random))
    if kind == "discrete":
        shares = many.bincount(minlength=5) / 100_000
        torch.testing.assert_close(shares, usual(new[0]).probs, rtol=0, atol=0.01)
    else:
        torch.testing.assert_close(many.mean(0), usual(new[0]).mean, rtol=0, atol=0.04)
        torch.testing.assert_close(many.std(0), usual(new[0]).stddev, rtol=0.02, atol=0)


@kinds
def test_noise_is_of_its_generator_alone(kind):
    distribution, *_ = drawn(kind)
    first, again = (distribution.noise((4, 3), "cpu", torch.Generator().manual_seed(5)) for _ in range(2))
    assert first.shape == (4, 3, 5) and torch.equal(first, again)
    assert not torch.equal(first, distribution.noise((4, 3), "cpu", torch.Generator().manual_seed(6)))


def test_log_standard_deviations_have_bounds():
    distribution = Gaussian(2, *LOG_STDS)
    mean, log_std = distribution.split(torch.tensor([[1.0, 2.0, -9.0, 9.0]]))
    assert mean.tolist() == [[1, 2]]
    torch.testing.assert_close(log_std, torch.tensor([LOG_STDS]))
    assert distribution.entropy(torch.tensor([0, 0, -9.0, -9.0])) == pytest.approx(
        2 * (LOG_STDS[0] + 0.5 * math.log(2 * math.pi * math.e))
    )


@kinds
def test_saliency_is_of_the_mean_or_of_the_log_probabilities(kind):
    distribution, _, new, usual, _ = drawn(kind)
    expected = usual(new).logits if kind == "discrete" else usual(new).mean
    torch.testing.assert_close(distribution.saliency_outputs(new), expected)


def test_normalised_actions_span_the_box():
    distribution = make_distribution(spaces.Box(-1, 4, (2,)), *LOG_STDS, normalize=True)
    parameters = torch.tensor([[-1.0, 1.0, 0.0, 0.0], [0.0, 3.0, 0.0, 0.0]])
    assert distribution.mode(parameters).tolist() == [[-1, 4], [1.5, 9]]
    for space in (spaces.Box(-np.inf, np.inf, (2,)), spaces.Box(np.float32([0, -1]), np.float32([1, 1]))):
        with pytest.raises(ValueError, match=r"^normalize_actions=True: expected actions of equal, finite bounds"):
            make_distribution(space, *LOG_STDS, normalize=True)

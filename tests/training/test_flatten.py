"""All weights of an agent as one tensor: the agent's own weights and their gradients are views of it, always."""

import copy
import sys

import pytest
from helpers import ROOT, load_agent

torch = pytest.importorskip("torch")
pytest.importorskip("tyro")
from training_helpers import SMALL, train_until  # noqa: E402  torch may be missing

sys.path.insert(0, str(ROOT / "tools"))
from store_training import double_precision  # noqa: E402

sys.path.pop(0)

from noisy_envs.training.accelerate import flatten  # noqa: E402
from noisy_envs.training.checkpoint import load_checkpoint  # noqa: E402
from noisy_envs.training.main import main  # noqa: E402


def make():
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1, bias=False))


def assert_views(model, flat):
    """Demand that the weights of a model, and their gradients, are those of `flat` (W,), one after another."""
    assert flatten(model) is flat and flat.grad is not None
    start = 0
    for weight in model.parameters():
        for part, whole in ((weight, flat), (weight.grad, flat.grad)):
            assert part.is_contiguous() and part.data_ptr() == whole[start:].data_ptr()
        start += weight.numel()
    assert start == flat.numel()


def test_weights_and_gradients_are_views():
    model, x = make(), torch.arange(3.0)
    before, output = copy.deepcopy(model.state_dict()), model(x)
    flat = flatten(model)
    assert_views(model, flat)
    assert flat.tolist() == torch.cat([x.flatten() for x in before.values()]).tolist()
    assert model.state_dict().keys() == before.keys() and len(list(model.parameters())) == 3
    assert torch.equal(model(x), output)
    model(x).sum().backward()
    assert flat.grad[6:8].tolist() == model[1].weight[0].tolist()  # by the bias
    torch.optim.SGD([flat], 1.0).step()
    assert model[0].bias.tolist() == (before["0.bias"] - model[0].bias.grad).tolist() != before["0.bias"].tolist()
    model.load_state_dict(before)
    assert_views(model, flat)
    assert flat[6:8].tolist() == before["0.bias"].tolist()


@pytest.mark.parametrize("change", [copy.deepcopy, lambda model: model.double()])
def test_a_model_that_was_copied_or_moved_gets_a_tensor_of_its_own(change):
    model = make()
    before = flatten(model)
    changed = change(model)
    after = flatten(changed)
    assert after is not before and after.dtype == changed[0].weight.dtype
    assert_views(changed, after)
    after.data.zero_()
    assert before.any() and not any(weight.any() for weight in changed.parameters())


def test_a_constant_weight_stays():
    model = make()
    model[0].weight.requires_grad_(False)
    flat, before = flatten(model), model[0].weight.clone()
    optimizer = torch.optim.Adam([flat], 0.1, fused=True)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before) and not torch.equal(model[0].bias, torch.zeros(2))
    assert model[0].bias.grad.any() and not model[0].weight.grad.any()


@pytest.mark.parametrize("words", [["--dropout", "0.1"], ["--max-kl", "1e-9"]], ids=" ".join)
def test_weights_stay_views_after_updates_and_a_resume(words, tmp_path):
    words = [*SMALL, "--total-timesteps", "256", "--no-compile", "--run-dir", str(tmp_path), *words]
    stopped = train_until(2, words)
    stopped.close()
    resumed = train_until(3, ["--resume", str(stopped.folder)])
    summary = resumed.finish(resumed.agent)
    resumed.close()
    for run in (stopped, resumed):
        (weights,) = run.optimizer.param_groups[0]["params"]
        assert_views(run.agent, weights)
        assert weights.grad.any()
    assert summary["parameters"] == weights.numel()
    saved = load_checkpoint(stopped.folder / "checkpoint.pt")["agent"]
    assert {name: x.shape for name, x in saved.items()} == {name: x.shape for name, x in run.agent.named_parameters()}
    assert torch.equal(torch.cat([x.flatten() for x in saved.values()]), flatten(resumed.agent))


def test_an_optimizer_of_each_weight_learns_the_same_and_its_checkpoint_is_resumed(tmp_path):
    """Older checkpoints hold a state of Adam for each weight."""
    agent, own = load_agent("adapool"), load_agent("adapool")
    own.make_optimizer = lambda args, agent: torch.optim.Adam(agent.parameters(), 1.0, eps=args.adam_eps, fused=True)
    for module in (agent, own):
        module.Agent = double_precision(module.Agent)
    words = [*SMALL, "--total-timesteps", "256", "--max-grad-norm", "0.1", "--no-compile", "--run-dir"]
    folders = []
    for module, stopped_by in ((agent, None), (own, None), (own, own), (agent, own)):
        folder = tmp_path / str(len(folders))
        if stopped_by is None:
            main(module, [*words, str(folder)])
        else:
            train_until(2, [*words, str(folder)], stopped_by).close()
            main(module, ["--resume", str(next(folder.iterdir()))])
        folders += folder.iterdir()
    contents = [load_checkpoint(folder / "checkpoint.pt") for folder in folders]
    assert [len(content["optimizer"]["state"]) > 1 for content in contents] == [False, True, True, False]
    for content in contents[1:]:
        torch.testing.assert_close(content["agent"], contents[0]["agent"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(contents[3]["optimizer"], contents[0]["optimizer"], rtol=1e-9, atol=1e-12)


def test_the_state_of_all_weights_is_no_state_of_each(tmp_path):
    own = load_agent("adapool")
    own.make_optimizer = lambda args, agent: torch.optim.Adam(agent.parameters(), args.learning_rate)
    words = [*SMALL, "--total-timesteps", "256", "--no-compile", "--run-dir", str(tmp_path)]
    train_until(2, words).close()
    with pytest.raises(SystemExit, match=r"^error: [^\n]*checkpoint\.pt was not written by this program \(ValueError"):
        main(own, ["--resume", str(next(tmp_path.iterdir()))])

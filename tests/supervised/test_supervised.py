"""Supervised experiments: networks as the appendix has them, presets, and the scripts from words to tables."""

import dataclasses
import itertools
import json
import math
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, load_supervised, with_path

from noisy_envs.training.checkpoint import load_checkpoint, save_checkpoint

torch = pytest.importorskip("torch")
for needed in ("tyro", "matplotlib", "sklearn"):
    pytest.importorskip(needed)
network, report, experiment, trainer = map(load_supervised, ("network", "report", "experiment", "trainer"))
set_task, images = load_supervised("set_task"), load_supervised("images")
Chance = load_supervised("chance").Chance
SCRIPTS = {name: load_supervised(name) for name in ("knn_centroid", "aggregation", "vision")}
knn_centroid, aggregation, vision = SCRIPTS.values()

CONFIG = network.EncoderConfig(num_layers=2, embed_dim=16, num_heads=4, feedforward_dim=24, init_std=0.5)
SETS = torch.randn(6, 9, 16, generator=torch.Generator().manual_seed(0))
each_pool = pytest.mark.parametrize("pool", network.POOLING)


@pytest.fixture(autouse=True)
def restored(tmp_path, monkeypatch):
    """Work in an empty folder, on one thread as runs do, and leave the process as it was."""
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, handler)


# networks


@pytest.mark.parametrize(("kind", "scale"), [("embed", 1 / 4), ("head", 1 / math.sqrt(2))])
def test_scale_of_the_attention(kind, scale):
    config = network.EncoderConfig(num_layers=12, embed_dim=16, num_heads=8, feedforward_dim=64, attention_scale=kind)
    assert config.scale() == pytest.approx(scale)
    built = network.set_network(config, 16, "adapool", 1)
    assert [layer.scale for layer in built.encoder.layers] == pytest.approx([scale] * 12)
    assert built.head.scale == pytest.approx(scale)


def norm(x, layer):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5) * layer.weight.detach().numpy() + layer.bias.detach().numpy()


def test_a_layer_beside_its_formula():
    """Pre-norm: x + A(norm(x)), then x + F(norm(x)); no bias in A."""
    layer = network.set_network(CONFIG, 16, "avgpool", 1).encoder.layers[0].double().eval()
    for name, weight in layer.named_parameters():  # of norms and biases too
        torch.nn.init.normal_(
            weight, float("norm_" in name and "weight" in name), 0.3, torch.Generator().manual_seed(len(name))
        )
    weights = {name: weight.detach().numpy() for name, weight in layer.named_parameters()}
    x = SETS.double().numpy()
    query, key, value = np.split(norm(x, layer.norm_attention) @ weights["query_key_value.weight"].T, 3, axis=2)
    mixed = np.zeros_like(x)
    for head in range(4):
        own = slice(4 * head, 4 * head + 4)
        scores = np.exp(query[..., own] @ key[..., own].transpose(0, 2, 1) * CONFIG.scale())
        mixed[..., own] = scores / scores.sum(axis=2, keepdims=True) @ value[..., own]
    x = x + mixed @ weights["output.weight"].T
    hidden = norm(x, layer.norm_feedforward) @ weights["feedforward.0.weight"].T + weights["feedforward.0.bias"]
    hidden = hidden * np.vectorize(lambda z: (1 + math.erf(z / math.sqrt(2))) / 2)(hidden)  # GELU
    x = x + hidden @ weights["feedforward.2.weight"].T + weights["feedforward.2.bias"]
    np.testing.assert_allclose(layer(SETS.double()).detach(), x, atol=1e-9)
    assert set(weights) == {
        "query_key_value.weight", "output.weight",
        "feedforward.0.weight", "feedforward.0.bias", "feedforward.2.weight", "feedforward.2.bias",
        "norm_attention.weight", "norm_attention.bias", "norm_feedforward.weight", "norm_feedforward.bias",
    }  # fmt: skip


@each_pool
def test_weights_at_first(pool):
    config = network.EncoderConfig(num_layers=8, embed_dim=128, num_heads=8, feedforward_dim=128)
    built = network.set_network(config, 100, pool, 1)
    for name, weight in built.named_parameters():
        if "norm" in name and name.endswith("weight"):
            assert (weight == 1).all(), name
        elif name.endswith("bias"):
            assert (weight == 0).all(), name
        else:
            after_attention = name.endswith("output.weight")
            expected = 0.02 / math.sqrt(2 * 8) if after_attention else 0.02
            noise = 4 / math.sqrt(2 * weight.numel())
            assert weight.std().item() == pytest.approx(expected, rel=noise), name
            assert abs(weight.mean().item()) < 4 * expected / math.sqrt(weight.numel()), name
    assert network.EncoderConfig(1, 4, 1, 1, init_std=0.3).output_std() == pytest.approx(0.3 / math.sqrt(2))


def test_the_start_is_the_same_for_all_heads_at_one_seed():
    def encoder(built):
        return {name: weight for name, weight in built.state_dict().items() if not name.startswith("head")}

    for features in (16, 5):
        built = {pool: encoder(network.set_network(CONFIG, features, pool, 3)) for pool in network.POOLING}
        first = built.pop("avgpool")
        assert len(first) > 20
        for pool, other in built.items():
            assert first.keys() == other.keys(), pool
            assert all(torch.equal(first[name], other[name]) for name in first), pool
        other = encoder(network.set_network(CONFIG, features, "avgpool", 4))
        assert not any(torch.equal(first[name], other[name]) for name in first if first[name].std() > 0)
    heads = [network.set_network(CONFIG, 16, "adapool", seed).head.query.weight for seed in (3, 3, 4)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


@pytest.mark.parametrize("pool", ["adapool", "clstoken"])
def test_no_weight_of_a_head_is_one_of_the_encoders(pool):
    built = network.set_network(network.EncoderConfig(2, 16, 2, 64), 16, pool, 1)
    numbers = {name: weight.detach().numpy().ravel() for name, weight in built.named_parameters() if weight.std() > 0}
    own = np.concatenate([x for name, x in numbers.items() if name.startswith("head") and "output" not in name])
    others = np.concatenate([x for name, x in numbers.items() if not name.startswith("head")])
    assert len(own) >= 16 and np.isin(own, others).mean() < 0.05  # by chance a few are


def test_building_leaves_the_global_random_state_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    task = vision.Vision(vision.Args(), "digits")
    for pool in vision.POOLING_NAMES:
        task.network(pool, 1)
    for pool in network.POOLING:
        network.set_network(CONFIG, 5, pool, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_projections_only_where_widths_differ():
    same, other = (network.set_network(CONFIG, features, "avgpool", 1) for features in (16, 5))
    assert isinstance(same.embed.project, torch.nn.Identity) and isinstance(same.readout, torch.nn.Identity)
    assert other.embed.project.weight.shape == (16, 5) and other.readout.weight.shape == (5, 16)
    assert other(SETS[..., :5]).shape == (6, 5)
    torch.testing.assert_close(same.embed(SETS)[:, 1:], SETS[:, 1:])
    torch.testing.assert_close(same.embed(SETS)[:, 0], SETS[:, 0] + same.embed.mark.weight[0])


def count(built):
    return sum(weight.numel() for weight in built.parameters())


def test_counts_of_parameters_and_tokens():
    config = network.EncoderConfig(num_layers=12, embed_dim=16, num_heads=8, feedforward_dim=64)
    built = {pool: network.set_network(config, 16, pool, 1) for pool in network.POOLING}
    layer = 3 * 16**2 + 16**2 + (16 * 64 + 64) + (64 * 16 + 16) + 2 * 2 * 16
    plain = 12 * layer + 16
    assert {pool: count(one) - plain for pool, one in built.items()} == {
        "avgpool": 0, "maxpool": 0, "clstoken": 16, "adapool": 4 * 16**2,
    }  # fmt: skip
    tokens = {pool: one.encode(SETS).shape[1] for pool, one in built.items()}
    assert tokens == {"avgpool": 9, "maxpool": 9, "clstoken": 10, "adapool": 9}


@each_pool
def test_the_marked_vector_matters_and_the_order_of_the_others_does_not(pool):
    """C66."""
    built = network.set_network(CONFIG, 16, pool, 1).eval()
    with torch.no_grad():
        found = built(SETS)
        order = torch.tensor([0, 5, 3, 8, 1, 2, 7, 4, 6])
        torch.testing.assert_close(built(SETS[:, order]), found, atol=1e-4, rtol=1e-4)  # sums in another order
        for other_mark in (SETS.roll(1, dims=1), SETS[:, [4, 1, 2, 3, 0, 5, 6, 7, 8]]):
            assert ((built(other_mark) - found).abs().amax(dim=1) > 0.01).all()
        built.embed.mark.weight.zero_()
        assert ((built(SETS) - found).abs().amax(dim=1) > 0.01).all()


@each_pool
def test_gradients_reach_all_weights(pool):
    built = network.set_network(CONFIG, 16, pool, 1)
    built(SETS).square().sum().backward()
    for name, weight in built.named_parameters():
        assert weight.grad is not None and weight.grad.abs().max() > 0, name


@each_pool
@pytest.mark.parametrize("features", [16, 5])
def test_a_marked_class_token_leaves_the_target_unmarked(pool, features):
    """What the encoder reads; for the other heads, the first token is the target in both cases."""
    sets = SETS[..., :features]
    right, slip = (network.set_network(CONFIG, features, pool, 1, mark_class_token=marked) for marked in (False, True))
    assert all(torch.equal(weight, slip.state_dict()[name]) for name, weight in right.state_dict().items())
    read = []
    for built in (right, slip):
        built.encoder.register_forward_pre_hook(lambda layer, inputs: read.append(inputs[0].detach()))
        built.eval()(sets)
    plain, mark = right.embed.project(sets), right.embed.mark.weight[0]
    if pool != "clstoken":
        assert torch.equal(read[0], read[1]) and torch.equal(read[1][:, 0], plain[:, 0] + mark)
        return
    token = right.head.token.expand(6, -1)
    assert torch.equal(read[0], torch.stack([token, plain[:, 0] + mark, *plain[:, 1:].unbind(1)], dim=1))
    assert torch.equal(read[1], torch.stack([token + mark, *plain.unbind(1)], dim=1))
    with torch.no_grad():  # so any vector may be the target
        other = sets.roll(4, dims=1)
        torch.testing.assert_close(slip(other), slip(sets), atol=1e-4, rtol=1e-4)
        assert ((right(other) - right(sets)).abs().amax(dim=1) > 0.01).all()


def test_a_uniform_class_token():
    config = dataclasses.replace(CONFIG, embed_dim=1024, init_std=0.02)
    normal, uniform = (network.set_network(config, 16, "clstoken", 1, False, kind) for kind in ("normal", "uniform"))
    token = uniform.head.token
    assert 0 <= token.min() < 0.01 and 0.99 < token.max() <= 1 and token.std().item() == pytest.approx(12**-0.5, 0.1)
    assert normal.head.token.std().item() == pytest.approx(0.02, rel=0.1)
    others = [{**built.state_dict(), "head.token": token} for built in (normal, uniform)]
    assert all(torch.equal(weight, others[1][name]) for name, weight in others[0].items())
    again, other = (network.set_network(config, 16, "clstoken", seed, False, "uniform").head.token for seed in (1, 2))
    assert torch.equal(again, token) and not torch.equal(other, token)
    assert isinstance(network.set_network(CONFIG, 16, "avgpool", 1, False, "uniform").head, network.AvgPool)


def test_dropouts_act_in_training_alone():
    for name in ("dropout", "attention_dropout"):
        built = network.set_network(dataclasses.replace(CONFIG, **{name: 0.3}), 16, "avgpool", 1)
        with torch.random.fork_rng():
            assert not torch.allclose(built(SETS), built(SETS), atol=1e-3), name
        built.eval()
        plain = network.set_network(CONFIG, 16, "avgpool", 1)
        torch.testing.assert_close(built(SETS), plain(SETS))


# the task of sets


def test_tests_are_of_the_last_tenth():
    args = aggregation.Args(num_sets=57, num_vectors=4)
    task = aggregation.make_task(args, "mean")
    assert (task.num_samples, task.num_test) == (57, 5)
    assert torch.equal(set_task.test_sets(args), task.sets[52:])
    sets, targets = task.batch(torch.tensor([3, 50]), None)
    assert torch.equal(sets, task.sets[[3, 50]]) and torch.equal(targets, sets.mean(dim=1))
    outputs = targets + torch.arange(16.0)
    assert task.loss(outputs, targets).item() == pytest.approx(77.5)  # the mean of 0², 1² … 15²
    assert task.error(outputs, targets).tolist() == pytest.approx([77.5] * 2)


@pytest.mark.parametrize("target", ["max", "mean", "min"])
def test_targets_of_the_aggregation(target):
    task = aggregation.make_task(aggregation.Args(num_sets=20, num_vectors=4), target)
    np.testing.assert_allclose(task.targets, getattr(np, target)(task.sets.numpy(), axis=1), rtol=1e-6)


def test_targets_of_the_centroid():
    args = knn_centroid.Args(num_sets=20, num_vectors=6)
    for k in (1, 3, 6):
        task = knn_centroid.make_task(args, knn_centroid.column_name(k))
        others = task.sets[:, 1:].numpy()
        nearest = ((others - task.sets[:, :1].numpy()) ** 2).sum(axis=2).argsort(axis=1)[:, :k]
        expected = np.stack([x[rows].mean(axis=0) for x, rows in zip(others, nearest, strict=True)])
        np.testing.assert_allclose(task.targets, expected, rtol=0, atol=1e-6)


def test_baselines():
    args = knn_centroid.Args(num_sets=50, num_vectors=6, num_neighbors=(2, 6))
    found = knn_centroid.baselines(args)
    for k in (2, 6):
        task = knn_centroid.make_task(args, knn_centroid.column_name(k))
        sets, targets = task.sets[-5:], task.targets[-5:]
        expected = [task.error(guess, targets).mean().item() for guess in (sets.mean(dim=1), sets[:, 0])]
        assert [row[f"KNN-{k}"] for row in found.values()] == pytest.approx(expected, rel=1e-5)


def test_the_least_error_of_a_narrow_network():
    """No better linear output from three numbers than the principal components, found by another way; none if wide."""
    args = knn_centroid.Args(num_sets=500, num_vectors=6, num_features=5, num_neighbors=(2,), embed_dim=3)
    targets = knn_centroid.make_task(args, "KNN-2").targets[-50:].double()
    centred = (targets - targets.mean(dim=0)).numpy()
    left, sizes, right = np.linalg.svd(centred)
    best = (left[:, :3] * sizes[:3]) @ right[:3]
    found = knn_centroid.baselines(args)["lowest possible, embed_dim 3"]
    assert found["KNN-2"] == pytest.approx(((best - centred) ** 2).mean(), rel=1e-6)
    assert len(knn_centroid.baselines(dataclasses.replace(args, embed_dim=5))) == 2


# images


def test_digits_are_normalised():
    """C71: over what is learned from, which the test set must not change."""
    task = vision.Vision(vision.Args(), "digits")
    patches, labels = task.batch(torch.arange(1437), None)
    assert patches.shape == (1437, 16, 4) and labels.shape == (1437,)
    assert abs(patches.mean()) < 1e-4 and abs(patches.std() - 1) < 1e-3
    tests, _ = task.batch(torch.arange(1437, 1797), None)
    assert tests.mean().abs() > 1e-4
    assert (task.num_samples, task.num_test) == (1797, 360) and task.data.num_classes == 10


CHANCES = [None, Chance(1), Chance(1, 1), Chance(2)]


def shown(task, index, chance):
    """A batch, in training if there is chance."""
    return task.batch(index, None if chance is None else task.draw(index, chance))


@pytest.mark.parametrize("chance", CHANCES)
def test_a_picture_is_of_its_image_whatever_the_batch(chance):
    """And whatever the task that shows it, which each run makes for itself."""
    args = vision.Args(padding=2)
    task = vision.Vision(args, "digits on 12")
    assert (task.canvas_size, task.grid_size) == (12, 6)
    index = torch.arange(100, 140)
    whole, labels = shown(task, index, chance)
    assert whole.shape == (40, 36, 4)
    batches = [index[3:4], index[:5], index.flip(0), torch.tensor([139, 7, 139]), index[:0]]
    for some in batches:
        found, found_labels = shown(vision.Vision(args, "digits on 12"), some, chance)
        known = [(row, int(number) - 100) for row, number in enumerate(some) if number >= 100]
        for row, place in known:
            assert torch.equal(found[row], whole[place]) and found_labels[row] == labels[place]


def test_pictures_change_with_seed_and_epoch():
    task = vision.Vision(vision.Args(padding=2), "digits on 12")
    index = torch.arange(100, 140)
    drawn = [shown(task, index, chance)[0] for chance in CHANCES]
    for one, other in itertools.combinations(drawn, 2):
        assert not (one == other).flatten(1).all(dim=1).any()
    assert not (drawn[0][0] == drawn[0][1:]).flatten(1).all(dim=1).any()  # other images, other clutter


def test_an_error_is_of_the_weights_and_not_of_the_batch(monkeypatch):
    task = vision.Vision(vision.Args(), "digits on 16")
    built = task.network("maxpool", 1)
    parts, found = trainer.split(task, 1), set()
    for size in (2000, 50, 7):
        monkeypatch.setattr(trainer, "EVAL_BATCH_SIZE", size)
        found.add(trainer.mean_error(task, built, parts.test, "cpu"))
    assert len(found) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("chance", CHANCES)
def test_a_picture_is_the_same_on_a_gpu(chance):
    index = torch.arange(100, 140)
    found = [
        shown(vision.Vision(vision.Args(padding=2, device=device), "digits on 12"), index.to(device), chance)[0].cpu()
        for device in ("cpu", "cuda")
    ]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("padding", "same"), [(0, True), (2, False)])
def test_images_are_cropped_in_training_alone(padding, same):
    task = vision.Vision(vision.Args(padding=padding), "digits")
    index = torch.arange(50)
    plain, _ = task.batch(index, None)
    assert torch.equal(plain, task.batch(index, None)[0])
    assert torch.equal(plain, shown(task, index, Chance(1))[0]) is same


def test_clutter_is_never_of_test_images():
    task = vision.Vision(vision.Args(padding=0), "digits on 16")
    assert torch.equal(task.learned, task.images[:1437])
    task.images[1437:] = 255  # white, whatever is hidden among the rest
    patches, _ = task.batch(torch.arange(200), None)
    white = ((255 / 255 - task.mean) / task.std).item()
    assert (patches > white - 1e-4).all(dim=2).float().mean() < 0.05
    assert (task.batch(torch.arange(1437, 1447), None)[0] > white - 1e-4).all(dim=2).float().mean() >= 0.25


def test_vision_network():
    args = vision.Args(attention_dropout=0.25, num_layers=3)
    task = vision.Vision(args, "digits on 12")
    inputs, labels = task.batch(torch.arange(5), None)
    starts = []
    for pool in vision.POOLING_NAMES:
        built = task.network(pool, 2).eval()
        assert built(inputs).shape == (5, 10)
        assert isinstance(built.norm, torch.nn.LayerNorm) and len(built.encoder.layers) == 3
        assert all(layer.attention_dropout == 0.25 for layer in built.encoder.layers)
        starts.append({name: weight for name, weight in built.state_dict().items() if not name.startswith("head")})
    for other in starts[1:]:
        assert all(torch.equal(weight, other[name]) for name, weight in starts[0].items())
    sources = {
        pool: task.network(pool, 2).head.query_source for pool in vision.POOLING_NAMES if pool.startswith("adapool")
    }
    assert sources == {"adapool-focal": (14, 15, 20, 21), "adapool-mean": "mean", "adapool-corner": (0,)}
    logits = torch.eye(10)[labels]
    assert task.error(logits, labels).tolist() == [0] * 5
    assert task.error(logits, (labels + torch.tensor([0, 1, 0, 1, 1])) % 10).tolist() == [0, 1, 0, 1, 1]
    assert task.loss(torch.zeros(5, 10), labels).item() == pytest.approx(math.log(10))


# the paper's numbers

KNN_SETTINGS = {  # appendix "Supervised KNN Centroid"
    "num_sets": 1_000_000, "num_vectors": 128, "num_features": 16, "data_seed": 42, "num_layers": 12,
    "num_heads": 8, "embed_dim": 16, "feedforward_dim": 64, "dropout": 0.1, "epochs": 100, "learning_rate": 5e-4,
    "batch_size": 750, "folds": (1, 2, 3, 4, 5), "init_std": 0.02, "schedule": "constant", "warmup": 0.0,
    "weight_decay": 0.0, "max_grad_norm": math.inf, "attention_scale": "embed",
    "pooling": ("avgpool", "maxpool", "clstoken", "adapool"),
}  # fmt: skip
CIFAR_SETTINGS = {  # appendix "CIFAR Training Hyperparameters"
    "num_layers": 6, "num_heads": 8, "embed_dim": 512, "feedforward_dim": 64, "attention_dropout": 0.1, "dropout": 0.1,
    "epochs": 300,
    "warmup": 0.1, "learning_rate": 1e-3, "batch_size": 512, "weight_decay": 0.1, "max_grad_norm": 1.0,
    "schedule": "cosine", "padding": 4, "folds": (1, 2, 3, 4, 5), "init_std": 0.02, "attention_scale": "embed",
}  # fmt: skip


def parsed(monkeypatch, script, *argv):
    """Return the settings that a script makes of arguments."""
    found = []

    def stop(args, *rest):
        found.append(args)
        raise InterruptedError

    monkeypatch.setattr(experiment, "check", stop)
    with pytest.raises(InterruptedError):
        SCRIPTS[script].main(list(argv))
    return dataclasses.asdict(found[0])


@pytest.mark.parametrize("script", ["knn_centroid", "aggregation"])
def test_the_papers_settings_of_sets(monkeypatch, script):
    own = {
        "knn_centroid": {"num_neighbors": (1, 2, 4, 8, 16, 32, 64, 128)},
        "aggregation": {"targets": ("max", "mean", "min")},
    }
    found = parsed(monkeypatch, script, "--preset", "paper", "--device", "cuda")
    expected = KNN_SETTINGS | own[script]
    assert {name: found[name] for name in expected} == expected and found["device"] == "cuda"


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
def test_the_papers_settings_of_images(monkeypatch, dataset):
    found = parsed(monkeypatch, "vision", "--preset", "paper", "--dataset", dataset)
    assert {name: found[name] for name in CIFAR_SETTINGS} == CIFAR_SETTINGS
    assert found["pooling"] == vision.POOLING_NAMES and (found["patch_size"] or vision.PATCH_SIZE[dataset]) == 4


@pytest.mark.parametrize(("dataset", "epochs", "padding"), [("digits", 100, 0), ("fashion-mnist", 10, 2)])
def test_defaults_depend_on_the_data_set(monkeypatch, dataset, epochs, padding):
    found = parsed(monkeypatch, "vision", "--dataset", dataset)
    assert (found["epochs"], found["padding"]) == (epochs, padding)
    assert parsed(monkeypatch, "vision", "--dataset", dataset, "--epochs", "7")["epochs"] == 7


def test_the_papers_tables():
    noise = {  # Table 4, as it is printed
        "maxpool": "0.066 0.061 0.050 0.045 0.047 0.055 0.068 0.046",
        "avgpool": "0.093 0.071 0.055 0.043 0.031 0.016 0.001 0.000",
        "clstoken": "0.102 0.079 0.063 0.050 0.038 0.027 0.016 0.008",
        "adapool": "0.037 0.019 0.006 0.004 0.003 0.002 0.001 0.000",
        "baseline: centroid": "0.093 0.071 0.055 0.043 0.031 0.020 0.008 0.000",
        "baseline: target": "0.058 0.044 0.040 0.041 0.048 0.060 0.080 0.126",
    }
    assert {row: " ".join(f"{x:.3f}" for x in values) for row, values in knn_centroid.PAPER_LOSS.items()} == noise
    assert {row: " ".join(f"{x:.3f}" for x in values.values()) for row, values in aggregation.PAPER_ERROR.items()} == {
        "maxpool": "0.000 0.026 0.297", "avgpool": "0.003 0.000 0.003",
        "clstoken": "0.011 0.008 0.011", "adapool": "0.002 0.000 0.002",
    }  # fmt: skip
    assert [list(values) for values in aggregation.PAPER_ERROR.values()] == [["max", "mean", "min"]] * 4
    assert {row: " ".join(f"{x:.2f}" for x in values.values()) for row, values in vision.PAPER_ACCURACY.items()} == {
        "clstoken": "84.52 55.56", "avgpool": "87.15 59.63", "maxpool": "87.65 60.55",
        "adapool-focal": "87.98 61.22", "adapool-mean": "87.84 61.23", "adapool-corner": "87.00 57.08",
    }  # fmt: skip


# scripts

TINY_SETS = ["--num-sets", "60", "--num-vectors", "6", "--epochs", "1", "--jobs", "1", "--seeds", "1", "2"]
VISION = ("clstoken", "adapool-focal", "adapool-corner")
TINY = {
    "knn_centroid": [*TINY_SETS, "--num-neighbors", "4", "1"],
    "aggregation": TINY_SETS,
    "vision": [
        "--epochs",
        "1",
        "--batch-size",
        "200",
        "--embed-dim",
        "8",
        "--jobs",
        "1",
        "--canvas-size",
        "12",
        "0",
        "--pooling",
        *VISION,
    ],
}
FIGURES = {"knn_centroid": ["signal_loss.png"], "aggregation": [], "vision": ["accuracy.png"]}
COLUMNS = {
    "knn_centroid": ["KNN-1", "KNN-4"],
    "aggregation": ["max", "mean", "min"],
    "vision": ["digits", "digits on 12"],
}
ROWS = {
    "knn_centroid": ["AvgPool", "MaxPool", "ClsToken", "AdaPool", "baseline: centroid", "baseline: target"],
    "aggregation": ["AvgPool", "MaxPool", "ClsToken", "AdaPool"],
    "vision": ["ClsToken", "AdaPool, focal query", "AdaPool, corner query"],
}


def cells_of(text):
    """Return a table's header and its rows by their names."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return lines[0][1:], {row[0]: row[1:] for row in lines[2:]}


def start(script, words, rules):
    """Run a script as a program that raises warnings, but for `rules`; return what it prints."""
    command = [sys.executable, *(f"-W{rule}" for rule in ("error", *rules)), ROOT / "supervised" / f"{script}.py"]
    done = subprocess.run([*command, *words], env=with_path(ROOT), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("started", [False, pytest.param(True, marks=pytest.mark.process)], ids=["called", "started"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_run(tmp_path, pytestconfig, monkeypatch, capsys, script, started):
    if started:
        rules = pytestconfig.getoption("pythonwarnings") or []  # as here, where old releases warn
        printed, errors = start(script, [*TINY[script], "--out", "out"], rules)
    else:
        monkeypatch.setattr(sys, "argv", [script, *TINY[script], "--out", "out"])
        run(script, *TINY[script])
        printed, errors = capsys.readouterr()
    out = tmp_path / "out"
    files = sorted(path.name for path in out.iterdir() if path.is_file())
    assert files == sorted([".lock", "table.md", "results.json", *FIGURES[script]])
    for name in FIGURES[script]:
        assert (out / name).read_bytes().startswith(b"\x89PNG") and (out / name).stat().st_size > 10_000
    text = (out / "table.md").read_text()
    header, rows = cells_of(text)
    assert header == COLUMNS[script] and list(rows) == ROWS[script]
    assert f"`python supervised/{script}.py {' '.join(TINY[script])} --out out`" in text
    assert cells_of(printed) == (header, rows)
    results = json.loads((out / "results.json").read_text())
    pools = list(dict.fromkeys(cell["pooling"] for cell in results["runs"]))
    assert [report.NAMES[pool] for pool in pools] == [row for row in rows if not row.startswith("baseline")]
    for pool in pools:
        for column, shown in zip(header, rows[report.NAMES[pool]], strict=True):
            own = [cell for cell in results["runs"] if (cell["pooling"], cell["column"]) == (pool, column)]
            error = np.mean([cell["test_error"] for cell in own])
            expected, half = (100 * (1 - error), 0.006) if script == "vision" else (error, 6e-5)
            assert float(shown.split(" ± ")[0]) == pytest.approx(expected, abs=half)
            assert [cell["seed"] for cell in own] == ([1] if script == "vision" else [1, 2])
            assert ("±" in shown) == (script != "vision")
    assert not re.search(r"^error|Error", errors, re.MULTILINE)


def run(script, *words):
    experiment.guard(SCRIPTS[script].main, [*words, "--out", "out"])


@pytest.mark.parametrize(
    ("script", "sizes", "shown"),
    [
        ("knn_centroid", (128, 16, 16, 12), [["0.006"], ["0.055"], ["0.040"]]),
        ("knn_centroid", (127, 16, 16, 12), []),
        ("knn_centroid", (128, 15, 16, 12), []),
        ("knn_centroid", (128, 16, 16, 1), [["0.055"], ["0.040"]]),  # the baselines
        ("knn_centroid", (128, 16, 8, 12), [["0.055"], ["0.040"]]),
        ("aggregation", (128, 16, 16, 12), [["0.002", "0.000", "0.002"]]),
        ("aggregation", (128, 17, 16, 12), []),
        ("aggregation", (128, 16, 16, 1), []),
        ("aggregation", (128, 16, 8, 12), []),
    ],
)
def test_the_papers_rows_only_at_its_sizes(tmp_path, script, sizes, shown):
    words = ["--num-sets", "10", "--epochs", "1", "--jobs", "1", "--seeds", "1", "--pooling", "adapool"]
    for name, size in zip(("num-vectors", "num-features", "embed-dim", "num-layers"), sizes, strict=True):
        words += [f"--{name}", str(size)]
    run(script, *words)
    text = (tmp_path / "out" / "table.md").read_text()
    lines = [line.split("|")[2:-1] for line in text.splitlines() if line.startswith("| the paper's")]
    assert [[cell.strip() for cell in line] for line in lines] == shown


@pytest.mark.parametrize(
    ("sizes", "first", "last"),
    [({}, (0.022, 0.086, 0.094, 0.018), (0.009, 0.003, 0.017, 0.002)),
     ({"num_features": 64}, (0.0056, 0.0204, 0.0229, 0.0064), (0.0018, 0.0006, 0.0017, 0.0002)),
     ({"embed_dim": 32}, (0.022, 0.048, 0.086, 0.003), (0.0003, 0.0002, 0.0082, 0.0001)),
     ({"embed_dim": 64}, (0.022, 0.004, 0.086, 0.001), (0.0001, 0.00009, 0.00825, 0.00007)),
     ({"num_layers": 24}, (0.020, 0.061, 0.094, 0.017), (0.0056, 0.0019, 0.0165, 0.0021))],
)  # fmt: skip
def test_the_papers_ablations(sizes, first, last):
    papers = knn_centroid.paper_rows(
        knn_centroid.Args(**{"num_vectors": 32, "num_layers": 12, "num_neighbors": (16, 3, 1), **sizes})
    )
    assert list(papers) == ["maxpool", "avgpool", "clstoken", "adapool"]
    assert tuple(row["KNN-1"] for row in papers.values()) == first
    assert tuple(row["KNN-16"] for row in papers.values()) == last
    assert all(len(row) == 2 for row in papers.values())
    assert knn_centroid.paper_rows(knn_centroid.Args(**{"num_vectors": 31, "num_layers": 12, **sizes})) == {}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--epochs 0", "epochs=0: expected at least 1"),
        ("--pooling none", "pooling='none': expected one of "),
        ("--folds 6", "folds=6: expected at most 5"),
        ("--seeds -1", "seeds=-1: expected at least 0"),
        ("--num-heads 3", "num_heads=3: expected a divisor of embed_dim="),
        ("--warmup 2", "warmup=2.0: expected a share from 0 to 1"),
        ("--learning-rate nan", "learning_rate=nan: expected a finite number"),
        ("--device abacus", "device='abacus': "),
        ("--pooling", "pooling: expected at least one value"),
    ],
)
def test_bad_settings_of_all(tmp_path, script, words, message):
    assert_refused(tmp_path, script, words, message)


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("knn_centroid", "--num-neighbors 0", "num_neighbors=0: expected a number from 1 to num_vectors=32"),
        ("knn_centroid", "--num-neighbors 4 33", "num_neighbors=33: expected a number from 1 to num_vectors=32"),
        ("knn_centroid", "--num-neighbors", "num_neighbors: expected at least one value"),
        ("knn_centroid", "--num-sets 9", "num_sets=9: expected at least 10"),
        ("knn_centroid", "--mark-class-token", "mark_class_token=True: expected False, or --pooling clstoken alone"),
        ("knn_centroid", "--mark-class-token --pooling avgpool clstoken", "mark_class_token=True: expected False, or "),
        ("knn_centroid", "--class-token-init uniform --pooling adapool", "class_token_init='uniform': expected 'norm"),
        ("aggregation", "--num-sets 3", "num_sets=3: expected at least 10"),
        ("aggregation", "--num-vectors 1", "num_vectors=1: expected at least 2"),
        ("aggregation", "--num-features 0", "num_features=0: expected at least 1"),
        ("aggregation", "--data-seed -1", "data_seed=-1: expected at least 0"),
        ("aggregation", "--targets sum", "targets='sum': expected one of max, mean, min"),
        ("aggregation", "--targets", "targets: expected at least one value"),
        ("vision", "--canvas-size", "canvas_size: expected at least one value"),
        ("vision", "--canvas-size 0 4", "canvas_size=4: expected 0, or at least 8, the image size"),
        ("vision", "--canvas-size -8", "canvas_size=-8: expected 0"),
        ("vision", "--canvas-size 13", "patch_size=2: expected a divisor of the size of the image, 13"),
        ("vision", "--patch-size 3", "patch_size=3: expected a divisor of the size of the image, 8"),
        ("vision", "--padding -1", "padding=-1: expected a number from 0 to 8"),
        ("vision", "--padding 9", "padding=9: expected a number from 0 to 8"),
        ("vision", "--attention-dropout 1", "attention_dropout=1.0: expected a probability from 0 to below 1"),
        ("vision", "--dataset cifar10", "data/cifar-10-binary.tar.gz is missing: set its folder with --data-dir"),
    ],
)
def test_bad_settings_of_one(tmp_path, script, words, message):
    assert_refused(tmp_path, script, words, message)


def assert_refused(tmp_path, script, words, message):
    with pytest.raises(SystemExit, match=f"^error: {re.escape(message)}[^\n]*$"):
        run(script, *words.split())
    assert not list(tmp_path.iterdir())


def test_digits_without_scikit_learn(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert_refused(tmp_path, "vision", "", "dataset='digits': needs scikit-learn, run: pip install scikit-learn")


@pytest.mark.parametrize("words", ["--preset slow", "--dataset mnist", "--epochs many", "--colour red"])
def test_bad_arguments_are_named(tmp_path, capsys, words):
    with pytest.raises(SystemExit) as ended:
        run("vision", *words.split())
    option, value = words.split()
    message = capsys.readouterr().err
    assert ended.value.code == 2 and option in message and (value in message or option == "--colour")
    assert not list(tmp_path.iterdir())


REALS = {x.name for script in SCRIPTS.values() for x in dataclasses.fields(script.Args) if x.type == "float"}


@pytest.mark.parametrize("name", sorted(REALS))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39, -1e-46])
def test_real_settings_are_finite_numbers_of_float32(name, value):
    """No limit of gradients is the one setting that may be infinite."""
    if name == "max_grad_norm" and value >= 1e39:
        experiment.check(vision.Args(max_grad_norm=value), vision.POOLING_NAMES)
        return
    args = vision.Args(**{name: value})
    check = (
        (vision.Vision, args, "digits")
        if name == "attention_dropout"
        else (experiment.check, args, vision.POOLING_NAMES)
    )
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}={value}')}: (must be|expected) [^\n]*$"):
        check[0](*check[1:])


@pytest.mark.parametrize("option", ["--data-dir", "--out"])
def test_folders_that_are_files_are_named(tmp_path, option):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(SystemExit, match=r"^error: [^\n]*taken[^\n]*$"):
        experiment.guard(aggregation.main, ["--num-sets", "20", "--jobs", "1", option, "taken"])
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_canvas_is_added_to_runs_that_are_done(capsys):
    words = [*TINY["vision"][: TINY["vision"].index("--canvas-size")], "--pooling", "avgpool"]
    run("vision", *words)
    run("vision", *words, "--canvas-size", "0", "12")
    assert "2 runs, 1 already finished" in capsys.readouterr().out


SLIP = ["--mark-class-token", "--class-token-init", "uniform"]


@pytest.mark.parametrize(
    ("options", "message"),
    [([], "mark_class_token=the default: expected True, "),
     (SLIP[:1], "class_token_init=the default: expected uniform, ")],
)  # fmt: skip
def test_a_stopped_run_keeps_the_options_of_its_class_token(tmp_path, monkeypatch, options, message):
    """It goes on exactly, and not with other options; without them a run's settings are those of older runs."""
    tiny = "--num-sets 60 --num-vectors 4 --epochs 3 --batch-size 20 --pooling clstoken --seeds 1 --jobs 1 --dropout .2"
    run("knn_centroid", *tiny.split(), *SLIP)
    whole = tmp_path / "out" / "KNN-4" / "clstoken" / "seed-1-fold-1"
    expected, summary = load_checkpoint(whole / "checkpoint.pt"), json.loads((whole / "summary.json").read_text())
    assert expected["settings"]["mark_class_token"] is True and expected["settings"]["class_token_init"] == "uniform"
    args = knn_centroid.Args(mark_class_token=True, num_sets=60, num_vectors=4)
    assert isinstance(knn_centroid.make_task(args, "KNN-4").network("clstoken", 1), network.MarkedClassToken)
    whole.rename(tmp_path / "whole")

    train_epoch = experiment.train_epoch

    def interrupted(trainer, parts):
        if trainer.run.rows:
            raise KeyboardInterrupt
        return train_epoch(trainer, parts)

    with monkeypatch.context() as patch:
        patch.setattr(experiment, "train_epoch", interrupted)
        with pytest.raises(SystemExit):
            run("knn_centroid", *tiny.split(), *SLIP)
    assert len(load_checkpoint(whole / "checkpoint.pt")["rows"]) == 1
    with pytest.raises(SystemExit, match=f"^error: {message}"):
        run("knn_centroid", *tiny.split(), *options)
    run("knn_centroid", *tiny.split(), *SLIP)
    found = load_checkpoint(whole / "checkpoint.pt")
    assert all(torch.equal(weight, found["network"][name]) for name, weight in expected["network"].items())
    assert json.loads((whole / "summary.json").read_text())["test_error"] == summary["test_error"]

    job = experiment.Job("KNN-4", "clstoken", 1, 1)
    assert not {"mark_class_token", "class_token_init"} & set(experiment.run_settings(knn_centroid.Args(), job))


def test_scores_and_their_spread():
    cells = {experiment.Job("a", "avgpool", seed, 1): {"test_error": error} for seed, error in enumerate((1, 2, 6))}
    cells |= {experiment.Job("b", "avgpool", 1, 1): {"test_error": 4}}
    rows = report.scores(cells)
    assert rows["avgpool"]["a"] == pytest.approx((3, np.std((1, 2, 6), ddof=1) / math.sqrt(3), 3))
    assert rows["avgpool"]["b"].text(2) == "4.00" and rows["avgpool"]["a"].text(2) == "3.00 ± 1.53"
    assert report.scores(cells, lambda error: 10 - error)["avgpool"]["a"].mean == 7
    text = report.format_table(rows, {"naive": {"a": 1, "b": 2}}, {"avgpool": {"a": 0.5}}, ["a", "b"], digits=1)
    assert cells_of(text)[1] == {
        "AvgPool": ["3.0 ± 1.5", "4.0"], "the paper's": ["0.5", ""], "naive": ["1.0", "2.0"],
    }  # fmt: skip


def test_bounds_of_trained_heads(tmp_path, monkeypatch, capsys):
    bounds = load_supervised("bounds")
    with pytest.raises(ValueError, match="contains no finished run of AdaPool"):
        bounds.main([str(tmp_path / "runs")])
    words = [
        "--num-sets",
        "200",
        "--num-vectors",
        "6",
        "--num-features",
        "8",
        "--embed-dim",
        "8",
        "--feedforward-dim",
        "8",
    ]
    words += ["--num-neighbors", "1", "6", "--epochs", "1", "--pooling", "adapool", "--seeds", "1", "--jobs", "1"]
    knn_centroid.main([*words, "--out", "runs", "--data-dir", "data"])
    capsys.readouterr()
    for path in (tmp_path / "runs").rglob("checkpoint.pt"):  # those of the best epoch are measured, not the last ones
        save_checkpoint(path, {**load_checkpoint(path), "network": {}})
    bounds.main(["runs", "--data-dir", "data"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:3] in ("| 1", "| 6")]
    rows = [line.split(" | ") for line in lines]
    assert [row[-1] for row in rows] == 2 * ["100.00% |"]
    assert "nan" not in str(rows) and (tmp_path / "runs" / "bounds.png").is_file()

    alone = tmp_path / "runs" / "KNN-6" / "adapool" / "seed-1-fold-1"
    monkeypatch.chdir(alone)
    for folder in (alone, ".", "..", "../.."):
        bounds.main([str(folder), "--data-dir", str(tmp_path / "data")])
        assert [line for line in capsys.readouterr().out.splitlines() if line[:3] in ("| 1", "| 6")] == lines[1:]

    # the weights measured by hand: those of the neighbors and of the others, beside 1 / k and 0
    trained, args, k = bounds.load(tmp_path / "runs" / "KNN-1" / "adapool" / "seed-1-fold-1", tmp_path / "data")
    sets = set_task.test_sets(args)[:5]
    with torch.no_grad():
        weights = trained.head.weights(trained.encode(sets.double()))
    near = load_supervised("synthetic").nearest(sets, k).argmax(dim=1)
    found = bounds.measure(trained, sets, k)
    own = torch.stack([weights[index, :, place] for index, place in enumerate(near)])  # (B, heads)
    assert found.signal == pytest.approx(3 * [(1 - own).mean().item()])
    assert found.noise[1] == pytest.approx((own - 1).mean().item() / 5)
    assert found.inside == 1
    tied = sets[:1].clone()
    tied[0, 2:] = tied[0, 1]  # which leaves open what the nearest is
    assert bounds.measure(trained, torch.cat([tied, sets]), k) == found

    path = alone / "checkpoint.pt"
    save_checkpoint(path, {name: part for name, part in load_checkpoint(path).items() if name != "best"})
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} was not written by this program \(KeyError: 'best'"):
        bounds.main([str(alone), "--data-dir", str(tmp_path / "data")])

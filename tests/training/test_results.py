"""Results of trained agents come from files: runs are collected in lines, and figures and tables are made of lines."""

import json
import re

import numpy as np
import pytest
from helpers import ROOT, load_agent, train_tiny

pytest.importorskip("matplotlib")

from noisy_envs.rendering.agent_policy import load_file
from noisy_envs.training.run_lines import BINS, read_lines
from noisy_envs.training.statistics import difference, estimate, iqm, mean_interval, probability_of_improvement

make_results = load_file("make_results", ROOT / "tools")
DATA = sorted((ROOT / "docs" / "data").glob("*.jsonl"))
LEVELS = {"1v31v0": 1.0, "1v1v30": 0.0625}
OFFSETS = {"avgpool": 0.0, "adapool": 0.1}  # of scores


def draw_scores(seed, *sizes):
    generator = np.random.default_rng(seed)
    return [generator.normal(size=size).round(1) for size in sizes]  # some are equal


def test_probability_of_improvement_counts_pairs():
    first, second, third = draw_scores(19, 9, 7, 8)
    plain = np.mean([(x > y) + 0.5 * (x == y) for x in first for y in second])
    assert any(x == y for x in first for y in second) and 0.3 < plain < 0.7
    assert probability_of_improvement((first, second)).value == pytest.approx(plain)
    other = probability_of_improvement((third, first)).value
    assert probability_of_improvement((first, second), (third, first)).value == pytest.approx((plain + other) / 2)
    assert probability_of_improvement((second, first)).value == pytest.approx(1 - plain)
    assert probability_of_improvement(([1, 2, 3], [0, 0, 0])) == (1, 1, 1)
    assert np.isnan(probability_of_improvement((first, [1.0, 2.0])).low)
    stats = pytest.importorskip("scipy.stats")  # as rliable does it
    assert stats.mannwhitneyu(first, second).statistic / 63 == pytest.approx(plain)


def plain_bootstrap(statistic, strata):
    """Return the ends of the stratified 95% interval of a statistic of arrays of scores."""
    generator = np.random.default_rng(7)
    samples = [statistic(*(generator.choice(scores, len(scores)) for scores in strata)) for _ in range(4000)]
    return pytest.approx(np.quantile(samples, (0.025, 0.975)), abs=0.04)


def test_intervals_are_those_of_a_plain_stratified_bootstrap():
    a, b, c, d = (np.sort(scores) for scores in draw_scores(1, 12, 12, 20, 8))  # in order: dependence would show
    c, d = c + 5, d + 6

    def better(*scores):
        return np.mean(
            [
                ((x[:, None] > y) + 0.5 * (x[:, None] == y)).mean()
                for x, y in zip(scores[::2], scores[1::2], strict=True)
            ]
        )

    for pairs in ([(a, b)], [(a, b), (c, d)]):
        found = probability_of_improvement(*pairs)
        assert [found.low, found.high] == plain_bootstrap(better, sum(pairs, ()))
    apart = difference((a, b), (c, d))  # strata of different sizes
    assert [apart.low, apart.high] == plain_bootstrap(
        lambda *scores: iqm(np.concatenate(scores[::2])) - iqm(np.concatenate(scores[1::2])), (a, b, c, d)
    )
    assert apart.value == iqm(np.concatenate([a, c])) - iqm(np.concatenate([b, d]))
    pooled = estimate(a, c)  # only half of all resamples that ignore the strata would have as many scores of each
    assert [pooled.low, pooled.high] == plain_bootstrap(lambda *scores: iqm(np.concatenate(scores)), (a, c))
    assert pooled.value == pytest.approx(pytest.importorskip("scipy.stats").trim_mean(np.concatenate([a, c]), 0.25))


def test_means_of_curves_have_gaps_where_a_run_has_no_value():
    curves = np.array([[0.0, np.nan, 1.0], [1.0, 1.0, 1.0], [2.0, 1.0, 1.0]])
    means, low, high = mean_interval(curves)
    np.testing.assert_equal(means, [1, np.nan, 1])
    assert (low[0], high[0]) == (0, 2) and low[2] == high[2] == 1 and np.isnan([low[1], high[1]]).all()
    assert np.isnan(mean_interval(curves[:2])[1]).all()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder with a run and an evaluation by sampled actions, and the run's own folder."""
    pytest.importorskip("tyro")
    from noisy_envs.training.main import main

    folder, agent = tmp_path_factory.mktemp("trained"), load_agent("adapool")
    summary, run = train_tiny(agent, folder / "seed-1", "--total-timesteps", "1024", "--learning-rate", "0.05")
    options = ["--no-eval-deterministic", "--eval-episodes", "3", "--run-dir", str(folder / "sampled")]
    main(agent, ["--evaluate", str(run), *options])
    return folder, run, summary


def test_a_line_holds_what_the_run_left(trained, tmp_path):
    folder, run, summary = trained
    collect, out = load_file("collect_runs", ROOT / "tools"), tmp_path / "data" / "runs.jsonl"
    collect.main([str(out), str(folder)])
    text = out.read_text()
    (line,) = read_lines(out).values()
    expected = {"agent": "adapool", "seed": 1, "steps": 1024, "snr": 0.5, "preset": "fast", "env_kwargs": {}}
    assert line.items() >= expected.items() and line["versions"] == summary["versions"] and len(text) < 2000
    tiny = {"num_envs": 4, "num_steps": 16, "minibatch_size": 32, "update_epochs": 1, "anneal_lr": False}
    assert line["settings"] == tiny | {"total_timesteps": 1024, "learning_rate": 0.05, "query_vector": "none"}
    (evaluation,) = json.loads(next(folder.rglob("evaluation.json")).read_text())["results"]
    for actions, source in (("best", summary), ("sampled", evaluation)):
        assert line["scores"][actions] == pytest.approx([source["score"], *source["score_95"]], rel=1e-3)
    rows = collect.read_metrics(run / "metrics.csv")
    scores = {i: row["charts/normalized_score"] for i, row in enumerate(rows) if row["charts/episodic_return"] < 0}
    filled = {place: value for place, value in enumerate(line["curve"]) if value is not None}
    assert len(scores) == 2 and len(line["curve"]) == BINS  # episodes end in the updates 8 and 16 of 16
    assert filled == {19: pytest.approx(scores[7], rel=1e-3), 39: pytest.approx(scores[15], rel=1e-3)}
    assert (line["best"], line["final"]) == (max(filled.values()), filled[39])
    kl = [row["losses/approx_kl"] for row in rows]
    assert line["kl_max"] == pytest.approx(max(kl), rel=1e-3) and max(kl) > 1
    assert line["kl_above_1"] == pytest.approx(np.mean([x > 1 for x in kl]), rel=1e-3)
    collect.main([str(out), str(folder)])  # again: it is there
    assert out.read_text() == text


def copy_run(run, folder, summary, metrics=None):
    folder.mkdir()
    (folder / "metrics.csv").write_text(metrics or (run / "metrics.csv").read_text())
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(json.loads((run / "summary.json").read_text()) | summary))


def test_what_is_no_good_run_is_refused_by_name_and_the_others_are_kept(trained, tmp_path):
    _, run, _ = trained
    collect, runs, out = load_file("collect_runs", ROOT / "tools"), tmp_path / "runs", tmp_path / "runs.jsonl"
    metrics = (run / "metrics.csv").read_text()
    header, first, second, *_ = metrics.splitlines(keepends=True)
    runs.mkdir()
    copy_run(run, runs / "a-good", {})
    copy_run(run, runs / "b-twice", {"score": 0.123})
    copy_run(run, runs / "c-unfinished", None)
    copy_run(run, runs / "d-short", {"seed": 2}, header + first)
    copy_run(run, runs / "e-gap", {"seed": 2}, metrics.replace(second, ""))
    copy_run(run, runs / "f-nan", {"seed": 2, "score": None})
    copy_run(run, runs / "g-other", {"seed": 2, "settings": {}})
    copy_run(run, runs / "h-good", {"seed": 2})
    (runs / "i-damaged").mkdir()
    (runs / "i-damaged" / "summary.json").write_text("{")
    with pytest.raises(SystemExit) as error:
        collect.main([str(out), str(runs)])
    lines = error.value.code.splitlines()
    named = [re.search(r"/runs/([\w-]+)", line)[1] for line in lines[1:]]
    assert named == ["b-twice", "c-unfinished", "d-short", "e-gap", "f-nan", "g-other", "i-damaged"]
    assert "another run of SimpleCentroid adapool fast" in lines[1] and "seed 1" in lines[1]
    assert [run["seed"] for run in read_lines(out).values()] == [1, 2]
    for text, number in ((out.read_text() + "{}\n", 3), (out.read_text() * 2, 3)):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(SystemExit, match=rf"bad\.jsonl, line {number}: expected"):
            collect.main([str(tmp_path / "bad.jsonl"), str(runs)])
        assert (tmp_path / "bad.jsonl").read_text() == text


def write_runs(path, left_out=()):
    """Write synthetic runs: five seeds, two heads, levels and query vectors."""
    lines = []
    for head, level, vector, seed in np.ndindex(2, 2, 2, 5):
        name, size, setting = list(OFFSETS)[head], list(LEVELS)[level], ("none", "all")[vector]
        if (name, size, setting, seed) in left_out or (name, size, setting) in left_out:
            continue
        score = round(0.8 - 0.5 * level + OFFSETS[name] + 0.05 * vector + 0.02 * seed**2, 4)
        run = {"env_id": f"noisy_envs/SimpleCentroid-{size}-v0", "env_kwargs": {}, "agent": name, "seed": seed}
        run |= {"snr": LEVELS[size], "preset": "paper", "settings": {"query_vector": setting, "dropout": 0.1}}
        run |= {"steps": 1000, "scores": {"best": [score, 0, 1]}, "curve": [None] * (BINS - 4) + [0, 1, 0, score]}
        lines.append(run | {"best": score + 0.2 * (seed == 1), "final": score, "kl_above_1": 0.01 * seed})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_numbers_of_the_tables(tmp_path, capsys):
    for name in ("data", "images"):
        (tmp_path / name).mkdir()
    write_runs(tmp_path / "data" / "all.jsonl")
    write_runs(tmp_path / "data" / "some.jsonl", [("avgpool", "1v1v30", "all"), ("adapool", "1v31v0", "none", 3)])
    page = tmp_path / "results.md"
    page.write_text(
        f"# A\n![](images/all_scores.png) ![](images/some_curves.png)\n{blocks('some')}B\n{blocks('all')}C\n"
    )
    make_results.main([str(tmp_path)])
    text = page.read_text()
    assert text.count("<!-- table") == 2 * len(KINDS) and "old" not in text
    table = {name: tables_of(text, name) for name in ("some", "all")}
    best = table["all"]["best"]
    assert "All runs: game SimpleCentroid, preset paper, dropout 0.1; 5 seeds." in best and "| 1v31v0, SNR 1 |" in best
    middle = (0.02 + 0.08 + 0.18) / 3  # of the seeds' 0, 0.02, 0.08, 0.18, 0.32 the ends are cut off
    for vectors, head, clean in (("no vectors", "AvgPool", 0.8), ("vectors in all heads", "AdaPool", 0.95)):
        cells = [f"{clean - drop + middle:.2f} ({estimate_of(clean - drop)})" for drop in (0, 0.5)]
        assert f"| {vectors} | {head} | {' | '.join(cells)} | " in best
    late = (1 + 0.8 + middle) / 4  # the last tenth of the curve is 0, 1, 0 and the score
    assert f"| no vectors | AvgPool | {late:.2f} (" in table["all"]["sampled"]
    wins = {"no vectors": f"{(3 + 3 + 3.5 + 4 + 5) / 25:.2f}"}  # of 0.1, 0.12, 0.18, 0.28, 0.42 over 0, 0.02, 0.08, …
    wins |= {"vectors in all heads": wins["no vectors"], "vectors in AdaPool alone": f"{(3 + 3 + 4 + 5 + 5) / 25:.2f}"}
    row = r"\| ([\w ]*vectors[\w ]*) \| AvgPool \| (0\.\d+) \(0\.\d+ to [01]\.\d+\) \| (0\.\d+) \("
    assert dict((name, pair) for name, *pair in re.findall(row, table["all"]["improvement"])) == {
        name: [x, x] for name, x in wins.items()
    }
    assert "| vectors in AdaPool alone | AvgPool | 0.15 (" in table["all"]["difference"]
    strata = [[0.8 - drop + offset + 0.02 * i**2 for i in range(5)] for offset in OFFSETS.values() for drop in (0, 0.5)]
    cells = "| no vectors | {:.2f} ({:.2f} to {:.2f}) | 4 of 20 | 2.00% | {} (".format(
        *estimate(*strata), wins["no vectors"]
    )
    assert cells in table["all"]["summary"] and ", 1 of 2 levels |" in table["some"]["summary"]
    assert "Nothing is missing." in table["all"]["missing"] and "4 to 5 seeds" in table["some"]["best"]
    missing = ["no vectors, SimpleCentroid-1v31v0, AdaPool, seeds 3"]
    missing += ["vectors in all heads, SimpleCentroid-1v1v30, AvgPool, all runs"]
    assert re.findall(r"^\* (.*)", table["some"]["missing"], re.MULTILINE) == missing
    assert re.findall("missing: (.*)", capsys.readouterr().out) == missing
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["all_scores.png", "some_curves.png"]
    make_results.main([str(tmp_path)])
    assert page.read_text() == text
    for wrong, message in (("none best", "expected a file of this name"), ("all worst", "'worst': expected best")):
        page.write_text(text.replace("table all best", f"table {wrong}"))
        with pytest.raises(ValueError, match=message):
            make_results.main([str(tmp_path)])


KINDS = "best", "sampled", "improvement", "difference", "summary", "missing"


def blocks(name):
    return "".join(f"<!-- table {name} {kind} -->\nold\n<!-- end -->\n" for kind in KINDS)


def tables_of(page, name):
    return {kind: re.search(rf"(?s)<!-- table {name} {kind} -->(.*?)<!-- end", page)[1] for kind in KINDS}


def test_tables_of_few_runs(tmp_path):
    write_runs(tmp_path / "few.jsonl")
    runs = [run for run in read_lines(tmp_path / "few.jsonl").values() if run["seed"] < 2]
    assert "| no vectors | AvgPool | 0.81 | 0.31 | 0.56 |" in make_results.make_table(runs, "best")  # no intervals
    with pytest.raises(ValueError, match="'best': expected runs with a score by these actions"):
        make_results.make_table([run | {"scores": {"sampled": [0, 0, 1]}} for run in runs], "best")


def estimate_of(lowest):
    return "{1:.2f} to {2:.2f}".format(*estimate([lowest + 0.02 * seed**2 for seed in range(5)]))


def test_the_pages_figures_and_tables_are_those_of_the_files():
    image = pytest.importorskip("PIL.Image")
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert make_results.fill(page, {path.stem: list(read_lines(path).values()) for path in DATA}) == page
    assert {path.stem for path in DATA} == set(re.findall(r"<!-- table (\w+) ", page))
    for name in set(re.findall(r"images/(\w+_(?:scores|curves)\.png)", page)):
        source = ROOT / "docs" / "data" / f"{name.rpartition('_')[0]}.jsonl"
        with image.open(ROOT / "docs" / "images" / name) as figure:
            assert figure.text["Source"] == make_results.digest(source)
    assert sum(path.stat().st_size for path in DATA) < 10 * 2**20

"""The command `python -m noisy_envs`: the table of ids, films, and the window with its keys."""

import os
import pickle
import subprocess
import sys
from functools import partial
from itertools import product

import gymnasium
import numpy as np
import pytest
from cases import GAME_IDS, HEADS, by_default, each_id, posix
from helpers import ROOT, load_agent, train_tiny

from noisy_envs import ENVIRONMENTS, __main__
from noisy_envs.baselines import baseline_returns, play_baseline
from noisy_envs.interfaces.episode import RENDER_FPS
from noisy_envs.randomness import derive_seed
from noisy_envs.registration import GAMES, noise_option
from noisy_envs.rendering import video
from noisy_envs.rendering.playback import Film, add_noise, make_playback, record
from noisy_envs.rendering.viewer import MARGIN, NOISE_STEP, PANEL, PAPER, BaselinePolicy, Viewer
from noisy_envs.rendering.window import Window
from noisy_envs.training import gymnasium_envs

CENTROID, TAG, BOX = (GAME_IDS[game] for game in ("simple_centroid", "simple_tag", "box_world"))
POLICIES = [(env_id, name) for game, env_id in GAME_IDS.items() for name in GAMES[game].policies]
SHORT = ["--env-kwargs", "max_steps=3"]
WORDS = {
    CENTROID: SHORT,
    TAG: ["--env-id", TAG, *SHORT],
    BOX: ["--env-id", BOX, "--preset", "fast", "--env-kwargs", "size=6", "max_steps=3"],
}


@pytest.fixture
def short(monkeypatch):
    """Let episodes of all ids be of five steps."""
    for env_id, (game, parameters) in ENVIRONMENTS.items():
        monkeypatch.setitem(ENVIRONMENTS, env_id, (game, parameters | {"max_steps": 5}))


def start(policy, seed=0):
    """Return the playback of a policy's first episode."""
    return make_playback(policy.env_id, policy.env_kwargs, policy.learners, seed)


def refused(words, code=None):
    """Return the message with which the command ends."""
    with pytest.raises(SystemExit) as error:
        __main__.main([str(word) for word in words])
    if code is not None:
        return error.value.code == code
    message = str(error.value)
    assert message.startswith("error: ") and "\n" not in message
    return message


# The table


@each_id
def test_a_row_says_what_the_environment_shows_takes_and_pays(env_id):
    name, tokens, actions, noise, *returns = __main__.row(env_id)
    env = gymnasium.make(env_id)
    assert (name, tokens) == (env_id, str(env.observation_space.shape))
    continuous = isinstance(env.action_space, gymnasium.spaces.Box)
    assert actions == (f"{env.action_space.shape[0]} floats" if continuous else f"one of {env.action_space.n}")
    assert returns == [f"{value:.3f}" for value in baseline_returns(env_id)]
    game, parameters = ENVIRONMENTS[env_id]
    if game != "box_world" and not parameters.get("collidable_obstacles"):  # a decoy box is two tokens
        assert int(noise) == getattr(env.unwrapped.game, noise_option(env_id))
    counts = {"SimpleTagMPE-v0": 0, "BoxWorld-v0": 0, "BoxWorldPixels-v0": 42, "BoxWorldClutter-v0": 42}
    assert int(noise) == counts.get(env_id.split("/")[1], int(noise))


def test_padding_is_no_noise(monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS, CENTROID, ("simple_centroid", {}))
    monkeypatch.setitem(gymnasium.registry[CENTROID].kwargs, "num_noise", (0, 28))
    env = gymnasium.make(CENTROID).unwrapped
    tokens, info = env.reset(seed=0)
    present = int(env.game.token_mask(tokens).sum())
    assert present < 32 and __main__.row(CENTROID)[3] == str(present - int(info["signal_mask"].sum()))


def test_the_table_is_aligned_and_fits_80_columns(capsys):
    __main__.main([])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    head, *rows = lines[: len(ENVIRONMENTS) + 1]
    assert tuple(head.split()) == __main__.COLUMNS and [row.split()[0] for row in rows] == list(ENVIRONMENTS)
    ends = [head.index(word) + len(word) for word in __main__.COLUMNS[3:]]
    for row in rows:
        assert len(row) == len(head)
        assert all(row[end - 1] != " " and row[end : end + 2].strip() == "" for end in ends)


def test_the_table_needs_neither_torch_nor_pygame_and_its_reader_may_leave():
    code = """
import sys
from noisy_envs import __main__
__main__.main([])
assert not {"torch", "pygame", "pettingzoo", "PIL"} & set(sys.modules), sys.modules.keys()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    with subprocess.Popen([sys.executable, "-m", "noisy_envs"], cwd=ROOT, **PIPES) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 141


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@posix
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_what_is_closed_is_not_written_to(closed):
    code = "from noisy_envs.training.process import ignore_broken_pipe\nimport sys\n"
    code += "with ignore_broken_pipe():\n    assert not sys.stderr.isatty()"
    for words in (["-m", "noisy_envs"], ["-c", code]):
        command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-W", "error", *words]
        done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and done.stderr == "", done.stderr


# Reference policies


@pytest.mark.parametrize(("env_id", "policy"), POLICIES)
def test_a_reference_policy_plays_as_where_its_returns_are_measured(env_id, policy):
    baseline = BaselinePolicy(policy, env_id, None, seed=3)
    playback = start(baseline, 3)
    while not playback.done:
        playback.step(baseline.act(playback)[0])
    assert playback.total_return == pytest.approx(play_baseline(env_id, policy, episodes=1, seed=3)[0], abs=1e-4)


@pytest.mark.parametrize(("env_id", "policy"), POLICIES)
def test_a_reference_policy_makes_a_film(env_id, policy, short, tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    __main__.main(["--watch", env_id, "--policy", policy, "--out", str(tmp_path / "new" / "x.gif")])
    assert capsys.readouterr().out.startswith(f"see {tmp_path / 'new' / 'x.gif'}: return ")
    with image.open(tmp_path / "new" / "x.gif") as shown:
        assert shown.n_frames == 6 and shown.size == (600, 600) and shown.info["duration"] == 1000 // RENDER_FPS


def test_a_film_may_be_an_mp4(short, tmp_path):
    imageio = pytest.importorskip("imageio_ffmpeg")
    __main__.main(["--watch", TAG, "--out", str(tmp_path / "x.mp4")])
    assert imageio.count_frames_and_secs(tmp_path / "x.mp4")[0] == 6


@pytest.mark.parametrize("env_id", [CENTROID, TAG])
def test_seed_and_noise_are_those_that_are_asked_for(env_id, short, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(__main__, "record", lambda *words: shown.append(words[:2]) or Film([], None))
    monkeypatch.setattr(__main__, "write_video", lambda *_: None)
    for words in ([], ["--seed", "0"], ["--seed", "5"], ["--seed", "5", "--num-noise", "28"]):
        __main__.main(["--watch", env_id, "--policy", "random", *words, "--out", str(tmp_path / "x.gif")])
    first, same, other, _ = shown
    assert [playback.noise for playback, _ in shown] == [4, 4, 4, 28]
    assert [playback.seed for playback, _ in shown] == [0, 0, 5, 5]
    for steps in range(2):
        for playback, act in shown[: 4 * steps]:
            playback.step(act(playback)[0])
        pictures = [playback.render() for playback, _ in (first, same, other)]
        assert np.array_equal(*pictures[:2]) and (pictures[2] != pictures[0]).any()


# Checkpoints


def filmed(ppo, run):
    """Return the film that an agent's file makes of a run."""
    from noisy_envs.training import evaluation
    from noisy_envs.training.checkpoint import load_checkpoint
    from noisy_envs.training.settings import load_args

    args = load_args(ppo, run)
    agent = evaluation.load_agent(ppo, args, run, load_checkpoint(run / "checkpoint.pt"))
    return evaluation.record_episode(agent, args)


@by_default(
    ("head", "env_id"),
    [("adapool", BOX), ("avgpool", TAG), ("clstoken", CENTROID), ("maxpool", BOX)],
    product(HEADS, GAME_IDS.values()),
)
def test_a_checkpoint_plays_as_in_the_films_of_its_own_file(env_id, head, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("tyro")
    from noisy_envs.rendering.agent_policy import Trained

    ppo = load_agent(head)
    _, run = train_tiny(ppo, tmp_path / "run", *WORDS[env_id])
    expected = filmed(ppo, run)
    for path in (run, run / "checkpoint.pt"):
        policy = Trained(path, env_id, None)
        assert policy.name == f"ppo_{head}"
        found = record(start(policy, policy.seed), policy.act).frames
        assert np.array_equal(found, expected)
    __main__.main(["--watch", env_id, "--policy", str(run), "--out", str(tmp_path / "x.gif")])
    assert (tmp_path / "x.gif").read_bytes().startswith(b"GIF")


@pytest.fixture(scope="module")
def run(trained_run):
    """A run of AdaPool."""
    return trained_run("adapool", "--num-noise", "4", *SHORT)


def test_several_learners_play_with_one_network(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("tyro")
    from noisy_envs.rendering.agent_policy import Trained

    _, run = train_tiny(load_agent("avgpool"), tmp_path, "--learners", "all", *SHORT, "num_agents=2")
    policy = Trained(run, CENTROID, 7)
    playback = start(policy, 1)
    assert policy.learners == playback.learners == "all" and playback.noise == 7
    actions, weights = policy.act(playback)
    assert actions.shape == (2, 5) and len(weights) == 12
    playback.step(actions)


def test_a_checkpoint_plays_at_other_noise_and_at_other_ids_of_its_game(run):
    from noisy_envs.rendering.agent_policy import Trained

    other = "noisy_envs/SimpleCentroid-1v15v16-v0"
    for env_id, asked, expected in ((CENTROID, None, 4), (CENTROID, 9, 9), (other, None, 16), (other, 0, 0)):
        policy = Trained(run, env_id, asked)
        playback = start(policy)
        assert playback.noise == expected
        playback = add_noise(playback, 8)
        playback.step(policy.act(playback)[0])
        assert policy._agent.spec == playback.token_spec
        assert playback.noise == expected + 8 and len(policy.act(playback)[1]) == playback.game.num_entities


def test_more_or_less_noise_moves_nobody_else(run, screen):
    from noisy_envs.rendering.agent_policy import Trained

    def baseline(noise):
        return BaselinePolicy("oracle", CENTROID, noise, 1)

    for policy in (baseline, partial(Trained, run, CENTROID)):
        playbacks = [start(policy(noise), 1) for noise in (4, 28, 60)]
        for number in (0, 60, -20):
            playbacks[0] = add_noise(playbacks[0], number)
            assert all(np.array_equal(playback.state.mover, playbacks[2].state.mover) for playback in playbacks)


def test_more_noise_starts_as_the_players_own():
    policy = BaselinePolicy("oracle", CENTROID, None, 1)
    policy.env_kwargs = {"num_noise": 28}  # as an agent has that learned so, see `Trained`
    playback = start(policy, 1)
    fewer = add_noise(playback, -24)
    assert fewer.noise == 4 and np.array_equal(fewer.state.mover, playback.state.mover)


def test_a_checkpoint_that_learned_with_a_range_plays_at_any_noise(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("tyro")
    from noisy_envs.rendering.agent_policy import Trained

    _, run = train_tiny(load_agent("adapool"), tmp_path, "--env-kwargs", "num_noise=(0, 28)", "max_steps=3")
    assert Trained(run, CENTROID, None).env_kwargs == {"num_noise": (0, 28), "max_steps": 3, "spread": 2.5}
    assert Trained(run, CENTROID, 9).env_kwargs == {"num_noise": 9, "max_steps": 3, "spread": 2.5}


def test_a_checkpoint_plays_the_episodes_of_its_evaluation_unless_a_seed_is_given(run, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(__main__, "record", lambda *words: shown.append(words[:2]) or Film([], None))
    monkeypatch.setattr(__main__, "write_video", lambda *_: None)
    for words in ([], ["--seed", "0"], ["--seed", "7"]):
        __main__.main(["--watch", CENTROID, "--policy", str(run), *words, "--out", str(tmp_path / "x.gif")])
    assert [playback.seed for playback, _ in shown] == [derive_seed(1, "evaluate"), 0, 7]


def moved_by(policy, tokens):
    """Return how much the best action moves with each token (1, N, D), by finite differences: (N,), 1 in all."""
    import torch

    from noisy_envs.nn.distributions import Gaussian

    agent = policy._agent.double()

    def best(numbers):
        with torch.no_grad():
            parameters = agent(torch.from_numpy(numbers))[0][0]
        half, continuous = len(parameters) // 2, isinstance(agent.distribution, Gaussian)
        return (parameters[:half] if continuous else parameters.log_softmax(-1)).numpy()

    squares = np.zeros(tokens.shape[1:])
    for token, feature in np.ndindex(len(squares), squares.shape[1] - 1):  # the last one is the role
        step = np.zeros_like(tokens)
        step[0, token, feature] = 1e-6
        squares[token, feature] = ((best(tokens + step) - best(tokens - step)) ** 2).sum()
    norms = np.sqrt(squares.sum(axis=1))
    return norms / norms.sum()


@pytest.mark.parametrize("learned", ["run", "balancing"])
def test_halos_may_be_what_moves_the_action(learned, request):
    pytest.importorskip("torch")
    from noisy_envs.rendering.agent_policy import Trained

    path = request.getfixturevalue(learned)
    policy, weighing = Trained(path, None, None, overlay="saliency"), Trained(path, None, None)
    playback = start(policy, 3)
    actions, weights = policy.act(playback)
    np.testing.assert_allclose(weights, moved_by(policy, playback.tokens[:1].astype(np.float64)), atol=1e-4)
    assert weights.sum() == pytest.approx(1, abs=1e-5) and (weights >= 0).all()
    others_actions, attention = weighing.act(playback)
    np.testing.assert_array_equal(actions, others_actions)
    assert (playback.render(weights, "saliency") != playback.render(attention)).any()


def test_a_film_tells_how_much_of_the_halos_is_on_signal(run, tmp_path, capsys, monkeypatch):
    given = [([9, 0, 2, 2, 4, 1, 1, 1], "attention", "60.0%"), ([0, 3, 0, 0, 0, 0, 0, 0], "saliency", "0.0%")]
    for weights, overlay, told in given:
        decided = np.zeros((1, 5), np.float32), np.float32(weights)
        monkeypatch.setattr("noisy_envs.rendering.agent_policy.Trained.act", lambda *_, decided=decided: decided)
        __main__.main(["--policy", str(run), "--overlay", overlay, "--out", str(tmp_path / f"{overlay}.gif")])
        assert capsys.readouterr().out.endswith(f" in 3 steps; signal has {told} of the {overlay}\n")
    baseline = BaselinePolicy("random", CENTROID, None, 0)
    assert record(start(baseline), baseline.act).signal_share is None
    told = refused(["--watch", CENTROID, "--overlay", "saliency", "--out", tmp_path / "y.gif"])
    assert told == "error: overlay='saliency': expected a trained agent, --policy RUN; 'oracle' has no weights"


def test_another_folder_of_agents_may_be_named(run, tmp_path):
    from noisy_envs.rendering.agent_policy import Trained

    source = (ROOT / "agents" / "ppo_adapool.py").read_text()
    (tmp_path / "ppo_adapool.py").write_text(source + "\nMINE = True\n")
    Trained(run, CENTROID, None, tmp_path)
    assert sys.modules["ppo_adapool"].MINE
    told = refused(["--watch", CENTROID, "--policy", run, "--out", tmp_path / "x.gif", "--agents-dir", tmp_path / "no"])
    assert f"no {tmp_path / 'no' / 'ppo_adapool.py'}, which wrote the checkpoint" in told
    assert "--agents-dir" in told


class Evil:
    """A pickle that would touch a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("missing", "no checkpoint at "),
        ("text", "is not a checkpoint of an agent, or is damaged"),
        ("code", "is not a checkpoint of an agent, or is damaged"),
        ("a tensor", "it names no agent"),
        ("no file", "it names no agent"),
        ("a path as file", "it names no agent"),
        ("an unknown file", "ppo_otherpool.py, which wrote the checkpoint"),
        ("another version", "was written by another version of this agent"),
        ("another file", "another network than these settings define"),
        ("another game", f"trained on another game than {CENTROID}, {TAG}"),
    ],
)
def test_a_file_that_is_no_such_checkpoint_is_refused(run, how, told, tmp_path):
    torch = pytest.importorskip("torch")
    content, path = torch.load(run / "checkpoint.pt"), tmp_path / "checkpoint.pt"
    made = {
        "a tensor": torch.zeros(2),
        "no file": {name: value for name, value in content.items() if name != "file"},
        "a path as file": {**content, "file": "../../ppo_adapool"},
        "an unknown file": {**content, "file": "ppo_otherpool"},
        "another version": {**content, "args": {**content["args"], "old": 1}},
        "another file": {**content, "file": "ppo_avgpool"},
        "another game": {**content, "args": {**content["args"], "env_id": TAG}},
    }
    if how in made:
        torch.save(made[how], path)
    elif how == "text":
        path.write_text("hello")
    elif how == "code":
        path.write_bytes(pickle.dumps(Evil(tmp_path / "evil")))
    message = refused(["--watch", CENTROID, "--policy", tmp_path, "--out", tmp_path / "x.gif"])
    assert told in message and str(tmp_path if how != "an unknown file" else "ppo_otherpool") in message
    assert not (tmp_path / "evil").exists() and not (tmp_path / "x.gif").exists()


def test_a_checkpoint_without_the_agents_packages_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "noisy_envs.training.run")  # which the agent's file imports
    monkeypatch.setitem(sys.modules, "tqdm", None)
    told = refused(["--watch", CENTROID, "--policy", run, "--out", tmp_path / "x.gif"])
    assert "agents require more packages" in told and "[agents]" in told


# Environments of others

CARTPOLE = "CartPole-v1"


@pytest.fixture(scope="module")
def balancing(trained_run):
    """A run of AdaPool on CartPole."""
    words = ["--env-id", CARTPOLE, "--num-noise", "4"]
    return trained_run("adapool", *words)


def test_an_environment_of_others_is_watched_at_random(tmp_path):
    image = pytest.importorskip("PIL.Image")
    words = ["--watch", f"gymnasium.envs.classic_control:{CARTPOLE}", "--seed", "3", "--num-noise", "2"]
    for name in ("x.gif", "y.gif"):
        __main__.main([*words, "--out", str(tmp_path / name)])
    assert (tmp_path / "x.gif").read_bytes() == (tmp_path / "y.gif").read_bytes()
    with image.open(tmp_path / "x.gif") as shown:
        assert shown.n_frames > 8


def test_a_checkpoint_of_others_plays_as_in_the_film_of_its_own_file(balancing, tmp_path, capsys):
    from noisy_envs.rendering.agent_policy import Trained

    expected = filmed(load_agent("adapool"), balancing)
    policy = Trained(balancing, None, None)
    found = record(start(policy, policy.seed), policy.act).frames
    assert policy.env_id == CARTPOLE and policy.env_kwargs == {"num_noise": 4}
    assert np.array_equal(found, expected)
    __main__.main(["--policy", str(balancing.parent), "--num-noise", "9", "--out", str(tmp_path / "x.gif")])
    assert "x.gif: return " in capsys.readouterr().out
    told = refused(["--watch", "Acrobot-v1", "--policy", balancing, "--out", tmp_path / "y.gif"])
    assert told.endswith("trained on another game than Acrobot-v1, CartPole-v1")


def test_keys_work_in_environments_of_others_too(screen, balancing):
    from noisy_envs.rendering.agent_policy import Trained

    policy = Trained(balancing, None, None)
    seen, windows = look(Viewer(policy, start(policy)), {1: ["r"], 3: ["+"], 5: ["-"], 6: ["q"]})
    assert seen == [(0, 0, 4, False), (0, 1, 4, False), (1, 0, 4, False), (1, 1, 4, False), (1, 0, 8, False),
                    (1, 1, 8, False), (1, 0, 4, False)]  # fmt: skip
    assert len(windows) == 1


def test_the_window_of_a_small_picture_has_room_for_words(screen, monkeypatch):
    monkeypatch.setattr(Viewer, "picture", lambda _: np.zeros((40, 60, 3), np.uint8))
    shown = watching(CARTPOLE, "random")
    canvas = shown._paint()
    assert canvas.get_size() == shown.window.size == (600, 40 + PANEL)
    assert canvas.get_at((300, 20))[:3] == (0, 0, 0) and canvas.get_at((200, 20))[:3] == PAPER


# Words that cannot be


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["noisy_envs/SimpleTga-v0"],
            "watch='noisy_envs/SimpleTga-v0': Environment `SimpleTga` doesn't exist",
        ),
        (["SimpleTag"], "; did you mean 'noisy_envs/SimpleTag-v0'? expected an ID that `python -m noisy_envs` lists"),
        (["SimpleTag-1v3v28"], "; did you mean 'noisy_envs/SimpleTag-1v3v28-v0'?"),
        (["chess"], "watch='chess': Environment `chess` doesn't exist; expected an ID that"),
        (
            ["no_module:Chess-v0"],
            "watch='no_module:Chess-v0': No module named 'no_module'; its folder must be on PYTHONPATH",
        ),
        (["CartPole-v1", "--policy", "oracle"], "policy='oracle': expected one of random, or the folder or checkpoint"),
        (["CartPole-v1", "--num-noise", "-1"], "num_noise=-1: expected at least 0"),
        (["Odd-v0"], "env_id='Odd-v0': expected an environment with the render mode 'rgb_array'"),
        ([TAG, "--policy", "orcale"], "policy='orcale': did you mean 'oracle'? expected one of random, still, "),
        ([BOX, "--policy", "still"], "policy='still': expected one of random, oracle, or the folder or checkpoint"),
        ([BOX, "--num-noise", "42"], "num_noise=42: expected at most 41, which fit on size=7 with 3 boxes"),
        ([CENTROID, "--num-noise", "-1"], "num_noise=-1: expected at least 0"),
        ([CENTROID, "--seed", "-1"], "seed=-1: expected 0"),
        ([CENTROID, "--out", "x.avi"], "x.avi: expected a file name that ends in .gif or .mp4"),
        ([CENTROID, "--out", "x"], "x: expected a file name that ends in .gif or .mp4"),
        ([CENTROID, "--out", "taken.gif"], "taken.gif exists"),
    ],
)
def test_what_cannot_be_watched_is_refused_in_one_line(words, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(__main__, "record", lambda *_: pytest.fail("an episode was played first"))
    monkeypatch.setitem(gymnasium.registry, "Odd-v0", gymnasium.registry["CartPole-v1"])
    monkeypatch.setattr(gymnasium_envs.GymnasiumGame, "can_render", property(lambda game: game.env_id != "Odd-v0"))
    (tmp_path / "taken.gif").write_text("mine")
    assert told in refused(["--watch", *words, *([] if "--out" in words else ["--out", "new.gif"])])
    assert [path.name for path in tmp_path.iterdir()] == ["taken.gif"]
    assert (tmp_path / "taken.gif").read_text() == "mine"


@pytest.mark.parametrize("words", [["--num-noise", "4"], ["--out=x.gif"], ["--seed", "x"], ["--wtach", TAG], ["x"]])
def test_wrong_words_end_with_the_usage(words, capsys):
    assert refused(words, code=2)
    assert "usage: python -m noisy_envs" in capsys.readouterr().err


def test_other_options_are_nothing_without_an_id(capsys):
    assert refused(["--seed", "3"], code=2)
    assert "--seed requires --watch ID or --policy RUN" in capsys.readouterr().err
    assert refused(["--policy", "random"]) == (
        "error: policy='random': expected the folder or checkpoint of a run, but there is no such file"
    )


def test_a_missing_run_is_told_before_a_missing_display(monkeypatch):
    monkeypatch.setattr(__main__, "has_display", lambda: False)
    assert "policy='foo': expected one of" in refused(["--watch", TAG, "--policy", "foo"])
    assert "there is no display" in refused(["--watch", TAG])


@pytest.mark.parametrize("display", ["", ":12345"], ids=["none", "dead"])
def test_without_a_display_a_film_is_proposed(display):
    env = {name: value for name, value in os.environ.items() if name not in ("SDL_VIDEODRIVER", "WAYLAND_DISPLAY")}
    words = [sys.executable, "-m", "noisy_envs", "--watch", BOX]
    ran = subprocess.run(words, check=False, cwd=ROOT, env=env | {"DISPLAY": display}, timeout=60, **PIPES)
    message = b"error: there is no display for a window: write a video with --out FILE.gif or --out FILE.mp4\n"
    assert ran.returncode == 1 and ran.stderr.endswith(message)
    if not display:
        assert ran.stderr == message


# The window


@pytest.fixture
def screen(dummy_display):
    """Give SDL a display that nobody sees, and leave none behind."""
    import pygame

    pygame.quit()
    yield
    pygame.quit()


def look(viewer, script):
    """Watch, keys being pressed after some pictures: the (episode, step, noise, paused) shown, and the windows."""
    import pygame

    viewer.window.fps = 1000
    seen, windows, plain = [], set(), viewer.window.show

    def shown(picture):
        plain(picture)
        assert len(seen) < 500, "nobody ended it"
        for event in script.get(len(seen), []):
            if isinstance(event, str):
                pygame.event.post(pygame.event.Event(pygame.KEYDOWN, key=pygame.key.key_code(event)))
            else:
                pygame.event.post(pygame.event.Event(event, window=viewer.window.opened[0]))
        playback = viewer.playback
        seen.append((playback.episode, playback.clock, playback.noise, viewer.paused))
        windows.add(viewer.window.opened[0])

    viewer.window.show = shown
    viewer.run()
    assert viewer.window.opened is None
    return seen, windows


def watching(env_id, name="oracle"):
    """Return a viewer of a baseline policy."""
    policy = BaselinePolicy(name, env_id, None, 0)
    return Viewer(policy, start(policy))


@pytest.mark.parametrize("key", ["q", "escape"])
def test_the_world_goes_on_by_itself_until_a_key_ends_it(screen, key):
    assert look(watching(TAG), {3: [key]})[0] == [(0, step, 4, False) for step in range(4)]


def test_keys_pause_go_on_and_step(screen):
    seen, _ = look(watching(TAG), {1: ["space"], 4: ["s"], 5: ["s"], 7: ["space"], 10: ["q"]})
    assert [step for _, step, _, _ in seen] == [0, 1, 1, 1, 1, 2, 3, 3, 3, 4, 5]
    assert [paused for *_, paused in seen] == [False] * 2 + [True] * 6 + [False] * 3


def test_a_step_pauses(screen):
    seen, _ = look(watching(TAG), {2: ["s"], 5: ["q"]})
    assert seen[2:] == [(0, 2, 4, False)] + [(0, 3, 4, True)] * 3


def test_a_key_begins_the_next_episode(screen):
    seen, _ = look(watching(BOX), {2: ["r"], 4: ["r"], 5: ["q"]})
    assert [(number, step) for number, step, _, _ in seen] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]


@pytest.mark.parametrize("env_id", [CENTROID, TAG])
def test_keys_change_the_noise_of_the_same_episode_in_the_same_window(screen, env_id):
    script = {1: ["r"], 3: ["+"], 5: ["-"], 6: ["-", "-", "-"], 7: ["="], 9: ["q"]}
    seen, windows = look(watching(env_id), script)
    assert [noise for _, _, noise, _ in seen] == [4, 4, 4, 4, 8, 8, 4, 0, 4, 4] and NOISE_STEP == 4
    assert [(number, step) for number, step, _, _ in seen[4:8]] == [(1, 0), (1, 1), (1, 0), (1, 0)]
    assert len(windows) == 1


def test_noise_that_does_not_fit_is_not_added(screen):
    viewer = watching(BOX)
    seen, _ = look(viewer, {1: ["+"] * 9, 2: ["+"], 3: ["+", "+"], 4: ["q"]})
    assert [noise for _, _, noise, _ in seen] == [0, 0, 36, 40, 40]  # 41 cells are free
    assert "+/-: noise" in viewer.captions()[1]


@pytest.mark.parametrize("event", ["WINDOWCLOSE", "QUIT"])
def test_closing_the_window_ends_the_program(screen, event, monkeypatch):
    import pygame

    seen, _ = look(watching(TAG), {2: [getattr(pygame, event)]})
    assert len(seen) == 3


def test_closing_the_window_before_the_next_picture_is_due_ends_the_program_too(screen):
    import pygame

    asked = []

    class Closed(Viewer):
        def captions(self):
            asked.append(self.window.opened)
            assert len(asked) < 9, "nobody heard it"
            if asked[-1] is not None:
                pygame.event.post(pygame.event.Event(pygame.WINDOWCLOSE, window=asked[-1][0]))
            return super().captions()

    policy = BaselinePolicy("oracle", TAG, None, 0)
    viewer = Closed(policy, start(policy))
    viewer.run()
    assert len(asked) == 2 and viewer.window.opened is None


def test_ctrl_c_closes_the_window_and_ends_quietly(screen, monkeypatch):
    opened = []

    class Interrupted(Viewer):
        def captions(self):
            opened.append(self.window)
            if len(opened) == 3:
                raise KeyboardInterrupt
            return super().captions()

    monkeypatch.setattr(__main__, "Viewer", Interrupted)
    assert refused(["--watch", TAG], code=130)
    assert len(opened) == 3 and opened[0].opened is None


def test_the_end_of_an_episode_stays_for_a_second_and_then_the_next_begins(screen, short):
    seen, _ = look(watching(CENTROID), {20: ["q"]})
    assert [step for _, step, _, _ in seen[:17]] == [0, 1, 2, 3, 4, *[5] * RENDER_FPS, 0, 1]
    assert seen[15][0] == 1


def test_sizes_that_change_from_episode_to_episode_keep_the_window(screen, monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS, BOX, ("box_world", {"size": (5, 9), "num_distractors": (0, 1)}))
    viewer = watching(BOX)
    sizes = set()
    for _ in range(8):
        viewer._next_episode()
        sizes.add(int(viewer.playback.state.level[0]))
        assert (viewer.picture().shape[1], viewer.picture().shape[0] + PANEL) == viewer.window.size
    assert len(sizes) > 1
    _, windows = look(viewer, {1: ["r"], 2: ["r"], 3: ["r"], 4: ["q"]})
    assert len(windows) == 1


@each_id
def test_the_window_shows_the_picture_and_below_it_words_that_fit(screen, env_id):
    import pygame

    viewer = watching(env_id)
    viewer._policy.name, viewer.paused = "ClsToken", True
    told, keys = viewer.captions()
    assert told.startswith(env_id.removeprefix("noisy_envs/")) and told.endswith("paused") and "q: quit" in keys
    viewer.window.show(viewer._paint())
    shown = pygame.surfarray.array3d(viewer.window.opened[0].get_surface()).swapaxes(0, 1)
    viewer.window.close()
    np.testing.assert_array_equal(shown[:600], viewer.picture())
    panel = shown[600:]
    assert len(panel) == PANEL
    for line in np.split(panel, 2):
        written = np.nonzero((line.max(axis=2) < 100).any(axis=0))[0]
        assert MARGIN <= written.min() <= MARGIN + 3 and written.max() < 600 - MARGIN
        assert (line[[0, -1]].min(axis=2) > 200).all()  # no letter is cut


def test_the_window_keeps_the_pace_of_the_game(screen):
    viewer = watching(TAG)
    assert viewer.window.fps == RENDER_FPS == 10


def test_a_checkpoint_shows_its_weights_in_the_window(screen, run):
    from noisy_envs.rendering.agent_policy import Trained

    policy = Trained(run, CENTROID, None)
    viewer, plain = Viewer(policy, start(policy)), Viewer(Resting(), start(policy))
    assert (viewer.picture() != plain.picture()).any()
    seen, windows = look(viewer, {2: ["+"], 6: ["q"]})
    assert (
        seen[3][2] == 8 and len(windows) == 1 and viewer.captions()[0].startswith("SimpleCentroid-v0     ppo_adapool")
    )


class Resting:
    """Rests, and weighs nothing."""

    name, overlay = "rests", "attention"

    def act(self, playback):
        return np.zeros((1, 5), np.float32), None


def test_a_film_needs_no_window(short, tmp_path, monkeypatch):
    monkeypatch.setattr(Window, "show", lambda *_: pytest.fail("a window was opened"))
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setattr(video, "write_gif", lambda path, frames, fps: path.write_bytes(b"GIF"))
    __main__.main(["--watch", TAG, "--out", str(tmp_path / "x.gif")])
    assert (tmp_path / "x.gif").exists()

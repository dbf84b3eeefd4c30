"""Worlds that a device resets by itself are those that the host resets; here the CPU is taken for such a device."""

from functools import partial

import gymnasium
import numpy as np
import pytest
from cases import OPTION_SETS, TEAMS, crossed, each_case, each_case_and, each_game, slow
from gymnasium.vector import AutoresetMode

from noisy_envs.arrays import as_numpy
from noisy_envs.registration import ENVIRONMENTS

torch = pytest.importorskip("torch")

from torch.utils._pytree import tree_flatten, tree_map  # noqa: E402  torch may be missing

import noisy_envs.nn.cuda_graph  # noqa: E402
from noisy_envs.interfaces import vector_env  # noqa: E402

# by default a step that resets is compiled for these option sets, in these modes
COMPILED = {
    "simple_centroid-ranges": AutoresetMode.DISABLED,
    "simple_tag-functions": AutoresetMode.SAME_STEP,
    "box_world-chains": AutoresetMode.NEXT_STEP,
}


class Played:
    """Stands for `CudaGraph` on a CPU: keeps its inputs and outputs in place, and overwrites them at each call."""

    def __init__(self, function):
        self.function, self.inputs, self.outputs = function, None, None

    def __call__(self, *inputs):
        copy = partial(tree_map, lambda x: x.clone() if isinstance(x, torch.Tensor) else x)
        if self.inputs is None:
            self.inputs = copy(inputs)
            self.outputs = copy(self.function(*copy(inputs)))
        for own, given in zip(tree_flatten(self.inputs)[0], tree_flatten(inputs)[0], strict=True):
            own.copy_(given)
        worlds, shown = self.function(*self.inputs)
        for own, new in zip(tree_flatten(self.outputs[1])[0], tree_flatten(shown)[0], strict=True):
            if own is not None:
                own.copy_(new)
        return worlds, self.outputs[1]


@pytest.fixture
def device(monkeypatch):
    """Take the CPU for a GPU; compile nothing, but overwrite what a recorded step overwrites."""
    monkeypatch.setattr(vector_env, "on_gpu", lambda array: isinstance(array, torch.Tensor))
    monkeypatch.setattr(noisy_envs.nn.cuda_graph, "CudaGraph", Played)
    monkeypatch.setattr(vector_env, "compiled", lambda function, *inputs: function)


def make(env_id, mode, *, num_envs=5, learners="first", **options):
    if ENVIRONMENTS[env_id][0] == "box_world":
        options = {"num_levels": 30, **options}  # all of which are drawn at first
    envs = gymnasium.make_vec(
        env_id, num_envs, backend="torch", autoreset_mode=mode, learners=learners, max_episode_steps=9, **options
    )
    envs.action_space.seed(0)  # of random actions some end an episode that a test must not see end
    return envs


def on_device(monkeypatch, envs):
    """Check that the steps are the device's."""
    assert envs._on_device
    monkeypatch.setattr(envs, "_step_by_host", None)


def same(one, other):
    np.testing.assert_array_equal(as_numpy(one), as_numpy(other))


def same_info(info, expected):
    """Compare infos; the device tells of last observations whenever a world may have ended, with masks."""
    for name in expected:
        if name == "final_info":
            same_info(info[name], expected[name])
        elif name == "final_obs":
            ended = expected["_final_obs"]
            same(info[name][ended], expected[name][ended])
        else:
            same(info[name], expected[name])
    more = set(info) - set(expected)
    assert more <= {"final_obs", "_final_obs", "final_info", "_final_info"}
    assert not any(info[name].any() for name in more if name.startswith("_"))


@pytest.mark.parametrize("compile", [pytest.param(True, id="recorded"), slow(False, id="eager")])
@each_case_and("mode", AutoresetMode, TEAMS)
def test_the_device_resets_as_the_host_does(env_id, options, team, mode, compile, request, monkeypatch):
    host = make(env_id, mode, learners=team, **options)
    host.reset(seed=3)
    request.getfixturevalue("device")
    envs = make(env_id, mode, learners=team, compile=compile, **options)
    kept = []
    same(envs.reset(seed=3)[0], make_first(host))
    on_device(monkeypatch, envs)
    host.action_space.seed(0)
    for i in range(31):
        actions = torch.from_numpy(host.action_space.sample())
        found, expected = envs.step(actions.clone()), host.step(actions)
        for one, other in zip(found[:4], expected[:4], strict=True):
            same(one, other)
        same_info(found[4], expected[4])
        kept.append((found, tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, found)))
        for one, other in zip(envs.episodes, host.episodes, strict=True):
            same(one, other)
        ended = as_numpy(found[2] | found[3])
        if i == 12 or (mode is AutoresetMode.DISABLED and ended.any()):
            mask = ended if ended.any() else np.arange(5) < 2
            for (tokens, info), (wanted, told) in [[one.reset(options={"reset_mask": mask}) for one in (envs, host)]]:
                same(tokens, wanted)
                same_info(info, told)
    for found, copies in kept:  # nothing that was handed out has been overwritten
        for one, other in zip(tree_flatten(found)[0], tree_flatten(copies)[0], strict=True):
            if one is not None:
                same(one, other)


def make_first(envs):
    return envs._observe(envs.state)


@each_case
def test_no_copies_are_the_same_numbers(env_id, options, device):
    copied, shared = (make(env_id, "NextStep", compile=True, copy=copy, **options) for copy in (True, False))
    for envs in (copied, shared):
        envs.reset(seed=1)
    for _ in range(25):
        actions = torch.from_numpy(copied.action_space.sample())
        found, expected = shared.step(actions), copied.step(actions)
        for one, other in zip(found[:4], expected[:4], strict=True):
            same(one, other)
        same_info(found[4], expected[4])
    again = shared.step(actions)
    assert again[0].data_ptr() == found[0].data_ptr() or shared.game.terminates  # the same place in memory


@pytest.mark.parametrize("copy", [True, False, np.False_])
@each_game
def test_copies_on_numpy(env_id, copy):
    envs = gymnasium.make_vec(env_id, 3, copy=copy, compile=np.False_)
    envs.reset(seed=0)
    first, second = (envs.step(envs.action_space.sample())[4] for _ in range(2))
    moves = envs.game.signal_moves or envs.game.terminates
    assert np.shares_memory(first["snr"], second["snr"]) == (not copy and not moves)
    assert np.shares_memory(first["_snr"], second["_snr"]) == (not copy)


@pytest.mark.parametrize(
    ("env_id", "options", "mode"),
    crossed(OPTION_SETS, AutoresetMode, lambda case, mode: COMPILED.get(case.id) is mode),
)
def test_a_step_that_resets_compiles_whole(env_id, options, mode, monkeypatch):
    monkeypatch.setattr(vector_env, "on_gpu", lambda array: isinstance(array, torch.Tensor))
    monkeypatch.setattr(noisy_envs.nn.cuda_graph, "CudaGraph", Played)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    plain, compiled = (make(env_id, mode, num_envs=2, compile=flag, **options) for flag in (False, True))
    for envs in (plain, compiled):
        envs.reset(seed=0)
    for _ in range(9 if mode is AutoresetMode.DISABLED else 11):
        actions = torch.from_numpy(plain.action_space.sample())
        for one, other in zip(plain.step(actions)[:4], compiled.step(actions)[:4], strict=True):
            torch.testing.assert_close(one, other)


def test_ended_worlds_are_refused_on_a_device_too(device):
    envs = make("noisy_envs/SimpleTag-1v3v4-v0", "Disabled")
    envs.reset(seed=0)
    for _ in range(9):
        envs.step(torch.zeros(5, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"environments \[0, 1, 2, 3, 4\] have ended"):
        envs.step(torch.zeros(5, dtype=torch.int64))


def test_too_many_levels_are_dealt_by_the_host(device):
    envs = make("noisy_envs/BoxWorld-v0", "NextStep", num_levels=2**20)
    envs.reset(seed=0)
    assert not envs._on_device
    for _ in range(11):
        envs.step(torch.zeros(5, dtype=torch.int64))


def test_copy_must_be_a_flag():
    with pytest.raises((TypeError, ValueError), match="copy"):
        gymnasium.make_vec("noisy_envs/SimpleTag-1v3v4-v0", 2, copy="no")


@pytest.mark.parametrize("number", [-3, 5, 2**40])
def test_a_number_of_no_action_is_the_nearest_on_a_device_too(number, device):
    one, other = (make("noisy_envs/SimpleTag-1v3v4-v0", "NextStep", compile=True) for _ in range(2))
    for envs in (one, other):
        envs.reset(seed=0)
    found, nearest = (envs.step(torch.full((5,), value)) for envs, value in ((one, number), (other, 4 * (number > 0))))
    same(found[0], nearest[0])

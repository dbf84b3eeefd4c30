"""Fixtures. The cases that tests run over are in `cases`, what they share to play and compare in `helpers`."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cases import CASES
from helpers import load_agent, train_tiny

from noisy_envs.registration import GAMES

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read as torch is imported: tests run side by side, one for each core


@pytest.fixture(params=["numpy", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend of the vector environments."""
    if request.param == "torch":
        pytest.importorskip("torch")
    return request.param


@pytest.fixture
def dummy_display(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let human mode open its window where there is no display."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


@pytest.fixture
def dense_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sparse games pay also for where the agent is, never 0, so that a lost or exchanged reward shows."""
    for game, case in CASES.items():
        if case.varied_reward:

            def reward(
                self: Any,
                state: Any,
                agents: slice = slice(None),
                sparse: Any = GAMES[game].reward,
                varied: Any = case.varied_reward,
            ) -> Any:
                return sparse(self, state, agents) - 0.5 - varied(self, state, agents)

            monkeypatch.setattr(GAMES[game], "reward", reward)


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that trains an agent for two updates, once in a test session for the same arguments.

    Its arguments are a head and options of the agent; it returns the run's folder, which tests must not change. One
    that does uses a copy.
    """

    @cache
    def train(head: str, *options: str) -> Path:
        for package in ("torch", "tyro"):
            pytest.importorskip(package)
        _, folder = train_tiny(load_agent(head), tmp_path_factory.mktemp("trained"), *options)
        return folder

    return train

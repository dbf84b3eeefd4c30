"""The fused kernels on the CPU: compiled by g++ for the emulated GPU of `cuda_emulator.h`."""

import ctypes
import subprocess
from pathlib import Path

import torch

from noisy_envs.nn import fused, fused_source
from noisy_envs.nn.cuda_program import Limits

HERE = Path(__file__).parent
LAUNCHERS = "LAUNCHER(gradient)\nLAUNCHER(add_blocks)\nLAUNCHER(forward)\n"
MULTIPROCESSORS = 2  # so few that several warps of a block have work
GUARD = 64  # floats around each tensor that the kernels write, which must stay as they were


class EmulatedProgram:
    """Stands in for `cuda_program.Program`."""

    def __init__(self, source, folder):
        (folder / "kernels.cpp").write_text(source + LAUNCHERS, encoding="utf-8")
        command = "g++ -std=c++17 -O1 -shared -fPIC -ffp-contract=off -w -o kernels.so kernels.cpp"
        done = subprocess.run(command.split(), cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:4000]
        self._library = ctypes.CDLL(str(folder / "kernels.so"))

    def kernel(self, name, shared_bytes):
        launch = getattr(self._library, f"launch_{name}")

        def call(grid, threads, *arguments):
            values = [ctypes.c_int32(x) if isinstance(x, int) else ctypes.c_void_p(x.data_ptr()) for x in arguments]
            addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
            error = launch(addresses, *grid, threads, shared_bytes)
            assert error == 0, {1: "threads met at different operations", 2: "written around shared memory"}[error]

        return call


def emulate(monkeypatch, folder):
    """Let `noisy_envs.nn.fused` run on an emulated GPU, as device "cpu"; return a check of what kernels wrote."""
    guarded = []

    def source(network, lanes, offsets, only):  # both kernels, which tests use together
        text = fused_source.source(network, lanes, offsets, only, f'#include "{HERE / "cuda_emulator.h"}"')
        return text.replace(f"#define ONLY_{only}", "")

    def load(text, device):
        place = folder / str(len(list(folder.iterdir())))
        place.mkdir()
        return EmulatedProgram(text, place)

    def empty(kernels, *shape):
        size = torch.Size(shape).numel()
        outer = torch.full((size + 2 * GUARD,), 7.0)
        outer[GUARD:-GUARD] = torch.nan
        guarded.append(outer)
        return outer[GUARD:-GUARD].view(shape)

    def check_guards():
        assert all((x[:GUARD] == 7).all() and (x[-GUARD:] == 7).all() for x in guarded), "written out of bounds"

    monkeypatch.setattr(fused, "source", source)
    monkeypatch.setattr(fused.cuda_program, "load", load)
    monkeypatch.setattr(fused.cuda_program, "start", load)
    monkeypatch.setattr(fused, "device_limits", lambda device: Limits(MULTIPROCESSORS, 227 * 1024))
    monkeypatch.setattr(fused._Kernels, "empty", empty)
    return check_guards

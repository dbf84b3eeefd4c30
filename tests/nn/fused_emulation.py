"""The fused kernels on the CPU: compiled by g++ for the emulated GPU of `cuda_emulator.h`, and called by NumPy arrays."""

import ctypes
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from noisy_envs.nn.fused_source import COEFFICIENTS, PARTS, Lanes, Network, memory_sizes, num_weights, source

HERE = Path(__file__).parent
BLOCKS, GUARD = 3, 64  # of each run; floats around each result, which must stay as they were
LAUNCHERS = """
namespace {
const void* given[16];
int count_, blocks_;
template <typename T> T* arg(int i) { return static_cast<T*>(const_cast<void*>(given[i])); }
using F = float;
using Long = const long long;
}  // namespace
extern "C" int run_gradient(const void** p, int runs, int count, int blocks) {
    memcpy(given, p, sizeof given), count_ = count, blocks_ = blocks;
    const int error = emulator::launch(runs * blocks, 1, WARPS * 32, SHARED_BYTES, [] {
        gradient(arg<F>(0), arg<F>(1), arg<void>(2), arg<F>(3), arg<F>(4), arg<F>(5), arg<F>(6), arg<Long>(7), arg<F>(8),
                 arg<F>(9), arg<F>(10), count_, blocks_);
    });
    if (error) return error;
    return emulator::launch(SUMS / 32, runs, 256, 4 * 256, [] { add_blocks(arg<F>(10), arg<F>(11), arg<F>(12), blocks_); });
}
extern "C" int run_forward(const void** p, int runs, int count, int blocks) {
    memcpy(given, p, sizeof given), count_ = count, blocks_ = blocks;
    return emulator::launch(runs * blocks, 1, WARPS * 32, SHARED_BYTES, [] {
        forward(arg<F>(0), arg<F>(1), arg<F>(2), arg<F>(3), count_, blocks_);
    });
}
"""


@dataclass
class Emulated:
    """Kernels of one network; tensors as in `noisy_envs.nn.fused`."""

    network: Network
    lanes: Lanes
    library: ctypes.CDLL

    def _call(self, name: str, tensors: list[torch.Tensor], runs: int, count: int) -> None:
        addresses = (ctypes.c_void_p * 16)(*(x.data_ptr() for x in tensors))
        error = getattr(self.library, name)(addresses, runs, count, BLOCKS)
        assert error == 0, {1: "threads met at different operations", 2: "out of shared memory"}[error]

    def gradient(self, weights, samples, keys, coefficients):
        """Return the gradients (S, P) and the parts of the loss (S, 5)."""
        runs, count = samples[0].shape[:2]
        sizes = memory_sizes(self.network, self.lanes)
        blocks = runs * BLOCKS
        out = [Guarded(n) for n in (blocks * self.lanes.warps * sizes.scratch_floats, blocks * sizes.sums)]
        out += [Guarded(runs, num_weights(self.network)), Guarded(runs, len(PARTS))]
        given = [weights, *samples, keys, coefficients]
        assert coefficients.shape[1] == len(COEFFICIENTS) and all(x.is_contiguous() for x in given)
        self._call("run_gradient", [*given, *(x.inner for x in out)], runs, count)
        return [x.checked() for x in out][2:]

    def forward(self, weights, tokens):
        """Return the parameters (S, M, P) and the values (S, M)."""
        runs, count = tokens.shape[:2]
        out = [Guarded(runs, count, self.network.num_parameters), Guarded(runs, count)]
        self._call("run_forward", [weights, tokens, *(x.inner for x in out)], runs, count)
        return [x.checked() for x in out]


class Guarded:
    """A tensor of NaN, with numbers on both sides that nothing may change."""

    def __init__(self, *shape: int) -> None:
        size = int(np.prod(shape))
        self.outer = torch.full((size + 2 * GUARD,), 7.0)
        self.outer[GUARD:-GUARD] = torch.nan
        self.inner = self.outer[GUARD:-GUARD].view(shape)

    def checked(self):
        assert (self.outer[:GUARD] == 7).all() and (self.outer[-GUARD:] == 7).all(), "written out of bounds"
        return self.inner


def emulate(network: Network, lanes: Lanes, offsets: dict[str, int], folder: Path) -> Emulated:
    """Compile the kernels in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = source(network, lanes, offsets, f'#include "{HERE / "cuda_emulator.h"}"') + LAUNCHERS
    (folder / "kernels.cpp").write_text(text, encoding="utf-8")
    command = "g++ -std=c++17 -O1 -shared -fPIC -ffp-contract=off -w -o kernels.so kernels.cpp"
    done = subprocess.run(command.split(), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return Emulated(network, lanes, ctypes.CDLL(str(folder / "kernels.so")))

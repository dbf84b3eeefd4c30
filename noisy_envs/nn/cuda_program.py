"""CUDA source compiled when a program runs, by NVRTC, kept on disk, and launched on torch's current stream.

Needs the package cuda-bindings (the extra `[cuda]`). NVRTC itself comes with torch for GPUs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import sys
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OPTIONS = ("--std=c++17",)
THREADS = ThreadPoolExecutor(2)  # that compile; the end of the program waits for them
Argument = Tensor | int  # of a kernel: a tensor's address, or an int32


def missing() -> str | None:
    """Return what keeps source from being compiled, in a line, or None."""
    try:
        _nvrtc_version()
    except Exception as error:  # the package, the library or one of its symbols is missing: each has its own error
        return f"NVRTC: not found ({str(error).splitlines()[0]}); pip install noisy-envs[cuda]"
    return None


def _checked(result: tuple[Any, ...]) -> Any:
    """Return what a function of cuda-bindings returned after its status.

    Raises:
        RuntimeError: the status is an error.
    """
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status!r}")
    return values[0] if len(values) == 1 else values


def _nvrtc_version() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    major, minor = _checked(nvrtc.nvrtcVersion())
    return major, minor


def cache_folder() -> Path:
    """Return the user's folder of compiled kernels; NOISY_ENVS_CACHE names another one."""
    given = os.environ.get("NOISY_ENVS_CACHE")
    if given:
        return Path(given)
    system = os.environ.get("LOCALAPPDATA") if sys.platform == "win32" else os.environ.get("XDG_CACHE_HOME")
    return (Path(system) if system else Path.home() / ".cache") / "noisy-envs"


def compile_source(source: str, architecture: str) -> bytes:
    """Compile source to machine code of an architecture such as "sm_90", or return what an earlier call compiled.

    Raises:
        RuntimeError: with NVRTC's messages.
    """
    key = hashlib.sha256(repr((source, OPTIONS, architecture, _nvrtc_version())).encode()).hexdigest()[:32]
    path = cache_folder() / f"{key}.cubin"
    code = _read(path)
    if code is None:
        code = _compile(source, architecture)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.part")
            part.write_bytes(hashlib.sha256(code).digest() + code)
            part.replace(path)
        except OSError as error:  # the code can be used, and the next run compiles again
            warnings.warn(f"compiled kernels are not kept: {error}", RuntimeWarning, stacklevel=2)
    return code


def _read(path: Path) -> bytes | None:
    """Return the code in a file of the cache, None if there is none or it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    code = content[32:]
    return code if hashlib.sha256(code).digest() == content[:32] else None


def _compile(source: str, architecture: str) -> bytes:
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"noisy_envs.cu", 0, [], []))
    options = [option.encode() for option in (f"--gpu-architecture={architecture}", *OPTIONS)]
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    if int(status) != 0:
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC: {status!r}\n{log.decode(errors='replace')}")
    code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(code)


@dataclass(frozen=True)
class Limits:
    """What a GPU has: multiprocessors, and bytes of shared memory of a block, at most."""

    multiprocessors: int
    shared_memory: int


def device_limits(device: torch.device) -> Limits:
    """Return what a GPU has."""
    from cuda.bindings import driver

    properties = torch.cuda.get_device_properties(device)  # starts CUDA
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    index = torch.cuda.current_device() if device.index is None else device.index
    return Limits(properties.multi_processor_count, _checked(driver.cuDeviceGetAttribute(attribute, index)))


def start(source: str, device: torch.device) -> Future[bytes]:
    """Begin to compile source for a GPU in a thread, without Python's lock; `load` waits for it."""
    major, minor = torch.cuda.get_device_capability(device)
    return _start(source, f"sm_{major}{minor}")


@functools.cache
def _start(source: str, architecture: str) -> Future[bytes]:
    return THREADS.submit(compile_source, source, architecture)


def load(source: str, device: torch.device) -> Program:
    """Compile source for a GPU, or find it in the cache, and load it."""
    return Program(start(source, device).result(), device)


class Program:
    """Kernels that are loaded on a GPU."""

    def __init__(self, code: bytes, device: torch.device) -> None:
        """Load machine code."""
        from cuda.bindings import driver

        self.device = device
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes torch's context the current one
            self._module = _checked(driver.cuModuleLoadData(code))

    def kernel(self, name: str, shared_bytes: int) -> Kernel:
        """Return a kernel by its name, whose blocks take so many bytes of shared memory."""
        from cuda.bindings import driver

        with torch.cuda.device(self.device):
            function = _checked(driver.cuModuleGetFunction(self._module, name.encode()))
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        return Kernel(self, function, shared_bytes)


class Kernel:
    """A kernel of a program, which it keeps loaded."""

    def __init__(self, program: Program, function: Any, shared_bytes: int) -> None:
        """See `Program.kernel`."""
        self._program, self._function, self._shared_bytes = program, function, shared_bytes

    def __call__(self, grid: tuple[int, int], threads: int, *arguments: Argument) -> None:
        """Launch the kernel on torch's current stream, with `threads` in each block; CUDA graphs can record it."""
        from cuda.bindings import driver

        values = [
            ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else ctypes.c_int32(x) for x in arguments
        ]  # copied by the launch
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
        with torch.cuda.device(self._program.device):
            stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
            _checked(
                driver.cuLaunchKernel(
                    self._function, *grid, 1, threads, 1, 1, self._shared_bytes, stream, ctypes.addressof(addresses), 0
                )
            )

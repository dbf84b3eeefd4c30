"""CUDA graphs: the work of a function on a GPU, recorded once and replayed without Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


class CudaGraph:
    """Records the first call of a function of tensors on a GPU, and replays it in all later calls.

    Arguments are tensors of the same shapes in each call, None, or tuples of these. The next call overwrites the
    results of the last one. The function must not wait for the GPU. It may draw random numbers from the global random
    state only; the first call draws as many as any other. It may change tensors in place only if three additional
    calls, the warm-up, do no harm.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Wrap a function."""
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Any = None
        self._outputs: Any = None

    def __call__(self, *inputs: Any) -> Any:
        """Call the function: return its results, in tensors that the next call overwrites."""
        if self._graph is None:
            self._record(inputs)
        assert self._graph is not None
        for recorded, argument in zip(self._inputs, inputs, strict=True):
            if recorded is not argument:  # a result that is a recorded input itself is already in place
                _copy(recorded, argument)
        self._graph.replay()
        return self._outputs

    def _record(self, inputs: Any) -> None:
        """Warm up on copies of the inputs, on a separate stream as CUDA requires, then record."""
        copies = self._inputs = tree_map(lambda x: None if x is None else x.clone(), inputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self._function(*copies)
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._outputs = self._function(*copies)


def _copy(recorded: Any, argument: Any) -> None:
    for to, tensor in zip(tree_leaves(recorded), tree_leaves(argument), strict=True):
        if to is not None and to.data_ptr() != tensor.data_ptr():
            to.copy_(tensor)

"""CUDA graphs: what a function does on a GPU, recorded once and played again without Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


class Recorded:
    """A function of tensors whose first call on a GPU is recorded, and played again by all others.

    Arguments are tensors, of the same shapes in each call, None, or tuples of such. What a call returns is overwritten
    by the next. The function must not wait for the GPU, may draw from the global random state alone, of which the first
    call takes no more than others, and may change tensors in place only if three calls too many do no harm.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Wrap a function."""
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Any = None
        self._outputs: Any = None

    def __call__(self, *inputs: Any) -> Any:
        """Return what the function returns."""
        if self._graph is None:
            self._record(inputs)
        assert self._graph is not None
        for own, given in zip(self._inputs, inputs, strict=True):
            if own is not given:  # where a call returns its argument, the next takes it as it is
                _put(own, given)
        self._graph.replay()
        return self._outputs

    def _record(self, inputs: Any) -> None:
        """Warm up on copies of the inputs, on a stream of its own as CUDA asks, then record."""
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


def _put(own: Any, given: Any) -> None:
    for to, tensor in zip(tree_leaves(own), tree_leaves(given), strict=True):
        if to is not None and to.data_ptr() != tensor.data_ptr():
            to.copy_(tensor)

"""How a program ends: signals that stop it, pipes that close, memory that runs out."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def format_error(error: Exception) -> str:
    """Tell an error that ends a program, and what to do where the system caused it: a full disk, say."""
    from_system = isinstance(error, OSError) and error.errno is not None  # not a word of ours
    return f"{error}; once that is mended, go on with the same command" if from_system else str(error)


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """End a program in one line where it asks for more memory than there is; torch raises a RuntimeError."""
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError) as error:
        line = (str(error).splitlines() or ["no more can be had"])[0]
        beyond = re.search("allocat|out of memory|size calculation|multiplication overflow", line)
        if isinstance(error, RuntimeError) and not beyond:
            raise
        reason = re.sub(r"^\[enforce fail[^]]*\] *(\. *)?", "", line)
        hint = "choose fewer or smaller environments, steps, episodes, sets or networks"
        raise SystemExit(f"error: not enough memory: {reason}; {hint}") from None


EXIT_INTERRUPTED = 130  # exit status of what was told to stop: the shell's for Ctrl-C


@contextlib.contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """End silently when what reads the output, `head` say, has read enough.

    A letter that the output's encoding lacks becomes "?": on Windows a pipe or file knows neither − nor ≤. What goes
    to an output that was closed, by `>&-` say, is lost.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(nowhere, "w", encoding="utf-8", closefd=False))  # open to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
        raise SystemExit(141) from None  # as the shell has it for SIGPIPE


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a process to stop, but those that it was started to ignore, as under nohup.

    They are Ctrl-C, SIGTERM, SIGHUP of a terminal that closes, and SIGUSR1, which Slurm can send before a time limit.
    On Windows one process can send another nothing but Ctrl-Break, which counts as well.
    """
    asked = [signal.SIGINT, signal.SIGTERM]
    here = [getattr(signal, name, None) for name in ("SIGHUP", "SIGUSR1", "SIGBREAK")]  # the last on Windows alone
    asked += [number for number in here if number and signal.getsignal(number) is not signal.SIG_IGN]
    return [number for number in asked if signal.getsignal(number) is not None]  # one of C could not be set again


@contextlib.contextmanager
def on_stop_signal(handler: Callable[..., Any], once: bool = False) -> Iterator[None]:
    """Call `handler`(number, frame) at the signals that ask to stop; `once` restores what was before at the first.

    Python allows handlers in the main thread alone: in any other, what started the thread decides what signals do.
    """
    before: dict[signal.Signals, Any] = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def handle(number: int, frame: Any) -> None:
        if once:
            restore()
        handler(number, frame)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                before[number] = signal.signal(number, handle)
        yield
    finally:
        restore()


def write_stderr(text: str) -> None:
    """Write a line to standard error from a signal's handler, which may not wait for Python's own buffers."""
    with contextlib.suppress(OSError):  # the terminal is gone
        os.write(2, f"\n{text}\n".encode())


def timestamp() -> str:
    """Return the time for a folder's name."""
    return time.strftime("%Y%m%d-%H%M%S")


def check_memory(needs: Mapping[str, int], device: str) -> None:
    """Raise ValueError if a device cannot hold one of `needs`: float32 numbers, by the settings that ask for them.

    Linux grants more memory than there is, and kills the process that uses it.
    """
    import torch

    if torch.device(device).type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    elif hasattr(os, "sysconf"):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:  # Windows grants what there is
        return
    for settings, numbers in needs.items():
        if 4 * numbers > total:
            asked, there = (f"{number / 2**30:,.1f} GiB" for number in (4 * numbers, total))
            raise ValueError(f"not enough memory: {settings} need at least {asked}, {device} has {there}")

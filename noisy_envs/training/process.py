"""How programs start and end: signals that stop them, closed pipes, memory that runs out, commands that they run."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

EXIT_INTERRUPTED = 130  # exit status after a request to stop: the shell's for Ctrl-C
if sys.platform == "win32":
    INTERRUPT = signal.CTRL_BREAK_EVENT  # the only signal that a process can send another one on Windows
else:
    INTERRUPT = signal.SIGINT


def format_error(error: Exception) -> str:
    """Describe an error that ends a program, with a hint if the system caused it, as a full disk does."""
    from_system = isinstance(error, OSError) and error.errno is not None  # this package's own errors have no number
    return f"{error}; once that is fixed, resume with the same command" if from_system else str(error)


@contextlib.contextmanager
def sweep_errors() -> Iterator[None]:
    """End a program that runs a sweep with a one-line message: for an expected error, or for Ctrl-C with status 130."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {format_error(error)}") from None
    except KeyboardInterrupt:
        print("stopped; resume with the same command", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """End a program with a one-line message if it runs out of memory, for which torch raises RuntimeError."""
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError) as error:
        line = (str(error).splitlines() or ["no more is available"])[0]
        of_memory = re.search("allocat|out of memory|size calculation|multiplication overflow", line)
        if isinstance(error, RuntimeError) and not of_memory:
            raise
        reason = re.sub(r"^\[enforce fail[^]]*\] *(\. *)?", "", line)
        hint = "choose fewer or smaller environments, steps, episodes, sets or networks"
        raise SystemExit(f"error: not enough memory: {reason}; {hint}") from None


@contextlib.contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """End silently if the reader of the output has closed it, as `head` does.

    Characters that the output's encoding lacks become "?": on Windows pipes and files lack − and ≤. Output to a stream
    that was closed before the start, by `>&-` for example, is lost.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(null, "w", encoding="utf-8", closefd=False))  # stays open to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        raise SystemExit(141) from None  # the shell's exit status for SIGPIPE


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a process to stop, without those that it ignores since its start, as under nohup.

    They are Ctrl-C, SIGTERM, SIGHUP of a closed terminal, and SIGUSR1, which Slurm can send before a time limit. On
    Windows a process can send only Ctrl-Break to another one, so it counts too.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    optional = [getattr(signal, name, None) for name in ("SIGHUP", "SIGUSR1", "SIGBREAK")]  # the last on Windows only
    numbers += [number for number in optional if number and signal.getsignal(number) is not signal.SIG_IGN]
    return [number for number in numbers if signal.getsignal(number) is not None]  # None: set by C, cannot be restored


@contextlib.contextmanager
def on_stop_signal(handler: Callable[..., Any], once: bool = False) -> Iterator[None]:
    """Call `handler`(number, frame) on signals that ask to stop; `once` restores the former handlers at the first.

    Python sets handlers only in the main thread. In another thread this does nothing.
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


def group_signals() -> list[signal.Signals]:
    """Return the stop signals that reach all processes of a terminal or job at once: all but SIGTERM."""
    return [number for number in stop_signals() if number != signal.SIGTERM]


@contextlib.contextmanager
def hold_group_signals() -> Iterator[None]:
    """Delay the signals of `group_signals` to the end of the context; child processes inherit the delay."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, group_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopRequest:
    """Counts the stop signals while `listen` is active, instead of raising KeyboardInterrupt at any line of code."""

    def __init__(self) -> None:
        """Start without requests."""
        self.count = 0

    def add(self, *_: Any) -> None:
        """Add a request; signals call this with their number and frame."""
        self.count += 1

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Count the stop signals that arrive."""
        with on_stop_signal(self.add):
            yield


def run_command(command: list[str], log: Path, lock: IO[bytes], stop: StopRequest) -> int:
    """Run a command that appends its output to a log; return its exit status, −s if signal s killed it.

    Each stop request is passed on as one Ctrl-C: at the first one agents save and exit, at the second they just exit.
    """
    with log.open("ab") as file:
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        process = start_process(command, file, lock)
    passed_on = 0
    while True:
        try:
            while passed_on < stop.count:
                process.send_signal(INTERRUPT)
                passed_on += 1
            return process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue
        except KeyboardInterrupt:  # Ray cancels tasks by it
            stop.add()


def start_process(command: list[str], file: IO[bytes], lock: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a command in its own session, which the terminal's Ctrl-C does not reach: it would count twice.

    The output is written to the file, in UTF-8. The process inherits the open lock, except on Windows.
    """
    separate: dict[str, Any]
    if sys.platform == "win32":
        separate = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    else:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks it, and children inherit that
        separate = {"pass_fds": (lock.fileno(),), "start_new_session": True}
    env = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, **separate)


def last_message(output: str) -> str:
    """Return the line of a program's output that explains its failure: the last, or the first in a box at the end."""
    lines = [line for line in output.splitlines() if line.strip()] or ["no output"]
    if lines[-1].startswith("╰"):
        top = max(number for number, line in enumerate(lines) if line.startswith("╭"))
        return lines[top + 1].strip("│ ")
    return lines[-1]


def write_stderr(text: str) -> None:
    """Write a line to standard error from a signal handler, which must not wait for Python's buffers."""
    with contextlib.suppress(OSError):  # the terminal is gone
        os.write(2, f"\n{text}\n".encode())


def timestamp() -> str:
    """Return the time for a folder's name."""
    return time.strftime("%Y%m%d-%H%M%S")


def device_memory(device: str) -> float:
    """Return the bytes of a device's memory, infinity where the system does not tell."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return math.inf  # Windows grants what there is


def check_memory(needs: Mapping[str, int], device: str) -> None:
    """Raise ValueError if a device cannot hold one of `needs`: counts of float32 values by setting.

    Linux grants more memory than it has, and kills the process that uses it.
    """
    total = device_memory(device)
    for settings, numbers in needs.items():
        if 4 * numbers > total:
            needed, available = (f"{number / 2**30:,.1f} GiB" for number in (4 * numbers, total))
            raise ValueError(f"not enough memory: {settings} need at least {needed}, {device} has {available}")

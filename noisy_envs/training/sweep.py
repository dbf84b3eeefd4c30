"""Runs the jobs of a sweep: skips finished ones, resumes stopped ones, runs several at a time, reports failures.

A job is one training run, in a folder of its own. `run_jobs` runs those without a summary in one of four ways:
`run_in_turn` in this process, `run_in_processes` in a pool of processes, `run_in_threads` and `run_on_ray` as commands.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import operator
import os
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeVar

from noisy_envs.training.files import lock_folder
from noisy_envs.training.process import (
    EXIT_INTERRUPTED,
    StopRequest,
    group_signals,
    hold_group_signals,
    last_message,
    run_command,
)

MAX_RETRIES = 3  # of a command that a signal killed, as Linux does when memory runs out
STOPPED = "stopped"  # the problem of a job that a user stopped
STOPPING = "Stopping: the runs save a checkpoint. Press Ctrl-C again to stop without saving."
JobT = TypeVar("JobT", bound=Hashable)


class CommandJob(Hashable, Protocol):
    """A job that runs as the process of a command."""

    @property
    def folder(self) -> Path:
        """Folder of the job; `log.txt` in it holds the output of its command."""

    def command(self) -> list[str]:
        """Return the command that starts the run, or resumes it."""

    def summary(self) -> dict[str, Any] | None:
        """Return the summary of the finished run, or None."""


class JobResult(NamedTuple):
    """How a job ended: with the summary of its run, or with a problem."""

    job: Any
    summary: dict[str, Any] | None = None
    problem: str = ""
    seconds: float = math.nan


# How jobs are run: yields a result as each ends, in any order
Execute = Callable[[list[JobT]], Iterable[JobResult]]


def run_jobs(
    summaries: Mapping[JobT, dict[str, Any] | None], execute: Execute[JobT], describe: Callable[[dict[str, Any]], str]
) -> list[JobResult]:
    """Run the jobs that have no summary yet, print a line as each ends, and return the results.

    Args:
        summaries: of all jobs, None for those that have not finished.
        execute: runs the unfinished jobs.
        describe: names the result in a summary, for the printed line.

    Raises:
        KeyboardInterrupt: after a stop request, when all jobs have ended.
    """
    unfinished = [job for job, summary in summaries.items() if summary is None]
    finished = len(summaries) - len(unfinished)
    print(f"{len(summaries)} runs, {finished} already finished", flush=True)
    results = []
    for result in execute(unfinished) if unfinished else ():
        finished += not result.problem
        message = f"FAILED, {result.problem}" if result.summary is None else describe(result.summary)
        if result.problem != STOPPED:
            duration = "" if math.isnan(result.seconds) else f", {result.seconds:.0f} s"
            print(f"[{finished}/{len(summaries)}] {result.job}: {message}{duration}", flush=True)
        results.append(result)
    return results


def find_run(folder: Path) -> Path | None:
    """Return the folder of the finished run in `folder`, else of the last one that can be resumed, else None.

    Raises:
        ValueError: two runs are finished.
    """
    finished = sorted(folder.glob("*/summary.json"))
    if len(finished) > 1:
        names = ", ".join(path.parent.name for path in finished)
        raise ValueError(f"{folder}: expected one finished run, found {names}; keep one of them")
    resumable = sorted(folder.glob("*/checkpoint.pt"), key=lambda path: path.stat().st_mtime)
    return next((path.parent for path in [*finished, *reversed(resumable)]), None)


def check_settings(
    path: Path,
    saved: Mapping[str, Any],
    requested: Mapping[str, Any],
    equal: Callable[[Any, Any], bool] = operator.eq,
    remedy: str = "use another --out",
) -> None:
    """Raise ValueError, naming the first setting that differs, if a run in `path` has other settings than requested."""
    for name in {**saved, **requested}:
        old, new = saved.get(name, "the default"), requested.get(name, "the default")
        if not equal(new, old):
            raise ValueError(f"{name}={new}: expected {old}, as in {path}; or {remedy}")


def run_in_turn(jobs: list[JobT], run: Callable[[JobT], JobResult], tolerated: type[Exception]) -> Iterator[JobResult]:
    """Run jobs in this process, one after another; an error of type `tolerated` ends its own job only."""
    for job in jobs:
        yield _result(job, partial(run, job), tolerated)


def run_in_processes(
    jobs: list[JobT], run: Callable[[JobT], JobResult], num_processes: int, tolerated: type[Exception]
) -> Iterator[JobResult]:
    """Run jobs in a pool of processes, which imports once for all jobs; errors are handled as by `run_in_turn`.

    The pool's processes ignore Ctrl-C. They end at once, each with its last checkpoint, however this process ends.

    Raises:
        ChildProcessError: a process was killed.
        KeyboardInterrupt: after a stop request.
    """
    stop = StopRequest()
    with stop.listen():
        # processes inherit the delay until they ignore the signals, as does the one in which Python tracks semaphores
        with hold_group_signals():
            pool = ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn"), _end_with_parent)
            futures = {pool.submit(run, job): job for job in jobs}
        try:
            yield from _as_completed(futures, stop, tolerated, _raise_interrupt)
        except BaseException as error:
            for process in multiprocessing.active_children():
                process.terminate()
            if stop.count:  # the signal may have ended the pool's processes, too
                raise KeyboardInterrupt from None
            if isinstance(error, BrokenProcessPool):
                reason = "a run was killed, perhaps because memory ran out"
                raise ChildProcessError(f"{reason}; resume with the same command") from None
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _end_with_parent() -> None:
    """Let a process of a pool leave stop signals to its parent, and end when the parent ends, even if killed."""
    from tqdm import tqdm

    for number in group_signals():
        signal.signal(number, signal.SIG_IGN)
    tqdm.set_lock(threading.RLock())  # the default is a semaphore of the system, which outlives a killed process
    parent = multiprocessing.parent_process()

    def wait_for_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait_for_parent, daemon=True).start()


def _raise_interrupt() -> None:
    raise KeyboardInterrupt


def run_in_threads(jobs: list[CommandJob], num_threads: int) -> Iterator[JobResult]:
    """Run the commands of jobs on this machine, several at a time; an error ends its own job only.

    Raises:
        KeyboardInterrupt: after a stop request, when all commands have ended.
    """
    stop = StopRequest()
    with stop.listen(), ThreadPoolExecutor(num_threads) as pool:
        futures = {pool.submit(run_command_job, job, stop): job for job in jobs}
        yield from _as_completed(futures, stop, Exception, partial(print, STOPPING, flush=True))


def run_on_ray(
    jobs: list[CommandJob], address: str | None, cpus_per_run: float, gpus_per_run: float
) -> Iterator[JobResult]:
    """Run the commands of jobs as Ray tasks; the task of a worker that dies is started again, and resumes its run.

    Raises:
        ValueError: there is no cluster at the address, or it has too few CPUs or GPUs for a run.
        KeyboardInterrupt: after a stop request, when all commands have ended.
    """
    import ray

    environment = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    options: dict[str, Any] = {"log_to_driver": False, "include_dashboard": None if address else False}
    try:
        ray.init(address or "local", runtime_env={"env_vars": environment}, **options)
    except ConnectionError as error:
        raise ValueError(f"address={address!r}: expected a running Ray cluster: {error}") from None
    for name, number in (("CPU", cpus_per_run), ("GPU", gpus_per_run)):
        available = ray.cluster_resources().get(name, 0)
        if number > available:  # Ray would wait for ever, silently
            raise ValueError(f"{name.lower()}s_per_run={number}: expected at most {available:g}, all that Ray has")
    task = ray.remote(num_cpus=cpus_per_run, num_gpus=gpus_per_run, max_retries=MAX_RETRIES)(run_command_job)
    stop, references = StopRequest(), {}
    with stop.listen():
        for job in jobs:
            reference = task.remote(job, StopRequest())
            references[reference.future()] = reference, job

        def cancel() -> None:
            print(STOPPING, flush=True)
            for future, (reference, _) in references.items():
                if not future.done():
                    ray.cancel(reference)

        yield from _as_completed({future: job for future, (_, job) in references.items()}, stop, Exception, cancel)
    ray.shutdown()


def _as_completed(
    futures: dict[Future[JobResult], JobT], stop: StopRequest, tolerated: type[Exception], on_stop: Callable[[], None]
) -> Iterator[JobResult]:
    """Yield the results of jobs as they end, and call `on_stop` at each stop request."""
    handled = 0
    while futures:
        for future in wait(futures, timeout=0.2, return_when=FIRST_COMPLETED).done:
            result = _result(futures.pop(future), future.result, tolerated)
            yield result._replace(problem=STOPPED) if result.problem and stop.count else result
        while handled < stop.count:
            handled += 1
            on_stop()
    if stop.count:
        raise KeyboardInterrupt


def _result(job: Hashable, call: Callable[[], JobResult], tolerated: type[Exception]) -> JobResult:
    """Return the result of a call, or of the tolerated error that it raises."""
    try:
        return call()
    except tolerated as error:
        return JobResult(job, problem=(str(error).splitlines() or [type(error).__name__])[-1])


def run_command_job(job: CommandJob, stop: StopRequest) -> JobResult:
    """Run the command of a job, and again if a signal kills it."""
    start, log = time.perf_counter(), job.folder / "log.txt"
    with _wait_for_lock(job.folder, stop) as lock:
        code, attempts = -1, 0
        # the holder of the lock may have finished the run in the meantime
        while lock is not None and code < 0 and attempts <= MAX_RETRIES and not stop.count and job.summary() is None:
            command = job.command()
            print(f"{'resuming' if '--resume' in command else 'starting'} {job}, see {log}", flush=True)
            code, attempts = run_command(command, log, lock, stop), attempts + 1
    seconds, summary = time.perf_counter() - start, job.summary()
    if summary is not None:
        return JobResult(job, summary, seconds=seconds)
    if stop.count or code == EXIT_INTERRUPTED:
        return JobResult(job, problem=STOPPED)
    ending = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    reason = last_message(log.read_text(encoding="utf-8", errors="replace"))
    return JobResult(job, problem=f"{ending}: {reason}", seconds=seconds)


@contextlib.contextmanager
def _wait_for_lock(folder: Path, stop: StopRequest) -> Iterator[IO[bytes] | None]:
    """Lock a folder, or yield None if a stop request ends the wait.

    A command inherits the lock. If this process is killed, and the command runs on, the lock keeps others from resuming
    its run. (On Windows commands inherit nothing; there an agent's lock of its own folder refuses the second one.)
    """
    file, waiting = None, False
    while file is None and not stop.count:
        try:
            file = lock_folder(folder)
        except BlockingIOError:
            if not waiting:
                print(f"{folder}: waiting for a run that outlived its killed parent process", flush=True)
            waiting = True
            time.sleep(0.2)
    with file or contextlib.nullcontext():
        yield file

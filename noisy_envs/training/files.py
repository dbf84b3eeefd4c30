"""Atomic writes, and folders that one process at a time writes to."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

MAX_NAME_LENGTH = 120  # in a run's folder: the name of TensorBoard's file contains the host's name


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file that holds either its old or its new content, even if the process is killed.

    Raises:
        OSError: names the file.
    """
    with replacing(path) as part, part.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new file to fill, which then replaces `path`; an error removes it.

    New files that killed processes left behind are removed first. New files of running processes are locked and stay.

    Raises:
        OSError: names `path`, even if the system names no file or the new one.
    """
    with naming(path):
        _remove_abandoned(path.parent, f".{glob.escape(path.name)}.*.part")
        file, part = _new_part(path)
        try:
            yield part
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            file.close()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to errors of the system, which leaves it out when a disk is full, for example."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def new_folder(parent: Path, name: str) -> Path:
    """Create the folder `parent/name`, or `name-2`, `name-3`, … if it exists; two processes never get the same one."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def lock_folder(folder: Path) -> IO[bytes]:
    """Create and lock a folder until the returned file is closed; use it as `with lock_folder(folder): …`.

    The lock is on the file `.lock`, which stays and names the process that locked it last. The system releases the lock
    when all processes that hold the open file have ended. A file system without locks grants every request. Files that
    killed processes left half-written in the folder are removed.

    Raises:
        BlockingIOError: another process holds the lock; the message names it.
        OSError: the folder's path is too long for the files of a run.
    """
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{'x' * MAX_NAME_LENGTH}.part"
        probe.touch()
        probe.unlink(missing_ok=True)
    file = (folder / ".lock").open("a+b", buffering=0)
    locked = True
    with contextlib.suppress(OSError):  # a run on a file system without locks is better than none
        locked = _lock(file)
    if not locked:
        content = b""
        with file, contextlib.suppress(OSError):  # Windows lets nobody read what is locked
            file.seek(0)
            content = file.read(300)
        holder = _describe_holder(content)
        raise BlockingIOError(f"{folder} is in use by another process{holder}; wait until that ends, or stop it")
    with contextlib.suppress(OSError):  # on a full disk the holder stays unnamed; the run's own files report the error
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()}\n".encode())
    _remove_abandoned(folder, ".*.part")
    return file


def _lock(file: IO[bytes]) -> bool:
    """Lock an open file until all its descriptors are closed; return whether no other process holds the lock."""
    from filelock import lock_descriptor  # part of the extra "agents"

    return lock_descriptor(file.fileno(), blocking=False)


def _describe_holder(content: bytes) -> str:
    """Describe a lock's holder by the content of its file, which anybody may have written."""
    match = re.fullmatch(r"(\d{1,20})(?: ([\w.-]+))?", content.decode(errors="replace").strip(), re.ASCII)
    if match is None:
        return ""
    process, host = match.groups()
    return f", {process}" if host in (None, socket.gethostname()) else f", {process} on {host}"


def _remove_abandoned(folder: Path, pattern: str) -> None:
    """Remove new files of killed processes, which hold no lock any more."""
    for part in folder.glob(pattern):
        with contextlib.suppress(OSError), part.open("r+b") as file:  # it is gone, or the file system knows no locks
            if _lock(file):
                part.unlink()


def _new_part(path: Path) -> tuple[IO[bytes], Path]:
    """Create a hidden file next to `path`, locked until it is closed."""
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        file = part.open("x+b")  # with the permissions of any new file; `tempfile` creates private ones
        if sys.platform == "win32":  # which renames no open file
            file.close()
            return file, part
        with contextlib.suppress(OSError):  # the file system knows no locks
            _lock(file)
        if part.exists():  # another process may have removed it before it was locked
            return file, part
        file.close()

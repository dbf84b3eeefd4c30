"""Files that are never half written, and folders in which two processes never write at once."""

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

LONGEST = 120  # of the names in a run's folder: TensorBoard's file has the machine's in its own


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that it holds either its old or its new content, whenever the process dies.

    Raises:
        OSError: naming the file.
    """
    with replacing(path) as part, part.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a new file to fill, which then takes the place of `path`, or is removed at an error.

    What other processes left of theirs, when they were killed, is removed first; of those that live nothing is.

    Raises:
        OSError: naming `path`, also where the system names no file or but the new one.
    """
    with naming(path):
        _remove_left(path.parent, f".{glob.escape(path.name)}.*.part")
        handle, part = _new_part(path)
        try:
            yield part
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            handle.close()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the system name this file: of a full disk it names none."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _remove_left(folder: Path, pattern: str) -> None:
    """Remove the new files that processes left when they were killed; those of processes that live are locked."""
    for left in folder.glob(pattern):
        with contextlib.suppress(OSError), left.open("r+b") as file:  # it is in use, or gone, or knows no locks
            _lock(file.fileno())
            left.unlink()


def _new_part(path: Path) -> tuple[IO[bytes], Path]:
    """Make a file beside `path`, locked until it is closed (not on Windows, which renames no open file)."""
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            file = part.open("x+b")  # as readable as any other file: `tempfile` makes private ones
        except FileExistsError:
            continue
        if sys.platform == "win32":
            file.close()
            return file, part
        else:
            with contextlib.suppress(OSError):  # the file system knows no locks
                fcntl.flock(file, fcntl.LOCK_EX)
        if part.exists():  # another process may have taken it for left before it was locked
            return file, part
        file.close()


def new_folder(parent: Path, name: str) -> Path:
    """Make the folder `parent/name`, or `name-2`, `name-3`, … where it is taken; two processes never share one."""
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
    """Keep every other process that asks for this lock from a folder, until the returned file is closed.

    The system locks the file `.lock` and frees it when the process ends, however it ends; the file stays, and blocks
    nobody; it holds the id and the machine of the process that locked it last. A file system that knows no locks gives
    none. What killed processes left half written in the folder is removed. Use it as `with lock(folder): …`.

    Raises:
        BlockingIOError: another process holds the folder, naming it.
        OSError: the folder takes no file whose name is as long as those of a run.
    """
    with naming(folder):
        probe = folder / f".{'x' * LONGEST}.part"
        probe.touch()
        probe.unlink(missing_ok=True)
    file = (folder / ".lock").open("a+b", buffering=0)
    try:
        _lock(file.fileno())
    except (BlockingIOError, PermissionError):  # the latter on Windows
        holder = b""
        with file, contextlib.suppress(OSError):  # Windows lets nobody read what is locked
            file.seek(0)
            holder = file.read(300)
        told = f"{folder} is in use by another process{_told(holder)}; wait until that ends, or stop it"
        raise BlockingIOError(told) from None
    except OSError:  # a run on such a file system is better than none
        pass
    with contextlib.suppress(OSError):  # a full disk is told where something is lost
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()}\n".encode())
    _remove_left(folder, ".*.part")
    return file


def _told(holder: bytes) -> str:
    """Tell who holds a lock by what its file says, which others may have written: its machine only if not this one."""
    found = re.fullmatch(r"(\d{1,20})(?: ([\w.-]+))?", holder.decode(errors="replace").strip(), re.ASCII)
    if found is None:
        return ""
    number, machine = found.groups()
    return f", {number}" if machine in (None, socket.gethostname()) else f", {number} on {machine}"


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

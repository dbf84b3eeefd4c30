"""Files that are never half written, and folders in which two processes never write at once."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import IO


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that it holds either its old or its new content, whenever the process dies."""
    data = content.encode() if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)  # mkstemp is private; a result is as readable as any other file
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


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


def lock(folder: Path) -> IO[bytes]:
    """Keep every other process that asks for this lock from a folder, until the returned file is closed.

    The system locks the file `.lock` and frees it when the process ends, however it ends; the file stays, and blocks
    nobody. A file system that knows no locks gives none. Use it as `with lock(folder): …`.

    Raises:
        BlockingIOError: another process holds the folder.
    """
    file = (folder / ".lock").open("ab")
    try:
        _lock(file.fileno())
    except (BlockingIOError, PermissionError):  # the latter on Windows
        file.close()
        raise BlockingIOError(f"{folder} is in use by another process; wait until that ends, or stop it") from None
    except OSError:  # a run on such a file system is better than none
        pass
    return file


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

"""Files written so that a crash or a full disk leaves the old content or the new, never half of one."""

import contextlib
import errno
import os
from pathlib import Path
from typing import BinaryIO


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replaces a file's content at once; raises :class:`OSError` with the old content in place."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(partial)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def open_lines(path: Path) -> BinaryIO:
    """Opens a file for :func:`append_line`, unbuffered: what a full disk refuses is not tried again at close."""
    return path.open("ab", buffering=0)


def append_line(file: BinaryIO, line: str) -> None:
    """Appends a whole line, or nothing and raises :class:`OSError`."""
    end, content = file.tell(), line.encode(errors="backslashreplace") + b"\n"
    try:
        if file.write(content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(end)
        raise


def sync(path: Path) -> None:
    """Flushes a file, or every file below a folder, to disk, so that a rename after it is a commit."""
    for each in path.rglob("*") if path.is_dir() else [path]:
        if each.is_file():
            with each.open("rb") as file:
                os.fsync(file.fileno())

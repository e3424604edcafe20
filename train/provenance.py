"""What made a checkpoint: versions of libraries and toolkit, and the toolkit's commit if it is a checkout."""

import functools
import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "transformers", "deepspeed")


def versions() -> dict[str, str]:
    """Returns the versions of the libraries that a run depends on."""
    return {name: importlib.metadata.version(name) for name in LIBRARIES}


@functools.cache
def toolkit() -> dict[str, Any]:
    """Returns ``version`` and, in a git checkout, ``commit`` and whether files were ``modified`` since."""
    try:
        about: dict[str, Any] = {"version": importlib.metadata.version("mtp-toolkit")}
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        about = {"version": None}
    root = Path(__file__).resolve().parent.parent
    commit = _git(root, "rev-parse", "HEAD") if (root / ".git").exists() else None
    if commit:
        about |= {"commit": commit, "modified": bool(_git(root, "status", "--porcelain", "--untracked-files=no"))}
    return about


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

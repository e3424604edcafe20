"""Files that ship with the toolkit, from a checkout or an installed package."""

import contextlib
import importlib.resources
from pathlib import Path


def resource(name: str) -> Path | None:
    """Returns a file that ships in ``configs/``, in the checkout or the installed package; None if not there."""
    folders = [Path(__file__).resolve().parent.parent / "configs"]
    with contextlib.suppress(ModuleNotFoundError):  # a checkout that is not installed
        folders.insert(0, Path(str(importlib.resources.files("mtp.configs"))))
    for folder in folders:
        if (path := folder / name).is_file():
            return path
    return None

"""Files that ship with the toolkit, from a checkout or an installed package."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def resource(name: str) -> Path | None:
    """Returns a file that ships in ``configs/``, None if there is none of that name.

    An installed package has the folder inside of ``mtp``, a checkout beside it.
    """
    for folder in (PACKAGE / "configs", PACKAGE.parent / "configs"):
        if (path := folder / name).is_file():
            return path
    return None

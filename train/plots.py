"""What plots have in common; matplotlib is an extra, imported when the first one is drawn."""

from pathlib import Path
from typing import Any

from mtp import UserError


def new_figure(columns: int, **options: Any) -> tuple[Any, list[Any]]:
    """Returns a figure and its panels, side by side, each with a grid; raises :class:`UserError` without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("the plot needs matplotlib: pip install 'mtp-toolkit[demo]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, columns, figsize=(5 * columns + 1, 4), squeeze=False, **options)
    for axes in panels[0]:
        axes.grid(alpha=0.3)
    return figure, list(panels[0])


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure as PNG and forgets it; raises :class:`UserError` if the file cannot be written."""
    import matplotlib.pyplot as plt

    figure.tight_layout()
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise UserError(f"plot {path}: cannot be written ({error.strerror}); choose another file") from None
    plt.close(figure)

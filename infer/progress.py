"""Progress of long commands: a bar on a terminal, plain lines in a log."""

import sys
import time

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 15


class Progress:
    """Counts finished items on standard error; use it as a context manager."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._done, self._said = 0, time.monotonic()
        self._bar = tqdm(total=total, desc=what, unit=unit, disable=None if total > 1 else True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def write(self, text: str) -> None:
        """Prints to standard output without breaking the bar."""
        self._bar.write(text, file=sys.stdout)
        sys.stdout.flush()

    def advance(self, note: str = "") -> None:
        """Counts one item more; ``note`` is shown beside the count."""
        self._done += 1
        self._bar.update()
        self._bar.set_postfix_str(note)
        if self._bar.disable and time.monotonic() - self._said >= SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            line = f"{self._what}: {self._done} of {self._total} {self._unit}s"
            print(f"{line}, {note}" if note else line, file=sys.stderr, flush=True)

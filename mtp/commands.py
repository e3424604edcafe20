"""How every command ends: what a user can fix is one line, Ctrl-C and a closed pipe are no tracebacks."""

import io
import os
import sys
from collections.abc import Callable

import transformers

from mtp.errors import UserError


def run_command(command: Callable[[], int | None], *, stopped: str = "run the same command again to go on") -> int:
    """Runs a command whose arguments are parsed and returns its exit status.

    Args:
        command: returns its own status, or None for 0.
        stopped: what to do after Ctrl-C.

    Returns:
        The command's own status; 2 after an error that the user can fix, 130 when stopped, 1 if nobody reads what it
        prints any more.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a text is printed whatever the terminal's encoding
    try:
        status = command()
        sys.stdout.flush()
        return status or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough
        _discard_output()
        return 1
    except OSError as error:
        print(f"error: {error.filename or 'standard output'}: {error.strerror or error}", file=sys.stderr)
        _discard_output()
        return 2
    except KeyboardInterrupt:
        print(f"stopped; {stopped}", file=sys.stderr)
        return 130


def _discard_output() -> None:
    """Leaves nothing that Python would try to print, and fail at, when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

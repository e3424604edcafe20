"""The one error class for what a user can fix."""

LONGEST = 300  # characters of a library's message that are passed on


class UserError(ValueError):
    """Raised for bad input: says what was wrong, where (file, line, field), and what to do.

    Commands print it as one line and exit with status 2; it is never a bug of the toolkit.
    """


def one_line(error: BaseException) -> str:
    """Returns an exception's message as one line of bounded length, or its kind if it has none."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= LONGEST else words[:LONGEST] + " ..."

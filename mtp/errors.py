"""The one error class for what a user can fix."""


class UserError(ValueError):
    """Raised for bad input: says what was wrong, where (file, line, field), and what to do.

    Commands print it as one line and exit with status 2; it is never a bug of the toolkit.
    """


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or its kind if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

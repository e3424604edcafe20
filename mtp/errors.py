"""The one error class for what a user can fix."""


class UserError(ValueError):
    """Raised for bad input: says what was wrong, where (file, line, field), and what to do.

    Commands print it as one line and exit with status 2; it is never a bug of the toolkit.
    """

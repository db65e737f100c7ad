"""The one exception for a user's mistake: the command line prints it as a single line and exits with 2."""


class UserError(ValueError):
    """A mistake of the user's: one line that names the field, the value and the fix."""

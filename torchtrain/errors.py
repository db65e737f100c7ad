"""The exceptions that the command line ends with one line or none, and an exit code."""


class UserError(ValueError):
    """A mistake of the user's: one line that names the field, the value and the fix."""


def disk_fault(error: OSError) -> str:
    """Return what the system says of a file, in words: "no space left on device (PATH)"."""
    said = str(error.strerror).lower() if error.strerror else str(error)
    return f"{said} ({error.filename})" if error.filename else said


class OtherRankFailed(Exception):  # noqa: N818 - it is no error of this process
    """Another process of the run stopped and says why; this one stops in silence, with the other's exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


class RankLost(Exception):  # noqa: N818
    """Another process of the run is gone without a word; the message says so."""


class Terminated(Exception):  # noqa: N818
    """SIGTERM was obeyed; the message, empty on all ranks but the first, says from where the run goes on."""

"""How a process of a run ends besides a user's mistake: with one line or none, and an exit code."""


class OtherRankFailed(Exception):  # noqa: N818 - it is no error of this process
    """Another process of the run stopped and says why; this one stops in silence, with the other's exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


class RankLost(Exception):  # noqa: N818
    """Another process of the run is gone without a word; the message says so."""


class Terminated(Exception):  # noqa: N818
    """SIGTERM was obeyed; the message, empty on all ranks but the first, says from where the run goes on."""

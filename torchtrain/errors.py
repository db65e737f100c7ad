"""How a process of a run ends besides a user's mistake: with one line or none, and an exit code."""


class OtherRankFailed(Exception):  # noqa: N818 - it is not an error of this process
    """Another process of the run stopped and says why; this one stops in silence, with the other's exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


class RankLost(Exception):  # noqa: N818
    """Another process of the run is gone without a word; the message says so."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or Ctrl-C was obeyed; the message says from where the run goes on.

    It is no `Exception`, so that no library takes it for an error of its own. The message is empty on ranks that leave
    it to another to say.

    `code`: exit code, 128 + the signal. `agreed`: all ranks end so, between two steps; else only those that the signal
    came to.
    """

    def __init__(self, message: str, code: int, agreed: bool = False) -> None:
        super().__init__(message)
        self.code, self.agreed = code, agreed


class TasksUnfinished(Exception):  # noqa: N818 - what was finished is kept
    """Tasks of a preparation or an evaluation are not done, by no mistake of the user's; it says what to do."""

"""A thread that writes while training goes on: one write at a time, and what it met is told by who waits for it."""

import threading
from collections.abc import Callable

from anchorline.errors import UserError
from torchtrain.errors import OtherRankFailed


class Background:
    """Does one thing at a time beside the program.

    The thread ends with the process: a write that is cut off so is one that was killed.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._fault: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether something was begun that nobody has finished yet, though it may have ended."""
        return self._thread is not None

    def begin(self, work: Callable[[], None]) -> None:
        """Begin a piece of work; the one before is finished."""
        assert self._thread is None, "one at a time"
        self._ended.clear()
        thread = threading.Thread(target=self._run, args=(work,), name="background", daemon=True)
        thread.start()
        self._thread = thread  # once it runs: an interrupt before leaves nothing that is waited for

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._fault = error
        finally:
            self._ended.set()

    def has_ended(self) -> bool:
        """Whether the work has ended, by a mistake or not; its other ranks' will have, too, then or soon.

        Raises:
            BaseException: it ended by a fault that no other rank's work knows of, and never will.
        """
        if self._thread is None or not self._ended.is_set():
            return False
        if self._fault is not None and not isinstance(self._fault, UserError | OtherRankFailed):
            self.finish()
        return True

    def finish(self) -> None:
        """Wait for the work, if there is any.

        Raises:
            BaseException: what it ended by.
        """
        if self._thread is None:
            return
        self._ended.wait()  # which signals get through to
        self._thread.join()  # so that what it held is freed
        fault, self._thread, self._fault = self._fault, None, None
        if fault is not None:
            raise fault

"""A thread that writes a checkpoint while training continues. Whoever waits for it gets its error."""

import threading
from collections.abc import Callable

from anchorline.errors import UserError
from torchtrain.errors import OtherRankFailed


class Background:
    """Does one piece of work at a time in a thread, which ends with the process."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._fault: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether there is work that `finish` was not called for yet. It may have ended."""
        return self._thread is not None

    def begin(self, work: Callable[[], None]) -> None:
        """Begin a piece of work; the one before is finished."""
        assert self._thread is None, "one at a time"
        self._ended.clear()
        thread = threading.Thread(target=self._run, args=(work,), name="background", daemon=True)
        thread.start()
        self._thread = thread  # only once it runs, so that an interrupt before leaves nothing to wait for

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._fault = error
        finally:
            self._ended.set()

    def has_ended(self) -> bool:
        """Whether the work has ended, also by a mistake. Raises BaseException: an error that no other rank knows of."""
        if self._thread is None or not self._ended.is_set():
            return False
        if self._fault is not None and not isinstance(self._fault, UserError | OtherRankFailed):
            self.finish()
        return True

    def finish(self) -> None:
        """Wait for the work, if there is any. Raises BaseException: what it ended by."""
        if self._thread is None:
            return
        self._ended.wait()  # a signal interrupts this wait
        self._thread.join()  # so that its memory is freed
        fault, self._thread, self._fault = self._fault, None, None
        if fault is not None:
            raise fault

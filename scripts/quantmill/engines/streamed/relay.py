"""Forwards of several texts that go through a model's blocks together: every text runs through one before the next.

Each forward is the model's own, in a thread that stands still before each block. So whatever a model does between and
around its blocks is done. One thread runs at a time.
"""

import threading
from collections.abc import Callable
from typing import Any

STACK = 4 * 2**20  # bytes of a thread's stack


class Cancelled(BaseException):
    """End of a forward whose result is not wanted."""


class Runner:
    """A forward in its own thread."""

    def __init__(self, forward: Callable[[], Any]) -> None:
        self.forward = forward
        self.block: int | None = None  # before which it stands; None: not begun, or ended
        self.result: Any = None
        self.error: BaseException | None = None
        self.go, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.cancelled = False
        threading.stack_size(STACK)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.go.acquire()
        try:
            if not self.cancelled:
                self.result = self.forward()
        except BaseException as error:
            self.error = error
        self.block = None
        self.stopped.release()

    def resume(self) -> None:
        """Let it run to the next block or to its end. Raises what it raises."""
        self.go.release()
        self.stopped.acquire()
        if self.error:
            raise self.error

    def pause(self, block: int) -> None:
        """Stand still before a block; its own thread calls this."""
        self.block = block
        self.stopped.release()
        self.go.acquire()
        if self.cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """End it where it stands."""
        if self.thread.is_alive():
            self.cancelled = True
            self.go.release()
            self.thread.join()


class Relay:
    """Forwards that go through `count` blocks together."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.current: Runner | None = None

    def pause(self, block: int) -> None:
        """Stand still before a block, whose forward calls this first."""
        if self.current:
            self.current.pause(block)

    def run(
        self, forwards: list[Callable[[], Any]], load: Callable[[int], None], free: Callable[[int], None]
    ) -> list[Any]:
        """Run forwards, each block of all of them between its `load` and its `free`. Return their results.

        `load` and `free` get -1 for what comes before the first block. Raises what a forward raises, and
        `ValueError` for one that does not run its blocks once each and in order.
        """
        runners = [Runner(forward) for forward in forwards]
        try:
            for block in range(-1, self.count):  # -1: what comes before the first one
                load(block)
                for runner in runners:
                    self.current = runner
                    runner.resume()
                    self.current = None
                    if runner.block != (block + 1 if block + 1 < self.count else None):
                        raise ValueError(f"block {runner.block} follows block {block}")
                free(block)
            return [runner.result for runner in runners]
        finally:
            self.current = None
            for runner in runners:
                runner.cancel()

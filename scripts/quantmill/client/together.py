"""Calls that wait for a server, several at a time."""

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(call: Callable[[Item], Result], items: Sequence[Item], users: int) -> Iterator[Result]:
    """Yield the result of `call` for each item, in order; at most `users` calls run at a time. Raises what a call
    raises, in its place.

    A pool of the standard library waits for its calls before an interrupt takes effect. These threads end with the
    process, even during a call.
    """
    results: list[SimpleQueue[tuple[Result | None, BaseException | None]]] = [SimpleQueue() for _ in items]
    numbers = iter(range(len(items)))
    lock, stopped = threading.Lock(), threading.Event()

    def work() -> None:
        while not stopped.is_set():
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                results[number].put((call(items[number]), None))
            except BaseException as error:  # raised again where its result is taken
                results[number].put((None, error))

    for _ in range(min(users, len(items))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for result in results:
            value, error = result.get()
            if error is not None:
                raise error
            yield value  # type: ignore[misc]
    finally:
        stopped.set()

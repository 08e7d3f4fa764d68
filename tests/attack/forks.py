"""Run work in forked children, which start within milliseconds. Fork only while no other thread runs."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

AT_ONCE = 4

T = TypeVar("T")


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a child process, which ends with it; return the child's process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001  the child ends here, with 1
        traceback.print_exc()
    finally:
        os._exit(code)


def kill(child: int) -> None:
    """Kill a child with SIGKILL, and wait until it is gone."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def in_child(work: Callable[[], T]) -> T:
    """Run `work` in a child; return its result. Raises RuntimeError where the child fails."""
    (result,) = in_children([work])
    return result


def in_children(works: Sequence[Callable[[], T]], at_once: int = AT_ONCE) -> list[T]:
    """Run each work in its own child, `at_once` at a time; return their results in order. Raises RuntimeError."""
    begun, results = deque[tuple[int, int]](), list[T]()
    for work in works:
        begun.append(_begin(work))
        if len(begun) == at_once:
            results.append(_end(*begun.popleft()))
    return results + [_end(*child) for child in begun]


def _begin(work: Callable[[], object]) -> tuple[int, int]:
    reading, writing = os.pipe()

    def send_result() -> None:
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(work(), pipe)

    child = fork(send_result)
    os.close(writing)
    return child, reading


def _end(child: int, reading: int) -> T:  # type: ignore[type-var]  # what the child's work returns
    with os.fdopen(reading, "rb") as pipe:
        sent = pipe.read()
    _, status = os.waitpid(child, 0)
    if status or not sent:
        raise RuntimeError(f"a child ended with status {status}")
    result: T = pickle.loads(sent)  # noqa: S301  our own child wrote it
    return result

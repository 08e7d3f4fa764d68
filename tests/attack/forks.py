"""Children by `fork`, which take milliseconds, and are killed with SIGKILL. Fork where no other thread runs."""

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
    """Do `work` in a child, which ends with it; return the child's id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001  the child ends here, and its exit status says how
        traceback.print_exc()
    finally:
        os._exit(code)


def kill(child: int) -> None:
    """Kill a child at once, whatever it is doing, and wait until it is gone."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def in_child(work: Callable[[], T]) -> T:
    """Return what `work` returns in a child of its own. Raises RuntimeError when the child comes to nothing."""
    (result,) = in_children([work])
    return result


def in_children(works: Sequence[Callable[[], T]], at_once: int = AT_ONCE) -> list[T]:
    """Do all, each in a child of its own, some at once; return what each returns, in their order."""
    begun, results = deque[tuple[int, int]](), list[T]()
    for work in works:
        begun.append(_begin(work))
        if len(begun) == at_once:
            results.append(_end(*begun.popleft()))
    return results + [_end(*child) for child in begun]


def _begin(work: Callable[[], object]) -> tuple[int, int]:
    reading, writing = os.pipe()

    def told() -> None:
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(work(), pipe)

    child = fork(told)
    os.close(writing)
    return child, reading


def _end(child: int, reading: int) -> T:  # type: ignore[type-var]  # what the child's work returns
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if status or not told:
        raise RuntimeError(f"a child ended with status {status}")
    result: T = pickle.loads(told)  # noqa: S301  our own child wrote it
    return result

"""An interrupt that comes just as the executor's answer is taken."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from sds.kernel.executor import deadline


class Interrupted(queue.SimpleQueue[Any]):
    """Raises after the first item that was waited for is taken, as a signal's handler may."""

    interrupts = 1

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get(block, timeout)
        if timeout is not None and self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        return item


@pytest.mark.timeout(20)
def test_an_answer_that_an_interrupt_takes_away_is_late_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "SimpleQueue", Interrupted)
    came = list[str]()
    with pytest.raises(KeyboardInterrupt):
        deadline.within(10.0, lambda: "paid", late=came.append)
    assert ["paid"] == came

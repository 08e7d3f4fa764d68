"""`python -m tests.service.alarms.at_fault serve ...`: `sds` with an engine that is slow, or whose language model is down,
and with a route that fails, while the folder `$SDS_HOME` has a file of that name.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sds.cli import main
from sds.kernel.errors import ModelError
from sds.service.routes import submitting
from sds.service.server import serving
from tests.proposers import Greedy, Says, WithLanguageModel

HOME = Path(os.environ["SDS_HOME"])
SLOW_S = 0.3


class AtFault(WithLanguageModel):
    """Proposes what `Greedy` does, once its language model has proposed, if that is not down."""

    def __init__(self) -> None:
        self._most_of = Greedy("WAIVE")
        super().__init__("WAIVE", beside=Says(self._say))

    def _say(self, packet: Any) -> bytes:
        if (HOME / "language_model_down").exists():
            raise ModelError("the server does not answer")
        return self._most_of.propose(packet, tokens_max=99)[0]

    def propose(self, packet: Any, *, tokens_max: int) -> Any:
        if (HOME / "slow").exists():
            time.sleep(SLOW_S)
        if (HOME / "language_model_asked").exists():
            model = self.language_model
            return model.breaker.ask(model.get(), packet, tokens_max=tokens_max)
        return super().propose(packet, tokens_max=tokens_max)


def begin(*given: Any) -> Any:
    if (HOME / "faulty").exists():
        raise RuntimeError("a fault of this program")
    return BEGIN(*given)


BEGIN = submitting._begin

if __name__ == "__main__":
    engine = partial(serving.serve, open_model=lambda _: AtFault())
    with patch.object(serving, "serve", engine), patch.object(submitting, "_begin", begin):
        main()

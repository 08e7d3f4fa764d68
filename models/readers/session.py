"""One ONNX model in memory, run on the processor by onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from sds.models.readers.protocol import THREADS, ReaderError

_SILENT = 4  # the log level at which onnxruntime writes nothing; it raises as well


class Session:
    """Safe in several threads. Raises ReaderError, and no exception of onnxruntime."""

    def __init__(self, model: bytes, *, threads: int = THREADS) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Threads spin during a run, because waking them for each operation is slow. They stop after it, because spinning would
        # take the cores from other work.
        options.add_session_config_entry("session.intra_op.allow_spinning", "1")
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.log_severity_level = _SILENT
        try:
            self._session: Any = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise ReaderError("a model cannot be run", hint="fit it again with this version") from error

    def run(self, outputs: list[str], inputs: Mapping[str, NDArray[np.generic]]) -> list[NDArray[np.float32]]:
        """Return the named outputs. Raises ReaderError where the session is closed or a number is not finite."""
        session = self._session
        if session is None:
            raise ReaderError("the reader is closed")
        try:
            found: list[NDArray[np.float32]] = session.run(outputs, dict(inputs))
        except Exception as error:
            raise ReaderError("a model failed while it ran") from error
        if not all(np.isfinite(numbers).all() for numbers in found):
            raise ReaderError("a model gave a number that is not finite")
        return found

    def close(self) -> None:
        self._session = None

"""Every backend there is: a new one is a folder that says its own facts, and its line here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from sds.models.facts import BackendFacts
from sds.models.int8.facts import INT8
from sds.models.llamacpp.facts import LLAMACPP
from sds.models.openvino_.facts import OPENVINO
from sds.models.protocol import Library
from sds.models.transformers_.facts import TRANSFORMERS

_ALL = (LLAMACPP, TRANSFORMERS, OPENVINO, INT8)  # of those that run a model, the first does where nobody says which
BACKENDS: dict[Library, BackendFacts] = {each.name: each for each in _ALL}
DEFAULT = LLAMACPP.name
MEASURED = tuple(each.name for each in _ALL if each.measured_in)  # by `sds models prepare`; they run GGUF files

if TYPE_CHECKING:
    LibraryChoice = str
    MeasuredChoice = str
else:  # what an option or a file may say
    LibraryChoice = Literal[tuple(BACKENDS)]
    MeasuredChoice = Literal[MEASURED]


def library_for(*, folder: bool) -> Library:
    """Return what runs a checkpoint folder, or a GGUF file, where nobody says it."""
    return next(each.name for each in _ALL if each.reads_folders or not folder)

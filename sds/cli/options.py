"""Group options that several commands share in dataclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer, in which each field of a parameter that is a dataclass has become an option."""
    hints = get_type_hints(command, include_extras=True)
    shared: dict[str, Any] = {name: kind for name, kind in hints.items() if name != "return" and is_dataclass(kind)}

    def run(**given: Any) -> None:
        for name, kind in shared.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in fields(kind)})
        command(**given)

    parameters = [
        option
        for each in signature(command).parameters.values()
        for option in (
            _options(shared[each.name])
            if each.name in shared
            else [each.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[each.name])]
        )
    ]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _options(kind: Any) -> list[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name])
        for each in fields(kind)
    ]

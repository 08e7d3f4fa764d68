"""Groups of commands that are named by their place: the module of a command is imported when the command is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from sds.cli.options import flat
from sds.host.interrupt import ends_at_once

_HANDED_ON = {"bench": {"ignore_unknown_options": True, "allow_extra_args": True}}  # to the benchmark's own process


def group_of(places: Mapping[str, str]) -> type[TyperGroup]:
    """Return the class of a group with commands at places such as `records.record:flows`, and what typer adds after them."""

    class Group(TyperGroup):
        def __init__(self, *, commands: Any = None, **given: Any) -> None:
            super().__init__(**given)
            lazy: Any = _Commands({**places, **(commands or {})})  # a mapping that typer only reads
            self.commands = lazy

    return Group


class _Commands(Mapping[str, Any]):
    """The commands of a group, by name. Their names are known without an import."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given

    def __getitem__(self, name: str) -> Any:
        if isinstance(place := self._given[name], str):
            self._given[name] = _command(name, place)
        return self._given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)


def _command(name: str, place: str) -> Any:
    """Import a command and return it. A command's docstring is its help. Ctrl-C meanwhile ends the process."""
    module, _, function = place.partition(":")
    with ends_at_once():
        command = getattr(import_module(f"sds.cli.{module}"), function)
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.command(name, context_settings=_HANDED_ON.get(name))(flat(command))
    return typer.main.get_command(alone)

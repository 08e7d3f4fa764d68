"""The command line. A mistake of yours exits with 2, a failure of the world with 1; neither shows a traceback."""

from __future__ import annotations

import errno
import io
import os
import sqlite3
import sys
from contextlib import suppress
from typing import Any

import typer

from sds.cli.lazy import group_of
from sds.cli.render import Console, echo, plain, without_password
from sds.host.interrupt import EXIT_INTERRUPTED
from sds.host.paths import OTHER_HOME
from sds.kernel.canonical import in_words, one_line
from sds.kernel.errors import (
    ContractError,
    ErasedError,
    EventError,
    ExecutorError,
    LanguageError,
    SdsError,
    StateError,
    TransitionError,
    UsageError,
    WorldError,
    cause_of,
    place_of,
)
from sds.models.protocol import missing_package

EXIT_WORLD, EXIT_USAGE = 1, 2
COLUMNS_MIN = 20  # the least width: with $COLUMNS 0 rich would write nothing, errors included
# Hints for failures of the world that have none of their own
WORLD_MENDS: dict[type[WorldError], str] = {
    ExecutorError: "check that the executor runs and that its address is right, then run the command again",
    StateError: "check that the state source runs and that its address is right, then run the command again",
    LanguageError: "run sds contracts check",
    WorldError: "run sds doctor: it says what is wrong",
}
# Hints for errors of the operating system
_NO_ROOM = "free disk space"
_FILES = "raise the limit of open files: ulimit -n"
MACHINE_MENDS = {
    errno.EACCES: OTHER_HOME,
    errno.EPERM: OTHER_HOME,
    errno.EROFS: OTHER_HOME,
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.ENAMETOOLONG: "check the path, or set SDS_HOME to a shorter one",
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.EAGAIN: "raise the limit of processes and threads: ulimit -u",
    errno.ENOMEM: "end other programs, or raise the limit: ulimit -v",
}
_RIGHTS = "check that this user has the rights to it"
_PATH_MENDS = dict.fromkeys((errno.EACCES, errno.EPERM), _RIGHTS)
_FULL_DATABASE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
A_GOOD_EVENT = "sds events GATE --limit 1 > event.json; {} GATE --event event.json"
_NO_THREAD = "can't start new thread"  # the message of Python's RuntimeError
# The base class of errors in the words typed; its module depends on typer's version
_TyperError: type[Exception] = typer.BadParameter.__mro__[2]

# Every command, in the order of the help, and the place of its function in this package.
COMMANDS = {
    "run": "decisions.run:run",
    "decide": "decisions.decide:decide",
    "events": "decisions.decide:events",
    "envelope": "decisions.decide:envelope",
    "grammar": "decisions.decide:grammar",
    "retry": "decisions.decide:retry",
    "flows": "records.record:flows",
    "audit": "records.record:audit",
    "recover": "records.record:recover",
    "halt": "records.record:halt",
    "resume": "records.record:resume",
    "reconcile": "records.reconcile:reconcile",
    "orders": "records.orders:list_orders",
    "replay": "records.replay:replay",
    "fit": "judgement.fit:fit",
    "eval": "judgement.evaluate:evaluate",
    "label": "judgement.label:label",
    "erase": "records.erase:erase",
    "erasures": "records.erase:erasures",
    "backup": "records.backup:backup",
    "restore": "records.backup:restore",
    "serve": "service.serve:serve",
    "doctor": "setup.doctor:doctor",
    "bench": "setup.bench:bench",
    "new": "setup.new:new",
    "sandbox-gateway": "sandbox:sandbox_gateway",
}
GROUPS: dict[str, tuple[str, dict[str, str]]] = {
    "ledger": (
        "Verify the ledger and print its head.\n\nExample: sds ledger verify",
        {"verify": "records.record:verify", "head": "records.record:head"},
    ),
    "agents": (
        "Manage agents and revoke their contracts.\n\nExample: sds agents list",
        {
            "list": "setup.agents:list_agents",
            "show": "setup.agents:show",
            "suspend": "setup.agents:suspend",
            "reactivate": "setup.agents:reactivate",
            "retire": "setup.agents:retire",
            "revoke": "setup.agents:revoke",
        },
    ),
    "escalations": (
        "List, show and resolve cases for a human.\n\nExample: sds escalations list",
        {
            "list": "decisions.escalations:list_cases",
            "show": "decisions.escalations:show_case",
            "resolve": "decisions.escalations:resolve",
        },
    ),
    "labels": (
        "Export recorded labels.\n\nExample: sds labels export refund > labels.jsonl",
        {"export": "judgement.label:export"},
    ),
    "artifacts": (
        "Manage the reference texts of contracts.\n\nExample: sds artifacts list",
        {"put": "setup.context:put", "list": "setup.context:list_artifacts", "retire": "setup.context:retire"},
    ),
    "retention": (
        'Remove artifact texts past their retention.\n\nExample: sds retention sweep --reason "monthly"',
        {"sweep": "setup.context:sweep"},
    ),
    "keys": (
        "Manage signing keys and callers' keys.\n\nExample: sds keys show",
        {
            "show": "records.keys:show",
            "rotate": "records.keys:rotate",
            "add": "service.keys:add",
            "list": "service.keys:list_keys",
            "revoke": "service.keys:revoke",
        },
    ),
    "webhooks": (
        "Manage the endpoints for final states.\n\nExample: sds webhooks list",
        {"add": "service.webhooks:add", "list": "service.webhooks:list_webhooks", "remove": "service.webhooks:remove"},
    ),
    "record": (
        "Move a record to another store.\n\nExample: sds record move --to postgresql://sds@db.example/sds --reason ...",
        {"move": "records.move:move"},
    ),
    "contracts": (
        "Check, compare, register and list contracts.\n\nExample: sds contracts check contract.yaml",
        {
            "check": "setup.contracts:check",
            "diff": "setup.contracts:compare",
            "register": "setup.contracts:register",
            "list": "setup.contracts:list_contracts",
        },
    ),
    "models": (
        "List, show, check and prepare models.\n\nExample: sds models list",
        {
            "list": "setup.models:list_models",
            "show": "setup.models:show",
            "check": "setup.models:check",
            "prepare": "setup.models:prepare",
        },
    ),
}
app = typer.Typer(
    name="sds",
    help="Decide events with a local model that cannot exceed its authority.\n\nExample: sds run refund --limit 20",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    cls=group_of(COMMANDS),
)
for _group, (_help, _places) in GROUPS.items():
    app.add_typer(typer.Typer(help=_help, no_args_is_help=True, cls=group_of(_places)), name=_group)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415

        echo(version("sovereign-decision-stream"))
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_show_version, is_eager=True),
) -> None:
    """Options before any command."""


def main() -> None:
    """Run the command line, and exit: 0, `EXIT_USAGE` for a mistake of the user, `EXIT_WORLD` for a failure of the world."""
    if (columns := os.environ.get("COLUMNS", "")).isdecimal() and int(columns) < COLUMNS_MIN:
        os.environ["COLUMNS"] = str(COLUMNS_MIN)
    _write_every_character()
    try:
        code = _run(sys.argv[1:])
        if sys.stdout is not None:  # None where it was closed, as in a daemon
            sys.stdout.flush()
    except BrokenPipeError:
        code = _reader_gone()
    except (OSError, UnicodeError, MemoryError) as error:
        code = _say(_refused(error))
        _forget_output()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        with suppress(OSError, AttributeError):
            echo("interrupted", err=True)
    sys.exit(code)


def _write_every_character() -> None:
    """Have any text written, in any locale: as UTF-8 to files and pipes, and escaped where a terminal cannot show it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="backslashreplace")


def _run(args: list[str]) -> int:
    """Run one command and return its exit code. Typer's own entry would handle mistakes and closed pipes differently."""
    named = _named(args)
    try:
        _refuse_empty(args)
        command = typer.main.get_command(app)
        with command.make_context("sds", args) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except typer.Abort:
        return EXIT_WORLD
    except _TyperError as error:
        return _say_usage(error, named, args)
    except SdsError as error:
        from sds.cli.hints import at_gate  # noqa: PLC0415  `sds --help` needs no gate

        error.hint = _NO_ROOM if _is_of_full_disk(error) else at_gate(error.hint or _mend(error, named), app, args)
        return _say(error)
    except SystemExit as end:  # rich exits where its output's reader is gone
        if isinstance(end.__context__, BrokenPipeError):
            return _reader_gone()
        raise
    except Exception as error:
        if os.environ.get("SDS_TRACEBACK") or isinstance(error, OSError | UnicodeError | MemoryError):  # the machine's
            raise
        if str(error) == _NO_THREAD:
            raise OSError(errno.EAGAIN, "no thread can be started") from error
        return _say(_unforeseen(error))
    return 0


def _named(args: list[str]) -> str:
    """Return the command that was typed, as far as there is one."""
    group, command = [*args, "", ""][:2]
    if group in GROUPS:
        return f"sds {group} {command}" if command in GROUPS[group][1] else f"sds {group}"
    return f"sds {group}" if group in COMMANDS else "sds"


def _is_of_full_disk(error: BaseException | None) -> bool:
    """Tell whether an error came of a full disk, whatever it was reported as."""
    seen = set[int]()
    while error is not None and id(error) not in seen:  # causes may go round: an error that was kept and raised again
        seen.add(id(error))
        if isinstance(error, OSError) and MACHINE_MENDS.get(error.errno or 0) == _NO_ROOM:
            return True
        if getattr(error, "sqlite_errorcode", None) in _FULL_DATABASE:
            return True
        error = error.__cause__
    return False


def _mend(error: SdsError, named: str) -> str:
    """Return the hint for an error that has none of its own; "" where there is none. `named`: the command that was typed."""
    if isinstance(error, EventError) and not error.dfid:
        return A_GOOD_EVENT.format(named)
    if isinstance(error, WorldError):
        if isinstance(error.__cause__, OSError) and (mend := MACHINE_MENDS.get(error.__cause__.errno or 0)):
            return mend
        return next(mend for kind, mend in WORLD_MENDS.items() if isinstance(error, kind))
    if isinstance(error.__cause__, OSError):
        return _PATH_MENDS.get(error.__cause__.errno or 0, "check the path")
    if isinstance(error, ContractError):
        return "mend the file there, or name another"
    typed = isinstance(error, UsageError) and not isinstance(error, ErasedError | TransitionError)
    return f"{named} --help" if typed else ""


def _refused(error: OSError | UnicodeError | MemoryError) -> SdsError:
    """Return an error of the operating system as one of ours: what was refused, where, and a hint."""
    if isinstance(error, MemoryError):
        error = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    if not isinstance(error, OSError) or error.errno is None:
        return SdsError(f"the operating system refused: {error}")
    where = f"`{os.fsdecode(error.filename)}`: " if isinstance(error.filename, str | bytes) else ""
    return SdsError(f"the operating system refused: {where}{cause_of(error)}", hint=MACHINE_MENDS.get(error.errno, ""))


def _unforeseen(error: Exception) -> SdsError:
    """Return an unforeseen exception as one of ours, with its place: a record was altered, or this program has a fault."""
    if isinstance(error, ImportError) and (name := missing_package(error)):
        return SdsError(
            f"the package `{name}` is not installed", hint="install this program again, with all that it needs"
        )
    what = f"{type(error).__name__} at {place_of(error)}: {one_line(in_words(error), 200)}"
    hint = "run sds ledger verify; if the record has no fault, report this with the output under SDS_TRACEBACK=1"
    return SdsError(f"the command failed: {what}", hint=hint)


def _refuse_empty(args: list[str]) -> None:
    """Raise UsageError for an empty argument, as from a variable that is not set: as a path it would be this folder."""
    for before, each in zip(["sds", *args], args, strict=False):
        if not each or (each.startswith("--") and each.find("=") == len(each) - 1):
            named = each.removesuffix("=") or before
            raise UsageError(f"the value after `{named}` is empty", hint="check that the shell variable in it is set")


def _reader_gone() -> int:
    """Return 0: that the reader of our output, such as `head`, has ended is no failure."""
    _forget_output()
    return 0


def _forget_output() -> None:
    """Discard buffered output that could not be written: Python would try again at exit, and complain."""
    with suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say_usage(error: Any, named: str, args: list[str]) -> int:
    """Print a mistake in the words typed and where help is, or a group's help; return the exit code. `named`: the command."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        message = " ".join(error.format_message().replace("Value error, ", "").split())
        where = error.ctx.command_path if getattr(error, "ctx", None) else named
        mend = _RIGHTS if message.endswith("is not readable.") else f"{where} --help"
        if "unexpected extra argument" in message:
            from sds.cli.hints import with_gate_option  # noqa: PLC0415

            mend = with_gate_option(app, args) or mend
        _say(UsageError(message, hint=mend))
    return int(error.exit_code)


def _say(error: SdsError) -> int:
    """Print an error with its hint, where it has one, and its dfid; return the exit code.

    The code is the same where the output cannot be written.
    """
    said = {"error:": error, "mend: ": error.hint, "dfid: ": error.dfid}
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    with suppress(OSError, SystemExit):  # rich exits where its output's reader is gone
        for what, text in said.items():
            if text:
                console.print(f"{what} {without_password(plain(text))}")
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_WORLD


if __name__ == "__main__":
    main()

"""The command line. A mistake of yours exits with 2, a failure of the world with 1; neither shows a traceback."""

from __future__ import annotations

import os
import sys

import typer
from rich.console import Console

from sds import __version__
from sds.cli import agents, bench, context, contracts, decide, doctor, escalations, models, record, replay, run
from sds.kernel.errors import SdsError, UsageError

EXIT_WORLD, EXIT_USAGE = 1, 2

app = typer.Typer(
    name="sds",
    help="A local model decides, and cannot step outside its authority.\n\nExample: sds run refund --limit 20",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
run.add_to(app)
decide.add_to(app)
record.add_to(app)
replay.add_to(app)
agents.add_to(app)
escalations.add_to(app)
context.add_to(app)
contracts.add_to(app)
doctor.add_to(app)
models.add_to(app)
bench.add_to(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_show_version, is_eager=True),
) -> None:
    """Options before any command."""


def main() -> None:
    """Run the command line; the process's exit code tells whose fault a failure was."""
    try:
        app()
    except SdsError as error:
        sys.exit(_say(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again at exit
        sys.exit(0)
    except (OSError, UnicodeError) as error:
        sys.exit(_say(SdsError(f"the machine refused: {error}")))
    except KeyboardInterrupt:
        sys.exit(130)


def _say(error: SdsError) -> int:
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    console.print(f"error: {error}")
    if error.hint:
        console.print(f"mend:  {error.hint}")
    if error.dfid:
        console.print(f"dfid:  {error.dfid}")
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_WORLD


if __name__ == "__main__":
    main()

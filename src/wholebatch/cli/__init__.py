"""The command line: one module per command, loaded when it is called.

Exit codes: 0 done, 1 the answer is no, 2 bad usage or input, 3 failure, 130 interrupted. Errors are one line on
standard error; `--debug` shows where they come from.
"""

import importlib
import json
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import click

from .. import __version__
from .._errors import WholeBatchError

COMMANDS = {
    "train": "train a language model, from data to report",
    "check": "say whether a split is exact on a model, and why not",
    "plan": "say which micro-batch fits a memory budget",
    "bench": "measure against the plain loop and against peers",
}

DONE, NO, BAD_USAGE, FAILURE, INTERRUPTED = 0, 1, 2, 3, 130


class Command(click.Command):
    """A command that knows `--json` and `--debug`. Its function returns what is to be said and the exit code.

    Args:
        name: the command's.
        example: a command line that works, shown by `--help`.
        options: click's.
    """

    def __init__(self, name: str, *, example: str, **options: Any) -> None:
        super().__init__(name, epilog=f"Example: {example}", context_settings={"max_content_width": 100}, **options)
        self.params += [
            click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object on standard output."),
            click.Option(["--debug"], is_flag=True, expose_value=False, help="Show a traceback with an error."),
        ]


class _Commands(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f".{name}", __name__).command
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


_commands = _Commands("wholebatch", help="The gradient of the whole batch, on the memory of a micro-batch.")
_commands.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, help="Show a traceback."))
click.version_option(__version__, prog_name="wholebatch")(_commands)


def run(arguments: list[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = _commands.main(arguments, prog_name="wholebatch", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return BAD_USAGE
    except click.ClickException as error:
        return _failed(error.format_message(), BAD_USAGE, arguments)
    except (click.Abort, KeyboardInterrupt):
        return _failed("interrupted", INTERRUPTED, arguments)
    except WholeBatchError as error:
        return _failed(str(error), BAD_USAGE if isinstance(error, ValueError) else FAILURE, arguments)
    except Exception as error:
        return _failed(f"{type(error).__name__}: {error}", FAILURE, arguments)
    return code if isinstance(code, int) else DONE


def say(text: str, as_json: bool, data: Mapping[str, Any]) -> None:
    """Print for a person, or for a program."""
    click.echo(json.dumps(data) if as_json else text)


def _failed(message: str, code: int, arguments: list[str]) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    click.echo(f"wholebatch: {' '.join(message.split())}", err=True)
    return code

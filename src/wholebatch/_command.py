"""The command `wholebatch`, also where what it needs is not installed."""

import sys


def main(arguments: list[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        arguments: without the program's name; those of the process if None.
    """
    try:
        import click  # noqa: F401
    except ImportError:
        print('wholebatch: the command line needs more: pip install "wholebatch[cli]"', file=sys.stderr)
        return 2
    from .cli import run

    return run(arguments)

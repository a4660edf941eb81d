"""`python -m wholebatch.recipes` lists the recipes; with a name it runs one.

The options of a recipe are the arguments of its `main`, which returns whether the results agree. Exit codes are those
of `wholebatch`: 0 done, 1 they do not agree, 2 bad usage or input, 3 failure, 130 interrupted.
"""

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence

from .. import WholeBatchError
from . import RECIPES

PROGRAM = "python -m wholebatch.recipes"
DONE, NO, BAD_USAGE, FAILURE, INTERRUPTED = 0, 1, 2, 3, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        arguments: without the program's name; those of the process if None.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_listing())
        return DONE
    name, *options = arguments
    name = name.replace("-", "_")
    if name not in RECIPES:
        return _failed(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}", BAD_USAGE)
    try:
        recipe = importlib.import_module(f".{name}", __package__).main
    except ModuleNotFoundError as error:
        return _failed(f'{name} needs {error.name}: pip install "wholebatch[all]"', BAD_USAGE)
    try:
        return DONE if recipe(**vars(_parser(name, recipe).parse_args(options))) else NO
    except WholeBatchError as error:
        return _failed(str(error), BAD_USAGE if isinstance(error, ValueError) else FAILURE)
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED)
    except Exception as error:
        return _failed(f"{type(error).__name__}: {error}", FAILURE)


def _listing() -> str:
    width = max(map(len, RECIPES))
    lines = [f"  {name:{width}}   {shows}" for name, shows in RECIPES.items()]
    return "\n".join(["Recipes, each beside plain full batches:", "", *lines, "", f"{PROGRAM} NAME [--help]"])


def _parser(name: str, recipe: Callable[..., bool]) -> argparse.ArgumentParser:
    """One option for each argument, with its line of the docstring."""
    text = inspect.getdoc(recipe) or ""
    parser = argparse.ArgumentParser(f"{PROGRAM} {name}", description=text.partition("\n")[0])
    for option in inspect.signature(recipe).parameters.values():
        described = re.search(rf"^ +{option.name}: (.*)\.$", text, re.MULTILINE)
        parser.add_argument(
            f"--{option.name.replace('_', '-')}",
            type=type(option.default),
            default=option.default,
            metavar=type(option.default).__name__.upper(),
            help=f"{described[1] if described else option.name} (%(default)s)",
        )
    return parser


def _failed(message: str, code: int) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

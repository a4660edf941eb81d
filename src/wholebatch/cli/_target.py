"""What a command is to work on: a function of the user's, named on the command line."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from .._errors import OptionError, OptionTypeError


class TargetError(OptionError):
    """A target names no function, or one that returns something else than is needed."""


def load(target: str) -> tuple[Any, ...]:
    """What the function that `module:factory` or `file.py:factory` names returns: what the command's function takes.

    Args:
        target: the module or file, a colon and the function's name. The current folder is on the path.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise TargetError(f"TARGET must be module:factory or file.py:factory, got {target!r}")
    module = _module(place)
    factory: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(factory):
        raise TargetError(f"{place} has no function {name!r}")
    returned = factory()
    if not isinstance(returned, tuple | list) or len(returned) < 3:
        raise TargetError(
            f"{target} must return (model, loss_fn, batch) for torch or (fun, params, *batch) for JAX, got "
            f"{type(returned).__name__}"
        )
    return tuple(returned)


def front_end(given: tuple[Any, ...]) -> ModuleType:
    """The front end that what a target returned is for: JAX takes a function first, torch a model."""
    function_first = callable(given[0]) and not _is_torch_module(given[0])
    return importlib.import_module("wholebatch.jax" if function_first else "wholebatch.torch")


def _is_torch_module(given: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.nn.Module)


def _module(place: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name and place.startswith(error.name):
                raise TargetError(f"there is no module {place!r} to import: {error}") from error
            raise
    path = Path(place)
    if not path.is_file():
        raise TargetError(f"there is no file {place}")
    sys.path.insert(0, str(path.resolve().parent))  # its own imports work as if it were run
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OptionTypeError(f"{place} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module

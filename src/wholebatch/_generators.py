"""The random generators of Python and NumPy: those of the modules, and those that a function keeps to itself."""

import functools
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

FAR = 50_000
"""How many objects are looked at for generators."""


_HOLDS_NOTHING = (str, bytes, int, float, type, ModuleType, type(None))


class PythonGenerators:
    """As they were when this was made.

    Args:
        kept: generators besides those of the modules.
    """

    def __init__(self, kept: Iterable[Any] = ()) -> None:
        numpy = sys.modules.get("numpy")
        self._all = [random, *([] if numpy is None else [numpy.random]), *kept]
        self._states = [_state(generator) for generator in self._all]
        self._before = self.now()

    def now(self) -> str:
        """Where they are, to be compared."""
        return repr([_state(generator) for generator in self._all])

    def have_moved(self) -> bool:
        """Whether anybody has drawn from them since."""
        return self.now() != self._before

    def restore(self) -> None:
        """Put them back."""
        for generator, state in zip(self._all, self._states, strict=True):
            if hasattr(generator, "setstate"):
                generator.setstate(state)
            elif hasattr(generator, "set_state"):
                generator.set_state(state)
            else:
                generator.bit_generator.state = state


def kept_generators(*holders: Any) -> list[Any]:
    """Those that functions and objects reach: closures, attributes, containers, methods, and the
    globals that functions name.

    >>> generator = random.Random(0)
    >>> kept_generators(lambda: [generator.random()]) == [generator]
    True
    """
    found: list[Any] = []
    waiting, seen = deque(holders), {id(holder): holder for holder in holders}
    while waiting and len(seen) < FAR:
        thing = waiting.popleft()
        try:
            if _is_generator(thing):
                found.append(thing)
                continue
            held = [inner for inner in _held_by(thing) if not isinstance(inner, _HOLDS_NOTHING)]
        except Exception:  # a proxy may refuse to be looked at
            continue
        new = {id(inner): inner for inner in held if id(inner) not in seen}
        seen |= new
        waiting += new.values()
    return found


def _held_by(thing: Any) -> Iterator[Any]:
    if isinstance(thing, FunctionType):
        yield from (cell.cell_contents for cell in thing.__closure__ or () if _is_filled(cell))
        yield from (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())
        yield from (thing.__globals__[name] for name in _names(thing.__code__) if name in thing.__globals__)
    elif isinstance(thing, MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, list | tuple | set | frozenset | deque):
        yield from thing
    elif isinstance(attributes := getattr(thing, "__dict__", None), dict):
        yield from attributes.values()
        yield from (method for method in vars(type(thing)).values() if isinstance(method, FunctionType))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_generator(thing: Any) -> bool:
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    of_python = isinstance(thing, random.Random) and not isinstance(thing, random.SystemRandom)
    return of_python or isinstance(thing, of_numpy)


def _state(generator: Any) -> Any:
    if hasattr(generator, "getstate"):
        return generator.getstate()
    return generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state

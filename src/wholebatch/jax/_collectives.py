"""What a compiled program sends: its collectives by kind, inside and outside loops.

Read from the program's text, from the entry on: whatever a loop's body or condition holds or calls is inside.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from .._errors import OptionTypeError

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_OPERATION = re.compile(r" = .*? (?P<operation>[a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|(?:true|false)_computation)=%?([\w.\-]+)")
_CALLED_SEVERAL = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")


class Collectives(NamedTuple):
    """How many collectives of each kind a program has; a kind that it does not have counts 0.

    A collective of many arrays is one, as is one that is split into a start and an end.

    Args:
        inside: those in loops, which run once for every round.
        outside: those that run once.

    >>> Collectives(Counter(), Counter({"all-reduce": 1})).outside["all-gather"]
    0
    """

    inside: Counter[str]
    outside: Counter[str]

    @property
    def total(self) -> Counter[str]:
        """Both together."""
        return self.inside + self.outside


def collectives(compiled: Any) -> Collectives:
    """Count what a compiled program sends between devices.

    Args:
        compiled: a program, such as `jax.jit(step).lower(params, x, y).compile()`.

    >>> import jax
    >>> program = jax.jit(lambda x: x + 1).lower(1.0).compile()
    >>> collectives(program).total["all-reduce"]
    0
    """
    text = compiled.as_text() if hasattr(compiled, "as_text") else None
    if not isinstance(text, str) or not text.startswith("HloModule"):
        raise OptionTypeError(
            f"compiled must be a compiled program, jax.jit(fun).lower(...).compile(), got {type(compiled).__name__}"
        )
    computations, entry = _computations(text)
    found = Collectives(Counter(), Counter())

    def count(computation: str, in_loop: bool) -> None:
        for line in computations[computation]:
            operation = _operation(line)
            if operation.removesuffix("-start") in KINDS:
                (found.inside if in_loop else found.outside)[operation.removesuffix("-start")] += 1
            for called in _called(line):
                count(called, in_loop or operation == "while")

    count(entry, False)
    return found


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation by its name, and the name of the one that is the program."""
    computations: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            name = start["name"]
            computations[name] = []
            entry = name if start["entry"] else entry
        elif name:
            computations[name].append(line)
    return computations, entry


def _operation(line: str) -> str:
    found = _OPERATION.search(line)
    return found["operation"] if found else ""


def _called(line: str) -> Iterator[str]:
    yield from _CALLED.findall(line)
    for several in _CALLED_SEVERAL.findall(line):
        yield from re.findall(r"[\w.\-]+", several)

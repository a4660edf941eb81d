"""What a step needs, and which micro-batch a memory budget allows.

    micro_batch_size = max { m : peak(m) <= memory }

Where the peak comes from is each front end's business; what is said about it is not.
"""

import math
import operator
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ._errors import BudgetError, OptionError, OptionTypeError
from ._plan import positive_integer

_UNITS: dict[str, int] = {"B": 1} | {
    f"{prefix}{unit}": base ** (power + 1)
    for unit, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT")
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True, slots=True)
class Plan:
    """Which micro-batch fits, and what its step needs. All sizes are in bytes.

    Args:
        micro_batch_size: the largest that fits.
        num_micro_batches: how many pieces of at most that many rows the batch has.
        predicted_peak: the most memory that a step with it holds, `peak(micro_batch_size)`.
        memory: the budget.
        rows: rows of the batch.
        parts: what the peak consists of: "parameters" (and buffers), "gradients", "optimizer" (its state),
            "activations_per_row" and "fixed" (the batch, temporaries and all else that does not grow with the piece).
            They add up to it, but for a batch in one piece: its gradients come as its activations go.
        curve: the peak by micro-batch size, for some sizes from the smallest on; the last is the whole batch in one
            piece.
        remarks: what the numbers take for granted.
    """

    micro_batch_size: int
    num_micro_batches: int
    predicted_peak: int
    memory: int
    rows: int
    parts: Mapping[str, int]
    curve: Mapping[int, int]
    remarks: tuple[str, ...] = ()

    def peak(self, micro_batch_size: int) -> int:
        """The bytes that a step holds at most whose pieces have that many rows, interpolated between known sizes.

        Args:
            micro_batch_size: rows of a piece; from the batch's rows on it is one piece.
        """
        size = positive_integer("micro_batch_size", micro_batch_size)
        return self.curve[self.rows] if size >= self.rows else interpolated(self.curve, self.rows, size)

    def as_json(self) -> dict[str, Any]:
        """The plan for programs."""
        names = ("micro_batch_size", "num_micro_batches", "predicted_peak", "memory", "rows")
        return {name: getattr(self, name) for name in names} | {
            "parts": dict(self.parts),
            "curve": {str(size): peak for size, peak in self.curve.items()},
            "remarks": list(self.remarks),
        }

    def plot(self, path: str) -> None:
        """Draw the peak by micro-batch size, with the budget.

        Args:
            path: the picture's file; its ending says the format, such as ".png" or ".svg".
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise OptionError('a picture needs more: pip install "wholebatch[plot]"') from error
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        sizes, gib = list(self.curve), 2**30
        axes.plot(sizes, [peak / gib for peak in self.curve.values()], marker=".", label="predicted peak")
        axes.axhline(self.memory / gib, linestyle="--", color="tab:red", label="memory")
        axes.plot([self.micro_batch_size], [self.predicted_peak / gib], "o", color="tab:green", label="plan")
        axes.set(xlabel="micro-batch size", ylabel="GiB", ylim=(0, None))
        axes.legend()
        try:
            figure.savefig(path)
        except ValueError as error:  # an ending that it does not know
            raise OptionError(f"no picture can be written to {path}: {error}") from error

    def __str__(self) -> str:
        def row(name: str, size: int, remark: str = "") -> str:
            return f"  {name:<14}{in_units(size):>11}  {remark}".rstrip()

        per_row, rows = self.parts["activations_per_row"], min(self.micro_batch_size, self.rows)
        pieces = "one piece" if rows == self.rows else f"{self.num_micro_batches} pieces"
        lines = [
            f"micro_batch_size={self.micro_batch_size}: {self.rows} rows in {pieces}, "
            f"{in_units(self.predicted_peak)} of {in_units(self.memory)}",
            "",
            row("parameters", self.parts["parameters"]),
            row("gradients", self.parts["gradients"]),
            row("optimizer", self.parts["optimizer"]),
            row("activations", per_row * rows, f"{rows} rows of {in_units(per_row)}"),
            row("fixed", self.parts["fixed"]),
            "",
            "micro-batch         peak",
            *(
                f"{size:>11}{in_units(self.peak(size)):>13}{'' if self.peak(size) <= self.memory else '  does not fit'}"
                for size in self._sizes_to_show()
            ),
        ]
        return "\n".join([*lines, *([""] if self.remarks else []), *self.remarks])

    def _sizes_to_show(self) -> list[int]:
        least = min(self.curve)  # which all sizes are multiples of
        doubling = [least * 2**power for power in range(self.rows.bit_length())]
        return sorted({*(size for size in doubling if size < self.rows), self.micro_batch_size, self.rows})


def fitted(
    chosen: int,
    peak: Callable[[int], int],
    parts: Callable[[int, int], Mapping[str, int]],
    *,
    rows: int,
    memory: int,
    sizes: Callable[[int], Mapping[int, int]],
    remarks: tuple[str, ...] = (),
) -> Plan:
    """The plan for the micro-batch that was chosen.

    Args:
        chosen: the largest that fits.
        peak: the bytes that a step holds whose pieces have that many rows; the whole batch's rows mean one piece.
        parts: what the peak consists of, by size and peak.
        rows: rows of the batch.
        memory: the budget.
        sizes: the peaks of the sizes that are shown, when the one that was chosen is known.
        remarks: what the numbers take for granted.
    """
    predicted = peak(chosen)
    return Plan(
        micro_batch_size=chosen,
        num_micro_batches=-(-rows // chosen),
        predicted_peak=predicted,
        memory=memory,
        rows=rows,
        parts=parts(chosen, predicted),
        curve=dict(sorted(sizes(chosen).items())),
        remarks=remarks,
    )


def largest_that_fits(
    peak: Callable[[int], int], sizes: Sequence[int], memory: int, *, tries: int | None = None
) -> int:
    """The largest of some sizes whose peak is within the memory; asks for few peaks, as each may take a compilation.

    Args:
        peak: the bytes that a step holds whose pieces have that many rows.
        sizes: in ascending order; the last may be a case of its own, such as the whole batch in one piece.
        memory: the budget.
        tries: how many sizes between the first and the last may be asked for; the largest may then be missed.
    """
    least, most = sizes[0], sizes[-1]
    if peak(most) <= memory:
        return most
    if least == most or peak(least) > memory:
        needed = min(peak(least), peak(most))
        raise BudgetError(
            f"memory={in_units(memory)} is too little: a step needs {in_units(needed)} ({needed} bytes) even with "
            f"{'one row' if least == 1 else f'{least} rows, one for each device,'} at a time; give it more memory, or "
            "make the model or its rows smaller",
            needed,
        )
    fits, too_large = 0, len(sizes) - 1
    known = {least: peak(least)}
    guess = _where_a_line_meets(memory, (least, peak(least)), (most, peak(most)))
    while too_large - fits > 1 and (tries is None or len(known) <= tries):
        index = bisect_right(sizes, guess) - 1 if guess else (fits + too_large) // 2
        index = max(fits + 1, min(index, too_large - 1))
        size = sizes[index]
        known[size] = peak(size)
        if known[size] <= memory:
            fits = index
        else:
            too_large = index
        one = sizes[fits]
        other = sizes[too_large] if sizes[too_large] in known else max(size for size in known if size != one)
        slow = len(known) > 8
        guess = 0 if slow else _where_a_line_meets(memory, (one, known[one]), (other, known[other]))
    return sizes[fits]


def _where_a_line_meets(memory: int, one: tuple[int, int], other: tuple[int, int]) -> int:
    """The size at which the line through two known peaks takes the memory, since peaks are nearly lines; 0 if none."""
    (size, peak), (other_size, other_peak) = one, other
    slope = (other_peak - peak) / (other_size - size)
    return size + int((memory - peak) / slope) if slope > 0 else 0


def interpolated(curve: Mapping[int, int], rows: int, size: int) -> int:
    """The peak of several pieces, by the straight line between known sizes, and on beyond the last of them."""
    known = sorted(key for key in curve if key < rows)
    if len(known) < 2 or size in curve:
        return curve[size if size in curve else known[0]]
    lower, upper = next(((a, b) for a, b in pairwise(known) if a <= size <= b), tuple(known[-2:]))
    share = (size - lower) / (upper - lower)
    return round(curve[lower] + share * (curve[upper] - curve[lower]))


def bytes_of(memory: Any) -> int:
    """A memory size as bytes.

    >>> bytes_of("1.5 GiB"), bytes_of("800MB"), bytes_of(1024)
    (1610612736, 800000000, 1024)
    """
    if isinstance(memory, str):
        size = _from_text(memory)
    else:
        try:
            size = operator.index(memory)
        except TypeError:
            size = None
    if size is None or isinstance(memory, bool):
        raise OptionTypeError(
            f'memory must be a number of bytes or a size such as "24GiB", got {memory!r} of type '
            f"{type(memory).__name__}"
        )
    if size < 1:
        raise OptionError(f"memory must be at least one byte, got {memory!r}")
    return size


def _from_text(text: str) -> int:
    match = _SIZE.fullmatch(text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if match is None or (match[2] or "B").lower() not in units:
        raise OptionError(
            f'memory must be a number and a unit, such as "24GiB" or "800MB", got {text!r} (units: {", ".join(_UNITS)})'
        )
    return math.floor(float(match[1]) * units[(match[2] or "B").lower()])


def in_units(size: int) -> str:
    """Bytes for a person.

    >>> in_units(1610612736), in_units(512)
    ('1.50 GiB', '512 B')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            number = size / _UNITS[unit]
            return f"{number:.2f} {unit}" if number < 10 else f"{number:.1f} {unit}"
    return f"{size} B"

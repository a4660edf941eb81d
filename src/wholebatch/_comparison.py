"""What the ratio of two gradients tells about the loop that made one of them.

    a = k · b        one k for all parameters: a division too many or too few
    a_i = k_i · b_i  a k for each: some parameters take another way
    neither          no factor repairs it

k is the least-squares ratio <a, b> / <b, b>.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from ._errors import BatchError
from ._report import WIDTH, wrapped


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two gradients, side by side.

    Args:
        equal: whether they agree within `tolerance`.
        ratio: by what all of the second has to be multiplied to get the first; None if no such number exists.
        ratios: the same for each parameter by itself, by name; None where it is not proportional or zero.
        errors: the largest difference of each parameter, over the largest entry of what it should be.
        tolerance: how far they may differ by rounding.
        explanation: what the ratios tell.
    """

    equal: bool
    ratio: float | None
    ratios: dict[str, float | None]
    errors: dict[str, float]
    tolerance: float
    explanation: str

    @property
    def error(self) -> float:
        """The largest of all."""
        return max(self.errors.values(), default=0.0)

    def __str__(self) -> str:
        verdict = "equal" if self.equal else "NOT equal"
        lines = wrapped(f"{verdict}: {self.explanation}", WIDTH)
        if not self.equal:
            worst = sorted(self.errors, key=lambda name: -self.errors[name])[:8]
            width = max(9, *(len(name) for name in worst))
            lines += ["", f"{'parameter':<{width}}     ratio    error"]
            for name in worst:
                ratio = self.ratios[name]
                lines.append(f"{name:<{width}}  {'-' if ratio is None else f'{ratio:.5g}':>8}  {self.errors[name]:.1e}")
        return "\n".join(lines)


class Hints(NamedTuple):
    """What the caller knows of the loop; any of it may be None.

    Args:
        num_micro_batches: how many pieces this batch had.
        accumulation_steps: how many a full window has.
        world_size: the number of processes.
        rows: how many rows the batch had.
    """

    num_micro_batches: int | None = None
    accumulation_steps: int | None = None
    world_size: int | None = None
    rows: int | None = None

    def reasons(self) -> list[tuple[float, str]]:
        """Ratios that would be no surprise, and what each would mean."""
        pieces, window, world, rows = self
        found: list[tuple[float, str]] = []
        if pieces and window and pieces != window:
            found.append((pieces / window, f"a short window of {pieces} is divided by the {window} of a full one"))
            found.append((1 / window, f"a short window of {pieces} is divided by {pieces} and by {window}"))
        for count, things in ((pieces, "micro-batches"), (world, "processes"), (rows, "rows")):
            if count and count > 1:
                found.append((1 / count, f"divided twice by the number of {things}, {count}"))
                found.append((float(count), f"a sum over {count} {things} where their mean was meant"))
        if pieces and world and pieces * world > 1:
            found.append((1 / (pieces * world), f"divided once more by {pieces} micro-batches and {world} processes"))
            found.append((float(pieces * world), f"a sum over {pieces} micro-batches and {world} processes for a mean"))
        return found


def compare(pairs: Mapping[str, tuple[Any, Any]], tolerance: float, hints: Hints) -> Comparison:
    """Compare gradients, flat arrays of any framework in at least float64, by name.

    Args:
        pairs: of each parameter, what a loop gave and what it should be.
        tolerance: how far equal ones may differ, over the largest entry.
        hints: what is known of the loop.
    """
    if not pairs:
        raise BatchError("there are no gradients to compare")
    scale = max(_largest(b) for _, b in pairs.values())
    if not (0 < scale < math.inf):
        raise BatchError("what the gradients should be is zero everywhere, or not finite: there is nothing to compare")
    errors = {name: _largest(a - b) / scale for name, (a, b) in pairs.items()}
    noise = 16 * tolerance * scale
    ratios = {name: _ratio([pair], noise) for name, pair in pairs.items()}
    ratio = _ratio(list(pairs.values()), noise)
    equal = max(errors.values()) <= tolerance
    explanation = "they agree within rounding" if equal else _explained(pairs, ratio, ratios, noise, hints)
    return Comparison(equal, ratio, ratios, errors, tolerance, explanation)


def _explained(
    pairs: Mapping[str, tuple[Any, Any]],
    ratio: float | None,
    ratios: Mapping[str, float | None],
    noise: float,
    hints: Hints,
) -> str:
    broken = [name for name, (a, _) in pairs.items() if not math.isfinite(_largest(a))]
    if broken:
        return f"{_listed(broken)}: holds entries that are not finite"
    missing = [name for name, (a, b) in pairs.items() if not _largest(a) and _largest(b) > noise]
    if ratio:
        return f"all are {ratio:.5g} times what they should be: {_reason(ratio, hints)}"
    if missing:
        return f"{_listed(missing)}: no gradient, or zero, where there should be one"
    told = {name: one for name, one in ratios.items() if one is not None and _largest(pairs[name][1]) > noise}
    bent = [name for name in ratios if name not in told and _largest(pairs[name][0] - pairs[name][1]) > noise]
    if bent:
        return (
            f"{_listed(bent)}: not proportional to what it should be, so no factor repairs it. A mean of means weighs "
            "pieces alike that hold different counts; other rows, other random numbers or clipping by piece do it too"
        )
    groups: dict[str, list[str]] = {}
    for name, one in told.items():
        groups.setdefault(f"{one:.4g}", []).append(name)
    each = "; ".join(f"{one} times for {_listed(names)}" for one, names in groups.items())
    return (
        "each parameter is proportional to what it should be, with a ratio of its own: they take different ways, such "
        f"as terms with other denominators, weights counted twice, or clipping one by one ({each})"
    )


def _reason(ratio: float, hints: Hints) -> str:
    near = [why for value, why in hints.reasons() if math.isclose(ratio, value, rel_tol=1e-4)]
    if near:
        return near[0]
    if ratio < 0:
        return "the sign is wrong: a step uphill"
    if ratio >= 256 and math.isclose(2 ** round(math.log2(ratio)), ratio, rel_tol=1e-4):
        return "a power of two, like a loss scale that was not taken out"
    fraction = Fraction(ratio).limit_denominator(64)
    p, q = fraction.numerator, fraction.denominator
    if not p or not math.isclose(ratio, p / q, rel_tol=1e-4):
        return "one factor for all, such as a loss weight, a loss scale or clipping"
    if q == 1:
        return f"a sum over {p} pieces, processes or rows where their mean was meant"
    if p == 1:
        return f"divided by {q} once too often: twice by pieces or processes, or a short window by the full count"
    if p < q:
        return f"{p}/{q}: like a short window of {p} pieces that is divided by the {q} of a full one"
    return f"{p}/{q}: like {p} pieces or rows that are divided by {q}"


def _ratio(pairs: list[tuple[Any, Any]], noise: float) -> float | None:
    """The least-squares ratio, if it leaves no more than noise over."""
    length = sum(float((b * b).sum()) for _, b in pairs)
    if not length:
        return None
    ratio = sum(float((a * b).sum()) for a, b in pairs) / length
    left_over = max(_largest(a - ratio * b) for a, b in pairs)
    return ratio if left_over <= noise * max(1.0, abs(ratio)) else None


def _largest(entries: Any) -> float:
    if not len(entries):
        return 0.0
    found = float(abs(entries).max())
    return math.inf if math.isnan(found) else found


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

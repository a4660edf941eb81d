"""What `check` found."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Report:
    """Whether splitting a batch leaves its gradient as it was.

    Args:
        exact: whether every cut agreed with the whole batch within `tolerance`.
        error: the largest difference of any gradient entry over the model's largest gradient entry.
        tolerance: 1e-12 in float64; what rounding explains where the model computes in less.
        dtype: the least precise floating point type that took part, by name.
        parameters: the largest error of each parameter, by name, worst first.
        cuts: the largest error of each cut, by its number of pieces.
        rows: how many rows of the batch were used.
        failure: the error that a split ran into where the whole batch did not; its cut counts as infinitely off.
    """

    exact: bool
    error: float
    tolerance: float
    dtype: str
    parameters: dict[str, float]
    cuts: dict[int, float]
    rows: int
    failure: str | None = None

    @classmethod
    def of(
        cls, by_cut: dict[int, dict[str, float]], *, dtype: str, eps: float, rows: int, failure: str | None
    ) -> "Report":
        """The verdict on the errors of each parameter in each cut.

        Args:
            by_cut: errors over the model's largest gradient entry, by number of pieces and by parameter.
            dtype: the least precise floating point type that took part.
            eps: its distance from 1 to the next number.
            rows: how many rows were used.
            failure: what a split ran into.
        """
        names = next(iter(by_cut.values()))
        worst = {name: max(errors[name] for errors in by_cut.values()) for name in names}
        error, allowed = max(worst.values(), default=0.0), tolerance(eps, max(by_cut))
        return cls(
            exact=error <= allowed,
            error=error,
            tolerance=allowed,
            dtype=dtype,
            parameters=dict(sorted(worst.items(), key=lambda item: -item[1])),
            cuts={pieces: max(errors.values(), default=0.0) for pieces, errors in by_cut.items()},
            rows=rows,
            failure=failure,
        )

    def __str__(self) -> str:
        verdict = "exact" if self.exact else "NOT exact"
        lines = [
            f"{verdict}: the split gradient differs from the whole batch's by {self.error:.1e} of its largest",
            f"entry, where {self.tolerance:.1e} is allowed ({self.dtype}, {self.rows} rows)",
            "",
            "pieces    error",
            *(f"{pieces:>6}  {error:.1e}" for pieces, error in self.cuts.items()),
        ]
        if not self.exact:
            worst = list(self.parameters.items())[:5]
            width = max(len(name) for name, _ in worst)
            lines += ["", "worst parameters", *(f"  {name:<{width}}  {error:.1e}" for name, error in worst)]
        if self.failure:
            lines += ["", f"failed with {self.failure}"]
        return "\n".join(lines)


def tolerance(eps: float, pieces: int) -> float:
    """How far two ways of adding up the same `pieces` may lie apart, relative to the largest entry."""
    return 1e-12 if eps < 1e-15 else 8 * eps * math.sqrt(pieces)


def cuts_to_try(rows: int, pieces_of_size: int | None) -> list[int]:
    """Numbers of pieces that show what cutting does: two, three, one row each, and the user's own."""
    return sorted({min(pieces, rows) for pieces in (2, 3, rows, pieces_of_size or rows)})


def rows_to_use(rows: int, micro_batch_size: int | None) -> int:
    """A few: a prime number of them, so that pieces are ragged, and enough for the user's own size."""
    return min(rows, max(7, 2 * (micro_batch_size or 0) + 1))

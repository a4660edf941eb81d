"""What `check` found."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ._causes import MEANINGS, Cause
from ._diagnosis import Finding, Probe, diagnose
from ._sample import cuts_to_try

WIDTH = 80


@dataclass(frozen=True, slots=True)
class Report:
    """Whether splitting a batch leaves its gradient as it was, and if not, why.

    Args:
        exact: whether every cut agreed with the whole batch, within `tolerance` or what rounding explains.
        error: the largest difference of any gradient entry over the model's largest gradient entry.
        tolerance: 1e-12 in float64; what rounding explains where the model computes in less.
        dtype: the least precise floating point type that took part, by name.
        parameters: the largest error of each parameter, by name, worst first.
        cuts: the largest error of each cut, by its number of pieces.
        rows: how many rows of the batch were used.
        failure: the error that a split ran into where the whole batch did not; its cut counts as infinitely off.
        causes: why it is not exact, what explains most of the error first; "rounding" where that is all there is.
        remedy: what to do about the first of them, in one line.
        exact_without_randomness: where runs differ by chance, whether the split is exact with the same draw for
            every row; None where nothing is random, or numbers that Python or NumPy draws for each row hide it.
    """

    exact: bool
    error: float
    tolerance: float
    dtype: str
    parameters: dict[str, float]
    cuts: dict[int, float]
    rows: int
    failure: str | None = None
    causes: tuple[Cause, ...] = ()
    remedy: str | None = None
    exact_without_randomness: bool | None = None

    @classmethod
    def of(
        cls,
        by_cut: dict[int, dict[str, float]],
        *,
        dtype: str,
        eps: float,
        rows: int,
        failure: str | None,
        finding: Finding | None = None,
    ) -> "Report":
        """The verdict on the errors of each parameter in each cut.

        Args:
            by_cut: errors over the model's largest gradient entry, by number of pieces and by parameter.
            dtype: the least precise floating point type that took part.
            eps: its distance from 1 to the next number.
            rows: how many rows were used.
            failure: what a split ran into.
            finding: why the split is not exact; None if nothing was found, or nobody looked.
        """
        names = next(iter(by_cut.values()))
        worst = {name: max(errors[name] for errors in by_cut.values()) for name in names}
        error, allowed = largest_error(by_cut), tolerance(eps, max(by_cut))
        if finding is None and is_low(eps) and 0 < error <= allowed:
            finding = Finding(("rounding",))
        finding = finding or Finding(())
        return cls(
            exact=error <= allowed or finding.causes == ("rounding",),
            error=error,
            tolerance=allowed,
            dtype=dtype,
            parameters=dict(sorted(worst.items(), key=lambda item: -item[1])),
            cuts={pieces: max(errors.values(), default=0.0) for pieces, errors in by_cut.items()},
            rows=rows,
            failure=failure,
            causes=finding.causes,
            remedy=finding.remedy,
            exact_without_randomness=finding.exact_without_randomness,
        )

    @property
    def cause(self) -> Cause | None:
        """What explains most of the error; None if the split is exact, or nothing does."""
        return self.causes[0] if self.causes else None

    def as_json(self) -> dict[str, Any]:
        """The same as what JSON can hold, which knows no infinity: null stands for an error without bound."""
        data = {**asdict(self), "cause": self.cause, "error": _finite(self.error)}
        for table in ("parameters", "cuts"):
            data[table] = {key: _finite(error) for key, error in data[table].items()}
        return data

    def __str__(self) -> str:
        verdict = "exact" if self.exact else "NOT exact"
        lines = [
            *wrapped(
                f"{verdict}: the split gradient differs from the whole batch's by {self.error:.1e} of its largest "
                f"entry, where {self.tolerance:.1e} is allowed ({self.dtype}, {self.rows} rows)",
                WIDTH,
            ),
            *self._explanation(),
            "",
            "pieces    error",
            *(f"{pieces:>6}  {error:.1e}" for pieces, error in self.cuts.items()),
        ]
        if not self.exact:
            worst = list(self.parameters.items())[:5]
            width = max(len(_short(name)) for name, _ in worst)
            lines += ["", "worst parameters", *(f"  {_short(name):<{width}}  {error:.1e}" for name, error in worst)]
        if self.failure:
            lines += ["", *wrapped(f"failed with {self.failure}", WIDTH)]
        return "\n".join(lines)

    def _explanation(self) -> list[str]:
        if self.cause is None:
            return [] if self.exact else ["", "cause   none of those that are known"]
        told = [("cause", f"{self.cause}: {MEANINGS[self.cause].says}"), ("remedy", self.remedy or "")]
        told += [("also", f"{cause}: {MEANINGS[cause].says}") for cause in self.causes[1:]]
        if self.exact_without_randomness is not None:
            without = "exact" if self.exact_without_randomness else "not exact"
            told.append(("besides", f"with the same draw for every row the split is {without}"))
        lines = [""]
        for title, text in told:
            lines += wrapped(text, WIDTH, f"{title:<8}")
        return lines


def report_on(probe: Probe, cuts: Sequence[int]) -> Report:
    """The verdict on a loss, with the reason if its split is not exact.

    Args:
        probe: sees the loss.
        cuts: the numbers of pieces to try.
    """
    by_cut = probe.judge(cuts)
    return Report.of(
        by_cut,
        dtype=probe.dtype,
        eps=probe.eps,
        rows=probe.rows,
        failure=probe.failure,
        finding=None if probe.error <= probe.tolerance else diagnose(probe),
    )


def report_of_other_layout(layout: str, names: Iterable[str], rows: int, error: Exception) -> Report:
    """The verdict on a loss that fails already on a few "rows", as they are none.

    Args:
        layout: the one in which the split is exact, in words.
        names: of the parameters.
        rows: how many were tried.
        error: what the loss failed with.
    """
    return Report.of(
        dict.fromkeys(cuts_to_try(rows, None), dict.fromkeys(names, math.inf)),
        dtype="float64",
        eps=0.0,
        rows=rows,
        failure=f"a few rows of it: {type(error).__name__}: {error}",
        finding=Finding(("wrong-axis",), layout),
    )


def largest_error(by_cut: dict[int, dict[str, float]]) -> float:
    """Over all cuts and parameters."""
    return max((error for errors in by_cut.values() for error in errors.values()), default=0.0)


def is_low(eps: float) -> bool:
    """Whether that is less than float64's precision."""
    return eps > 1e-15


def tolerance(eps: float, pieces: int) -> float:
    """How far two ways of adding up the same `pieces` may lie apart, relative to the largest entry."""
    return 8 * eps * math.sqrt(pieces) if is_low(eps) else 1e-12


def wrapped(text: str, width: int, before: str = "") -> list[str]:
    """Lines of a terminal, aligned after what stands before the first; names are kept whole."""
    return textwrap.wrap(
        text, width, initial_indent=before, subsequent_indent=" " * len(before), break_on_hyphens=False
    )


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None


def _short(name: str) -> str:
    return name if len(name) <= 60 else f"{name[:28]}...{name[-29:]}"

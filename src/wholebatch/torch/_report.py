"""What `check` found."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Report:
    """Whether splitting a batch leaves its gradient as it was.

    Args:
        exact: whether every cut agreed with the whole batch within `tolerance`.
        error: the largest difference of any gradient entry over the model's largest gradient entry.
        tolerance: 1e-12 in float64; what rounding explains where the model computes in less.
        dtype: the least precise floating point type that took part.
        parameters: the largest error of each parameter, by name, worst first.
        cuts: the largest error of each cut, by its number of pieces.
        rows: how many rows of the batch were used.
        failure: the error that a split ran into where the whole batch did not; its cut counts as infinitely off.
    """

    exact: bool
    error: float
    tolerance: float
    dtype: torch.dtype
    parameters: dict[str, float]
    cuts: dict[int, float]
    rows: int
    failure: str | None = None

    def __str__(self) -> str:
        verdict = "exact" if self.exact else "NOT exact"
        dtype = str(self.dtype).removeprefix("torch.")
        lines = [
            f"{verdict}: the split gradient differs from the whole batch's by {self.error:.1e} of its largest",
            f"entry, where {self.tolerance:.1e} is allowed ({dtype}, {self.rows} rows)",
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

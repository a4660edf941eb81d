"""Whether two results that should be the same are."""

ALLOWED = {"float32": 1e-6, "float64": 1e-12}
"""By dtype: what adding in another order may come to in these small programs."""


def agree(what: str, difference: float, allowed: float) -> bool:
    """Say whether a difference is what rounding explains, and return it.

    >>> agree("the loss", 3e-8, allowed=1e-6)
    largest difference in the loss: 3.0e-08, 1e-06 is allowed: they agree
    True
    """
    agreed = difference <= allowed
    verdict = "they agree" if agreed else "they do NOT agree"
    print(f"largest difference in {what}: {difference:.1e}, {allowed:.0e} is allowed: {verdict}")
    return agreed


def steps_agree(before: float, pieces: str, accumulated: float, full: float) -> bool:
    """Say what error a step on pieces leaves beside one on the full batch, and whether they agree."""
    print(f"mean squared error before the step   {before:.7f}")
    print(f"after one on {pieces}   {accumulated:.7f}")
    print(f"after one on all rows at once   {full:.7f}")
    return agree("the error after it, over its size", abs(accumulated - full) / full, ALLOWED["float32"])

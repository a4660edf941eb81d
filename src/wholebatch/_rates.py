"""Learning rates for another batch size.

linear: B / B0      sqrt: √(B / B0)      none: 1
"""

import math

from ._errors import OptionError


def scale_of(rule: str, ratio: float) -> float:
    """What a learning rate is multiplied by where the batch is `ratio` times the one that it was chosen for."""
    scales = {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}
    if rule not in scales:
        raise OptionError(f'rule must be "linear", "sqrt" or "none", got {rule!r}')
    return scales[rule]

"""The gradient of the whole batch, on the memory of a micro-batch.

A batch is a sum; however it is cut, the gradient must not notice. This package holds the idea without a
framework; `wholebatch.torch` and `wholebatch.jax` are the front ends.
"""

from ._errors import (
    BatchError,
    BatchNormError,
    BudgetError,
    CountError,
    LossError,
    LossTypeError,
    NonFiniteError,
    OptionError,
    OptionTypeError,
    PlanError,
    RankError,
    WholeBatchError,
)
from ._mean import Mean, Sum

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "BatchNormError",
    "BudgetError",
    "CountError",
    "LossError",
    "LossTypeError",
    "Mean",
    "NonFiniteError",
    "OptionError",
    "OptionTypeError",
    "PlanError",
    "RankError",
    "Sum",
    "WholeBatchError",
    "__version__",
]

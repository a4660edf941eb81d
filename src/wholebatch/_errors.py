"""Every error raised on purpose, one class per cause.

Errors about what the caller gave are also `ValueError`, and `TypeError` where its type was wrong.
"""


class WholeBatchError(Exception):
    """Base of every error that wholebatch raises on purpose."""


class OptionError(WholeBatchError, ValueError):
    """An option has a value that cannot be used, such as `micro_batch_size=0`."""


class OptionTypeError(OptionError, TypeError):
    """An option has the wrong type, such as `micro_batch_size="8"`."""


class BatchError(WholeBatchError, ValueError):
    """The batch cannot be cut along its rows, or there is nothing in it."""


class LossError(WholeBatchError, ValueError):
    """What the loss function returned cannot be summed over the pieces of a batch."""


class LossTypeError(LossError, TypeError):
    """The loss function returned something that is not a loss."""


class CountError(LossError):
    """The counts that normalise a loss are negative, missing or contradict one another."""


class BatchNormError(WholeBatchError, ValueError):
    """A module normalises by statistics of the batch, which its pieces do not have."""


class NonFiniteError(WholeBatchError, ArithmeticError):
    """A loss, a count or the gradient norm is infinite or not a number."""


class RankError(WholeBatchError, RuntimeError):
    """A process failed in a batch that several share, so that all of them raise.

    Where it failed, the error that it met is the cause of this one.

    Args:
        message: what happened, and where.
        rank: the process that failed, the first of them if there were several; None where it cannot be told.
        out_of_memory: whether each process that failed ran out of memory, so that smaller pieces would help.
    """

    def __init__(self, message: str, *, rank: int | None = None, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.out_of_memory = out_of_memory


class BudgetError(WholeBatchError, ValueError):
    """Not even one row at a time fits the memory.

    Args:
        message: what is said.
        needed: the bytes that a step with one row at a time takes.
    """

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


class PlanError(WholeBatchError):
    """A step cannot be followed without running it."""

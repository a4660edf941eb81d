"""Learning rates for another batch size.

    linear: lr · B / B0      sqrt: lr · √(B / B0)

where the rate was chosen for B0 rows; with a warm-up counted in optimizer steps.
"""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from .._plan import positive_integer
from .._rates import scale_of


def scale_lr(
    optimizer: Optimizer, *, batch_size: int, base_batch_size: int, rule: str = "linear", warmup_steps: int = 0
) -> LinearLR:
    """Scale an optimizer's learning rates from the batch size that they were chosen for, and warm them up.

    Args:
        optimizer: its learning rates are those for `base_batch_size`.
        batch_size: rows of the whole batch, whatever the micro-batch.
        base_batch_size: rows of the batch that the learning rates were chosen for.
        rule: "linear" (plain SGD), "sqrt" (Adam and its kin) or "none".
        warmup_steps: the rate grows evenly over that many optimizer steps.

    Returns:
        The warm-up, a scheduler to be stepped once per optimizer step. The learning rates themselves are scaled in
        the optimizer, so a decay made afterwards starts from them: step both, as `scheduler=[warm_up, decay]`.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    >>> scheduler = scale_lr(optimizer, batch_size=1024, base_batch_size=256, warmup_steps=4)
    >>> scheduler.get_last_lr()
    [0.1]
    """
    ratio = positive_integer("batch_size", batch_size) / positive_integer("base_batch_size", base_batch_size)
    scale = scale_of(rule, ratio)
    if warmup_steps:
        positive_integer("warmup_steps", warmup_steps)
    for group in optimizer.param_groups:
        for rate in ("lr", "initial_lr"):
            if rate in group:
                group[rate] = group[rate] * scale
    return LinearLR(optimizer, start_factor=1 / (warmup_steps or 1), total_iters=max(1, (warmup_steps or 1) - 1))

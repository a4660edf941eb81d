"""The whole batch's gradient in PyTorch.

>>> import torch
>>> from wholebatch.torch import backward
>>> model = torch.nn.Linear(4, 1)
>>> x, y = torch.randn(50, 4), torch.randn(50, 1)
>>> loss = backward(model, lambda b: (model(b[0]) - b[1]).square().mean(), (x, y), micro_batch_size=16).loss
"""

from .._budget import Plan
from .._comparison import Comparison
from .._report import Report
from . import _pytree
from ._accumulator import Accumulator, backward
from ._check import check
from ._compare import compare_gradients
from ._evaluate import evaluate
from ._plan import plan
from ._rates import scale_lr
from ._result import Result
from ._tokens import token_mean
from ._train import History, train
from ._window import Window, windows

__all__ = [
    "Accumulator",
    "Comparison",
    "History",
    "Plan",
    "Report",
    "Result",
    "Window",
    "backward",
    "check",
    "compare_gradients",
    "evaluate",
    "plan",
    "scale_lr",
    "token_mean",
    "train",
    "windows",
]

_pytree.register()

"""The whole batch's gradient in PyTorch.

>>> import torch
>>> from wholebatch.torch import backward
>>> model = torch.nn.Linear(4, 1)
>>> x, y = torch.randn(50, 4), torch.randn(50, 1)
>>> loss = backward(model, lambda b: (model(b[0]) - b[1]).square().mean(), (x, y), micro_batch_size=16).loss
"""

from . import _pytree
from ._accumulator import Accumulator, backward
from ._check import check
from ._report import Report
from ._result import Result
from ._tokens import token_mean
from ._window import Window, windows

__all__ = ["Accumulator", "Report", "Result", "Window", "backward", "check", "token_mean", "windows"]

_pytree.register()

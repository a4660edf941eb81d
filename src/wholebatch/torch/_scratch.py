"""Scratch: what kernels on the host take for themselves while they run, which no tensor shows.

Of all that a training step uses, convolutions alone take enough to matter. oneDNN copies what it is given into its own
layout, in blocks of channels, and PyTorch's own kernel unfolds the input into columns:

    forward       x' + w' + y',  then y' + y
    backward      g' + w' + dx',  then dx + g' + x' + dw',  then dx + dw + dw'
    in columns    n · |kernel| · |positions|
"""

from typing import Any

import torch
from torch import Tensor

_BLOCK = 16
_conv, _conv_backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default


def scratch(func: Any, args: tuple[Any, ...], returned: Any) -> list[int]:
    """The bytes that a kernel holds at the moments when it holds most, its outputs included."""
    if func is _conv:
        x, weight, bias = args[:3]
        return _forward(_backend(x, weight, bias, args[3:9], None), x, weight, returned)
    if func is _conv_backward:
        g, x, weight, bias_sizes = args[:4]
        outputs = [0 if output is None else output.nbytes for output in returned]
        return _backward(_backend(x, weight, None, args[4:10], bias_sizes), g, x, weight, outputs)
    return []


def _backend(x: Tensor, weight: Tensor, bias: Tensor | None, how: Any, bias_sizes: Any) -> str:
    backend = torch._C._select_conv_backend(x, weight, bias, *how, bias_sizes=bias_sizes)
    return str(backend.name)


def _forward(backend: str, x: Tensor, weight: Tensor, y: Tensor) -> list[int]:
    if backend == "Mkldnn":
        return [_in_blocks(x) + weight.nbytes + y.nbytes, 2 * y.nbytes]
    return [_columns(weight, y) + y.nbytes] if backend.startswith("Slow2d") else []


def _backward(backend: str, g: Tensor, x: Tensor, weight: Tensor, outputs: list[int]) -> list[int]:
    of_x, of_weight, _ = outputs
    if backend == "Mkldnn":
        padded = _padded(x.shape[1]) / x.shape[1]
        return [
            g.nbytes + int(padded * (weight.nbytes + of_x)) if of_x else 0,
            of_x + g.nbytes + _in_blocks(x) + of_weight,
            of_x + 2 * of_weight,
        ]
    return [_columns(weight, g) + sum(outputs)] if backend.startswith("Slow2d") else []


def _columns(weight: Tensor, y: Tensor) -> int:
    """Every position of the output holds what the kernel sees there, unless that is one pixel."""
    seen = weight[0].numel()
    return 0 if seen == weight.shape[1] else y.numel() // y.shape[1] * seen * weight.itemsize


def _in_blocks(x: Tensor) -> int:
    """An image of few channels is read as it is."""
    return x.nbytes if x.shape[1] % 8 == 0 else 0


def _padded(channels: int) -> int:
    return channels if channels % 8 == 0 else -(-channels // _BLOCK) * _BLOCK

"""Compare: the gradients of any loop with what they should be."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._comparison import Comparison, Hints, compare
from .._errors import OptionError, OptionTypeError
from .._report import tolerance

Gradients = nn.Module | Mapping[str, Any] | Iterable[Any]


@torch.no_grad()
def compare_gradients(
    a: Gradients,
    b: Gradients,
    names: Sequence[str] | None = None,
    *,
    num_micro_batches: int | None = None,
    accumulation_steps: int | None = None,
    world_size: int | None = None,
    rows: int | None = None,
) -> Comparison:
    """What the ratios of two gradients tell about the loop that made the first.

    Args:
        a: what the loop gave: gradients in a mapping or a sequence, None for one that is not there; or a module, for
            the `.grad` of its parameters.
        b: what they should be, in the same form.
        names: of sequences' entries.
        num_micro_batches: how many pieces this batch had, if that is known; so that a reason can be named.
        accumulation_steps: how many pieces a full window has.
        world_size: the number of processes.
        rows: how many rows the batch had.

    >>> right = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    >>> halved = [gradient / 2 for gradient in right]
    >>> print(compare_gradients(halved, right, num_micro_batches=2, accumulation_steps=4).explanation)
    all are 0.5 times what they should be: a short window of 2 is divided by the 4 of a full one
    """
    loop, meant = _named("a", a, names), _named("b", b, names)
    if loop.keys() != meant.keys():
        raise OptionError(f"a and b hold different gradients: {sorted(loop.keys() ^ meant.keys())[:3]} is in one only")
    pairs, eps = {}, torch.finfo(torch.float64).eps
    for name in loop:
        one, other = loop[name], meant[name]
        given = [tensor for tensor in (one, other) if tensor is not None]
        if not given:
            continue
        if one is not None and other is not None and one.shape != other.shape:
            raise OptionError(f"{name} has shape {tuple(one.shape)} in a and {tuple(other.shape)} in b")
        eps = max(eps, *(torch.finfo(tensor.dtype).eps for tensor in given))
        pairs[name] = (_flat(one, given[0]), _flat(other, given[0]))
    hints = Hints(num_micro_batches, accumulation_steps, world_size, rows)
    return compare(pairs, min(0.05, tolerance(eps, num_micro_batches or 16)), hints)


def _named(what: str, given: Any, names: Sequence[str] | None) -> dict[str, Tensor | None]:
    if isinstance(given, nn.Module):
        return {name: parameter.grad for name, parameter in given.named_parameters()}
    if isinstance(given, Tensor):
        given = [given]
    if isinstance(given, Mapping):
        named = dict(given)
    elif isinstance(given, Iterable):
        several = list(given)
        if names is not None and len(names) != len(several):
            raise OptionError(f"{what} holds {len(several)} gradients, but {len(names)} names were given")
        named = dict(zip(names if names is not None else map(str, range(len(several))), several, strict=True))
    else:
        raise OptionTypeError(
            f"{what} must be gradients in a mapping or a sequence, or a module, got {type(given).__name__}"
        )
    for name, tensor in named.items():
        if tensor is not None and not (
            isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex())
        ):
            raise OptionTypeError(
                f"{what}[{name!r}] must be a floating point tensor or None, got {type(tensor).__name__}"
            )
    return named


def _flat(gradient: Tensor | None, like: Tensor) -> Tensor:
    """On the host in float64, zeros where there is none."""
    gradient = torch.zeros_like(like) if gradient is None else gradient
    dense = gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return real.to("cpu", torch.float64).reshape(-1)

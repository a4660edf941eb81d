"""What a message holds of a batch: totals and counts as numbers, and the sums of what several processes told."""

import math
from functools import reduce
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from .._errors import BatchNormError, LossError
from .._terms import Per
from ._host import read_once
from ._loss import Count, Number
from ._totals import Total


def told(terms: dict[str, Total]) -> dict[str, Any]:
    """Terms as numbers, in one read."""
    numbers = on_host([number for term in terms.values() for number in (term.total, term.count)])
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return {
        name: [term.per.value, total, count, str(term.total.dtype).removeprefix("torch.")]
        for (name, term), (total, count) in zip(terms.items(), pairs, strict=True)
    }


def added(every: list[dict[str, Any]], device: torch.device) -> dict[str, Total]:
    """The terms that processes told, added up."""
    kinds = [{name: told[0] for name, told in terms.items()} for terms in every]
    if any(kind != kinds[0] for kind in kinds):
        other = next(kind for kind in kinds if kind != kinds[0])
        raise LossError(
            f"the loss differs between processes, by what is divided by what: {kinds[0]} and {other}; return the same "
            "terms and metrics, of the same kinds, in every process"
        )
    return {name: _added_term([terms[name] for terms in every], device) for name in every[0]}


def _added_term(every: list[list[Any]], device: torch.device) -> Total:
    per = Per(every[0][0])
    total, count = (_sum([told[column] for told in every]) for column in (1, 2))
    dtype = reduce(torch.promote_types, [getattr(torch, told[3]) for told in every])
    on_device = torch.tensor(total, dtype=dtype, device=device)
    return Total(per, on_device, 1 if per is Per.NOTHING else count, on_device.new_zeros(0), None)


def summed_counts(every: list[dict[str, Number]]) -> dict[str, Count]:
    """Each term's count, where some may have told none."""
    names = list(dict.fromkeys(name for counts in every for name in counts))
    return {name: _sum([counts[name] for counts in every if name in counts]) for name in names}


def summed_calls(every: list[list[list[int]]]) -> list[list[int]]:
    """The values that each call of each module saw, where some processes may have called it less often."""
    if any(len(modules) != len(every[0]) for modules in every):
        raise BatchNormError(
            f"statistics of {sorted({len(modules) for modules in every})} modules are kept in different processes: put "
            "the same modules in training mode in every process"
        )
    return [[sum(call) for call in zip_longest(*calls, fillvalue=0)] for calls in zip(*every, strict=True)]


def _sum(numbers: list[Number]) -> Number:
    """Whole numbers stay whole."""
    return sum(numbers) if all(isinstance(number, int) for number in numbers) else _float_sum(numbers)


def _float_sum(numbers: list[Number]) -> float:
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(map(float, numbers))


def sum_if_known(numbers: list[int | None]) -> int | None:
    """Unless one of them is not known."""
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def on_host(numbers: list[Count | Tensor]) -> list[Number]:
    """As numbers, in one read."""
    tensors = iter(read_once([number for number in numbers if isinstance(number, Tensor)]))
    return [next(tensors).item() if isinstance(number, Tensor) else number for number in numbers]

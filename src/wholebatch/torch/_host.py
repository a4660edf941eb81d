"""Reading device values on the host, all of them in one transfer."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ._loss import Number


@dataclass
class Asked:
    """Values that somebody wants to know; empty until they are read, and if there is no tensor."""

    tensor: Tensor | None
    values: list[Number] = field(default_factory=list)


class HostReads:
    """Collects what has to be known, then reads all of it at once."""

    def __init__(self) -> None:
        self._asked: list[Asked] = []

    def ask(self, tensor: Tensor | None) -> Asked:
        """Put a tensor on the list."""
        asked = Asked(tensor)
        if tensor is not None:
            self._asked.append(asked)
        return asked

    def fetch(self) -> None:
        """Fill in the values."""
        tensors = [asked.tensor for asked in self._asked if asked.tensor is not None]
        for asked, arrived in zip(self._asked, read_once(tensors), strict=True):
            asked.values = arrived.tolist()


def read_once(values: list[Tensor]) -> list[Tensor]:
    """The same tensors on the host, by one copy per device; each copy waits for the device.

    They travel as bytes, so integers keep every digit and no dtype has to exist on every device.
    """
    on_host = [value.detach().reshape(-1) for value in values]
    for device in {value.device for value in values if not _is_on_host(value)}:
        indices = [i for i, value in enumerate(on_host) if value.device == device]
        flat = [on_host[i].contiguous().view(torch.uint8) for i in indices]
        arrived = torch.cat(flat).cpu().split([part.numel() for part in flat])
        for i, part in zip(indices, arrived, strict=True):
            on_host[i] = part.clone().view(on_host[i].dtype)  # a clone, because views need alignment
    return on_host


def _is_on_host(value: Tensor) -> bool:
    return value.device.type == "cpu"

"""Reading device values on the host, all of them in one transfer."""

import torch
from torch import Tensor


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

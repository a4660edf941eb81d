"""What a batch may disturb besides gradients: registered buffers and random generators."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ._model import Model


class Snapshot:
    """Buffers and random states as they were; `restore` brings them back after a failure.

    Args:
        model: whose buffers.
        parameters: the model's, where they have been looked up already.
    """

    def __init__(self, model: Model, parameters: Iterable[Tensor] | None = None) -> None:
        self._owners = [(owner, dict(owner._buffers.items())) for module in model.modules for owner in module.modules()]
        self._contents: dict[int, tuple[Tensor, Tensor]] = {}
        for _, buffers in self._owners:
            for buffer in buffers.values():
                if buffer is not None and id(buffer) not in self._contents:
                    self._contents[id(buffer)] = (buffer, buffer.detach().clone())
        self._cpu_generator = torch.get_rng_state()
        self._generators = {
            device: torch.get_device_module(device).get_rng_state(device)
            for device in {parameter.device for parameter in parameters or model.parameters()}
            if device.type not in ("cpu", "meta")
        }

    def restore(self) -> None:
        """Put back the generators, and the buffers by identity and by value."""
        self.restore_generators()
        self.restore_buffers()

    def restore_generators(self) -> None:
        """Put back the random generators alone."""
        torch.set_rng_state(self._cpu_generator)
        for device, state in self._generators.items():
            torch.get_device_module(device).set_rng_state(state, device)

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Put back the buffers alone."""
        for owner, buffers in self._owners:
            if isinstance(owner._buffers, dict):  # not a scripted module's, whose buffers cannot be exchanged
                owner._buffers.clear()
                owner._buffers.update(buffers)
        for buffer, content in self._contents.values():
            if not torch.equal(buffer, content):  # most never change, and some (expanded ones) cannot be written
                buffer.copy_(content)

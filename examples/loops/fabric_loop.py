"""A Lightning Fabric loop, before and after.

Fabric hands the model's output on in float32 even where it computes in float64.
"""

import torch
from bare import ACCUMULATION_STEPS, difference, make_loader, make_model, whole
from lightning.fabric import Fabric
from torch import nn

from wholebatch.torch import Accumulator, windows


def before() -> nn.Module:
    """The loop that the manuals show: each micro-batch's mean is divided by the number of a full window."""
    fabric = Fabric(accelerator="cpu", devices=1, precision="64-true")
    model = make_model()
    prepared, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(make_loader())
    for i, (x, y) in enumerate(loader, start=1):
        accumulating = i % ACCUMULATION_STEPS != 0 and i != len(loader)
        with fabric.no_backward_sync(prepared, enabled=accumulating):
            fabric.backward(nn.functional.cross_entropy(prepared(x), y) / ACCUMULATION_STEPS)
        if not accumulating:
            fabric.clip_gradients(prepared, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model


def after() -> nn.Module:
    fabric = Fabric(accelerator="cpu", devices=1, precision="64-true")
    model = make_model()
    prepared, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(make_loader())

    def loss_fn(piece: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = piece
        return nn.functional.cross_entropy(prepared(x), y)

    accumulator = Accumulator(prepared)
    for window in windows(loader, ACCUMULATION_STEPS):
        accumulator.step(loss_fn, window, optimizer, max_norm=1.0)
    return model


if __name__ == "__main__":
    meant = whole()
    print(f"before: weights differ from whole batches by {difference(before(), meant):.1e}")
    print(f"after:  weights differ from whole batches by {difference(after(), meant):.1e}")

"""An Accelerate loop, before and after.

Accelerate divides every micro-batch by the number of a full window, also in a short last one. Keep `prepare`, and give
the accumulation to the library.
"""

import torch
from accelerate import Accelerator
from bare import ACCUMULATION_STEPS, difference, make_loader, make_model, whole
from torch import nn

from wholebatch.torch import Accumulator, windows


def before() -> nn.Module:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION_STEPS)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
    for x, y in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(nn.functional.cross_entropy(prepared(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model


def after() -> nn.Module:
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())

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

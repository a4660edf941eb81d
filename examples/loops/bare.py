"""A bare PyTorch loop that accumulates gradients by hand, before and after."""

import torch
from torch import nn

from wholebatch.torch import Accumulator

ACCUMULATION_STEPS = 4


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).double()


def make_loader() -> torch.utils.data.DataLoader:
    """54 rows in micro-batches of 8: seven of them, the last one short, so that the last window is short too."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(54, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (54,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)


def before() -> nn.Module:
    """Wrong in the last window: three micro-batches, one of them short, are divided by four."""
    model, loader = make_model(), make_loader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i, (x, y) in enumerate(loader, start=1):
        loss = nn.functional.cross_entropy(model(x), y) / ACCUMULATION_STEPS
        loss.backward()
        if i % ACCUMULATION_STEPS == 0 or i == len(loader):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model


def after() -> nn.Module:
    """The same loop. `.add` takes the place of `.backward()`, and nobody divides."""
    model, loader = make_model(), make_loader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accumulator = Accumulator(model)
    for i, (x, y) in enumerate(loader, start=1):
        accumulator.add(nn.functional.cross_entropy(model(x), y), rows=len(x))
        if i % ACCUMULATION_STEPS == 0 or i == len(loader):
            accumulator.finish(optimizer, max_norm=1.0)
    return model


def whole() -> nn.Module:
    """What was meant: whole batches of 32 rows."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = make_loader().dataset.tensors
    for x_batch, y_batch in zip(x.split(32), y.split(32), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x_batch), y_batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


if __name__ == "__main__":
    meant = whole()
    print(f"before: weights differ from whole batches by {difference(before(), meant):.1e}")
    print(f"after:  weights differ from whole batches by {difference(after(), meant):.1e}")

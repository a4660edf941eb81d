"""A Lightning module with manual optimization, before and after."""

import warnings

import lightning
import torch
from bare import ACCUMULATION_STEPS, difference, make_loader, make_model, whole
from torch import nn

from wholebatch.torch import Accumulator


class Base(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.automatic_optimization = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def window_ends(self, batch_index: int) -> bool:
        return (batch_index + 1) % ACCUMULATION_STEPS == 0 or batch_index + 1 == self.trainer.num_training_batches


class Before(Base):
    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_index: int) -> None:
        x, y = batch
        self.manual_backward(nn.functional.cross_entropy(self.model(x), y) / ACCUMULATION_STEPS)
        if self.window_ends(batch_index):
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()
            optimizer.zero_grad()


class After(Base):
    def __init__(self) -> None:
        super().__init__()
        self.accumulator = Accumulator(self.model)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_index: int) -> None:
        x, y = batch
        self.accumulator.add(nn.functional.cross_entropy(self.model(x), y), rows=len(x))
        if self.window_ends(batch_index):
            self.accumulator.finish(self.optimizers(), max_norm=1.0)


def run(module: Base) -> nn.Module:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        precision="64-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the number of data workers
        trainer.fit(module, make_loader())
    return module.model


def before() -> nn.Module:
    return run(Before())


def after() -> nn.Module:
    return run(After())


if __name__ == "__main__":
    meant = whole()
    print(f"before: weights differ from whole batches by {difference(before(), meant):.1e}")
    print(f"after:  weights differ from whole batches by {difference(after(), meant):.1e}")

"""The `transformers` Trainer, before and after.

Hand it whole batches, and cut them: override `training_step`, the documented place for a training step of one's own.
`per_device_train_batch_size` is then the batch that is meant, and gradient accumulation stays at 1.
"""

import tempfile
from typing import Any

import torch
from bare import difference
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from wholebatch.torch import Accumulator, token_mean

ROWS, LENGTH, VOCABULARY, BATCH, MICRO_BATCH = 24, 12, 40, 8, 2


class WholeBatchTrainer(Trainer):
    """Cuts each batch into pieces of at most `micro_batch_size` rows."""

    def __init__(self, *args: Any, micro_batch_size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.accumulator = Accumulator(self.model, micro_batch_size=micro_batch_size)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)

        def loss_fn(piece: dict[str, torch.Tensor]) -> Any:
            with self.compute_loss_context_manager():
                return token_mean(model(**piece).logits, piece["labels"])

        return self.accumulator.backward(loss_fn, inputs).loss


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_dataset() -> list[dict[str, torch.Tensor]]:
    """Rows of unequal length, padded on the right.

    The first label of a row is predicted by nothing. The Trainer counts it all the same, unless it is -100.
    """
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in torch.randint(2, LENGTH + 1, (ROWS,), generator=generator):
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        mask = torch.arange(LENGTH) < length
        labels = ids.masked_fill(~mask, -100)
        labels[0] = -100
        rows.append({"input_ids": ids, "attention_mask": mask.long(), "labels": labels})
    return rows


def run(trainer_class: type[Trainer], **options: Any) -> nn.Module:
    model = make_model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            num_train_epochs=2,
            learning_rate=1e-3,
            max_grad_norm=1.0,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            seed=0,
        )
        trainer = trainer_class(model, arguments, train_dataset=make_dataset(), **options)
        trainer.train()
    return model


def before() -> nn.Module:
    """Whole batches of 8 rows in memory at once: what the run after has to equal."""
    return run(Trainer)


def after() -> nn.Module:
    """The same batches, two rows in memory at a time."""
    return run(WholeBatchTrainer, micro_batch_size=MICRO_BATCH)


if __name__ == "__main__":
    print(f"weights of cut and whole batches differ by {difference(after(), before()):.1e}")

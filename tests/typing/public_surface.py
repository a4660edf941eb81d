"""Read by the type checker, never run: what users' editors see."""

from typing import Any, assert_type

import jax
import torch
from torch import Tensor, nn

import wholebatch.jax
from wholebatch import Mean, Sum
from wholebatch.recipes import linen, nnx, scan, torch_loop
from wholebatch.torch import (
    Accumulator,
    Comparison,
    Report,
    Result,
    Window,
    backward,
    check,
    compare_gradients,
    token_mean,
    windows,
)

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = (torch.ones(8, 4), torch.ones(8, 1))


def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(piece[0]), piece[1])


assert_type(Mean(1.0, 2), Mean)
assert_type(0.5 * Mean(1.0, 2), Mean)
assert_type(Mean.of(torch.ones(2)), Mean)
assert_type(Sum(1.0) / 2, Sum)

accumulator = Accumulator(model, micro_batch_size=4, on_nonfinite="skip")
assert_type(accumulator.backward(loss_fn, batch), Result)
assert_type(accumulator.step(loss_fn, batch, [optimizer], max_norm=1.0, counts=len), Result)
assert_type(accumulator.add(loss_fn(batch), rows=8), None)
assert_type(accumulator.finish(optimizer), Result)
assert_type(accumulator.skipped, int)
assert_type(backward(model.parameters(), loss_fn, batch, num_micro_batches=2).loss, Tensor)
assert_type(backward([model, model], loss_fn, batch).metrics, dict[str, Tensor])
assert_type(backward(model, loss_fn, batch, lengths=lambda b: [1, 2], micro_batch_tokens=8), Result)
assert_type(check(model, loss_fn, batch), Report)
assert_type(check(model, loss_fn, batch).exact, bool)
assert_type(check(model, loss_fn, batch).exact_without_randomness, bool | None)
assert_type(compare_gradients(model, {"weight": None}, world_size=2), Comparison)
assert_type(list(windows([batch], 2)), list[Window])
assert_type(Window([batch])[0], Any)
assert_type(token_mean(torch.ones(1, 2, 3), torch.ones(1, 2)), Mean)

Accumulator(model, on_nonfinite="ignore")  # type: ignore[arg-type]
Accumulator(model, micro_batch_size="8")  # type: ignore[arg-type]

assert_type(wholebatch.jax.check(len, 1.0, 2.0, micro_batch_size=4).exact, bool)
wholebatch.jax.value_and_grad(len, micro_batch_size=16, rng_argnums=(1,), aux="mean")
wholebatch.jax.grad(len, micro_batch_size="8")  # type: ignore[arg-type]

assert_type(torch_loop.train_standard(model, [batch], 0.1, 1), list[float])
assert_type(torch_loop.train_with_accumulation(model, [batch], 0.1, 1, 4, max_norm=1.0), list[float])
assert_type(linen.grad_accumulation_step(0.0, [jax.numpy.ones((2, 3))], [jax.numpy.ones(2)], 0.1), jax.Array)
assert_type(scan.microbatched_grads(1.0, 0.0, [1.0], 0.0, 1.0), jax.Array)
assert_type(nnx.main(rows_a=1), bool)
wholebatch.jax.value_and_grad(len, data_axis=("slice", "data"), mesh=None)
wholebatch.jax.grad(len, data_axis=0)  # type: ignore[arg-type]
assert_type(wholebatch.jax.collectives(None).outside["all-reduce"], int)

"""The run in JAX: one compiled program per step, with the gradient from `wholebatch.jax.value_and_grad`."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import optax
from flax import nnx
from jax import Array
from jax import numpy as jnp

from .. import Mean, NonFiniteError
from .._plan import balanced
from .._report import Report
from ..jax import check, plan, value_and_grad
from .backend import BETAS, DECAY, EPS, Planned, State, Stepped, planned
from .jax_devices import Devices
from .nnx_model import GPT, from_shared, to_shared
from .ranks import Ranks
from .sampling import Rows
from .settings import Settings
from .weights import initial, is_decayed

LARGEST_SCALE, STEPS_TO_GROW = 2.0**15, 2000
"""Of the loss in half precision: halved when gradients overflow, doubled after so many steps without."""


class JaxBackend:
    """A GPT with AdamW, on all devices that JAX sees.

    Args:
        settings: of the run.
        vocabulary: how many tokens there are.
        ranks: one process.
    """

    def __init__(self, settings: Settings, vocabulary: int, ranks: Ranks) -> None:
        self._settings, self._vocabulary = settings, vocabulary
        self._devices = Devices(settings.batch_size)
        self.device = self._devices.name
        self._half = settings.precision == "fp16"
        with self._precisely():
            self._loss_fn, self._logits, like = functions(settings, vocabulary)
            self._params = self._devices.copied(from_shared(initial(settings, vocabulary), like))
            decayed = jax.tree.map(lambda array: is_decayed("", array), self._params)
            self._optimizer = optax.chain(
                optax.scale_by_adam(*BETAS, EPS), optax.add_decayed_weights(DECAY, mask=decayed)
            )
            self._moments = self._devices.copied(self._optimizer.init(self._params))
            scale = jnp.asarray(LARGEST_SCALE if self._half else 1.0), jnp.asarray(0)
            self._scale = self._devices.copied(scale)
        self._peak: int | None = None
        self._plain_gradient = jax.jit(jax.grad(lambda params, rows, k: self._loss_fn(params, rows, None).value / k))
        self._plain_update = jax.jit(self._update)
        self.use(settings.micro_batch_size or 1)

    def use(self, micro_batch_size: int) -> None:
        self.micro_batch_size = micro_batch_size
        self._step: Callable[..., Any] | None = None

    def step(self, rows: Rows, step: int, learning_rate: float) -> Stepped:
        with self._precisely():
            key = jax.random.fold_in(jax.random.key(self._settings.seed), step)
            key, rate = self._devices.copied((key, jnp.asarray(learning_rate)))
            args = self._params, self._moments, self._scale, self._devices.shared(_rows(rows)), key, rate
            if self._step is None:
                self._step = jax.jit(self._one_step, donate_argnums=(0, 1)).lower(*args).compile()
                self._peak = _bytes_of(self._step)
            self._params, self._moments, self._scale, loss, norm = self._step(*args)
        stepped = math.isfinite(norm)
        if not (self._half or (stepped and math.isfinite(loss))):
            raise NonFiniteError(f"step {step}: the loss is {float(loss):g} and the gradient norm {float(norm):g}")
        return Stepped(float(loss), float(norm), stepped)

    def plain_step(self, pieces: Sequence[Rows], step: int, learning_rate: float) -> None:
        with self._precisely():
            gradients: Any = None
            for piece in map(_rows, pieces):
                share = self._plain_gradient(self._params, piece, len(pieces))
                gradients = share if gradients is None else jax.tree.map(jnp.add, gradients, share)
            args = gradients, self._params, self._moments, jnp.asarray(learning_rate)
            self._params, self._moments, norm = self._plain_update(*args)
            float(norm)  # waits, as a step does
            if self._peak is None:
                used = _bytes_of(self._plain_gradient.lower(self._params, _rows(pieces[0]), len(pieces)).compile())
                sums = gradients if len(pieces) > 1 else None
                self._peak = used + sum(leaf.nbytes for leaf in jax.tree.leaves((self._moments, sums)))

    def ran_out(self, error: Exception) -> bool:
        return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)

    def evaluate(self, rows: Rows) -> float:
        with self._precisely():
            pieces = np.split(rows, np.cumsum(balanced(len(rows), micro_batch_size=self.micro_batch_size))[:-1])
            losses = [self._loss_fn(self._params, _rows(piece), None) for piece in pieces]
            return float(sum(loss.total for loss in losses) / sum(loss.count for loss in losses))

    def logits(self, tokens: Rows) -> npt.NDArray[np.floating]:
        with self._precisely():
            return np.asarray(self._logits(self._params, _rows(tokens))[0], np.float64)

    def check(self, rows: Rows) -> Report:
        with jax.enable_x64(True):
            wide = dataclasses.replace(self._settings, precision="fp64")
            loss_fn, _, like = functions(wide, self._vocabulary)
            params = from_shared(to_shared(self._params), like)
            return check(partial(loss_fn, key=None), params, _rows(rows))

    def plan(self, rows: Rows, memory: int) -> Planned:
        share = rows[: len(rows) // self._devices.count]
        with self._precisely():
            params = jax.eval_shape(lambda params: params, self._params)
            loss_fn = partial(self._loss_fn, key=None)
            whole = plan(loss_fn, params, _rows(share), memory=memory, optimizer=self._optimizer)
        return planned(whole, self._settings.micro_batch_size, self._devices.count)

    def peak_memory(self) -> int | None:
        return self._peak

    def state(self) -> State:
        adam = self._moments[0]
        first, second = to_shared(adam.mu), to_shared(adam.nu)
        moments = {f"first.{name}": array for name, array in first.items()}
        moments |= {f"second.{name}": array for name, array in second.items()}
        scale, good = self._scale
        scalars = {"steps_taken": int(adam.count), "scale": float(scale), "steps_since_overflow": int(good)}
        return State(to_shared(self._params), moments, scalars)

    def load(self, state: State) -> None:
        with self._precisely():
            self._params = self._devices.copied(from_shared(state.weights, self._params))
            adam = self._moments[0]
            first, second = (
                from_shared(
                    {name.removeprefix(kind): array for name, array in state.moments.items() if name.startswith(kind)},
                    like,
                )
                for kind, like in (("first.", adam.mu), ("second.", adam.nu))
            )
            count = jnp.asarray(state.scalars["steps_taken"], adam.count.dtype)
            moments = (adam._replace(count=count, mu=first, nu=second), self._moments[1])
            self._moments = self._devices.copied(moments)
            given = state.scalars["scale"], state.scalars["steps_since_overflow"]
            scale = tuple(jnp.asarray(value, like.dtype) for value, like in zip(given, self._scale, strict=True))
            self._scale = self._devices.copied(scale)

    def _one_step(
        self, params: Any, moments: Any, scale: tuple[Array, Array], rows: Array, key: Array, rate: Array
    ) -> tuple[Any, Any, tuple[Array, Array], Array, Array]:
        factor, good = scale

        def scaled(params: Any, rows: Array, key: Array) -> Array:
            """All rows have as many tokens, so this is a mean over rows; a sum of tokens would overflow sooner."""
            mean: Array = factor * self._loss_fn(params, rows, key).value
            return mean

        whole = value_and_grad(
            scaled, micro_batch_size=self.micro_batch_size, rng_argnums=(2,), **self._devices.options
        )
        loss, gradients = whole(params, rows, key)
        gradients = jax.tree.map(lambda gradient: gradient / factor, gradients)
        new_params, new_moments, norm = self._update(gradients, params, moments, rate)
        if self._half:
            went_well = jnp.isfinite(norm)
            new_params, new_moments = jax.tree.map(
                partial(jnp.where, went_well), (new_params, new_moments), (params, moments)
            )
            grown = jnp.where(good + 1 >= STEPS_TO_GROW, 2 * factor, factor)
            scale = (
                jnp.where(went_well, grown, factor / 2),
                jnp.where(went_well & (good + 1 < STEPS_TO_GROW), good + 1, 0),
            )
        return new_params, new_moments, scale, loss / factor, norm

    def _update(self, gradients: Any, params: Any, moments: Any, rate: Array) -> tuple[Any, Any, Array]:
        norm = optax.tree.norm(gradients)
        clip = jnp.minimum(1.0, self._settings.max_norm / (norm + 1e-6))  # as PyTorch clips
        clipped = jax.tree.map(lambda gradient: gradient * clip, gradients)
        updates, moments = self._optimizer.update(clipped, moments, params)
        return jax.tree.map(lambda param, update: param - rate * update, params, updates), moments, norm

    def _precisely(self) -> AbstractContextManager[None]:
        """In float64 only where that was asked for."""
        return jax.enable_x64(True) if self._settings.precision == "fp64" else nullcontext()


make = JaxBackend


def functions(settings: Settings, vocabulary: int) -> tuple[Callable[..., Mean], Callable[..., Array], Any]:
    """The loss and the scores as functions of the parameters, and a tree like these."""
    graphdef, *states = nnx.split(GPT(settings, vocabulary), nnx.Param, ...)
    like, rest = states

    @jax.jit
    def logits(params: Any, ids: Array, key: Array | None = None) -> Array:
        model = nnx.merge(graphdef, params, rest)
        scores: Array = model(ids, None if key is None else nnx.Rngs(dropout=key))
        return scores.astype(jnp.promote_types(scores.dtype, jnp.float32))

    @jax.jit
    def loss_fn(params: Any, rows: Array, key: Array | None) -> Mean:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, rows[:, :-1], key), rows[:, 1:])
        return Mean.of(losses)

    return loss_fn, logits, like


def _bytes_of(program: Any) -> int:
    """What a compiled program holds: what goes in, what comes out, and what is between."""
    used = program.memory_analysis()
    sizes = used.argument_size_in_bytes, used.output_size_in_bytes, used.temp_size_in_bytes
    return int(sum(sizes) - used.alias_size_in_bytes)


def _rows(rows: Rows) -> Array:
    return jnp.asarray(rows, jnp.int32)

"""What the loop asks of a framework; each has one module for the model and one for this."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .._budget import Plan
from .._plan import balanced
from .._report import Report
from .errors import BackendMissing
from .ranks import Ranks
from .sampling import Rows
from .settings import Settings
from .weights import Weights

BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1
"""Of AdamW, in both."""

PACKAGES = {"torch": ["torch"], "jax": ["jax", "flax", "optax"]}
"""That each is made of."""


@dataclass(frozen=True)
class Stepped:
    """What one optimizer step came to.

    Args:
        loss: of the whole batch, over all ranks.
        grad_norm: before clipping.
        stepped: False where half precision overflowed and the step was left out.
    """

    loss: float
    grad_norm: float
    stepped: bool


@dataclass
class State:
    """What a run continues from, under names that both frameworks share.

    Args:
        weights: the model's.
        moments: AdamW's, `first.NAME` and `second.NAME`.
        scalars: the rest.
    """

    weights: Weights
    moments: Weights = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """A model, its optimizer, and the library's gradient of the whole batch."""

    device: str

    def step(self, rows: Rows, step: int, learning_rate: float) -> Stepped:
        """One optimizer step with the gradient of all rows."""

    def plain_step(self, pieces: Sequence[Rows], step: int, learning_rate: float) -> None:
        """The textbook's step, to compare with: the mean of the pieces' mean losses. One piece is the unsplit batch."""

    def ran_out(self, error: Exception) -> bool:
        """Whether it says that memory ran out."""

    def evaluate(self, rows: Rows) -> float:
        """The mean loss per token, without dropout."""

    def logits(self, tokens: Rows) -> npt.NDArray[np.floating]:
        """What may follow each token of one row."""

    def check(self, rows: Rows) -> Report:
        """Whether cutting a batch leaves its gradient as it was."""

    def plan(self, rows: Rows, memory: int) -> "Planned":
        """The micro-batch that fits, without running it."""

    def use(self, micro_batch_size: int) -> None:
        """Cut batches into pieces of at most that many rows."""

    @property
    def micro_batch_size(self) -> int:
        """The most rows of a piece now: fewer than planned where memory has run out."""

    def peak_memory(self) -> int | None:
        """The most bytes that were held at a time, if that can be told."""

    def state(self) -> State:
        """What `load` continues from."""

    def load(self, state: State) -> None:
        """Continue from there."""


@dataclass(frozen=True)
class Planned:
    """What was predicted before the first step.

    Args:
        micro_batch_size: rows of the largest piece.
        curve: bytes at the peak, by micro-batch size; the last is for the whole batch.
    """

    micro_batch_size: int
    curve: dict[int, int]


def require(name: str) -> None:
    """The framework has to be installed; that is said before any work is done."""
    try:
        for module in PACKAGES[name]:
            importlib.import_module(module)
    except ImportError as error:
        raise BackendMissing(f'the {name} backend is not installed: pip install "wholebatch[{name},cli]"') from error


def load(settings: Settings, vocabulary: int, ranks: Ranks) -> Backend:
    """The framework that was asked for, with the model in its initial state."""
    module = importlib.import_module(f".{settings.backend}_backend", __package__)
    backend: Backend = module.make(settings, vocabulary, ranks)
    return backend


def planned(whole: Plan, wanted: int | None, devices: int = 1) -> Planned:
    """What a plan says of the sizes that people may ask about.

    Args:
        whole: the library's, for one device.
        wanted: the micro-batch size that was asked for; None for the plan's own.
        devices: how many share each piece evenly.
    """
    wanted = whole.micro_batch_size if wanted is None else max(1, wanted // devices)
    size = balanced(whole.rows, micro_batch_size=wanted)[0]
    powers = [1 << i for i in range(whole.rows.bit_length()) if 1 << i < whole.rows]
    peaks = {rows: whole.peak(rows) for rows in sorted({*powers, size, whole.rows})}
    return Planned(size * devices, {rows * devices: peak for rows, peak in peaks.items()})

"""The loop: one batch, one step, one line of metrics; now and then a validation and a checkpoint."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

from .backend import Backend
from .corpus import Corpus
from .metrics import Record
from .sampling import Rows, batch_of_step, spread_over
from .schedule import learning_rate
from .settings import Settings
from .writer import Writer

VALIDATION_ROWS = 64


def train(
    settings: Settings, backend: Backend, corpus: Corpus, *, done: int, writer: Writer | None
) -> Iterator[Record]:
    """Take the steps that are left, and yield each one's metrics.

    Args:
        settings: of the run.
        backend: takes the steps.
        corpus: where rows come from.
        done: the steps that were taken before.
        writer: writes metrics and checkpoints; None on ranks that do not.
    """
    held_out = validation_rows(settings, corpus)
    tokens = settings.batch_size * settings.seq_len
    for step in range(done + 1, settings.steps + 1):
        start, planned = time.perf_counter(), backend.micro_batch_size
        rate = learning_rate(settings, step)
        stepped = backend.step(rows_of_step(settings, corpus, step), step, rate)
        seconds = time.perf_counter() - start
        record: Record = {
            "step": step,
            "loss": _finite(stepped.loss),
            "grad_norm": _finite(stepped.grad_norm),
            "learning_rate": rate,
            "stepped": stepped.stepped,
            "tokens": step * tokens,
            "seconds": round(seconds, 6),
            "tokens_per_second": round(tokens / seconds, 1),
            "micro_batch_size": backend.micro_batch_size,
            "peak_memory": backend.peak_memory(),
        }
        if writer:
            last = step == settings.steps
            if last or step % settings.validate_every == 0:
                record["validation_loss"] = _finite(backend.evaluate(held_out))
            writer.append(record)
            halved = backend.micro_batch_size != planned  # the bits of all further steps depend on it
            if last or halved or step % settings.checkpoint_every == 0:
                writer.save(step)
        yield record


def rows_of_step(settings: Settings, corpus: Corpus, step: int) -> Rows:
    """The batch of a step, on all ranks alike."""
    return batch_of_step(
        corpus.training, step=step, rows=settings.batch_size, length=settings.seq_len, seed=settings.seed
    )


def validation_rows(settings: Settings, corpus: Corpus) -> Rows:
    """The same rows each time, from what is held out."""
    return spread_over(corpus.held_out, rows=VALIDATION_ROWS, length=settings.seq_len)


class Interruption:
    """Ctrl-C, or a request to end, is remembered until the step is done; a second one is not waited for."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def _finite(number: float) -> float | None:
    """JSON has no words for the others."""
    return number if math.isfinite(number) else None

"""What a run writes while it goes on; only the first of several ranks does."""

from types import TracebackType
from typing import Any, Self

from .backend import Backend
from .checkpoints import Checkpoints
from .folder import Folder
from .metrics import Metrics, Record


class Writer:
    """Metrics and checkpoints, in this order: a checkpoint's steps have their lines.

    Args:
        folder: where they go.
        backend: has the state.
        facts: what else a checkpoint holds.
        keep: how many checkpoints stay.
        saved: the step that the run continues from; None if it begins.
    """

    def __init__(
        self, folder: Folder, backend: Backend, facts: dict[str, Any], *, keep: int, saved: int | None
    ) -> None:
        self._backend, self._facts = backend, facts
        self._checkpoints = Checkpoints(folder.checkpoints, keep)
        self._metrics = Metrics(folder.metrics, saved or 0)
        self._saved = saved

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._metrics.close()

    def append(self, record: Record) -> None:
        """A step's metrics."""
        self._metrics.append(record)

    def save(self, step: int) -> None:
        """A checkpoint, unless that step has one."""
        if step != self._saved:
            self._metrics.flush()
            facts = {**self._facts, "micro_batch_size": self._backend.micro_batch_size}
            self._checkpoints.save(step, self._backend.state(), facts)
            self._saved = step

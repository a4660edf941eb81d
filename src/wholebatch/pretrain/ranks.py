"""Several processes under `torchrun`: who is who, and what they have to agree on."""

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

Returned = TypeVar("Returned")


class Ranks:
    """The processes of a run; one, unless `torchrun` started more.

    Args:
        backend: the framework; only PyTorch's processes are counted here.
    """

    def __init__(self, backend: str) -> None:
        self._together = backend == "torch" and "TORCHELASTIC_RUN_ID" in os.environ
        self.size, self.rank, self.local_rank = (
            (int(os.environ[name]) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")) if self._together else (1, 0, 0)
        )

    @classmethod
    def alone(cls) -> Self:
        """One process, whoever started it."""
        return cls("jax")

    @property
    def first(self) -> bool:
        """Whether this process writes the files and talks."""
        return self.rank == 0

    def __enter__(self) -> Self:
        if self._together:
            import torch

            if torch.cuda.is_available():
                torch.cuda.set_device(self.local_rank)
            torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._together:
            import torch

            if error is None:
                # Whoever ends at once may do so while a thread of gloo lets go of a tensor of the last exchange, which
                # aborts the process; nothing of Python's is held after a barrier.
                self.wait()
            torch.distributed.destroy_process_group()

    def wait(self) -> None:
        """Until all are here."""
        if self._together:
            import torch

            torch.distributed.barrier()

    def from_first(self, make: Callable[[], Returned]) -> Returned:
        """What the first process makes, in all of them."""
        if not self._together:
            return make()
        import torch

        box: list[Any] = [make() if self.first else None]
        torch.distributed.broadcast_object_list(box)
        made: Returned = box[0]
        return made

    def any(self, flag: bool) -> bool:
        """Whether it holds for one of them."""
        if not self._together:
            return flag
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        flags = torch.tensor(int(flag), device=device)
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
        return bool(flags.item())

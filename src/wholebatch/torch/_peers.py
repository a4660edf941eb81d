"""The processes that share a batch: one alone, or several that can ask one another.

A message is a JSON object, and every process gets all of them. They travel as one small block each; only where one does
not fit is there a second exchange, for the rest.
"""

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import BatchError, RankError
from ._gradients import scale
from ._loss import Number
from ._sums import GradientSums

Message = Mapping[str, Any]

_batches: Counter[str] = Counter()
"""How many each group has begun; every process of a group counts the same."""

BLOCK = 256
"""Bytes that every process sends at least; what a batch comes to rarely takes more."""

_SIZE = 4


class Alone:
    """One process. It holds the whole batch, so there is nobody to ask and nothing to send."""

    rank = 0
    world = 1
    lockstep = False
    """Whether forwards and backwards exchange something, so that every process has to run as many."""

    sharded = False
    """Whether a parameter is one only while it is used, put together from parts that the processes hold."""

    overlaps = False
    """Whether gradients are sent while the last piece's backward makes them."""

    in_step = False
    """Whether others may be waiting within a forward or backward, where they cannot be asked anything."""

    device = torch.device("cpu")
    """Where what was exchanged is wanted."""

    @property
    def shared(self) -> bool:
        """Whether there are others, who would wait for this process if it failed by itself."""
        return self.world > 1

    def refuse(self) -> None:
        """Raise if the model's way of sharing a batch is not supported."""

    @property
    def clean(self) -> bool:
        """Whether nothing is left over from uses of the model outside the batch."""
        return True

    def are_those_of(self, group: dist.ProcessGroup | None) -> bool:
        """Whether they are the processes of a group; None is the group of all that there are."""
        return False

    def begin(self, clean: bool) -> None:
        """Exchange what the model's first forward would, so that no piece has to.

        Args:
            clean: whether it is so in every process.
        """

    def reset(self) -> None:
        """After a failure, which every process has learned of: expect nothing that is left over from it."""

    def turns(self, pieces: list[int]) -> int | None:
        """How many pieces each process runs, if all have to run as many; from the number that each has."""
        if not self.lockstep:
            return None
        idle = [rank for rank, number in enumerate(pieces) if not number]
        if idle:
            raise BatchError(
                f"rank {', '.join(map(str, idle))} has no rows: with fully_shard or SyncBatchNorm every process runs "
                "the model in step, so each needs at least one row of the batch"
            )
        return max(pieces)

    def apart(self) -> AbstractContextManager[None]:
        """Within, the forwards and backwards of a batch's pieces run, and exchange as little as they can."""
        return nullcontext()

    def turn(self, last: bool) -> None:
        """The next piece begins."""

    def carried(self, sums: GradientSums) -> list[Tensor]:
        """Losses without a gradient that the last piece's backward shall carry."""
        return []

    def settle(self, sums: GradientSums) -> None:
        """The last backward is over."""

    def check_apart(self) -> None:
        """In a loop that calls the model itself: raise unless it was called as within `apart`."""

    def untouched(self, sums: GradientSums) -> list[int]:
        """Which of the shared parameters, by position, no piece of this process has reached."""
        return []

    def reduce(self, sums: GradientSums, factor: Number | Tensor, untouched: list[int]) -> Number | Tensor:
        """Make the sums those of all processes.

        Args:
            sums: this process's.
            factor: what they have yet to be multiplied by.
            untouched: positions of shared parameters that no process has reached; they keep no gradient.

        Returns:
            What they have to be multiplied by afterwards.
        """
        return factor

    def added(self, numbers: Tensor) -> Tensor:
        """The sum of every process's, in the same memory."""
        return numbers

    def gather(self, message: Message) -> list[Message]:
        """Every process's message, by rank."""
        return [message]

    def tell_failure(self, message: Message) -> list[Message]:
        """Let the others know; returns what they tell, by rank."""
        return self.gather(message)

    def told_failures(self) -> list[Message]:
        """What others have told that could not be asked, by rank."""
        return []


class Peers(Alone):
    """Processes of a group.

    Args:
        group: a process group of torch.distributed.
        device: the model's; messages travel from it only if the group does not connect hosts.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank = group.rank()
        self.world = group.size()
        self.device = device
        # a device that is not the host would be waited for
        self._wire = torch.device("cpu") if torch.device("cpu") in group._device_types else device

    def are_those_of(self, group: dist.ProcessGroup | None) -> bool:
        return dist.get_process_group_ranks(group) == dist.get_process_group_ranks(self.group)

    def begin(self, clean: bool) -> None:
        _batches[self.group.group_name] += 1

    def gather(self, message: Message) -> list[Message]:
        """Every process's message, by rank."""
        data = json.dumps(message, separators=(",", ":")).encode()
        room = BLOCK - _SIZE
        blocks = self._gather_bytes(len(data).to_bytes(_SIZE, "big") + data[:room].ljust(room))
        sizes = [int.from_bytes(block[:_SIZE], "big") for block in blocks]
        arrived = [block[_SIZE:] for block in blocks]
        missing = max(sizes) - room
        if missing > 0:
            rests = self._gather_bytes(data[room:].ljust(missing))
            arrived = [block + rest for block, rest in zip(arrived, rests, strict=True)]
        return [json.loads(block[:size]) for block, size in zip(arrived, sizes, strict=True)]

    def added(self, numbers: Tensor) -> Tensor:
        try:
            dist.all_reduce(numbers, group=self.group)
        except RuntimeError as error:
            raise lost(error) from error
        return numbers

    def tell_failure(self, message: Message) -> list[Message]:
        """If the others may be in a forward or backward, it is written where they look when that fails."""
        if not self.in_step:
            return self.gather(message)
        try:
            dist.distributed_c10d._get_default_store().set(self._key(self.rank), json.dumps(message))
        except RuntimeError as error:  # it went with the process that kept it
            raise lost(error) from error
        return [message if rank == self.rank else {} for rank in range(self.world)]

    def told_failures(self) -> list[Message]:
        if not self.in_step:
            return []
        store = dist.distributed_c10d._get_default_store()
        keys = [self._key(rank) for rank in range(self.world)]
        try:
            return [json.loads(store.get(key)) if store.check([key]) else {} for key in keys]
        except RuntimeError:
            return []

    def _key(self, rank: int) -> str:
        name = self.group.group_name
        return f"wholebatch/{name}/{_batches[name]}/{rank}"

    def _scale(self, sums: GradientSums, shared: list[Tensor], factor: Number | Tensor) -> None:
        """Multiply the sums, those of shared parameters so that their mean over the processes is what is wanted."""
        ours = {id(parameter) for parameter in shared}
        scale([leaf.grad for leaf in sums.leaves if leaf.grad is not None and id(leaf) in ours], factor * self.world)
        scale([leaf.grad for leaf in sums.leaves if leaf.grad is not None and id(leaf) not in ours], factor)

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._wire)
        arrived = [torch.empty_like(sent) for _ in range(self.world)]
        try:
            dist.all_gather(arrived, sent, group=self.group)
            return [bytes(block.cpu().numpy()) for block in arrived]
        except RuntimeError as error:
            raise lost(error) from error


def is_lost(error: BaseException) -> bool:
    """Whether an exchange with other processes has failed."""
    words = ("gloo", "NCCL", "closed by peer", "Timed out", "pair closure")
    if isinstance(error, RankError):  # which says so already
        return False
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def lost(error: BaseException) -> RankError:
    """What an exchange that came to nothing means."""
    return RankError(
        "the other processes of the batch did not answer: one has ended, or did not come to the same batch within the "
        f"process group's time-out (see the logs of the other ranks; {str(error).strip().splitlines()[0]})"
    )

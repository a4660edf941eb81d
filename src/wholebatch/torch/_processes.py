"""Which processes share a batch: told by the model."""

import sys
from typing import Literal

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .._errors import OptionError
from ._model import Model
from ._peers import Alone
from ._replicas import Replicas
from ._shards import Shards

Sync = Literal["once", "overlap", "every"]


def processes_of(model: Model, sync: Sync = "once") -> Alone:
    """Those that its DDP modules or its `fully_shard` were given; one process where there are neither."""
    if not dist.is_available() or not dist.is_initialized():
        return Alone()
    modules = list(dict.fromkeys(module for member in model.modules for module in member.modules()))
    replicas = [module for module in modules if isinstance(module, DistributedDataParallel)]
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has not imported it has not used it
    shards = [] if fsdp is None else [module for module in modules if isinstance(module, fsdp.FSDPModule)]
    if replicas and shards:
        raise OptionError("the model has both DistributedDataParallel and fully_shard in it: give one of them")
    if shards and sync == "overlap":
        raise OptionError('sync="overlap" is for DistributedDataParallel: fully_shard overlaps by itself')
    if shards:
        return Shards(shards, sync == "every")
    if replicas and sync == "every":
        raise OptionError('sync="every" is for fully_shard: DistributedDataParallel sends one gradient per batch')
    return Replicas(replicas, sync == "overlap") if replicas else Alone()

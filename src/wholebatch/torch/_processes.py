"""Which processes share a batch: told by the model."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ._model import Model
from ._peers import Alone
from ._replicas import Replicas


def processes_of(model: Model) -> Alone:
    """Those that its DDP modules were given; one process where there are none."""
    if not dist.is_available() or not dist.is_initialized():
        return Alone()
    modules = {module: None for member in model.modules for module in member.modules()}
    replicas = [module for module in modules if isinstance(module, DistributedDataParallel)]
    return Replicas(replicas) if replicas else Alone()

"""Pools: the mean and variance of values that lie in several places, from those of each place.

    N = Σ n_k,   m = Σ n_k m_k / N,   v = Σ n_k (v_k + (m_k - m)²) / N

The places are the pieces of a process, one after the other, and then the processes, all at once.
"""

import torch
from torch import Tensor

from ._peers import Alone


class Pool:
    """Statistics of the values that one call of a module saw, channel by channel.

    Args:
        like: a tensor with an entry for each channel.
        between: whether the means' own variance is a part of the whole's.
    """

    def __init__(self, like: Tensor, between: bool) -> None:
        self.count = 0
        self.mean = torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
        self.variance = torch.zeros_like(self.mean)
        self._between = between

    def add(self, count: int, mean: Tensor, variance: Tensor) -> None:
        """Take the next piece's."""
        total = self.count + count
        apart = mean - self.mean
        self.variance += (variance - self.variance) * (count / total)
        if self._between:
            self.variance += apart.square() * (self.count * count / total**2)
        self.mean += apart * (count / total)
        self.count = total

    def around(self, mean: Tensor) -> Tensor:
        """The mean square of what lies apart from a mean, where the means of places are to be told apart."""
        return self.variance + (self.mean - mean).square() if self._between else self.variance


def pool_over(processes: Alone, pools: list[Pool], counts: list[int]) -> None:
    """Make them those of the values that all processes saw.

    Args:
        processes: each of them has as many pools.
        pools: this process's.
        counts: how many values there are in all processes, for each of the pools.
    """
    if not pools or not processes.shared:
        return
    shares = [pool.count / count if count else 0.0 for pool, count in zip(pools, counts, strict=True)]
    means = _added(processes, [pool.mean * share for pool, share in zip(pools, shares, strict=True)])
    around = [pool.around(mean) for pool, mean in zip(pools, means, strict=True)]
    variances = _added(processes, [one * share for one, share in zip(around, shares, strict=True)])
    for pool, count, mean, variance in zip(pools, counts, means, variances, strict=True):
        pool.count, pool.mean, pool.variance = count, mean, variance


def _added(processes: Alone, tensors: list[Tensor]) -> list[Tensor]:
    """The sums over the processes, in one exchange."""
    flat = processes.added(torch.cat([tensor.to(processes.device) for tensor in tensors]))
    parts = flat.split([len(tensor) for tensor in tensors])
    return [part.to(tensor) for part, tensor in zip(parts, tensors, strict=True)]

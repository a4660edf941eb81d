"""`Mean` and `Sum` are pytrees, so torch's own tools see the tensors inside."""

import torch
from torch.utils._pytree import tree_map

from wholebatch import Mean, Sum


def test_terms_are_mapped_over():
    doubled = tree_map(lambda leaf: 2 * leaf, {"a": Mean(torch.tensor(1.0), 3), "b": Sum(torch.tensor(2.0))})
    assert (doubled["a"].total, doubled["a"].count, doubled["b"].total) == (2.0, 6, 4.0)


def test_terms_pass_through_torch_func():
    def loss(x):
        return Mean.of(x * x, where=x > 0)

    mapped = torch.func.vmap(loss)(torch.tensor([[1.0, -1.0], [2.0, 3.0]]))
    assert isinstance(mapped, Mean)
    assert mapped.total.tolist() == [1.0, 13.0]
    assert mapped.count.tolist() == [1, 2]

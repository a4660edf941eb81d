"""`Mean` and `Sum` as pytrees, so that torch's own tools see the tensors inside."""

from torch.utils import _pytree

from .._mean import Mean, Sum


def register() -> None:
    """Register both; once is enough, as modules are imported once."""
    _pytree.register_pytree_node(
        Mean,
        lambda mean: ([mean.total, mean.count], None),
        lambda children, _: Mean(*children),
        serialized_type_name="wholebatch.Mean",
    )
    _pytree.register_pytree_node(
        Sum,
        lambda term: ([term.total], None),
        lambda children, _: Sum(*children),
        serialized_type_name="wholebatch.Sum",
    )

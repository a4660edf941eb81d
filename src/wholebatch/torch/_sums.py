"""Local sums: the pieces' gradients, summed where autograd puts them, in `.grad`.

What `.grad` held before is set aside first, so that a failure can bring it back and a success can add to it.
The gradient goes wherever `.backward()` of the whole batch would have put it: leaves that the loss reaches
outside the given parameters (another model, an input) are adopted when the first piece shows them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ._ledger import Pass


class GradientSums:
    """The sums of one batch. `.grad` of every leaf belongs to them until `commit` or `restore`.

    Args:
        parameters: the model's parameters; those that do not require grad are left alone.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self._leaves: list[Tensor] = []
        self._before: list[Tensor | None] = []
        self._aside: list[Tensor | None] | None = None
        self._own([parameter for parameter in parameters if parameter.requires_grad])
        self._given = len(self._leaves)

    def adopt(self, *roots: Tensor) -> None:
        """Own the leaves that a backward from `roots` would reach besides the given parameters."""
        known = set(map(id, self._leaves))
        self._own([leaf for leaf in _reachable_leaves(roots) if id(leaf) not in known])

    def add(self, main: Pass, aside: Pass) -> None:
        """Run a piece's backward; `aside` has a buffer of its own until `merge`."""
        if main.values:
            torch.autograd.backward(main.values, main.seeds, retain_graph=bool(aside.values))
        if aside.values:
            self._swap()
            torch.autograd.backward(aside.values, aside.seeds)
            self._swap()

    def gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """The sums of the given parameters, and those of the adopted leaves."""
        given = [leaf.grad for leaf in self._leaves[: self._given] if leaf.grad is not None]
        adopted = [leaf.grad for leaf in self._leaves[self._given :] if leaf.grad is not None]
        return given, adopted

    @property
    def unmerged(self) -> bool:
        """Whether there is anything to merge."""
        return self._aside is not None or any(before is not None for before in self._before)

    @torch.no_grad()
    def merge(self) -> None:
        """Add what was kept aside, and what `.grad` held before the batch, to the sums."""
        for leaf, aside in zip(self._leaves, self._aside or (), strict=self._aside is not None):
            if aside is not None:
                leaf.grad = aside if leaf.grad is None else _sum(leaf.grad, aside)
        for leaf, before in zip(self._leaves, self._before, strict=True):
            if before is not None:
                leaf.grad = before.clone() if leaf.grad is None else _sum(leaf.grad, before)
        self._aside = None

    @torch.no_grad()
    def commit(self) -> None:
        """Leave the sums in `.grad`, in the tensors that were there before, if there were any."""
        for leaf, before in zip(self._leaves, self._before, strict=True):
            if before is not None and leaf.grad is not None and before.layout == leaf.grad.layout == torch.strided:
                before.copy_(leaf.grad)
                leaf.grad = before

    def restore(self) -> None:
        """Bring back `.grad` as it was before the batch; None stays None."""
        for leaf, before in zip(self._leaves, self._before, strict=True):
            leaf.grad = before

    def _own(self, leaves: list[Tensor]) -> None:
        self._leaves += leaves
        self._before += [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None

    def _swap(self) -> None:
        aside = self._aside or [None] * len(self._leaves)
        self._aside = [leaf.grad for leaf in self._leaves]
        for leaf, gradient in zip(self._leaves, aside, strict=True):
            leaf.grad = gradient


def _sum(gradient: Tensor, other: Tensor) -> Tensor:
    """In place, unless only `gradient` is sparse: then the result is dense."""
    if gradient.layout != torch.strided and other.layout == torch.strided:
        return other + gradient
    return gradient.add_(other)


def _reachable_leaves(roots: tuple[Tensor, ...]) -> Iterator[Tensor]:
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)  # only the nodes that accumulate into a leaf have one
        if leaf is not None:
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)

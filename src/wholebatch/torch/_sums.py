"""Local sums: the pieces' gradients, summed where autograd puts them, in `.grad`.

What `.grad` held before is set aside first, so that a failure can bring it back and a success can add to it.
While the batch is open `.grad` has the dtype that the sums need (a leaf's `grad_dtype` tells autograd), so that
no second set of gradients exists; `commit` rounds once, leaf by leaf.

The gradient goes wherever `.backward()` of the whole batch would have put it: leaves that the loss reaches
outside the given parameters (another model, an input) are adopted when a piece shows them.
"""

from collections.abc import Iterable
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import has_torch_function

from .._errors import BatchError, LossError
from ._gradients import copied, scale, set_grad_dtype, summed
from ._loss import Number
from ._weights import Pass

SumDtype = torch.dtype | Literal["auto"]
"""A dtype to sum in; "auto" is float32 for 16-bit gradients and a gradient's own dtype for all others."""

_claims: WeakValueDictionary[int, "GradientSums"] = WeakValueDictionary()
"""Whose `.grad` it is, by the leaf's id: two batches that are open at once would each take the other's sums."""


def owner(leaf: Tensor) -> "GradientSums | None":
    """The open sums that a leaf's `.grad` belongs to."""
    return _claims.get(id(leaf))


class GradientSums:
    """The sums of one batch. `.grad` of every leaf belongs to them from `begin` to `commit` or `restore`.

    Args:
        claims: whether others are kept away from the leaves meanwhile.
        adopts: whether leaves that the loss reaches besides the given parameters are owned too.
    """

    def __init__(self, *, claims: bool = True, adopts: bool = True) -> None:
        self._claims = claims
        self._adopts = adopts
        self._dtype: SumDtype | None = None
        self._leaves: list[Tensor] = []
        self._before: list[Tensor | None] = []
        self._grad_dtypes: list[torch.dtype | None] = []
        self._known: set[int] = set()
        self._accumulating: set[Any] = set()  # the graph's nodes for them, where a walk through it may stop
        self._merged = False
        self._given = 0
        self._aside: list[Tensor | None] | None = None
        self._adding = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self, parameters: Iterable[Tensor], dtype: SumDtype | None = None) -> None:
        """Take over `.grad` of the parameters.

        Args:
            parameters: the model's; those that do not require grad are left alone.
            dtype: what to sum in; None for each gradient's own dtype.
        """
        self._dtype = dtype
        for parameter in parameters:
            if parameter.requires_grad:
                self._own(parameter)
        self._given = len(self._leaves)
        self._streams = {
            device: torch.cuda.current_stream(device)
            for device in {leaf.device for leaf in self._leaves}
            if device.type == "cuda"
        }

    def adopt(self, roots: Iterable[Tensor]) -> None:
        """Own the leaves that a backward from `roots` would reach besides those that are owned.

        The graph shows them; a reentrant checkpoint hides those inside it.
        """
        if not self._adopts:
            return
        nodes: list[Any] = []
        for root in roots:
            if root.grad_fn is not None:
                nodes.append(root.grad_fn)
            elif id(root) not in self._known:
                self._own(root)
        seen = self._accumulating.union(nodes, (None,))
        for node in nodes:  # which grows meanwhile
            followed_by = node.next_functions
            for following, _ in followed_by:
                if following not in seen:
                    seen.add(following)
                    nodes.append(following)
            if not followed_by and hasattr(node, "variable"):
                self._accumulating.add(node)
                if id(node.variable) not in self._known:
                    self._own(node.variable)

    def add(self, main: Pass, aside: Pass) -> None:
        """Run a piece's backward; `aside` has a buffer of its own until `join`."""
        self.adopt(main.values + aside.values)
        self._adding = True
        try:
            if main.values and not aside.values:
                _run(main)
            elif main.values:
                _first_backward_of_two(main)
            if aside.values:
                self._swap()
                _run(aside)
                self._swap()
        finally:
            self._adding = False

    def adding_on(self, device: torch.device) -> bool:
        """Whether a piece's backward is adding to the sums, in the order of the stream that they began on."""
        return self._adding and (device.type != "cuda" or torch.cuda.current_stream(device) == self._streams[device])

    def gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """The sums of the given parameters, and those of the adopted leaves."""
        given = [leaf.grad for leaf in self._leaves[: self._given] if leaf.grad is not None]
        adopted = [leaf.grad for leaf in self._leaves[self._given :] if leaf.grad is not None]
        return given, adopted

    @property
    def adopted(self) -> list[tuple[Tensor, Tensor | None]]:
        """The leaves besides the given parameters, each with what its `.grad` held before the batch."""
        return list(zip(self._leaves[self._given :], self._before[self._given :], strict=True))

    def scale(self, factor: Number | Tensor) -> None:
        """Multiply all that was summed so far, and what was kept aside."""
        for gradients in (*self.gradients(), [gradient for gradient in self._aside or () if gradient is not None]):
            scale(gradients, factor)

    @property
    def leaves(self) -> list[Tensor]:
        """All leaves whose `.grad` belongs to the sums."""
        return self._leaves

    def touched(self) -> set[int]:
        """The ids of the leaves that a piece has reached."""
        aside = self._aside or [None] * len(self._leaves)
        pairs = zip(self._leaves, aside, strict=True)
        return {id(leaf) for leaf, kept in pairs if leaf.grad is not None or kept is not None}

    @torch.no_grad()
    def join(self, factor: Number | Tensor) -> Number | Tensor:
        """Make one of the sums that `factor` is for and of those kept aside; returns what is left to multiply by."""
        if self._aside is None:
            return factor
        for gradients in self.gradients():
            scale(gradients, factor)
        for leaf, aside in zip(self._leaves, self._aside, strict=True):
            if aside is not None:
                leaf.grad = aside if leaf.grad is None else summed(leaf.grad, aside)
        self._aside = None
        return 1

    def copy_before(self) -> None:
        """Let go of the tensors that `.grad` held before the batch, and keep what is in them."""
        self._before = [None if before is None else before.clone() for before in self._before]

    @torch.no_grad()
    def merge(self, factor: Number | Tensor) -> Number | Tensor:
        """Add what `.grad` held before the batch to what `factor` is for, once; returns what is left to multiply by."""
        if self._merged or all(before is None for before in self._before):
            return factor
        self._merged = True
        for gradients in self.gradients():
            scale(gradients, factor)
        for leaf, before in zip(self._leaves, self._before, strict=True):
            if before is not None:
                leaf.grad = copied(before, leaf.grad_dtype) if leaf.grad is None else summed(leaf.grad, before)
        return 1

    @torch.no_grad()
    def commit(self) -> None:
        """Leave the sums in `.grad`, rounded, in the tensors that were there before, if there were any.

        From the first of those on there is no way back, as nothing holds their old contents.
        """
        for leaf, before, dtype in zip(self._leaves, self._before, self._grad_dtypes, strict=True):
            gradient = self._release(leaf, dtype)
            if gradient is None:
                leaf.grad = before
            elif before is not None and before.layout == gradient.layout == torch.strided:
                before.copy_(gradient)
                leaf.grad = before
            else:
                leaf.grad = gradient.to(dtype or leaf.dtype)

    def forget(self) -> None:
        """Make all sums zero, and drop what was not a number with them.

        If the host knew that nothing counts, no backward has run, and none has said which leaves the loss reaches.
        """
        pairs = list(zip(self._leaves, self._before, strict=True))
        unknown = all(leaf.grad is None for leaf, before in pairs if before is None)
        for i, (leaf, before) in enumerate(pairs):
            like = leaf if unknown and i < self._given else leaf.grad
            leaf.grad = None if like is None or before is not None else torch.zeros_like(like, dtype=leaf.grad_dtype)

    def restore(self) -> None:
        """Bring back `.grad` as it was before the batch; None stays None."""
        for leaf, before, dtype in zip(self._leaves, self._before, self._grad_dtypes, strict=False):
            self._release(leaf, dtype)
            leaf.grad = before

    def _own(self, leaf: Tensor) -> None:
        if id(leaf) in _claims:
            raise BatchError(
                f"the gradient of a parameter of shape {tuple(leaf.shape)} is still being summed by another "
                "Accumulator: call its .finish() or .discard() first; a loss that only passes through a network which "
                "another Accumulator trains needs .requires_grad_(False) on that network meanwhile"
            )
        self._grad_dtypes.append(leaf.grad_dtype)
        self._before.append(leaf.grad)
        self._leaves.append(leaf)  # noted first and changed afterwards, so that an interruption can be undone
        self._known.add(id(leaf))
        if self._claims:
            _claims[id(leaf)] = self
        leaf.grad = None
        if self._dtype is not None and leaf.is_floating_point():
            set_grad_dtype(leaf, _sum_dtype(self._dtype, leaf.grad_dtype or leaf.dtype))
        if self._aside is not None:
            self._aside.append(None)

    def _release(self, leaf: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        """Take the sum out of `.grad`, which then accepts the dtype that it accepted before."""
        gradient = leaf.grad
        leaf.grad = None
        set_grad_dtype(leaf, dtype)
        if self._claims:
            _claims.pop(id(leaf), None)
        return gradient

    def _swap(self) -> None:
        aside = self._aside or [None] * len(self._leaves)
        self._aside = [leaf.grad for leaf in self._leaves]
        for leaf, gradient in zip(self._leaves, aside, strict=True):
            leaf.grad = gradient


def _run(one: Pass, *, retain_graph: bool = False) -> None:
    """`torch.autograd.backward`, whose checks of scalars take a good part of a small piece's time."""
    values, seeds = tuple(one.values), tuple(one.seeds)
    if has_torch_function(values) or torch._C._are_functorch_transforms_active():
        torch.autograd.backward(values, seeds, retain_graph=retain_graph)
    else:
        _engine_run_backward(values, seeds, retain_graph, False, (), allow_unreachable=True, accumulate_grad=True)


def _first_backward_of_two(main: Pass) -> None:
    try:
        _run(main, retain_graph=True)
    except RuntimeError as error:
        if "donated buffers" not in str(error):
            raise
        raise LossError(
            "terms whose counts are known at different times take two backwards per piece, and a compiled model gives "
            "its buffers away in the first: tell the count of the Mean beforehand with counts= of .backward or .step, "
            "or set torch._functorch.config.donated_buffer = False before the model is compiled"
        ) from error


def _sum_dtype(wanted: SumDtype, own: torch.dtype) -> torch.dtype:
    if wanted == "auto":
        return torch.float32 if own.itemsize < 4 else own
    return wanted

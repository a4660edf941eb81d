"""NNX modules as functions of their parameters, for looking at them without changing them."""

import sys
from collections.abc import Callable
from typing import Any

import jax

from ._tree import Tree


class Modules:
    """A module taken apart, to be merged anew for every call.

    Args:
        module: the user's, which stays as it is.
    """

    def __init__(self, module: Any) -> None:
        self._nnx = sys.modules["flax.nnx"]
        self._graphdef, self.params, self.rest = self._nnx.split(module, self._nnx.Param, ...)
        self.in_eval_mode = False
        self.widen: Callable[[Any], Any] = lambda leaf: leaf
        norms = [
            (".".join(map(str, path)), node)
            for path, node in self._nnx.iter_graph(module)
            if isinstance(node, self._nnx.BatchNorm)
        ]
        self.batch_norms = [name or "the model" for name, node in norms if not node.use_running_average]

    def function(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """`fun(module, *batch)` as a function of the parameters."""
        return lambda params, *batch: fun(self.merged(params), *batch)

    def merged(self, params: Tree) -> Any:
        """A module of its own."""
        state = jax.tree.map(self.widen, self.rest)
        module = self._nnx.merge(self._graphdef, params, state)
        if self.in_eval_mode:
            module.eval()
        return module

    def after(self, run: Callable[[Any], Any], params: Tree) -> tuple[Tree, bool]:
        """The state that a call leaves, random counts as before, and whether statistics of the batch moved."""
        module = self.merged(params)
        before = self._nnx.state(module, self._nnx.BatchStat)
        before = [variable.get_raw_value() for _, variable in self._nnx.to_flat_state(before)]
        run(module)
        _, _, random, left = self._nnx.split(module, self._nnx.Param, self._nnx.RngState, ...)
        _, _, random, _ = self._nnx.split(self.merged(params), self._nnx.Param, self._nnx.RngState, ...)
        statistics = self._nnx.to_flat_state(self._nnx.state(module, self._nnx.BatchStat))
        moved = any(old is not new.get_raw_value() for old, (_, new) in zip(before, statistics, strict=True))
        return self._nnx.merge_state(random, left), moved


def is_module(params: Any) -> bool:
    """Whether that is one; only who uses NNX can have any."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(params, nnx.Pytree)

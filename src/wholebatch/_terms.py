"""The grammar of a loss: one term or a mapping of terms, each divided by rows, by its own count, or by nothing."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from ._errors import LossError, LossTypeError

ONLY_TERM = "loss"
"""The name of the term of a loss that is not a mapping."""


class Per(Enum):
    """What a term is divided by."""

    ROWS = "rows"
    OWN_COUNT = "its own count"
    NOTHING = "nothing"


def named_terms(returned: Any) -> dict[str, Any]:
    """What a loss function returned, by the names of its terms."""
    if not isinstance(returned, Mapping):
        return {ONLY_TERM: returned}
    terms = dict(named(returned, "terms"))
    if not terms:
        raise LossError("the loss function returned a mapping with no terms")
    return terms


def named(mapping: Mapping[Any, Any], what: str) -> Mapping[str, Any]:
    """The mapping, if its keys are names."""
    for key in mapping:
        if not isinstance(key, str):
            raise LossTypeError(f"{what} are named by strings, got the key {key!r} of type {type(key).__name__}")
    return mapping


def title(name: str) -> str:
    """How an error speaks of a term."""
    return "the loss" if name == ONLY_TERM else f"term {name!r}"


def described(value: Any) -> str:
    """A value as errors show it, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

"""Checkpoints: folders of safetensors and JSON with checksums, the newest sound one first.

    checkpoints/step-000100/{weights.safetensors, optimizer.safetensors, state.json, SHA256SUMS}

Nothing in them is executed when they are loaded.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from .backend import State
from .errors import DamagedError
from .files import as_json, damaged, remove_folder, write_folder
from .weights import Weights

WEIGHTS, OPTIMIZER, STATE = FILES = "weights.safetensors", "optimizer.safetensors", "state.json"
FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A sound checkpoint.

    Args:
        path: its folder.
        facts: what its `state.json` says: `step`, `settings` and the rest.
    """

    path: Path
    facts: dict[str, Any]

    @property
    def step(self) -> int:
        """How many optimizer steps it holds."""
        return int(self.facts["step"])

    def state(self) -> State:
        """What the backend continues from."""
        return State(load_file(self.path / WEIGHTS), load_file(self.path / OPTIMIZER), self.facts["backend"])


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: where they are.
        keep: how many stay.
    """

    def __init__(self, folder: Path, keep: int = 1) -> None:
        self._folder, self._keep = folder, keep

    def __iter__(self) -> Iterator[Path]:
        """Every one, sound or not, newest first."""
        folders = [path for path in self._folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
        yield from sorted(folders, key=_step, reverse=True)

    def save(self, step: int, state: State, facts: dict[str, Any]) -> Path:
        """Write one beside, rename it, and remove those that are older than the last few.

        Later ones belong to what was lost, and go too.
        """
        path = self._folder / f"step-{step:06d}"
        everything = {**facts, "format": FORMAT, "step": step, "backend": state.scalars}
        write_folder(
            path,
            {
                WEIGHTS: _writer(state.weights),
                OPTIMIZER: _writer(state.moments),
                STATE: lambda beside: _write_json(beside, everything),
            },
        )
        later, earlier = [p for p in self if _step(p) > step], [p for p in self if _step(p) < step]
        for gone in (*later, *earlier[self._keep - 1 :]):
            remove_folder(gone)
        for left in self._folder.glob(".step-*"):  # by a kill
            shutil.rmtree(left, ignore_errors=True)
        return path

    def newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest sound one; None if there is none at all.

        Args:
            warn: is told about each that is damaged.
        """
        broken: list[str] = []
        for path in self:
            file = damaged(path, FILES)
            if file is None:
                facts = json.loads((path / STATE).read_text(encoding="utf-8"))
                if facts["format"] != FORMAT:
                    raise DamagedError(f"{path} has the format {facts['format']}, and this version reads {FORMAT}")
                return Checkpoint(path, facts)
            broken.append(f"{path / file} is damaged: its checksum is not the one that it was written with")
            warn(f"{broken[-1]}; using the checkpoint before it")
        if broken:
            raise DamagedError(f"no checkpoint is left: {broken[-1]}; --overwrite starts afresh")
        return None


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _writer(arrays: Weights) -> Callable[[Path], None]:
    def write(beside: Path) -> None:
        try:
            save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, beside)
        except SafetensorError as error:  # the system's error is only in its text
            found = re.search(r"os error (\d+)", str(error))
            if not found:
                raise
            raise OSError(int(found[1]), os.strerror(int(found[1]))) from error

    return write


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(as_json(data), encoding="utf-8")

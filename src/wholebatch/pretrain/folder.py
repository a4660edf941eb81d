"""The output folder of a run, and what it holds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .checkpoints import FILES, Checkpoint, Checkpoints
from .errors import DamagedError, FolderError
from .files import (
    CHECKSUMS,
    as_json,
    checksums,
    damaged,
    expected_checksums,
    naming_the_file,
    remove_folder,
    write_text,
)

METRICS, TOKENIZER, SUMMARY, REPORT, COMPARISON = (
    "metrics.jsonl",
    "tokenizer.json",
    "summary.json",
    "report.html",
    "comparison.json",
)


class Folder:
    """Where a run's files are.

    Args:
        path: the folder, which need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics, self.tokenizer = path / METRICS, path / TOKENIZER
        self.summary, self.report, self.comparison = path / SUMMARY, path / REPORT, path / COMPARISON

    def open(self, *, resume: bool, overwrite: bool, warn: Callable[[str], None]) -> Checkpoint | None:
        """What to continue from; None to begin.

        Args:
            resume: continue what is there.
            overwrite: begin, whatever is there.
            warn: is told about damaged checkpoints.
        """
        if self.path.exists() and not self.path.is_dir():
            raise FolderError(f"--out {self.path} is a file: give a folder")
        if overwrite:
            return None
        if not resume and self._holds_a_run():
            raise FolderError(
                f"{self.path} holds another run: --resume continues it, --overwrite replaces it, --out puts this one "
                "elsewhere"
            )
        return Checkpoints(self.checkpoints).newest(warn)

    def seal(self) -> None:
        """Write down the checksums of a run that is done."""
        write_text(self.path / CHECKSUMS, checksums(self.path, self._files()))

    @property
    def is_sealed(self) -> bool:
        """Whether the run was done."""
        return (self.path / CHECKSUMS).exists()

    def verify(self) -> int:
        """How many files of a run that was done are as they were written; an error names one that is not."""
        folders = {self.path: (METRICS, SUMMARY, REPORT), **dict.fromkeys(Checkpoints(self.checkpoints), FILES)}
        for folder, files in folders.items():
            file = damaged(folder, files)
            if file is not None:
                raise DamagedError(f"{folder / file} is not as it was written: its checksum differs")
        return sum(len(expected_checksums(folder)) for folder in folders)

    def prepare(self, *, anew: bool) -> None:
        """Make it ready for writing; what is not done is not sealed.

        Args:
            anew: remove the run that is there. Only what a run writes: people keep other things in folders too.
        """
        with naming_the_file(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / CHECKSUMS).unlink(missing_ok=True)
            if anew:
                for name in self._files():
                    (self.path / name).unlink(missing_ok=True)
                for path in Checkpoints(self.checkpoints):
                    remove_folder(path)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """What the report is made from, with the metrics."""
        write_text(self.summary, as_json(summary))

    def read_summary(self) -> dict[str, Any]:
        """As it was written."""
        found: dict[str, Any] = json.loads(self.summary.read_text(encoding="utf-8"))
        return found

    def read_comparison(self) -> dict[str, Any]:
        """As it was written; empty if none was made."""
        return dict(json.loads(self.comparison.read_text(encoding="utf-8"))) if self.comparison.exists() else {}

    def _files(self) -> list[str]:
        every = (METRICS, SUMMARY, REPORT, TOKENIZER, COMPARISON)
        return [name for name in every if (self.path / name).exists()]

    def _holds_a_run(self) -> bool:
        return self.metrics.exists() or any(Checkpoints(self.checkpoints))

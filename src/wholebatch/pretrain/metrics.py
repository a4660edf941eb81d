"""`metrics.jsonl`: one object per optimizer step, in one line each, written whole."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .files import flush, naming_the_file, write_text

Record = dict[str, Any]


class Metrics:
    """The lines of a run's steps up to the one that it continues from, and those that follow.

    Args:
        path: the file.
        step: lines of later steps belong to what was lost, and are cut off.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        kept = [json.dumps(record) + "\n" for record in read(path) if record["step"] <= step]
        write_text(path, "".join(kept))
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def close(self) -> None:
        """No more lines."""
        os.close(self._file)

    def append(self, record: Mapping[str, Any]) -> None:
        """One line in one write, so that a kill leaves it whole or not there."""
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        with naming_the_file(self._path):
            length = os.fstat(self._file).st_size
            try:
                written = os.write(self._file, line)
                if written < len(line):
                    os.write(self._file, line[written:])  # says what is in the way
            except OSError:
                os.ftruncate(self._file, length)
                raise

    def flush(self) -> None:
        """Wait until the lines are on the disk."""
        with naming_the_file(self._path):
            flush(self._path)


def read(path: Path) -> Iterator[Record]:
    """The records of a file, as far as they are whole."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            return
        yield record

"""The text to train on: files, folders, JSON lines, or what every Python brings along.

A document is a file, or one line's field; documents come in a fixed order.
"""

import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .errors import DataError


class Text:
    """Documents in a fixed order, read anew whenever they are asked for.

    Args:
        data: files and folders; without any, the source files of the running Python's standard library.
        field: read files as JSON lines, and take this field of each.
    """

    def __init__(self, data: Sequence[str] = (), field: str | None = None) -> None:
        self._field = field
        self.files = _files(data) if data else _standard_library()
        self.name = ", ".join(data) if data else "the source of Python's standard library"

    def documents(self) -> Iterator[str]:
        """Each document, in order."""
        for file in self.files:
            with _explaining(file):
                yield from _whole(file) if self._field is None else _fields(file, self._field)

    def digest(self) -> str:
        """What stands for the content, wherever the files lie."""
        digest = hashlib.sha256()
        for document in self.documents():
            content = document.encode()
            digest.update(len(content).to_bytes(8, "little") + content)
        return digest.hexdigest()


def _standard_library() -> list[Path]:
    """Its top level: a few megabytes of prose and code on any machine."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def _files(data: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for given in data:
        path = Path(given)
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file, path))
            if not inside:
                raise DataError(f"the folder {given} holds no files")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"there is no file or folder {given}")
    return found


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


@contextmanager
def _explaining(file: Path) -> Iterator[None]:
    """Why a file cannot be read."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 text (byte {error.object[error.start]:#04x} at position {error.start}): convert it, "
            f"for instance with iconv --from-code=latin1 --to-code=utf-8"
        ) from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error


def _whole(file: Path) -> Iterator[str]:
    text = file.read_text(encoding="utf-8")
    if not text.strip():
        raise _empty(file)
    yield text


def _fields(file: Path, field: str) -> Iterator[str]:
    """One line at a time: the file may be larger than the memory, and only a newline ends a line of JSON."""
    found = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            found += 1
            yield _field(f"line {number} of {file}", line, field)
    if not found:
        raise _empty(file)


def _field(where: str, line: bytes, field: str) -> str:
    try:
        document = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    value = document.get(field) if isinstance(document, dict) else None
    if not isinstance(value, str):
        keys = ", ".join(map(str, document)) if isinstance(document, dict) else type(document).__name__
        raise DataError(f"{where} has no text in the field {field!r}: it has {keys}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where} has half a character (a lone surrogate) in the field {field!r}: remove it") from error
    return value


def _empty(file: Path) -> DataError:
    return DataError(f"{file} is empty: there is nothing to train on")

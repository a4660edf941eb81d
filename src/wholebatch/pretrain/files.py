"""Files that are whole or not there: written beside, flushed to the disk, renamed."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import DiskError

CHECKSUMS = "SHA256SUMS"


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Have a file written under another name, and give it its own once it is on the disk.

    Args:
        path: where it is to be.
        write: writes it to the path that it is given.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with naming_the_file(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(beside)
            flush(beside)
            beside.replace(path)
            flush(path.parent)
        finally:
            beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """A text file, whole or not there."""
    write_file(path, lambda beside: _write(beside, text))


def write_folder(path: Path, files: Mapping[str, Callable[[Path], None]]) -> None:
    """A folder of files and their checksums, whole or not there; what was there before is replaced.

    Args:
        path: where it is to be.
        files: writes each file, by name.
    """
    beside = path.with_name(f".{path.name}.part")
    with naming_the_file(path):
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            for name, write in files.items():
                write(beside / name)
            _write(beside / CHECKSUMS, checksums(beside, files))
            for name in (*files, CHECKSUMS):
                flush(beside / name)
            flush(beside)
            if path.exists():  # it was damaged: what is sound is not written again
                remove_folder(path)
            beside.rename(path)
            flush(path.parent)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """It loses its name first, so that what has one is whole."""
    nameless = path.with_name(f".{path.name}.gone")
    with naming_the_file(path):
        shutil.rmtree(nameless, ignore_errors=True)
        path.rename(nameless)
        shutil.rmtree(nameless, ignore_errors=True)


def checksums(folder: Path, names: Any) -> str:
    """What `sha256sum --check` reads."""
    return "".join(f"{checksum(folder / name)}  {name}\n" for name in names)


def damaged(folder: Path, names: Any) -> str | None:
    """Which of a folder's files is not as it was written; None if all are.

    Args:
        folder: holds the files and their checksums.
        names: the files that have to be there.
    """
    try:
        written = expected_checksums(folder)
    except (OSError, ValueError):
        return CHECKSUMS
    if not {*names} <= {*written}:
        return CHECKSUMS
    for name, expected in written.items():
        try:
            if checksum(folder / name) != expected:
                return name
        except OSError:
            return name
    return None


def expected_checksums(folder: Path) -> dict[str, str]:
    """Those that a folder's files were written with, by name."""
    lines = (folder / CHECKSUMS).read_text(encoding="ascii").splitlines()
    return {name: expected for expected, name in (line.split("  ", 1) for line in lines)}


def checksum(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def as_json(data: Mapping[str, Any]) -> str:
    """For people and programs."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def naming_the_file(path: Path) -> Iterator[None]:
    """Whatever keeps a file from being written is told with its name."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise DiskError(f"{'the disk is full' if full else error.strerror or error}: cannot write {path}") from error


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")

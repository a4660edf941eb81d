"""The processes that the tests in here share."""

from collections.abc import Iterator

import pytest
from crew import Crew, Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    process = Nursery()
    try:
        yield process
    finally:
        process.end()


@pytest.fixture(scope="session")
def crew(nursery: Nursery) -> Iterator[Crew]:
    processes = Crew(nursery)
    try:
        yield processes
    finally:
        processes.end()

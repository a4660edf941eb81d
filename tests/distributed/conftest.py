"""The processes that the tests in here share."""

from collections.abc import Iterator

import pytest
from crew import Crew


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    processes = Crew()
    try:
        yield processes
    finally:
        processes.end()

"""Four processes that run tests together: started once, connected by gloo, gone when the tests are.

A test decorated with `@on_ranks(n)` runs in the first n of them, each with a `Rank` that says which one it is. They are
forked from a nursery that has loaded torch, which takes longer than most tests.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, Pipe
from pathlib import Path
from typing import Any

SIZE = 4
TIME_OUT = 60
TESTS = Path(__file__).parents[1]
LOADED_ONCE = "pytest", "torch._dynamo", "torch.profiler", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"


@dataclass(frozen=True)
class Rank:
    """One of the processes of a test."""

    rank: int
    world: int
    group: Any

    def impatient(self) -> "Rank":
        """The first two in a group of their own, which gives up sooner and may break."""
        return Rank(self.rank, self.world, _impatient.pop())


_impatient: list[Any] = []
IMPATIENT, SOONER = 4, 4


def on_ranks(world: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test in `world` processes; its first argument is a `Rank`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def test(crew: Crew, **arguments: Any) -> None:
            crew.run(world, function.__code__.co_filename, function.__name__, arguments)

        functools.update_wrapper(test, function)
        del test.__wrapped__  # pytest would look at its arguments
        parameters = list(inspect.signature(function).parameters.values())[1:]
        crew = inspect.Parameter("crew", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([crew, *parameters])
        test.in_process = function
        return test

    return decorate


class Nursery:
    """A process of this file that has loaded torch, and forks others."""

    def __init__(self) -> None:
        self._connection, its = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(its.fileno())],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MEASURED": str(int(_is_measured()))},
            pass_fds=[its.fileno()],
            start_new_session=True,
        )
        its.close()

    def fork(self, *arguments: Any) -> int:
        """Start the processes of a crew; returns the number of their group."""
        self._connection.send(arguments)
        return self._connection.recv()

    def end(self) -> None:
        """Leave no process behind."""
        self._connection.close()
        self._process.wait(TIME_OUT)


class Crew:
    """Processes that wait for tests.

    Args:
        nursery: where they come from.
        size: how many.
        time_out: seconds after which they give one another up.
    """

    def __init__(self, nursery: Nursery, size: int = SIZE, time_out: float = TIME_OUT / 2) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._listener = Listener(family="AF_UNIX")
        self._group = nursery.fork(size, time_out, self._listener.address, self._folder.name)
        self._connections: dict[int, Connection] = {}
        self._listener._listener._socket.settimeout(TIME_OUT)
        while len(self._connections) < size:
            connection = self._listener.accept()
            self._connections[connection.recv()] = connection

    def run(self, world: int, file: str, name: str, arguments: dict[str, Any]) -> None:
        """Run a test function in the first processes; raises if it raised in any of them."""
        answers = self.ask(world, file, name, arguments)
        failed = {rank: answers.get(rank, "the process has ended") for rank in range(world) if answers.get(rank) != ""}
        assert not failed, "\n".join(f"rank {rank}:\n{answer}" for rank, answer in failed.items())

    def ask(self, world: int, file: str, name: str, arguments: dict[str, Any]) -> dict[int, str]:
        """What went wrong in each process; one that ended has nothing to say."""
        for rank in range(world):
            self._connections[rank].send((world, file, name, arguments))
        answers = {}
        for rank in range(world):
            if not self._connections[rank].poll(TIME_OUT):
                self.end()
                raise TimeoutError(f"{name}: no answer from rank {rank} within {TIME_OUT} s")
            with suppress(EOFError, ConnectionResetError):
                answers[rank] = self._connections[rank].recv()
        return answers

    def end(self) -> None:
        """Leave no process behind."""
        for connection in self._connections.values():
            connection.close()
        patience = time.monotonic() + 10
        while not self.is_gone():
            if time.monotonic() > patience:
                os.killpg(self._group, signal.SIGKILL)
            time.sleep(0.01)
        self._listener.close()
        self._folder.cleanup()

    def is_gone(self) -> bool:
        """Whether no process is left."""
        with suppress(ProcessLookupError):
            os.killpg(self._group, 0)
            return False
        return True


def _is_measured() -> bool:
    coverage = sys.modules.get("coverage")
    return coverage is not None and coverage.Coverage.current() is not None


def _nurse(connection: Connection) -> tuple[Any, ...]:
    """Fork for whoever asks; returns what was asked for in the process that was forked, and not at all here."""
    for name in LOADED_ONCE:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with suppress(EOFError, ConnectionResetError):
        while True:
            arguments = connection.recv()
            process = os.fork()
            if process == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                connection.close()
                return arguments
            connection.send(process)
    os._exit(0)


def _fork(size: int) -> int | None:
    """The rank of each process that is forked; the first one waits for them all, and has none."""
    rank = next((rank for rank in range(size) if os.fork() == 0), None)
    for _ in range(size if rank is None else 0):
        os.wait()
    return rank


def _work(rank: int, size: int, time_out: float, address: str, folder: str) -> None:
    """What each process does: answer, until nobody asks."""
    import torch.distributed as dist

    connection = Client(address)
    connection.send(rank)
    patience = timedelta(seconds=time_out)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=patience)
    groups = {world: dist.new_group(range(world), timeout=patience) for world in range(1, size + 1)}
    _impatient.extend(dist.new_group([0, 1], timeout=timedelta(seconds=SOONER)) for _ in range(IMPATIENT))
    sys.modules["crew"] = sys.modules["__main__"]  # the same one for the tests
    modules: dict[str, Any] = {}
    with suppress(EOFError, ConnectionResetError):
        while True:
            world, file, name, arguments = connection.recv()
            try:
                if file not in modules:
                    modules[file] = _load(file, f"in_process_{len(modules)}")
                test = getattr(modules[file], name)
                getattr(test, "in_process", test)(Rank(rank, world, groups[world]), **arguments)
                connection.send("")
            except BaseException:
                connection.send(traceback.format_exc())
    with suppress(Exception):
        dist.destroy_process_group()


def _load(file: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    import faulthandler
    import warnings

    faulthandler.enable()

    warnings.simplefilter("error")
    sys.path[:0] = [str(TESTS), str(TESTS / "torch"), str(TESTS / "distributed")]
    size, time_out, address, folder = _nurse(Connection(int(sys.argv[1])))
    rank = _fork(size)
    if rank is not None:
        measurement = None
        if os.environ["MEASURED"] == "1":
            import coverage

            root = TESTS.parent
            measurement = coverage.Coverage(
                str(root / ".coverage"), data_suffix=True, config_file=str(root / "pyproject.toml")
            )
            measurement.start()
        try:
            _work(rank, size, time_out, address, folder)
        finally:
            if measurement is not None:
                measurement.stop()
                measurement.save()
    sys.stdout.flush()
    os._exit(0)  # an interpreter that has loaded torch takes a second to end

"""The random generators of Python and, where it is in use, of NumPy."""

import random
import sys
from typing import Any


class PythonGenerators:
    """As they were when this was made."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), _numpy_state()

    def have_moved(self) -> bool:
        """Whether anybody has drawn from them since."""
        return random.getstate() != self._python or repr(_numpy_state()) != repr(self._numpy)

    def restore(self) -> None:
        """Put them back."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()

"""What can go wrong around a run, one class per cause; those that are also `ValueError` are for the caller to mend."""

from .._errors import WholeBatchError


class DataError(WholeBatchError, ValueError):
    """Text that cannot be read, or too little of it."""


class FolderError(WholeBatchError, ValueError):
    """The output folder holds another run, or one with other settings."""


class BackendMissing(WholeBatchError, ValueError):  # noqa: N818 - says what is the matter
    """The framework to train with is not installed."""


class DamagedError(WholeBatchError):
    """A file of a run is not as it was written."""


class DiskError(WholeBatchError):
    """A file cannot be written."""

"""The file tier: blocks in preallocated slabs on a local disk."""

from tierd_backends.file.backend import FileBackend
from tierd_backends.file.options import FileOptions

__all__ = ["FileBackend", "FileOptions"]

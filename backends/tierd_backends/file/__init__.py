"""The file tier: blocks in preallocated slabs on a local disk."""

from tierd_backends.file.backend import FileBackend, FileOptions

__all__ = ["FileBackend", "FileOptions"]

"""The interface of a device, for copies between its memory and slots.

Addresses, streams and events are integers that only their device interprets. No call waits for
a copy: a call puts work on a stream, and `query` says whether an event has happened.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierd.errors import TierdError
from tierd.shared_memory.exports import Export

Addresses = npt.NDArray[np.uint64]


class DeviceError(TierdError):
    """A call to a device failed. If `sticky`, all later calls of this process fail too."""

    def __init__(self, message: str, *, sticky: bool = False) -> None:
        super().__init__(message)
        self.sticky = sticky


class CannotOpenError(DeviceError):
    """This process cannot open an export, event or device; the text says what to change."""


class Direction(enum.Enum):
    """The direction of a copy."""

    LOAD = "load"
    """From slots into pages."""

    STORE = "store"
    """From pages into slots."""


class Pitched(NamedTuple):
    """`rows` rows of `width` bytes, at a constant distance in pages and another in slots."""

    page: int
    page_pitch: int
    slot: int
    slot_pitch: int
    width: int
    rows: int


class Device(ABC):
    """One device; any thread of the process may call it. Failures raise DeviceError."""

    uuid: bytes
    name: str
    """Name for logs and status."""

    # --- memory ---------------------------------------------------------------------

    @abstractmethod
    def open(self, export: Export) -> int:
        """Map a peer's allocation and return its address in this process.

        An allocation that is opened twice is mapped once. The caller still owns the descriptors
        of the export's parts. Raises CannotOpenError.
        """

    @abstractmethod
    def close(self, address: int) -> None:
        """Undo one `open`. The caller guarantees that no copy uses the memory."""

    @abstractmethod
    def allocate(self, size_bytes: int) -> int:
        """Allocate device memory and return its address."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Free memory from `allocate`."""

    @abstractmethod
    def pin(self, address: int, size_bytes: int) -> None:
        """Page-lock host memory so that it copies at full speed; may take 0.1 s per GB."""

    @abstractmethod
    def unpin(self, address: int) -> None:
        """Undo the `pin` of the memory that begins at `address`."""

    # --- order ----------------------------------------------------------------------

    @abstractmethod
    def create_stream(self, *, urgent: bool) -> int:
        """Create a queue whose work is done in order; return its number."""

    @abstractmethod
    def create_event(self) -> int:
        """Create an event that this process records and queries; return its number."""

    @abstractmethod
    def open_event(self, handle: bytes, bases: list[int]) -> int:
        """Open an event that a peer exported; return its number. Raises CannotOpenError.

        `bases` are the addresses of the attachment's allocations, for handles that name one.
        """

    @abstractmethod
    def close_event(self, event: int) -> None:
        """Close an event from `create_event` or `open_event`."""

    @abstractmethod
    def record(self, event: int, stream: int) -> None:
        """Make the event happen when the stream has done all work put on it so far."""

    @abstractmethod
    def query(self, event: int) -> bool:
        """Whether the newest record of the event has happened; true if it was never recorded."""

    @abstractmethod
    def wait(self, stream: int, event: int, value: int) -> None:
        """Make the stream wait until the event has happened.

        `value` is the result of the peer's record: counters wait for it; events that know
        only their newest record ignore it.
        """

    # --- copies ---------------------------------------------------------------------

    @abstractmethod
    def copy(
        self,
        pages: Addresses,
        slots: Addresses,
        lengths: Addresses,
        direction: Direction,
        stream: int,
    ) -> None:
        """Copy pieces, in any order. The caller may change the arrays after the call."""

    @abstractmethod
    def copy_pitched(self, pieces: list[Pitched], direction: Direction, stream: int) -> None:
        """Copy pieces of rows at constant distances."""

    @abstractmethod
    def gather(
        self, pages: Addresses, lengths: Addresses, staging: int, direction: Direction, stream: int
    ) -> None:
        """Move pieces between pages and device memory, in which they are contiguous.

        STORE gathers the pages into `staging`; LOAD scatters `staging` into the pages.
        """

    @abstractmethod
    def shut(self) -> None:
        """Release all resources in the order that the device needs; idempotent."""

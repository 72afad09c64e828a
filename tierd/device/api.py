"""What a device must be able to do so that the daemon can copy between its memory and slots.

All in integers: addresses, streams and events are numbers that only their device understands.
Nothing here waits for a copy: a call puts work on a stream, and `query` says what has been done.
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
    """A device's call has failed. If `sticky`, every later one of this process will, too."""

    def __init__(self, message: str, *, sticky: bool = False) -> None:
        super().__init__(message)
        self.sticky = sticky


class CannotOpenError(DeviceError):
    """An export, an event or a device cannot be opened here; says which setting to change."""


class Direction(enum.Enum):
    """Which way a copy goes."""

    LOAD = "load"
    """From slots into pages."""

    STORE = "store"
    """From pages into slots."""


class Pitched(NamedTuple):
    """`rows` rows of `width` bytes each, at a constant distance on either side."""

    page: int
    page_pitch: int
    slot: int
    slot_pitch: int
    width: int
    rows: int


class Device(ABC):
    """One device, used from several threads of one process. Failures raise DeviceError."""

    uuid: bytes
    name: str
    """For logs and status."""

    # --- memory ---------------------------------------------------------------------

    @abstractmethod
    def open(self, export: Export) -> int:
        """Map a peer's allocation; its base address here. Raises CannotOpenError.

        Opened twice it is mapped once. Descriptors of the export's parts stay the caller's.
        """

    @abstractmethod
    def close(self, address: int) -> None:
        """Undo one `open`. The caller has seen to it that no copy touches it any more."""

    @abstractmethod
    def allocate(self, size_bytes: int) -> int:
        """Device memory of our own."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""

    @abstractmethod
    def pin(self, address: int, size_bytes: int) -> None:
        """Page-lock host memory, which copies at full speed then; may take 0.1 s a GB."""

    @abstractmethod
    def unpin(self, address: int) -> None:
        """Undo `pin` for what began there."""

    # --- order ----------------------------------------------------------------------

    @abstractmethod
    def create_stream(self, *, urgent: bool) -> int:
        """A queue of work that is done in order."""

    @abstractmethod
    def create_event(self) -> int:
        """An event of our own, to be recorded and queried."""

    @abstractmethod
    def open_event(self, handle: bytes, bases: list[int]) -> int:
        """A peer's event, as its side of the device exported it. Raises CannotOpenError.

        `bases` are the addresses of the attachment's allocations, for handles that name one.
        """

    @abstractmethod
    def close_event(self, event: int) -> None:
        """Let go of an event, ours or a peer's."""

    @abstractmethod
    def record(self, event: int, stream: int) -> None:
        """The event happens when the stream has done what it has been given so far."""

    @abstractmethod
    def query(self, event: int) -> bool:
        """Whether the newest record of the event has happened; true if there is none."""

    @abstractmethod
    def wait(self, stream: int, event: int, value: int) -> None:
        """Have the stream do nothing more until the event has happened.

        `value` is what its side's record returned: counters wait for it, events that know
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
        """Copy so many pieces, in any order. The arrays may change once this returns."""

    @abstractmethod
    def copy_pitched(self, pieces: list[Pitched], direction: Direction, stream: int) -> None:
        """Copy pieces whose rows lie at constant distances."""

    @abstractmethod
    def gather(
        self, pages: Addresses, lengths: Addresses, staging: int, direction: Direction, stream: int
    ) -> None:
        """Move pieces between pages and device memory, where they lie one after the other.

        STORE gathers pages into `staging`, LOAD scatters it over them.
        """

    @abstractmethod
    def shut(self) -> None:
        """Let go of everything, in the order that the device needs; idempotent."""

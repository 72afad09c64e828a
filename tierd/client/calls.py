"""The calls of an engine that must not wait: lookups, loads, stores, and copies by the daemon."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from tierd.client.attaching import Attachment, PendingCopy, Probe
from tierd.client.known import slot_views
from tierd.client.leases import AskedFor, numbers_of
from tierd.client.session import ClientSession
from tierd.client.values import Handle, Lease, PendingAcquire, Reservation, check_hashes
from tierd.shared_memory.exports import NO_EVENT, Export, PageLayout
from tierd.wire import messages as m

HINT_MS_MAX: Final = 1 << 40
"""Longest hint, in ms: far more than any daemon grants."""


class EngineCalls(ClientSession):
    """Calls of an engine. Only `acquire`, `reserve`, `commit` and `detach` may block."""

    # --- looking up -------------------------------------------------------------------

    def begin_acquire(
        self,
        handles: Sequence[Handle],
        hashes: Sequence[bytes],
        deadline_ms: int,
        *,
        request: int = 0,
        waited_ms: int = 0,
        prefill_tokens_per_s: int = 0,
        own: int = 0,
    ) -> PendingAcquire:
        """Ask for a lease of the longest prefix of `hashes` that all `handles` have. Never blocks.

        `hashes` are 32 bytes each, in the order of the prefix; hashes beyond KEYS_PER_CALL_MAX
        are ignored. The daemon answers at the latest after `deadline_ms`. `own` is the number of
        leading blocks that the engine's own cache holds: the lease starts after them.

        `request` identifies a user's request (`request_number`): pass the same number each time
        that the request asks, so that it counts as one use. `waited_ms` is the request's age,
        `prefill_tokens_per_s` the engine's prefill speed; 0 means unknown for both.
        Raises ValueError for a hash of a wrong length.
        """
        with self._lock:
            self.poll()
            about = AskedFor(request, max(0, waited_ms), max(0, prefill_tokens_per_s), own)
            return self._acquires.begin(handles, hashes, deadline_ms, about)

    def acquire(
        self, handles: Sequence[Handle], hashes: Sequence[bytes], deadline_ms: int
    ) -> Lease | None:
        """`begin_acquire`, and wait for the answer: at most `deadline_ms` plus `call_timeout_ms`.

        Returns None when no tier has the first block, or while the daemon is away. Call
        `release` when done, and `loaded` to have the daemon count the hit.
        """
        with self._lock:
            self._ensure_ready(handles)
            pending = self._acquires.begin(handles, hashes, deadline_ms, AskedFor())
            end = time.monotonic() + deadline_ms / 1000 + self._waiting.timeout_s
            while not pending.done:
                left = end - time.monotonic()
                if left <= 0:
                    self.cancel(pending)
                    break
                self._connection.receive(wait_s=left)
            return pending.lease

    def ready(self, pending: PendingAcquire) -> None:
        """Tell the daemon that the engine could compute the request now. Never blocks.

        The daemon may then answer before the deadline with the prefix that it has.
        """
        with self._lock:
            self._acquires.ready(pending)

    def loaded(
        self, handles: Sequence[Handle], wanted: int, sources: Sequence[int], *, prefill_us: int = 0
    ) -> bool:
        """Report a request's outcome to the daemon, which counts hits and savings. Never blocks.

        The request asked for `wanted` blocks and loaded `sources[s]` blocks from source s instead
        of computing them (s as in `Lease.sources`). `prefill_us` is the time that computing
        the loaded blocks would have taken, in microseconds; 0 means unknown. Returns False, and
        reports nothing, while the daemon is away.
        """
        with self._lock:
            known = numbers_of(handles)
            if self._incarnations.now is None or known is None:
                return False
            self._connection.send(
                m.Loaded(
                    known,
                    min(wanted, m.LOADED_MAX),
                    list(sources),
                    min(prefill_us, m.LOADED_US_MAX),
                )
            )
            return True

    def hint(
        self,
        handles: Sequence[Handle],
        hashes: Sequence[bytes],
        *,
        pin_ms: int = 0,
        next_use_ms: int = 0,
        priority: int = 0,
        session_ended: bool = False,
    ) -> None:
        """Tell the daemon how the prefix `hashes` will be used. Never blocks.

        `hashes` start at the prefix's first block; hashes beyond KEYS_PER_CALL_MAX are ignored.
        `pin_ms` keeps the prefix for that time. `next_use_ms` is the time until its likely next
        use. A `priority` below 0 evicts it earlier, above 0 later. `session_ended` evicts it
        first. The daemon honours hints within configured bounds, also for blocks that arrive
        later. A hint is lost while the daemon is away.
        """
        check_hashes(hashes)
        with self._lock:
            known = numbers_of(handles)
            if self._incarnations.now is None or not hashes or known is None:
                return
            self._connection.send(
                m.Hint(
                    known,
                    b"".join(hashes[: m.KEYS_PER_CALL_MAX]),
                    min(max(0, pin_ms), HINT_MS_MAX),
                    min(max(0, next_use_ms), HINT_MS_MAX),
                    1 + (priority > 0) - (priority < 0),
                    session_ended,
                )
            )

    def cancel(self, pending: PendingAcquire) -> None:
        """Cancel an acquire. Its lease is released, also one that arrives later. Never blocks."""
        with self._lock:
            self._acquires.cancel(pending)

    def release(self, lease: Lease) -> None:
        """End a lease. Never blocks; a second release does nothing."""
        with self._lock:
            self._acquires.release(lease)

    def lease_views(
        self, handle: Handle, epoch: bytes, slots: Sequence[int]
    ) -> list[memoryview] | None:
        """Return views of leased slots, `slot_bytes` each; None if one is not mapped here.

        `epoch` and `slots` are the lease's. The daemon owns the memory: do not write to it. After
        the daemon has died, views stay readable until its last lease would have ended. Never
        blocks.
        """
        with self._lock:
            incarnation = self._incarnations.of(epoch)
            if incarnation is None:
                # The segment may be on its way.
                self.poll()
                incarnation = self._incarnations.of(epoch)
            if incarnation is None:
                return None
            views = slot_views(incarnation, handle, slots)
            if views is None:
                self.poll()
                views = slot_views(incarnation, handle, slots)
            return views

    # --- storing ----------------------------------------------------------------------

    def reserve(
        self, handle: Handle, hashes: Sequence[bytes], parents: Sequence[bytes]
    ) -> Reservation | None:
        """Reserve slots for new blocks; `commit` or `abort` must follow.

        `parents[i]` is the hash of the block before `hashes[i]`, or the namespace's `hash_root`
        for a first block. Waits at most `call_timeout_ms`. Returns None while the daemon is away
        or refuses the namespace. Raises ValueError for more than KEYS_PER_CALL_MAX hashes, for
        lists of different lengths and for a hash of a wrong length.
        """
        if not len(hashes) == len(parents) <= m.KEYS_PER_CALL_MAX:
            raise ValueError(
                f"{len(hashes)} hashes and {len(parents)} parents: one parent per hash is needed, "
                f"for at most {m.KEYS_PER_CALL_MAX} hashes"
            )
        check_hashes(hashes)
        check_hashes(parents)
        with self._lock:
            self._ensure_ready([handle])
            if handle.number is None or not hashes:
                return None
            call = self._connection.next_call()
            reply = self._waiting.call(
                call, m.Reserve(call, handle.number, b"".join(hashes), b"".join(parents))
            )
            incarnation = self._incarnations.now
            if not isinstance(reply, m.Reserved) or incarnation is None:
                return None
            raw = m.unpack_slots(reply.slots)
            slots = [None if slot >= m.SLOT_PRESENT else slot for slot in raw]
            wanted = [slot for slot in slots if slot is not None]
            mapped = slot_views(incarnation, handle, wanted)
            if mapped is None:
                self._connection.send(m.Abort(reply.reservation))
                return None
            views = iter(mapped)
            reservation = Reservation(
                reply.reservation,
                incarnation.epoch,
                slots,
                [slot == m.SLOT_PRESENT for slot in raw],
                [None if slot is None else next(views) for slot in slots],
            )
            if wanted and self._connection.sock is not None:
                self._filling.begin(reservation, self._connection.sock)
            return reservation

    def commit(self, reservation: Reservation, count: int | None = None) -> list[bool]:
        """Publish the slots of a reservation, or only the first `count` of them.

        Returns for each hash of `reserve` whether the daemon has the block now. If the session
        broke meanwhile, only `present` blocks are True. Waits at most `call_timeout_ms`. The caller
        must not use the views of the reservation again.
        """
        with self._lock:
            granted = sum(slot is not None for slot in reservation.slots)
            stored = 0
            if self._filling.end(reservation, self._connection.sock):
                call = self._connection.next_call()
                wanted = granted if count is None else min(count, granted)
                reply = self._waiting.call(call, m.Commit(call, reservation.reservation_id, wanted))
                if isinstance(reply, m.Committed):
                    stored = reply.blocks
            result = []
            for slot, present in zip(reservation.slots, reservation.present, strict=True):
                if slot is None:
                    result.append(present)
                else:
                    result.append(stored > 0)
                    stored -= 1
            return result

    def abort(self, reservation: Reservation) -> None:
        """Return the slots of a reservation without publishing them. Never blocks."""
        with self._lock:
            if self._filling.end(reservation, self._connection.sock):
                self._connection.send(m.Abort(reservation.reservation_id))

    # --- copies that the daemon makes -------------------------------------------------

    def attach(
        self,
        handle: Handle,
        exports: Sequence[Export],
        layout: PageLayout,
        *,
        events: Sequence[bytes],
        gate_fd: int,
        layer_ends: Sequence[int],
        probe: Probe,
    ) -> Attachment:
        """Show the daemon where blocks lie in this process, so that it copies them. Never blocks.

        `exports` are the allocations, `layout` the place of each block in them. `events` are
        handles of events that copies may wait for (`native_handle`, `counter_handle`). `gate_fd`
        is the memfd of the caller's gate. `layer_ends` are the offsets in a block, in bytes, at
        which layers end; a load brings the layers in this order.

        The caller keeps its descriptors open until `detach`; the client does not close them.
        The client attaches again after each reconnect and calls `probe(first)` each time: it
        fills one block that the engine does not use, returns its number and the SHA-256 of its
        bytes in the order of the runs, and leaves the block alone until the daemon has answered.
        `first` is False once blocks may be in use.
        """
        attachment = Attachment(
            handle,
            exports,
            layout,
            events=events,
            gate_fd=gate_fd,
            layer_ends=layer_ends,
            probe=probe,
        )
        with self._lock:
            self._attachments.add(attachment)
        return attachment

    def detach(self, attachment: Attachment) -> bool:
        """End an attachment, and wait at most `call_timeout_ms` for the daemon to stop copying.

        Returns False if the daemon did not confirm in time: pages may still be read. A gate's
        `call_off` ends loads in any case.
        """
        with self._lock:
            self._attachments.remove(attachment)
            if not self._attachments.is_known(attachment):
                return True
            end = time.monotonic() + self._waiting.timeout_s
            while self._connection.sock is not None and self._attachments.is_known(attachment):
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._connection.receive(wait_s=left)
            return self._connection.sock is not None

    def begin_store(
        self,
        attachment: Attachment,
        reservation: Reservation,
        blocks: Sequence[int],
        *,
        event: int = NO_EVENT,
        value: int = 0,
    ) -> PendingCopy:
        """Have the daemon copy pages into the slots of a reservation. Never blocks.

        `blocks[i]` is the engine's block number for the i-th granted slot. The copy starts when
        event number `event` of the attachment has reached `value`; NO_EVENT starts it at once.
        Call `commit` or `abort` once the copy is done.
        """
        with self._lock:
            number = attachment.number
            if number is None or self._filling.socket_of(reservation) is not self._connection.sock:
                return _not_begun("the daemon does not copy for this engine now")
            return self._attachments.begin(
                lambda call: m.Store(
                    call,
                    number,
                    reservation.reservation_id,
                    m.pack_slots(blocks),
                    event,
                    value,
                )
            )

    def begin_load(
        self,
        attachment: Attachment,
        epoch: bytes,
        slots: Sequence[int],
        blocks: Sequence[int],
        expires_ns: int,
        *,
        job: int,
        event: int = NO_EVENT,
        value: int = 0,
    ) -> PendingCopy:
        """Have the daemon copy leased slots into pages. Never blocks.

        `epoch` and `expires_ns` are the lease's; slot `slots[i]` goes to the engine's block
        `blocks[i]`. The caller has prepared number `job` of its gate. It must not use the pages
        or the number again until the copy is done or the gate has called the job off, because
        the session may end while the daemon writes pages.
        """
        with self._lock:
            number = attachment.number
            if (
                number is None
                or self._incarnations.now is None
                or self._incarnations.now.epoch != epoch
            ):
                return _not_begun("the daemon does not copy for this engine now")
            return self._attachments.begin(
                lambda call: m.Load(
                    call,
                    number,
                    m.pack_slots(slots),
                    m.pack_slots(blocks),
                    expires_ns,
                    job,
                    event,
                    value,
                )
            )


def _not_begun(why: str) -> PendingCopy:
    pending = PendingCopy()
    pending.end(0, why)
    return pending

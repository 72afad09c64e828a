"""How a file tier finds its blocks again at start.

Opening the slabs is quick and settles how many bytes the tier occupies. Their indexes are read
in the background, one namespace after another. Until all of a namespace is indexed, nothing of
it is evicted. A block may be put before its old copy is found on disk: then the newer copy
wins, and the other record becomes free.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

from tierd_backends.file.directory import StoreDirectory
from tierd_backends.file.shelf import Shelf
from tierd_backends.file.slab import Slab, allocated_bytes, remove_files
from tierd_backends.file.slab_index import Entry, Survey
from tierd_backends.file.space import DiskSpace
from tierd_backends.file.threads import DiskThreads

ENTERED_AT_ONCE = 256
"""Blocks entered between two yields to the event loop: under 1 ms."""

_log = logging.getLogger("tierd_backends.file")


def open_slabs(directory: StoreDirectory, space: DiskSpace, counters: dict[str, int]) -> None:
    """Add the slabs in `directory` to `space`. Runs in a thread, before the tier is used."""
    folders = directory.folders()
    if directory.foreign:
        _log.warning(
            "%s: %d entries are not tierd's and are left alone, such as %s",
            directory.path,
            len(directory.foreign),
            directory.foreign[0],
        )
    unusable: list[str] = []
    for folder, numbers in folders.items():
        for number in numbers:
            slab = _open_slab(directory, folder, number, space, counters, unusable)
            shelf = space.shelves.get(bytes.fromhex(folder.name))
            if slab is not None and shelf is not None and shelf.slot_bytes != slab.slot_bytes:
                # The namespace fixes the block size, so one of the two slabs is damaged.
                _log.warning(
                    "%s/%08d.slab has another slot size than its namespace and is left alone",
                    folder,
                    number,
                )
                counters["lost_slabs_total"] += 1
                slab.close()
                slab = None
            if slab is None:
                space.used_bytes += allocated_bytes(folder, number)
                continue
            if shelf is None:
                shelf = space.shelves[slab.namespace] = Shelf(
                    slab.namespace, slab.slot_bytes, space.eviction
                )
            shelf.indexed = False
            shelf.add_slab(slab, ())
            shelf.next_number = number + 1
            space.used_bytes += slab.size_bytes
    if unusable:
        _log.warning(
            "%s: drops %d slabs that are damaged or have another version's layout, such as %s",
            directory.path,
            len(unusable),
            unusable[0],
        )


def _open_slab(
    directory: StoreDirectory,
    folder: Path,
    number: int,
    space: DiskSpace,
    counters: dict[str, int],
    unusable: list[str],
) -> Slab | None:
    read_only = directory.read_only
    try:
        slab = Slab.load(folder, number, direct=space.direct, read_only=read_only)
        if slab is None:
            counters["lost_slabs_total"] += 1
            unusable.append(f"{folder.name}/{number:08d}.slab")
            if not read_only:
                remove_files(folder, number)
    except OSError as error:
        # The contents are unknown, so the files stay and their bytes count.
        counters["lost_slabs_total"] += 1
        counters["io_errors_total"] += 1
        space.unread.append(f"{folder.name}/{number:08d}.slab: {error.strerror or error}")
        _log.warning("%s/%08d.slab cannot be used and is left alone: %s", folder, number, error)
        return None
    return slab


async def read_indexes(space: DiskSpace, threads: DiskThreads, counters: dict[str, int]) -> None:
    """Enter every block found at start; then enforce the capacity."""
    for shelf in list(space.shelves.values()):
        if not shelf.indexed:
            await _read_shelf(shelf, space, threads, counters)
    await space.shrink()


async def _read_shelf(
    shelf: Shelf, space: DiskSpace, threads: DiskThreads, counters: dict[str, int]
) -> None:
    slabs = list(shelf.slabs.values())
    found: list[tuple[Slab, Entry]] = []
    free: dict[int, set[int]] = {}
    for slab in slabs:
        try:
            survey = await threads.result(threads.readers, slab.survey)
        except OSError as error:
            survey = Survey([], [], [], uses_sound=True)
            counters["io_errors_total"] += 1
            where = f"{slab.folder.name}/{slab.number:08d}.index"
            space.unread.append(f"{where}: {error.strerror or error}")
            _log.warning("%s/%08d.index cannot be read: %s", slab.folder, slab.number, error)
        _note_damage(slab, survey, counters)
        free[slab.number] = set(range(slab.records)) - {entry.record for entry in survey.entries}
        found.extend((slab, entry) for entry in survey.entries)
    # In a thread: sorting a million blocks would hold up the event loop for too long.
    await threads.result(threads.readers, partial(found.sort, key=lambda pair: pair[1].last_use))
    for slab, entry in await _enter(shelf, space, found):
        # An outdated copy must not come back after its block is deleted.
        await threads.result(threads.writers, partial(_clear, slab, entry.record))
        free[slab.number].add(entry.record)
    for slab in slabs:
        shelf.add_free(slab, sorted(free[slab.number]))
    shelf.indexed = True


def _note_damage(slab: Slab, survey: Survey, counters: dict[str, int]) -> None:
    """Count the damage in an index, and log one line for it."""
    damaged = len(survey.unsound) + len(survey.beyond) + (not survey.uses_sound)
    counters["index_damage_total"] += damaged
    if damaged:
        _log.warning(
            "%s/%08d.index: %d entries are damaged; %d blocks lie beyond the end of the slab%s",
            slab.folder,
            slab.number,
            len(survey.unsound),
            len(survey.beyond),
            "" if survey.uses_sound else "; the table of uses is damaged, and is ignored",
        )


async def _enter(
    shelf: Shelf, space: DiskSpace, found: list[tuple[Slab, Entry]]
) -> list[tuple[Slab, Entry]]:
    """Enter blocks, least recently used first. Returns the copies that a newer one replaces."""
    newest = {entry.header.key.block_hash: entry for _, entry in found}
    losers = []
    for count, (slab, entry) in enumerate(found):
        header = entry.header
        block_hash = header.key.block_hash
        taken = block_hash in shelf.index or block_hash in shelf.writing
        if taken or newest[block_hash] is not entry:
            losers.append((slab, entry))
        else:
            shelf.store(slab.item(entry.record), block_hash, header.parent, entry.last_use)
        space.uses = max(space.uses, entry.last_use + 1)
        if count % ENTERED_AT_ONCE == 0:
            await asyncio.sleep(0)
    return losers


def _clear(slab: Slab, record: int) -> None:
    try:
        slab.clear(record)
    except OSError as error:
        _log.warning("cannot clear a record of %s/%08d.slab: %s", slab.folder, slab.number, error)

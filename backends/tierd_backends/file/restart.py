"""How a file tier is opened, and finds its blocks again.

Opening the slabs is quick and settles how many bytes the tier occupies. Their indexes are read
in the background, one namespace after another. Until all of a namespace is indexed, nothing of
it is evicted. A block may be put before its old copy is found on disk: then the newer copy
wins, and the other record becomes free.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from tierd.errors import ConfigError
from tierd.sizes import about, parse_size_of
from tierd_backends.file.descriptors import allow_open_files
from tierd_backends.file.directory import StoreDirectory, no_direct
from tierd_backends.file.health import DiskHealth
from tierd_backends.file.options import FileOptions
from tierd_backends.file.shelf import Shelf
from tierd_backends.file.shelves import Shelves
from tierd_backends.file.slab import Slab, allocated_bytes, remove_files
from tierd_backends.file.slab_index import Entry, Survey
from tierd_backends.file.space import DiskSpace
from tierd_backends.file.threads import DiskThreads

ENTERED_AT_ONCE = 256
"""Blocks entered between two yields to the event loop: under 1 ms."""

_log = logging.getLogger("tierd_backends.file")


def open_files(
    options: FileOptions,
    directory: StoreDirectory,
    space: DiskSpace,
    shelves: Shelves,
    health: DiskHealth,
    counters: dict[str, int],
) -> None:
    """Open the directory and its slabs. Runs in a thread, before the tier is used.

    Raises ConfigError for options that the disk cannot fulfil, and OSError.
    """
    directory.open()
    if directory.read_only:
        health.trouble = f"{directory.path} is on a read-only file system"
    space.reserve_bytes = parse_size_of(options.reserve_free, directory.total_bytes())
    if options.direct != "off":
        space.direct = directory.takes_direct()
        if not space.direct and options.direct == "on":
            raise ConfigError(no_direct(directory.path))
    allow_open_files(options.files_max)
    space.used_bytes = _open_slabs(directory, shelves, health, counters, direct=space.direct)
    _log.info(
        "%s: %d slabs, %s of %s, %s%s",
        directory.path,
        sum(len(shelf.slabs) for shelf in shelves),
        about(space.used_bytes),
        about(space.capacity_bytes),
        "O_DIRECT" if space.direct else "through the page cache",
        ", read-only" if directory.read_only else "",
    )


def _open_slabs(
    directory: StoreDirectory,
    shelves: Shelves,
    health: DiskHealth,
    counters: dict[str, int],
    *,
    direct: bool,
) -> int:
    """Add the slabs in `directory` to `shelves`. Returns the bytes that all slab files occupy,
    also files that could not be read."""
    folders = directory.folders()
    if directory.foreign:
        _log.warning(
            "%s: %d entries are not tierd's and are left alone, such as %s",
            directory.path,
            len(directory.foreign),
            directory.foreign[0],
        )
    used_bytes = 0
    unusable: list[str] = []
    for folder, numbers in folders.items():
        for number in numbers:
            try:
                slab = Slab.load(folder, number, direct=direct, read_only=directory.read_only)
                if slab is None:
                    counters["lost_slabs_total"] += 1
                    unusable.append(f"{folder.name}/{number:08d}.slab")
                    if not directory.read_only:
                        remove_files(folder, number)
            except OSError as error:
                # The contents are unknown, so the files stay and their bytes count.
                counters["lost_slabs_total"] += 1
                counters["io_errors_total"] += 1
                health.unread.append(f"{folder.name}/{number:08d}.slab: {error.strerror or error}")
                _log.warning(
                    "%s/%08d.slab cannot be used and is left alone: %s", folder, number, error
                )
                slab = None
            shelf = shelves.get(bytes.fromhex(folder.name))
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
                used_bytes += allocated_bytes(folder, number)
                continue
            if shelf is None:
                shelf = shelves.add(slab.namespace, slab.slot_bytes)
            shelf.indexed = False
            shelf.add_slab(slab, ())
            shelf.next_number = number + 1
            used_bytes += slab.size_bytes
    if unusable:
        _log.warning(
            "%s: drops %d slabs that are damaged or have another version's layout, such as %s",
            directory.path,
            len(unusable),
            unusable[0],
        )
    return used_bytes


async def read_indexes(
    shelves: Shelves, threads: DiskThreads, health: DiskHealth, counters: dict[str, int]
) -> None:
    """Enter every block found at start."""
    for shelf in shelves:
        if not shelf.indexed:
            await _read_shelf(shelf, shelves, threads, health, counters)


async def _read_shelf(
    shelf: Shelf,
    shelves: Shelves,
    threads: DiskThreads,
    health: DiskHealth,
    counters: dict[str, int],
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
            health.unread.append(f"{where}: {error.strerror or error}")
            _log.warning("%s/%08d.index cannot be read: %s", slab.folder, slab.number, error)
        _note_damage(slab, survey, counters)
        free[slab.number] = set(range(slab.records)) - {entry.record for entry in survey.entries}
        found.extend((slab, entry) for entry in survey.entries)
    # In a thread: sorting a million blocks would hold up the event loop for too long.
    await threads.result(threads.readers, partial(found.sort, key=lambda pair: pair[1].last_use))
    for slab, entry in await _enter(shelf, shelves, found):
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
    shelf: Shelf, shelves: Shelves, found: list[tuple[Slab, Entry]]
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
        shelves.uses = max(shelves.uses, entry.last_use + 1)
        if count % ENTERED_AT_ONCE == 0:
            await asyncio.sleep(0)
    return losers


def _clear(slab: Slab, record: int) -> None:
    try:
        slab.clear(record)
    except OSError as error:
        _log.warning("cannot clear a record of %s/%08d.slab: %s", slab.folder, slab.number, error)

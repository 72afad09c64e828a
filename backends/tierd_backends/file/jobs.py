"""The jobs of the file tier's threads, one per block, and what a thread does with a run of them.

A run is a batch's jobs for neighbouring records of one slab. The event loop makes the jobs, and
reads them when the call is over. In between they belong to one thread each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierd.backend import BlockHeader
from tierd.types import BlockKey, slot_bytes_for
from tierd_backends.common.second_read import DamageSite
from tierd_backends.file.slab import RUN_RECORDS_MAX, Slab

RUN_BYTES_MAX = 1 << 20
"""Most bytes of a run: a quarter of a prefetch's batch, so that every thread gets a part of it."""


@dataclass(slots=True, eq=False)
class FileJob:
    """One block in transfer. A thread sets `done`, and `error` or, for a read, `header`.

    If the first read was damaged, the thread also sets `fault` and `dropped`.
    """

    slab: Slab
    record: int
    item: int
    position: int
    block_hash: bytes
    view: memoryview
    length: int
    use: int
    first_in_slab: bool = False
    header: BlockHeader | None = None
    fault: DamageSite | None = None
    dropped: bool = False
    error: OSError | None = None
    done: bool = False


def runs_of(jobs: Sequence[FileJob]) -> list[list[FileJob]]:
    """Group the jobs into runs of neighbouring records, in the order of their places.

    A prefix lies mostly in neighbouring records, and small blocks move twice as fast in runs:
    there are fewer calls, and a thread waits less often for the GIL.
    """
    runs: list[list[FileJob]] = []
    for job in sorted(jobs, key=lambda job: (job.slab.number, job.record)):
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and last.slab is job.slab
            and last.record + 1 == job.record
            and len(runs[-1]) < min(RUN_RECORDS_MAX, RUN_BYTES_MAX // job.slab.slot_bytes)
            and _fills_record(last)
            and _fills_record(job)
        ):
            runs[-1].append(job)
        else:
            runs.append([job])
    return runs


def _fills_record(job: FileJob) -> bool:
    slot_bytes = job.slab.slot_bytes
    return len(job.view) == slot_bytes == slot_bytes_for(job.length)


def read_run(run: list[FileJob]) -> None:
    """Read a run in one call; read each block again alone that was not read well."""
    left = run
    if len(run) > 1:
        headers = run[0].slab.read_run(
            run[0].record,
            [BlockKey(job.slab.namespace, job.block_hash) for job in run],
            [job.view for job in run],
            [job.length for job in run],
        )
        for job, header in zip(run, headers or (), strict=False):
            job.header = header
            # If it is read well now, this one was damaged on its way.
            job.fault = DamageSite.TRANSIT if header is None else None
        left = [job for job in run if job.header is None]
    for job in left:
        key = BlockKey(job.slab.namespace, job.block_hash)
        reading = job.slab.read(job.record, key, job.view, job.length)
        if reading.header is None or reading.fault is not None:
            job.fault = reading.fault
        job.header, job.error, job.dropped = reading.header, reading.error, reading.dropped


def write_run(run: list[FileJob]) -> None:
    """Write a run in one call; if that fails, each block alone."""
    if any(job.first_in_slab for job in run):
        run[0].slab.find_unlinked()
    headers = [job.header for job in run if job.header is not None]
    assert len(headers) == len(run)
    if len(run) > 1:
        views, uses = [job.view for job in run], [job.use for job in run]
        try:
            run[0].slab.write_run(run[0].record, headers, views, uses)
        except OSError:
            # Writing them one by one shows which of them cannot be written.
            pass
        else:
            return
    for job, header in zip(run, headers, strict=True):
        try:
            job.slab.write(job.record, header, job.view, job.use)
        except OSError as error:
            job.error = error


def clear_run(run: list[FileJob]) -> None:
    """Clear the records of a run, one by one."""
    for job in run:
        try:
            job.slab.clear(job.record)
        except OSError as error:
            job.error = error

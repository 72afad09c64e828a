"""The call lists in docs/architecture/walk.md match a real session."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.support import blocks
from tests.support.tiers.bench import Bench, run
from tests.support.tiers.line import Line
from tierd.wire import messages as m

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/architecture/walk.md"


def listed() -> dict[str, list[list[str]]]:
    """The page's lists of calls, "FILE NAME" each, by the first words of their heading."""
    found: dict[str, list[list[str]]] = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        heading = section.partition("\n")[0].partition(":")[0]
        lists = [text.splitlines() for text in re.findall(r"```text\n(.*?)```", section, re.S)]
        found.setdefault(heading, []).extend(lists)
    return found


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Records the calls into the package that this thread makes in the block."""
    calls: list[str] = []
    prefix = f"{ROOT}/"

    def note(frame: FrameType, event: str, arg: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(f"{prefix}tierd/"):
            calls.append(f"{name.removeprefix(prefix)} {frame.f_code.co_qualname}")

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def assert_in_order(expected: list[str], calls: list[str]) -> None:
    at = 0
    for call in expected:
        assert call in calls[at:], f"{call} does not come after {calls[at - 1]}"
        at = calls.index(call, at) + 1


def test_store_and_hit_make_the_documented_calls() -> None:
    """The page would lead a newcomer to code that no longer exists."""
    page = listed()
    [reserve], [commit, backup] = page["RESERVE"], page["COMMIT"]
    resident, stored = page["ACQUIRE"]
    [release] = page["RELEASE"]

    async def test(bench: Bench) -> None:
        hashes, parents = blocks.chain(4, "walk")
        line = Line(bench)

        def walk(say: Callable[[], None], expected: list[str]) -> None:
            with recorded() as calls:
                say()
            assert_in_order(expected, calls)

        asked = m.Reserve(2, 0, b"".join(hashes), b"".join(parents))
        walk(lambda: line.say(asked), reserve)
        reserved = line.got[-1]
        assert isinstance(reserved, m.Reserved)
        with recorded() as calls:
            line.say(m.Commit(3, reserved.reservation, 4))
            committed = len(calls)
            await bench.backed_up()
        assert_in_order(commit, calls[:committed])
        assert_in_order(backup, calls[committed:])
        acquire = m.Acquire(4, [0], b"".join(hashes), 5000, 0, 0, 0, 0)
        walk(lambda: line.say(acquire), resident)
        acquired = line.got[-1]
        assert isinstance(acquired, m.Acquired)
        assert acquired.blocks == 4
        ended = m.Release(acquired.lease)
        walk(lambda: line.say(ended), release)
        bench.forget()
        line.got.clear()
        with recorded() as calls:
            acquired = await line.acquired(hashes, 0)
        assert acquired.blocks == 4
        assert_in_order(stored, calls)
        line.say(m.Release(acquired.lease))
        await asyncio.sleep(1)
        line.closed()

    run(test)

"""A warm's journal: finished work is neither lost nor repeated, wherever a run broke off."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.cli.warm.journal import FinishedUnit, WarmJournal
from tierd.errors import ConfigError
from tierd.lines import sealed

UNITS = st.lists(
    st.builds(
        FinishedUnit,
        st.lists(st.binary(min_size=16, max_size=16), max_size=3).map(tuple),
        st.binary(min_size=32, max_size=32),
        st.integers(1, 1 << 40),
    ),
    max_size=6,
)


def write(path, units: list[FinishedUnit], first: int = 0) -> None:
    journal = WarmJournal(str(path), "host memory")
    for number, done in enumerate(units, first):
        journal.finish(f"unit {number}", done)
    journal.close()


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(units=UNITS, data=st.data())
def test_journal_truncated_anywhere_can_be_resumed(tmp_path_factory, units, data) -> None:
    """After a crash, finished work would be repeated, or unfinished work skipped permanently."""
    path = tmp_path_factory.mktemp("journal") / "warm.journal"
    write(path, units)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    finished = max(0, whole[:cut].count(b"\n") - 1)

    journal = WarmJournal(str(path), "host memory")
    assert journal.done == {f"unit {n}": done for n, done in enumerate(units[:finished])}
    journal.close()
    write(path, units[finished:], finished)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"my notes\n", "not a journal of tierd warm"),
        (b"my notes", "not a journal of tierd warm"),
        (b"[" * 100_000 + b"\n", "not a journal of tierd warm"),
        (b'{"tierd_hotset": 1}\n', "not a journal of tierd warm"),
        (b'{"tierd_warm_journal": 3, "to": "host memory"}\n', "has version 3"),
        (b'{"tierd_warm_journal": 2, "to": "disk"}\n', "a warm to 'disk'"),
    ],
)
def test_other_files_are_not_changed(tmp_path, content, named) -> None:
    """A typing mistake in --resume would destroy a file."""
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=named):
        WarmJournal(str(path), "host memory")
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "line",
    [
        b"nothing",
        b"[]",
        b'{"unit": 1}',
        sealed({"unit": "u", "digests": ["00"], "last": "", "blocks": 0}).rstrip(),
        sealed({"unit": "u", "digests": [], "last": "00", "blocks": 1}).rstrip(),
        sealed({"unit": "u", "digests": [], "last": "", "blocks": True}).rstrip(),
        sealed({"unit": 7, "digests": [], "last": "", "blocks": 0}).rstrip(),
        sealed({"unit": "u", "digests": [], "last": "", "blocks": 0})
        .rstrip()
        .replace(b'"u"', b'"v"'),
    ],
)
def test_damaged_line_is_named(tmp_path, line) -> None:
    """After an edit of the journal a warm would silently resume from another state."""
    path = tmp_path / "journal"
    write(path, [])
    with path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ConfigError, match="line 2: the journal is damaged"):
        WarmJournal(str(path), "host memory")


def test_two_runs_cannot_share_a_journal(tmp_path) -> None:
    """Two runs would write into each other's lines."""
    path = str(tmp_path / "journal")
    journal = WarmJournal(path, "host memory")
    with pytest.raises(ConfigError, match="another tierd warm uses"):
        WarmJournal(path, "host memory")
    journal.close()
    WarmJournal(path, "host memory").close()
    with pytest.raises(ConfigError, match="Is a directory"):
        WarmJournal(str(tmp_path), "host memory")

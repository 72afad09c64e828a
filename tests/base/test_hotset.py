"""Hot sets: their blocks, their order, and their file format."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.blocks import ROOT, chain, namespace
from tierd.errors import ConfigError
from tierd.hotset import (
    FORMAT,
    LINE_BYTES_MAX,
    RUN_BLOCKS_MAX,
    Family,
    Forest,
    Gathered,
    Hot,
    HotRun,
    HotSet,
    pieces,
    worth,
)
from tierd.lines import is_sealed, sealed
from tierd.types import NEVER, Namespace

SPACE = namespace()
RANKS = [namespace(tp_size=2, tp_rank=rank, block_bytes=4096 * (1 + rank)) for rank in range(2)]


class Block(NamedTuple):
    """A block and its use."""

    hash: bytes
    parent: bytes
    uses: int
    age_s: int


def name(number: int) -> bytes:
    """A hash."""
    return number.to_bytes(32, "big")


def blocks_of(hashes: Sequence[bytes], uses: int, age_s: int, parent: bytes = ROOT) -> list[Block]:
    """A chain of blocks with the same use."""
    parents = [parent, *hashes]
    return [Block(h, p, uses, age_s) for h, p in zip(hashes, parents, strict=False)]


def runs_of(blocks: Iterable[Block], root: bytes) -> list[HotRun]:
    """All runs of the blocks."""
    forest = Forest(root)
    for block in blocks:
        forest.add([block.hash], [block.parent], [block.uses], [block.age_s])
    return [run for run in forest.runs() if run is not None]


def text(
    runs: Sequence[HotRun], spaces: Sequence[Namespace] = (SPACE,), size_bytes: int | None = None
) -> bytes:
    """A hot set's file."""
    families: list[Family] = [(spaces, runs)]
    return b"".join(pieces(families, written_s=1000, version="1.2", size_bytes=size_bytes))


def hot_in(raw: bytes) -> list[Hot]:
    """All runs of a file."""
    return list(HotSet(io.BytesIO(raw), "a file"))


# --- runs ---------------------------------------------------------------------------


def test_shared_prefix_is_the_first_separate_run() -> None:
    """A warm that ends early would load one user's conversation before the system prompt."""
    hashes, _ = chain(10)
    other, _ = chain(5, "other")
    blocks = blocks_of(hashes[:4], 9, 60) + blocks_of(hashes[4:], 1, 60, hashes[3])
    runs = runs_of([*blocks_of(other, 2, 60), *reversed(blocks)], ROOT)
    assert [run.hashes for run in runs] == [hashes[:4], other, hashes[4:]]
    assert [(run.uses, run.age_s, run.depth) for run in runs] == [
        (9, 60, 4),
        (2, 60, 5),
        (1, 60, 10),
    ]
    assert [run.parent for run in runs] == [ROOT, ROOT, hashes[3]]


def test_recent_uses_count_more_than_old_ones() -> None:
    """A prefix used yesterday would be warmed before one used a minute ago."""
    old, _ = chain(3, "old")
    new, _ = chain(3, "new")
    runs = runs_of(blocks_of(old, 10, 86_400) + blocks_of(new, 2, 60), ROOT)
    assert [run.hashes for run in runs] == [new, old]
    never = runs_of([Block(old[0], ROOT, 0, NEVER), *blocks_of(new, 1, 10**6)], ROOT)
    assert never[-1] == HotRun(ROOT, old[:1], 0, NEVER, 1)


def test_a_run_ends_where_chains_fork_and_at_its_longest() -> None:
    """A branch without uses would be warmed along with the trunk that all requests use."""
    hashes, _ = chain(6)
    fork, _ = chain(2, "fork")
    runs = runs_of(blocks_of(hashes, 1, 0) + blocks_of(fork, 1, 0, hashes[2]), ROOT)
    assert [run.hashes for run in runs] == [hashes[:3], hashes[3:], fork]
    long, _ = chain(2 * RUN_BLOCKS_MAX + 1)
    lengths = [len(run.hashes) for run in runs_of(blocks_of(long, 1, 0), ROOT)]
    assert lengths == [RUN_BLOCKS_MAX, RUN_BLOCKS_MAX, 1]


HASHES = st.integers(0, 12).map(name)
BLOCKS = st.lists(
    st.builds(Block, HASHES, HASHES, st.integers(0, 20), st.sampled_from([0, 59, 61, 4000, NEVER])),
    max_size=30,
)


def check_parents(runs: Sequence[HotRun], root: bytes) -> None:
    """Check that no parent is missing or comes later, no block comes twice, and depths are
    right."""
    depths = {root: 0}
    seen: set[bytes] = set()
    for run in runs:
        above = run.parent
        for block_hash in run.hashes:
            assert block_hash not in seen
            seen.add(block_hash)
            if block_hash != root:
                depths[block_hash] = depths[above] + 1
            above = block_hash
        assert depths[run.parent] + len(run.hashes) == run.depth


@given(BLOCKS)
def test_parents_are_complete_for_any_blocks(blocks: list[Block]) -> None:
    """Rings, orphans and duplicate blocks would end an export, or leave holes."""
    root = name(0)
    runs = runs_of(blocks, root)
    check_parents(runs, root)
    first: dict[bytes, bytes] = {}
    for block in blocks:
        first.setdefault(block.hash, block.parent)
    held = {block_hash for run in runs for block_hash in run.hashes}
    for block_hash, parent in first.items():
        assert (block_hash in held) == (parent == root or parent in held)
    values = [worth(run.uses, run.age_s) for run in runs]
    assert values == sorted(values, reverse=True)


# --- the file -----------------------------------------------------------------------


@pytest.mark.slow
@given(BLOCKS, st.integers(0, 15))
def test_file_round_trip_and_truncation_keep_parents(blocks: list[Block], room: int) -> None:
    """A warm from a truncated hot set would load blocks whose parents are missing."""
    spaces = [namespace(hash_root=name(0), tp_size=2, tp_rank=rank) for rank in range(2)]
    runs = runs_of(blocks, name(0))
    found = hot_in(text(runs, spaces))
    assert [hot.run for hot in found] == runs
    assert all(hot.namespaces == tuple(spaces) for hot in found)
    cut = [hot.run for hot in hot_in(text(runs, spaces, room * 8192))]
    check_parents(cut, name(0))
    held = [h for run in runs for h in run.hashes]
    assert [h for run in cut for h in run.hashes] == held[:room]


def test_runs_of_several_engines_are_merged_by_worth() -> None:
    """A truncated hot set would hold all of one model and nothing of the other."""
    other = namespace(model="other")
    chains = [chain(2, tag)[0] for tag in range(4)]
    mine = runs_of(blocks_of(chains[0], 9, 0) + blocks_of(chains[1], 2, 0), ROOT)
    theirs = runs_of(blocks_of(chains[2], 5, 0) + blocks_of(chains[3], 1, 0), ROOT)
    families: list[Family] = [([SPACE], mine), ([other], [None, *theirs, None])]
    raw = b"".join(pieces(families, written_s=1, version="1"))
    found = HotSet(io.BytesIO(raw), "a file")
    assert [hot.run.hashes for hot in found] == [chains[0], chains[2], chains[1], chains[3]]
    assert set(found.namespaces) == {SPACE.digest, other.digest}


def test_only_ranks_of_one_engine_share_a_forest() -> None:
    """A run would name ranks of two engines, or two layouts of one, and be warmed in neither."""
    gathered = Gathered()
    second = [namespace(tp_size=2, tp_rank=rank, layout="other") for rank in range(2)]
    hashes, _ = chain(2)
    for space in [SPACE, RANKS[1], *second, namespace(tp_size=2, tp_rank=1, block_bytes=9), *RANKS]:
        gathered.forest(space).add(hashes[:1], [ROOT], [1], [0])
    families = [
        ([(s.layout, s.block_bytes, s.tp_rank) for s in spaces], len([*filter(None, runs)]))
        for spaces, runs in gathered.families()
    ]
    assert families == [
        ([("LBHNC", 4096, 0)], 1),
        ([("LBHNC", 8192, 1)], 1),
        ([("other", 4096, 0), ("other", 4096, 1)], 1),
        ([("LBHNC", 9, 1)], 1),
        ([("LBHNC", 4096, 0)], 1),
    ]


def test_file_can_be_searched_with_grep() -> None:
    """An operator could not search it for a hash or a model."""
    hashes, _ = chain(3)
    lines = text(runs_of(blocks_of(hashes, 2, 7), ROOT), RANKS).splitlines()
    assert lines[0].startswith(b'{"tierd_hotset": 2, "written": 1000, "version": "1.2", "crc32": ')
    assert [b'"model": "test-model"' in line for line in lines[1:3]] == [True, True]
    assert unsealed(lines[3]) == {
        "run": [space.digest.hex() for space in RANKS],
        "parent": ROOT.hex(),
        "tokens": 48,
        "uses": 2,
        "age_s": 7,
        "bytes": 3 * 3 * 4096,
        "hashes": [block_hash.hex() for block_hash in hashes],
    }
    assert unsealed(lines[4]) == {"end": {"runs": 1, "blocks": 3, "bytes": 36864}}


def unsealed(line: bytes) -> dict[str, object]:
    """The object of a line."""
    assert is_sealed(line)
    value: dict[str, object] = json.loads(line)
    del value["crc32"]
    return value


def _change(line: int, **changes: object) -> Callable[[list[bytes]], None]:
    def change(lines: list[bytes]) -> None:
        value = {**unsealed(lines[line]), **changes}
        lines[line] = sealed({k: v for k, v in value.items() if v != "gone"}).rstrip()

    return change


def _drop(line: int) -> Callable[[list[bytes]], None]:
    return lambda lines: lines.__delitem__(line)


def _put(line: int, raw: bytes) -> Callable[[list[bytes]], None]:
    return lambda lines: lines.__setitem__(line, raw)


WRONG: list[tuple[Callable[[list[bytes]], None], str]] = [
    (_put(0, b"{}"), "line 1: this is not a tierd hot set"),
    (_put(0, b"[1, 2]"), "line 1: a line must be an object"),
    (_change(0, tierd_hotset=FORMAT + 1), "line 1: .* version 3; this tierd reads version 2"),
    (_change(0, written="now"), "line 1: 'written' must be a whole number"),
    (_change(0, more=1), "line 1: 'more' is not a field"),
    (_put(2, b"{"), "line 3: this is not JSON"),
    (_put(2, b"[" * 100_000), "line 3: this is not JSON"),
    (_put(2, sealed({"a": 1}).rstrip()), "line 3: this is not a line of a hot set"),
    (_put(2, b"1" * (LINE_BYTES_MAX + 1)), "line 3: a line has at most"),
    (_drop(1), "line 2: namespace [0-9a-f]{32} is not defined before its run"),
    (_change(1, namespace="00" * 16), "line 2: 0{32} is not the digest of these fields"),
    (_change(1, namespace="00" * 15), "line 2: .* must be 32 hex digits"),
    (_change(1, fields={"model": "m"}), "line 2: namespace field 'block_bytes' is missing"),
    (_change(1, fields=[1]), "line 2: fields must be an object"),
    (_change(2, more=1), "line 3: 'more' is not a field"),
    (_change(2, uses="gone"), "line 3: 'uses' is missing"),
    (_change(2, uses=True), "line 3: 'uses' must be a whole number"),
    (_change(2, age_s=-1), "line 3: 'age_s' must be a whole number"),
    (_change(2, tokens=17), "line 3: a prefix .* cannot have 17 tokens"),
    (_change(2, tokens=32), "line 3: a prefix .* cannot have 32 tokens"),
    (_change(2, bytes=1), "line 3: these blocks have 12288 bytes, not 1"),
    (_change(2, parent="zz" * 32), "line 3: .* must be 64 hex digits"),
    (_change(2, parent="AA" * 32), "line 3: .* must be 64 hex digits"),
    (_change(2, hashes=["00" * 31]), "line 3: .* must be 64 hex digits"),
    (_change(2, hashes=[7]), "line 3: .* must be 64 hex digits"),
    (_change(2, hashes=[]), "line 3: 'hashes' must be a list of 1 to 512"),
    (_change(2, run=[]), "line 3: 'run' must be a list of 1 to 64"),
    (_change(2, run=[SPACE.digest.hex()] * 2), "line 3: .* must belong to the ranks of one"),
    (_drop(3), "line 4: the file was cut: its end is missing"),
    (_change(3, end={"runs": 2, "blocks": 3, "bytes": 12288}), "line 4: the counts of the end"),
    (lambda lines: lines.append(b"{}"), "line 4: there is more after the end"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_file_errors_name_the_line(change: Callable[[list[bytes]], None], message: str) -> None:
    """An operator would have to guess which of 10,000 lines is wrong."""
    hashes, _ = chain(3)
    lines = text(runs_of(blocks_of(hashes, 2, 7), ROOT)).splitlines()
    change(lines)
    with pytest.raises(ConfigError, match=f"^a file, {message}"):
        hot_in(b"\n".join(lines) + b"\n")


def test_truncated_file_is_detected() -> None:
    """Half a hot set, from a full disk, would pass for a whole one."""
    hashes, _ = chain(3)
    raw = text(runs_of(blocks_of(hashes, 2, 7), ROOT))
    for end in range(len(raw)):
        with pytest.raises(ConfigError, match=r"cut|not a tierd hot set"):
            hot_in(raw[:end])

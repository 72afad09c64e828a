"""Claims that the documents make about the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pages.measured import results
from pages.tables import CHARTS, KINDS, LABELS, filled, labels_of, pages
from tests.support.admin import ADMIN, metrics, port_of
from tests.support.daemon_process import DaemonProcess
from tests.support.engines.vllm_server import README_ARGUMENTS, README_TRANSFER
from tests.support.page_texts import PAGES, codes, prose, text
from tests.support.tiers.scene import table
from tierd.backend import Backend
from tierd.cli.common.break_even import Model
from tierd.config import backend_options, parse
from tierd.core.l2.sharing import segment_bytes
from tierd.daemon.http.metrics import METRICS
from tierd.daemon.jobs.hotset import STOP_S
from tierd.daemon.l3.tier import BATCH_BLOCKS_MAX, BATCH_BYTES_MAX
from tierd.daemon.lifecycle.serve import EXIT_GRACE_S
from tierd.sizes import parse_size
from tierd.types import slot_bytes_for
from tierd.wire import messages as m
from tierd.wire.frames import FRAME_BYTES_MAX
from tierd_backends.file.slab import slab_bytes
from tierd_connectors.vllm.identity.namespace import (
    HASH_ALGORITHM,
    UnsupportedEngineError,
    check_engine,
)
from tierd_connectors.vllm.options import Options

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_tables_are_up_to_date(page: Path) -> None:
    """An operator would set keys that do not exist, or read outdated numbers: `make tables`."""
    found = page.read_text()
    assert filled(found) == found


@pytest.mark.parametrize("name", CHARTS)
def test_charts_are_up_to_date(name: str) -> None:
    """The README would show an outdated gain: `make tables`."""
    assert (ROOT / name).read_text() == CHARTS[name]()


def test_every_table_is_on_a_page() -> None:
    """A rewrite could drop the configuration reference from the pages."""
    whole = "".join(page.read_text() for page in pages())
    for name in ("config", "metrics", "commands", "layers", "bench-restart", "bench-soak"):
        assert f"<!-- table: {name} -->" in whole


@pytest.mark.slow
def test_labels_in_the_reference_are_exposed(tmp_path: Path) -> None:
    """A query would match nothing, because the metric has other labels."""
    file = {"path": str(tmp_path / "store"), "capacity": "64MiB", "reserve_free": "0"}
    with DaemonProcess(tmp_path, capacity="16MiB", storage=table("file", file) + ADMIN) as daemon:
        families = metrics(port_of(daemon))
    compared = 0
    for metric in METRICS:
        for _, labels in families[metric.name].samples:
            assert {name for name, _ in labels} - {"le"} == set(labels_of(metric)), metric.name
            compared += 1
    assert compared > 100
    assert {metric.name for metric in METRICS} >= set(LABELS)


def test_documents_are_short() -> None:
    """A newcomer would not find the quick start on the first screen."""
    assert len(text("README.md").encode()) < 8000
    assert len(text("ARCHITECTURE.md").encode()) < 8000
    first = text("README.md")[:2000]
    assert "tierd serve --config" in first
    assert "vllm serve" in first


def test_code_has_a_language() -> None:
    """A command in an unmarked block would not be tested."""
    for page in PAGES:
        assert 2 * len(codes(page)) == len(re.findall(r"^```", text(page), re.MULTILINE)), page
        for code in codes(page):
            assert code.language in {"bash", "json", "python", "text", "toml", "yaml"}, page


PRIVATE = re.compile(
    r"\b(unproven|doubtful|hollow|hollowed|lid|li[fv]es?( of| before)|whoever|those of"
    r"|is to be had|gives? way)\b"
)


@pytest.mark.parametrize("page", PAGES)
def test_pages_use_the_words_of_the_glossary(page: str) -> None:
    """A reader would search for a word that only this page uses."""
    plain = re.sub(r"`[^`]*`|\"[^\"]*\"", "", prose(page))
    assert not PRIVATE.search(" ".join(plain.split()))


def test_example_configurations_are_accepted() -> None:
    """An operator's first attempt, copied from the page, would be refused."""
    examples = re.findall(r"^\[\[storage\]\]\n(?:\w+ = .+\n)+", text("docs/tiers.md"), re.MULTILINE)
    assert {"file", "redis", "s3"} == {tomllib.loads(e)["storage"][0]["type"] for e in examples}
    for example in examples:
        (tier,) = parse(tomllib.loads('[host]\ncapacity = "1GiB"\n' + example), {}).storage
        kind: type[Backend] = KINDS[tier.type]
        kind.from_options(backend_options(tier, kind.Options))


def test_connector_settings_are_documented() -> None:
    """Operators would not find a connector setting that the page does not name."""
    for name in Options.__slots__:
        assert f"| `{name}` |" in text("docs/vllm.md")


def test_readme_and_page_attach_alike() -> None:
    """One of the two commands would be of an older release."""
    both = [
        [code.text for code in codes(page) if "vllm serve" in code.text]
        for page in ("README.md", "docs/vllm.md")
    ]
    assert both[0] == both[1] != []
    command = " ".join(both[0][0].replace("\\\n", " ").split())
    assert f"{' '.join(README_ARGUMENTS)} '{README_TRANSFER}'" in command
    starts = [
        [code.text for code in codes(page) if "tierd serve" in code.text]
        for page in ("README.md", "docs/getting-started.md")
    ]
    assert starts[0] == starts[1] != []


def test_protocol_numbers() -> None:
    """An implementer who follows PROTOCOL.md would be refused."""
    protocol = text("tierd/wire/PROTOCOL.md")
    assert f"at most {FRAME_BYTES_MAX >> 20} MiB" in protocol
    assert f"at most {m.KEYS_PER_CALL_MAX:,} a call" in protocol
    rows = {
        int(n): name for n, name in re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", protocol, re.MULTILINE)
    }
    names = {n: cls.__name__.upper() for cls, n in m._NUMBERS.items()}
    assert {n: name.replace("_", "") for n, name in rows.items()} == names


def test_batches_of_the_contract() -> None:
    """A third party's backend would be written for smaller batches than it gets."""
    said = (
        f"{BATCH_BLOCKS_MAX} blocks or {BATCH_BYTES_MAX >> 20} MiB",
        f"{m.KEYS_PER_CALL_MAX:,}",
    )
    for words in (Backend.__doc__ or "", text("docs/backend.md")):
        for each in said:
            assert each in " ".join(words.split())


def test_numbers_of_the_readme_were_measured() -> None:
    """The first page would claim numbers that no benchmark has shown, or old ones."""
    soak, overhead = results("soak"), results("vllm_overhead")
    kills = soak["happened"]["kill"]
    others = sum(soak["happened"].values()) - kills
    plain = " ".join(text("README.md").split())
    for claim in (
        f"{soak['calls'] / 1e6:.1f} million calls with {kills} kills and {others} stops",
        f"{soak['verified_blocks'] / 1e6:.1f} million blocks were compared and "
        f"{soak['wrong_blocks']} were wrong",
        f"output throughput was {overhead['median_of_pair_ratios']:.3f} of vLLM alone",
    ):
        assert claim in plain


def test_hybrid_models_are_refused_as_the_readme_says() -> None:
    """A model with two kinds of attention would be attached, and load KV of one kind only."""
    assert "more than one KV cache group" in " ".join(text("README.md").split())
    cache = SimpleNamespace(enable_prefix_caching=True, prefix_caching_hash_algo=HASH_ALGORITHM)
    config: Any = SimpleNamespace(cache_config=cache)
    groups = [SimpleNamespace(kv_cache_spec=object()) for _ in range(2)]
    kv: Any = SimpleNamespace(kv_cache_groups=groups)
    with pytest.raises(UnsupportedEngineError, match="2 KV cache groups"):
        check_engine(config, kv)


def test_a_stop_takes_as_long_as_documented() -> None:
    """An operator would set TimeoutStopSec= too short and lose the hot set."""
    hot_set, grace = f"{STOP_S:g} s", f"{EXIT_GRACE_S:g} s"
    for page in ("docs/operations.md", "docs/runbook.md", "systemd/tierd.service"):
        plain = " ".join(re.sub(r"^#", "", text(page), flags=re.MULTILINE).split())
        assert hot_set in plain, page
        assert grace in plain, page
    for page in ("docs/configuration.md", "systemd/tierd.toml"):
        assert hot_set in text(page), page


def test_numbers_of_the_comparison_were_measured() -> None:
    """Another system would be compared with outdated numbers of tierd."""
    host, rpc = results("host"), results("rpc")
    cells = {row[0]: row[-1] for row in rows_of("docs/comparison.md", " | LMCache MP")}
    whole = "16 blocks of 2 MiB, of memcpy"
    assert cells[f"store, {whole}"] == f"{host['put, 2048 KiB x 16']['ratio_to_memcpy']:.2f}"
    assert cells[f"load, {whole}"] == f"{host['get, 2048 KiB x 16']['ratio_to_memcpy']:.2f}"
    median_ms = rpc["acquire 1000"]["p50_us"] / 1000
    assert cells["lookup of 1,000 keys"] == f"{median_ms:.2f} ms"
    plain = " ".join(text("docs/comparison.md").split())
    pages = [host[f"{way}, 64 KiB x 32 layers"]["ratio_to_memcpy"] for way in ("gather", "scatter")]
    assert f"at {pages[0]:.2f} and {pages[1]:.2f} of memcpy" in plain


# --- sizing ---------------------------------------------------------------------------


def rows_of(page: str, head: str) -> list[list[str]]:
    """The cells of the table whose head begins with `head`."""
    found = re.search(rf"^\|{re.escape(head)}.*\n\|[- |]+\n((?:\|.*\n)+)", text(page), re.MULTILINE)
    assert found is not None, head
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in found[1].splitlines()]


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


def test_sizes_of_models() -> None:
    """An operator would buy memory for a number that the formula does not give."""
    rows = rows_of("docs/sizing.md", " model shape")
    assert len(rows) >= 4
    for _, *cells in rows:
        layers, heads, dim, value, tokens, ranks, per_token, slot, kept = map(number, cells)
        assert per_token == 2 * layers * heads * dim * value
        model = Model(per_token, tokens, ranks)
        block = model.bytes_per_token * model.block_tokens / model.ranks
        assert slot == slot_bytes_for(int(block))
        assert kept == (64 << 30) // (slot * ranks) * tokens


def test_segments_and_descriptors() -> None:
    """A container's descriptor limit would be set too low."""
    for capacity, segment, count, descriptors in rows_of("docs/sizing.md", " `host.capacity`"):
        bytes_each = segment_bytes(parse_size(capacity))
        assert bytes_each == parse_size(segment)
        assert number(count) == parse_size(capacity) // bytes_each
        assert number(descriptors) == 4 * number(count)


def test_break_even_speeds() -> None:
    """An operator would buy a disk that is slower than the engine."""
    for per_token, prefill, speed in rows_of("docs/sizing.md", " bytes per token"):
        assert f"{number(per_token) * number(prefill) / 1e9:.2f}" == speed


def test_file_tier_overhead() -> None:
    """A disk would fill up before the tier holds its capacity in blocks."""
    for slot, added in ((2 << 20, 0.2), (128 << 10, 3.2)):
        whole = slab_bytes(64, slot) / (64 * slot) - 1
        assert round(100 * whole, 1) == pytest.approx(added, abs=0.1)
    plain = text("docs/sizing.md")
    assert "2 MiB that is 0.2 % more" in plain
    assert "128 KiB 3 %" in plain


def test_writes_a_day() -> None:
    """An SSD would wear out earlier than the page says."""
    written = 500 * 131_072 * 0.58 * 86_400
    plain = " ".join(text("docs/sizing.md").split())
    assert f"{written / 1e12:.1f} TB a day: {written / 3.84e12:.2f} drive writes" in plain

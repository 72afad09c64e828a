"""What the documents claim about the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tierd.backend import Backend
from tierd.config import backend_options, parse
from tierd.reference import options_reference, reference
from tierd.wire import messages as m
from tierd.wire.frames import FRAME_BYTES_MAX
from tierd_backends.file import FileBackend
from tierd_backends.redis import RedisBackend
from tierd_backends.s3 import S3Backend
from tierd_connectors.vllm.options import Options

ROOT = Path(__file__).parents[2]
KINDS: dict[str, type[Backend]] = {"file": FileBackend, "redis": RedisBackend, "s3": S3Backend}


def test_config_reference_is_the_configuration() -> None:
    """An operator would set keys that do not exist, or miss one that does."""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"<!-- config -->\n(.*?)<!-- /config -->", text, re.DOTALL)
    assert found is not None
    tables = [options_reference(kind, cls.Options) for kind, cls in KINDS.items()]
    assert found[1] == "\n".join([reference(), *tables]) + "\n"


def test_example_configurations_are_accepted() -> None:
    """An operator's first try, copied from the README, would be refused."""
    text = (ROOT / "README.md").read_text()
    examples = re.findall(r"^\[\[storage\]\]\n(?:\w+ = .+\n)+", text, re.MULTILINE)
    assert {"file", "redis", "s3"} == {tomllib.loads(e)["storage"][0]["type"] for e in examples}
    for example in examples:
        (tier,) = parse(tomllib.loads('[host]\ncapacity = "1GiB"\n' + example), {}).storage
        kind = KINDS[tier.type]
        kind.from_options(backend_options(tier, kind.Options))


def test_connector_settings_are_documented() -> None:
    """A setting of the connector that the README does not name is never found."""
    text = (ROOT / "README.md").read_text()
    for name in Options.__slots__:
        assert f"| `{name}` |" in text


def test_protocol_numbers() -> None:
    """An implementer would follow PROTOCOL.md and be refused."""
    text = (ROOT / "tierd" / "wire" / "PROTOCOL.md").read_text()
    assert f"at most {FRAME_BYTES_MAX >> 20} MiB" in text
    assert f"at most {m.KEYS_PER_CALL_MAX:,} per call" in text
    rows = {
        int(n): name for n, name in re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", text, re.MULTILINE)
    }
    names = {n: cls.__name__.upper() for cls, n in m._NUMBERS.items()}
    assert {n: name.replace("_", "") for n, name in rows.items()} == names

"""What the documents claim about the code."""

from __future__ import annotations

import re
from pathlib import Path

from tierd.config import options_reference, reference
from tierd.wire import messages as m
from tierd.wire.frames import FRAME_BYTES_MAX
from tierd_backends.file import FileBackend
from tierd_connectors.vllm_options import Options

ROOT = Path(__file__).parent.parent


def test_config_reference_is_the_configuration() -> None:
    """An operator would set keys that do not exist, or miss one that does."""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"<!-- config -->\n(.*?)<!-- /config -->", text, re.DOTALL)
    assert found is not None
    expected = f"{reference()}\n{options_reference('file', FileBackend.Options)}\n"
    assert found[1] == expected


def test_connector_settings_are_documented() -> None:
    """A setting of the connector that the README does not name is never found."""
    text = (ROOT / "README.md").read_text()
    for name in Options.__slots__:
        assert f"| `{name}` |" in text


def test_protocol_numbers() -> None:
    """An implementer would follow PROTOCOL.md and be refused."""
    text = (ROOT / "tierd" / "wire" / "PROTOCOL.md").read_text()
    assert f"at most {FRAME_BYTES_MAX >> 20} MiB" in text
    assert f"at most {m.KEYS_PER_CALL_MAX:,} a call" in text
    rows = {
        int(n): name for n, name in re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", text, re.MULTILINE)
    }
    names = {n: cls.__name__.upper() for cls, n in m._NUMBERS.items()}
    assert {n: name.replace("_", "") for n, name in rows.items()} == names

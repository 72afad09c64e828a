"""Sizes in the configuration."""

import pytest

from tierd.errors import ConfigError
from tierd.sizes import parse_size, parse_size_of


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (0, 0),
        (123, 123),
        ("123", 123),
        ("7B", 7),
        ("8GiB", 8 << 30),
        ("512MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("1.5 gib", 3 << 29),
        ("0.1KiB", 102),
        (" 2TiB ", 2 << 40),
        ("1PB", 10**15),
        ("3kB", 3000),
    ],
)
def test_parse_size(text, size_bytes):
    """A capacity would be read as another one than the operator wrote."""
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "8G",
        "8 gigabytes",
        "-1",
        -1,
        True,
        1.5,
        None,
        "1e9",
        "1,5GB",
        "٣GiB",
        "5%",
        "1..5B",
    ],
)
def test_parse_size_refuses(text):
    """A typing error would start a tier of some size or other."""
    with pytest.raises(ConfigError) as raised:
        parse_size(text)
    assert repr(text) in str(raised.value)


def test_parse_size_of():
    """A reserve in percent would be taken as bytes, or reach past the disk."""
    assert parse_size_of("5%", 1000) == 50
    assert parse_size_of("0.5 %", 1000) == 5
    assert parse_size_of("100%", 1000) == 1000
    assert parse_size_of("1KiB", 1000) == 1024
    assert parse_size_of(7, 1000) == 7
    for wrong in ("101%", "%", "-1%", "5%%"):
        with pytest.raises(ConfigError, match="%"):
            parse_size_of(wrong, 1000)

"""Sizes in the configuration."""

import pytest

from tierd.errors import ConfigError
from tierd.sizes import change, parse_size, parse_size_of


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
    """A capacity would be read as another number than the operator wrote."""
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
    """With a typing error a tier would start with an unintended size."""
    with pytest.raises(ConfigError) as raised:
        parse_size(text)
    assert repr(text) in str(raised.value)


def test_parse_size_of():
    """A reserve in percent would be taken as bytes, or exceed the disk."""
    assert parse_size_of("5%", 1000) == 50
    assert parse_size_of("0.5 %", 1000) == 5
    assert parse_size_of("100%", 1000) == 1000
    assert parse_size_of("1KiB", 1000) == 1024
    assert parse_size_of(7, 1000) == 7
    for wrong in ("101%", "%", "-1%", "5%%"):
        with pytest.raises(ConfigError, match="%"):
            parse_size_of(wrong, 1000)


def test_ambiguous_unit_is_refused_with_both_spellings():
    """An operator would not know which of the two units to write."""
    with pytest.raises(ConfigError) as raised:
        parse_size("1.5g")
    assert 'write "1.5GiB" for units of 1,073,741,824 bytes' in str(raised.value)
    assert '"1.5GB" for units of 1,000,000,000 bytes' in str(raised.value)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (512 << 20, 508 << 20, "from 512 MiB to 508 MiB"),
        (64 << 30, 40 << 30, "from 64 GiB to 40 GiB"),
        (64 << 30, (64 << 30) - (16 << 20), "from 64 GiB to 63.98 GiB"),
        (64 << 30, (64 << 30) - 4096, "from 64 GiB to 63.999996 GiB"),
        (5, 5, "from 5 B to 5 B"),
    ],
)
def test_small_change_stays_visible(before, after, said):
    """The log would say that memory shrinks from 0.50 to 0.50 GiB."""
    assert change(before, after) == said

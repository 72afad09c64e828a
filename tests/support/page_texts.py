"""The documents as text: their names, and the code that they show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]

SITE: Final = tuple(sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")))
"""The pages of the site."""

PAGES: Final = ("README.md", "ARCHITECTURE.md", *SITE)
"""Every document that says how tierd is used, or works."""

_FENCED: Final = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_INDENTED: Final = re.compile(r"(?<=\n\n)((?:^    \S[^\n]*\n)+)", re.MULTILINE)


class Code(NamedTuple):
    """A fenced block."""

    language: str
    title: str
    text: str


def text(page: str) -> str:
    """A document, or another file of the repository."""
    return (ROOT / page).read_text()


def codes(page: str) -> list[Code]:
    """The fenced blocks of a page."""
    return [Code(*found) for found in _FENCED.findall(text(page))]


def files(page: str) -> dict[str, str]:
    """The files that a page shows in full, by name."""
    return {code.title: code.text for code in codes(page) if code.title}


def prose(page: str) -> str:
    """A page without its fenced blocks."""
    return _FENCED.sub("", text(page))


def indented(page: str) -> list[str]:
    """The indented blocks of a page."""
    return _INDENTED.findall(prose(page))


def anchors(page: str) -> set[str]:
    """The targets of links within a page."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}

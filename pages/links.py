"""Extends MkDocs: included files, and links to files of the repository.

The pages are read in the repository, where links to files outside docs/ work, and on the site,
which has only pages: there such a link becomes plain text. A link to a missing file is a warning in
both, and warnings fail the build.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Final, Protocol

ROOT: Final = Path(__file__).parent.parent
DOCS: Final = ROOT / "docs"

_INCLUDE: Final = re.compile(r"^<!-- include: (\S+) -->$", re.MULTILINE)
_LINK: Final = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_TITLE: Final = re.compile(r"\A# .+\n")

log = logging.getLogger("mkdocs.hooks.links")


class _File(Protocol):
    src_uri: str


class _Page(Protocol):
    file: _File


def on_page_markdown(markdown: str, page: _Page, **_: object) -> str:
    """The page's text with included files, and without links that leave the site."""
    folder = (DOCS / page.file.src_uri).parent

    def included(found: re.Match[str]) -> str:
        path = ROOT / found[1]
        if not path.is_file():
            log.warning("%s includes %s, which is missing", page.file.src_uri, found[1])
            return ""
        return _for_site(_TITLE.sub("", path.read_text()), path.parent, folder)

    return _INCLUDE.sub(included, _for_site(markdown, folder, folder))


def _for_site(text: str, source: Path, folder: Path) -> str:
    """A text from the folder `source`, with its links rewritten for a page in `folder`."""

    def changed(found: re.Match[str]) -> str:
        label, target = found.groups()
        if target.startswith("#") or "://" in target:
            return found[0]
        name, mark, anchor = target.partition("#")
        path = (source / name).resolve()
        if not path.exists():
            log.warning("%s links to %s, which is missing", source, target)
        if not path.is_relative_to(DOCS):
            return label
        return f"[{label}]({os.path.relpath(path, folder)}{mark}{anchor})"

    return _LINK.sub(changed, text)

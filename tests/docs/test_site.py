"""The site is built without the network, and a dead link fails the build."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def build(checkout: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = ("-m", "mkdocs", "build", "--strict", "--site-dir", str(site))
    return subprocess.run(
        [sys.executable, *command], cwd=checkout, capture_output=True, text=True, check=False
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that a build reads, in a copy that a test may change."""
    for folder in ("docs", "pages", "bench/results"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for name in ("mkdocs.yml", "ARCHITECTURE.md", "bench/policies.md", "tierd/wire/PROTOCOL.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_site_needs_no_network(checkout: Path) -> None:
    """On a node without Internet access pages would have no styles, scripts or fonts."""
    site = checkout / "site"
    done = build(checkout, site)
    assert done.returncode == 0, done.stderr
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    loaded = re.compile(
        r"""<(?:script|img|iframe|source)[^>]+src=["']?(https?:)?//"""
        r"""|<link[^>]+href=["']?(https?:)?//|@import\s+url\(["']?https?:"""
    )
    for page in [*pages, *site.rglob("*.css")]:
        assert not loaded.search(page.read_text()), page
    included = (site / "protocol.html").read_text()
    assert "SCM_RIGHTS" in included
    map_page = (site / "architecture" / "index.html").read_text()
    assert 'href="storing.html"' in map_page


@pytest.mark.parametrize(
    "line",
    [
        "[a page](nowhere.md)",
        "[a section](sizing.md#nowhere)",
        "[a section of this page](#nowhere)",
        "[a file](../tierd/nowhere.py)",
        "![a picture](images/nowhere.svg)",
        "<!-- include: nowhere.md -->",
    ],
)
def test_dead_link_fails_the_build(checkout: Path, line: str) -> None:
    """Only a reader would find a dead link."""
    page = checkout / "docs" / "index.md"
    page.write_text(f"{page.read_text()}\n{line}\n")
    done = build(checkout, checkout / "site")
    assert done.returncode != 0
    assert "nowhere" in done.stderr

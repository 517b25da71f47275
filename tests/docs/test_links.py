"""Every link of the documentation, and every page that the code names, exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tools.docs_report import ROOT, dead_links, pages

PAGES = [page for page in pages() if page.exists()]
# A path of a page in code, comments, help or messages.
PAGE = re.compile(r"(?<!\w/)\bdocs/(?!images/)[\w/-]+(?:\.(?:md|json|sh))?")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    """No network is used: addresses of other hosts are not checked."""
    assert list(dead_links(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_rows_of_a_table_have_equally_many_cells(page: Path) -> None:
    """A bar in code would end its cell: it is escaped."""
    num_bars, wrong = 0, []
    for line in page.read_text(encoding="utf-8").splitlines():
        found = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        if num_bars and found not in {0, num_bars}:
            wrong.append(line)
        num_bars = num_bars if found and num_bars else found
    assert wrong == []


def test_every_page_that_the_code_names_exists() -> None:
    """A path such as docs/reference/errors.md, or docs/adr/0007 without the rest of its name."""
    tracked = subprocess.run(
        ["git", "grep", "-lE", "docs/", "--", ":!docs", ":!*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    named = {
        (name, path)
        for path in tracked
        for name in PAGE.findall((ROOT / path).read_text(encoding="utf-8", errors="replace"))
    }
    missing = [
        (name, path)
        for name, path in named
        if not (ROOT / name).exists() and not list(ROOT.glob(f"{name}*"))
    ]
    assert len(named) > 20
    assert sorted(missing) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    """A missing file and a missing heading are dead; code and other hosts are not checked."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A title\n## Twice\n## Twice\n[a](#a-title) [b](#twice-1) [c](https://x.test/y)\n"
        "`[d](no.md)` [e](no.md) [f](#no) [g](page.md#twice) [h](page.md#twice-2)\n"
        "```\n# No heading\n[i](no.md)\n```\n[j](#no-heading)\n"
    )
    assert list(dead_links(page)) == ["no.md", "#no", "page.md#twice-2", "#no-heading"]

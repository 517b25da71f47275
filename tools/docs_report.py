"""Report on the documentation: words per page, dead links, and code blocks that no test runs.

    python -m tools.docs_report        # `make docs-report` does the same

Words are those of prose, tables and code, without the bars of tables. A page's blocks count as run
if a test that reads blocks names the page, or a pattern that matches it. Blocks of `text` are
output and count as none.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from textwrap import dedent
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
_LINK: Final = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_HEADING: Final = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_FENCE: Final = re.compile(
    r'^( *)```(\w*)(?: title="([^"]+)")?\n(.*?)^\1```$', re.MULTILINE | re.DOTALL
)
_NAMED_PAGE: Final = re.compile(r'"([\w./*-]*\.md)"')


class Block(NamedTuple):
    """One block: its language, the name of the file that it shows, its text and first line."""

    language: str
    title: str
    text: str
    line: int


def pages() -> list[Path]:
    """Return the pages of the documentation."""
    at_root = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [
        *at_root,
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md")),
    ]


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in their order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[2], match[3] or "", dedent(match[4]), text.count("\n", 0, match.start()) + 1)
        for match in _FENCE.finditer(text)
    ]


def num_words(page: Path) -> int:
    """Return the number of words of a page."""
    return len(page.read_text(encoding="utf-8").replace("|", " ").split())


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    found: dict[str, int] = {}
    for heading in _HEADING.findall(text):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {f"{slug}-{i}" if i else slug for slug, count in found.items() for i in range(count + 1)}


def dead_links(page: Path) -> Iterator[str]:
    """Yield the relative links of a page that lead to no file, or to no heading."""
    for link, target, anchor in _links(page):
        is_page = target.suffix == ".md"
        if not target.exists() or (anchor and is_page and anchor not in anchors(target)):
            yield link


def linked_files(page: Path) -> Iterator[Path]:
    """Yield the files of the repository that a page links to."""
    yield from (target for _, target, _ in _links(page) if target.is_file())


def _links(page: Path) -> Iterator[tuple[str, Path, str]]:
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text(encoding="utf-8")))
    for link in _LINK.findall(text):
        path, _, anchor = link.partition("#")
        if not re.match(r"[a-z]+:", link):
            yield link, (page.parent / path).resolve() if path else page, anchor


def tested_pages() -> set[Path]:
    """Return the pages that tests of blocks name, by path or by pattern."""
    texts = [test.read_text(encoding="utf-8") for test in (ROOT / "tests").rglob("*.py")]
    patterns = {
        name
        for text in texts
        if any(sign in text for sign in ("blocks_of", "commands_of", "```"))
        for name in _NAMED_PAGE.findall(text)
        if name != "*.md"
    }
    return {
        page
        for page in pages()
        for pattern in patterns
        if fnmatch(str(page.relative_to(ROOT)), pattern)
        or fnmatch(str(page.relative_to(ROOT)), f"docs/{pattern}")
    }


def main() -> int:
    """Print the report."""
    tested, total, unrun = tested_pages(), 0, 0
    print(f"{'words':>7} {'blocks':>7} {'not run':>8}  page")
    for page in filter(Path.exists, pages()):
        words, commands = num_words(page), [it for it in blocks_of(page) if it.language != "text"]
        missing = 0 if page in tested else len(commands)
        total, unrun = total + words, unrun + missing
        print(f"{words:7,} {len(commands):7,} {missing:8,}  {page.relative_to(ROOT)}")
        for link in dead_links(page):
            print(f"{'':25}dead link: {link}")
    print(f"{total:7,} words, {unrun:,} blocks that no test runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())

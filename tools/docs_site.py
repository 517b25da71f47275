"""Stage the documentation for the site: pages, pictures and linked files, and the navigation.

    python -m tools.docs_site out/site-source    # `make docs` does this, then builds the site

Pages keep their places, so that the links that GitHub follows hold on the site, too. Zensical
builds it, with 11 packages where Material for MkDocs needs 28; fonts and scripts are its own.
Search needs a server, such as `python -m http.server`: browsers forbid it from `file://`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from .docs_report import ROOT, linked_files, pages

_GROUPS: Final = ("Guides", "Reference", "Explanation", "Integrations")
_TITLE: Final = re.compile(r"^# +(.+)$", re.MULTILINE)
_PICTURES: Final = ("docs/images",)

# No fonts from the network; file names that any file server finds.
_SETTINGS: Final[dict[str, Any]] = {
    "site_name": "Tidemill",
    "site_description": "LLM batch inference in your own cloud",
    "theme": {
        "name": "material",
        "font": False,
        "features": [
            "navigation.indexes",
            "navigation.top",
            "search.highlight",
            "content.code.copy",
        ],
        "palette": [
            {"media": "(prefers-color-scheme: light)", "scheme": "default"},
            {"media": "(prefers-color-scheme: dark)", "scheme": "slate"},
        ],
    },
    "plugins": ["search"],
    "use_directory_urls": False,
    "markdown_extensions": ["tables", "pymdownx.superfences", "pymdownx.highlight"],
}


def navigation() -> list[dict[str, Any]]:
    """Return the navigation: the first page, then four groups by their folders."""
    found: list[dict[str, Any]] = [{"Tidemill": "README.md"}]
    for group in _GROUPS:
        entries: list[dict[str, Any]] = [*_entries(group.lower())]
        if group == "Explanation":
            entries.append({"Decisions": [*_entries("adr")]})
        if group == "Reference":
            entries += [{"FAQ": "docs/faq.md"}] if (ROOT / "docs/faq.md").exists() else []
        found.append({group: entries})
    return [*found, {"Contributing": "CONTRIBUTING.md"}, {"Security": "SECURITY.md"}]


def _entries(folder: str) -> Iterator[dict[str, str]]:
    titled = {page: _title(page) for page in (ROOT / "docs" / folder).glob("*.md")}
    for page in sorted(titled, key=lambda page: (page.name != "README.md", _key(titled[page]))):
        yield {titled[page]: str(page.relative_to(ROOT))}


def _title(page: Path) -> str:
    title = _TITLE.search(page.read_text(encoding="utf-8"))
    return title[1].replace("`", "") if title else page.stem


def _key(title: str) -> tuple[int, str]:
    """Return the order of a title: decisions by their numbers, all others by the alphabet."""
    number = re.match(r"\d+", title)
    return int(number[0]) if number else 0, title.lower()


def stage(folder: Path) -> None:
    """Copy the pages and all that they link to, and write the settings next to them."""
    source = folder / "source"
    shutil.rmtree(folder, ignore_errors=True)
    files = {page for page in pages() if page.exists()}
    files |= {target for page in files for target in linked_files(page)}
    for picture in _PICTURES:
        files |= {path for path in (ROOT / picture).rglob("*") if path.is_file()}
    for path in sorted(files):
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    slugify = "      slugify: !!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}\n"
    settings = _SETTINGS | {"docs_dir": "source", "site_dir": "site", "nav": navigation()}
    extensions = settings.pop("markdown_extensions")
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())
    listed = "".join(f"  - {name}\n" for name in extensions)
    (folder / "mkdocs.yml").write_text(
        f"{text}markdown_extensions:\n{listed}  - toc:\n      permalink: true\n{slugify}"
    )


def main() -> int:
    """Stage the pages in the folder that is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the pages and mkdocs.yml are written")
    stage(parser.parse_args().folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The site has every page of the documentation, and its settings name what is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tools.docs_report import ROOT, pages
from tools.docs_site import navigation, stage


def paths(entries: Any) -> list[str]:
    """Return the pages of a part of the navigation."""
    if isinstance(entries, str):
        return [entries]
    values = entries.values() if isinstance(entries, dict) else entries
    return [path for value in values for path in paths(value)]


def test_the_navigation_has_every_page_in_four_groups() -> None:
    """The README comes first; examples are reached by links."""
    entries = navigation()
    listed = paths(entries)
    wanted = {str(page.relative_to(ROOT)) for page in pages() if page.parts[-2] != "examples"}
    assert sorted(listed) == sorted(wanted)
    assert listed[0] == "README.md"
    names = [name for entry in entries for name, value in entry.items() if isinstance(value, list)]
    assert names == ["Guides", "Reference", "Explanation", "Integrations"]


def test_pages_are_staged_with_the_files_that_they_link_to(tmp_path: Path) -> None:
    """Links need no change, because each file keeps its place."""
    stage(tmp_path / "site")
    source = tmp_path / "site" / "source"
    for name in ("README.md", "docs/reference/openapi.json", "docs/grafana/tidemill.json"):
        assert (source / name).is_file()
    text = (tmp_path / "site" / "mkdocs.yml").read_text(encoding="utf-8")
    settings = yaml.safe_load(text.partition("markdown_extensions:")[0])
    assert all((source / path).is_file() for path in paths(settings["nav"]))

"""Tests that a server has every route of the documentation's tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.server.local.rig import MODEL, serving

ROOT = Path(__file__).parents[3]


def documented_routes(name: str, heading: str, method: str) -> Iterator[tuple[str, str]]:
    """Yield method and path of each route in the first column of a table.

    A path without a method has the method of the previous path in its row, or else the default
    `method`; an empty one means any method.
    """
    _, found, rest = (ROOT / name).read_text(encoding="utf-8").partition(f"\n| {heading} |")
    assert found, f"{name} has no table {heading}"
    for row in rest.partition("\n\n")[0].splitlines()[2:]:
        current = method
        for words in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
            *given, path = words.split()
            current = given[0] if given else current
            yield current, path.replace("{name}", MODEL)


ROUTES = {
    *documented_routes("docs/guides/serve.md", "route", ""),
    *documented_routes("docs/reference/endpoints.md", "url of a line", "POST"),
}


async def test_every_documented_route_is_served(tmp_path: Path) -> None:
    """No route of serve.md and endpoints.md is unknown or returns 405."""
    assert len(ROUTES) > 20
    statuses = {}
    async with serving(tmp_path) as local:
        for method, path in sorted(ROUTES):
            body = {"say": "x"} if method == "POST" else None
            answer = await local.client.request(method or "GET", path, json=body)
            is_unknown = answer.status_code == 404 and "unknown_url" in answer.text
            is_served = not is_unknown and (answer.status_code != 405 or not method)
            statuses[method, path] = is_served
    assert [route for route, is_served in statuses.items() if not is_served] == []

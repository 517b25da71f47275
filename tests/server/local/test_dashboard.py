"""The dashboard of a server: the page, its views over the store's batches, downloads and access."""

from __future__ import annotations

import base64
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.server.local.rig import MODEL, Local, lines_of, serving
from tidemill.dashboard import file_check
from tidemill.dashboard.assets import assets, url_of
from tidemill.server.local import dashboard_routes

HOSTILE = "<img src=x onerror=alert(1)>.jsonl"
FAILING = [{}, {"status": 400}, {"status": 400}]


async def batch_of(local: Local, bodies: list[dict[str, Any]], name: str = HOSTILE) -> str:
    """Create a batch of an uploaded file and return its ID."""
    data = lines_of(bodies)
    uploaded = await local.client.post(
        "/v1/files", files={"file": (name, data)}, data={"purpose": "batch"}
    )
    made = await local.client.post(
        "/v1/batches",
        json={"input_file_id": uploaded.json()["id"], "endpoint": "/v1/chat/completions"},
    )
    return str(made.json()["id"])


async def shown(local: Local, view: str, **headers: str) -> str:
    """Return the text of a view."""
    found = await local.client.get(f"/dashboard/view/{view}", headers=headers)
    assert found.status_code == 200, found.text
    return found.text


async def test_every_response_isolates_the_page(tmp_path: Path) -> None:
    """The page, its files and all views that a batch names have the security headers."""
    async with serving(tmp_path) as local:
        batch_id = await batch_of(local, FAILING)
        output = (await local.ended(batch_id))["output_file_id"]
        batch = await shown(local, f"batches/{batch_id}")
        paths = [
            "/dashboard",
            *map(url_of, assets()),
            *("/dashboard/view/session", "/dashboard/view/batches", "/dashboard/view/new"),
            f"/dashboard/view/files/{output}/link",
            *re.findall(r'data-view="([^"]+)"', batch),
        ]
        assert len(paths) > len(assets()) + 5
        for path in paths:
            found = await local.client.get(path)
            assert found.status_code == 200, path
            assert "default-src 'none'" in found.headers["Content-Security-Policy"], path
            assert found.headers["X-Content-Type-Options"] == "nosniff"


async def test_a_file_of_another_version_is_not_found(tmp_path: Path) -> None:
    """The message contains the advice to reload."""
    async with serving(tmp_path) as local:
        for path in ("0/app.js", f"{url_of('app.js').split('/')[3]}/..%2fpages.py"):
            found = await local.client.get(f"/dashboard/assets/{path}")
            assert found.status_code == 404


async def test_batches_are_listed_by_the_names_of_their_files(tmp_path: Path) -> None:
    """A list is divided into pages; a name is text; there are no costs, tenants or buckets."""
    async with serving(tmp_path) as local:
        empty = await shown(local, "batches")
        assert "Upload a file here." in empty
        ids = [await batch_of(local, [{}], f"{number}-{HOSTILE}") for number in range(21)]
        for batch_id in ids:
            await local.ended(batch_id)
        newest = await shown(local, "batches")
        assert "20-&lt;img src=x onerror=alert(1)&gt;.jsonl" in newest
        assert "<img" not in newest
        assert "Cost" not in newest
        (after,) = re.findall(r"after=(\w+)", newest)
        assert "0-&lt;img" in await shown(local, f"batches?after={after}")
        unknown = await local.client.get("/dashboard/view/batches?after=batch_1")
        assert unknown.json()["error"]["code"] == "batch_not_found"


async def test_the_first_errors_are_shown_during_the_run_and_afterwards(tmp_path: Path) -> None:
    """They are grouped; after the deletion of the file, the view contains a note."""
    async with serving(tmp_path) as local:
        batch_id = await batch_of(local, [*FAILING, {"wait": True}])
        await local.until(batch_id, lambda batch: batch["request_counts"]["failed"] == 2)
        running = await shown(local, f"batches/{batch_id}/errors")
        assert "2 ×" in running
        assert "<code>c</code> <bdi>No.</bdi>" in running
        live = await shown(local, f"batches/{batch_id}")
        assert "data-live" in live
        local.engine.go.set()
        ended = await local.ended(batch_id)
        assert await shown(local, f"batches/{batch_id}/errors") == running
        assert "data-live" not in await shown(local, f"batches/{batch_id}")
        await local.client.delete(f"/v1/files/{ended['error_file_id']}")
        gone = await shown(local, f"batches/{batch_id}/errors")
        assert "no longer available" in gone


async def test_lines_that_were_not_run_are_shown(tmp_path: Path) -> None:
    """The lines of an expired batch have error rows, but do not count as failures."""
    async with serving(tmp_path) as local:
        batch_id = await batch_of(local, [{"wait": True}] * 3)
        await local.until(batch_id, lambda _: local.engine.running == 3)
        assert not (await shown(local, f"batches/{batch_id}/errors")).strip()
    async with serving(tmp_path, clock=lambda: time.time() + 10**6) as local:
        assert (await local.ended(batch_id))["status"] == "expired"
        errors = await shown(local, f"batches/{batch_id}/errors")
        assert "not run" in errors
        assert "3 ×" in errors
        assert "<code>batch_expired</code>" in errors


async def test_a_broken_file_is_explained(tmp_path: Path) -> None:
    """The view of the batch lists the invalid lines."""
    async with serving(tmp_path) as local:
        batch_id = await batch_of(local, [{}, {"model": "<b>other</b>"}])
        assert (await local.ended(batch_id))["status"] == "failed"
        view = await shown(local, f"batches/{batch_id}")
        assert "Why it failed" in view
        assert "in line 2" in view
        assert "<b>" not in view


async def test_a_link_downloads_without_the_key_until_it_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed or expired link is refused; so is a link to a file that is gone."""
    async with serving(tmp_path, api_keys=("secret",)) as local:
        local.client.headers["Authorization"] = "Bearer secret"
        batch_id = await batch_of(local, [{}], "in.jsonl")
        output = (await local.ended(batch_id))["output_file_id"]
        link = f"/dashboard/view/files/{output}/link"
        url = (await local.client.get(link)).json()["url"]
        monkeypatch.setattr(dashboard_routes, "_LINK_SECONDS", -1)
        expired = (await local.client.get(link)).json()["url"]
        missing = await local.client.get("/dashboard/view/files/file-1/link")
        assert missing.json()["error"]["code"] == "file_not_found"
        del local.client.headers["Authorization"]
        found = await local.client.get(url)
        assert found.json()["custom_id"] == "c0"
        assert found.headers["Content-Disposition"].startswith("attachment")
        assert found.headers["Cache-Control"] == "no-store"
        for refused in (expired, url.replace(output, "file-2"), url[:-1], f"{url}\u00e9"):
            answer = await local.client.get(refused)
            assert answer.json()["error"]["code"] == "link_expired"


async def test_views_need_the_key_of_a_server_that_has_keys(tmp_path: Path) -> None:
    """The page, which contains no data, has a sign-in form; without keys, it has none."""
    async with serving(tmp_path, api_keys=("secret",)) as local:
        page = await local.client.get("/dashboard")
        assert 'id="sign-in-form"' in page.text
        assert (await local.client.get(url_of("app.js"))).status_code == 200
        for view in ("session", "batches", "batches/1", "batches/1/errors", "new", "files/1/link"):
            assert (await local.client.get(f"/dashboard/view/{view}")).status_code == 401
        assert '"tenant"' in await shown(local, "session", Authorization="Bearer secret")
    async with serving(tmp_path) as local:
        assert "sign-in" not in (await local.client.get("/dashboard")).text


async def test_foreign_pages_are_refused(tmp_path: Path) -> None:
    """The rules for `Host` and `Origin` apply to the page, its views and its links."""
    async with serving(tmp_path) as local:
        for path in ("/dashboard", "/dashboard/view/batches", "/dashboard/files/1"):
            for name, value in (("Host", "evil.example"), ("Origin", "https://evil.example")):
                answer = await local.client.get(path, headers={name: value})
                assert answer.status_code == 403
                assert answer.json()["error"]["code"] == f"{name.lower()}_not_allowed"
        # Browsers send the origin with a page's own module scripts.
        script = await local.client.get(url_of("app.js"), headers={"Origin": "http://own.example"})
        assert script.status_code == 200


async def test_the_form_names_the_models(tmp_path: Path) -> None:
    """An uploaded file may use these."""
    async with serving(tmp_path) as local:
        form = await shown(local, "new")
        assert f"<code>{MODEL}</code>." in form


@pytest.mark.parametrize("data", [b"ARROW1\0\0" + bytes(90), b"a,b\n1,2\n"])
async def test_tables_are_refused_before_they_are_read(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server does not run them."""
    monkeypatch.delattr(file_check, "check_binary")
    monkeypatch.delattr(file_check, "check_text_table")
    fields = {"name": "x", "bytes": len(data), "head": base64.b64encode(data).decode()}
    async with serving(tmp_path) as local:
        found = await local.client.post("/dashboard/view/check", json=fields)
        assert "This server runs files of requests, not tables" in found.text
        parts = [{"start": 0, "data": ""}] * 1001
        found = await local.client.post("/dashboard/view/check", json=fields | {"parts": parts})
        assert (found.status_code, "parts" in found.text) == (400, True)

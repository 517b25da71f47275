"""Page of rows: what its server answers, to whom, and that texts of others stay texts."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from playwright.sync_api import Browser, expect
from pyarrow import parquet

from tests.handler.dashboard.browser import NO_CHROMIUM, find_chromium, running_chromium
from tidemill.offline.rows.page import search
from tidemill.offline.rows.page.open_pages import open_pages
from tidemill.offline.rows.page.page_server import PageServer

Serve = Callable[..., AbstractContextManager[httpx.Client]]
HOSTILE = "<script>alert(1)</script>\0\x1b[2J\u202eneve\ud83d<img src=x onerror=alert(2)>"


def row(custom_id: str | None, text: str, reason: str = "stop") -> str:
    """Return a row of a chat."""
    body = {"choices": [{"message": {"content": text}, "finish_reason": reason}]}
    response = {"status_code": 200, "body": body}
    return json.dumps({"id": "x", "custom_id": custom_id, "response": response, "error": None})


def failed(custom_id: str, message: str) -> str:
    """Return a row that failed."""
    return json.dumps({"custom_id": custom_id, "response": None, "error": {"message": message}})


def request(custom_id: str, text: str) -> str:
    """Return a request."""
    body = {"messages": [{"role": "user", "content": text}]}
    return json.dumps({"custom_id": custom_id, "url": "/v1/chat/completions", "body": body})


@contextmanager
def serving(rows: Path, requests: Path | None = None, page_rows: int = 3) -> Iterator[PageServer]:
    """Serve the page of a file."""
    request_lines = None if requests is None else str(requests)
    with (
        open_pages(str(rows), request_lines, page_rows, None) as pages,
        PageServer(pages) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(name="serve")
def fixture_serve(tmp_path: Path) -> Serve:
    """Return a function that serves rows and their requests to a client."""

    @contextmanager
    def serve(*lines: str, requests: tuple[str, ...] | None = None) -> Iterator[httpx.Client]:
        rows, request_lines = tmp_path / "rows.jsonl", tmp_path / "x.jsonl"
        rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
        request_lines.write_text("\n".join(requests or ()) + "\n", encoding="utf-8")
        with (
            serving(rows, None if requests is None else request_lines) as server,
            httpx.Client(base_url=server.url, trust_env=False) as client,
        ):
            yield client

    return serve


def events(client: httpx.Client, **query: object) -> list[dict[str, Any]]:
    """Return the events of one page of a list, without those on progress."""
    fields: dict[str, str] = {name.strip("_"): str(value) for name, value in query.items()}
    answer = client.get("rows", params=fields)
    found = map(json.loads, answer.text.splitlines())
    return [event for event in found if not event.keys() & {"read", "indexed"}]


def numbers(found: list[dict[str, Any]]) -> list[int | None]:
    """Return the numbers of the rows, and that of the row where the next page starts."""
    return [event["row"]["number"] if "row" in event else event["next"] for event in found]


def test_rows_come_in_pages(serve: Serve) -> None:
    """Blank lines count in the numbers, as they do in the terminal."""
    with serve(*(row(f"q{n}", f"answer {n}") for n in range(4)), "", row("last", "six")) as client:
        first = events(client)
        assert numbers(first) == [1, 2, 3, 4]
        assert first[0]["row"]["custom_id"] == "q0"
        assert first[0]["row"]["text"] == "answer 0"
        assert numbers(events(client, from_=4)) == [4, 6, None]
        assert numbers(events(client, from_=5)) == [6, None]
        assert numbers(events(client, from_=99)) == numbers(events(client, from_=10**14)) == [None]
        assert numbers(events(client, from_="-1e9")) == [1, 2, 3, 4]
        assert client.get("about").json()["rows"] == 6


def test_rows_are_found(serve: Serve) -> None:
    """Rows are filtered by kind, words or custom ID; an invalid line counts as failed."""
    rows = (
        row("a", "Lisbon"),
        failed("b", "BUSY"),
        row("c", "cut", "length"),
        "no json {",
        row("é/\U0001f600", "x"),
        row("a", "again"),
    )
    with serve(*rows) as client:
        assert numbers(events(client, kind="failed")) == [2, 4, None]
        assert numbers(events(client, kind="length")) == [3, None]
        assert numbers(events(client, kind="stop")) == [1, 5, 6, None]
        assert numbers(events(client, text="lisBON")) == [1, None]
        assert numbers(events(client, text="busy", kind="failed")) == [2, None]
        assert numbers(events(client, id="a")) == [1, 6, None]
        assert numbers(events(client, id="é/\U0001f600")) == [5, None]
        assert numbers(events(client, text="nowhere", id="a")) == [None]


def test_a_request_is_shown_next_to_its_row(serve: Serve) -> None:
    """A request on the same line is shown at once, others (the first of an ID) after indexing."""
    rows = (row("a", "1"), row("b", "2"), row("c", "3"))
    request_lines = (request("a", "A?"), "no json", request("b", "B?"), request("b", "other"))
    with serve(*rows, requests=request_lines) as client:
        found = events(client)
        assert [event["row"]["request"] for event in found[:3]] == ["user: A?", None, None]
        assert found[3:] == [
            {"next": None},
            {"request": "user: B?", "number": 2},
            {"request": "", "number": 3},
        ]
        assert "B?" in client.get("row", params={"from": 2}).json()["html"]
        assert "No request has this" in client.get("row", params={"from": 3}).json()["html"]


def test_hostile_rows_are_texts(serve: Serve) -> None:
    """They break neither a page nor the server; invisible characters are escaped."""
    deep = '{"response": ' + "[" * 100_000
    digits = row("d", "x").replace('"choices"', '"usage": {"output_tokens": ' + "9" * 5000)
    bad = ("[1]", deep, digits.replace('[{"message"', '1}, "choices": [{"message"', 1), '{"a": 1}')
    with serve(row(HOSTILE, HOSTILE, HOSTILE), row(None, "y" * 50_000), *bad) as client:
        first, long, *others = (event["row"] for event in events(client)[:3])
        for name in ("custom_id", "text"):
            assert first[name].startswith("<script>alert(1)</script>\\u0000\\u001b[2J\\u202e")
        assert long["text"].endswith("(49,000 more characters)")
        assert "y" * 50_000 in client.get("row", params={"from": 2}).json()["html"]
        others += [event["row"] for event in events(client, from_=4)[:3]]
        assert [each["words"] for each in others] == ["not a row"] * 4
        assert all(each["is_failed"] for each in others)
        full = [client.get("row", params={"from": number}).json() for number in range(1, 8)]
        assert [each["number"] for each in full[:6]] == [1, 2, 3, 4, 5, 6]
        assert "<script>" not in full[0]["html"]
        assert "\u202e" not in full[0]["html"]
        assert full[6] == {"error": "row 7 not found"}


def test_only_the_address_with_its_token_is_answered(serve: Serve) -> None:
    """The host must be this machine, and the policy allows only the page's script."""
    with serve(row("a", "secret")) as client:
        page = client.get("")
        assert page.headers["Content-Type"] == "text/html; charset=utf-8"
        policy = page.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; ")
        assert "unsafe" not in policy
        assert "<script>" not in page.text
        assert "style=" not in page.text
        base = f"http://127.0.0.1:{client.base_url.port}"
        refused = [client.get(f"{base}{path}") for path in ("/", "/rows", "/x/rows", "/é/", "//[")]
        hosts = ("evil.example", "127.0.0.1.evil.example", "", "[", "[::1")
        refused += [client.get("rows", headers={"Host": host}) for host in hosts]
        assert {answer.status_code for answer in refused} == {403}
        assert not any("secret" in answer.text for answer in refused)
        assert all("default-src 'none'" in str(answer.headers) for answer in refused)
        assert client.get("about", headers={"Host": f"localhost:{9}"}).status_code == 200
        assert client.get("../etc").status_code == 403
        assert client.get("passwd").status_code == 404
        assert client.post("rows").status_code == 501


def test_a_search_ends_when_its_reader_goes(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends at once, even if most rows are unread."""
    monkeypatch.setattr(search, "_PROGRESS_SECONDS", 0)
    read: list[str] = []
    ended = threading.Event()

    def matches(query: search.Query, _row: object) -> bool:
        read.append(query.text)
        time.sleep(0.001)
        return False

    monkeypatch.setattr(search.Query, "matches", matches)
    closed = search.RowPages._page

    def page(pages: search.RowPages, query: search.Query) -> Iterator[search.Event]:
        try:
            yield from closed(pages, query)
        finally:
            ended.set()

    monkeypatch.setattr(search.RowPages, "_page", page)
    with serve(*[row("a", "x")] * 20_000) as client:
        with socket.create_connection(("127.0.0.1", client.base_url.port or 0)) as asking:
            path = f"{client.base_url.path}rows?text=y"
            asking.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            asking.recv(100)
        assert ended.wait(120)
    assert len(read) < 10_000


def test_a_changed_file_is_reported(serve: Serve, tmp_path: Path) -> None:
    """The message is the same as in the terminal."""
    with serve(row("a", "x")) as client:
        (tmp_path / "rows.jsonl").write_text("other", encoding="utf-8")
        assert "has changed" in events(client)[0]["error"]
        assert "has changed" in client.get("row").json()["error"]


def test_a_table_has_its_requests_in_its_columns(tmp_path: Path) -> None:
    """Input columns are read by row group, from any row, also in text formats."""
    usage = [{"total_tokens": 3}, None, {"total_tokens": 3}, {"total_tokens": 3}]
    columns = {
        "id": [1, 2, 3, 4],
        "text": [HOSTILE.replace("\ud83d", ""), "two", "three", "four"],
        "output_text": ["A", None, "C", "D"],
        "finish_reason": ["stop", None, "length", "stop"],
        "usage": usage,
        "error": [None, "busy", "It was cut off.", None],
        "label": ["x", None, None, "z"],
    }
    path, csv = tmp_path / "rows.parquet", tmp_path / "rows.csv"
    parquet.write_table(pa.table(columns), path, row_group_size=2)
    csv.write_text("id,note\n7,seven\n8,eight\n", encoding="utf-8")
    with serving(path) as server, httpx.Client(base_url=server.url, trust_env=False) as client:
        first, failure, third, last = events(client)
        assert first["row"]["request"].startswith("id: 1\ntext: <script>alert(1)</script>\\u0000")
        assert (first["row"]["custom_id"], first["row"]["text"]) == ("1", "A\nlabel: x")
        assert (failure["row"]["text"], failure["row"]["is_failed"]) == ("busy", True)
        assert (third["row"]["text"], last) == ("C\nerror: It was cut off.", {"next": 4})
        assert (third["row"]["words"], third["row"]["is_failed"]) == ("length", False)
        assert numbers(events(client, from_=3)) == numbers(events(client, from_=3, text=" "))
        assert numbers(events(client, from_=4, kind="stop")) == [4, None]
        assert numbers(events(client, id="2")) == [2, None]
        assert numbers(events(client, text="three")) == [3, None]
        assert json.loads(client.get("row", params={"from": 4}).json()["json"])["label"] == "z"
        assert "not found" in client.get("row", params={"from": 5}).json()["error"]
        assert client.get("about").json()["rows"] == 4
    with serving(csv) as server, httpx.Client(base_url=server.url, trust_env=False) as client:
        found = events(client, from_=2)
        assert [event.get("row", event).get("text") for event in found] == [
            "id: 8\nnote: eight",
            None,
        ]
        assert client.get("about").json()["rows"] is None


@pytest.fixture(scope="module", name="chromium")
def fixture_chromium() -> Iterator[Browser]:
    """Return a browser, or skip where there is none."""
    executable = find_chromium()
    if executable is None:
        pytest.skip(NO_CHROMIUM)
    with running_chromium(executable) as browser:
        yield browser


def test_a_person_reads_rows_in_a_browser(chromium: Browser, serve: Serve) -> None:
    """A browser turns pages, filters, jumps to an ID and opens a row; texts are never executed."""
    rows = [row(f"q{n}", f"answer {n}") for n in range(5)]
    rows += [row(HOSTILE, HOSTILE, HOSTILE), failed("bad", HOSTILE)]
    request_lines = (request("q0", HOSTILE.replace("\ud83d", "")), request("q2", "late?"))
    complaints: list[str] = []
    with serve(*rows, requests=request_lines) as client, chromium.new_context() as context:
        context.set_default_timeout(120_000)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on(
            "console",
            lambda entry: complaints.append(entry.text) if entry.type == "error" else None,
        )
        page.goto(str(client.base_url))
        articles = page.get_by_role("article")
        expect(articles).to_have_count(3)
        expect(articles.first).to_contain_text("<script>alert(1)</script>\\u0000")
        expect(articles.last).to_contain_text("user: late?")
        expect(page.get_by_text("7 rows")).to_be_visible()
        page.get_by_role("button", name="Next").click()
        expect(articles.last).to_contain_text("<img src=x onerror=alert(2)>")
        page.locator("#kind").select_option("failed")
        expect(articles).to_have_count(1)
        page.go_back()
        expect(articles).to_have_count(3)
        page.get_by_label("Containing").fill("ANSWER 3")
        page.get_by_role("button", name="Show").click()
        expect(articles).to_have_count(1)  # until then those before are there
        expect(articles.locator(".answer")).to_have_text("answer 3")
        page.get_by_label("Containing").fill("")
        page.get_by_label("custom_id").fill("q2")
        page.keyboard.press("Enter")
        expect(articles.locator(".answer")).to_have_text("answer 2")
        page.get_by_role("button", name="row 3").click()
        expect(page.get_by_role("dialog").locator("#row-json")).to_contain_text('"custom_id": "q2"')
        expect(page.get_by_role("dialog").locator(".request")).to_contain_text("late?")
        assert page.locator("main script, main img, dialog img").count() == 0
    assert complaints == []

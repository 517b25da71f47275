"""Page of rows: what its server answers, to whom, and that texts of others stay texts."""

from __future__ import annotations

import csv
import io
import json
import re
import threading
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
from tests.handler.dashboard.steps import obstacles
from tidemill.dashboard.assets import url_of
from tidemill.offline.rows.page import file_rows, table_page
from tidemill.offline.rows.page.open_pages import open_page
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
        open_page(str(rows), request_lines, None) as page,
        PageServer(page, page_rows) as server,
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


def lines_of(client: httpx.Client, **query: object) -> list[int | str]:
    """Return the lines of the rows on one page, and where the next page begins, if there is one."""
    text = shown(client, "rows", **query)
    following = re.findall(r'[?&;]after=(\d+)" id="rows-next"', text)
    return [*map(int, re.findall(r'id="row-(\d+)"', text)), *(f"after {at}" for at in following)]


def shown(client: httpx.Client, view: str = "rows", **query: object) -> str:
    """Return a view, in which texts of users are neither markup nor invisible."""
    answer = client.get(view, params={name: str(value) for name, value in query.items()})
    assert answer.status_code == 200
    for hidden in ("<script", "<img", "\u202e", "\0", "\x1b"):
        assert hidden not in answer.text
    return answer.text


def test_rows_come_in_pages(serve: Serve) -> None:
    """Blank lines count in the numbers, as they do in the terminal."""
    with serve(*(row(f"q{n}", f"answer {n}") for n in range(4)), "", row("last", "six")) as client:
        assert lines_of(client) == [1, 2, 3, "after 3"]
        assert lines_of(client, after=3) == [4, 6]
        assert lines_of(client, after=99) == lines_of(client, after=10**14) == []
        assert lines_of(client, line=6) == [6]
        assert lines_of(client, line=5) == []
        assert "must be at least 1" in shown(client, line=0)
        assert "must be a whole number" in shown(client, after="-1e9")
        first = shown(client)
        assert "rows.jsonl</bdi>, 6 rows" in first
        assert "answer 0" in first


def test_rows_are_downloaded_as_a_table(serve: Serve) -> None:
    """The rows of a search are a piece of a file."""
    with serve(row("a", HOSTILE), failed("b", "BUSY"), "no json {") as client:
        found = client.get("export", params={"format": "csv", "status": "all"})
        about, _, text = found.content.partition(b"\n")
        assert json.loads(about)["rows"] == 3
        rows = [*csv.DictReader(io.StringIO(text.decode("utf-8-sig"), newline=""))]
        assert rows[0]["answer"] == HOSTILE.replace("\0", "\ufffd").replace("\ud83d", "\ufffd")
        assert [each["error"] for each in rows] == ["", "BUSY", "This line is not a row."]
        refused = client.get("export", params={"format": "x"})
        assert (refused.status_code, "choose csv or parquet" in refused.text) == (400, True)
        assert 'data-format="parquet"' in shown(client)


def test_rows_are_found(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are filtered by status, words or custom ID; an invalid line counts as failed."""
    rows = (
        row("a", "Lisbon"),
        failed("b", "BUSY"),
        row("c", "cut", "length"),
        "no json {",
        row("é/\U0001f600", "x"),
        row("a", "again"),
    )
    with serve(*rows) as client:
        for query, lines in (
            ({"status": "failed"}, [2, 4]),
            ({"status": "truncated"}, [3]),
            ({"reason": "stop"}, [1, 5, 6]),
            ({"text": "lisBON"}, [1]),
            ({"text": "busy", "status": "failed"}, [2]),
            ({"id": "a"}, [1, 6]),
            ({"id": "é/\U0001f600"}, [5]),
            ({"text": "nowhere", "id": "a"}, []),
        ):
            assert lines_of(client, **query) == lines, query
        assert "Searched all rows." in shown(client, text="nowhere")
        monkeypatch.setattr(file_rows, "SEARCHED_BYTES", 300)
        assert lines_of(client, text="again") == ["after 3"]
        assert "Searched lines 1 to 3 of about 6." in shown(client, text="again")
        assert lines_of(client, text="again", after=3)[0] == 6


def test_a_request_is_shown_next_to_its_row(serve: Serve) -> None:
    """It is on the same line, or else the first with the row's custom ID."""
    rows = (row("a", "1"), row("b", "2"), row("c", "3"), row(None, "4"), "no json")
    request_lines = (request("a", "A?"), "no json", request("b", "B?"), request("b", "other"))
    with serve(*rows, requests=request_lines) as client:
        assert 'data-view="/' in shown(client)
        for line, expected in enumerate(("A?", "B?", *["No request has"] * 4), start=1):
            assert expected in shown(client, "requests", lines=line)
        assert shown(client, "requests", lines="1,2,x,3,4").count("data-line") == 3
        assert "B?" in shown(client, line=2)
        assert "No request has this" in shown(client, line=3)
    with serve(*rows) as client:
        assert "-i REQUESTS" in shown(client, "requests", lines="1")


def test_hostile_rows_are_texts(serve: Serve) -> None:
    """They break neither a page nor the server; invisible characters are escaped."""
    deep = '{"response": ' + "[" * 100_000
    digits = row("d", "x").replace('"choices"', '"usage": {"output_tokens": ' + "9" * 5000)
    bad = ("[1]", deep, digits.replace('[{"message"', '1}, "choices": [{"message"', 1), '{"a": 1}')
    with serve(row(HOSTILE, HOSTILE, HOSTILE), row(None, "y" * 50_000), *bad) as client:
        first = shown(client)
        assert "&lt;script&gt;alert(1)&lt;/script&gt;\\u0000\\u001b[2J\\u202e" in first
        assert "\\ud83d" in first
        assert "49,000 more characters" in first
        assert "y" * 50_000 in shown(client, line=2)
        assert lines_of(client, after=3) == [4, 5, 6]
        assert lines_of(client, status="failed") == [3, 4, 5, "after 5"]
        assert [lines_of(client, line=number) for number in range(1, 8)] == [
            *([number] for number in range(1, 7)),
            [],
        ]


def test_large_rows_end_a_page(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the number of rows of a page."""
    monkeypatch.setattr(file_rows, "SEARCHED_BYTES", 2**20)
    with serve(*(row("a", "y" * 700_000) for _ in range(3))) as client:
        assert lines_of(client) == [1, 2, "after 2"]
        assert len(shown(client)) < 30_000


def test_only_the_address_with_its_token_is_answered(serve: Serve) -> None:
    """The host must be this machine, and the policy allows only the page's scripts."""
    with serve(row("a", "secret")) as client:
        page = client.get("")
        assert page.headers["Content-Type"] == "text/html; charset=utf-8"
        assert page.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src")
        assert "unsafe" not in page.headers["Content-Security-Policy"]
        assert "style=" not in page.text
        assert "New batch" not in page.text
        base = f"http://127.0.0.1:{client.base_url.port}"
        refused = [client.get(f"{base}{path}") for path in ("/", "/rows", "/x/rows", "/é/", "//[")]
        hosts = ("evil.example", "127.0.0.1.evil.example", "", "[", "[::1")
        refused += [client.get("rows", headers={"Host": host}) for host in hosts]
        assert {answer.status_code for answer in refused} == {403}
        assert not any("secret" in answer.text for answer in refused)
        assert all("default-src 'none'" in str(answer.headers) for answer in refused)
        assert client.get("rows", headers={"Host": f"localhost:{9}"}).status_code == 200
        assert client.get(f"{base}{url_of('app.js')}").status_code == 200
        assert client.get("../etc").status_code == 403
        for path in ("passwd", f"{base}/dashboard", f"{base}/dashboard/assets/0/app.js"):
            assert client.get(path).status_code == 404
        assert client.post("rows").status_code == 501


def test_a_changed_file_is_reported(serve: Serve, tmp_path: Path) -> None:
    """The message is the same as in the terminal."""
    with serve(row("a", "x"), requests=()) as client:
        (tmp_path / "rows.jsonl").write_text("other", encoding="utf-8")
        for view, query in (("rows", {}), ("rows", {"line": 1}), ("requests", {"lines": 1})):
            assert "has changed" in shown(client, view, **query)


def test_a_table_has_its_requests_in_its_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        first = shown(client)
        assert "rows.parquet</bdi>, 4 rows" in first
        assert "&lt;script&gt;alert(1)&lt;/script&gt;\\u0000" in first
        assert "row-requests" not in first  # each row has its own
        assert lines_of(client) == [1, 2, 3, "after 3"]
        assert lines_of(client, status="failed") == [2]
        assert lines_of(client, status="truncated") == [3]
        assert "It was cut off." in shown(client, line=3)
        assert lines_of(client, after=3, reason="stop") == [4]
        assert lines_of(client, id=2) == [2]
        assert lines_of(client, text="THREE") == [3]
        assert lines_of(client, text="three", reason="stop") == []
        last = shown(client, line=4)
        assert "<dt><bdi>label</bdi></dt>" in last
        assert "&#34;label&#34;: &#34;z&#34;" in last
        assert lines_of(client, line=5) == []
        monkeypatch.setattr(table_page, "SEARCHED_ROWS", 2)
        assert lines_of(client, text="four") == ["after 2"]
    with serving(csv) as server, httpx.Client(base_url=server.url, trust_env=False) as client:
        assert lines_of(client, after=1) == [2]
        assert "eight" in shown(client, line=2)
        assert "rows.csv</bdi></p>" in shown(client)


@pytest.fixture(scope="module", name="chromium")
def fixture_chromium() -> Iterator[Browser]:
    """Return a browser, or skip where there is none."""
    executable = find_chromium()
    if executable is None:
        pytest.skip(NO_CHROMIUM)
    with running_chromium(executable) as browser:
        yield browser


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (375, "dark")])
def test_a_person_reads_rows_in_a_browser(
    chromium: Browser, serve: Serve, width: int, scheme: Any
) -> None:
    """A browser turns pages, filters, jumps to an ID and opens a row; texts are never executed."""
    rows = [row(f"q{n}", f"answer {n}") for n in range(5)]
    rows += [row(HOSTILE, HOSTILE, HOSTILE), failed("bad", HOSTILE)]
    request_lines = (request("q0", HOSTILE.replace("\ud83d", "")), request("q2", "late?"))
    complaints: list[str] = []
    with (
        serve(*rows, requests=request_lines) as client,
        chromium.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme
        ) as context,
    ):
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
        expect(articles.last).to_contain_text("late?")
        expect(page.get_by_text("7 rows")).to_be_visible()
        assert obstacles(page) == []
        assert page.evaluate("document.body.scrollWidth <= innerWidth")
        page.get_by_role("link", name="Next page").click()
        expect(articles.last).to_contain_text("<img src=x onerror=alert(2)>")
        with page.expect_download() as downloading:
            page.get_by_role("button", name="Download as Parquet").press("Enter")
        assert parquet.read_metadata(downloading.value.path()).num_rows == 7
        assert downloading.value.suggested_filename == "rows.answers.parquet"
        page.get_by_label("Status", exact=True).focus()
        page.keyboard.type("failed")
        page.get_by_role("button", name="Show rows").click()
        expect(articles).to_have_count(1)
        page.get_by_label("Status", exact=True).select_option("all")
        page.get_by_label("Text").fill("ANSWER 3")
        page.keyboard.press("Enter")
        expect(articles.locator(".answer")).to_have_text("answer 3")
        page.go_back()
        expect(articles.locator(".answer")).to_contain_text("<script>")
        page.get_by_label("Status", exact=True).select_option("all")
        page.get_by_label("Custom ID").fill("q2")
        page.keyboard.press("Enter")
        expect(articles.locator(".answer")).to_have_text("answer 2")
        page.get_by_role("link", name="Line 3").click()
        expect(page.get_by_role("heading", name="Line 3", level=1)).to_be_focused()
        page.get_by_text("Row as JSON").click()
        expect(page.locator("#row-json")).to_contain_text('"custom_id": "q2"')
        assert obstacles(page) == []
        page.get_by_role("link", name="All rows").click()
        expect(articles).to_have_count(3)
    assert complaints == []

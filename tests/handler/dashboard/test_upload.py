"""A file sent from a browser straight to the bucket, and the batch that is made of it."""

from __future__ import annotations

import gzip
import io
import re
import time
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from playwright.sync_api import Page, Route, expect
from pyarrow import feather, ipc

from tests.handler.dashboard.steps import sign_in
from tests.handler.intake.rig import Cloud, line_of
from tidemill.dashboard.assets import url_of
from tidemill.handler.tenants.keys import KeyStore, key_id_of

NewKey = Callable[[str], str]
SECONDS = 120_000
PART_BYTES = 8 * 2**20


def choose(page: Page, file: Path) -> None:
    """Choose a file and send it."""
    page.get_by_label("A JSONL file").set_input_files(file)
    page.get_by_role("button", name="Upload and start").click()


@dataclass
class Storage:
    """Requests of a browser to the bucket: the parts by number, with the number of times sent."""

    cloud: Cloud
    parts: list[int] = field(default_factory=list)
    num_failures: int = 0
    held_from: int | None = None

    def handle(self, route: Route) -> None:
        """Let a part pass, or break its connection, or hold it for ever."""
        number = int(re.findall(r"partNumber=(\d+)", route.request.url)[0])
        self.parts.append(number)
        if self.held_from is not None and number >= self.held_from:
            return
        if self.num_failures:
            self.num_failures -= 1
            route.abort("connectionreset")
            return
        route.continue_()

    def watch(self, page: Page) -> None:
        """See all that goes from the page to the bucket."""
        page.route(re.compile("partNumber="), self.handle)


def file_of_parts(folder: Path, num_parts: float) -> Path:
    """Write a file of that many parts, and return its path."""
    num_lines = int(PART_BYTES * num_parts / (len(line_of("0" * 1000)) + 1))
    file = folder / "large.jsonl"
    file.write_bytes(b"".join(line_of(f"{number:01000}") + b"\n" for number in range(num_lines)))
    return file


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Return a file of four parts."""
    return file_of_parts(tmp_path, 3.5)


@pytest.fixture
def two_parts(tmp_path: Path) -> Path:
    """Return a file of two parts, for tests that do not depend on their number."""
    return file_of_parts(tmp_path, 1.1)


@pytest.mark.usefixtures("quick_refreshes")
def test_parts_are_sent_again(page: Page, cloud: Cloud, new_key: NewKey, large: Path) -> None:
    """A connection that breaks costs a part, not the file; nothing of it passes the API."""
    storage = Storage(cloud, num_failures=3)
    storage.watch(page)
    sign_in(page, new_key("lab"), "#/new")
    choose(page, large)
    expect(page.get_by_role("heading", name="large.jsonl")).to_be_visible(timeout=SECONDS)
    assert sorted(set(storage.parts)) == [1, 2, 3, 4]
    assert len(storage.parts) == 7
    (batch,) = cloud.run(cloud.deployment.table.list_batches("lab", limit=10))[0]
    body = cloud.run(cloud.deployment.bucket.get(batch.source.key))
    assert body == large.read_bytes()


def test_a_reload_in_the_middle(page: Page, cloud: Cloud, new_key: NewKey, large: Path) -> None:
    """If the same file is chosen again, parts that S3 has are not sent again."""
    storage = Storage(cloud, held_from=3)
    storage.watch(page)
    sign_in(page, new_key("lab"), "#/new")
    with page.expect_request_finished(lambda sent: "partNumber=2&" in sent.url + "&"):
        choose(page, large)
    bar = page.get_by_role("progressbar", name="Upload")
    expect(bar).to_be_visible()
    expect(page.locator("#transfer-words")).to_contain_text("of")
    page.locator("#nav-batches").click()
    expect(page.get_by_text("No batches yet.")).to_be_visible()
    expect(bar).to_be_visible()
    page.reload()
    page.goto("/dashboard#/new")
    storage.held_from = None
    storage.parts.clear()
    choose(page, large)
    expect(page.get_by_role("heading", name="large.jsonl")).to_be_visible(timeout=SECONDS)
    assert set(storage.parts) == {3, 4}


def test_a_storage_that_cannot_be_reached(
    page: Page, cloud: Cloud, new_key: NewKey, two_parts: Path
) -> None:
    """The page shows the error; another try resumes the upload, giving up aborts it."""
    storage = Storage(cloud, num_failures=10_000)
    storage.watch(page)
    page.clock.install()
    sign_in(page, new_key("lab"), "#/new")
    choose(page, two_parts)
    alert = page.get_by_role("alert").filter(has_text="the connection was interrupted")
    for _ in range(300):
        page.clock.fast_forward(20_000)
        page.wait_for_timeout(100)  # in which the parts are sent and break
        if alert.is_visible():
            break
    expect(alert).to_be_visible()
    storage.num_failures = 0
    page.clock.resume()
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("heading", name="large.jsonl")).to_be_visible(timeout=SECONDS)


def test_an_upload_is_given_up(page: Page, cloud: Cloud, new_key: NewKey, two_parts: Path) -> None:
    """Nothing of it is kept: neither parts nor a batch."""
    storage = Storage(cloud, held_from=1)
    storage.watch(page)
    sign_in(page, new_key("lab"), "#/new")
    with page.expect_request(re.compile("partNumber=")):
        choose(page, two_parts)
    with page.expect_response("**/cancel") as cancelled:
        page.get_by_role("button", name="Cancel upload").click()
    assert cancelled.value.ok
    expect(page.get_by_role("progressbar", name="Upload")).to_be_hidden()
    left = cloud.aws.clients["s3"].list_multipart_uploads(Bucket=cloud.bucket)
    assert left.get("Uploads", []) == []
    assert cloud.run(cloud.deployment.table.list_batches("lab", limit=10)) == ([], False)


def test_a_key_revoked_in_the_middle_of_an_upload(
    page: Page, cloud: Cloud, new_key: NewKey, two_parts: Path
) -> None:
    """The upload waits for another key and goes on with it."""
    key = new_key("lab")
    storage = Storage(cloud, num_failures=1)
    storage.watch(page)
    sign_in(page, key, "#/new")
    page.get_by_label("A JSONL file").set_input_files(two_parts)
    expect(page.get_by_role("button", name="Upload and start")).to_be_enabled()
    cloud.run(KeyStore(cloud.deployment.table.name).revoke(key_id_of(key), int(time.time())))
    page.get_by_role("button", name="Upload and start").click()
    expect(page.locator("#sign-in-error")).to_contain_text("no longer accepted")
    page.get_by_label("API key").fill(new_key("lab"))
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="large.jsonl")).to_be_visible(timeout=SECONDS)


def test_a_file_is_dropped_on_the_page(page: Page, cloud: Cloud, new_key: NewKey) -> None:
    """It is chosen as by the button; one that misses the place changes nothing."""
    del cloud
    sign_in(page, new_key("lab"), "#/new")
    dropped = page.evaluate_handle(
        "() => { const data = new DataTransfer();"
        " data.items.add(new File(['{}'], 'dropped.jsonl')); return data }"
    )
    expect(page.locator("#drop-zone")).to_be_visible()
    # The field of the browser says itself that nothing is chosen.
    expect(page.locator("#chosen")).to_have_text("")
    page.dispatch_event("#drop-zone", "dragover", {"dataTransfer": dropped})
    page.dispatch_event("#drop-zone", "drop", {"dataTransfer": dropped})
    expect(page.locator("#chosen")).to_have_text("dropped.jsonl, 0 kB")
    expect(page.get_by_role("status")).to_contain_text("table of JSON rows, 1 row")
    assert page.locator("#file").evaluate("field => field.files[0].name") == "dropped.jsonl"


def test_the_prompts_of_parquet_and_arrow_tables_are_shown(
    page: Page, cloud: Cloud, new_key: NewKey
) -> None:
    """The page sends the first bytes of the columns that the prompt names."""
    del cloud
    table = pa.table({"text": ["good", "bad"] * 30_000, "n": range(60_000)})
    parquet, arrow = io.BytesIO(), io.BytesIO()
    pq.write_table(table, parquet)
    feather.write_feather(table, arrow)  # with LZ4
    sign_in(page, new_key("lab"), "#/new")
    for file, kind in ((parquet, "Parquet table, 60,000 rows"), (arrow, "Arrow table")):
        page.get_by_label("A JSONL file").set_input_files(
            {"name": "x", "mimeType": "", "buffer": file.getvalue()}
        )
        expect(page.locator("#check")).to_contain_text(kind)
        page.get_by_label("Prompt for each row").fill("{{ n }}: {{ text }}")
        expect(page.locator("#check .requests dd")).to_have_text(["0: good", "1: bad", "2: good"])
        expect(page.get_by_role("button", name="Upload and start")).to_be_enabled()
    names = pa.array([f"{n} " + "x" * 90 for n in range(900)]).dictionary_encode()
    table = pa.table({f"c{n}": names for n in range(20)} | {"n": range(900), "text": ["x"] * 900})
    feather.write_feather(table, file := io.BytesIO(), compression="uncompressed")
    with ipc.new_stream(stream := io.BytesIO(), table.schema) as writer:
        writer.write_table(table)
    # Only a file has a footer, which names its first rows.
    for arrow, words in ((file, "2: x"), (stream, "they need too many reads")):
        page.get_by_label("A JSONL file").set_input_files(
            {"name": "x", "mimeType": "", "buffer": arrow.getvalue()}
        )
        expect(page.locator("#check")).to_contain_text(words, timeout=30_000)
    expect(page.get_by_role("button", name="Upload and start")).to_be_enabled()


def test_the_first_rows_of_each_format(page: Page, cloud: Cloud, new_key: NewKey) -> None:
    """They are cut off without a look at the rest, also after decompression."""
    del cloud
    sign_in(page, new_key("lab"), "#/new")
    rows = [f'{{"a": "]}}\\"{number}"}}' for number in range(9)]
    texts = {
        "lines": "\n".join(rows),
        "array": f"[{', '.join(rows)}]",
        "csv": "a,b\n" + "".join(f'"x ""\n,",{number}\n' for number in range(9)),
    }
    expected = {
        "lines": "\n".join(rows[:3]) + "\n",
        "array": f"[{', '.join(rows[:3])}]",
        "csv": "a,b\n" + "".join(f'"x ""\n,",{number}\n' for number in range(3)),
    }
    files = [(cut, text.encode()) for cut, text in texts.items()]
    files += [(cut, gzip.compress(data)) for cut, data in files]
    found = page.evaluate(
        "async ([url, files]) => {"
        " const { firstRows } = await import(url);"
        " const bytes = (data) => Uint8Array.from(atob(data), (char) => char.charCodeAt(0));"
        " return Promise.all(files.map(async ([cut, data]) =>"
        "   (await firstRows(new File([bytes(data)], 'x'), cut, 3, '')).text()))"
        "}",
        [url_of("trial.js"), [[cut, b64encode(data).decode()] for cut, data in files]],
    )
    assert found == [*expected.values(), *expected.values()]


def test_an_invalid_choice_is_reported(
    page: Page, cloud: Cloud, new_key: NewKey, tmp_path: Path
) -> None:
    """A missing, empty or invalid file is reported next to the field, and cannot be sent."""
    del cloud
    sign_in(page, new_key("lab"), "#/new")
    start = page.get_by_role("button", name="Upload and start")
    expect(start).to_be_disabled()
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    page.get_by_label("A JSONL file").set_input_files(empty)
    expect(page.locator("#new-error")).to_have_text("empty.jsonl is empty.")
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(line_of(1) + b"\n{")
    page.get_by_label("A JSONL file").set_input_files(broken)
    expect(page.get_by_role("status")).to_contain_text("This file cannot run: Line 2: not JSON")
    expect(start).to_be_disabled()

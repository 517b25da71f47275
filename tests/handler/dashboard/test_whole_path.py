"""From a CSV of reviews to a table of labels, as a person goes who has never seen the page."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.emulators import MODEL
from tests.handler.dashboard.mill import control_running, worker_running
from tests.handler.dashboard.steps import check_looks, sign_in, take_picture
from tests.handler.intake.rig import Cloud
from tidemill.batch.fleet import WorkerRate
from tidemill.cli.main import main

SECONDS = 120_000
REVIEWS = [f"<i>A good tent</i>,\nnumber {number}" for number in range(500)]
REVIEWS[20] = "It came with a zebra"
for place in (60, 200, 499):
    REVIEWS[place] = "Good at any temperature"


def reviews(count: int = 500) -> bytes:
    """Return the table as CSV."""
    text = io.StringIO()
    csv.writer(text).writerows([("id", "text"), *enumerate(REVIEWS[:count])])
    return text.getvalue().encode()


def downloaded(page: Page, button: str) -> bytes:
    """Return the file that a button downloads."""
    with page.expect_download() as waited:
        page.get_by_role("button", name=button).click()
    return Path(waited.value.path()).read_bytes()


def test_a_table_of_reviews_becomes_a_table_of_labels(
    page: Page, cloud: Cloud, new_key: Callable[[str], str], tmp_path: Path
) -> None:
    """Checked, priced, tried, run, its failed rows retried, searched and downloaded."""
    rate = WorkerRate(expected_work_per_second=10, num_gpus=1)
    cloud.run(cloud.deployment.fleets.put_rate(MODEL, rate))
    status = page.locator("#live .status")
    with control_running(cloud), worker_running(cloud, tmp_path, "--labels"):
        sign_in(page, new_key("lab"))
        page.get_by_role("link", name="New batch").click()
        page.get_by_label("A JSONL file").set_input_files(
            {"name": "reviews.csv", "mimeType": "text/csv", "buffer": reviews()}
        )
        write_prompt(page)
        page.get_by_label("Complete within").select_option("an hour")
        page.get_by_label("Unknown parameters").select_option("refuse the file")
        expect(page.get_by_role("button", name="Try 50 rows first")).to_be_enabled()
        page.get_by_role("button", name="Try 50 rows first").click()
        expect(page.get_by_role("heading", name="reviews.csv (first 50 rows)")).to_be_visible()
        expect(status).to_have_text("Completed", timeout=SECONDS)
        expect(page.locator("#first-rows .answer").first).to_have_text("positive")

        page.get_by_role("link", name="Run the whole file").click()
        expect(page.get_by_label("Prompt for each row")).to_have_value("Label: {{ text }}")
        page.get_by_role("button", name="Upload and start").click()
        expect(page.get_by_role("heading", name="reviews.csv", exact=True)).to_be_visible()
        expect(status).to_have_text("Completed with errors", timeout=SECONDS)
        expect(page.locator("#batch-model")).to_have_text(MODEL)
        expect(page.locator(".done")).to_contain_text("500 of 500 · 100%")
        expect(page.get_by_role("heading", name="Failed rows")).to_be_visible()
        expect(page.locator("#first-rows .request").first).to_contain_text("textGood at any")
        expect(page.locator("#errors table").get_by_role("rowheader")).to_have_text("60")
        check_looks(page)
        take_picture(page, "dashboard-failed", 900)
        assert downloaded(page, "Download output").count(b"\n") == 497
        assert downloaded(page, "Download errors").count(b"\n") == 3
        retry(page)
        expect(status).to_have_text("Completed", timeout=SECONDS)
        page.locator(".about").get_by_role("link").click()
        expect(status).to_have_text("Completed", timeout=SECONDS)

    find_the_zebra(page)
    page.get_by_role("link", name="Overview").click()
    table = csv.DictReader(io.StringIO(downloaded(page, "Download table").decode()))
    labels = ["positive"] * 500
    labels[20] = "negative, because of zebra"
    assert [(row["text"], row["output_text"]) for row in table] == [
        *zip(REVIEWS, labels, strict=True)
    ]
    batches = cloud.run(cloud.deployment.table.list_batches("lab", limit=10))[0]
    assert sorted(batch.num_rows for batch in batches) == [3, 50, 500]
    assert {batch.options.completion_window for batch in batches} == {"1h"}
    assert all(batch.options.strict_parameters for batch in batches if batch.retry is None)


def test_the_same_by_commands(  # noqa: PLR0917 - fixtures
    cloud: Cloud,
    url: str,
    new_key: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Dropped, its failed row found and retried, fetched, and searched by a word."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDEMILL_BASE_URL", url)
    monkeypatch.setenv("TIDEMILL_API_KEY", new_key("default"))
    (tmp_path / "reviews.csv").write_bytes(reviews(70))

    def run(*arguments: str) -> tuple[int, str]:
        status = main(arguments)
        output = capfd.readouterr()
        return status, output.out + output.err

    drop = ("drop", "reviews.csv", "--bucket", cloud.bucket, "--prompt", "Label: {{ text }}")
    with control_running(cloud), worker_running(cloud, tmp_path, "--labels"):
        status, words = run(*drop, "--wait", "-o", "labels.csv")
        assert (status, "69 rows ok, 1 failed" in words) == (3, True), words
        batch = re.findall(r"batch_[0-9a-f]{32}", words)[0]
        words = run("view", "labels.csv", "--errors")[1]
        assert "61" in words
        status, words = run("retry", batch, "--body", '{"temperature": 0.5}', "--wait")
        assert (status, "1 row ok" in words) == (0, True), words
    assert run("results", batch, "-o", "labels.csv", "--force")[0] == 0
    rows = csv.DictReader(io.StringIO((tmp_path / "labels.csv").read_text()))
    labels = {row["output_text"] for row in rows}
    assert labels == {"positive", "negative, because of zebra"}
    found = run("view", "labels.csv", "--grep", "ZEBRA")[1]
    assert "negative, because of zebra" in found
    assert "positive" not in found


def write_prompt(page: Page) -> None:
    """Make a batch of the chosen table, and look at its price."""
    prompt, start = page.get_by_label("Prompt for each row"), "Upload and start"
    expect(page.locator("#check")).to_contain_text("CSV table, 500 rows")
    expect(page.get_by_role("button", name=start)).to_be_disabled()
    prompt.fill("Label: ")
    page.get_by_role("button", name="text", exact=True).click()
    expect(prompt).to_have_value("Label: {{ text }}")
    expect(page.locator("#check dd").first).to_have_text("Label: <i>A good tent</i>,\nnumber 0")
    page.get_by_label("Column of row IDs").fill("nowhere")
    expect(page.locator("#check-errors")).to_contain_text("`nowhere`, which is not a column")
    expect(page.get_by_role("button", name=start)).to_be_disabled()
    page.get_by_label("Column of row IDs").fill("id")
    expect(page.locator("#estimate")).to_contain_text("Cost, USD")
    check_looks(page)
    take_picture(page, "dashboard-check", 1050)


def retry(page: Page) -> None:
    """Retry the failed rows with another parameter."""
    expect(page.locator("#retry")).to_contain_text("3 of 3 requests")
    page.get_by_role("button", name="Retry failed rows…").click()
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_role("button", name="Retry", exact=True).click()
    expect(page.locator(".about")).to_contain_text("Retry of")


def find_the_zebra(page: Page) -> None:
    """Find one answer by a word, next to the columns of its row."""
    page.get_by_role("link", name="Rows", exact=True).click()
    page.get_by_label("Text").fill("ZEBRA")
    page.keyboard.press("Enter")
    expect(page.locator("article")).to_have_count(1)
    request = page.locator("#request-21")
    expect(request).to_contain_text("It came with a zebra")
    expect(request.get_by_text("Label: It came")).to_be_hidden()
    request.get_by_text("Request", exact=True).click()
    expect(request.get_by_text("Label: It came")).to_be_visible()
    check_looks(page)
    take_picture(page, "dashboard-rows", 560)

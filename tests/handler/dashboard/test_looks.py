"""Views of one batch and of many, in a browser."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.emulators import MODEL
from tests.handler.aws.given import make_batch
from tests.handler.dashboard.steps import obstacles, sign_in
from tests.handler.intake.rig import Cloud, lines_of
from tidemill.batch.fleet import WorkerRate
from tidemill.batch.model import BatchError
from tidemill.batch.progress import HistoryBucket
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status
from tidemill.batch.stored_file import File
from tidemill.dashboard.assets import url_of

NewKey = Callable[[str], str]
NO_LOCALE = "Object.defineProperty(Navigator.prototype, 'language', {get: () => 'en-US@posix'})"


def running(cloud: Cloud) -> str:
    """Return a batch that has gained rows and tokens for three minutes."""
    batch = cloud.ingest(cloud.create(lines_of(25)))
    minute = int(time.time()) // 60 * 60
    for start, rows in ((minute - 120, 2), (minute - 60, 5), (minute, 9)):
        bucket = HistoryBucket(start, 60, rows, tokens=10 * rows)
        cloud.run(cloud.deployment.ledger.add_history(batch, bucket))
    return batch.id


def with_errors(cloud: Cloud, num_rows: int) -> str:
    """Return an ended batch with failed rows, all for the same reason except one."""
    rows = [
        {
            "custom_id": f"row-{number}",
            "response": {
                "status_code": 400,
                "request_id": "r",
                "body": {
                    "error": {
                        "message": f"`top_k` must be -1 or more; got -{number}.",
                        "code": "invalid",
                    }
                },
            },
        }
        for number in range(2, num_rows + 1)
    ]
    rows.append(
        {"custom_id": "last", "response": None, "error": {"code": "gone", "message": "No."}}
    )
    drop = cloud.put(
        b"".join(json.dumps(row).encode() + b"\n" for row in rows), "output/x.errors.jsonl"
    )
    file = File(
        "file-x", "default", drop.key, 9, 1, "x", "batch_output", version_id=drop.version_id
    )
    cloud.run(cloud.deployment.files.put_file(file))
    batch = make_batch(
        cloud.deployment,
        status=Status.COMPLETED,
        error_file_id=file.id,
        final=Progress(0, num_rows),
    )
    return cloud.run(cloud.deployment.table.create_batch(batch)).id


def test_errors_of_one_kind_are_one_row_of_the_table(
    page: Page, cloud: Cloud, new_key: NewKey
) -> None:
    """The row has a count of any size; nothing is clipped on a phone."""
    sign_in(page, new_key("default"), f"#/batches/{with_errors(cloud, 30)}")
    table = page.locator("#errors table")
    expect(table.get_by_role("rowheader")).to_have_text(["row-2", "last"])
    expect(table.get_by_role("row").nth(1)).to_contain_text(
        "29 × 400 invalid top_k must be", use_inner_text=False
    )
    page.set_viewport_size({"width": 320, "height": 700})
    expect(table.get_by_role("rowheader")).to_have_text(["row-2", "last"])
    assert page.locator(".scroll:has(table.errors)").evaluate(
        "box => [box.scrollWidth <= box.clientWidth, box.scrollHeight <= box.clientHeight]"
    ) == [True, True]
    assert table.get_by_role("cell", name="top_k must").evaluate("one => one.clientWidth") > 250
    assert obstacles(page) == []


@pytest.mark.parametrize("script", ["", NO_LOCALE], ids=["a locale", "no locale"])
def test_a_plot_is_drawn_wherever_the_browser_runs(
    page: Page, cloud: Cloud, new_key: NewKey, script: str
) -> None:
    """It is drawn even if the formatter does not support the system's language."""
    page.add_init_script(script)
    sign_in(page, new_key("default"), f"#/batches/{running(cloud)}")
    expect(page.locator("#plot svg")).to_be_visible()
    expect(page.locator("#plot-words")).to_contain_text("rows per second")


def test_rows_a_second_agree_with_the_time_that_it_took(
    page: Page, cloud: Cloud, new_key: NewKey
) -> None:
    """All rows of 35 seconds may be reported in the last: they were produced in all of them.

    Rows that are reported after the last one ended belong to the period before.
    """
    del cloud
    sign_in(page, new_key("default"))
    found = page.evaluate(
        "async url => { const { stretches, secondsOf } = await import(url);"
        " const span = { from: '1166', until: '1201' };"
        " const bucket = { start: 1200, seconds: 60, completed: 400 };"
        " const quick = { from: '1199', until: '1199.5' };"
        " const late = { from: '1130', until: '1199.5' };"
        " const rest = { failed: 0, tokens: 0, input_tokens: 0, audio_seconds: 0 };"
        " const first = { start: 1140, seconds: 60, completed: 9, ...rest };"
        " return [stretches([bucket], span)[0].seconds, secondsOf(span),"
        " stretches([bucket], quick)[0].seconds, secondsOf(quick),"
        " ...stretches([first, bucket], late).map((one) => [one.seconds, one.completed])] }",
        url_of("plot.js"),
    )
    assert found == [35, 35, 0.5, 0.5, [69.5, 409]]


def test_a_file_that_was_refused_was_not_run(page: Page, cloud: Cloud, new_key: NewKey) -> None:
    """It has no pending rows, and no duration."""
    batch = make_batch(cloud.deployment, status=Status.FAILED, errors=(BatchError("x", "No."),))
    cloud.run(cloud.deployment.table.create_batch(batch))
    sign_in(page, new_key("default"), f"#/batches/{batch.id}")
    expect(page.locator(".pace")).to_have_text("not run")


def test_no_curve_hides_another(page: Page, cloud: Cloud, new_key: NewKey) -> None:
    """Tokens that grow with rows stay below them: each has a separate scale."""
    del cloud
    sign_in(page, new_key("default"))
    shares = page.evaluate("async url => (await import(url)).SHARES", url_of("plot.js"))
    assert shares["rows"] - shares["flow"] > 0.2


def test_a_cost_is_in_a_currency_or_there_is_none(
    page: Page, cloud: Cloud, new_key: NewKey
) -> None:
    """The header says which; what has used no GPU has a dash, and what it will come to."""
    batch = cloud.ingest(cloud.create(lines_of(3)))
    rate = WorkerRate(1, expected_work_per_second=batch.expected.work / 3600, num_gpus=2)
    cloud.run(cloud.deployment.fleets.put_rate(MODEL, rate))
    sign_in(page, new_key("default"))
    expect(page.get_by_role("columnheader", name="Cost, USD")).to_be_visible()
    expect(page.get_by_role("row").nth(1).get_by_role("cell").last).to_have_text("–")
    page.get_by_role("link", name="x.jsonl").click()
    expect(page.locator(".figures")).to_contain_text("of about 1.60")

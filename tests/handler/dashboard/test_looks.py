"""What a page shows of one batch and of many, looked at in a browser."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from handler.batch.history import Bucket
from handler.batch.model import File, Progress
from handler.batch.states import Status
from handler.dashboard.assets import url_of
from tests.handler.aws.given import make_batch
from tests.handler.dashboard.steps import obstacles, sign_in
from tests.handler.intake.rig import Cloud, lines_of

NewKey = Callable[[str], str]
NO_LOCALE = "Object.defineProperty(Navigator.prototype, 'language', {get: () => 'en-US@posix'})"


def running(cloud: Cloud) -> str:
    """Return a batch that has gained rows and tokens for two minutes."""
    batch = cloud.take_in(cloud.create(lines_of(25)))
    minute = int(time.time()) // 60 * 60
    for start, rows in ((minute - 60, 5), (minute, 9)):
        bucket = Bucket(start, 60, rows, tokens=10 * rows)
        cloud.run(cloud.deployment.ledger.add_history(batch, bucket))
    return batch.id


def with_errors(cloud: Cloud, num_rows: int) -> str:
    """Return a batch that has ended with rows that failed, for the same reason but for one."""
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
    """With a count, however many there are; no word of the header is broken."""
    sign_in(page, new_key("default"), f"#/batches/{with_errors(cloud, 30)}")
    table = page.locator("#errors table")
    expect(table.get_by_role("rowheader")).to_have_text(["row-2", "last"])
    expect(table.get_by_role("row").nth(1)).to_contain_text(
        "29 × 400 invalid `top_k` must be", use_inner_text=False
    )
    page.set_viewport_size({"width": 320, "height": 700})
    heights = table.get_by_role("columnheader").evaluate_all(
        "all => all.map(one => one.clientHeight)"
    )
    assert len(set(heights)) == 1
    assert all(
        table.get_by_role("columnheader").evaluate_all(
            "all => all.map(one => one.scrollWidth <= one.clientWidth && one.clientHeight < 50)"
        )
    )
    assert obstacles(page) == []


@pytest.mark.parametrize("script", ["", NO_LOCALE], ids=["a locale", "no locale"])
def test_a_plot_is_drawn_wherever_the_browser_runs(
    page: Page, cloud: Cloud, new_key: NewKey, script: str
) -> None:
    """Also where the system's language is none that a formatter takes."""
    page.add_init_script(script)
    sign_in(page, new_key("default"), f"#/batches/{running(cloud)}")
    expect(page.locator("#plot canvas")).to_be_visible()
    expect(page.locator("#plot-words")).to_contain_text("rows a second")


def test_no_curve_hides_another(page: Page, cloud: Cloud, new_key: NewKey) -> None:
    """Tokens that go up with rows stay below them: each has the height of its own scale."""
    del cloud
    sign_in(page, new_key("default"))
    shares = page.evaluate(
        "async url => { const { SCALES } = await import(url);"
        " return ['y', 'tokens'].map(name => 90 / SCALES[name].range(null, 0, 90)[1]) }",
        url_of("plot.js"),
    )
    assert shares[0] - shares[1] > 0.2


def test_a_cost_is_in_a_currency_or_there_is_none(
    page: Page, cloud: Cloud, new_key: NewKey
) -> None:
    """The header says which; what has used no GPU has a dash."""
    cloud.create(lines_of(3))
    sign_in(page, new_key("default"))
    expect(page.get_by_role("columnheader", name="Cost, USD")).to_be_visible()
    expect(page.get_by_role("row").nth(1).get_by_role("cell").last).to_have_text("–")

"""A file sent from a browser straight to the bucket, and the batch that is made of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.handler.dashboard.mill import control_running, file_of, worker_running
from tests.handler.dashboard.steps import sign_in
from tests.handler.intake.rig import Cloud

NewKey = Callable[[str], str]
SECONDS = 60_000


def test_a_file_is_uploaded_and_run(
    page: Page, cloud: Cloud, new_key: NewKey, tmp_path: Path
) -> None:
    """Chosen, sent by url, made a batch, watched to its end, under its own name."""
    file = tmp_path / "questions.jsonl"
    file.write_bytes(file_of([{}] * 12))
    with control_running(cloud), worker_running(cloud, tmp_path):
        sign_in(page, new_key("lab"), "#/new")
        page.get_by_label("A JSONL file").set_input_files(file)
        page.get_by_label("To be done within").select_option("an hour")
        page.get_by_role("button", name="Upload and start").click()
        expect(page.get_by_role("heading", name="questions.jsonl")).to_be_visible(timeout=SECONDS)
        expect(page.locator("#live .status")).to_have_text("Completed", timeout=SECONDS)
    (batch,) = cloud.run(cloud.deployment.table.list_batches("lab", limit=10))[0]
    assert batch.options.completion_window == "1h"
    assert batch.source.num_bytes == file.stat().st_size

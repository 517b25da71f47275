"""Dashboard of batches without output tokens: embeddings, and recordings."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page, expect

from tests.handler.aws.given import NOW, make_batch
from tests.handler.dashboard.steps import obstacles, sign_in
from tests.handler.intake.rig import Cloud
from tidemill.batch.progress import HistoryBucket
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status

NewKey = Callable[[str], str]


def ended(cloud: Cloud, endpoint: str, done: Progress) -> str:
    """Return a batch that came to its end in a minute, with the history of that."""
    batch = make_batch(
        cloud.deployment,
        status=Status.COMPLETED,
        endpoint=endpoint,
        in_progress_at=NOW,
        finalizing_at=NOW + 60,
        completed_at=NOW + 61,
        num_rows=done.completed,
        final=done,
    )
    cloud.run(cloud.deployment.table.create_batch(batch))
    minute = NOW // 60 * 60
    gained = HistoryBucket(
        minute + 120,
        60,
        done.completed,
        tokens=done.completion_tokens,
        input_tokens=done.prompt_tokens,
        audio_seconds=done.audio_seconds,
    )
    for bucket in (HistoryBucket(minute, 60, 0), HistoryBucket(minute + 60, 60, 0), gained):
        cloud.run(cloud.deployment.ledger.add_history(batch, bucket))
    return batch.id


def test_a_batch_of_embeddings_shows_its_input_tokens(
    page: Page, cloud: Cloud, new_key: NewKey
) -> None:
    """No output tokens are counted or drawn."""
    done = Progress(1_000, prompt_tokens=42_000)
    sign_in(page, new_key("default"), f"#/batches/{ended(cloud, '/v1/embeddings', done)}")
    figures = page.locator(".figures")
    expect(figures).to_contain_text("Tokens in42,000")
    expect(figures).not_to_contain_text("Tokens out")
    expect(page.get_by_role("img", name="tokens in/s over time")).to_be_visible()
    page.get_by_text("Show as a table").click()
    table = page.get_by_role("region", name="Rows over time")
    expect(table.get_by_role("columnheader").last).to_have_text("Tokens in")
    expect(table.get_by_role("row").last).to_contain_text("42,000")
    assert obstacles(page) == []


def test_a_batch_of_recordings_shows_its_audio_seconds(
    page: Page, cloud: Cloud, new_key: NewKey
) -> None:
    """The list, the figures and the plot show them, in addition to the output tokens."""
    done = Progress(50, prompt_tokens=200, completion_tokens=9_000, audio_seconds=3_725.5)
    batch_id = ended(cloud, "/v1/audio/transcriptions", done)
    sign_in(page, new_key("default"))
    row = page.locator(f'[data-batch="{batch_id}"]')
    expect(row.get_by_role("rowheader")).to_contain_text("/v1/audio/transcriptions")
    expect(row.get_by_role("cell", name="of audio")).to_contain_text("1 h 2 min of audio")
    row.get_by_role("link").click()
    expect(page.locator(".figures")).to_contain_text("Audio1 h 2 min")
    expect(page.locator(".figures")).to_contain_text("Tokens out9,000")
    expect(page.get_by_role("img", name="s of audio/s over time")).to_be_visible()
    page.get_by_text("Show as a table").click()
    table = page.get_by_role("region", name="Rows over time")
    expect(table.get_by_role("columnheader").last).to_have_text("Seconds of audio")
    assert obstacles(page) == []


def test_a_batch_with_truncated_answers_shows_their_number(
    page: Page, cloud: Cloud, new_key: NewKey
) -> None:
    """The list shows it next to the failed rows, and so do the figures."""
    done = Progress(1_500, completion_tokens=9_000, truncated=1_200)
    batch_id = ended(cloud, "/v1/chat/completions", done)
    sign_in(page, new_key("default"))
    row = page.locator(f'[data-batch="{batch_id}"]')
    expect(row.get_by_role("cell", name="truncated")).to_contain_text("1,200 truncated")
    row.get_by_role("rowheader").get_by_role("link").click()
    expect(page.locator(".figures")).to_contain_text("of which truncated1,200")
    assert obstacles(page) == []

"""Forecasts of a batch's end and of its GPU time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from tidemill.batch.file.expected_tokens import ExpectedTokens, expected_tokens, work_of
from tidemill.batch.fleet import WorkerRate
from tidemill.batch.forecast import batch_seconds_left, estimate_gpu_seconds
from tidemill.batch.model import Batch, Options, Outputs, Source
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BATCH = Batch(
    "b",
    "t",
    Source("b", "k", "e", 0),
    "file",
    options=Options(),
    outputs=Outputs("o", "e", "r"),
    created_at=0,
    expires_at=9_999,
    status=Status.IN_PROGRESS,
)
TOKENS_A_SECOND, WINDOW = 400.0, 60.0
FILES = {
    "alike": [(400, 100)] * 600,
    "long answers at the end": [(400, 16)] * 600 + [(400, 512)] * 300,
    "long prompts at the end": [(100, 100)] * 400 + [(8_000, 100)] * 200,
    "short ones at the end": [(400, 512)] * 300 + [(400, 16)] * 600,
}
"""Bytes of prompts and `max_tokens` by line."""


def runs(
    lines: Sequence[tuple[int, int]], share_of_most: float
) -> Iterator[tuple[float, Progress]]:
    """Yield seconds and progress of one worker; answers take a share of their limit."""
    seconds, done, samples = 0.0, Progress(), list[tuple[float, Progress]]()
    for num_bytes, most in lines:
        prompt, answer = num_bytes // 4, round(share_of_most * most)
        seconds += work_of(prompt, answer) / TOKENS_A_SECOND
        expected = expected_tokens(CHAT, {"messages": [], "max_tokens": most}, num_bytes)
        done += Progress(
            1,
            0,
            prompt,
            0,
            answer,
            expected_input_tokens=expected.input,
            expected_output_tokens=expected.output,
        )
        samples.append((seconds, done))
        at, earlier = next(each for each in samples if each[0] >= seconds - WINDOW)
        new, span = done.since(earlier), max(1.0, seconds - at)
        yield (
            seconds,
            replace(
                done,
                rows_per_second=new.num_rows / span,
                tokens_per_second=new.completion_tokens / span,
                input_tokens_per_second=new.prompt_tokens / span,
            ),
        )


@pytest.mark.parametrize("share_of_most", [1.0, 0.3])
@pytest.mark.parametrize("file", FILES)
def test_the_end_is_estimated_wherever_the_long_lines_are(file: str, share_of_most: float) -> None:
    """It is within a fifth of the total after a tenth, and within a tenth from half on."""
    run = list(runs(FILES[file], share_of_most))
    whole, expected = run[-1][0], run[-1][1].expected
    batch = replace(BATCH, num_rows=len(run), expected=expected)
    for seconds, done in run[:-1]:
        if seconds < whole / 10:
            continue
        left = batch_seconds_left(batch, done, seconds)
        assert left is not None
        bound = 0.2 if seconds < whole / 2 else 0.1
        assert abs(seconds + left - whole) < bound * whole, f"after {seconds:.0f} of {whole:.0f} s"


def test_rows_are_counted_if_no_tokens_were_expected() -> None:
    """Batches of an earlier version and transcriptions expect none."""
    done = Progress(10, 0, 100, 0, 100, rows_per_second=2.0, tokens_per_second=1.0)
    assert batch_seconds_left(replace(BATCH, num_rows=30), done, 50) == pytest.approx(10)
    speech = Progress(10, 0, audio_seconds=60.0, rows_per_second=2.0, expected_input_tokens=25)
    batch = replace(BATCH, num_rows=30, expected=ExpectedTokens(100))
    assert batch_seconds_left(batch, speech, 50) == pytest.approx(10)
    assert batch_seconds_left(BATCH, Progress(), 50) is None


def test_the_gpu_time_is_estimated_before_the_first_row() -> None:
    """It uses the rate of its model's workers, and its own rows from two percent on."""
    batch = replace(BATCH, num_rows=100, expected=ExpectedTokens(0, 10_000))
    rate = WorkerRate(1, expected_work_per_second=50.0, num_gpus=2)
    assert estimate_gpu_seconds(batch, Progress(), rate) == 400.0
    done = Progress(completion_tokens=90, gpu_seconds=3.0, expected_output_tokens=100)
    assert estimate_gpu_seconds(batch, done, rate) == 400.0
    done = Progress(completion_tokens=900, gpu_seconds=30.0, expected_output_tokens=1_000)
    assert estimate_gpu_seconds(batch, done, rate) == 300.0
    assert estimate_gpu_seconds(batch, Progress(), WorkerRate()) is None
    assert estimate_gpu_seconds(BATCH, Progress(), rate) is None


@pytest.mark.parametrize(
    ("url", "body", "num_bytes", "expected"),
    [
        (CHAT, {"messages": [], "max_tokens": 100}, 3_200, (800, 100)),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 3, "max_tokens": 10}, 32, (8, 60)),
        (CHAT, {"messages": []}, 32, (8, 512)),
        ("/v1/embeddings", {"input": "a"}, 10, (2, 0)),
        ("/v1/responses", {"input": "a"}, 10, (2, 512)),
        ("/v1/responses", {"input": "a", "max_output_tokens": 7}, 10, (2, 7)),
        ("/v1/decisions", {"input": "a", "questions": []}, 10, (2, 0)),
        ("/v1/decisions", {"input": "a", "decide_by": "chat"}, 10, (2, 512)),
        (CHAT, {"messages": [], "max_tokens": 1}, 2**30, (32_768, 1)),
        (CHAT, {"messages": [], "max_tokens": 10**60, "n": 10**60}, 32, (8, 2**20)),
    ],
)
def test_lines_are_expected_to_take_their_limit(
    url: str, body: dict[str, object], num_bytes: int, expected: tuple[int, int]
) -> None:
    """An image's bytes are not text, and no answer is endless."""
    assert expected_tokens(url, body, num_bytes) == ExpectedTokens(*expected)

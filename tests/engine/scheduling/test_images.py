"""Images in a prompt: ends of chunks, rotation of tokens, and identity of prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tidemill.engine.model.vision.preprocessor_config import OneSize
from tidemill.engine.scheduling.images import (
    ImageSpec,
    PromptImage,
    axes_of,
    image_digests,
    image_span,
    prompt_key,
    whole_stop,
)


def image(start: int, rows: int, columns: int, *, is_whole: bool = True) -> PromptImage:
    """Return an image whose digest is its position."""
    pixels = np.zeros((rows, columns, 3), np.uint8)
    return PromptImage(pixels, bytes([start]), start, rows, columns, is_whole)


TWO = (image(4, 2, 3), image(12, 1, 4))


@pytest.mark.parametrize(
    ("start", "stop", "allowed"),
    [
        (0, 3, 3),
        (0, 4, 4),
        (0, 5, 4),
        (0, 9, 4),
        (0, 10, 10),
        (4, 5, 10),
        (4, 10, 10),
        (7, 8, 10),
        (4, 14, 12),
        (12, 13, 16),
        (16, 20, 20),
    ],
)
def test_a_chunk_stops_before_an_image_or_after_it(start: int, stop: int, allowed: int) -> None:
    """It stops after it if it were empty otherwise, so every chunk advances its sequence."""
    assert whole_stop(TWO, start, stop) == allowed


def test_an_image_with_causal_attention_may_be_split() -> None:
    """Its tokens see only earlier tokens."""
    assert whole_stop((image(4, 2, 3, is_whole=False),), 0, 6) == 6


def test_tokens_of_an_image_are_rotated_by_row_and_column() -> None:
    """Text continues after its longer side."""
    axes = axes_of((image(2, 2, 3), image(9, 3, 1)), 14)
    assert axes.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 6, 9, 10],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 6, 9, 10],
    ]


def test_a_span_contains_its_part_of_images() -> None:
    """Their tokens see the whole image; generated tokens continue after the prompt."""
    axes = axes_of(TWO, 18)
    shown = image_span(TWO, axes, 6, 14)
    assert shown.rows.tolist() == [0, 1, 2, 3, 6, 7]
    assert [(one.start, begin, end) for one, begin, end in shown.parts] == [(4, 2, 6), (12, 0, 2)]
    assert shown.ends.tolist() == [10, 10, 10, 10, 11, 12, 16, 16]
    assert shown.axes.tolist() == axes[:, 6:14].tolist()
    behind = image_span(TWO, axes, 17, 20)
    assert behind.parts == []
    assert behind.rows.tolist() == []
    assert behind.ends.tolist() == [18, 19, 20]
    last = int(axes[0, 17])
    assert behind.axes.tolist() == [[last, last + 1, last + 2]] * 3


def test_breaks_between_rows_have_no_vectors() -> None:
    """It holds for every start and end of a span."""
    spec = ImageSpec(
        mark=7,
        token=7,
        spelling=(7,),
        sizes=OneSize(1, 1, 1),
        filter=0,
        is_bidirectional=False,
        has_axes=False,
        breaks=(8, 9),
    )
    assert spec.placeholders(2, 3) == [7, 7, 8, 7, 7, 9]
    one = replace(image(4, 2, 3, is_whole=False), has_breaks=True)
    axes = axes_of((one,), 12)
    for start, stop, rows, part in [
        (0, 12, [4, 5, 7, 8], (0, 4)),
        (5, 8, [0, 2], (1, 3)),
        (6, 9, [1, 2], (2, 4)),
        (6, 7, [], (2, 2)),
        (9, 12, [], (4, 4)),
    ]:
        shown = image_span((one,), axes, start, stop)
        assert shown.rows.tolist() == rows
        assert [(begin, end) for _, begin, end in shown.parts] == [part]


def test_placeholders_of_different_images_are_distinguished() -> None:
    """Text tokens are not."""
    assert image_digests(TWO, 0, 4) == b""
    assert image_digests(TWO, 0, 5) == b"\x04"
    assert image_digests(TWO, 9, 13) == b"\x04\x0c"
    assert image_digests(TWO, 10, 12) == b""


def test_prompt_keys_contain_their_images() -> None:
    """Digests replace the placeholder tokens."""
    prompt = np.arange(18, dtype=np.int32)
    expected = [prompt[:4].tobytes(), b"\x04", prompt[10:12].tobytes(), b"\x0c"]
    assert prompt_key(prompt, TWO) == b"".join([*expected, prompt[16:].tobytes()])
    assert prompt_key(prompt, ()) == prompt.tobytes()

"""The formats of log-probabilities, without an endpoint."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from tests.engine.scripted_model import TURN_END, pack_entries, pretrained_tokenizer
from tidemill.engine.endpoints.logprob_bodies import (
    LEAST_LOGPROB,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
)
from tidemill.engine.scheduling.token_logprobs import TokenLogprob
from tidemill.engine.text.tokenizer import Tokenizer
from tidemill.engine.text.vocabulary import vocabulary_of

TOKENIZER = Tokenizer(vocabulary_of(pretrained_tokenizer()))


def test_an_impossible_token_has_a_finite_logprob() -> None:
    """JSON has no infinity; OpenAI and vLLM write -9999."""
    entry = TokenLogprob(5, -math.inf, ((6, -math.inf),))
    logprobs = pack_entries([entry])
    chat = chat_logprobs(logprobs, TOKENIZER)
    text = completion_logprobs(logprobs.rows(LEAST_LOGPROB), [5], [0], TOKENIZER)
    assert chat["content"][0]["top_logprobs"][0]["logprob"] == -9999
    assert text["token_logprobs"] == [-9999]
    json.dumps([chat, text], allow_nan=False)


@given(st.text(alphabet="ab é€😀", max_size=20))
def test_offsets_point_at_characters(text: str) -> None:
    """The characters between two offsets are those of the tokens between them."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    offsets = TextOffsets(TOKENIZER, skip_special_tokens=True).next_offsets(ids)
    for number, offset in enumerate(offsets):
        head = TOKENIZER.text_bytes(ids[:number])
        assert offset == len(head.decode("utf-8", "ignore"))


@given(st.lists(st.integers(0, 299), max_size=20))
def test_offsets_stay_inside_the_text_for_any_tokens(ids: list[int]) -> None:
    """Bytes that are not valid UTF-8 count as they are shown; offsets never decrease."""
    offsets = TextOffsets(TOKENIZER, skip_special_tokens=True).next_offsets(ids)
    assert offsets == sorted(offsets)
    assert all(offset <= len(TOKENIZER.text(ids)) for offset in offsets)


def test_special_tokens_have_length_only_if_shown() -> None:
    """Offsets follow the text, with special tokens or without."""
    ids = TOKENIZER.encode(f"a{TURN_END}b", add_special_tokens=False)
    assert TextOffsets(TOKENIZER, start=3, skip_special_tokens=True).next_offsets(ids) == [3, 4, 4]
    shown = TextOffsets(TOKENIZER, start=3, skip_special_tokens=False).next_offsets(ids)
    assert shown == [3, 4, 4 + len(TURN_END)]

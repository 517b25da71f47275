"""Texts and pairs as the tokenizer itself writes them, and what is left when they are cut."""

from __future__ import annotations

import pytest

from engine.protocol.errors import RequestError
from engine.text.reader import Cut, TextReader
from tests.engine.scripted_encoder import minilm_tokenizer
from tests.engine.scripted_model import text_model

TEXTS = ["Hello there", "a much longer text, of several words!", "Émile [SEP] naïve", "x"]


@pytest.mark.parametrize("first", TEXTS)
def test_a_pair_is_what_the_tokenizer_makes_of_both_at_once(first: str) -> None:
    """Ids and segments, though each text is read by itself."""
    tokenizer = minilm_tokenizer()
    backend = tokenizer.vocabulary.backend
    for second, pair in zip(TEXTS, TextReader(tokenizer).pairs([first], TEXTS, Cut()), strict=True):
        whole = backend.encode(first, second)
        assert (pair.ids, pair.type_ids) == (whole.ids, whole.type_ids)


def test_a_vocabulary_without_a_template_of_pairs_joins_them() -> None:
    """As transformers does for decoders."""
    tokenizer = text_model().tokenizer
    [pair] = TextReader(tokenizer).pairs(["The capital"], [" of France"], Cut(max_tokens=100))
    encode = tokenizer.encode
    assert pair.ids == encode("The capital", add_special_tokens=False) + encode(
        " of France", add_special_tokens=False
    )


@pytest.mark.parametrize("max_tokens", [3, 4, 7, 50])
def test_a_pair_is_cut_as_the_tokenizer_would_cut_its_second_text(max_tokens: int) -> None:
    """Its strategy only_second, of which something is left."""
    tokenizer = minilm_tokenizer()
    whole = tokenizer.vocabulary.backend.encode("x", TEXTS[1])
    reader, cut = TextReader(tokenizer), Cut(max_tokens=max_tokens)
    if max_tokens < 5:
        with pytest.raises(RequestError, match="has 4 tokens by itself"):
            reader.pairs(["x"], [TEXTS[1]], cut)
        return
    [pair] = reader.pairs(["x"], [TEXTS[1]], cut)
    kept = min(max_tokens, len(whole.ids)) - 1
    assert pair.ids == [*whole.ids[:kept], whole.ids[-1]]
    assert pair.type_ids == [*whole.type_ids[:kept], 1]


@pytest.mark.parametrize("num_tokens", range(1, 12))
def test_the_start_of_a_text_has_so_many_tokens(num_tokens: int) -> None:
    """Cut between words, or inside one; a shorter text stays as it is."""
    reader = TextReader(minilm_tokenizer())
    for text in TEXTS:
        start = reader.start_of(text, num_tokens)
        assert text.startswith(start)
        assert reader.num_tokens(start) == min(num_tokens, reader.num_tokens(text))

"""Texts and pairs as the tokenizer itself writes them, and what is left when they are cut."""

from __future__ import annotations

import pytest

from tests.engine.scripted_encoder import minilm_tokenizer
from tests.engine.scripted_model import text_model
from tidemill.engine.text.truncation import Side, TruncatingTokenizer, Truncation
from tidemill.protocol.errors import RequestError

TEXTS = ["Hello there", "a much longer text, of several words!", "Émile [SEP] naïve", "x"]


@pytest.mark.parametrize("first", TEXTS)
def test_a_pair_is_what_the_tokenizer_makes_of_both_at_once(first: str) -> None:
    """Ids and segments, though each text is read by itself."""
    tokenizer = minilm_tokenizer()
    backend = tokenizer.vocabulary.backend
    for second, pair in zip(
        TEXTS,
        TruncatingTokenizer(tokenizer, 512).encode_pairs([first], TEXTS, Truncation()),
        strict=True,
    ):
        whole = backend.encode(first, second)
        assert (pair.ids, pair.type_ids) == (whole.ids, whole.type_ids)


def test_a_vocabulary_without_a_template_of_pairs_joins_them() -> None:
    """As transformers does for decoders."""
    tokenizer = text_model().tokenizer
    [pair] = TruncatingTokenizer(tokenizer, 512).encode_pairs(
        ["The capital"], [" of France"], Truncation(max_tokens=100)
    )
    encode = tokenizer.encode
    assert pair.ids == encode("The capital", add_special_tokens=False) + encode(
        " of France", add_special_tokens=False
    )


@pytest.mark.parametrize("max_tokens", [3, 4, 7, 50])
def test_a_pair_is_cut_as_the_tokenizer_would_cut_its_second_text(max_tokens: int) -> None:
    """Its strategy only_second, of which something is left."""
    tokenizer = minilm_tokenizer()
    whole = tokenizer.vocabulary.backend.encode("x", TEXTS[1])
    reader, cut = TruncatingTokenizer(tokenizer, 512), Truncation(max_tokens=max_tokens)
    if max_tokens < 5:
        with pytest.raises(RequestError, match="not truncated have 4 tokens"):
            reader.encode_pairs(["x"], [TEXTS[1]], cut)
        return
    [pair] = reader.encode_pairs(["x"], [TEXTS[1]], cut)
    kept = min(max_tokens, len(whole.ids)) - 1
    assert pair.ids == [*whole.ids[:kept], whole.ids[-1]]
    assert pair.type_ids == [*whole.type_ids[:kept], 1]


@pytest.mark.parametrize("num_tokens", range(1, 12))
def test_the_start_of_a_text_has_so_many_tokens(num_tokens: int) -> None:
    """Cut between words, or inside one; a shorter text stays as it is."""
    reader = TruncatingTokenizer(minilm_tokenizer(), 512)
    for text in TEXTS:
        start = reader.truncated_text(text, num_tokens)
        assert text.startswith(start)
        assert reader.count_tokens(start) == min(num_tokens, reader.count_tokens(text))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("unit", ["some words, ", "日本語の文 ", "naïve-ish "])
def test_of_a_text_without_end_no_more_is_read_than_is_wanted(side: Side, unit: str) -> None:
    """And what is kept is what is kept of the whole."""
    tokenizer = minilm_tokenizer()
    reader = TruncatingTokenizer(tokenizer, 512)
    text = f"The start {unit * 6_000}the end"
    [cut] = reader.encode([text], Truncation(max_tokens=100, side=side))
    whole = tokenizer.encode(text, add_special_tokens=False)
    expected = whole[:98] if side == "right" else whole[-98:]
    assert cut[1:-1] == expected
    [read] = reader.encode([text], Truncation(side=side))
    assert 512 < len(read) < len(whole) * 2 / 3
    [pair] = reader.encode_pairs(["x"], [text], Truncation(max_tokens=102, side=side))
    assert pair.ids[3:-1] == expected
    assert reader.count_tokens(reader.truncated_text(text, 20)) == 20


@pytest.mark.parametrize("text", ["x" * 30_000, " " * 50_000 + "a", "a " + "\u200b" * 50_000])
def test_a_long_text_of_few_tokens_is_read_whole(text: str) -> None:
    """One without words to cut at, and one whose beginning is no token at all."""
    tokenizer = minilm_tokenizer()
    [read] = TruncatingTokenizer(tokenizer, 512).encode([text], Truncation())
    assert read == tokenizer.encode(text, add_special_tokens=True)

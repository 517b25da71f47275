"""Texts and pairs match the tokenizer's own encoding, with and without truncation."""

from __future__ import annotations

from itertools import product

import pytest
from tokenizers import Tokenizer

from tests.engine.scripted_encoder import minilm_tokenizer
from tests.engine.scripted_model import text_model
from tidemill.engine.text.truncation import Side, TokenPair, TruncatingTokenizer, Truncation
from tidemill.protocol.errors import RequestError

TEXTS = ["Hello there", "a much longer text, of several words!", "Émile [SEP] naïve", "x"]


def encoded_pairs(
    reader: TruncatingTokenizer, firsts: list[str], seconds: list[str], cut: Truncation
) -> list[TokenPair]:
    """Return pairs that are read together, as those of several requests are."""
    texts = reader.relevant_parts([*firsts, *seconds], cut)
    return reader.joined_pairs(len(firsts), reader.read(texts, add_special_tokens=False), cut)


@pytest.mark.parametrize("first", TEXTS)
def test_a_pair_equals_the_encoding_of_both_texts(first: str) -> None:
    """IDs and segments are equal, though each text is encoded separately."""
    tokenizer = minilm_tokenizer()
    backend = tokenizer.vocabulary.backend
    for second, pair in zip(
        TEXTS,
        encoded_pairs(TruncatingTokenizer(tokenizer, 512), [first], TEXTS, Truncation()),
        strict=True,
    ):
        whole = backend.encode(first, second)
        assert (pair.ids, pair.type_ids) == (whole.ids, whole.type_ids)


def test_a_vocabulary_without_a_pair_template_joins_them() -> None:
    """transformers does the same for decoders."""
    tokenizer = text_model().tokenizer
    [pair] = encoded_pairs(
        TruncatingTokenizer(tokenizer, 512),
        ["The capital"],
        [" of France"],
        Truncation(max_tokens=100),
    )
    encode = tokenizer.encode
    assert pair.ids == encode("The capital", add_special_tokens=False) + encode(
        " of France", add_special_tokens=False
    )


@pytest.mark.parametrize("max_tokens", [3, 4, 7, 50])
def test_a_pair_is_truncated_like_only_second(max_tokens: int) -> None:
    """The tokenizer's strategy `only_second` leaves some of the second text."""
    tokenizer = minilm_tokenizer()
    whole = tokenizer.vocabulary.backend.encode("x", TEXTS[1])
    reader, cut = TruncatingTokenizer(tokenizer, 512), Truncation(max_tokens=max_tokens)
    if max_tokens < 5:
        with pytest.raises(RequestError, match="not truncated have 4 tokens"):
            encoded_pairs(reader, ["x"], [TEXTS[1]], cut)
        return
    [pair] = encoded_pairs(reader, ["x"], [TEXTS[1]], cut)
    end = min(max_tokens, len(whole.ids)) - 1
    assert pair.ids == [*whole.ids[:end], whole.ids[-1]]
    assert pair.type_ids == [*whole.type_ids[:end], 1]


@pytest.mark.parametrize("max_tokens", [4, 5, 8, 9, 12, 50])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_longer_text_of_a_pair_is_truncated(max_tokens: int, side: Side) -> None:
    """The result is that of the tokenizer's strategy `longest_first`."""
    tokenizer = minilm_tokenizer()
    cut = Truncation(max_tokens=max_tokens, side=side, is_longest_first=True)
    reader = TruncatingTokenizer(tokenizer, 512)
    own = Tokenizer.from_str(tokenizer.vocabulary.backend.to_str())
    own.enable_truncation(max_tokens, strategy="longest_first", direction=side)
    pairs = list(product(TEXTS, TEXTS))
    if max_tokens < 5:
        with pytest.raises(RequestError, match="3 special tokens leave no room for two texts"):
            encoded_pairs(reader, ["x"], ["x"], cut)
        return
    read = encoded_pairs(reader, *map(list, zip(*pairs, strict=True)), cut)
    for pair, whole in zip(read, own.encode_batch(pairs), strict=True):
        assert (pair.ids, pair.type_ids) == (whole.ids, whole.type_ids)


@pytest.mark.parametrize("num_tokens", range(1, 12))
def test_the_start_of_a_text_has_the_requested_tokens(num_tokens: int) -> None:
    """The cut is between words or inside one; a shorter text is unchanged."""
    reader = TruncatingTokenizer(minilm_tokenizer(), 512)
    for text in TEXTS:
        start = reader.truncated_text(text, num_tokens)
        assert text.startswith(start)
        assert reader.count_tokens(start) == min(num_tokens, reader.count_tokens(text))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("unit", ["some words, ", "日本語の文 ", "naïve-ish "])
def test_a_very_long_text_is_read_only_as_far_as_needed(side: Side, unit: str) -> None:
    """The result equals that of truncating the whole text."""
    tokenizer = minilm_tokenizer()
    reader = TruncatingTokenizer(tokenizer, 512)
    text = f"The start {unit * 6_000}the end"
    [cut] = reader.encode([text], Truncation(max_tokens=100, side=side))
    whole = tokenizer.encode(text, add_special_tokens=False)
    expected = whole[:98] if side == "right" else whole[-98:]
    assert cut[1:-1] == expected
    [read] = reader.encode([text], Truncation(side=side))
    assert 512 < len(read) < len(whole) * 2 / 3
    [pair] = encoded_pairs(reader, ["x"], [text], Truncation(max_tokens=102, side=side))
    assert pair.ids[3:-1] == expected
    assert reader.count_tokens(reader.truncated_text(text, 20)) == 20


@pytest.mark.parametrize("text", ["x" * 30_000, " " * 50_000 + "a", "a " + "\u200b" * 50_000])
def test_a_long_text_of_few_tokens_is_read_fully(text: str) -> None:
    """Examples are a text without words to cut at and one that starts without any token."""
    tokenizer = minilm_tokenizer()
    [read] = TruncatingTokenizer(tokenizer, 512).encode([text], Truncation())
    assert read == tokenizer.encode(text, add_special_tokens=True)

"""No text has fewer tokens than the bound for its bytes, whatever the tokenizer does."""

from __future__ import annotations

import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tests.engine.scripted_model import byte_level_backend, sentencepiece_tokenizer
from tests.long_parameters import with_long
from tidemill.engine.text.tokenizer import Tokenizer
from tidemill.engine.text.vocabulary import vocabulary_of

# Texts that normal forms shrink most, texts that join a token's own text, and others.
HARD = (
    "\u212aΩÅΐ\u1fbe\u0308\u0341\U0001d400\U0001d6da\uffa1각"
    "e\u0301\u0301  \n\u3000\xa0THEthe ▁<|im_start|>-----"
)
TEXTS = st.text(max_size=60) | st.text(alphabet=HARD, max_size=200)


def byte_level(*, normalizer: Any = None, splitter: Any = None, rstrip: bool = False) -> Tokenizer:
    """Return the tiny byte-level tokenizer with one part replaced."""
    backend = Backend.from_str(byte_level_backend().to_str())
    if normalizer is not None:
        backend.normalizer = normalizer
    if splitter is not None:
        backend.pre_tokenizer = splitter
    backend.add_special_tokens([AddedToken("<|im_start|>", rstrip=rstrip, lstrip=rstrip)])
    return Tokenizer(vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=backend)))


def unigram(*, byte_fallback: bool, normalizer: Any = None) -> Tokenizer:
    """Return a tokenizer like those of T5 and Gemma."""
    vocab = [("<unk>", 0.0), ("▁", -1.0), ("▁the", -2.0), ("-----", -2.0), ("e", -3.0)]
    vocab += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    backend = Backend(models.Unigram(vocab, 0, byte_fallback))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return Tokenizer(vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=backend)))


def word_pieces() -> Tokenizer:
    """Return a tokenizer that gives one unknown token for a word of any length."""
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    return Tokenizer(
        vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))
    )


SPLIT = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(r"\p{L}+|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
BOUNDED = {
    "byte level": byte_level(),
    "byte level, split by a pattern": byte_level(splitter=SPLIT),
    "spaces go with a special token": byte_level(rstrip=True),
    "NFC": byte_level(normalizer=normalizers.NFC()),
    "NFKC in lower case": byte_level(
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "NFD": byte_level(normalizer=normalizers.NFD()),
    "SentencePiece": Tokenizer(vocabulary_of(sentencepiece_tokenizer())),
    "unigram": unigram(byte_fallback=True),
}
UNBOUNDED = {
    "accents go": byte_level(
        normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    ),
    "runs of spaces go": byte_level(normalizer=normalizers.Replace(Regex(" {2,}"), " ")),
    "spaces go": byte_level(
        splitter=pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
        )
    ),
    "a pattern goes": byte_level(
        splitter=pre_tokenizers.Sequence(
            [pre_tokenizers.Split("x", "removed"), pre_tokenizers.ByteLevel()]
        )
    ),
    "unknown characters are one": unigram(byte_fallback=False),
    "unknown words are one": word_pieces(),
}


@pytest.mark.parametrize("name", BOUNDED)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_the_bound(name: str, text: str) -> None:
    """It holds for any text and every kind of tokenizer that has a bound."""
    tokenizer = BOUNDED[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.least_tokens(text) <= len(ids)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_tokenizer_that_drops_text_has_no_bound(name: str) -> None:
    """A long text may have only a few tokens, so its bytes give no bound."""
    assert UNBOUNDED[name].least_tokens("x" * 10**6) == 0


@pytest.mark.parametrize("name", BOUNDED)
def test_a_long_text_is_known_to_be_long(name: str) -> None:
    """The bound is useful: a text of a megabyte has thousands of tokens."""
    assert BOUNDED[name].least_tokens("word " * 200_000) > 20_000


def test_letters_give_a_better_bound_than_spaces() -> None:
    """A vocabulary's longest tokens are runs of spaces, which do not make up normal text."""
    backend = Backend.from_str(byte_level_backend().to_str())
    backend.add_tokens([" " * 128])
    tokenizer = Tokenizer(vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=backend)))
    assert tokenizer.least_tokens(" " * 12_800) == 100
    assert tokenizer.least_tokens("x" * 12_800) > 1_000


@pytest.mark.parametrize("form", with_long(["NFKC"], ["NFC"]))
def test_a_normal_form_shrinks_text_at_most_fourfold(form: Any) -> None:
    """The longest spelling of each character is at most four times as long."""
    apart: Any = "NFKD" if "K" in form else "NFD"
    # All others, which are unassigned or private, are their own normal form.
    every = map(chr, range(sys.maxunicode + 1))
    characters = [c for c in every if unicodedata.category(c) not in {"Cn", "Co", "Cs"}]
    longest: dict[str, int] = {}
    for character in characters:
        parts = unicodedata.normalize(apart, character)
        if len(parts) == 1:
            longest[parts] = max(longest.get(parts, 0), len(character.encode()))
    for character in characters:
        if unicodedata.normalize(form, character) != character:
            continue
        parts = unicodedata.normalize(apart, character)
        spelled = sum(longest.get(part, len(part.encode())) for part in parts)
        assert spelled <= 4 * len(character.encode()), hex(ord(character))

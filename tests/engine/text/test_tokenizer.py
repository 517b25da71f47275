"""Tokens to bytes and back, compared with transformers' own decode."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from tests.engine.scripted_model import TURN_END, pretrained_tokenizer, sentencepiece_tokenizer
from tidemill.engine.text.tokenizer import Tokenizer
from tidemill.engine.text.vocabulary import vocabulary_of
from tidemill.protocol.errors import RequestError

PRETRAINED = pretrained_tokenizer()
BYTE_LEVEL = Tokenizer(vocabulary_of(PRETRAINED))


def word_pieces() -> Any:
    """Return a tokenizer whose decoder is neither of the two kinds that we read directly."""
    vocab = {
        token: i for i, token in enumerate(["[UNK]", "[SEP]", "a", "cat", "##s", "sat", "##a"])
    }
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, sep_token="[SEP]", unk_token="[UNK]")


@given(text=st.text(), skip=st.booleans())
def test_byte_level_text_equals_decode(text: str, skip: bool) -> None:  # noqa: FBT001
    """Any text survives, and so does markup if it is not skipped."""
    ids = BYTE_LEVEL.encode(f"{text}{TURN_END}", add_special_tokens=False)
    expected = PRETRAINED.decode(ids, skip_special_tokens=skip)
    assert BYTE_LEVEL.text(ids, skip_special_tokens=skip) == expected


@given(st.lists(st.integers(0, 299)))
def test_byte_level_text_equals_decode_for_arbitrary_ids(ids: list[int]) -> None:
    """A model may sample bytes that are not valid UTF-8."""
    assert BYTE_LEVEL.text(ids) == PRETRAINED.decode(ids, skip_special_tokens=True)


@given(st.text(alphabet="ab é€😀"))
def test_sentencepiece_text_equals_decode_except_the_first_space(text: str) -> None:
    """`decode` drops the space before the first word; inside a text it belongs there."""
    tokenizer = Tokenizer(vocabulary_of(sentencepiece_tokenizer()))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.text(ids).removeprefix(" ") == tokenizer.vocabulary.pretrained.decode(ids)


def test_a_byte_token_is_one_byte() -> None:
    """The euro sign is three tokens of a vocabulary that lacks it."""
    tokenizer = Tokenizer(vocabulary_of(sentencepiece_tokenizer()))
    ids = tokenizer.encode("€", add_special_tokens=False)[-3:]
    assert [tokenizer.piece(i) for i in ids] == [b"\xe2", b"\x82", b"\xac"]


def test_other_vocabularies_are_read_with_decode() -> None:
    """Word pieces know whether a space precedes them."""
    tokenizer = Tokenizer(vocabulary_of(word_pieces()))
    ids = tokenizer.encode("a cats sat", add_special_tokens=False)
    assert tokenizer.text(ids) == " a cats sat"
    assert tokenizer.piece(1) == b"[SEP]"


def test_a_special_token_is_markup_with_a_text() -> None:
    """It is skipped in texts and found by its spelling."""
    special_id = BYTE_LEVEL.special_id(TURN_END)
    assert special_id is not None
    assert BYTE_LEVEL.is_special(special_id)
    assert BYTE_LEVEL.piece(special_id) == TURN_END.encode()
    assert BYTE_LEVEL.text([special_id]) == ""
    assert BYTE_LEVEL.special_id("capital") is None


def test_an_added_token_that_is_not_special_is_text() -> None:
    """Its characters are literal, including those that represent bytes in the vocabulary."""
    pretrained = pretrained_tokenizer()
    pretrained.add_tokens([AddedToken("<é>", special=False)])
    tokenizer = Tokenizer(vocabulary_of(pretrained))
    ids = tokenizer.encode("<é>a", add_special_tokens=False)
    assert len(ids) == 2
    assert tokenizer.text(ids) == "<é>a"
    assert tokenizer.special_id("<é>") is None


@pytest.mark.parametrize("make", [pretrained_tokenizer, sentencepiece_tokenizer, word_pieces])
def test_an_id_without_a_token_has_no_text(make: Any) -> None:
    """Models have more embedding rows than tokens, as padding."""
    assert Tokenizer(vocabulary_of(make())).piece(100_000) == b""


def test_lone_surrogates_are_a_request_error() -> None:
    """JSON can contain them, but no tokenizer can read them."""
    with pytest.raises(RequestError, match="surrogates"):
        BYTE_LEVEL.encode("a\ud800", add_special_tokens=False)


class Characters(PreTrainedTokenizer):  # type: ignore[misc]
    """A tokenizer written in Python, of which transformers still has some."""

    def __init__(self) -> None:
        self.vocab = {"<pad>": 0, "a": 1, "b": 2, " ": 3, "é": 4, "<0xE2>": 5}
        super().__init__(pad_token="<pad>")

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens."""
        return len(self.vocab)

    def get_vocab(self) -> dict[str, int]:
        """Return the ids by token."""
        return dict(self.vocab)

    def _tokenize(self, text: str, **_: object) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.vocab.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return list(self.vocab)[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Return the text of the tokens."""
        return "".join(tokens)


def test_a_tokenizer_written_in_python_works() -> None:
    """It is slower, but its texts and bytes are the same."""
    tokenizer = Tokenizer(vocabulary_of(Characters()))
    ids = tokenizer.encode("ab éa", add_special_tokens=False)
    assert ids == [1, 2, 3, 4, 1]
    assert tokenizer.text([0, *ids]) == "ab éa"
    assert tokenizer.piece(5) == b"\xe2"
    assert tokenizer.piece(999) == b""

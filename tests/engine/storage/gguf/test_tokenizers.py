"""Tokenizers of GGUF files give the IDs that the published rules give, implemented here again.

The rules are pure Python: the pre-tokenizers as llama.cpp's regular expressions in another engine
(`regex`), BPE by ranks of merges, SentencePiece's BPE by scores.
"""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from tests.engine.gguf_files import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    real_file,
    write_tables,
)
from tests.long_parameters import with_long
from tidemill.engine.errors import ModelRefused
from tidemill.engine.storage.gguf.header import read_header
from tidemill.engine.storage.gguf.tokenizers import TokenizerFiles, make_tokenizer

PARTS = (
    *("def f(x):\n    return x**2 # ok", "for (int i=0;i<10;++i) {", "a_b.c->d", "\t\tif x != 'y'"),
    *(
        "I'm",
        "DON'T",
        "we'll",
        "it's",
        "They'VE",
        "'D",
        "hello",
        "World",
        "HTTPServer",
        "na\u00efve",
    ),
    *("1", "12", "2024", "3.14159", "1,000,000", "٣٤", "½", "x²", "10:45", "//", "!!!", "--", "…"),
    *(
        "🎉",
        "👩\u200d👩\u200d👧",
        "🇫🇷",
        "e\u0301te\u0301",
        "A\u030a",
        "中文分词",
        "你好世界。",
        "한국어",
    ),
    *(
        "  ",
        "     ",
        "\n",
        "\n\n",
        " \n ",
        "\r\n",
        "\t",
        "\u00a0",
        "\u3000",
        "こんにちは",
        "Привет",
    ),
    *("\ufb01", "\u01c5", "नमस्ते", "שלום", "a\u200bb", "$x^2$", "http://x.y/z?q=1", "«oui»"),
)


def texts(count: int = 2000) -> list[str]:
    """Return texts with code, digits, emoji, Chinese and spaces."""
    chance = random.Random(5)
    return [
        chance.choice(("", " ")).join(chance.choices(PARTS, k=chance.randint(1, 9)))
        for _ in range(count)
    ]


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LETTERS = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+ENDING"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*ENDING"
    r"|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDING = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
# The expressions of each pre-tokenizer in order, and whether whole words are looked up first.
PRE: dict[str, tuple[list[str], bool]] = {
    "gpt-2": ([GPT2], False),
    "smollm": ([r"\p{N}", GPT2], False),
    "qwen2": ([LETTERS.replace("DIGITS", "")], False),
    "llama-bpe": ([LETTERS.replace("DIGITS", "{1,3}")], True),
    "dbrx": ([LETTERS.replace("DIGITS", "{1,3}")], False),
    "tekken": ([CASED.replace("DIGITS", "").replace("ENDING", "")], True),
    "gpt-4o": ([CASED.replace("DIGITS", "{1,3}").replace("ENDING", ENDING)], False),
}


FIRST = ("smollm", "qwen2", "llama-bpe", "tekken")
# Of SmolLM2's tokenizer.json.
SMOLLM2_IDS = {
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Caf\u00e9 d\u00e9j\u00e0 vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
}


def bytes_to_chars() -> list[str]:
    """Return GPT-2's letter for each byte: itself if it is printable, else one from 256 on."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte if byte in prints else next(rest)) for byte in range(256)]


def split(patterns: Sequence[str], text: str) -> list[str]:
    """Return the parts of a text: each expression splits the parts that the previous ones left."""
    parts = [text]
    for pattern in patterns:
        cut: list[str] = []
        for part in parts:
            end = 0
            for match in regex.finditer(pattern, part):
                cut += [part[end : match.start()], match[0]]
                end = match.end()
            cut.append(part[end:])
        parts = [part for part in cut if part]
    return parts


def byte_level(
    tokens: Sequence[str], merges: Sequence[str], patterns: Sequence[str], *, whole_first: bool
) -> Callable[[str], list[int]]:
    """Return byte-level BPE: the pair of the lowest rank is merged first, the leftmost of them."""
    ids = {token: i for i, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    chars = bytes_to_chars()

    @lru_cache(None)
    def word(part: str) -> list[int]:
        symbols = [chars[byte] for byte in part.encode()]
        if whole_first and "".join(symbols) in ids:
            return [ids["".join(symbols)]]
        while True:
            known = [(ranks[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in ranks]
            if not known:
                return [ids[symbol] for symbol in symbols]
            _, i = min(known)
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]

    return lambda text: [i for part in split(patterns, text) for i in word(part)]


def sentencepiece(
    tokens: Sequence[str], scores: Sequence[float], prefix: str
) -> Callable[[str], list[int]]:
    """Return SentencePiece's BPE: the pair of the best score is merged first."""
    ids = {token: i for i, token in enumerate(tokens)}

    def encode(text: str) -> list[int]:
        symbols = [*(prefix + text.replace(" ", "▁"))]
        while True:
            joined = [a + b for a, b in pairwise(symbols)]
            known = [(-scores[ids[one]], i) for i, one in enumerate(joined) if one in ids]
            if not known:
                break
            _, i = min(known)
            symbols[i : i + 2] = [joined[i]]
        encoded: list[int] = []
        for symbol in symbols:
            known_id = ids.get(symbol)
            raw = [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
            encoded += raw if known_id is None else [known_id]
        return encoded

    return encode


def tables_file(
    path: Path, tokens: Sequence[str], architecture: str = "llama", **fields: Any
) -> Path:
    """Write a file that contains only a tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    write_tables(writer, tokens, **fields)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_of(
    path: Path, tokens: Sequence[str], **fields: Any
) -> tuple[Backend, TokenizerFiles]:
    """Return the tokenizer of such a file."""
    files = make_tokenizer(read_header(tables_file(path, tokens, **fields)))
    return Backend.from_str(files.tokenizer), files


@pytest.fixture(scope="module")
def learnt() -> tuple[list[str], list[str]]:
    """Return tokens and merges of byte-level BPE trained on some of the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(300), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary: Mapping[str, int] = model["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return tokens, [" ".join(merge) for merge in model["merges"]]


@pytest.mark.parametrize("pre", with_long(FIRST, [pre for pre in PRE if pre not in FIRST]))
def test_byte_level_ids_are_those_of_the_pre_tokenizer_that_the_file_names(
    tmp_path: Path, learnt: tuple[list[str], list[str]], pre: str
) -> None:
    """The IDs are equal for 2,000 texts of code, digits, emoji, Chinese and spaces."""
    tokens, merges = learnt
    tokenizer, _ = tokenizer_of(tmp_path / "x.gguf", tokens, pre=pre, merges=merges)
    patterns, whole_first = PRE[pre]
    encode = byte_level(tokens, merges, patterns, whole_first=whole_first)
    for text in texts():
        normal = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        encoding = tokenizer.encode(text, add_special_tokens=False)
        assert encoding.ids == encode(normal), text
        assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == normal


@pytest.mark.long
def test_the_ids_of_a_real_file_equal_those_of_its_published_tokenizer() -> None:
    """SmolLM2's IDs are known for some texts and computed by the rules for 2,000."""
    header = read_header(real_file())
    files = make_tokenizer(header)
    tokenizer, metadata = Backend.from_str(files.tokenizer), header.metadata
    for text, ids in SMOLLM2_IDS.items():
        assert tokenizer.encode(text).ids == ids
    encode = byte_level(
        metadata["tokenizer.ggml.tokens"],
        metadata["tokenizer.ggml.merges"],
        PRE["smollm"][0],
        whole_first=False,
    )
    for text in texts():
        assert tokenizer.encode(text).ids == encode(text), text


def test_special_tokens_are_atomic_and_added_as_the_file_specifies(
    tmp_path: Path, learnt: tuple[list[str], list[str]]
) -> None:
    """A beginning token is added if the file or its kind of vocabulary requires it."""
    tokens, merges = learnt
    tokens = [*tokens, "<|begin|>", "<|im_end|>", "<tool>"]
    count = len(tokens)
    types = [NORMAL] * (count - 3) + [CONTROL, CONTROL, USER_DEFINED]
    fields = {"merges": merges, "types": types, "bos_token_id": count - 3}
    path = tmp_path / "x.gguf"
    plain, files = tokenizer_of(path, tokens, pre="smollm", eos_token_id=count - 2, **fields)
    assert plain.encode("<|im_end|><tool>").ids == [count - 2, count - 1]
    assert plain.decode([count - 2, count - 1], skip_special_tokens=True) == "<tool>"
    assert files.end_ids == [count - 2]
    assert files.tokenizer_config["eos_token"] == "<|im_end|>"
    begun, files = tokenizer_of(path, tokens, pre="llama-bpe", **fields)
    assert begun.encode("<tool>").ids == [count - 3, count - 1]
    assert files.end_ids == [count - 2]  # known by its text
    without_bos, _ = tokenizer_of(path, tokens, pre="llama-bpe", add_bos_token=False, **fields)
    assert without_bos.encode("<tool>").ids == [count - 1]
    ended, _ = tokenizer_of(
        path, tokens, pre="smollm", eos_token_id=0, add_eos_token=True, **fields
    )
    assert ended.encode("<tool>").ids == [count - 1, 0]


def spm_tables() -> tuple[list[str], list[int], list[float]]:
    """Return tokens, types and scores of a vocabulary trained on some of the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=500, limit_alphabet=90, show_progress=False)
    tokenizer.train_from_iterator(texts(300), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merged = ["".join(merge) for merge in model["merges"]]
    letters = sorted(set(model["vocab"]) - set(merged))
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*special, *merged, *letters]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(merged + letters)]
    scores = [0.0] * len(special) + [-float(i) for i in range(len(merged + letters))]
    return tokens, types, scores


@pytest.mark.parametrize("has_prefix", [True, False], ids=["llama", "gemma"])
def test_sentencepiece_ids_are_those_of_its_scores(tmp_path: Path, *, has_prefix: bool) -> None:
    """Llama's adds a leading space and Gemma's does not; unknown letters become bytes."""
    tokens, types, scores = spm_tables()
    fields = {"types": types, "scores": scores, "bos_token_id": 1, "unknown_token_id": 0}
    if not has_prefix:
        fields["add_space_prefix"] = False
    tokenizer, _ = tokenizer_of(tmp_path / "x.gguf", tokens, model="llama", pre="default", **fields)
    encode = sentencepiece(tokens, scores, "▁" if has_prefix else "")
    for text in texts():
        encoding = tokenizer.encode(text)
        assert encoding.ids == [1, *encode(text)], text
        assert tokenizer.decode(encoding.ids) == text


def test_user_defined_spaces_are_one_token_before_any_merge(tmp_path: Path) -> None:
    """Gemma has such runs of spaces and newlines, which converters write as spaces."""
    tokens = ["<unk>", "<bos>", "▁", "a", "b", "▁a", "ab", "▁ab", "  ", "   ", "\n\n", "▁▁"]
    scores = [0, 0, -1, -2, -3, -4, -5, -6, -1000, -1000, -1000, -1000]
    types = [UNKNOWN, CONTROL, *[NORMAL] * 6, *[USER_DEFINED] * 4]
    fields = {"types": types, "scores": [float(one) for one in scores], "add_space_prefix": False}
    tokenizer, _ = tokenizer_of(
        tmp_path / "x.gguf", tokens, model="llama", pre="default", bos_token_id=1, **fields
    )
    assert tokenizer.encode("a   ab\n\n ab").ids == [1, 3, 9, 6, 10, 7]


def test_spaces_after_special_tokens_of_phi3_belong_to_them(tmp_path: Path) -> None:
    """Its tokenizer.json defines this; a GGUF file does not."""
    tokens, types = ["<unk>", "<s>", "▁", "a", "<|user|>"], [UNKNOWN, CONTROL, 1, 1, CONTROL]
    fields = {"types": types, "scores": [0.0] * 5, "model": "llama", "pre": "default"}
    tokenizer, _ = tokenizer_of(
        tmp_path / "x.gguf", tokens, architecture="phi3", bos_token_id=1, **fields
    )
    ids = tokenizer.encode("<|user|> \na<s> a", add_special_tokens=False).ids
    assert ids == [4, 2, 3, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "bert"}, "the GGUF tokenizer 'bert' is not supported"),
        ({"pre": "mystery"}, "the GGUF pre-tokenizer 'mystery' is not supported"),
        ({"pre": None}, "the GGUF pre-tokenizer None is not supported"),
        ({"types": [1]}, "tokenizer.ggml.token_type has 1 entries for 3 tokens"),
        ({"merges": ["a z"]}, "the tokenizer tables are inconsistent"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    """The error is one sentence, which names the file."""
    with pytest.raises(ModelRefused, match=words) as refused:
        tokenizer_of(tmp_path / "x.gguf", ["a", "b", "ab"], **{"merges": ["a b"], **fields})
    assert str(tmp_path / "x.gguf") in str(refused.value)

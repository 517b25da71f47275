"""Tokenizers built from the tables of a GGUF file, equivalent to published tokenizer.json files.

Byte-level BPE is split by `tokenizer.ggml.pre`, which names the published pre-tokenizer. In a
SentencePiece vocabulary the merges are all pairs of tokens whose joined text is a token, best score
first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...errors import ModelRefused, first_line_of
from .header import GGUFHeader

_KEY: Final = "tokenizer.ggml."
# Types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE: Final = "\u2581"

# The pre-tokenizers' regular expressions as in their tokenizer.json files.
_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = (
    r"{contractions}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3: Final = _WORDS.format(contractions=_CONTRACTIONS, digits="{1,3}")
_QWEN2: Final = _WORDS.format(contractions=_CONTRACTIONS, digits="")
_CASED: Final = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*"
    r"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{contractions}"
    r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+"
    r"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{contractions}"
    r"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN: Final = _CASED.format(contractions="", digits="")
_GPT4O: Final = _CASED.format(contractions=f"{_CONTRACTIONS}?", digits="{1,3}")


@dataclass(frozen=True, slots=True)
class _Pre:
    """A published pre-tokenizer: one regular expression, None for GPT-2's own.

    `splits_digits` makes each digit a part. `adds_bos` is the default for files without that flag.
    """

    pattern: str | None = None
    splits_digits: bool = False
    is_nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_GPT2: Final = _Pre()
_DIGITS: Final = _Pre(splits_digits=True)
_PRE: Final[Mapping[str, _Pre]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Pre(_QWEN2, is_nfc=True)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3"),
        _Pre(_LLAMA3, ignores_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Pre(_LLAMA3)),
    "tekken": _Pre(_TEKKEN, ignores_merges=True, adds_bos=True),
    "gpt-4o": _Pre(_GPT4O),
}
# Tokens that end a turn, regardless of the metadata: llama.cpp recognizes them by text.
_ENDS: Final = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
    *("<|end_of_text|>", "<EOT>", "_<EOT>"),
)
# Phi-3's special tokens that keep spaces to their right; its other ones absorb them.
_PHI3_PLAIN: Final = frozenset({"<unk>", "<s>", "<|endoftext|>"})


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The texts of the files that describe a tokenizer; `chat_template` is None for a base model.

    `ids` are the ids of `bos`, `eos`, `unk` and `pad`; `end_ids` end a sequence.
    """

    tokenizer: str
    tokenizer_config: dict[str, Any]
    chat_template: str | None
    ids: Mapping[str, int]
    end_ids: Sequence[int]


def make_tokenizer(header: GGUFHeader) -> TokenizerFiles:
    """Return the tokenizer of a file; raise `ModelRefused` if a part is missing or unsupported."""
    tables = _Tables(header)
    kind = header.metadata.get(f"{_KEY}model")
    if kind not in {"gpt2", "llama"}:
        raise ModelRefused(
            f"{header.path}: the GGUF tokenizer {kind!r} is not supported (supported: 'gpt2', "
            "'llama'): use the model in transformers' format."
        )
    build = _sentencepiece if tables.is_sentencepiece else _byte_level
    try:
        tokenizer, adds_bos = build(tables)
    except ModelRefused:
        raise
    except Exception as exc:  # the library raises no specific class for a merge without a token
        raise ModelRefused(
            f"{header.path}: the tokenizer tables are inconsistent ({first_line_of(exc)})."
        ) from exc
    tokenizer.add_special_tokens(list(tables.added(is_special=True)))
    tokenizer.add_tokens(list(tables.added(is_special=False)))
    _set_template(tokenizer, tables, adds_bos=adds_bos)
    ids = tables.named_ids
    template = header.metadata.get("tokenizer.chat_template")
    return TokenizerFiles(
        tokenizer=tokenizer.to_str(),
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{f"{name}_token": tables.tokens[token_id] for name, token_id in ids.items()},
        },
        chat_template=template if isinstance(template, str) else None,
        ids=ids,
        end_ids=tables.end_ids(),
    )


class _Tables:
    """The tables of a tokenizer: each token's text, type and score, and the merges."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.tokens: list[str] = self._table("tokens", str)
        if len({*self.tokens}) < len(self.tokens):
            self.tokens = _unique(self.tokens)
        default = [_NORMAL] * len(self.tokens)
        self.types: list[int] = self._table("token_type", int, default)
        self.named_ids = {
            name: token_id
            for name, key in (
                ("bos", "bos"),
                ("eos", "eos"),
                ("unk", "unknown"),
                ("pad", "padding"),
            )
            if (token_id := self.token_id(key)) is not None
        }

    def _table(self, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        values = self.header.metadata.get(f"{_KEY}{key}", default)
        if not isinstance(values, list) or not all(type(value) is kind for value in values[:1]):
            raise ModelRefused(
                f"{self.header.path} has no table {_KEY}{key}: it is not a complete model."
            )
        if default is not None and len(values) != len(default):
            raise ModelRefused(
                f"{self.header.path} is damaged: {_KEY}{key} has {len(values)} entries for "
                f"{len(default)} tokens."
            )
        return values

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a switch of the tokenizer."""
        return bool(self.header.metadata.get(f"{_KEY}{key}", default))

    def token_id(self, key: str) -> int | None:
        """Return the id of a special token by its name in the file."""
        token_id = self.header.metadata.get(f"{_KEY}{key}_token_id")
        is_one = type(token_id) is int and 0 <= token_id < len(self.tokens)
        return token_id if is_one else None

    def merges(self) -> list[tuple[str, str]]:
        """Return the merges of a byte-level vocabulary, the first ones first."""
        pairs = (merge.partition(" ") for merge in self._table("merges", str))
        return [(left, right) for left, _, right in pairs]

    def scores(self) -> list[float]:
        """Return the score of each token."""
        return self._table("scores", float, [0.0] * len(self.tokens))

    def added(self, *, is_special: bool) -> Iterator[Any]:
        """Yield the tokens that are not built from others."""
        from tokenizers import AddedToken

        kinds = {_CONTROL, _UNKNOWN} if is_special else {_USER_DEFINED}
        is_phi3 = self.header.architecture == "phi3" and self.is_sentencepiece
        for token, kind in zip(self.tokens, self.types, strict=True):
            if kind in kinds:
                takes_spaces = is_phi3 and token not in _PHI3_PLAIN
                yield AddedToken(token, special=is_special, normalized=False, rstrip=takes_spaces)

    @property
    def is_sentencepiece(self) -> bool:
        """Return whether this is a SentencePiece vocabulary."""
        return self.header.metadata.get(f"{_KEY}model") == "llama"

    def end_ids(self) -> list[int]:
        """Return the tokens that end a sequence: the file's own and well-known ones."""
        named = (self.token_id(key) for key in ("eos", "eot", "eom"))
        texts = {token: token_id for token_id, token in enumerate(self.tokens)}
        well_known = (texts.get(token) for token in _ENDS)
        return sorted({token_id for token_id in (*named, *well_known) if token_id is not None})


def _unique(tokens: Sequence[str]) -> list[str]:
    """Return tokens with unique names for repetitions, such as padding of a table."""
    seen: set[str] = set()
    names = []
    for token_id, token in enumerate(tokens):
        name = f"{token}[{token_id}]" if token in seen else token
        seen.add(name)
        names.append(name)
    return names


def _byte_level(tables: _Tables) -> tuple[Any, bool]:
    """Return a byte-level BPE tokenizer, and whether it puts a token before a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = tables.header.metadata.get(f"{_KEY}pre")
    pre = _PRE.get(str(name))
    if pre is None:
        raise ModelRefused(
            f"{tables.header.path}: the GGUF pre-tokenizer {name!r} is not supported: use the "
            "model in transformers' format, or convert it again with a current llama.cpp."
        )
    vocabulary = {token: token_id for token_id, token in enumerate(tables.tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, tables.merges(), ignore_merges=pre.ignores_merges))
    if pre.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if pre.splits_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), "isolated"))
    steps.append(
        pre_tokenizers.ByteLevel(
            add_prefix_space=tables.flag("add_space_prefix", default=False),
            use_regex=pre.pattern is None,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.adds_bos


def _sentencepiece(tables: _Tables) -> tuple[Any, bool]:
    """Return a SentencePiece BPE tokenizer, which puts a token before a text."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: token_id for token_id, token in enumerate(tables.tokens)}
    unknown = tables.named_ids.get("unk", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            _merges_by_score(tables, vocabulary),
            unk_token=tables.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = tables.flag("add_space_prefix", default=True)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _merges_by_score(tables: _Tables, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose joined text is a token, the best score first.

    Pairs with equal scores are in transformers' order: the longer left part first. User-defined
    tokens come before all others.
    """
    ranked: list[tuple[float, int, str, str]] = []
    for token, score, kind in zip(tables.tokens, tables.scores(), tables.types, strict=True):
        if kind not in {_NORMAL, _USER_DEFINED}:
            continue
        best = math.inf if kind == _USER_DEFINED else score
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        usable = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        usable.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        ranked += [(-best, -len(left), left, right) for left, right in usable]
    ranked.sort(key=lambda one: one[:2])
    return [(left, right) for _, _, left, right in ranked]


def _set_template(tokenizer: Any, tables: _Tables, *, adds_bos: bool) -> None:
    """Make the tokenizer put special tokens around a text, if the file requires it."""
    from tokenizers.processors import TemplateProcessing

    bos, eos = tables.named_ids.get("bos"), tables.named_ids.get("eos")
    before = bos if tables.flag("add_bos_token", default=adds_bos) else None
    after = eos if tables.flag("add_eos_token", default=False) else None
    if before is None and after is None:
        return
    around = [None if one is None else tables.tokens[one] for one in (before, after)]
    single = [part for part in (around[0], "$A", around[1]) if part is not None]
    tokenizer.post_processor = TemplateProcessing(
        single=single,
        special_tokens=[(tables.tokens[one], one) for one in (before, after) if one is not None],
    )


def config_text(config: Mapping[str, Any]) -> str:
    """Return a JSON object as the text of a file."""
    return json.dumps(config, ensure_ascii=False, indent=2)

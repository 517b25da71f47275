"""Tiny random models whose tokenizers spell labels in several ways, and the sum over all of them.

The sum is transformers' own, by brute force: every sequence of tokens whose bytes are a label, or a
space and the label (unless the prompt ends with a space or a new line), has the product of its
next-token probabilities after the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from tests.engine.families import VOCAB, build

END = "</s>"
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Few enough that most labels are several tokens, and that some are spelled in five ways.
_MERGES = [("Y", "e"), ("e", "s"), ("Ye", "s"), (" ", "N"), (" ", "Y"), (" N", "o"), ("N", "o")]
_MERGES += [("A", "B"), (" ", "A"), (" A", "C"), ("A", "A"), (" ", "1"), ("B", "A"), (" ", "B")]
_BYTE_TOKEN = re.compile("<0x(..)>")


def byte_level() -> PreTrainedTokenizerFast:
    """Return a tokenizer of byte-level BPE, like those of GPT-2, Qwen and Llama 3."""
    chars = _byte_chars()
    merges = [tuple(part.replace(" ", "Ġ") for part in pair) for pair in _MERGES]
    tokens = ["<unk>", END, "<s>", *chars.values(), *(first + second for first, second in merges)]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _pretrained(backend)


def sentencepiece() -> PreTrainedTokenizerFast:
    """Return a tokenizer of Llama 2's kind: a mark for spaces, and bytes, which letters repeat."""
    merges = [tuple(part.replace(" ", "▁") for part in pair) for pair in _MERGES]
    tokens = ["<unk>", END, "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokens += [*"YesNoABC123", *(first + second for first, second in merges)]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return _pretrained(backend, TEMPLATE.replace("[assistant]", "[assistant]\n"))


def _pretrained(backend: Backend, template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    assert backend.get_vocab_size() <= VOCAB
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token=END,
        unk_token="<unk>",
        chat_template=template,
    )


def _byte_chars() -> dict[int, str]:
    """Return the character that stands for each byte in byte-level BPE, as GPT-2 defines it."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    others = {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    return {byte: chr(byte) for byte in shown} | others


def save_model(folder: Path, family: str, tokenizer: PreTrainedTokenizerFast) -> nn.Module:
    """Save a family's tiny model, with some tokens far likelier than others, and return it."""
    network = build(family, max_position_embeddings=4096)
    network.get_output_embeddings().weight.data *= 2
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return network


class Spellings:
    """All ways to spell labels by a tokenizer's tokens, and their probabilities by a network."""

    def __init__(self, network: nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
        self._network = network
        byte_of = {char: byte for byte, char in _byte_chars().items()}
        is_byte_level = "Ġ" in tokenizer.get_vocab()
        self._pieces = {}
        for token, number in tokenizer.get_vocab().items():
            if number in tokenizer.all_special_ids:
                continue
            if is_byte_level:
                self._pieces[number] = bytes(byte_of[char] for char in token)
            elif match := _BYTE_TOKEN.fullmatch(token):
                self._pieces[number] = bytes.fromhex(match[1])
            else:
                self._pieces[number] = token.replace("▁", " ").encode()

    def paths(self, text: bytes) -> Iterator[tuple[int, ...]]:
        """Yield every sequence of tokens whose bytes are a text."""
        if not text:
            yield ()
        for number, piece in self._pieces.items():
            if text.startswith(piece):
                yield from ((number, *rest) for rest in self.paths(text[len(piece) :]))

    @torch.inference_mode()
    def masses(self, prompt: Sequence[int], labels: Sequence[str]) -> list[float]:
        """Return the probability of each label after a prompt, over the whole vocabulary."""
        next_of: dict[tuple[int, ...], Any] = {}

        def probability(path: tuple[int, ...]) -> float:
            total = 0.0
            for place, token in enumerate(path):
                before = path[:place]
                if before not in next_of:
                    ids = torch.tensor([[*prompt, *before]])
                    logits = self._network(ids, use_cache=False).logits[0, -1]
                    next_of[before] = logits.double().log_softmax(-1)
                total += float(next_of[before][token])
            return float(torch.tensor(total, dtype=torch.float64).exp())

        before = "" if self._pieces.get(prompt[-1], b"").isspace() else " "
        return [
            sum(
                probability(path)
                for spelling in {label, before + label}
                for path in self.paths(spelling.encode())
            )
            for label in labels
        ]

"""How logits change before a token is chosen: penalties, bias, bans and masks, on the device.

What came before is found in a row's history: a bit for each token that was seen, and one for each
that was generated. What is added to logits, bias, bans, and what is due to how often a token came,
takes four bytes a token of the vocabulary; few rows have any.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.asking import NUM_WORDS, Asked, Run, word_of
from engine.kernels.triton.choices import choose
from engine.kernels.triton.launching import arch_of, launch

REPETITION, PRESENCE, FREQUENCY = map(word_of, ("repetition", "presence", "frequency"))
HISTORY, ADDS, MASK = map(word_of, ("history", "adds", "mask"))
PAGES, NUM_PROMPT, NUM_KNOWN = map(word_of, ("pages", "num_prompt", "num_known"))


class Shapes(NamedTuple):
    """What logits are changed by: words of 32 tokens and numbers of each token, row after row."""

    bits: Tensor  # [H, 2, V in words] int32: was seen, was generated
    adds: Tensor  # [A, V] fp32
    masks: Tensor  # [M, words] int32


def shapes_of(asked: Asked, run: Run, vocabulary: int) -> Shapes:
    """Prepare how the rows of a run are shaped.

    Moves 4 bytes an id of its histories, and for each an atomic write or two; before, zeroes
    `V / 4` bytes a history and 4 · V bytes a row that has numbers added.
    """
    device, count = asked.records.device, run.stop - run.first
    words = triton.cdiv(vocabulary, 32)
    bits = torch.zeros(asked.num_histories, 2, words, dtype=torch.int32, device=device)
    adds = torch.zeros(run.num_adds, vocabulary, device=device)
    num_entries = run.entries.stop - run.entries.start
    choice = choose("add_entries", arch_of(device))
    num_blocks = triton.cdiv(num_entries, choice.sizes["BLOCK"])
    entries = (asked.places, asked.added, adds, run.entries.start, num_entries)
    launch(_add_entries, (num_blocks,), *entries, choice=choice)
    choice = choose("note_histories", arch_of(device))
    grid = (count, triton.cdiv(asked.longest, choice.sizes["BLOCK"]))
    tokens = (asked.records, asked.ids, asked.pages)
    sizes = (run.first, vocabulary, words)
    launch(_note_histories, grid, *tokens, bits, adds, *sizes, choice=choice, PAGE=asked.page_size)
    return Shapes(bits, adds, asked.masks)


@triton.jit(do_not_specialize=["first", "count"])
def _add_entries(places, added, adds, first, count, BLOCK: tl.constexpr):
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = entries < count
    place = tl.load(places + first + entries, is_there, other=0)
    tl.atomic_add(adds + place, tl.load(added + first + entries, is_there, other=0.0), is_there)


@triton.jit(do_not_specialize=["first", "vocabulary", "words"])
def _note_histories(
    asked,
    ids,
    pages,
    bits,
    adds,
    first,
    vocabulary,
    words,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    record = asked + (first + tl.program_id(0)) * NUM_WORDS
    num_known = tl.load(record + NUM_KNOWN)
    if tl.program_id(1) * BLOCK < num_known:
        places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        is_known = places < num_known
        page = tl.load(pages + tl.load(record + PAGES) + places // PAGE, is_known, other=0)
        token = tl.load(ids + page.to(tl.int64) * PAGE + places % PAGE, is_known, other=-1)
        is_known &= (token >= 0) & (token < vocabulary)
        is_generated = is_known & (places >= tl.load(record + NUM_PROMPT))
        seen = bits + tl.load(record + HISTORY).to(tl.int64) * 2 * words
        bit = tl.full([BLOCK], 1, tl.int32) << (token % 32)
        tl.atomic_or(seen + token // 32, bit, is_known)
        tl.atomic_or(seen + words + token // 32, bit, is_generated)
        frequency = tl.load(record + FREQUENCY).to(tl.float32, bitcast=True)
        if frequency != 0:
            counted = adds + tl.load(record + ADDS).to(tl.int64) * vocabulary + token
            tl.atomic_add(counted, tl.zeros([BLOCK], tl.float32) - frequency, is_generated)


@triton.jit
def shaped(numbers, columns, is_there, vocabulary, shape):
    """Return what fp32 logits at these columns of a row become, minus infinity where none is.

    `shape` is its record, then `Shapes`, and the words of a row of bits and of a mask.
    """
    record, bits, adds, masks, words, mask_words = shape
    repetition = tl.load(record + REPETITION).to(tl.float32, bitcast=True)
    presence = tl.load(record + PRESENCE).to(tl.float32, bitcast=True)
    seen = bits + tl.load(record + HISTORY).to(tl.int64) * 2 * words + columns // 32
    if repetition != 1:
        is_seen = _bit(tl.load(seen, is_there, other=0), columns)
        weaker = tl.where(numbers > 0, tl.div_rn(numbers, repetition), numbers * repetition)
        numbers = tl.where(is_seen, weaker, numbers)
    if presence != 0:
        is_said = _bit(tl.load(seen + words, is_there, other=0), columns)
        numbers = tl.where(is_said, numbers - presence, numbers)
    added = tl.load(record + ADDS)
    if added >= 0:
        numbers += tl.load(adds + added.to(tl.int64) * vocabulary + columns, is_there, other=0.0)
    mask = tl.load(record + MASK)
    if mask >= 0:
        of_mask = masks + mask.to(tl.int64) * mask_words + columns // 32
        is_allowed = _bit(tl.load(of_mask, is_there, other=0), columns)
        numbers = tl.where(is_allowed, numbers, -float("inf"))
    return tl.where(is_there, numbers, -float("inf"))


@triton.jit
def _bit(words, columns):
    return ((words >> (columns % 32)) & 1) != 0

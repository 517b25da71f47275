"""Logits processors on the device: penalties, logit bias, banned tokens and grammar bitmasks.

A row's history is two bitmaps: the tokens that were seen, and those that were generated. Bias, bans
and the frequency penalty are summed into a dense row of four bytes a token of the vocabulary; few
rows have one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import arch_of, cdiv, launch
from .sampling_inputs import NUM_WORDS, RowChunk, SamplingInputs, word_offset
from .tuned_tiles import config_for

REPETITION, PRESENCE, FREQUENCY = map(word_offset, ("repetition", "presence", "frequency"))
HISTORY, ADDS, MASK = map(word_offset, ("history", "adds", "mask"))
PAGES, NUM_PROMPT, NUM_KNOWN = map(word_offset, ("pages", "num_prompt", "num_known"))


class ProcessorInputs(NamedTuple):
    """Inputs of the logits processors: bitmaps in words of 32 tokens, and dense biases."""

    bits: Tensor  # [H, 2, V in words] int32: was seen, was generated
    adds: Tensor  # [A, V] fp32
    masks: Tensor  # [M, words] int32


def prepare_processors(inputs: SamplingInputs, chunk: RowChunk, vocabulary: int) -> ProcessorInputs:
    """Build the bitmaps and dense biases of a chunk of rows.

    Moves 4 bytes an id of its histories, and for each an atomic write or two; before, zeroes
    `V / 4` bytes a history and 4 · V bytes a row with a dense bias.
    """
    device, count = inputs.records.device, chunk.stop - chunk.first
    words = cdiv(vocabulary, 32)
    bits = torch.zeros(inputs.num_histories, 2, words, dtype=torch.int32, device=device)
    adds = torch.zeros(chunk.num_adds, vocabulary, device=device)
    num_entries = chunk.entries.stop - chunk.entries.start
    config = config_for("add_entries", arch_of(device))
    num_blocks = cdiv(num_entries, config.sizes["BLOCK"])
    entries = (inputs.places, inputs.added, adds, chunk.entries.start, num_entries)
    launch(_add_entries, (num_blocks,), *entries, config=config)
    config = config_for("note_histories", arch_of(device))
    grid = (count, cdiv(inputs.longest, config.sizes["BLOCK"]))
    tokens = (inputs.records, inputs.ids, inputs.pages)
    sizes = (chunk.first, vocabulary, words)
    launch(_note_histories, grid, *tokens, bits, adds, *sizes, config=config, PAGE=inputs.page_size)
    return ProcessorInputs(bits, adds, inputs.masks)


@triton.jit(do_not_specialize=["first", "count"])
def _add_entries(places, added, adds, first, count, BLOCK: tl.constexpr):
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = entries < count
    place = tl.load(places + first + entries, is_there, other=0)
    tl.atomic_add(adds + place, tl.load(added + first + entries, is_there, other=0.0), is_there)


@triton.jit(do_not_specialize=["first", "vocabulary", "words"])
def _note_histories(
    inputs,
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
    record = inputs + (first + tl.program_id(0)) * NUM_WORDS
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
    """Process fp32 logits at these columns of a row; minus infinity beyond the last column.

    `shape` is its record, then `ProcessorInputs`, and the words of a row of bits and of a mask.
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
        is_repeated = _bit(tl.load(seen + words, is_there, other=0), columns)
        numbers = tl.where(is_repeated, numbers - presence, numbers)
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

"""Logprobs of tokens on GPUs; the reference is `engine.kernels.sampling.compute_logprobs`."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from .. import sampling as reference
from ..sampling import Logprobs, compute_ranks
from .launch import arch_of, launch
from .logit_groups import GROUP, ROW, mass, measure_groups, order
from .logits_processors import ProcessorInputs
from .sampling_inputs import NUM_WORDS, default_records, send_arrays
from .tuned_tiles import config_for

__all__ = ["compute_logprobs", "compute_ranks"]

# Each of the best moves `GROUP` logits; beyond this number a sort moves less.
MOST_SEARCHED = 64
NOTHING = tl.constexpr(-(2**31))  # below the order of any number


def compute_logprobs(logits: Tensor, rows: NDArray[np.int64], chosen: Tensor, top: int) -> Logprobs:
    """See `SamplingOps.compute_logprobs`; moves the logits once, and `GROUP` a top one.

    logits `[N, V]` of any float dtype, their rows dense; chosen `[M]` int64.
    """
    if top > MOST_SEARCHED:
        return reference.compute_logprobs(logits, rows, chosen, top)
    vocabulary, count = logits.shape[1], len(rows)
    top = min(top, vocabulary)
    requests = default_records(count)
    requests["row"], requests["factor"] = rows, 1
    records, none = send_arrays([requests, np.zeros(0, np.int32)], logits.device)
    as_they_are = ProcessorInputs(none.view(0, 2, 0), none.view(torch.float32), none.view(0, 0))
    measured = measure_groups(logits, records, as_they_are, 0, count)
    logprobs = logits.new_empty(count, dtype=torch.float32)
    top_logprobs = logits.new_empty(count, top, dtype=torch.float32)
    top_ids = logits.new_empty(count, top, dtype=torch.int64)
    launch(
        _score,
        (count,),
        logits,
        records,
        chosen,
        measured.peaks,
        measured.weights,
        logprobs,
        top_logprobs,
        top_ids,
        logits.stride(0),
        vocabulary,
        top,
        config=config_for("score_tokens", arch_of(logits.device)),
        ROOM=measured.peaks.shape[1],
        GROUP=GROUP,
    )
    return Logprobs(logprobs, top_logprobs, top_ids)


@triton.jit(do_not_specialize=["top"])
def _score(
    logits,
    records,
    chosen,
    peaks,
    weights,
    logprobs,
    top_logprobs,
    top_ids,
    stride,
    vocabulary,
    top,
    ROOM: tl.constexpr,
    GROUP: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    row = logits + tl.load(records + number * NUM_WORDS + ROW).to(tl.int64) * stride
    groups = tl.arange(0, ROOM)
    is_group = groups * GROUP < vocabulary
    peak = tl.load(peaks + number * ROOM + groups, is_group, other=-float("inf"))
    weight = tl.load(weights + number * ROOM + groups, is_group, other=0.0)
    best = tl.max(peak, 0)
    total = best + tl.log(tl.sum(weight * mass(peak, best, 1.0), 0))
    logit = tl.load(row + tl.load(chosen + number)).to(tl.float32)
    tl.store(logprobs + number, logit - total)
    keys = tl.where(is_group, order(peak), NOTHING)  # of the greatest not yet taken
    taken, token = tl.full([], 2**31 - 1, tl.int32), tl.full([], -1, tl.int32)
    for place in range(top):
        key = tl.max(keys, 0)
        group = tl.min(tl.where(keys == key, groups, ROOM), 0)
        columns = group * GROUP + tl.arange(0, GROUP)
        numbers = tl.load(row + columns, columns < vocabulary, other=0.0).to(tl.float32)
        of_columns = tl.where(columns < vocabulary, order(numbers), NOTHING)
        # Ties come in the order of their tokens, over all groups.
        after = tl.where(key < taken, -1, token)
        is_next = (of_columns == key) & (columns > after)
        taken, token = key, tl.min(tl.where(is_next, columns, vocabulary - 1), 0)
        logit = tl.sum(tl.where(columns == token, numbers, 0.0), 0)
        tl.store(top_logprobs + number * top + place, logit - total)
        tl.store(top_ids + number * top + place, token.to(tl.int64))
        is_left = (of_columns < key) | ((of_columns == key) & (columns > token))
        keys = tl.where(groups == group, tl.max(tl.where(is_left, of_columns, NOTHING), 0), keys)

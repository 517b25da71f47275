"""Ahead-of-time compilation (precompile): `python -m tidemill.engine.kernels.cpu.compile_all`.

Run by the install and by the image build, so that no run has to compile the CPU kernels. Each is
called once with a few numbers of each dtype supported here, in as many processes as cores: within
one, numba compiles under a lock. Cached kernels are only read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np
import torch
from numba import types

from ..adapters import AdapterMapping, AdapterWeights, LinearAdapters
from ..attention import AttentionShape, HeadNorms
from ..elementwise import Gate
from ..paged_step import Span, paged_step
from ..quantised import quantise_int8
from ..recurrence import GatedDelta, RecurrentShape, RuleWeights, StateSpace
from ..sampling import greedy_metadata
from . import adapters, elementwise, int8, linear, ngram, sampling, thread_pool
from .attention import CpuAttention
from .recurrence import CpuRecurrence

CPU = torch.device("cpu")
HEADS, KEY_HEADS, WIDTH = 2, 1, 16
VOCABULARY = 32


def dtypes() -> list[torch.dtype]:
    """Return the dtypes of models on this machine; parity checks always need fp32."""
    # torch has no public function for this.
    has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # noqa: SLF001
    return [torch.float32, *([torch.bfloat16] if has_bfloat16 else [])]


def attend(dtype: torch.dtype) -> None:
    """Enter, store and attend a step of two decodes and a chunk."""
    shape = AttentionShape(HEADS, KEY_HEADS, WIDTH, WIDTH, 1.0)
    backend = CpuAttention([shape], 4, dtype, CPU)
    backend.prepare(
        paged_step(
            [Span(0, stop, np.array([page])) for page, stop in enumerate((1, 1, 2))],
            backend.page_size,
            CPU,
            logit_rows=np.arange(4),
        )
    )
    norm = torch.ones(WIDTH)
    qkv = torch.zeros(4, (HEADS + 2 * KEY_HEADS) * WIDTH, dtype=dtype)
    query = backend.store_qkv(0, qkv, torch.zeros(4, WIDTH), HeadNorms(norm, norm, 1e-6))
    stored = torch.zeros(4, KEY_HEADS, WIDTH, dtype=dtype)
    backend.store(0, stored, stored)
    backend.attend(0, query)


def multiply_and_norm(dtype: torch.dtype) -> None:
    """Run the linear layers and norms of a decoder block."""
    x, weight = torch.zeros(2, WIDTH, dtype=dtype), torch.zeros(2 * WIDTH, WIDTH, dtype=dtype)
    packed = linear.prepare(weight, None, Gate())
    if packed is not None:
        packed(x)
        packed.embed(torch.zeros(1, dtype=torch.int64))
    mapping = AdapterMapping()
    mapping.update(np.array([0, 1]))
    own = AdapterWeights(torch.zeros(2, WIDTH, dtype=dtype), torch.zeros(2 * WIDTH, 2, dtype=dtype))
    product = adapters.prepare_adapted(weight, None, Gate(), LinearAdapters([own], mapping))
    if product is not None:
        product(x)
    norm = torch.ones(WIDTH)
    layer = int8.prepare(quantise_int8(weight), None, Gate())
    if layer is not None:
        layer(x)
        layer.normed(norm, 1e-6)(None, x)
        layer.normed(norm, 1e-6)(x, x.clone())
    elementwise.rms_norm(x, norm, 1e-6)
    elementwise.add_rms_norm(x, x.clone(), norm, 1e-6)
    elementwise.layer_norm(x, norm, norm, 1e-6)
    elementwise.add_layer_norm(x, x.clone(), norm, norm, 1e-6)
    elementwise.act_and_mul(x, Gate())


def recur(dtype: torch.dtype) -> None:
    """Run each recurrence, and the convolution and the gated norm around it."""
    rules = GatedDelta(1, 1, WIDTH, WIDTH), StateSpace(1, WIDTH, 1, WIDTH)
    shapes = [RecurrentShape(3 * WIDTH, 4, rule=rule) for rule in rules]
    backend = CpuRecurrence(shapes, 1, dtype, torch.device("cpu"))
    no = np.zeros(1, np.int64)
    backend.prepare(paged_step([Span(0, 1, no)], 1, CPU, state_sources=no, state_rows=no))
    x, gates = torch.zeros(1, 3 * WIDTH, dtype=dtype), torch.zeros(1, 1, dtype=dtype)
    taps, one = torch.zeros(3 * WIDTH, 4, dtype=dtype), torch.zeros(1)
    backend.convolve(0, x, taps, x[0])
    backend.apply_delta_rule(0, x, gates, gates, RuleWeights(one, one))
    backend.scan(1, x, gates, RuleWeights(one, one, one))
    backend.gate_and_norm(x, x, x[0], 1, 1e-6, is_norm_first=True)


def thread_loop() -> None:
    """Compile the worker loop of the thread pool."""
    thread_pool.worker_loop.compile((types.int64[::1],))


def sample_and_score(dtype: torch.dtype) -> None:
    """Sample a token and compute its logprob and rank."""
    logits = torch.zeros(1, VOCABULARY, dtype=dtype)
    whole = np.zeros(1, np.int64)
    sampling.sample(logits, greedy_metadata(1))
    sampling.compute_logprobs(logits, whole, torch.zeros(1, dtype=torch.int64), 1)
    sampling.compute_ranks(logits, torch.zeros(1, dtype=torch.int64))


def look_up() -> None:
    """Find a match, and draft what follows it."""
    tokens, slots, known = np.ones((1, 8), np.int32), np.zeros(1, np.int64), np.array([6])
    finished = ngram.FinishedRows(16)
    finished.add(np.ones(6, np.int32))
    matches = ngram.find_matches(tokens, slots, known, finished)
    ngram.write_drafts(tokens, slots, known, finished, matches.places, np.ones(1, np.int64))


def jobs() -> list[Callable[[], None]]:
    """Return jobs that call all kernels once, the longest first."""
    parts = (attend, recur, sample_and_score, multiply_and_norm)
    by_dtype = [partial(part, dtype) for part in parts for dtype in reversed(dtypes())]
    return [*by_dtype, thread_loop, look_up]


def main() -> int:
    """Compile all kernels that are not cached and return the exit status."""
    todo = jobs()
    num_processes = min(len(todo), os.cpu_count() or 1)
    # Spawned, not forked: torch's and numba's state does not survive a fork.
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        for done in [pool.submit(job) for job in todo]:
            done.result()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m engine.kernels.cpu.beforehand`: compiles all kernels, so that no run has to.

Whoever installs the engine or builds an image calls it. Each kernel is called once with a few
numbers of each dtype that a model may have here, in as many processes as there are cores: within
one, compiling holds a lock. What is kept already is only read.
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

from engine.kernels.adapters import Adapting, LowRank, Owners
from engine.kernels.attention import AttentionShape, HeadNorms
from engine.kernels.blocks import Gate
from engine.kernels.cpu import adapters, blocks, products, sampling, threads
from engine.kernels.cpu.attention import CpuAttention
from engine.kernels.sampling import nothing_asked
from engine.kernels.step import Step

CPU = torch.device("cpu")
HEADS, KEY_HEADS, WIDTH = 2, 1, 16
VOCABULARY = 32


def dtypes() -> list[torch.dtype]:
    """Return what models may have here: a proof is made in fp32, whatever comes after it."""
    # torch tells this nowhere else.
    has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # noqa: SLF001
    return [torch.float32, *([torch.bfloat16] if has_bfloat16 else [])]


def attend(dtype: torch.dtype) -> None:
    """Enter, store and attend a step of two decodes and a chunk."""
    shape = AttentionShape(HEADS, KEY_HEADS, WIDTH, WIDTH, 1.0)
    backend = CpuAttention([shape], 4, dtype, CPU)
    backend.prepare(
        Step.pack(
            2,
            CPU,
            token_ids=np.zeros(4, np.int64),
            positions=np.array([0, 0, 0, 1]),
            slots=np.array([0, 1, 2, 3]) * backend.page_size,
            query_starts=np.array([0, 1, 2, 4]),
            context_lengths=np.zeros(3, np.int64),
            page_starts=np.array([0, 1, 2, 3]),
            pages=np.array([0, 1, 2]),
            logit_rows=np.arange(4),
        )
    )
    norm = torch.ones(WIDTH)
    qkv = torch.zeros(4, (HEADS + 2 * KEY_HEADS) * WIDTH, dtype=dtype)
    query = backend.enter(0, qkv, torch.zeros(4, WIDTH), HeadNorms(norm, norm, 1e-6))
    stored = torch.zeros(4, KEY_HEADS, WIDTH, dtype=dtype)
    backend.store(0, stored, stored)
    backend.attend(0, query)


def multiply_and_norm(dtype: torch.dtype) -> None:
    """Run what a block of a decoder is made of, but for attention."""
    x, weight = torch.zeros(2, WIDTH, dtype=dtype), torch.zeros(2 * WIDTH, WIDTH, dtype=dtype)
    product = products.prepare(weight, None, Gate())
    if product is not None:
        product(x)
    owners = Owners()
    owners.tell(np.array([0, 1]))
    own = LowRank(torch.zeros(2, WIDTH, dtype=dtype), torch.zeros(2 * WIDTH, 2, dtype=dtype))
    product = adapters.prepare_adapted(weight, None, Gate(), Adapting([own], owners))
    if product is not None:
        product(x)
    norm = torch.ones(WIDTH)
    blocks.rms_norm(x, norm, 1e-6)
    blocks.add_rms_norm(x, x.clone(), norm, 1e-6)
    blocks.layer_norm(x, norm, norm, 1e-6)
    blocks.add_layer_norm(x, x.clone(), norm, norm, 1e-6)
    blocks.gated(x, Gate())


def serve() -> None:
    """Compile what other threads run, for as long as their process is there."""
    threads.serve.compile((types.int64[::1],))


def choose(dtype: torch.dtype) -> None:
    """Choose a token and score it."""
    logits = torch.zeros(1, VOCABULARY, dtype=dtype)
    whole = np.zeros(1, np.int64)
    sampling.choose(logits, nothing_asked(1))
    sampling.log_probabilities(logits, whole, torch.zeros(1, dtype=torch.int64), 1)


def jobs() -> list[Callable[[], None]]:
    """Return what calls all kernels once, those first that take longest."""
    parts = (attend, choose, multiply_and_norm)
    return [*(partial(part, dtype) for part in parts for dtype in reversed(dtypes())), serve]


def main() -> int:
    """Compile all that is not kept yet and return the exit status."""
    todo = jobs()
    num_processes = min(len(todo), os.cpu_count() or 1)
    # A fresh start of each: what torch and numba hold does not outlive a fork.
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        for done in [pool.submit(job) for job in todo]:
            done.result()
    return 0


if __name__ == "__main__":
    sys.exit(main())

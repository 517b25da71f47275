"""Published throughput of batch workloads that anyone can repeat, with our predictions.

datatrove's sweep (its `examples/inference/benchmark`): vLLM 0.15 on one H100, the best settings of
a sweep, 10,000 documents of FineWeb-Edu rewritten at temperature 0. Documents have 1,034 tokens on
average (10 billion tokens in 9.67 million documents), the instruction some 60. Answers may have
4,096 tokens; their actual length is not published, and assumed to be 1,024 here. For Qwen3-30B-A3B
the figure is that of vLLM's defaults on one H100: the best, 5,310 a GPU, was on two, with room for
nearly six times as many sequences as one GPU has next to 61 GB of weights.

MLPerf Inference, Offline, Llama-3.1-8B: vLLM in fp8 on one H100. 13,368 articles of CNN-DailyMail,
778 tokens on average, summarised in up to 128 tokens; the reference's answers have 611 characters
on average, so nearly all have the full length.
"""

from __future__ import annotations

from typing import NamedTuple

from bench.gpu.mixes import Mix

DATATROVE = Mix(1100, 1024)
MLPERF = Mix(778, 128)


class Anchor(NamedTuple):
    """Published output tokens per second and GPU, and our expected share of it."""

    source: str
    published: float
    expected: float


# By model, the form of its weights, and mix.
ANCHORS: dict[tuple[str, str, Mix], Anchor] = {
    ("qwen3-8b", "", DATATROVE): Anchor("datatrove", 6443, 0.9),
    ("qwen3-0.6b", "", DATATROVE): Anchor("datatrove", 14_069, 0.95),
    ("qwen3-30b-a3b", "", DATATROVE): Anchor("datatrove, vLLM's defaults", 2977, 0.85),
    ("gpt-oss-20b", "mxfp4", DATATROVE): Anchor("datatrove, best", 14_671, 0.9),
    ("smollm2-1.7b", "", DATATROVE): Anchor("datatrove, best with drafts", 9220, 0.8),
    ("llama-3-8b", "fp8", MLPERF): Anchor("MLPerf Offline", 5777, 0.85),
}

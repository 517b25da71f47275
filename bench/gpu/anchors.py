"""Published throughput of batch workloads that anyone can repeat, with our predictions.

datatrove's sweep (its `examples/inference/benchmark`): vLLM 0.15 on one H100, the best settings of
a sweep, 10,000 documents of FineWeb-Edu rewritten at temperature 0. Documents are 1,034 tokens in
the mean (10 billion of 9.67 million documents), the instruction some 60. Answers may have 4,096
tokens; how many they have is not published, and taken to be 1,024 here. Of Qwen3-30B-A3B it is what
vLLM's defaults gave on one H100: the best, 5,310 a GPU, was on two, which have room for nearly
six times as many sequences as one GPU has next to 61 GB of weights.

MLPerf Inference, Offline, Llama-3.1-8B: vLLM in fp8 on one H100. 13,368 articles of CNN-DailyMail,
778 tokens in the mean, summed up in up to 128 tokens; the reference's answers are 611 characters in
the mean, so next to all are as long as they may be.
"""

from __future__ import annotations

from typing import NamedTuple

from bench.gpu.mixes import Mix

DATATROVE = Mix(1100, 1024)
MLPERF = Mix(778, 128)


class Anchor(NamedTuple):
    """Output tokens a second and GPU that are published, and the share of it expected of us."""

    source: str
    published: float
    expected: float


# By model, whether its products are in fp8, and mix.
ANCHORS: dict[tuple[str, bool, Mix], Anchor] = {
    ("qwen3-8b", False, DATATROVE): Anchor("datatrove", 6443, 0.9),
    ("qwen3-0.6b", False, DATATROVE): Anchor("datatrove", 14_069, 0.95),
    ("qwen3-30b-a3b", False, DATATROVE): Anchor("datatrove, vLLM's defaults", 2977, 0.85),
    ("llama-3-8b", True, MLPERF): Anchor("MLPerf Offline", 5777, 0.85),
}

"""Totals of several engines of one model: combined info and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace

from tidemill.protocol.contract import EngineInfo, EngineStats


def total_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Return the combined info: GPUs and sequences in a step are sums."""
    return replace(
        infos[0],
        num_gpus=sum(info.num_gpus for info in infos),
        max_num_seqs=sum(info.max_num_seqs for info in infos),
    )


def total_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Return the sums of all statistics; the KV cache's usage is the mean."""
    if not stats:
        return EngineStats()
    total = EngineStats(*map(sum, zip(*map(astuple, stats), strict=True)))
    return replace(total, kv_cache_usage=total.kv_cache_usage / len(stats))

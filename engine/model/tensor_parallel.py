"""Tensor parallelism: splits a decoder by heads and MLP columns, equally across ranks."""

from __future__ import annotations

from dataclasses import replace

from ..errors import ModelRefused
from ..kernels.communicator import Shard
from ..kernels.recurrence import GatedDelta, StateSpace
from .config.architecture import NO_ATTENTION, Architecture, Block, Recurrence
from .weights.quantised.quantization_config import QuantizationConfig


def check_tensor_parallel_size(
    name: str,
    architecture: Architecture,
    size: int,
    quantization: QuantizationConfig | None = None,
) -> None:
    """Refuse a model that `size` ranks cannot share equally, naming the uneven parts."""
    group = 1 if quantization is None else quantization.experts_group
    for block in architecture.blocks:
        shape = block.attention
        if size > 1 and block.experts is not None and block.experts.has_own_norms:
            raise ModelRefused(
                f"{name}: --tensor-parallel-size {size}: experts next to an MLP, each with its own "
                "norms, do not support tensor parallelism: leave the flag out."
            )
        counts = {"query heads": shape.num_query_heads}
        if block.recurrence is not None:
            counts |= _recurrent_counts(block.recurrence)
        if size > 1 and any(one.first or one.num_rows for one in block.multipliers):
            raise ModelRefused(
                f"{name}: --tensor-parallel-size {size}: projections with multipliers do not "
                "support tensor parallelism: leave the flag out."
            )
        if block.experts is None:
            counts["columns of an MLP"] = architecture.intermediate_size
        else:
            counts["columns of an expert"] = block.experts.intermediate_size
            counts["columns of shared experts"] = block.experts.shared_intermediate_size
        uneven = [f"{count:,} {what}" for what, count in counts.items() if count % size]
        columns = counts.get("columns of an expert", 0)
        if size > 1 and columns % size == 0 and columns // size % group:
            uneven.append(f"{columns:,} columns of an expert (with {group} per scale)")
        heads = shape.num_kv_heads
        if heads % size and size % heads:
            uneven.append(f"{heads} key heads")
        if uneven:
            raise ModelRefused(
                f"{name}: --tensor-parallel-size {size}: {' and '.join(uneven)} cannot be split "
                f"evenly across {size} GPUs."
            )


def _recurrent_counts(recurrence: Recurrence) -> dict[str, int]:
    """Return the counts of which each rank must have an equal share."""
    rule = recurrence.shape.rule
    if rule is None:
        return {"channels of a convolution": recurrence.shape.num_channels}
    if isinstance(rule, GatedDelta):
        counts = {"key heads of recurrent layers": rule.num_key_heads}
        return counts | {"value heads of recurrent layers": rule.num_value_heads}
    counts = {"heads of recurrent layers": rule.num_heads}
    if rule.num_groups > 1:
        counts["groups of B and C"] = rule.num_groups
    if recurrence.norm_groups > 1 or (recurrence.norm_groups and recurrence.is_norm_first):
        counts["groups of gated norms"] = recurrence.norm_groups
    return counts


def shard_architecture(architecture: Architecture, shard: Shard) -> Architecture:
    """Return a rank's part of a decoder; its vocabulary is the whole one."""
    if shard.size == 1:
        return architecture
    return replace(
        architecture,
        intermediate_size=len(shard.indices(architecture.intermediate_size)),
        blocks=tuple(_shard_block(block, shard) for block in architecture.blocks),
    )


def _shard_block(block: Block, shard: Shard) -> Block:
    shape, experts = block.attention, block.experts
    attention = shape
    if shape != NO_ATTENTION:
        attention = replace(
            shape,
            num_query_heads=len(shard.indices(shape.num_query_heads)),
            num_kv_heads=len(shard.kv_head_indices(shape.num_kv_heads)),
        )
    if experts is not None:
        experts = replace(
            experts,
            intermediate_size=len(shard.indices(experts.intermediate_size)),
            shared_intermediate_size=len(shard.indices(experts.shared_intermediate_size)),
        )
    recurrence = block.recurrence and _shard_recurrence(block.recurrence, shard)
    return replace(block, attention=attention, experts=experts, recurrence=recurrence)


def _shard_recurrence(recurrence: Recurrence, shard: Shard) -> Recurrence:
    shape, rule, size = recurrence.shape, recurrence.shape.rule, shard.size
    if rule is None:
        return replace(recurrence, shape=replace(shape, num_channels=shape.num_channels // size))
    own: GatedDelta | StateSpace
    if isinstance(rule, GatedDelta):
        own = replace(
            rule,
            num_key_heads=rule.num_key_heads // size,
            num_value_heads=rule.num_value_heads // size,
        )
    else:
        groups = len(shard.kv_head_indices(rule.num_groups))
        own = replace(rule, num_heads=rule.num_heads // size, num_groups=groups)
    return replace(
        recurrence,
        shape=replace(shape, num_channels=sum(own.widths), rule=own),
        norm_groups=recurrence.norm_groups // size,
        is_norm_shared=recurrence.norm_groups == 1,
    )

"""A decoder in equal shares: whole heads, and as many columns of every MLP, for each rank."""

from __future__ import annotations

from dataclasses import replace

from engine.errors import ModelRefused
from engine.kernels.ranks import Share
from engine.model.architecture import Architecture, Block


def check_shares(name: str, architecture: Architecture, size: int) -> None:
    """Refuse a model that so many ranks cannot have equal shares of, naming what is uneven."""
    for block in architecture.blocks:
        shape = block.attention
        counts = {"query heads": shape.num_query_heads}
        if block.experts is None:
            counts["columns of an MLP"] = architecture.inner_size
        else:
            counts["columns of an expert"] = block.experts.width
        uneven = [f"{count:,} {what}" for what, count in counts.items() if count % size]
        heads = shape.num_kv_heads
        if heads % size and size % heads:
            uneven.append(f"{heads} key heads")
        if uneven:
            raise ModelRefused(
                f"{name}: --tensor-parallel-size {size}: {' and '.join(uneven)} cannot be shared "
                f"evenly by {size}."
            )


def shared(architecture: Architecture, share: Share) -> Architecture:
    """Return what a rank computes of a decoder; its vocabulary is told as a whole."""
    if share.size == 1:
        return architecture
    return replace(
        architecture,
        inner_size=len(share.of(architecture.inner_size)),
        blocks=tuple(_shared(block, share) for block in architecture.blocks),
    )


def _shared(block: Block, share: Share) -> Block:
    shape, experts = block.attention, block.experts
    attention = replace(
        shape,
        num_query_heads=len(share.of(shape.num_query_heads)),
        num_kv_heads=len(share.of_key_heads(shape.num_kv_heads)),
    )
    if experts is not None:
        experts = replace(experts, width=len(share.of(experts.width)))
    return replace(block, attention=attention, experts=experts)

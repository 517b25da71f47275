"""Layer groups: attention layers whose keys and values are in the same page lists.

Layers that see all tokens keep all pages; layers with a window or chunks keep only the last pages.
So that any page serves any group, all groups have equally many layers, except the last of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .attention import AttentionShape

# The largest share of layers that a group may lack: pages are as large as the largest group's.
MOST_LACKING = 0.05


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Attention layers by their numbers; `visible` is the shape of their mask, None means all."""

    layers: tuple[int, ...]
    visible: AttentionShape | None = None


def group_layers(shapes: Sequence[AttentionShape], max_model_len: int) -> tuple[LayerGroup, ...]:
    """Return the groups of layers; the first one's see all tokens.

    All layers are one group if none sees all, if windows are at least as long as sequences, or if
    layers' pages would differ in size.
    """
    kinds: dict[tuple[int, int], list[int]] = {}
    for layer, shape in enumerate(shapes):
        is_short = shape.is_causal and 0 < shape.most_visible < max_model_len
        kinds.setdefault((shape.window, shape.chunk) if is_short else (0, 0), []).append(layer)
    pages = {(shape.num_kv_heads, shape.key_dim, shape.value_dim) for shape in shapes}
    if len(pages) != 1 or len(kinds) == 1 or (0, 0) not in kinds:
        return (LayerGroup(tuple(range(len(shapes)))),)
    size = _group_size([len(layers) for layers in kinds.values()])
    whole = kinds.pop((0, 0))
    groups = [LayerGroup(part) for part in _parts(whole, size)]
    for layers in kinds.values():
        groups += [LayerGroup(part, shapes[layers[0]]) for part in _parts(layers, size)]
    return tuple(groups)


def _group_size(counts: Sequence[int]) -> int:
    """Return the largest group size at which groups lack few layers."""
    total = sum(counts)

    def lacking(size: int) -> int:
        return sum(-count % size for count in counts)

    sizes = range(min(counts), 0, -1)
    return next(size for size in sizes if lacking(size) <= MOST_LACKING * total)


def _parts(layers: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(layers[start : start + size]) for start in range(0, len(layers), size)]

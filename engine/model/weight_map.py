"""Weight map: a decoder's weights by role, and the stored tensors that fill them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor

from ..kernels.communicator import Shard
from .architecture import Architecture, Block, Experts

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

# Takes a weight and returns the view of it that a stored tensor is copied to.
Place = Callable[[Tensor], Tensor]

WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Part:
    """A stored tensor by its name and shape, what is read of it, and the place of that in a weight.

    Of its first axes `taken` is read, of all others everything.
    """

    key: str
    shape: tuple[int, ...]
    place: Place
    taken: tuple[range, ...] = ()

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Return the shape of what is read."""
        return (*map(len, self.taken), *self.shape[len(self.taken) :])

    @property
    def count(self) -> int:
        """Return how many numbers are read."""
        return prod(self.read_shape)


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight by the role that it has in the decoder; its parts fill it.

    Of one of some `kinds`, as safetensors say, the numbers stay as they are; others are any floats.
    """

    role: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    kinds: frozenset[str] | None = None


class Band(NamedTuple):
    """Rows `taken` of a stored tensor, which has `height` of them."""

    name: str
    height: int
    taken: range


def weights_of(
    architecture: Architecture, *, has_head: bool = True, shard: Shard = WHOLE
) -> Iterator[Weight]:
    """Yield a rank's share of all weights; those of layer i have roles `i.…`.

    The head's are left out where not wanted.
    """
    yield table("embed_tokens", EMBEDDING, architecture, shard)
    if has_head and not architecture.tie_word_embeddings:
        yield table("lm_head", HEAD, architecture, shard)
    yield whole("norm", "model.norm.weight", architecture.hidden_size)
    for index, block in enumerate(architecture.blocks):
        layer = _Layer(architecture, block, f"{index}.", f"model.layers.{index}.", shard)
        yield from layer.norms()
        yield from layer.attention()
        yield from layer.experts(block.experts) if block.experts else layer.mlp()


@dataclass(frozen=True, slots=True)
class _Layer:
    model: Architecture
    block: Block
    role: str
    prefix: str
    shard: Shard

    def norms(self) -> Iterator[Weight]:
        """Yield the norms before attention and MLP, and with sandwich norms those after."""
        roles = {
            "input_layernorm": "input_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
        }
        if self.model.has_sandwich_norms:
            roles["post_attention_layernorm"] = "post_attention_layernorm"
            roles["pre_feedforward_layernorm"] = "pre_feedforward_layernorm"
            roles["post_feedforward_layernorm"] = "post_feedforward_layernorm"
        for role, name in roles.items():
            yield whole(self.role + role, f"{self.prefix}{name}.weight", self.model.hidden_size)

    def attention(self) -> Iterator[Weight]:
        """Yield what makes queries, keys and values, what joins the heads, norms and sinks."""
        shape, hidden = self.block.attention, self.model.hidden_size
        prefix = f"{self.prefix}self_attn."
        heads = self.shard.indices(shape.num_query_heads)
        queries = _times(heads, shape.key_dim)
        keys = _times(self.shard.kv_head_indices(shape.num_kv_heads), shape.key_dim)
        heights = [shape.num_query_heads, shape.num_kv_heads, shape.num_kv_heads]
        heights = [count * shape.key_dim for count in heights]
        bands = _bands(self.model.names.qkv, heights, [queries, keys, keys])
        yield _banded(f"{self.role}qkv_proj", prefix, "weight", bands, hidden)
        yield _sliced(
            f"{self.role}o_proj", f"{prefix}o_proj.weight", (hidden, heights[0]), None, queries
        )
        if self.model.qkv_bias:
            yield _banded(f"{self.role}qkv_proj_bias", prefix, "bias", bands)
        if self.model.o_proj_bias and self.shard.rank == 0:
            yield whole(f"{self.role}o_proj_bias", f"{prefix}o_proj.bias", hidden)
        if self.model.has_qk_norm:
            for role in ("q_norm", "k_norm"):
                yield whole(self.role + role, f"{prefix}{role}.weight", shape.key_dim)
        if shape.has_sinks:
            count = shape.num_query_heads
            yield _sliced(f"{self.role}sinks", f"{prefix}sinks", (count,), heads)

    def mlp(self) -> Iterator[Weight]:
        """Yield gate and up as one, and down."""
        hidden, inner = self.model.hidden_size, self.model.intermediate_size
        prefix = f"{self.prefix}mlp."
        own = self.shard.indices(inner)
        bands = _bands(self.model.names.gate_up, [inner, inner], [own, own])
        yield _banded(f"{self.role}gate_up_proj", prefix, "weight", bands, hidden)
        yield _sliced(
            f"{self.role}down_proj", f"{prefix}down_proj.weight", (hidden, inner), None, own
        )
        if self.model.mlp_bias:
            yield _banded(f"{self.role}gate_up_proj_bias", prefix, "bias", bands)
        if self.model.mlp_bias and self.shard.rank == 0:
            yield whole(f"{self.role}down_proj_bias", f"{prefix}down_proj.bias", hidden)

    def experts(self, experts: Experts) -> Iterator[Weight]:
        """Yield the router, and gate and up as one and down of all experts."""
        hidden, names = self.model.hidden_size, self.model.names
        prefix = f"{self.prefix}{names.experts}."
        router = f"{prefix}{names.router}."
        yield whole(f"{self.role}router", f"{router}weight", experts.num_experts, hidden)
        if experts.has_biases:
            yield whole(f"{self.role}router_bias", f"{router}bias", experts.num_experts)
        make = self._stacked_experts if names.stacked_experts else self._single_experts
        yield from make(f"{prefix}experts.", experts, self.shard.indices(experts.intermediate_size))

    def _single_experts(self, prefix: str, experts: Experts, own: range) -> Iterator[Weight]:
        """Yield the weights of experts that are stored one by one, each as an MLP."""
        count, width, hidden = (
            experts.num_experts,
            experts.intermediate_size,
            self.model.hidden_size,
        )
        gate, up, down = self.model.names.expert
        gates, downs = [], []
        for index in range(count):
            key = f"{prefix}{index}."
            gates += [
                Part(
                    f"{key}{name}.weight",
                    (width, hidden),
                    _slice(index, start, start + len(own)),
                    (own,),
                )
                for name, start in ((gate, 0), (up, len(own)))
            ]
            place, taken = _slice(index, 0, hidden), (range(hidden), own)
            downs.append(Part(f"{key}{down}.weight", (hidden, width), place, taken))
        yield Weight(f"{self.role}gate_up_proj", (count, 2 * len(own), hidden), tuple(gates))
        yield Weight(f"{self.role}down_proj", (count, hidden, len(own)), tuple(downs))

    def _stacked_experts(self, prefix: str, experts: Experts, own: range) -> Iterator[Weight]:
        """Yield those of experts stored as one, transposed, gate and up interleaved."""
        count, width, hidden = (
            experts.num_experts,
            experts.intermediate_size,
            self.model.hidden_size,
        )
        every, both = range(count), _times(own, 2)
        stored: dict[str, tuple[tuple[int, ...], Place, tuple[range, ...]]] = {
            "gate_up_proj": (
                (count, hidden, 2 * width),
                _interleaved,
                (every, range(hidden), both),
            ),
            "gate_up_proj_bias": ((count, 2 * width), _interleaved, (every, both)),
            "down_proj": ((count, width, hidden), _transposed, (every, own)),
            "down_proj_bias": ((count, hidden), _all, ()),
        }
        if self.shard.rank > 0:  # what is added up has it once
            del stored["down_proj_bias"]
        for name, (shape, place, taken) in stored.items():
            part = Part(prefix + name, shape, place, taken)
            fill_weights = (count, *reversed(part.read_shape[1:]))
            yield Weight(self.role + name, fill_weights, (part,))


def _interleaved(both: Tensor) -> Tensor:
    """Return `[E, 2·I, …]`, gates before ups, as `[E, …, 2·I]`, each gate before its up."""
    count, width = both.shape[0], both.shape[1] // 2
    pairs = both.view(count, 2, width, *both.shape[2:]).transpose(1, 2)  # [E, I, 2, …]
    return pairs.movedim((1, 2), (-2, -1))  # [E, …, I, 2]


def _transposed(weight: Tensor) -> Tensor:
    return weight.transpose(1, 2)


def _all(weight: Tensor) -> Tensor:
    return weight


def _slice(index: int, start: int, stop: int) -> Place:
    return lambda weight: weight[index, start:stop]


def rows(names: tuple[str, ...], heights: tuple[int, ...]) -> list[tuple[str, int]]:
    """Return names with the rows that each has; one name has them all."""
    return [(names[0], sum(heights))] if len(names) == 1 else list(zip(names, heights, strict=True))


def whole(role: str, key: str, *shape: int, kinds: frozenset[str] | None = None) -> Weight:
    """Return a weight that is stored just so."""
    return Weight(role, shape, (Part(key, shape, _all),), kinds)


def table(role: str, key: str, architecture: Architecture, shard: Shard = WHOLE) -> Weight:
    """Return a rank's rows of the vocabulary: as many for each, the last of them zeros."""
    count, hidden = architecture.vocab_size, architecture.hidden_size
    own = shard.indices(count)
    part = Part(key, (count, hidden), _between(0, len(own)), (own,))
    return Weight(role, (len(Shard(0, shard.size).indices(count)), hidden), (part,))


def stacked(
    role: str, prefix: str, kind: str, heights: list[tuple[str, int]], *width: int
) -> Weight:
    """Return a weight of tensors above each other, named with how many rows each has."""
    bands = [Band(name, height, range(height)) for name, height in heights]
    return _banded(role, prefix, kind, bands, *width)


def _banded(role: str, prefix: str, kind: str, bands: list[Band], *width: int) -> Weight:
    """Return a weight of rows of tensors above each other."""
    parts, start = [], 0
    for name, height, taken in bands:
        stop = start + len(taken)
        place = _between(start, stop)
        parts.append(Part(f"{prefix}{name}.{kind}", (height, *width), place, (taken,)))
        start = stop
    return Weight(role, (start, *width), tuple(parts))


def _bands(names: tuple[str, ...], heights: list[int], taken: list[range]) -> list[Band]:
    """Return what is taken of tensors of these heights, or of one that has all of their rows."""
    if len(names) > 1:
        return [Band(*band) for band in zip(names, heights, taken, strict=True)]
    total, above, bands = sum(heights), 0, list[Band]()
    for height, own in zip(heights, taken, strict=True):
        rows_of = range(above + own.start, above + own.stop)
        if bands and bands[-1].taken.stop == rows_of.start:
            rows_of = range(bands.pop().taken.start, rows_of.stop)
        bands.append(Band(names[0], total, rows_of))
        above += height
    return bands


def _sliced(role: str, key: str, shape: tuple[int, ...], *taken: range | None) -> Weight:
    """Return a weight that is so much of a stored tensor's first axes; None is all."""
    axes = zip(taken, shape, strict=False)
    part = Part(key, shape, _all, tuple(range(n) if own is None else own for own, n in axes))
    return Weight(role, part.read_shape, (part,))


def _times(heads: range, width: int) -> range:
    """Return the rows of heads that have so many each."""
    return range(heads.start * width, heads.stop * width)


def _between(start: int, stop: int) -> Place:
    return lambda weight: weight[start:stop]

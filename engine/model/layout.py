"""Where a decoder's weights come from: which stored tensors fill which of them, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from engine.model.architecture import Architecture, Block, Experts

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

# Takes a weight and returns the view of it that a stored tensor is copied to.
Place = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """A stored tensor by its name and shape, and its place in a weight."""

    key: str
    shape: tuple[int, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight by the role that it has in the decoder; its parts fill it."""

    role: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def weights_of(architecture: Architecture, *, has_head: bool = True) -> Iterator[Weight]:
    """Yield all weights, but the head's where not wanted; those of layer i have roles `i.…`."""
    hidden, table = architecture.hidden_size, (architecture.vocab_size, architecture.hidden_size)
    yield whole("embedding", EMBEDDING, *table)
    if has_head and not architecture.is_tied:
        yield whole("head", HEAD, *table)
    yield whole("norm", "model.norm.weight", hidden)
    for index, block in enumerate(architecture.blocks):
        layer = _Layer(architecture, block, f"{index}.", f"model.layers.{index}.")
        yield from layer.norms()
        yield from layer.attention()
        yield from layer.experts(block.experts) if block.experts else layer.mlp()


@dataclass(frozen=True, slots=True)
class _Layer:
    model: Architecture
    block: Block
    role: str
    prefix: str

    def norms(self) -> Iterator[Weight]:
        """Yield the norms before attention and MLP, and with sandwich norms those after."""
        roles = {"input_norm": "input_layernorm", "inner_norm": "post_attention_layernorm"}
        if self.model.has_sandwich_norms:
            roles["attended_norm"] = "post_attention_layernorm"
            roles["inner_norm"] = "pre_feedforward_layernorm"
            roles["mixed_norm"] = "post_feedforward_layernorm"
        for role, name in roles.items():
            yield whole(self.role + role, f"{self.prefix}{name}.weight", self.model.hidden_size)

    def attention(self) -> Iterator[Weight]:
        """Yield what makes queries, keys and values, what joins the heads, norms and sinks."""
        shape, hidden = self.block.attention, self.model.hidden_size
        prefix = f"{self.prefix}self_attn."
        queries = shape.num_query_heads * shape.key_dim
        others = shape.num_kv_heads * shape.key_dim
        heights = rows(self.model.names.qkv, (queries, others, others))
        yield stacked(f"{self.role}qkv", prefix, "weight", heights, hidden)
        yield whole(f"{self.role}output", f"{prefix}o_proj.weight", hidden, queries)
        if self.model.qkv_bias:
            yield stacked(f"{self.role}qkv_bias", prefix, "bias", heights)
        if self.model.output_bias:
            yield whole(f"{self.role}output_bias", f"{prefix}o_proj.bias", hidden)
        if self.model.has_head_norms:
            for role in ("q_norm", "k_norm"):
                yield whole(self.role + role, f"{prefix}{role}.weight", shape.key_dim)
        if shape.has_sinks:
            yield whole(f"{self.role}sinks", f"{prefix}sinks", shape.num_query_heads)

    def mlp(self) -> Iterator[Weight]:
        """Yield gate and up as one, and down."""
        hidden, inner = self.model.hidden_size, self.model.inner_size
        prefix = f"{self.prefix}mlp."
        heights = rows(self.model.names.gate_up, (inner, inner))
        yield stacked(f"{self.role}gate_up", prefix, "weight", heights, hidden)
        yield whole(f"{self.role}down", f"{prefix}down_proj.weight", hidden, inner)
        if self.model.mlp_bias:
            yield stacked(f"{self.role}gate_up_bias", prefix, "bias", heights)
            yield whole(f"{self.role}down_bias", f"{prefix}down_proj.bias", hidden)

    def experts(self, experts: Experts) -> Iterator[Weight]:
        """Yield the router, and gate and up as one and down of all experts."""
        hidden, names = self.model.hidden_size, self.model.names
        prefix = f"{self.prefix}{names.experts}."
        router = f"{prefix}{names.router}."
        yield whole(f"{self.role}router", f"{router}weight", experts.count, hidden)
        if experts.has_biases:
            yield whole(f"{self.role}router_bias", f"{router}bias", experts.count)
        make = _stacked_experts if names.stacked_experts else _single_experts
        yield from make(self.role, f"{prefix}experts.", experts, hidden, names.expert)


def _single_experts(
    role: str, prefix: str, experts: Experts, hidden: int, names: tuple[str, str, str]
) -> Iterator[Weight]:
    """Yield the weights of experts that are stored one by one, each as an MLP."""
    count, width = experts.count, experts.width
    gate, up, down = names
    gates, downs = [], []
    for index in range(count):
        own = f"{prefix}{index}."
        gates += [
            Part(f"{own}{name}.weight", (width, hidden), _slice(index, start, start + width))
            for name, start in ((gate, 0), (up, width))
        ]
        downs.append(Part(f"{own}{down}.weight", (hidden, width), _slice(index, 0, hidden)))
    yield Weight(f"{role}gate_up", (count, 2 * width, hidden), tuple(gates))
    yield Weight(f"{role}down", (count, hidden, width), tuple(downs))


def _stacked_experts(
    role: str, prefix: str, experts: Experts, hidden: int, names: tuple[str, str, str]
) -> Iterator[Weight]:
    """Yield the weights of experts that are stored as one, transposed, gate and up interleaved."""
    del names
    count, width = experts.count, experts.width
    stored = {
        "gate_up_proj": ((count, hidden, 2 * width), _interleaved),
        "gate_up_proj_bias": ((count, 2 * width), _interleaved),
        "down_proj": ((count, width, hidden), lambda down: down.transpose(1, 2)),
        "down_proj_bias": ((count, hidden), _all),
    }
    for name, (shape, place) in stored.items():
        own = role + name.replace("_proj", "")
        filled = (count, *reversed(shape[1:]))
        yield Weight(own, filled, (Part(prefix + name, shape, place),))


def _interleaved(both: Tensor) -> Tensor:
    """Return `[E, 2·I, …]`, gates before ups, as `[E, …, 2·I]`, each gate before its up."""
    count, width = both.shape[0], both.shape[1] // 2
    pairs = both.view(count, 2, width, *both.shape[2:]).transpose(1, 2)  # [E, I, 2, …]
    return pairs.movedim((1, 2), (-2, -1))  # [E, …, I, 2]


def _all(weight: Tensor) -> Tensor:
    return weight


def _slice(index: int, start: int, stop: int) -> Place:
    return lambda weight: weight[index, start:stop]


def rows(names: tuple[str, ...], heights: tuple[int, ...]) -> list[tuple[str, int]]:
    """Return names with the rows that each has; one name has them all."""
    return [(names[0], sum(heights))] if len(names) == 1 else list(zip(names, heights, strict=True))


def whole(role: str, key: str, *shape: int) -> Weight:
    """Return a weight that is stored just so."""
    return Weight(role, shape, (Part(key, shape, _all),))


def stacked(
    role: str, prefix: str, kind: str, heights: list[tuple[str, int]], *width: int
) -> Weight:
    """Return a weight of tensors above each other, named with how many rows each has."""
    parts, start = [], 0
    for name, height in heights:
        stop = start + height
        place = _between(start, stop)
        parts.append(Part(f"{prefix}{name}.{kind}", (height, *width), place))
        start = stop
    return Weight(role, (start, *width), tuple(parts))


def _between(start: int, stop: int) -> Place:
    return lambda weight: weight[start:stop]

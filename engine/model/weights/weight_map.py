"""Weight map: a decoder's weights by role, and the stored tensors that fill them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...kernels.communicator import Shard
from ...kernels.elementwise import Gate
from ..config.architecture import Architecture, Block, Experts, Indexer, Latent
from .recurrent_weights import recurrent_weights
from .weight_parts import (
    WHOLE,
    Band,
    Part,
    Place,
    Weight,
    banded,
    bands_of,
    between,
    columns,
    everything,
    head_rows,
    interleaved,
    pairs,
    rows_of_one,
    sliced,
    suffix_of,
    table,
    transposed,
    turned,
    turned_band,
    whole,
)

# Names of the projections to the latents of experts and back.
LATENT_PROJ = ("fc1_latent_proj", "fc2_latent_proj")
# Norms of experts next to an MLP, by their roles.
EXPERT_NORMS = {
    "experts_layernorm": "pre_feedforward_layernorm_2",
    "post_shared_layernorm": "post_feedforward_layernorm_1",
    "post_experts_layernorm": "post_feedforward_layernorm_2",
}


def weights_of(
    architecture: Architecture, *, has_head: bool = True, shard: Shard = WHOLE
) -> Iterator[Weight]:
    """Yield a rank's share of all weights; those of layer i have roles `i.…`.

    The head's are left out if they are not wanted.
    """
    names, hidden = architecture.names, architecture.hidden_size
    yield table("embed_tokens", names.embed_tokens, architecture, shard)
    if names.embed_positions:
        positions = architecture.num_positions
        yield whole("embed_positions", f"{names.embed_positions}.weight", positions, hidden)
    if has_head and not architecture.tie_word_embeddings:
        yield table("lm_head", names.lm_head, architecture, shard)
    if has_head and architecture.head_bias:
        yield table("lm_head", names.lm_head, architecture, shard, kind="bias")
    yield from _norm(architecture, "norm", names.norm)
    for index, block in enumerate(architecture.blocks):
        layer = _Layer(architecture, block, f"{index}.", f"{names.layers}.{index}.", shard)
        yield from layer.norms()
        if block.latent is not None:
            yield from layer.latent_attention(block.latent)
            if block.indexer is not None:
                yield from layer.indexer(block.indexer, block.latent)
        elif block.has_attention:
            yield from layer.attention()
        if block.recurrence is not None:
            named = layer.role, layer.prefix
            yield from recurrent_weights(architecture, block.recurrence, *named, shard)
        if block.has_mlp:
            yield from layer.experts(block.experts) if block.experts else layer.mlp()


@dataclass(frozen=True, slots=True)
class _Layer:
    model: Architecture
    block: Block
    role: str
    prefix: str
    shard: Shard

    def norms(self) -> Iterator[Weight]:
        """Yield the norms before and after attention and MLP, and the factor of their sum."""
        norms, block = self.model.names.norms, self.block
        roles = {
            "input_layernorm": norms.input if block.has_mixer else "",
            "post_attention_layernorm": norms.post_attention if block.has_mixer else "",
            "pre_feedforward_layernorm": norms.pre_feedforward if block.has_mlp else "",
            "post_feedforward_layernorm": norms.post_feedforward if block.has_mlp else "",
        }
        for role, name in roles.items():
            if name:
                yield from _norm(self.model, self.role + role, self.prefix + name)
        if self.model.has_layer_scalar:
            yield whole(f"{self.role}layer_scalar", f"{self.prefix}layer_scalar", 1)

    def attention(self) -> Iterator[Weight]:
        """Yield the projections to queries, keys and values, the out-projection, norms, sinks."""
        model, shape, names = self.model, self.block.attention, self.model.names
        prefix = f"{self.prefix}{names.attention}."
        yield self._qkv(prefix, "weight", model.hidden_size)
        if model.qkv_bias:
            yield self._qkv(prefix, "bias")
        yield from self._joined("o_proj", prefix, shape.num_query_heads, shape.value_dim)
        heads = self.shard.indices(shape.num_query_heads)
        if model.has_qk_norm:
            kv_heads = self.shard.kv_head_indices(shape.num_kv_heads)
            one = 1, range(1)
            queries, keys = (shape.num_query_heads, heads), (shape.num_kv_heads, kv_heads)
            is_wide = model.has_wide_qk_norm
            yield self._heads_norm("q_norm", prefix + names.q_norm, *(queries if is_wide else one))
            yield self._heads_norm("k_norm", prefix + names.k_norm, *(keys if is_wide else one))
        if shape.has_sinks:
            count = shape.num_query_heads
            yield sliced(f"{self.role}sinks", prefix + names.sinks, (count,), heads)

    def latent_attention(self, latent: Latent) -> Iterator[Weight]:
        """Yield the merged projections to latents, and those from latents to a rank's heads."""
        heads, hidden = self.block.attention.num_query_heads, self.model.hidden_size
        prefix = f"{self.prefix}{self.model.names.attention}."
        own, head_dim = self.shard.indices(heads), latent.nope_dim + latent.rope_dim
        queries = Band("q_proj", heads * head_dim, head_rows(own, head_dim))
        if latent.query_rank:
            queries = Band("q_a_proj", latent.query_rank, range(latent.query_rank))
            yield whole(f"{self.role}q_a_norm", f"{prefix}q_a_layernorm.weight", latent.query_rank)
            yield self._of_heads("q_b_proj", prefix, head_dim, latent.query_rank)
        width = latent.kv_rank + latent.rope_dim
        bands = [queries, Band("kv_a_proj_with_mqa", width, range(width))]
        yield banded(f"{self.role}latent_proj", prefix, "weight", bands, hidden)
        if latent.has_bias:
            yield banded(f"{self.role}latent_proj_bias", prefix, "bias", bands)
        yield whole(f"{self.role}kv_a_norm", f"{prefix}kv_a_layernorm.weight", latent.kv_rank)
        yield self._of_heads(
            "kv_b_proj", prefix, latent.nope_dim + latent.value_dim, latent.kv_rank
        )
        yield from self._joined("o_proj", prefix, heads, latent.value_dim)

    def indexer(self, indexer: Indexer, latent: Latent) -> Iterator[Weight]:
        """Yield the projections to index keys and queries; every rank selects for its heads."""
        prefix = f"{self.prefix}{self.model.names.attention}.indexer."
        heads, dim, hidden = indexer.num_heads, indexer.head_dim, self.model.hidden_size
        role = f"{self.role}index_"
        yield whole(f"{role}q_proj", f"{prefix}wq_b.weight", heads * dim, latent.query_rank)
        yield whole(f"{role}k_proj", f"{prefix}wk.weight", dim, hidden)
        yield whole(f"{role}k_norm", f"{prefix}k_norm.weight", dim)
        yield whole(f"{role}k_norm_bias", f"{prefix}k_norm.bias", dim)
        yield whole(f"{role}weights", f"{prefix}weights_proj.weight", heads, hidden)

    def _of_heads(self, name: str, prefix: str, dim: int, width: int) -> Weight:
        """Return a rank's rows of a projection with `dim` numbers per head."""
        heads = self.block.attention.num_query_heads
        own = head_rows(self.shard.indices(heads), dim)
        return sliced(f"{self.role}{name}", f"{prefix}{name}.weight", (heads * dim, width), own)

    def _qkv(self, prefix: str, kind: str, *width: int) -> Weight:
        """Return a rank's queries above keys above values, if there are any."""
        shape, names = self.block.attention, self.model.names
        heads = self.shard.indices(shape.num_query_heads)
        kv_heads = self.shard.kv_head_indices(shape.num_kv_heads)
        turned = shape.key_dim if names.has_rope_pairs else None
        if names.has_qkv_groups:
            return self._grouped_qkv(prefix, kind, heads, kv_heads, *width)
        if self.model.has_output_gate and not names.output_gate:
            return self._gated_qkv(prefix, kind, heads, kv_heads, *width)
        parts = [
            (shape.num_query_heads, shape.key_dim, heads),
            (shape.num_kv_heads, shape.key_dim, kv_heads),
            (shape.num_kv_heads, shape.value_dim, kv_heads),
        ][: 2 if self.block.has_keys_as_values else 3]
        stored = names.qkv[: len(parts)]
        if self.model.has_output_gate:
            parts.append((shape.num_query_heads, shape.value_dim, heads))
            stored = *stored, names.output_gate
        bands = bands_of(
            stored,
            [count * dim for count, dim, _ in parts],
            [head_rows(own, dim) for _, dim, own in parts],
            is_joined=turned is None,
        )
        return banded(
            f"{self.role}qkv_proj{suffix_of(kind)}",
            prefix,
            kind,
            bands,
            *width,
            paired=(turned, turned) if turned else (),
            is_transposed=names.is_transposed,
        )

    def _gated_qkv(
        self, prefix: str, kind: str, heads: range, kv_heads: range, *width: int
    ) -> Weight:
        """Return queries, keys, values and gates; each head's query is stored above its gate."""
        shape, names = self.block.attention, self.model.names
        dim, kv_rows = shape.key_dim, len(kv_heads) * shape.key_dim
        query, key, value = names.qkv
        height = (2 * shape.num_query_heads * dim, *width)
        start, parts = len(heads) * dim, []
        gates = start + 2 * kv_rows
        for index, head in enumerate(heads):
            first = 2 * head * dim
            for place, above in ((index * dim, first), (gates + index * dim, first + dim)):
                put = between(place, place + dim)
                own = (range(above, above + dim),)
                parts.append(Part(f"{prefix}{query}.{kind}", height, put, own))
        for name, place in ((key, start), (value, start + kv_rows)):
            total = (shape.num_kv_heads * dim, *width)
            put, own = between(place, place + kv_rows), (head_rows(kv_heads, dim),)
            parts.append(Part(f"{prefix}{name}.{kind}", total, put, own))
        made = (2 * start + 2 * kv_rows, *width)
        return Weight(f"{self.role}qkv_proj{suffix_of(kind)}", made, tuple(parts))

    def _grouped_qkv(
        self, prefix: str, kind: str, heads: range, kv_heads: range, *width: int
    ) -> Weight:
        """Return those of one tensor that groups a key head's queries, key and value."""
        shape, (name,) = self.block.attention, self.model.names.qkv
        dim, group = shape.key_dim, shape.num_query_heads // shape.num_kv_heads
        height = (group + 2) * dim
        total, parts = (shape.num_kv_heads * height, *width), []
        starts = (0, len(heads) * dim, (len(heads) + len(kv_heads)) * dim)
        for index, head in enumerate(kv_heads):
            first = head * height
            own = [query - head * group for query in heads if query // group == head]
            for taken, place in (
                (head_rows(range(own[0], own[-1] + 1), dim), starts[0] + index * group * dim),
                (head_rows(range(group, group + 1), dim), starts[1] + index * dim),
                (head_rows(range(group + 1, group + 2), dim), starts[2] + index * dim),
            ):
                rows_of = range(first + taken.start, first + taken.stop)
                put = between(place, place + len(taken))
                parts.append(Part(f"{prefix}{name}.{kind}", total, put, (rows_of,)))
        rows_made = (len(heads) + 2 * len(kv_heads)) * dim
        return Weight(f"{self.role}qkv_proj{suffix_of(kind)}", (rows_made, *width), tuple(parts))

    def _heads_norm(self, role: str, name: str, count: int, own: range) -> Weight:
        """Return the weight of a norm of one head, or of all of them together."""
        dim = self.block.attention.key_dim
        place = pairs(0, len(own) * dim, dim) if self.model.names.has_rope_pairs else everything
        part = Part(f"{name}.weight", (count * dim,), place, (head_rows(own, dim),))
        return Weight(self.role + role, part.read_shape, (part,))

    def _joined(self, role: str, prefix: str, count: int, dim: int) -> Iterator[Weight]:
        """Yield the out-projection of a rank's inner numbers, and its bias once."""
        names, hidden = self.model.names, self.model.hidden_size
        key = f"{prefix}{getattr(names, role)}"
        own, inner = head_rows(self.shard.indices(count), dim), count * dim
        if names.is_transposed:
            part = Part(f"{key}.weight", (inner, hidden), turned, (own,))
            yield Weight(self.role + role, (hidden, len(own)), (part,))
        else:
            yield sliced(self.role + role, f"{key}.weight", (hidden, inner), None, own)
        has_bias = self.model.o_proj_bias if role == "o_proj" else self.model.mlp_bias
        if has_bias and self.shard.rank == 0:  # a sum over ranks contains it once
            yield whole(f"{self.role}{role}_bias", f"{key}.bias", hidden)

    def mlp(self, name: str = "", inner: int = 0, role: str = "") -> Iterator[Weight]:
        """Yield gate and up as one, or up alone, and down, for the layer's MLP or another one."""
        names, hidden = self.model.names, self.model.hidden_size
        inner = inner or self.model.intermediate_size
        name, own = name or names.mlp, self.shard.indices(inner)
        prefix = f"{self.prefix}{name}." if name else self.prefix
        halves = 2 if isinstance(self.model.gate, Gate) else 1
        bands = bands_of(names.gate_up, [inner] * halves, [own] * halves)
        for kind, width in (("weight", (hidden,)), ("bias", ())):
            if kind == "weight" or self.model.mlp_bias:
                yield banded(
                    f"{self.role}{role}gate_up_proj{suffix_of(kind)}",
                    prefix,
                    kind,
                    bands,
                    *width,
                    is_transposed=names.is_transposed,
                )
        if self.model.gate == "xielu":
            for number in ("alpha_p", "alpha_n"):
                yield whole(f"{self.role}{number}", f"{prefix}act_fn.{number}", 1)
            for number in ("beta", "eps"):
                yield whole(f"{self.role}{number}", f"{prefix}act_fn.{number}")
        for weight in self._joined("down_proj", prefix, inner, 1):
            yield replace(weight, role=weight.role.replace(self.role, self.role + role, 1))

    def experts(self, experts: Experts) -> Iterator[Weight]:
        """Yield the router, and gate and up as one and down of all experts."""
        hidden, names = self.model.hidden_size, self.model.names
        prefix = f"{self.prefix}{names.experts}." if names.experts else self.prefix
        router = f"{prefix}{names.router}."
        yield whole(f"{self.role}router", f"{router}weight", experts.num_experts, hidden)
        if experts.has_biases:
            yield whole(f"{self.role}router_bias", f"{router}bias", experts.num_experts)
        if experts.has_correction_bias:
            key, axes = prefix + names.correction_bias, names.correction_bias_axes
            yield whole(f"{self.role}correction_bias", key, *axes, experts.num_experts)
        if inner := experts.shared_intermediate_size:
            shared = (names.experts, names.shared_experts)
            if names.shared_experts.startswith("."):
                shared = "", names.shared_experts[1:]
            yield from self.mlp(".".join(filter(None, shared)), inner, "shared.")
        if experts.has_own_norms:
            yield whole(f"{self.role}router_norm", f"{prefix}router.scale", hidden)
            scales = f"{prefix}router.per_expert_scale"
            yield whole(f"{self.role}expert_scales", scales, experts.num_experts)
            for role, name in EXPERT_NORMS.items():
                yield from _norm(self.model, self.role + role, self.prefix + name)
        if experts.has_shared_gate:
            yield whole(f"{self.role}shared_gate", f"{prefix}{names.shared_gate}.weight", 1, hidden)
        if experts.latent_size:
            yield from self._latents(prefix, experts.latent_size)
        own = self.shard.indices(experts.intermediate_size)
        if names.stacked_experts == "rows":
            yield from self._expert_rows(prefix, experts, own)
            return
        make = self._stacked_experts if names.stacked_experts else self._single_experts
        yield from make(f"{prefix}experts.", experts, own)

    def _latents(self, prefix: str, latent: int) -> Iterator[Weight]:
        """Yield the projections to latents, which experts read and write, and back."""
        hidden, has_bias = self.model.hidden_size, self.model.mlp_bias
        (into, behind), role = LATENT_PROJ, self.role
        yield whole(f"{role}expert_in_proj", f"{prefix}{into}.weight", latent, hidden)
        yield whole(f"{role}expert_out_proj", f"{prefix}{behind}.weight", hidden, latent)
        if has_bias:
            yield whole(f"{role}expert_in_proj_bias", f"{prefix}{into}.bias", latent)
        if has_bias and self.shard.rank == 0:  # a sum over ranks contains it once
            yield whole(f"{role}expert_out_proj_bias", f"{prefix}{behind}.bias", hidden)

    def _expert_rows(self, prefix: str, experts: Experts, own: range) -> Iterator[Weight]:
        """Yield the weights of experts stored as one tensor, gates above ups."""
        count, width, hidden = (
            experts.num_experts,
            experts.intermediate_size,
            self.model.hidden_size,
        )
        first, _, last = self.model.names.expert
        shape, key = (count, 2 * width, hidden), prefix + first
        halves = [
            Part(
                key,
                shape,
                columns(start, start + len(own)),
                (range(count), range(above + own.start, above + own.stop)),
            )
            for above, start in ((0, 0), (width, len(own)))
        ]
        yield Weight(f"{self.role}gate_up_proj", (count, 2 * len(own), hidden), tuple(halves))
        key, taken = prefix + last, (None, None, own)
        yield sliced(f"{self.role}down_proj", key, (count, hidden, width), *taken)

    def _single_experts(self, prefix: str, experts: Experts, own: range) -> Iterator[Weight]:
        """Yield the weights of experts that are stored one by one, each as an MLP."""
        count, width, hidden = (
            experts.num_experts,
            experts.intermediate_size,
            experts.latent_size or self.model.hidden_size,
        )
        gate, up, down = self.model.names.expert
        above = [(gate, 0), (up, len(own))] if gate else [(up, 0)]
        gates, downs = [], []
        for index in range(count):
            key = f"{prefix}{index}."
            gates += [
                Part(
                    f"{key}{name}.weight",
                    (width, hidden),
                    rows_of_one(index, start, start + len(own)),
                    (own,),
                )
                for name, start in above
            ]
            place, taken = rows_of_one(index, 0, hidden), (range(hidden), own)
            downs.append(Part(f"{key}{down}.weight", (hidden, width), place, taken))
        height = len(above) * len(own)
        yield Weight(f"{self.role}gate_up_proj", (count, height, hidden), tuple(gates))
        yield Weight(f"{self.role}down_proj", (count, hidden, len(own)), tuple(downs))

    def _stacked_experts(self, prefix: str, experts: Experts, own: range) -> Iterator[Weight]:
        """Yield experts' weights stored as one, transposed, gate and up as halves or interleaved.

        Only interleaved ones have biases.
        """
        count, width, hidden = (
            experts.num_experts,
            experts.intermediate_size,
            self.model.hidden_size,
        )
        every, both = range(count), head_rows(own, 2)
        stored: dict[str, tuple[tuple[int, ...], Place, tuple[range, ...]]] = {
            "gate_up_proj": (
                (count, hidden, 2 * width),
                interleaved,
                (every, range(hidden), both),
            ),
            "gate_up_proj_bias": ((count, 2 * width), interleaved, (every, both)),
            "down_proj": ((count, width, hidden), transposed, (every, own)),
            "down_proj_bias": ((count, hidden), everything, ()),
        }
        if not experts.has_biases:
            stored = {name: part for name, part in stored.items() if not name.endswith("_bias")}
        if self.model.names.stacked_experts == "halves":
            del stored["gate_up_proj"]
            yield self._expert_halves(f"{prefix}gate_up_proj", (count, hidden, width), own)
        if self.shard.rank > 0:  # a sum over ranks contains it once
            stored.pop("down_proj_bias", None)
        for name, (shape, place, taken) in stored.items():
            part = Part(prefix + name, shape, place, taken)
            fill_weights = (count, *reversed(part.read_shape[1:]))
            yield Weight(self.role + name, fill_weights, (part,))

    def _expert_halves(self, key: str, shape: tuple[int, int, int], own: range) -> Weight:
        """Return gate and up `[E, 2·I, H]` of a tensor that has them as `[E, H, 2·I]`."""
        count, hidden, width = shape
        if len(own) == width:  # all columns
            part = Part(key, (count, hidden, 2 * width), transposed)
            return Weight(f"{self.role}gate_up_proj", (count, 2 * width, hidden), (part,))
        parts = [
            Part(
                key,
                (count, hidden, 2 * width),
                turned_band(start, start + len(own)),
                (range(count), range(hidden), range(above + own.start, above + own.stop)),
            )
            for above, start in ((0, 0), (width, len(own)))
        ]
        return Weight(f"{self.role}gate_up_proj", (count, 2 * len(own), hidden), tuple(parts))


def _norm(model: Architecture, role: str, name: str) -> Iterator[Weight]:
    yield whole(role, f"{name}.weight", model.hidden_size)
    if model.has_norm_bias:
        yield whole(f"{role}_bias", f"{name}.bias", model.hidden_size)

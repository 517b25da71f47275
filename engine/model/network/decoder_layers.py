"""Layers of a decoder, built from weights by role: linear layers, norms, MLPs and experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.adapters import LinearAdapters
from ...kernels.attention import AttentionShape, HeadNorms
from ...kernels.backends import choose_experts, make_experts
from ...kernels.elementwise import (
    ElementwiseOps,
    Gate,
    Norm,
    activate,
    sigmoid,
    xielu,
)
from ...kernels.experts import ExpertWeights, Routing, route
from ...kernels.latent import UpProjections
from ...kernels.linear import Fp8Linear, Linear, LinearFactory, NormedLinear
from ...kernels.quantised import Matrix, Quantised, as_tensor
from ...kernels.recurrence import RuleWeights
from ..config.architecture import Architecture, Block, Experts, Multiplier, Recurrence
from ..config.hf_config import UnsupportedConfig
from ..weights.weight_map import EXPERT_NORMS
from .latent_layers import LATENT_EPS, IndexProjections, LatentMixer, SparseMixer
from .recurrent_layers import RecurrentMixer


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One block with its weights; `rope` indexes the decoder's, `index` counts attention layers.

    A block with only a `recurrent` mixer has no qkv_proj, one with only an MLP no out_proj either.
    With both, `out_proj` takes the recurrent mixer's output before that of attention.
    """

    index: int
    rope: int
    shape: AttentionShape
    is_last: bool
    has_keys_as_values: bool
    qkv_proj: NormedLinear | None
    head_norms: HeadNorms | None
    query_scaling: tuple[float, int] | None
    sinks: Tensor | None
    recurrent: RecurrentMixer | None
    latent: LatentMixer | None
    sparse: SparseMixer | None
    out_proj: Linear | None
    post_attention_layernorm: Norm | None
    mlp: NormedLinear | None
    post_feedforward_layernorm: Norm | None
    scalar: Tensor | None


class StreamedLayers(Sequence[DecoderLayer]):
    """Layers that are built when they are accessed; only the last one stays in memory."""

    def __init__(self, make: Callable[[int], DecoderLayer], count: int) -> None:
        self._make, self._count = make, count
        self._made: tuple[int, DecoderLayer] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        """Return a layer; the last returned one is not built again."""
        if self._made is None or self._made[0] != index:
            if index >= self._count:
                raise IndexError(index)
            self._made = None
            self._made = index, self._make(index)
        return self._made[1]


class LayerMaker:
    """Builds layers from weights, which it takes out of the dict."""

    def __init__(
        self,
        architecture: Architecture,
        ops: ElementwiseOps,
        linear_factory: LinearFactory,
        weights: dict[str, Matrix],
        adapting: Callable[[str], LinearAdapters | None],
        *,
        device: torch.device,
    ) -> None:
        self._model = architecture
        self._ops = ops
        self._linear_factory = linear_factory
        self._weights = weights
        self._linear_adapters = adapting
        self._device = device

    def layer(self, index: int, block: Block, rope: int) -> DecoderLayer:
        """Return layer `index`."""
        role = f"{index}."
        before = self._model.blocks[:index]
        for multiplier in block.multipliers:
            self._multiply(role, multiplier)
        qkv_proj = recurrent = out_proj = None
        attended = sum(other.has_attention for other in before)
        latent = sparse = None
        if block.latent is not None:
            input_norm = self.norm(f"{role}input_layernorm")
            latent = self._latent(role, attended, block, input_norm)
            if block.attention.num_selected:
                sparse = SparseMixer(latent, self._index_projections(role, block, input_norm))
            out_proj = self._linear(f"{role}o_proj")
        elif block.has_attention and block.recurrence is None:
            qkv_proj = self._normed(f"{role}qkv_proj", f"{role}input_layernorm")
            out_proj = self._linear(f"{role}o_proj")
        elif block.recurrence is not None:
            number = sum(other.recurrence is not None for other in before)
            norm = self.norm(f"{role}input_layernorm")
            recurrent = self._recurrent(role, number, block.recurrence, norm)
            if block.has_attention:  # its input is normed already
                qkv_proj = self._linear_factory.make_normed(self._linear(f"{role}qkv_proj"), None)
                self._join(f"{role}out_proj", f"{role}o_proj")
            out_proj = self._linear(f"{role}out_proj")
        return DecoderLayer(
            index=attended,
            rope=rope,
            shape=block.attention,
            is_last=index == len(self._model.blocks) - 1,
            has_keys_as_values=block.has_keys_as_values,
            qkv_proj=qkv_proj,
            head_norms=self._unit_norms(block)
            if block.has_unit_qk_norm
            else self._head_norms(role),
            query_scaling=block.query_scaling,
            sinks=self.vector(f"{role}sinks"),
            recurrent=recurrent,
            latent=latent,
            sparse=sparse,
            out_proj=out_proj,
            post_attention_layernorm=self.norm(f"{role}post_attention_layernorm"),
            mlp=self._feedforward(role, block),
            post_feedforward_layernorm=self.norm(f"{role}post_feedforward_layernorm"),
            scalar=self.vector(f"{role}layer_scalar"),
        )

    def _feedforward(self, role: str, block: Block) -> NormedLinear | None:
        if not block.has_mlp:
            return None
        norm = self.norm(f"{role}pre_feedforward_layernorm")
        if block.experts:
            return self._experts(role, block.experts, norm)
        return self._mlp(role, norm)

    def _normed(self, role: str, norm: str) -> NormedLinear:
        return self._linear_factory.make_normed(self._linear(role), self.norm(norm))

    def _latent(self, role: str, index: int, block: Block, input_norm: Norm | None) -> LatentMixer:
        sizes, heads = block.latent, block.attention.num_query_heads
        assert sizes is not None
        up = as_tensor(self._weights.pop(f"{role}kv_b_proj")).view(heads, -1, sizes.kv_rank)
        norm, query_norm = self.norm(f"{role}kv_a_norm"), self.norm(f"{role}q_a_norm")
        assert norm is not None
        has_query_latents = query_norm is not None
        return LatentMixer(
            index=index,
            latent=sizes,
            num_heads=heads,
            down_proj=self._linear_factory.make_normed(
                self._linear(f"{role}latent_proj"), input_norm
            ),
            query_norm=query_norm and query_norm._replace(eps=LATENT_EPS),
            query_up=self._linear(f"{role}q_b_proj") if has_query_latents else None,
            norm=norm._replace(eps=LATENT_EPS),
            projections=UpProjections(up[:, : sizes.nope_dim], up[:, sizes.nope_dim :]),
        )

    def _index_projections(
        self, role: str, block: Block, input_norm: Norm | None
    ) -> IndexProjections | None:
        if block.indexer is None:
            return None
        assert input_norm is not None
        weight, bias = (
            self._ops.norm_weight(as_tensor(self._weights.pop(f"{role}{name}")), 0.0)
            for name in ("index_k_norm", "index_k_norm_bias")
        )
        weights = as_tensor(self._weights.pop(f"{role}index_weights")).float()
        return IndexProjections(
            indexer=block.indexer,
            norm=input_norm,
            query_up=self._linear(f"{role}index_q_proj"),
            key_proj=self._linear(f"{role}index_k_proj"),
            key_norm=Norm(self._ops, weight, bias, LATENT_EPS),
            weights_proj=self._linear_factory.make(weights),
        )

    def _multiply(self, role: str, multiplier: Multiplier) -> None:
        """Multiply rows of an unquantised weight."""
        weight = self._weights[f"{role}{multiplier.role}"]
        if isinstance(weight, Quantised):
            raise UnsupportedConfig(
                "its quantised weights have multipliers, which is not supported"
            )
        stop = multiplier.first + multiplier.num_rows if multiplier.num_rows else None
        weight[multiplier.first : stop] *= multiplier.factor

    def _join(self, role: str, other: str) -> None:
        """Merge two products whose results are added into one."""
        parts = [as_tensor(self._weights.pop(name)) for name in (role, other)]
        self._weights[role] = torch.cat(parts, dim=1)
        biases = [self.vector(f"{name}_bias") for name in (role, other)]
        if known := [bias for bias in biases if bias is not None]:
            self._weights[f"{role}_bias"] = torch.stack(known).sum(dim=0)

    def _recurrent(
        self, role: str, number: int, recurrence: Recurrence, norm: Norm | None
    ) -> RecurrentMixer:
        rule_weights = None
        if recurrence.shape.rule is not None:
            a_log, dt_bias = (
                as_tensor(self._weights.pop(f"{role}{name}")).float()
                for name in ("a_log", "dt_bias")
            )
            d = self.vector(f"{role}d")
            rule_weights = RuleWeights(a_log, dt_bias, None if d is None else d.float())
        return RecurrentMixer(
            layer=number,
            recurrence=recurrence,
            norm=norm,
            in_proj=self._linear_factory.make_normed(self._linear(f"{role}in_proj"), norm),
            conv_weight=as_tensor(self._weights.pop(f"{role}conv_weight")),
            conv_bias=self.vector(f"{role}conv_bias"),
            rule_weights=rule_weights,
            gate_norm=self.vector(f"{role}gate_norm"),
            norm_eps=self._model.rms_norm_eps,
        )

    def norm(self, role: str) -> Norm | None:
        """Return a norm, with its weights in the form for the device, if the model has it."""
        stored = self.vector(role)
        if stored is None:
            return None
        bias = self.vector(f"{role}_bias")
        if self._model.has_layer_norm:
            bias = torch.zeros_like(stored) if bias is None else bias
            bias = self._ops.norm_weight(bias, 0.0)
        weight = self._ops.norm_weight(stored, self._model.norm_offset)
        return Norm(self._ops, weight, bias, self._model.rms_norm_eps)

    def _head_norms(self, role: str) -> HeadNorms | None:
        query, key = self.norm(f"{role}q_norm"), self.norm(f"{role}k_norm")
        if query is None or key is None:
            return None
        return HeadNorms(query.weight, key.weight, query.eps)

    def _unit_norms(self, block: Block) -> HeadNorms:
        one = torch.ones(block.attention.key_dim, device=self._device)
        weight = self._ops.norm_weight(one, 0.0)
        return HeadNorms(weight, weight, self._model.rms_norm_eps)

    def _linear(self, role: str, gate: Gate | None = None) -> Linear:
        weight, bias = self._weights.pop(role), self.vector(f"{role}_bias")
        if adapting := self._linear_adapters(role):
            return self._linear_factory.make_adapted(weight, bias, gate, adapting)
        if gate is not None:
            return self._linear_factory.make_gated(weight, bias, gate)
        return self._linear_factory.make(weight, bias)

    def vector(self, role: str) -> Tensor | None:
        """Return a weight that is never quantised, if the model has it."""
        weight = self._weights.pop(role, None)
        return None if weight is None else as_tensor(weight)

    def _mlp(self, role: str, norm: Norm | None) -> NormedLinear:
        down, gate = self._linear(f"{role}down_proj"), self._model.gate
        if isinstance(down, Fp8Linear) and isinstance(gate, Gate):
            gate_up = self._linear_factory.make_normed(self._linear(f"{role}gate_up_proj"), norm)
            return lambda x, residual: down.gated(gate_up(x, residual), gate)
        up = self._linear_factory.make_normed(self._activated(f"{role}gate_up_proj"), norm)
        return lambda x, residual: down(up(x, residual))

    def _activated(self, role: str) -> Linear:
        """Return the linear layer before the down projection, with its gate or activation."""
        activation = self._model.gate
        if isinstance(activation, Gate):
            return self._linear(role, activation)
        if activation == "xielu" or self._linear_adapters(role):
            up, activated = self._linear(role), self._activation(role)
            return lambda x: activated(up(x))
        weight, bias = self._weights.pop(role), self.vector(f"{role}_bias")
        return self._linear_factory.make_activated(weight, bias, activation)

    def _activation(self, role: str) -> Linear:
        """Return the activation of an MLP without a gate, with its learned numbers if any."""
        activation = self._model.gate
        assert not isinstance(activation, Gate)
        if activation != "xielu":
            return partial(activate, activation=activation)
        layer = role.partition(".")[0]
        alpha_p, alpha_n, beta, eps = (
            as_tensor(self._weights.pop(f"{layer}.{name}")).float()
            for name in ("alpha_p", "alpha_n", "beta", "eps")
        )
        above, below = functional.softplus(alpha_p), beta + functional.softplus(alpha_n)
        return lambda x: xielu(x, above, below, beta, eps)

    def _experts(self, role: str, experts: Experts, norm: Norm | None) -> NormedLinear:
        routed = self._routed_experts(role, experts)
        if not experts.shared_intermediate_size:
            return self._linear_factory.make_normed(lambda x: routed(x, x), norm)
        shared = self._shared_experts(role, experts)
        if experts.output_scale != 1:
            scale = experts.output_scale
            return self._linear_factory.make_normed(
                lambda x: (routed(x, x) + shared(x)) * scale, norm
            )
        if not experts.has_own_norms:
            return self._linear_factory.make_normed(lambda x: routed(x, x) + shared(x), norm)
        mlp = self._linear_factory.make_normed(shared, norm)
        weight = as_tensor(self._weights.pop(f"{role}router_norm")).float()
        weight = weight * self._model.hidden_size**-0.5
        of_router = Norm(self._ops, weight, None, self._model.rms_norm_eps)
        before, behind_mlp, behind = (self.norm(role + name) for name in EXPERT_NORMS)
        assert before is not None
        assert behind_mlp is not None
        assert behind is not None

        def both(x: Tensor | None, residual: Tensor) -> Tensor:
            out = behind_mlp(mlp(x, residual))  # its residual is the sum from here on
            return out + behind(routed(before(residual), of_router(residual)))

        return both

    def _routed_experts(self, role: str, experts: Experts) -> Callable[[Tensor, Tensor], Tensor]:
        """Return experts, which take their input and the router's input."""
        routing = Routing(
            experts.num_experts_per_tok,
            experts.scoring,
            experts.norm_topk_prob,
            self._correction_bias(role),
            experts.num_groups,
            experts.topk_groups,
            experts.routed_scaling_factor,
            experts.router_jitter,
            experts.num_best_of_group,
        )
        router, scales = self._router(role, routing), self.vector(f"{role}expert_scales")
        weights = ExpertWeights(
            gate_up=self._weights.pop(f"{role}gate_up_proj"),
            down=self._weights.pop(f"{role}down_proj"),
            gate_up_bias=self.vector(f"{role}gate_up_proj_bias"),
            down_bias=self.vector(f"{role}down_proj_bias"),
        )
        into = behind = None
        if experts.latent_size:
            into, behind = (self._linear(f"{role}expert_{side}_proj") for side in ("in", "out"))
        own = choose_experts(weights.down.dtype, weights.down.device)
        parts = self._model.gate, self._ops, self._linear_factory
        apply = make_experts(weights, routing.count, *parts)
        del weights  # a CPU's are packed

        def routed(x: Tensor, seen: Tensor) -> Tensor:
            if routing.is_plain:
                chosen, shares = own.select_experts(
                    router(seen),
                    routing.count,
                    among_chosen=routing.scoring == "softmax_chosen",
                    is_renormalised=routing.is_renormalised,
                )
            else:
                chosen, shares = route(router(seen), routing)
            if scales is not None:
                shares = shares * scales[chosen]
            if experts.scales_inputs:
                return apply((x * shares).to(x.dtype), chosen, torch.ones_like(shares))
            if into is None or behind is None:
                return apply(x, chosen, shares)
            return behind(apply(into(x), chosen, shares))

        return routed

    def _correction_bias(self, role: str) -> Tensor | None:
        bias = self.vector(f"{role}correction_bias")
        return None if bias is None else bias.flatten().float()

    def _router(self, role: str, routing: Routing) -> Linear:
        """Return the router; a sigmoid's logits are fp32, as its best scores are close to 1."""
        if routing.is_plain:
            return self._linear(f"{role}router")
        weight = as_tensor(self._weights.pop(f"{role}router")).float()
        product = self._linear_factory.make(weight)
        return lambda x: product(x.float())

    def _shared_experts(self, role: str, experts: Experts) -> Linear:
        """Return the shared MLP, which processes every token in addition to its experts."""
        up, down = (
            self._activated(f"{role}shared.gate_up_proj"),
            self._linear(f"{role}shared.down_proj"),
        )
        if not experts.has_shared_gate:
            return lambda x: down(up(x))
        share = self._linear_factory.make(as_tensor(self._weights.pop(f"{role}shared_gate")))
        return lambda x: down(up(x)) * sigmoid(share(x))

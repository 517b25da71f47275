"""Native decoder: one block for every family, over merged weights.

Queries, keys and values are one product, gate and up another; a sum with the residual is one pass
with the norm that follows. After the last layer's attention only the rows whose logits are wanted
go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ..kernels.adapters import AdapterMapping, AdapterWeights, LinearAdapters
from ..kernels.attention import AttentionBackend, HeadNorms
from ..kernels.backends import choose_elementwise, choose_experts, choose_linear
from ..kernels.communicator import SINGLE_RANK, Communicator
from ..kernels.elementwise import ElementwiseOps, Gate, rotary_cos_sin
from ..kernels.experts import ExpertWeights
from ..kernels.linear import Fp8Linear, Linear, LinearFactory, NormedLinear
from ..kernels.quantised import Matrix, as_tensor
from ..kernels.step import Step
from .architecture import Architecture, Block, Experts


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One block with its weights; `rope` counts among the decoder's."""

    rope: int
    is_last: bool
    qkv_proj: NormedLinear
    head_norms: HeadNorms | None
    sinks: Tensor | None
    o_proj: Linear
    post_attention_layernorm: Tensor | None
    mlp: NormedLinear
    post_feedforward_layernorm: Tensor | None


class Decoder:
    """A `Network` of an architecture and its weights by role, which it takes out of the dict.

    Each of `adapters` is what that adds to linear layers by their roles; a step says which span
    goes through which, the first of them being number 1. With a `communicator` of several ranks,
    architecture and weights are this rank's shard; the first rank has the logits.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: dict[str, Matrix],
        *,
        has_head: bool = True,
        adapters: Sequence[Mapping[str, AdapterWeights]] = (),
        communicator: Communicator = SINGLE_RANK,
    ) -> None:
        self.num_layers_started = 0
        self._embedding = as_tensor(weights.pop("embed_tokens"))
        self._communicator = communicator if communicator.shard.size > 1 else None
        self._vocab_size = architecture.vocab_size
        dtype, device = self._embedding.dtype, self._embedding.device
        self._ops = choose_elementwise(dtype, device)
        self._eps, self._softcap = architecture.rms_norm_eps, architecture.logit_softcap
        # Rounded as transformers rounds it, and as Gemma was trained.
        self._scale = torch.tensor(architecture.embedding_scale).to(dtype).item()
        ropes = list(dict.fromkeys(block.rope for block in architecture.blocks))
        self._ropes = [
            (
                torch.tensor(rope.inv_freq, device=device),
                rope.attention_scaling,
                None if rope.axes is None else torch.tensor(rope.axes, device=device),
            )
            for rope in ropes
        ]
        linear_factory = choose_linear(self._ops, device)
        self._head = (
            linear_factory.make(weights.pop("lm_head", self._embedding)) if has_head else None
        )
        self._adapters, self._mapping = adapters, AdapterMapping()
        maker = _LayerMaker(architecture, self._ops, linear_factory, weights, self._linear_adapters)
        self._layers = [
            maker.layer(index, block, ropes.index(block.rope))
            for index, block in enumerate(architecture.blocks)
        ]
        self._norm = maker.norm("norm")
        # For what else there is much to compute by: experts, and a curve over all logits.
        has_experts = any(block.experts for block in architecture.blocks)
        self.needs_torch = linear_factory.needs_torch or has_experts or self._softcap is not None

    def forward(self, step: Step, attention: AttentionBackend) -> Tensor:
        """Run one step → logits `[N, V]`; see `Network.forward`."""
        return self.compute_logits(self.hidden_states(step, attention))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[N, V]` of the last hidden states `[N, H]`."""
        assert self._head is not None
        if not len(hidden):
            return hidden.new_empty(0, self._vocab_size)
        logits = self._head(hidden)
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        if self._communicator is None:
            return logits
        return self._communicator.gather(logits, self._vocab_size)

    def hidden_states(self, step: Step, attention: AttentionBackend) -> Tensor:
        """Run one step → the last hidden states `[N, H]` of its rows, normed."""
        blocks, eps, rows = self._ops, self._eps, step.logit_rows
        cos_sin = [
            rotary_cos_sin(_positions(step, axes), frequencies, scale)
            for frequencies, scale, axes in self._ropes
        ]
        if self._adapters:
            self._mapping.update(_token_adapters(step))
        residual = self._embedded(step.token_ids)  # [T, H]
        if self._scale != 1:
            residual *= self._scale
        if step.shown_rows is not None and step.shown is not None:
            residual[step.shown_rows] = step.shown
        x: Tensor | None = None  # what the next norm adds to the residual
        for index, layer in enumerate(self._layers):
            self.num_layers_started += 1
            qkv = layer.qkv_proj(x, residual)
            query = attention.store_qkv(index, qkv, cos_sin[layer.rope], layer.head_norms)
            if layer.is_last and not len(rows):
                return residual[:0]
            x = attention.attend(index, query, layer.sinks).flatten(1)  # [T, Hq · D]
            if layer.is_last:
                x, residual = x[rows], residual[rows]
                if self._adapters:
                    self._mapping.update(_token_adapters(step)[step.host.logit_rows.numpy()])
            x = self._all_reduce(layer.o_proj(x))
            if layer.post_attention_layernorm is not None:
                x = blocks.rms_norm(x, layer.post_attention_layernorm, eps)
            x = self._all_reduce(layer.mlp(x, residual))
            if layer.post_feedforward_layernorm is not None:
                x = blocks.rms_norm(x, layer.post_feedforward_layernorm, eps)
        assert x is not None
        return blocks.add_rms_norm(x, residual, self._norm, eps)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """Return the vectors `[T, H]` of tokens, each of which one rank has."""
        if self._communicator is None:
            return functional.embedding(token_ids, self._embedding)
        own = self._communicator.shard.indices(self._vocab_size)
        places = token_ids - own.start
        is_other = (places < 0) | (places >= len(own))
        vectors = functional.embedding(places.masked_fill(is_other, 0), self._embedding)
        return self._communicator.all_reduce(vectors.masked_fill_(is_other[:, None], 0))

    def _all_reduce(self, x: Tensor) -> Tensor:
        """Add up what the ranks have of `x [T, H]`, where there are others."""
        return x if self._communicator is None else self._communicator.all_reduce(x)

    def _linear_adapters(self, role: str) -> LinearAdapters | None:
        own = [adapter.get(role) for adapter in self._adapters]
        return LinearAdapters(own, self._mapping) if any(own) else None


def _token_adapters(step: Step) -> NDArray[np.int32]:
    """Return the adapter of each of a step's tokens, `[T]`."""
    host = step.host
    if host.adapters is None:
        return np.zeros(step.num_tokens, np.int32)
    owners: NDArray[np.int32] = host.adapters.numpy()
    return owners.repeat(np.diff(host.query_starts.numpy()))


def _positions(step: Step, axes: Tensor | None) -> Tensor:
    """Return what tokens are turned by: `[T, 1]`, or for frequencies of `axes [R]` `[T, R]`."""
    if axes is None or step.axes is None:
        return step.positions[:, None]
    return step.axes.view(-1, step.num_tokens)[axes].T


class _LayerMaker:
    """Makes layers of weights, which it takes out of the dict as it goes."""

    def __init__(
        self,
        architecture: Architecture,
        blocks: ElementwiseOps,
        linear_factory: LinearFactory,
        weights: dict[str, Matrix],
        adapting: Callable[[str], LinearAdapters | None],
    ) -> None:
        self._model = architecture
        self._ops = blocks
        self._linear_factory = linear_factory
        self._weights = weights
        self._linear_adapters = adapting

    def layer(self, index: int, block: Block, rope: int) -> DecoderLayer:
        """Return layer `index`."""
        role = f"{index}."
        head_norms = None
        if self._model.has_qk_norm:
            query, key = self.norm(f"{role}q_norm"), self.norm(f"{role}k_norm")
            head_norms = HeadNorms(query, key, self._model.rms_norm_eps)
        is_sandwich = self._model.has_sandwich_norms
        mlp_norm = f"{role}pre_feedforward_layernorm"
        return DecoderLayer(
            rope=rope,
            is_last=index == len(self._model.blocks) - 1,
            qkv_proj=self._normed(self._linear(f"{role}qkv_proj"), f"{role}input_layernorm"),
            head_norms=head_norms,
            sinks=self._vector(f"{role}sinks"),
            o_proj=self._linear(f"{role}o_proj"),
            post_attention_layernorm=self.norm(f"{role}post_attention_layernorm")
            if is_sandwich
            else None,
            mlp=self._normed(self._experts(role, block.experts), mlp_norm)
            if block.experts
            else self._mlp(role, mlp_norm),
            post_feedforward_layernorm=self.norm(f"{role}post_feedforward_layernorm")
            if is_sandwich
            else None,
        )

    def norm(self, role: str) -> Tensor:
        """Return a norm's weight as the device's functions want it."""
        stored = as_tensor(self._weights.pop(role))
        return self._ops.norm_weight(stored, self._model.norm_offset)

    def _linear(self, role: str, gate: Gate | None = None) -> Linear:
        weight, bias = self._weights.pop(role), self._vector(f"{role}_bias")
        if adapting := self._linear_adapters(role):
            return self._linear_factory.make_adapted(weight, bias, gate, adapting)
        if gate is not None:
            return self._linear_factory.make_gated(weight, bias, gate)
        return self._linear_factory.make(weight, bias)

    def _normed(self, layer: Linear, norm: str) -> NormedLinear:
        return self._linear_factory.make_normed(layer, self.norm(norm), self._model.rms_norm_eps)

    def _vector(self, role: str) -> Tensor | None:
        weight = self._weights.pop(role, None)
        return None if weight is None else as_tensor(weight)

    def _mlp(self, role: str, norm: str) -> NormedLinear:
        down, gate = self._linear(f"{role}down_proj"), self._model.gate
        if isinstance(down, Fp8Linear):
            gate_up = self._normed(self._linear(f"{role}gate_up_proj"), norm)
            return lambda x, residual: down.gated(gate_up(x, residual), gate)
        joined = self._normed(self._linear(f"{role}gate_up_proj", gate), norm)
        return lambda x, residual: down(joined(x, residual))

    def _experts(self, role: str, experts: Experts) -> Linear:
        router = self._linear(f"{role}router")
        weights = ExpertWeights(
            gate_up=self._weights.pop(f"{role}gate_up_proj"),
            down=self._weights.pop(f"{role}down_proj"),
            gate_up_bias=self._vector(f"{role}gate_up_proj_bias"),
            down_bias=self._vector(f"{role}down_proj_bias"),
        )
        gate, blocks = self._model.gate, self._ops
        own = choose_experts(weights.down.dtype, weights.down.device)

        def mlp(x: Tensor) -> Tensor:
            chosen, shares = own.select_experts(
                router(x),
                experts.num_experts_per_tok,
                among_chosen=experts.softmax == "chosen",
                is_renormalised=experts.norm_topk_prob,
            )
            return own.apply_experts(x, chosen, shares, weights, gate, blocks)

        return mlp

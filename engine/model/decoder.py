"""A decoder of our own: one block for every family, over merged weights.

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

from engine.kernels.adapters import Adapting, LowRank, Owners
from engine.kernels.attention import AttentionBackend, HeadNorms
from engine.kernels.backends import choose_blocks, choose_experts, choose_products
from engine.kernels.blocks import Blocks, Gate
from engine.kernels.blocks import turns as turns_of
from engine.kernels.experts import ExpertWeights
from engine.kernels.products import Product, Products
from engine.kernels.quantised import Matrix, as_tensor
from engine.kernels.ranks import ALONE, Group
from engine.kernels.step import Step
from engine.model.architecture import Architecture, Block, Experts


@dataclass(frozen=True, slots=True)
class Layer:
    """One block with its weights; `rope` counts among the decoder's."""

    rope: int
    is_last: bool
    input_norm: Tensor
    qkv: Product
    head_norms: HeadNorms | None
    sinks: Tensor | None
    output: Product
    attended_norm: Tensor | None
    inner_norm: Tensor
    mlp: Callable[[Tensor], Tensor]
    mixed_norm: Tensor | None


class Decoder:
    """A `Network` of an architecture and its weights by role, which it takes out of the dict.

    Each of `adapters` is what that adds to products by their roles; a step tells which span goes
    through which, the first of them being number 1. In a `group` architecture and weights are this
    rank's share; the first rank has the logits.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: dict[str, Matrix],
        *,
        has_head: bool = True,
        adapters: Sequence[Mapping[str, LowRank]] = (),
        group: Group = ALONE,
    ) -> None:
        self.num_layers_begun = 0
        self._embedding = as_tensor(weights.pop("embedding"))
        self._group, self._vocab_size = group, architecture.vocab_size
        dtype, device = self._embedding.dtype, self._embedding.device
        self._blocks = choose_blocks(dtype, device)
        self._eps, self._softcap = architecture.eps, architecture.logit_softcap
        # Rounded as transformers rounds it, and as Gemma was trained.
        self._scale = torch.tensor(architecture.embedding_scale).to(dtype).item()
        ropes = list(dict.fromkeys(block.rope for block in architecture.blocks))
        self._ropes = [
            (
                torch.tensor(rope.frequencies, device=device),
                rope.scale,
                None if rope.axes is None else torch.tensor(rope.axes, device=device),
            )
            for rope in ropes
        ]
        products = choose_products(self._blocks, device)
        self._head = products.make(weights.pop("head", self._embedding)) if has_head else None
        self._adapters, self._owners = adapters, Owners()
        maker = _LayerMaker(architecture, self._blocks, products, weights, self._adapting)
        self._layers = [
            maker.layer(index, block, ropes.index(block.rope))
            for index, block in enumerate(architecture.blocks)
        ]
        # What follows each layer: the next one's norm, and the last.
        self._norms = [*(layer.input_norm for layer in self._layers[1:]), maker.norm("norm")]
        # For what else there is much to compute by: experts, and a curve over all logits.
        has_experts = any(block.experts for block in architecture.blocks)
        self.needs_torch = products.needs_torch or has_experts or self._softcap is not None

    def forward(self, step: Step, attention: AttentionBackend) -> Tensor:
        """Run one step → logits `[N, V]`; see `Network.forward`."""
        return self.logits(self.hidden(step, attention))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[N, V]` of the last hidden states `[N, H]`."""
        assert self._head is not None
        if not len(hidden):
            return hidden.new_empty(0, self._vocab_size)
        logits = self._head(hidden)
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return self._group.join(logits, self._vocab_size)

    def hidden(self, step: Step, attention: AttentionBackend) -> Tensor:
        """Run one step → the last hidden states `[N, H]` of its rows, normed."""
        blocks, eps, rows = self._blocks, self._eps, step.logit_rows
        turns = [
            turns_of(_positions(step, axes), frequencies, scale)
            for frequencies, scale, axes in self._ropes
        ]
        if self._adapters:
            self._owners.tell(_owners_of(step))
        residual = self._embedded(step.token_ids)  # [T, H]
        if self._scale != 1:
            residual *= self._scale
        if step.shown_rows is not None and step.shown is not None:
            residual[step.shown_rows] = step.shown
        x = blocks.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._norms, strict=True)):
            self.num_layers_begun += 1
            query = attention.enter(index, layer.qkv(x), turns[layer.rope], layer.head_norms)
            if layer.is_last and not len(rows):
                return residual[:0]
            x = attention.attend(index, query, layer.sinks).flatten(1)  # [T, Hq · D]
            if layer.is_last:
                x, residual = x[rows], residual[rows]
                if self._adapters:
                    self._owners.tell(_owners_of(step)[step.host.logit_rows.numpy()])
            x = self._group.add(layer.output(x))
            if layer.attended_norm is not None:
                x = blocks.rms_norm(x, layer.attended_norm, eps)
            x = blocks.add_rms_norm(x, residual, layer.inner_norm, eps)
            x = self._group.add(layer.mlp(x))
            if layer.mixed_norm is not None:
                x = blocks.rms_norm(x, layer.mixed_norm, eps)
            x = blocks.add_rms_norm(x, residual, next_norm, eps)
        return x

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """Return the vectors `[T, H]` of tokens, each of which one rank has."""
        if self._group.share.size == 1:
            return functional.embedding(token_ids, self._embedding)
        own = self._group.share.of(self._vocab_size)
        places = token_ids - own.start
        is_other = (places < 0) | (places >= len(own))
        vectors = functional.embedding(places.masked_fill(is_other, 0), self._embedding)
        return self._group.add(vectors.masked_fill_(is_other[:, None], 0))

    def _adapting(self, role: str) -> Adapting | None:
        own = [adapter.get(role) for adapter in self._adapters]
        return Adapting(own, self._owners) if any(own) else None


def _owners_of(step: Step) -> NDArray[np.int32]:
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
        blocks: Blocks,
        products: Products,
        weights: dict[str, Matrix],
        adapting: Callable[[str], Adapting | None],
    ) -> None:
        self._model = architecture
        self._blocks = blocks
        self._products = products
        self._weights = weights
        self._adapting = adapting

    def layer(self, index: int, block: Block, rope: int) -> Layer:
        """Return layer `index`."""
        role = f"{index}."
        head_norms = None
        if self._model.has_head_norms:
            query, key = self.norm(f"{role}q_norm"), self.norm(f"{role}k_norm")
            head_norms = HeadNorms(query, key, self._model.eps)
        is_sandwich = self._model.has_sandwich_norms
        return Layer(
            rope=rope,
            is_last=index == len(self._model.blocks) - 1,
            input_norm=self.norm(f"{role}input_norm"),
            qkv=self._product(f"{role}qkv"),
            head_norms=head_norms,
            sinks=self._vector(f"{role}sinks"),
            output=self._product(f"{role}output"),
            attended_norm=self.norm(f"{role}attended_norm") if is_sandwich else None,
            inner_norm=self.norm(f"{role}inner_norm"),
            mlp=self._experts(role, block.experts) if block.experts else self._mlp(role),
            mixed_norm=self.norm(f"{role}mixed_norm") if is_sandwich else None,
        )

    def norm(self, role: str) -> Tensor:
        """Return a norm's weight as the device's functions want it."""
        stored = as_tensor(self._weights.pop(role))
        return self._blocks.norm_weight(stored, self._model.norm_offset)

    def _product(self, role: str, gate: Gate | None = None) -> Product:
        weight, bias = self._weights.pop(role), self._vector(f"{role}_bias")
        if adapting := self._adapting(role):
            return self._products.make_adapted(weight, bias, gate, adapting)
        if gate is not None:
            return self._products.make_gated(weight, bias, gate)
        return self._products.make(weight, bias)

    def _vector(self, role: str) -> Tensor | None:
        weight = self._weights.pop(role, None)
        return None if weight is None else as_tensor(weight)

    def _mlp(self, role: str) -> Product:
        joined = self._product(f"{role}gate_up", self._model.gate)
        down = self._product(f"{role}down")
        return lambda x: down(joined(x))

    def _experts(self, role: str, experts: Experts) -> Product:
        router = self._product(f"{role}router")
        weights = ExpertWeights(
            gate_up=self._weights.pop(f"{role}gate_up"),
            down=self._weights.pop(f"{role}down"),
            gate_up_bias=self._vector(f"{role}gate_up_bias"),
            down_bias=self._vector(f"{role}down_bias"),
        )
        gate, blocks = self._model.gate, self._blocks
        own = choose_experts(weights.down.dtype, weights.down.device)

        def mlp(x: Tensor) -> Tensor:
            chosen, shares = own.choose(
                router(x),
                experts.chosen,
                among_chosen=experts.softmax == "chosen",
                is_renormalised=experts.is_renormalised,
            )
            return own.mix(x, chosen, shares, weights, gate, blocks)

        return mlp

"""Native decoder: one block for every family, over merged weights.

Queries, keys and values are one product, gate and up another. A sum with the residual is one pass
with the norm that follows. After the last layer's attention only the rows whose logits are wanted
are processed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ...kernels.adapters import AdapterMapping, AdapterWeights, LinearAdapters
from ...kernels.attention import AttentionBackend, HeadNorms
from ...kernels.backends import choose_elementwise, choose_linear
from ...kernels.communicator import SINGLE_RANK, Communicator
from ...kernels.elementwise import Norm, apply_rotary, rms_norm, rotary_cos_sin, sigmoid
from ...kernels.hybrid import HybridBackend
from ...kernels.latent import LatentBackend
from ...kernels.linear import Embedding, Linear
from ...kernels.quantised import Matrix, as_tensor
from ...kernels.sparse_latent import Selection
from ...kernels.step import Step, to_device
from ..config.architecture import Architecture
from .decoder_layers import DecoderLayer, LayerMaker, StreamedLayers

# Pairs of a state and a token whose exact logits are computed at once, as both are fp32.
EXACT_PAIRS = 4096


class Decoder:
    """A `Network` of an architecture and its weights by role, which it takes out of the dict.

    Each of `adapters` contains its additions to linear layers by their roles; a step gives the
    adapter of each span, the first of them being number 1. With a `communicator` of several ranks,
    architecture and weights are this rank's shard; the first rank has the logits. With
    `layer_weights` the dict does not contain the layers': each layer is built when it runs.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: dict[str, Matrix],
        *,
        has_head: bool = True,
        adapters: Sequence[Mapping[str, AdapterWeights]] = (),
        communicator: Communicator = SINGLE_RANK,
        layer_weights: Callable[[int], dict[str, Matrix]] | None = None,
    ) -> None:
        self.num_layers_started = 0
        embedding = as_tensor(weights.pop("embed_tokens"))
        self._communicator = communicator if communicator.shard.size > 1 else None
        self._vocab_size = architecture.vocab_size
        dtype, device = embedding.dtype, embedding.device
        self._ops = choose_elementwise(dtype, device)
        self._model = architecture
        # Rounded as in transformers, and as Gemma was trained.
        self._scale = torch.tensor(architecture.embedding_scale).to(dtype).item()
        ropes = list(dict.fromkeys(block.rope for block in architecture.blocks))
        self._ropes = [
            (
                torch.tensor(
                    [rope.inv_freq, rope.long_inv_freq] if rope.long_inv_freq else rope.inv_freq,
                    device=device,
                ),
                rope.attention_scaling,
                None if rope.axes is None else torch.tensor(rope.axes, device=device),
            )
            for rope in ropes
        ]
        linear_factory = choose_linear(self._ops, device)
        self._adapters, self._mapping = adapters, AdapterMapping()
        parts = (architecture, self._ops, linear_factory, weights, self._linear_adapters)
        maker = LayerMaker(*parts, device=device)
        self._embed: Embedding = partial(functional.embedding, weight=embedding)
        self._head: Linear | None = None
        self._head_rows: Embedding | None = None
        if has_head:
            self._head_bias = maker.vector("lm_head_bias")
            self._embed, self._head, self._head_rows = linear_factory.make_head(
                embedding, weights.pop("lm_head", None), self._head_bias
            )
        self.has_exact_logits = self._head_rows is not None
        self._positions = maker.vector("embed_positions")

        def make(index: int) -> DecoderLayer:
            if layer_weights is not None:
                weights.update(layer_weights(index))
            block = architecture.blocks[index]
            return maker.layer(index, block, ropes.index(block.rope))

        self._layers: Sequence[DecoderLayer]
        if layer_weights is None:
            self._layers = [make(index) for index in range(len(architecture.blocks))]
        else:
            self._layers = StreamedLayers(make, len(architecture.blocks))
        norm = maker.norm("norm")
        assert norm is not None
        self._norm = norm
        # Other large computations: experts that are not packed, and a soft cap over all logits.
        has_experts = any(block.experts for block in architecture.blocks) and device.type != "cpu"
        has_curve = architecture.logit_softcap is not None
        self.needs_torch = linear_factory.needs_torch or has_experts or has_curve

    def forward(self, step: Step, attention: AttentionBackend) -> Tensor:
        """Run one step → logits `[N, V]`; see `Network.forward`."""
        return self.forward_whole(step, attention)[1]

    def forward_whole(self, step: Step, attention: AttentionBackend) -> tuple[Tensor, Tensor]:
        """Run one step → the last hidden states `[N, H]` of its rows, and their logits."""
        hidden = self.hidden_states(step, attention)
        return hidden, self.compute_logits(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[N, V]` of the last hidden states `[N, H]`."""
        assert self._head is not None
        if not len(hidden):
            return hidden.new_empty(0, self._vocab_size)
        logits, softcap = self._head(hidden), self._model.logit_softcap
        if self._model.logit_scale != 1:
            logits *= self._model.logit_scale
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if self._communicator is None:
            return logits
        return self._communicator.gather(logits, self._vocab_size)

    def compute_exact_logits(
        self, hidden: Tensor, rows: NDArray[np.int64], token_ids: NDArray[np.int64]
    ) -> Tensor:
        """Return the logit `[M]` of one token after each of some rows of `hidden [N, H]`, in fp32.

        Each logit is a separate sum, so it does not depend on other pairs.
        """
        pairs = (to_device(numbers, hidden.device) for numbers in (rows, token_ids))
        parts = zip(*(torch.split(numbers, EXACT_PAIRS) for numbers in pairs), strict=True)
        logits = torch.cat([self._exact_products(hidden[some], ids) for some, ids in parts])
        logits = self._all_reduce(logits).mul_(self._model.logit_scale)
        softcap = self._model.logit_softcap
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    def _exact_products(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """Return a token's product with each state `[M, H]`, 0 for tokens of other ranks."""
        assert self._head_rows is not None
        is_other, places = self._own_places(token_ids)
        logits = (hidden.float() * self._head_rows(places).float()).sum(1)
        if self._head_bias is not None:
            logits += self._head_bias[places]
        return logits if is_other is None else logits.masked_fill_(is_other, 0)

    def forward_layerwise(self, steps: Sequence[Step], attention: AttentionBackend) -> list[Tensor]:
        """Run steps, all of them through a layer before the next is built → logits of each.

        Each step continues the one before and has rows.
        """
        running = [self._run(step, attention) for step in steps]
        for _ in range(len(self._layers)):
            for step, own in zip(steps, running, strict=True):
                attention.prepare(step)
                next(own)
        return [self.compute_logits(_result(own)) for own in running]

    def hidden_states(self, step: Step, attention: AttentionBackend) -> Tensor:
        """Run one step → the last hidden states `[N, H]` of its rows, normed."""
        return _result(self._run(step, attention))

    def _run(self, step: Step, attention: AttentionBackend) -> Generator[None, None, Tensor]:
        """Run one step, yielding after each layer → see `hidden_states`."""
        rows = step.logit_rows
        cos_sin = [
            rotary_cos_sin(_positions(step, axes), _frequencies(step, frequencies), scaling)
            for frequencies, scaling, axes in self._ropes
        ]
        if self._adapters:
            self._mapping.update(_token_adapters(step))
        residual = self._embedded(step)  # [T, H]
        x: Tensor | None = None  # the next norm adds it to the residual
        selection: Selection | None = None  # of tokens, for later layers
        for index in range(len(self._layers)):
            layer = self._layers[index]
            self.num_layers_started += 1
            if index and step.shown is not None:
                _add_deepstack(residual, step, index)
            if layer.sparse is not None:
                latents = cast("LatentBackend", attention)
                own = latents, x, residual, cos_sin[layer.rope]
                x, selection = layer.sparse.attend(*own, selection)
            elif layer.out_proj is not None:
                x = self._mix(attention, layer, x, residual, cos_sin, step)
            if layer.is_last and not len(rows):
                return residual[:0]
            if layer.is_last:
                x, residual = None if x is None else x[rows], residual[rows]
                if self._adapters:
                    self._mapping.update(_token_adapters(step)[step.host.logit_rows.numpy()])
            x = self._project(layer, x, residual)
            if layer.scalar is not None and x is not None:
                residual, x = residual.add_(x).mul_(layer.scalar), None
            del layer  # frees it before the next one is built
            yield
        return self._norm.add(x, residual)

    def _behind(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Return the sum of the ranks' outputs `[T, H]`, which is added to the residual."""
        x = self._all_reduce(x)
        if norm is not None:
            x = norm(x)
        if self._model.residual_scale != 1:
            x = x * self._model.residual_scale
        return x

    def _mix(  # noqa: PLR0917 - a layer's parts, and a step's
        self,
        attention: AttentionBackend,
        layer: DecoderLayer,
        x: Tensor | None,
        residual: Tensor,
        cos_sin: Sequence[Tensor],
        step: Step,
    ) -> Tensor:
        """Return the output of a layer's attention or recurrence for a step: `[T, inner]`.

        State is stored in any case; it returns nothing if the last layer's rows are not wanted.
        """
        if layer.latent is not None:
            latents, scaling = cast("LatentBackend", attention), self._model.query_scaling
            growth = None if scaling is None else _query_growth(scaling, step.positions)
            return layer.latent.attend(latents, x, residual, cos_sin[layer.rope], growth)
        if layer.recurrent is None:
            return self._attend(attention, layer, x, residual, cos_sin, step)
        assert isinstance(attention, HybridBackend)
        mixed = layer.recurrent.mix(attention.recurrence, x, residual, self._wide_norm)
        if layer.qkv_proj is None:
            return mixed
        assert layer.recurrent.norm is not None
        normed = layer.recurrent.norm(residual)  # the mixer has added x to it
        return torch.cat(
            [mixed, self._attend(attention, layer, None, normed, cos_sin, step)], dim=1
        )

    def _attend(  # noqa: PLR0917 - as `_mix`
        self,
        attention: AttentionBackend,
        layer: DecoderLayer,
        x: Tensor | None,
        residual: Tensor,
        cos_sin: Sequence[Tensor],
        step: Step,
    ) -> Tensor:
        """Store keys and values, and return the output of attention heads: `[T, Hq · Dv]`."""
        assert layer.qkv_proj is not None
        qkv, gate = layer.qkv_proj(x, residual), None
        if self._model.has_output_gate:
            width = layer.shape.num_query_heads * layer.shape.value_dim
            qkv, gate = qkv[:, :-width].contiguous(), qkv[:, -width:]
        query = self._store_qkv(attention, layer, qkv, cos_sin[layer.rope], step.positions)
        if layer.is_last and layer.recurrent is None and not len(step.logit_rows):
            return residual[:0]
        out = attention.attend(layer.index, query, layer.sinks).flatten(1)
        return out if gate is None else out * sigmoid(gate)

    def _project(self, layer: DecoderLayer, x: Tensor | None, residual: Tensor) -> Tensor | None:
        """Return a layer's addition to the residual `[T, H]`, after its mixer's output `x`."""
        if layer.out_proj is not None and x is not None:
            x = layer.out_proj(x)
            if self._model.is_parallel and layer.mlp is not None:
                x = x + layer.mlp(None, residual)
            x = self._behind(x, layer.post_attention_layernorm)
        if layer.mlp is not None and not self._model.is_parallel:
            x = self._behind(layer.mlp(x, residual), layer.post_feedforward_layernorm)
        return x

    def _store_qkv(
        self,
        attention: AttentionBackend,
        layer: DecoderLayer,
        qkv: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """Store keys and values and return the queries `[T, Hq, Dk]`, all of them rotated.

        Steps that the backends' fused pass lacks run before it, or in torch instead of it.
        """
        model, index = self._model, layer.index
        shape, norms = layer.shape, layer.head_norms
        width = shape.num_query_heads * shape.key_dim
        if norms is not None and model.has_wide_qk_norm:
            keys = shape.num_kv_heads * shape.key_dim
            for part, weight in (
                (qkv[:, :width], norms.query),
                (qkv[:, width : width + keys], norms.key),
            ):
                part.copy_(self._wide_norm(part, weight, norms.eps))
            norms = None
        if layer.query_scaling is not None:
            qkv[:, :width] *= _query_growth(layer.query_scaling, positions + 1).to(qkv.dtype)
        if model.query_scaling is not None:
            qkv[:, :width] *= _query_growth(model.query_scaling, positions).to(qkv.dtype)
        if model.value_scale != 1:
            qkv[:, -shape.num_kv_heads * shape.value_dim :] *= model.value_scale
        if model.has_value_norm:
            qkv = self._with_normed_values(layer, qkv)
        if shape.key_dim == shape.value_dim and not model.is_qk_norm_late:
            return attention.store_qkv(index, qkv, cos_sin, norms)
        values = shape.num_kv_heads * shape.value_dim
        query = qkv[:, :width].view(len(qkv), -1, shape.key_dim)
        key = qkv[:, width:-values].view(len(qkv), -1, shape.key_dim)
        value = qkv[:, -values:].view(len(qkv), -1, shape.value_dim)
        if norms is not None and not model.is_qk_norm_late:
            query, key = _head_norms(query, key, norms)
        query, key = apply_rotary(query, cos_sin), apply_rotary(key, cos_sin)
        if norms is not None and model.is_qk_norm_late:
            query, key = _head_norms(query, key, norms)
        attention.store(index, key, value)
        return query

    def _with_normed_values(self, layer: DecoderLayer, qkv: Tensor) -> Tensor:
        """Return queries, keys and values, whose heads are normed; values may be the keys."""
        shape = layer.shape
        width = shape.num_kv_heads * shape.value_dim
        values = qkv[:, -width:]
        heads = values.view(len(qkv), -1, shape.value_dim)  # [T, Hkv, Dv]
        normed = functional.rms_norm(heads, heads.shape[2:], eps=self._model.rms_norm_eps)
        if layer.has_keys_as_values:
            return torch.cat([qkv, normed.flatten(1)], dim=1)
        values.copy_(normed.flatten(1))
        return qkv

    def _wide_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the RMS norm of all heads together: `[T, H · D]`, of which each rank has a share.

        A single rank's `weight` is the result of `norm_weight`.
        """
        if self._communicator is None:
            return self._ops.rms_norm(x.contiguous(), weight, eps)
        wide = x.float()
        mean = wide.square().mean(dim=1, keepdim=True) / self._communicator.shard.size
        mean = self._communicator.all_reduce(mean)
        return (wide * torch.rsqrt(mean + eps) * weight).to(x.dtype)

    def _embedded(self, step: Step) -> Tensor:
        """Return the embeddings `[T, H]` of a step's tokens, or the vectors shown instead."""
        residual = self._looked_up(step.token_ids)
        if self._scale != 1:
            residual *= self._scale
        if self._positions is not None:
            residual += functional.embedding(
                step.positions + self._model.first_position, self._positions
            )
        if step.shown_rows is not None and step.shown is not None:
            residual[step.shown_rows] = step.shown[:, : residual.shape[1]]
        return residual

    def _looked_up(self, token_ids: Tensor) -> Tensor:
        """Return the rows `[T, H]` of the embedding; each row is on one rank."""
        is_other, places = self._own_places(token_ids)
        vectors = self._embed(places)
        if is_other is None:
            return vectors
        return self._all_reduce(vectors.masked_fill_(is_other[:, None], 0))

    def _own_places(self, token_ids: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return a mask of tokens that other ranks have, if any, and the places of the others."""
        if self._communicator is None:
            return None, token_ids
        own = self._communicator.shard.indices(self._vocab_size)
        places = token_ids - own.start
        is_other = (places < 0) | (places >= len(own))
        return is_other, places.masked_fill(is_other, 0)

    def _all_reduce(self, x: Tensor) -> Tensor:
        """Add up the ranks' parts of `x [T, H]` if there are several ranks."""
        return x if self._communicator is None else self._communicator.all_reduce(x)

    def _linear_adapters(self, role: str) -> LinearAdapters | None:
        own = [adapter.get(role) for adapter in self._adapters]
        return LinearAdapters(own, self._mapping) if any(own) else None


def _add_deepstack(residual: Tensor, step: Step, index: int) -> None:
    """Add an image's vectors for layer `index` to the residual `[T, H]`, from the second on."""
    assert step.shown is not None
    assert step.shown_rows is not None
    start, width = index * residual.shape[1], residual.shape[1]
    if start < step.shown.shape[1]:
        residual.index_add_(0, step.shown_rows, step.shown[:, start : start + width])


def _result(running: Generator[None, None, Tensor]) -> Tensor:
    while True:
        try:
            next(running)
        except StopIteration as done:
            result: Tensor = done.value
            return result


def _query_growth(scaling: tuple[float, int], positions: Tensor) -> Tensor:
    """Return the factors of queries by their positions, `[T, 1]`; see `Architecture`."""
    beta, original = scaling
    return (1 + beta * torch.log1p((positions // original).float()))[:, None]


def _token_adapters(step: Step) -> NDArray[np.int32]:
    """Return the adapter of each of a step's tokens, `[T]`."""
    host = step.host
    if host.adapters is None:
        return np.zeros(step.num_tokens, np.int32)
    owners: NDArray[np.int32] = host.adapters.numpy()
    return owners.repeat(np.diff(host.query_starts.numpy()))


def _positions(step: Step, axes: Tensor | None) -> Tensor:
    """Return tokens' positions: `[T, 1]`, or for frequencies of `axes [R]` `[T, R]`."""
    if axes is None or step.axes is None:
        return step.positions[:, None]
    return step.axes.view(-1, step.num_tokens)[axes].T


def _frequencies(step: Step, frequencies: Tensor) -> Tensor:
    """Return tokens' frequencies: `[R]`, or chosen from short and long ones `[2, R]`, `[T, R]`."""
    if frequencies.ndim == 1:
        return frequencies
    return frequencies[0] if step.long_rope is None else frequencies[step.long_rope]


def _head_norms(query: Tensor, key: Tensor, norms: HeadNorms) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of each head."""
    return rms_norm(query, norms.query, norms.eps), rms_norm(key, norms.key, norms.eps)

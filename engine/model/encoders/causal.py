"""Decoders that compute vectors or scores, run by our decoder up to its head."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.attention import AttentionBackend
from ...kernels.backends import choose_backend
from ...kernels.quantised import Matrix, as_tensor
from ...kernels.step import Step
from ..config.architecture import Architecture, Block
from ..config.hf_config import HFConfig
from ..families.registry import architecture_of
from ..network.decoder import Decoder
from ..weights.checkpoint import Checkpoint
from ..weights.weight_parts import whole
from ..weights.weights import read_weights
from .architecture import HeadLinear
from .decision_heads import DecisionHead, JointHead
from .families import OF_ENDPOINTS
from .loaded_encoder import LoadedEncoder
from .pooler import HeadFunction, Pooler, parts_of
from .pooling_config import Classifier
from .sentence_transformers import LogitScore

# A decoder that was further trained with bidirectional attention: Gemma's field, and any family's.
BOTH_WAYS, IS_CAUSAL = "use_bidirectional_attention", "is_causal"


class CausalEncoder:
    """A `EncoderNetwork` of a decoder, whose hidden states are normed as for its head."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.needs_torch = decoder.needs_torch

    @property
    def num_layers_started(self) -> int:
        """Return how many layers have started since the process began."""
        return self._decoder.num_layers_started

    @num_layers_started.setter
    def num_layers_started(self, count: int) -> None:
        self._decoder.num_layers_started = count

    def can_replay(self, token_ids: NDArray[np.int32]) -> bool:
        """Return True: a decoder computes the same functions of any tokens."""
        del token_ids
        return True

    def encode(self, step: Step, type_ids: Tensor | None, attention: AttentionBackend) -> Tensor:
        """Run whole sequences; see `EncoderNetwork.encode`."""
        del type_ids  # a decoder has no segments
        return self._decoder.hidden_states(step, attention)


def decoder_of(hf_config: HFConfig) -> Architecture:
    """Return the architecture of a model's decoder, which may be bidirectional.

    `UnsupportedConfig` says why our decoder cannot run it.
    """
    fields = {key: value for key, value in hf_config.fields.items() if key not in OF_ENDPOINTS}
    looks_both_ways = fields.pop(BOTH_WAYS, None) is True
    if fields.get(IS_CAUSAL) is False:
        del fields[IS_CAUSAL]
        looks_both_ways = True
    architecture = architecture_of(replace(hf_config, fields=fields))
    if not looks_both_ways:
        return architecture
    return replace(architecture, blocks=tuple(map(_looking_both_ways, architecture.blocks)))


def load(
    checkpoint: Checkpoint,
    hf_config: HFConfig,
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    *,
    head: Classifier | LogitScore | DecisionHead | None,
    num_layers: int | None = None,
) -> LoadedEncoder:
    """Return the model in a dtype on a device, or the first layers of it, with its head."""
    labels = head.num_labels if isinstance(head, Classifier) else 0
    score = [whole("score", "score.weight", labels, architecture.hidden_size)] if labels else []
    weights = read_weights(
        checkpoint,
        architecture,
        dtype,
        device,
        is_multimodal=hf_config.is_multimodal,
        num_layers=num_layers,
        has_head=isinstance(head, LogitScore | JointHead),
        more=score,
    )
    parts = _parts(head, architecture, weights)
    lexicon = None
    if isinstance(head, JointHead):
        lexicon = as_tensor(weights.pop("lm_head", weights["embed_tokens"]))
    architecture = replace(architecture, blocks=architecture.blocks[:num_layers])
    shapes = architecture.attention_shapes
    return LoadedEncoder(
        network=CausalEncoder(Decoder(architecture, weights, has_head=False)),
        pooler=Pooler(("lasttoken",), parts),
        shapes=shapes,
        backend=choose_backend(shapes, dtype, device),
        dtype=dtype,
        device=device,
        vocab_size=architecture.vocab_size,
        num_types=0,
        max_model_len=architecture.original_positions or architecture.max_positions,
        hidden_size=architecture.hidden_size,
        max_intermediate_size=architecture.max_intermediate_size,
        recurrent_shapes=architecture.recurrent_shapes,
        lexicon=lexicon,
    )


def _looking_both_ways(block: Block) -> Block:
    """Return a block whose window covers half on either side, and the token itself."""
    if not block.has_attention:
        return block
    shape = block.attention
    window = shape.window and shape.window // 2 + 1
    return replace(block, attention=replace(shape, window=window, is_causal=False))


def _parts(
    head: Classifier | LogitScore | DecisionHead | None,
    architecture: Architecture,
    weights: dict[str, Matrix],
) -> tuple[HeadFunction, ...]:
    """Return the modules after the last token's hidden state; their weights leave the dict."""
    if isinstance(head, Classifier):
        weight = as_tensor(weights.pop("score"))
        labels, hidden = weight.shape
        return parts_of((HeadLinear("score", hidden, labels, has_bias=False),), {"head.0": weight})
    if not isinstance(head, LogitScore):
        return ()
    ids = [head.true_token_id, head.false_token_id]
    table = as_tensor(weights.pop("lm_head", weights["embed_tokens"]))
    rows = table[[i for i in ids if i is not None]].float()
    softcap = architecture.logit_softcap

    def logit(x: Tensor) -> Tensor:
        logits = x @ rows.T  # [S, 1 or 2]
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits if logits.shape[1] == 1 else logits[:, :1] - logits[:, 1:]

    return (logit,)

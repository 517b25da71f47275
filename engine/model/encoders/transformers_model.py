"""Encoders of transformers' own classes: for families that neither of our networks supports.

Sequences of one length run together, without padding and with the class's own attention: this is
slow, but correct for any masks and positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ModelRefused
from ...kernels.attention import AttentionBackend
from ...kernels.reference import ReferenceAttention
from ...kernels.step import Step
from ..config.hf_config import CONFIG
from ..hf.model import positions_of
from ..parity.logits import parity_tokens
from ..weights.checkpoint import Checkpoint
from ..weights.sanity import check_finite, check_not_constant, check_numbers
from .eager import ENCODERS_OF_PAIRS, inputs_of, read_config, read_module
from .loaded_encoder import LoadedEncoder
from .pooler import Pooler
from .pooling_config import Classifier

# Families whose position tables begin after the row of padding.
_OFFSET = frozenset(
    """
    camembert data2vec-text esm ibert longformer luke mpnet roberta roberta-prelayernorm xlm-roberta
    xlm-roberta-xl xmod
    """.split()
)


# Enough tokens to see whether outputs differ, and no more than any model has positions.
_FEW = 8


class TransformersEncoder:
    """A `EncoderNetwork` over a module of transformers.

    A classifier's output for a sequence takes the place of the hidden state of its one row; a token
    classifier's outputs take the places of those of all rows.
    """

    needs_torch = True

    def __init__(self, module: Any, *, classifier: Classifier | None, num_types: int) -> None:
        self.num_layers_started = 0
        self._module = module
        self._classifier = classifier
        self._num_types = num_types

    def can_replay(self, token_ids: NDArray[np.int32]) -> bool:
        """Return False: the module may compute anything."""
        del token_ids
        return False

    def encode(self, step: Step, type_ids: Tensor | None, attention: AttentionBackend) -> Tensor:
        """Run whole sequences, those of one length together; see `EncoderNetwork.encode`."""
        del attention  # the module has its own
        if self._num_types > 1 and type_ids is None:
            type_ids = torch.zeros_like(step.token_ids)
        classifier = self._classifier
        has_one_row = classifier is not None and not classifier.is_per_token
        starts = step.host.query_starts
        lengths = starts.diff()
        outputs: dict[int, Tensor] = {}
        for length in sorted(set(lengths.tolist())):
            self.num_layers_started += 1
            of_length = torch.nonzero(lengths == length)[:, 0]  # [B]
            tokens = (starts[of_length, None] + torch.arange(length)).to(step.token_ids.device)
            types = None if type_ids is None else type_ids[tokens]
            unseen = None if step.unseen is None else step.unseen[of_length]
            output = self._module(**inputs_of(step.token_ids[tokens], types, unseen))
            rows = output.last_hidden_state if classifier is None else output.logits
            rows = rows[:, None] if has_one_row else rows
            outputs |= dict(zip(of_length.tolist(), rows, strict=True))
        together = torch.cat([outputs[number] for number in range(len(lengths))])
        return together if has_one_row else together[step.logit_rows]


def load(
    checkpoint: Checkpoint,
    raw: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    classifier: Classifier | None,
) -> LoadedEncoder:
    """Return the model in a dtype on a device, with the head of a `classifier`.

    `ModelRefused` explains why it cannot be served.
    """
    config = read_config(checkpoint.name, raw)
    check_config(checkpoint.name, config, classifier)
    is_multimodal = "text_config" in raw
    module = read_module(
        checkpoint, config, dtype, device, None, classifier=classifier, is_multimodal=is_multimodal
    )
    check_numbers(checkpoint.name, module.named_parameters())
    num_types = getattr(config, "type_vocab_size", None) or 0
    _check_outputs(checkpoint.name, module, config.vocab_size, device, classifier)
    is_per_token = classifier is not None and classifier.is_per_token
    return LoadedEncoder(
        network=TransformersEncoder(module, classifier=classifier, num_types=num_types),
        pooler=Pooler(() if is_per_token else ("lasttoken",)),
        shapes=(),
        backend=ReferenceAttention,
        dtype=dtype,
        device=device,
        vocab_size=config.vocab_size,
        num_types=num_types,
        max_model_len=positions_of_encoder(config),
        hidden_size=config.num_labels if classifier else config.hidden_size,
    )


def check_config(name: str, config: Any, classifier: Classifier | None) -> None:
    """Refuse a network that does not read tokens, or that gives them no vectors."""
    has_encoder = config.model_type in ENCODERS_OF_PAIRS and classifier is None
    if getattr(config, "is_encoder_decoder", False) and not has_encoder:
        raise ModelRefused(
            f"{name}: model type {config.model_type!r} is an encoder-decoder, which supports "
            "neither embeddings nor scores."
        )
    sizes = ("num_labels" if classifier else "hidden_size", "vocab_size")
    if not all(getattr(config, size, None) for size in sizes):
        raise ModelRefused(
            f"{name}: {CONFIG} does not set both hidden_size and vocab_size: only models that read "
            "tokens and give a vector for each are supported."
        )


def token_class(model_type: str) -> str | None:
    """Return the name of transformers' token classifier of a model type, None without one."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES as NAMES,
    )

    found = NAMES.get(model_type)
    return found if isinstance(found, str) else None


def positions_of_encoder(config: Any) -> int:
    """Return the longest sequence in tokens, less the padding rows of a family's table."""
    positions = positions_of(config) or 512
    padding = getattr(config, "pad_token_id", None)
    is_offset = config.model_type in _OFFSET
    return positions - padding - 1 if is_offset and isinstance(padding, int) else positions


@torch.inference_mode()
def _check_outputs(
    name: str, module: Any, vocab_size: int, device: torch.device, classifier: Classifier | None
) -> None:
    """Refuse a module whose outputs are not finite, the same for all tokens or not the labels'."""
    tokens = parity_tokens(vocab_size, ())[:_FEW].to(device)
    output = module(**inputs_of(tokens[None], None))
    if classifier is None:
        check_not_constant(name, output.last_hidden_state)
        return
    check_finite(name, output.logits)
    if output.logits.shape[-1] != classifier.num_labels:
        raise ModelRefused(
            f"{name}: its head gives {output.logits.shape[-1]} numbers, but {CONFIG} has "
            f"{classifier.num_labels} labels: correct num_labels and id2label."
        )

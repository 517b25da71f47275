"""Reference outputs of transformers' classes by eager attention, for parity checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import ModelRefused, first_line_of
from ..config.hf_config import CONFIG
from ..families.refused_types import REFUSED_TYPES, SPEECH, reason_unknown
from ..hf.pretrained import from_pretrained
from ..parity.logits import round_parameters
from ..weights.checkpoint import Checkpoint, check_shapes, check_token_head
from .forward import TokenSequence
from .pooling_config import Classifier

# Encoder-decoders whose encoder alone gives vectors, each with its encoder's class.
ENCODERS_OF_PAIRS = {
    "longt5": "LongT5EncoderModel",
    "mt5": "MT5EncoderModel",
    "t5": "T5EncoderModel",
    "umt5": "UMT5EncoderModel",
}
# Inputs other than text of transformers' token classifiers: positions on a page, and images.
_MORE_THAN_TEXT = ("bbox", "pixel_values", "image", "xpath_tags_seq")


class EncoderOutput(NamedTuple):
    """One sequence's last hidden states `[t, H]` and a classifier's logits, `[labels]`.

    A token classifier's are `[t, labels]`.
    """

    hidden: Tensor
    logits: Tensor | None


@torch.inference_mode()
def eager_outputs(
    checkpoint: Checkpoint,
    raw: Mapping[str, Any],
    sequences: Sequence[TokenSequence],
    device: torch.device,
    *,
    classifier: Classifier | None,
    num_layers: int | None = None,
    served: torch.dtype = torch.float32,
) -> tuple[list[EncoderOutput], list[EncoderOutput]]:
    """Return a model's answers in fp32, and in the dtype that is `served`, each sequence alone.

    `raw` is config.json after overrides; `num_layers` limits the run to the first layers.
    """
    config = read_config(checkpoint.name, raw)
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_layers]
    module = read_module(
        checkpoint,
        config,
        torch.float32,
        device,
        "eager",
        classifier=classifier,
        is_multimodal="text_config" in raw,
    )
    answer = partial(_answer, module, device=device, is_classifier=classifier is not None)
    exact = [answer(sequence) for sequence in sequences]
    if served == torch.float32:
        return exact, exact
    round_parameters(module, served)
    return exact, [answer(sequence) for sequence in sequences]


def read_config(name: str, raw: Mapping[str, Any]) -> Any:
    """Return transformers' config for the content of a folder's or hub id's config.json."""
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = raw.get("model_type")
    if kind not in CONFIG_MAPPING:
        reason = reason_unknown(kind, has_own_code="auto_map" in raw)
        raise ModelRefused(f"{name}: cannot be read as a model: {reason}")
    try:
        config = AutoConfig.for_model(**raw).get_text_config()
    except Exception as exc:  # a config may fail anywhere in transformers
        raise ModelRefused(f"{name}: cannot be read as a model: {first_line_of(exc)}") from exc
    if kind in REFUSED_TYPES[SPEECH]:
        raise ModelRefused(f"{name}: model type {kind!r} is not supported: {SPEECH}.")
    return config


def read_module(
    checkpoint: Checkpoint,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    attention: str | None,
    *,
    classifier: Classifier | None,
    is_multimodal: bool,
) -> Any:
    """Return transformers' module, bare or as a classifier; `ModelRefused` if weights are missing.

    `attention` None is transformers' default; `is_multimodal`: the files hold more than text.
    """
    import transformers

    _check_activation(checkpoint.name, config)
    made_by = ENCODERS_OF_PAIRS.get(config.model_type, "AutoModel")
    if classifier is not None:
        kind = "Token" if classifier.is_per_token else "Sequence"
        made_by = f"AutoModelFor{kind}Classification"
        made_by = "AutoModelForMaskedLM" if classifier.is_language else made_by
    module, found = from_pretrained(
        getattr(transformers, made_by),
        checkpoint,
        config,
        dtype,
        device,
        attention=attention,
        is_multimodal=is_multimodal,
        ignore_mismatched_sizes=True,
    )
    check_shapes(checkpoint.name, type(module).__name__, found["mismatched_keys"])
    # Other outputs of a base model are not used here.
    missing = [key for key in found["missing_keys"] if classifier or "pooler" not in key]
    if missing:
        raise ModelRefused(
            f"{checkpoint.name}: its weights lack {min(missing)}, which {type(module).__name__} "
            "needs: a file is missing, tensors have another prefix, or config.json belongs to "
            "another model."
        )
    if classifier is not None and classifier.is_per_token and not classifier.is_language:
        check_inputs(checkpoint.name, module)
        title, base = type(module).__name__, module.base_model_prefix
        check_token_head(checkpoint.name, title, base, found["unexpected_keys"])
    return module


def check_inputs(name: str, module: Any) -> None:
    """Refuse a token classifier that reads more than text."""
    more = [key for key in _MORE_THAN_TEXT if key in signature(module.forward).parameters]
    if more:
        raise ModelRefused(
            f"{name}: {type(module).__name__} also reads {more[0]}, which no endpoint accepts: "
            "only token classifiers that read text alone are supported."
        )


def _check_activation(name: str, config: Any) -> None:
    """Refuse an unknown activation: transformers' own error would contain only its name."""
    from transformers.activations import ACT2FN

    for field in ("hidden_act", "hidden_activation", "activation"):
        value = getattr(config, field, None)
        if isinstance(value, str) and value not in ACT2FN:
            raise ModelRefused(
                f"{name}: {CONFIG} has {field} {value!r}, which transformers does not support."
            )


def _answer(
    module: Any, sequence: TokenSequence, *, device: torch.device, is_classifier: bool
) -> EncoderOutput:
    request = sequence.request
    ids = torch.tensor([request.token_ids], device=device)
    types = None if request.type_ids is None else torch.tensor([request.type_ids], device=device)
    inputs = inputs_of(ids, types)
    base = module.base_model if is_classifier else module
    hidden = base(**inputs).last_hidden_state[0].float()
    return EncoderOutput(hidden, module(**inputs).logits[0].float() if is_classifier else None)


def inputs_of(
    token_ids: Tensor, type_ids: Tensor | None, unseen: Tensor | None = None
) -> dict[str, Tensor]:
    """Return sequences of one length `[B, t]` as transformers takes them, without padding.

    No token attends to the last `unseen [B]` tokens of each, if given.
    """
    mask = torch.ones_like(token_ids).long()
    if unseen is not None:
        mask *= torch.arange(mask.shape[1], device=mask.device) < mask.shape[1] - unseen[:, None]
    inputs = {"input_ids": token_ids.long(), "attention_mask": mask}
    if type_ids is not None:
        inputs["token_type_ids"] = type_ids.long()
    return inputs

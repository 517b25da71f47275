"""Decoders of transformers' own classes: for every family that ours does not support.

transformers reads them, faster modules replace theirs where the results agree, and models that
would run silently wrong are refused by name: layers other than attention, or missing weights.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ...config import EngineConfig
from ...errors import ModelRefused, TransformersRefused, first_line_of
from ...kernels.backends import choose_backend
from ..config.device import choose_dtype, context_length
from ..config.hf_config import CONFIG, COUNTS, QUANTISED, TIE, ConfigFields, HFConfig
from ..config.rope import SWITCHING, is_switched, stretched_positions
from ..families.refused_types import reason_refused, reason_unknown
from ..network.loaded_model import LoadedModel
from ..parity.logits import check_parity, compared_rows, parity_tokens
from ..weights.checkpoint import (
    Checkpoint,
    LoadingInfo,
    check_count,
    check_tensors,
    find_checkpoint,
)
from ..weights.quantised.quantization_config import QuantizationConfig
from ..weights.sanity import check_finite, check_logits, check_numbers
from . import modules as transformers_modules
from .forward import ATTENTION, TransformersNetwork, probe
from .pretrained import class_of, from_pretrained, from_state
from .text_classes import register_text_classes

# Config keys that are allowed in addition to the fields of its class.
_FIELDS_OF_ANY = (
    *("architectures", "dtype", "head_dim", "original_max_position_embeddings"),
    *("partial_rotary_factor", "quantization_config", "rope_scaling", "rope_theta", "torch_dtype"),
)
NO_DECODER = "transformers does not have a text-only class for it"
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def load(
    settings: EngineConfig,
    hf_config: HFConfig,
    device: torch.device,
    quantization: QuantizationConfig | None = None,
) -> LoadedModel:
    """Load, probe and check the model; `ModelRefused` names the reason if it cannot be served.

    Quantised weights are dequantised.
    """
    whole = read_config(hf_config)
    refuse_overrides(settings.model, settings.hf_overrides, whole)
    config = text_config_of(whole, hf_config)
    if quantization is not None:
        remove_quantization(config)
    refuse_by_config(settings.model, config)
    stored = getattr(config, "dtype", None)
    dtype = choose_dtype(settings.dtype, stored and getattr(torch, str(stored), stored), device)
    checkpoint = find_checkpoint(settings.model, quantization)
    check_config(checkpoint, config)
    is_multimodal = whole is not config
    read = read_module if quantization is None else read_dequantised
    module, found = read(checkpoint, config, dtype, device, is_multimodal=is_multimodal)
    check_tensors(
        checkpoint.name,
        type(module).__name__,
        {name for name, _ in module.named_modules()},
        module.base_model_prefix,
        found,
        is_multimodal=is_multimodal,
    )
    check_numbers(checkpoint.name, module.named_parameters())
    try:
        return prepare(module, settings, dtype, device)
    except (TypeError, ValueError, RuntimeError) as exc:
        name = type(module).__name__
        raise TransformersRefused(
            f"{settings.model}: {name} failed to run: {first_line_of(exc)}"
        ) from exc


@torch.inference_mode()
def prepare(
    module: nn.Module, settings: EngineConfig, dtype: torch.dtype, device: torch.device
) -> LoadedModel:
    """Probe a module, insert the faster parts, and check the whole against eager attention."""
    config: Any = module.config
    layers, shapes = probe(settings.model, module, device)
    hidden_size, max_intermediate_size = widths(config)
    loaded = LoadedModel(
        network=TransformersNetwork(module, layers),
        shapes=shapes,
        backend=choose_backend(shapes, dtype, device),
        dtype=dtype,
        device=device,
        vocab_size=config.vocab_size,
        max_model_len=context_length(settings, positions_of(config)),
        hidden_size=hidden_size,
        max_intermediate_size=max_intermediate_size,
        eos_token_ids=config.eos_token_id,
    )
    token_ids = parity_tokens(loaded.vocab_size, (shape.most_visible for shape in shapes))
    expected = eager_logits(settings.model, module, token_ids, device)
    check_logits(settings.model, expected)
    transformers_modules.apply(module)
    check_parity(settings.model, loaded, token_ids, expected)
    return loaded


def load_fp32(
    checkpoint: Checkpoint,
    hf_config: HFConfig,
    device: torch.device,
    num_layers: int | None,
) -> nn.Module:
    """Return transformers' class in fp32, or the first of its layers."""
    config = cut_config(hf_config, num_layers)
    if checkpoint.quantization is not None:
        return _filled(checkpoint, hf_config, config, device, num_layers)
    module, found = read_module(
        checkpoint,
        config,
        torch.float32,
        device,
        is_multimodal=hf_config.is_multimodal,
        attention="eager",
    )
    return _whole(checkpoint, module, found.missing)


def cut_config(hf_config: HFConfig, num_layers: int | None) -> Any:
    """Return the config of a model's text, or of its first layers, unquantised."""
    config = text_config_of(read_config(hf_config), hf_config)
    cut_layers(config, num_layers)
    remove_quantization(config)
    return config


def cut_layers(config: Any, num_layers: int | None) -> None:
    """Cut a text model's config to its first layers, None being all."""
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        if kinds := getattr(config, "layer_types", None):
            with suppress(AttributeError):  # classes that derive them from other fields
                config.layer_types = kinds[:num_layers]


def _whole(checkpoint: Checkpoint, network: Any, missing: Collection[str]) -> nn.Module:
    """Return a network with all of its weights; refuse one that was filled at random."""
    lost = LoadingInfo(missing=missing, unexpected=(), mismatched=())
    base = network.base_model_prefix
    check_tensors(checkpoint.name, type(network).__name__, (), base, lost, is_multimodal=False)
    module: nn.Module = network
    return module


def _filled(
    checkpoint: Checkpoint,
    hf_config: HFConfig,
    config: Any,
    device: torch.device,
    num_layers: int | None,
) -> nn.Module:
    """Return transformers' class in fp32 with dequantised weights.

    Its own ways to read them need other libraries and GPUs.
    """
    from transformers import AutoModelForCausalLM

    from .dequantize import dequantised_copy

    state = dequantised_copy(checkpoint, hf_config, device, num_layers)
    module, found = from_state(
        class_of(AutoModelForCausalLM, config),
        config,
        state,
        torch.float32,
        device,
        attention=ATTENTION,
    )
    return _whole(checkpoint, module, found["missing_keys"])


def read_dequantised(
    checkpoint: Checkpoint,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_multimodal: bool,
) -> tuple[Any, LoadingInfo]:
    """Return a module with dequantised weights; see `read_module`."""
    from transformers import AutoModelForCausalLM

    from .dequantize import dequantised_state

    kind = class_of(AutoModelForCausalLM, config)
    state = dequantised_state(checkpoint, kind.__name__, dtype, device, is_multimodal=is_multimodal)
    # Some tools add a bias of zeros to every matrix.
    empty = {key for key in state if key.endswith(".bias") and not state[key].any()}
    module, found = from_state(kind, config, state, dtype, device, attention=ATTENTION)
    unexpected = set(found["unexpected_keys"]) - empty
    return module, LoadingInfo(found["missing_keys"], unexpected, found["mismatched_keys"])


def notes_on_quantization(
    quantization: QuantizationConfig | None, dtype: torch.dtype
) -> tuple[str, ...]:
    """Return a note about weights that are dequantised for transformers' class."""
    if quantization is None:
        return ()
    note = (
        f"its weights are quantised ({quantization.method}) and are dequantised for transformers: "
        f"they take as much memory as unquantised {dtype} weights"
    )
    return (note,)


def remove_quantization(config: Any) -> None:
    """Have transformers build the network of an unquantised model."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def read_config(hf_config: HFConfig) -> Any:
    """Return transformers' config of a model; `ModelRefused` explains why there is none."""
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()  # the check covers its warnings, such as for YaRN by an override
    register_text_classes()
    with TemporaryDirectory() as folder:
        Path(folder, CONFIG).write_text(json.dumps(hf_config.raw), encoding="utf-8")
        try:
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except Exception as exc:  # a config may fail anywhere in transformers
            reason = first_line_of(exc).replace(folder, hf_config.name)
            kind = hf_config.raw.get("model_type")
            if kind not in CONFIG_MAPPING:
                reason = reason_unknown(kind, has_own_code="auto_map" in hf_config.raw)
            raise TransformersRefused(
                f"{hf_config.name}: cannot be read as a model: {reason}"
            ) from exc


def text_config_of(whole: Any, hf_config: HFConfig) -> Any:
    """Return the config of a model's text; its head is tied if the whole config ties it."""
    config = whole.get_text_config(decoder=True)
    if isinstance(config, Mapping):
        raise TransformersRefused(
            f"{hf_config.name}: cannot be read as a model: {CONFIG} has a text_config, which "
            f"transformers' {type(whole).__name__} does not have"
        )
    tied = hf_config.fields.get(TIE)
    if config is not whole and isinstance(tied, bool):
        config.tie_word_embeddings = tied
    return config


def refuse_overrides(name: str, overrides: Mapping[str, Any], config: Any) -> None:
    """Refuse overrides without a field in transformers' config: they would have no effect."""
    if not overrides:
        return
    known = {*type(config)().to_dict(), *config.attribute_map, *_FIELDS_OF_ANY}
    for key, value in overrides.items():
        part = getattr(config, key, None)
        if isinstance(value, Mapping) and hasattr(part, "to_dict"):
            refuse_overrides(name, value, part)
        elif key not in known:
            raise ModelRefused(
                f"{name}: --hf-overrides sets {key}, which {type(config).__name__} does not have: "
                "remove it or check its name."
            )


def refuse_by_config(name: str, config: Any) -> None:
    """Refuse a config with layers other than attention, or with quantised weights."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = getattr(config, "model_type", "unknown")
    others = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS
    if others:
        raise TransformersRefused(
            f"{name}: model type {kind!r} has layers of type {', '.join(sorted(others))}. Only "
            "full and sliding-window attention are supported: with paged attention the state of "
            "other layers would be silently wrong."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise TransformersRefused(
            f"{name}: model type {kind!r} is an encoder-decoder; of these only the Whisper family "
            "is supported."
        )
    reason = reason_refused(kind)
    if reason is None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = NO_DECODER
    if reason is not None:
        raise TransformersRefused(f"{name}: model type {kind!r} is not supported: {reason}.")
    if getattr(config, "quantization_config", None):
        raise ModelRefused(f"{name}: {QUANTISED}")


def check_config(checkpoint: Checkpoint, config: Any) -> None:
    """Refuse a network that the weights cannot fill, without building it.

    transformers would build a network of a million layers, or one that is filled with random
    numbers because its widths belong to another model.
    """
    from transformers import AutoModelForCausalLM

    counts = {key: getattr(config, key, None) for key in COUNTS}
    fields = ConfigFields(f"{checkpoint.name}: {CONFIG}", counts)
    for key in COUNTS:
        fields.count(key, 1)  # transformers reports missing fields
    fields.num_layers()
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    count = sum(weight.numel() for weight in network.parameters())
    # A byte holds two quantised weights.
    check_count(checkpoint, count if checkpoint.quantization is None else count // 2)


def read_module(
    checkpoint: Checkpoint,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_multimodal: bool,
    attention: str = ATTENTION,
) -> tuple[Any, LoadingInfo]:
    """Return a module and how the stored tensors fit it; `is_multimodal` as in `check_tensors`."""
    from transformers import AutoModelForCausalLM

    module, found = from_pretrained(
        AutoModelForCausalLM,
        checkpoint,
        config,
        dtype,
        device,
        attention=attention,
        is_multimodal=is_multimodal,
        ignore_mismatched_sizes=True,
    )
    fit = LoadingInfo(found["missing_keys"], found["unexpected_keys"], found["mismatched_keys"])
    return module, fit


def eager_logits(name: str, module: nn.Module, token_ids: Tensor, device: torch.device) -> Tensor:
    """Return the logits `[n, V]` of a module's own attention for `token_ids [t]`.

    Only the `compared_rows` are returned.
    """
    config: Any = module.config
    rows = torch.from_numpy(compared_rows(len(token_ids))).to(device)
    few: dict[str, Tensor] = {} if len(rows) == len(token_ids) else {"logits_to_keep": rows}
    config._attn_implementation = "eager"  # noqa: SLF001 - transformers has no other switch
    expected: Tensor = module(input_ids=token_ids.to(device)[None], use_cache=False, **few).logits[
        0
    ]
    config._attn_implementation = ATTENTION  # noqa: SLF001
    check_finite(name, expected)
    return expected


def widths(config: Any) -> tuple[int, int]:
    """Return the hidden width and the widest intermediate one: a number, or one per layer."""
    hidden = getattr(config, "hidden_size", 4096)
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    return hidden, inner if isinstance(inner, int) else max(inner)


def positions_of(config: Any) -> int | None:
    """Return how many positions a model distinguishes; None if its config does not contain it."""
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    # Models with two kinds of layers nest one set of parameters under each kind's name.
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    if limit and any(
        part.get("rope_type") in SWITCHING and not is_switched(part) for part in parts
    ):
        longropes = [part for part in parts if part.get("rope_type") == "longrope"]
        originals = [part.get("original_max_position_embeddings") for part in longropes]
        return int(min([found for found in originals if found] or [limit]))
    stretched = [stretched_positions(part) for part in parts if part.get("rope_type") == "yarn"]
    return int(max([limit, *stretched])) if limit else None

"""Loading of decoder models from a folder or the hub, with checks against silently wrong results.

Our own decoder runs a model of a known family that passes the parity check; transformers' classes
run the rest.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch

from tidemill.protocol.contract import EngineError

from ..config import EngineConfig
from ..errors import ModelRefused, TransformersRefused, first_line_of
from ..kernels.backends import fixed_tiles, has_quantised_linear
from ..kernels.quantised import FP8
from ..scheduling.images import ImageSpec
from ..scheduling.prompt_audio import AudioSpec
from . import native
from .adapter_parity import check_adapters
from .adapters.loading import read_adapters
from .attention_parity import check_attention_parity
from .config.architecture import Architecture
from .config.device import choose_device, choose_dtype, context_length
from .config.hf_config import HFConfig, UnsupportedConfig
from .config.transformers_fields import notes_on_ignored
from .families.overridden_config import (
    longest_context,
    read_overridden_config,
    with_context,
)
from .families.refused_types import ONLY_OWN_TYPES
from .families.registry import FAMILIES, architecture_of
from .load_timing import timed
from .native import LeaderRank
from .network.loaded_model import LoadedModel
from .parity.drift import Drift, cached_drift, held_tokens
from .parity.layerwise import LayerReader, layerwise_logits
from .parity.logits import chunked_logits, parity_tokens
from .parity_cache import parity_fact, run_once
from .tensor_parallel import check_tensor_parallel_size
from .vision import audio_encoder
from .vision.preprocessor_config import IMAGE_LIMITS, VisionConfig, read_vision_config
from .weights.checkpoint import Checkpoint, find_checkpoint
from .weights.quantised.quantization_config import (
    QuantizationConfig,
    read_quantization_config,
)
from .weights.sanity import check_logits

_NO_ENCODER = "the engine has no encoder for them"


def load_model(settings: EngineConfig, leader: LeaderRank | None = None) -> LoadedModel:
    """Load and check the model; `ModelRefused` names the reason if it cannot be served.

    A `leader` shares it with other ranks.
    """
    try:
        with fixed_tiles() if settings.batch_invariant else nullcontext():
            loaded = _loaded(settings, leader)
        if settings.kv_cache_dtype != "auto":
            loaded = loaded.with_kv_cache_dtype(FP8)
        with timed("attention"):
            check_attention_parity(settings.model, loaded)
        if settings.batch_invariant:
            from .batch_invariance import check_batch_invariance

            check_batch_invariance(settings, loaded)
    except EngineError:
        raise
    except torch.OutOfMemoryError as exc:
        raise ModelRefused(
            f"{settings.model}: it does not fit into the GPU's memory ({first_line_of(exc)}). Free "
            "memory or use a smaller model; --quantization fp8 halves bf16 weights, and "
            "--tensor-parallel-size N splits the model across N GPUs."
        ) from exc
    except Exception as exc:  # a broken folder may fail anywhere in transformers
        reason = first_line_of(exc).partition(" For details")[0]
        how = " with --hf-overrides" if settings.hf_overrides else ""
        raise ModelRefused(f"{settings.model}: cannot be loaded{how}: {reason}") from exc
    return loaded


def _loaded(settings: EngineConfig, leader: LeaderRank | None) -> LoadedModel:
    hf_config = read_overridden_config(settings)
    try:
        return _load_native(settings, hf_config, leader)
    except UnsupportedConfig as exc:
        why = str(exc)
    is_shared = leader is not None
    quantization = refuse_native_settings(settings, hf_config, why, is_shared=is_shared)
    from .hf import model as transformers_model

    hf_config, device = with_context(hf_config, settings), choose_device(settings.device)
    try:
        loaded = transformers_model.load(settings, hf_config, device, quantization)
    except TransformersRefused as exc:
        raise refused_by_both(hf_config, why, exc) from exc
    notes = (
        f"transformers runs this model, more slowly than the engine's own decoder would: {why}",
        *transformers_model.notes_on_quantization(quantization, loaded.dtype),
        *_notes_on_context(settings, hf_config, loaded.max_model_len),
        *notes_on_media(hf_config),
    )
    return replace(loaded, notes=notes)


def refused_by_both(hf_config: HFConfig, why: str, exc: TransformersRefused) -> ModelRefused:
    """Return a refusal that starts with `why` the engine's own decoder does not run the model.

    For an unknown family it contains transformers' reason only.
    """
    if hf_config.model_type not in FAMILIES:
        return exc
    reason = str(exc).removeprefix(f"{hf_config.name}: ")
    reason = reason.removeprefix(f"model type {hf_config.model_type!r} is not supported: ")
    return ModelRefused(
        f"{hf_config.name}: the engine's own decoder does not support it ({why}), and neither does "
        f"transformers: {reason}"
    )


def refuse_native_settings(
    settings: EngineConfig, hf_config: HFConfig, why: str, *, is_shared: bool
) -> QuantizationConfig | None:
    """Refuse settings that need the engine's own decoder, for a model that it does not run.

    `why` is the reason for that. `is_shared` means that ranks share the model. Return how its
    weights are quantised.
    """
    if hf_config.model_type in ONLY_OWN_TYPES:
        return read_quantization_config(hf_config, settings.quantization)  # refused by its class
    if settings.lora_modules:
        raise ModelRefused(
            f"{settings.model}: transformers runs this model ({why}), but adapters require the "
            "engine's own decoder: merge the adapter into the model."
        )
    quantization = read_quantization_config(hf_config, settings.quantization)
    if quantization is not None and quantization.is_made_at_load:
        raise ModelRefused(
            f"{settings.model}: transformers runs this model ({why}), but quantising weights to "
            f"{quantization.method} requires the engine's own decoder: leave out --quantization."
        )
    if is_shared:
        raise ModelRefused(
            f"{settings.model}: transformers runs this model ({why}), but tensor parallelism "
            "requires the engine's own decoder: leave out --tensor-parallel-size."
        )
    return quantization


def _notes_on_context(
    settings: EngineConfig, hf_config: HFConfig, max_model_len: int
) -> tuple[str, ...]:
    """Return a note about the context of a model that has rope factors for a longer one."""
    longest = longest_context(hf_config)
    if settings.max_model_len is not None or longest is None:
        return ()
    note = (
        f"its context is {max_model_len:,} tokens, with the rope factors for that length; "
        f"--max-model-len up to {longest:,} uses the rope factors for long contexts, for all lines"
    )
    return (note,)


def check_int8(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse int8 weights if the device has no int8 products."""
    if has_quantised_linear(dtype, device, "int8"):
        return
    if device.type != "cpu":
        raise ModelRefused(
            f"{name}: --quantization int8 is for CPUs; on a GPU use --quantization fp8, which "
            "takes as little memory."
        )
    if has_quantised_linear(torch.bfloat16, device, "int8"):
        raise ModelRefused(
            f"{name}: --quantization int8 requires bf16, but this model runs in "
            f"{str(dtype).removeprefix('torch.')}: add --dtype bfloat16, or leave it out."
        )
    raise ModelRefused(
        f"{name}: --quantization int8 requires a processor with AVX512-VNNI and AVX512-BF16 (Intel "
        "Sapphire Rapids, AMD Zen 4 or later): leave it out on this machine."
    )


def notes_on_quantization(
    quantization: QuantizationConfig | None, dtype: torch.dtype, device: torch.device
) -> tuple[str, ...]:
    """Return a note about quantised weights if the device cannot multiply them as they are."""
    if quantization is None or has_quantised_linear(dtype, device, quantization.product):
        return ()
    note = (
        f"its weights are quantised ({quantization.method}), but multiplied as {dtype} on this "
        "device: they take as much memory as unquantised ones"
    )
    return (note,)


def read_vision(
    checkpoint: Checkpoint | None, hf_config: HFConfig
) -> tuple[VisionConfig | None, tuple[str, ...]]:
    """Return a model's image settings, or a note about why it is served without them.

    Without a `checkpoint` its tower is assumed to be complete.
    """
    try:
        vision = read_vision_config(hf_config)
        if vision is not None and checkpoint is not None:
            from .vision.tower import check_tower

            check_tower(checkpoint, hf_config, vision)
    except UnsupportedConfig as exc:
        what = "recordings" if hf_config.raw.get("model_type") == audio_encoder.KIND else "images"
        return None, (f"this model is served without {what}: {exc}",)
    is_deaf = hf_config.raw.get("audio_config") and (vision is None or not vision.hears)
    return vision, (f"this model is served without recordings: {_NO_ENCODER}",) if is_deaf else ()


def notes_on_media(hf_config: HFConfig) -> tuple[str, ...]:
    """Return a note about the inputs other than text of a model whose text transformers runs."""
    parts = {"vision_config": "images", "audio_config": "recordings"}
    kinds = [kind for part, kind in parts.items() if hf_config.raw.get(part)]
    why = "transformers runs its text model only"
    return (f"this model is served without {' and '.join(kinds)}: {why}",) if kinds else ()


@torch.inference_mode()
def _measure_drift(
    checkpoint: Checkpoint, hf_config: HFConfig, architecture: Architecture, loaded: LoadedModel
) -> Drift:
    """Compare a model whose weights were quantised during the load with the plain model.

    The plain one runs layer by layer, in the same dtype.
    """
    token_ids = held_tokens(checkpoint.name, loaded.vocab_size)
    plain = replace(checkpoint, quantization=None)
    reader = LayerReader.open(
        plain, hf_config, architecture, loaded.device, num_layers=None, is_cut=False
    )
    reference = layerwise_logits(reader, loaded, loaded.dtype, token_ids)
    return Drift.between(chunked_logits(loaded, token_ids)[0], reference[0])


def _sight(settings: EngineConfig, hf_config: HFConfig) -> ImageSpec | AudioSpec:
    """Return a model's image settings, with the settings' bounds of pixels, tiles or tokens.

    The parity check ignores them: they change the input, not the model.
    """
    options = settings.mm_processor_kwargs
    others = options.keys() - IMAGE_LIMITS
    try:
        vision = None if others else read_vision_config(hf_config, options)
    except UnsupportedConfig as exc:
        raise ModelRefused(f"{settings.model}: --mm-processor-kwargs: {exc}") from exc
    if vision is None:
        raise ModelRefused(
            f"{settings.model}: --mm-processor-kwargs supports {', '.join(IMAGE_LIMITS)}, not "
            f"{min(others)}."
        )
    return vision.image_spec


def _load_native(
    settings: EngineConfig, hf_config: HFConfig, leader: LeaderRank | None
) -> LoadedModel:
    name = settings.model
    quantization = read_quantization_config(hf_config, settings.quantization)
    architecture = architecture_of(hf_config)
    if leader is not None:
        check_tensor_parallel_size(name, architecture, leader.size, quantization)
    max_model_len = context_length(settings, architecture.max_positions)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, hf_config.dtype, device)
    if settings.quantization == "int8":
        check_int8(name, dtype, device)
    checkpoint = find_checkpoint(name, quantization)
    vision, blind = read_vision(checkpoint, hf_config)
    adapters = read_adapters(settings, hf_config, architecture)
    ranks = () if leader is None else (f"{leader.size} ranks",)
    others = (repr(vision), repr(quantization), *ranks)
    fact = parity_fact(checkpoint, hf_config.raw, dtype, device, *others)
    try:
        with timed("weights"):
            loaded = native.load(
                checkpoint,
                hf_config,
                architecture,
                dtype,
                device,
                vision=vision,
                adapters=adapters,
                leader=leader,
            )
        parts = (checkpoint, hf_config, architecture, loaded, vision)
        with timed("proof"):
            first, *_ = native.inputs_of(hf_config, architecture, device, vision, leader)
            check = partial(native.check_parity, *parts, leader=leader)
            parity = run_once(fact, check, first.num_layers)
    except torch.OutOfMemoryError:
        raise  # transformers' classes would need as much
    except (TypeError, ValueError, RuntimeError) as exc:
        raise UnsupportedConfig(f"it failed to run: {first_line_of(exc)}") from exc
    if not parity.holds:
        raise UnsupportedConfig(
            f"its logits differ from transformers' (relative distance {parity.distance:.2g})"
        )
    tokens = parity_tokens(loaded.vocab_size, ())
    check_logits(name, chunked_logits(loaded, tokens))
    if adapters:
        check_adapters(checkpoint, hf_config, architecture, loaded, adapters, leader=leader)
    if loaded.vision_encoder is not None:
        loaded = replace(
            loaded,
            vision_encoder=loaded.vision_encoder._replace(image_spec=_sight(settings, hf_config)),
        )
    ignored = notes_on_ignored(
        hf_config.where, architecture.class_name, architecture.ignored_fields
    )
    quantised = notes_on_quantization(quantization, dtype, device)
    notes = [*loaded.notes, *ignored, *blind, *quantised]
    is_whole = leader is None and parity.num_layers is None
    if is_whole and quantization is not None and quantization.is_made_at_load:
        measure = partial(_measure_drift, checkpoint, hf_config, architecture, loaded)
        with timed("drift"):
            notes.append(cached_drift(fact, measure).note(quantization.method, dtype))
    if parity.num_layers is not None:
        notes.append(
            f"the parity check against transformers covered the first {parity.num_layers} of "
            f"{len(architecture.blocks)} layers: in fp32 all of them would take minutes, or do not "
            "fit into memory"
        )
    return replace(loaded, max_model_len=max_model_len, notes=tuple(notes))

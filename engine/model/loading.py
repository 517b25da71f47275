"""Loading a decoder model from a folder or the hub, and refusing what would run silently wrong.

Our own decoder runs it where it knows the family and proved to compute the same; transformers'
classes run the rest.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from tidemill.protocol.contract import EngineError

from ..config import EngineConfig
from ..errors import ModelRefused, TransformersRefused, first_line_of
from ..kernels.backends import has_quantised_linear
from ..kernels.quantised import FP8
from ..scheduling.images import ImageSpec
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
from .vision.preprocessor_config import VisionConfig, read_vision_config
from .weights.checkpoint import Checkpoint, find_checkpoint
from .weights.quantised.quantization_config import (
    QuantizationConfig,
    read_quantization_config,
)
from .weights.sanity import check_logits


def load_model(settings: EngineConfig, leader: LeaderRank | None = None) -> LoadedModel:
    """Load and prove the model; `ModelRefused` says by name why one cannot be served.

    A `leader` shares it with other ranks.
    """
    try:
        loaded = _loaded(settings, leader)
        if settings.kv_cache_dtype != "auto":
            loaded = loaded.with_kv_cache_dtype(FP8)
        with timed("attention"):
            check_attention_parity(settings.model, loaded)
    except EngineError:
        raise
    except torch.OutOfMemoryError as exc:
        raise ModelRefused(
            f"{settings.model}: it does not fit into the GPU's memory ({first_line_of(exc)}): free "
            "some or take a smaller model; --quantization fp8 takes half of bf16's, "
            "--tensor-parallel-size shares a model between GPUs."
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
    )
    return replace(loaded, notes=notes)


def refused_by_both(hf_config: HFConfig, why: str, exc: TransformersRefused) -> ModelRefused:
    """Return a refusal that says first `why` the engine's own decoder does not run the model.

    Of a family that it does not know, transformers' reason is all that there is to say.
    """
    if hf_config.model_type not in FAMILIES:
        return exc
    reason = str(exc).removeprefix(f"{hf_config.name}: ")
    reason = reason.removeprefix(f"model type {hf_config.model_type!r} cannot be served: ")
    return ModelRefused(
        f"{hf_config.name}: the engine's own decoder cannot run it ({why}), and transformers "
        f"cannot either: {reason}"
    )


def refuse_native_settings(
    settings: EngineConfig, hf_config: HFConfig, why: str, *, is_shared: bool
) -> QuantizationConfig | None:
    """Refuse what only the engine's own decoder does, for a model that it does not run and `why`.

    `is_shared` says that ranks share the model. Return how its weights are quantised.
    """
    if hf_config.model_type in ONLY_OWN_TYPES:
        return read_quantization_config(hf_config, settings.quantization)  # refused by its class
    if settings.lora_modules:
        raise ModelRefused(
            f"{settings.model}: transformers runs this model ({why}), and adapters are applied by "
            "the engine's own decoder only: merge the adapter into the model."
        )
    quantization = read_quantization_config(hf_config, settings.quantization)
    if quantization is not None and quantization.weight_format is None:
        raise ModelRefused(
            f"{settings.model}: transformers runs this model ({why}), and weights are made "
            f"{quantization.method} by the engine's own decoder only: leave out --quantization."
        )
    if is_shared:
        raise ModelRefused(
            f"{settings.model}: transformers runs this model ({why}), and models are shared "
            "between ranks by the engine's own decoder only: leave out --tensor-parallel-size."
        )
    return quantization


def _notes_on_context(
    settings: EngineConfig, hf_config: HFConfig, max_model_len: int
) -> tuple[str, ...]:
    """Return a note on the context of a model that has rope factors for a longer one."""
    longest = longest_context(hf_config)
    if settings.max_model_len is not None or longest is None:
        return ()
    note = (
        f"its context is {max_model_len:,} tokens, for which it has rope factors of its own; "
        f"--max-model-len up to {longest:,} takes those for long contexts, for all lines"
    )
    return (note,)


def check_int8(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse int8 weights where nothing multiplies them."""
    if has_quantised_linear(dtype, device, "int8"):
        return
    if device.type != "cpu":
        raise ModelRefused(
            f"{name}: --quantization int8 is for CPUs; on a GPU --quantization fp8 takes as little."
        )
    if has_quantised_linear(torch.bfloat16, device, "int8"):
        raise ModelRefused(
            f"{name}: --quantization int8 is for models in bf16, and this one runs in "
            f"{str(dtype).removeprefix('torch.')}: add --dtype bfloat16, or leave it out."
        )
    raise ModelRefused(
        f"{name}: --quantization int8 needs a processor with AVX512-VNNI and AVX512-BF16 (Intel "
        "from Sapphire Rapids, AMD from Zen 4 on), and this is none: leave it out."
    )


def notes_on_quantization(
    quantization: QuantizationConfig | None, dtype: torch.dtype, device: torch.device
) -> tuple[str, ...]:
    """Return a note on quantised weights where nothing multiplies by them as they are."""
    if quantization is None or has_quantised_linear(dtype, device, quantization.method):
        return ()
    note = (
        f"its weights are quantised ({quantization.method}), and multiplied as {dtype} here: "
        "they take as much memory as if they were not"
    )
    return (note,)


def read_vision(
    checkpoint: Checkpoint | None, hf_config: HFConfig
) -> tuple[VisionConfig | None, tuple[str, ...]]:
    """Return what a model says of images, or a note of why it is served without them.

    Without a `checkpoint` its tower is taken to be whole.
    """
    try:
        vision = read_vision_config(hf_config)
        if vision is not None and checkpoint is not None:
            from .vision.tower import check_tower

            check_tower(checkpoint, hf_config, vision)
    except UnsupportedConfig as exc:
        return None, (f"this model is served without images: {exc}",)
    return vision, ()


@torch.inference_mode()
def _measure_drift(
    checkpoint: Checkpoint, hf_config: HFConfig, architecture: Architecture, loaded: LoadedModel
) -> Drift:
    """Compare a model whose weights were quantised as they were read with the plain model.

    The plain one runs layer by layer, in the same dtype.
    """
    token_ids = held_tokens(checkpoint.name, loaded.vocab_size)
    plain = replace(checkpoint, quantization=None)
    reader = LayerReader.open(
        plain, hf_config, architecture, loaded.device, num_layers=None, is_cut=False
    )
    reference = layerwise_logits(reader, loaded, loaded.dtype, token_ids)
    return Drift.between(chunked_logits(loaded, token_ids)[0], reference[0])


def _sight(settings: EngineConfig, hf_config: HFConfig) -> ImageSpec:
    """Return how a model sees, images between the bounds of pixels that the settings have.

    Which its proof knows nothing of: they decide what it is shown, not what it makes of that.
    """
    told = settings.mm_processor_kwargs
    others = told.keys() - {"min_pixels", "max_pixels"}
    try:
        vision = None if others else read_vision_config(hf_config, told)
    except UnsupportedConfig as exc:
        raise ModelRefused(f"{settings.model}: --mm-processor-kwargs: {exc}") from exc
    if vision is None:
        raise ModelRefused(
            f"{settings.model}: --mm-processor-kwargs can tell min_pixels and max_pixels otherwise,"
            f" and not {min(others)}."
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
        raise  # transformers' classes would take no less
    except (TypeError, ValueError, RuntimeError) as exc:
        raise UnsupportedConfig(f"it cannot run here: {first_line_of(exc)}") from exc
    if not parity.holds:
        raise UnsupportedConfig(
            f"the two give other logits (relative distance {parity.distance:.2g})"
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
    if is_whole and quantization is not None and quantization.weight_format is None:
        measure = partial(_measure_drift, checkpoint, hf_config, architecture, loaded)
        with timed("drift"):
            notes.append(cached_drift(fact, measure).note(quantization.method, dtype))
    if parity.num_layers is not None:
        notes.append(
            "the engine's decoder was compared with transformers' by the first "
            f"{parity.num_layers} of {len(architecture.blocks)} layers: in fp32 all of them would "
            "take minutes, or do not fit here"
        )
    return replace(loaded, max_model_len=max_model_len, notes=tuple(notes))

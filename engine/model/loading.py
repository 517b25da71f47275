"""Loading a decoder model from a folder or the hub, and refusing what would run silently wrong.

Our own decoder runs it where it knows the family and proved to compute the same; transformers'
classes run the rest.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from engine.config import EngineConfig
from engine.errors import EngineError, ModelRefused, first_line_of
from engine.kernels.backends import multiplies_quantised
from engine.kernels.quantised import FP8
from engine.model import own
from engine.model.adapter_proof import check_adapters
from engine.model.adapters.loading import read_adapters
from engine.model.checkpoint import Checkpoint, find_checkpoint
from engine.model.description import Description, NotUnderstood
from engine.model.families import architecture_of
from engine.model.network import LoadedModel
from engine.model.overrides import longest_context, read_overridden
from engine.model.own import Leads
from engine.model.placement import choose_device, choose_dtype, context_length
from engine.model.proof import answers, proof_tokens
from engine.model.proved import proof_fact, prove_once
from engine.model.quantised.description import UNQUANTISED, quantisation_of
from engine.model.sanity import refuse_noise
from engine.model.shares import check_shares
from engine.model.vision.description import Vision, describe
from engine.scheduling.pictures import Sight
from engine.timings import timed


def load_model(settings: EngineConfig, leader: Leads | None = None) -> LoadedModel:
    """Load and prove the model; `ModelRefused` says by name why one cannot be served.

    A `leader` shares it with other ranks.
    """
    try:
        loaded = _loaded(settings, leader)
        return loaded if settings.kv_cache_dtype == "auto" else loaded.kept_in(FP8)
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


def _loaded(settings: EngineConfig, leader: Leads | None) -> LoadedModel:
    description = read_overridden(settings)
    try:
        return _run_by_ours(settings, description, leader)
    except NotUnderstood as exc:
        why = str(exc)
    if settings.lora_modules:
        raise ModelRefused(
            f"{settings.model}: transformers runs this model ({why}), and adapters are applied by "
            "the engine's own decoder only: merge the adapter into the model."
        )
    if settings.quantization or description.quantisation:
        raise ModelRefused(
            f"{settings.model}: transformers runs this model ({why}), and quantised weights are "
            f"served by the engine's own decoder only; {UNQUANTISED}."
        )
    if leader is not None:
        raise ModelRefused(
            f"{settings.model}: transformers runs this model ({why}), and models are shared "
            "between ranks by the engine's own decoder only: leave out --tensor-parallel-size."
        )
    from engine.model import fallback

    loaded = fallback.load(settings, description, choose_device(settings.device))
    note = f"transformers runs this model, more slowly than the engine's own decoder would: {why}"
    notes = (note, *_notes_on_context(settings, description, loaded.max_model_len))
    return replace(loaded, notes=notes)


def _notes_on_context(
    settings: EngineConfig, description: Description, max_model_len: int
) -> tuple[str, ...]:
    """Return a note on the context of a model that has rope factors for a longer one."""
    longest = longest_context(description)
    if settings.max_model_len is not None or longest is None:
        return ()
    note = (
        f"its context is {max_model_len:,} tokens, for which it has rope factors of its own; "
        f"--max-model-len up to {longest:,} takes those for long contexts, for all lines"
    )
    return (note,)


def _vision(
    checkpoint: Checkpoint, description: Description
) -> tuple[Vision | None, tuple[str, ...]]:
    """Return what a model says of images, or a note of why it is served without them."""
    try:
        vision = describe(description)
        if vision is not None:
            from engine.model.vision.tower import check_tower

            check_tower(checkpoint, description, vision)
    except NotUnderstood as exc:
        return None, (f"this model is served without images: {exc}",)
    if vision is not None and checkpoint.quantisation is not None:
        return None, ("this model is served without images: its weights are quantised",)
    return vision, ()


def _sight(settings: EngineConfig, description: Description) -> Sight:
    """Return how a model sees, images between the bounds of pixels that the settings have.

    Which its proof knows nothing of: they decide what it is shown, not what it makes of that.
    """
    told = settings.mm_processor_kwargs
    others = told.keys() - {"min_pixels", "max_pixels"}
    try:
        vision = None if others else describe(description, told)
    except NotUnderstood as exc:
        raise ModelRefused(f"{settings.model}: --mm-processor-kwargs: {exc}") from exc
    if vision is None:
        raise ModelRefused(
            f"{settings.model}: --mm-processor-kwargs can tell min_pixels and max_pixels otherwise,"
            f" and not {min(others)}."
        )
    return vision.sight


def _run_by_ours(
    settings: EngineConfig, description: Description, leader: Leads | None
) -> LoadedModel:
    name = settings.model
    quantisation = quantisation_of(description, settings.quantization)
    architecture = architecture_of(description)
    if leader is not None:
        check_shares(name, architecture, leader.size)
    max_model_len = context_length(settings, architecture.max_positions)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, description.dtype, device)
    checkpoint = find_checkpoint(name, quantisation)
    vision, blind = _vision(checkpoint, description)
    adapters = read_adapters(settings, description, architecture)
    ranks = () if leader is None else (f"{leader.size} ranks",)
    others = (repr(vision), repr(quantisation), *ranks)
    fact = proof_fact(checkpoint, description.whole, dtype, device, *others)
    try:
        with timed("weights"):
            loaded = own.load(
                checkpoint,
                description,
                architecture,
                dtype,
                device,
                vision=vision,
                adapters=adapters,
                leader=leader,
            )
        parts = (checkpoint, description, architecture, loaded, vision)
        with timed("proof"):
            proof = prove_once(fact, partial(own.prove, *parts, leader=leader))
    except torch.OutOfMemoryError:
        raise  # transformers' classes would take no less
    except (TypeError, ValueError, RuntimeError) as exc:
        raise NotUnderstood(f"it cannot run here: {first_line_of(exc)}") from exc
    if not proof.holds:
        raise NotUnderstood(f"the two give other logits (relative distance {proof.distance:.2g})")
    tokens = proof_tokens(loaded.vocab_size, ())
    refuse_noise(name, answers(loaded, tokens))
    if adapters:
        check_adapters(checkpoint, description, architecture, loaded, adapters, leader=leader)
    if loaded.eye is not None:
        loaded = replace(loaded, eye=loaded.eye._replace(sight=_sight(settings, description)))
    notes = [*loaded.notes, *blind, *_notes_on_context(settings, description, max_model_len)]
    if quantisation is not None and not multiplies_quantised(dtype, device):
        notes.append(
            f"its weights are quantised ({quantisation.method}), and multiplied as {dtype} here: "
            "they take as much memory as if they were not"
        )
    if proof.num_layers is not None:
        notes.append(
            f"the engine's decoder was compared with transformers' by the first {proof.num_layers} "
            f"of {len(architecture.blocks)} layers: all of them in fp32 do not fit here"
        )
    return replace(loaded, max_model_len=max_model_len, notes=tuple(notes))

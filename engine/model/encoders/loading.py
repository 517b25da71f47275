"""Loading a model that gives vectors or scores, and refusing what would silently give wrong ones.

Our own encoder or decoder runs it where it knows the family and proved to compute the same;
transformers' classes run the rest.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from engine.config import EngineConfig
from engine.errors import EngineError, ModelRefused, first_line_of
from engine.model.checkpoint import find_checkpoint
from engine.model.description import QUANTISED, NotUnderstood, dtype_of
from engine.model.encoders import own
from engine.model.encoders.description import Classifier, EncoderDescription
from engine.model.encoders.families import architecture_of
from engine.model.encoders.modules import head_of
from engine.model.encoders.network import LoadedEncoder
from engine.model.encoders.proof import prove, refuse_infinite
from engine.model.own import Proof
from engine.model.placement import choose_device, choose_dtype, context_length
from engine.model.proved import proof_fact, prove_once


def load_encoder(settings: EngineConfig, description: EncoderDescription) -> LoadedEncoder:
    """Load and prove the model; `ModelRefused` says by name why one cannot be served."""
    try:
        return _loaded(settings, description)
    except EngineError:
        raise
    except Exception as exc:  # a broken folder may fail anywhere in transformers
        reason = first_line_of(exc).partition(" For details")[0]
        raise ModelRefused(f"{settings.model}: cannot be loaded: {reason}") from exc


def _loaded(settings: EngineConfig, description: EncoderDescription) -> LoadedEncoder:
    try:
        return _run_by_our_encoder(settings, description)
    except NotUnderstood as exc:
        raise ModelRefused(f"{settings.model}: the engine's encoder cannot run it: {exc}") from exc


def _run_by_our_encoder(settings: EngineConfig, description: EncoderDescription) -> LoadedEncoder:
    name, said = settings.model, description.config
    if said.get("quantization_config"):
        raise ModelRefused(f"{name}: {QUANTISED}")
    head = description.head
    num_labels = head.num_labels if isinstance(head, Classifier) else None
    architecture = architecture_of(name, said, num_labels)
    max_model_len = context_length(settings, architecture.max_positions)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, stored_dtype(description), device)
    checkpoint = find_checkpoint(name)
    load = partial(own.load, checkpoint, architecture)
    try:
        loaded = load(dtype, device)

        def prove_now() -> Proof:
            from engine.model.encoders.eager import answer_eagerly

            is_classifier = num_labels is not None
            answer = partial(
                answer_eagerly, checkpoint, said, device=device, is_classifier=is_classifier
            )
            return prove(loaded, lambda: load(torch.float32, device), answer)

        proof = prove_once(proof_fact(checkpoint, dtype, device, repr(said)), prove_now)
    except (TypeError, ValueError, RuntimeError) as exc:
        raise NotUnderstood(f"it cannot run here: {first_line_of(exc)}") from exc
    if not proof.holds:
        raise NotUnderstood(f"the two give other vectors (relative distance {proof.distance:.2g})")
    refuse_infinite(name, loaded)
    return replace(loaded, head=head_of(settings, description, loaded), max_model_len=max_model_len)


def stored_dtype(description: EncoderDescription) -> torch.dtype | None:
    """Return the dtype of the stored weights as config.json tells it."""
    said = description.config.get("dtype") or description.config.get("torch_dtype")
    return dtype_of(said)

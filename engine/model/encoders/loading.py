"""Loading a model that gives vectors or scores, and refusing what would silently give wrong ones.

Our own encoder or decoder runs it where it knows the family and proved to compute the same;
transformers' classes run the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from engine.config import EngineConfig
from engine.errors import EngineError, ModelRefused, first_line_of
from engine.model.checkpoint import Checkpoint, find_checkpoint
from engine.model.description import QUANTISED, Description, NotUnderstood, described
from engine.model.encoders import causal, own
from engine.model.encoders.description import Classifier, EncoderDescription
from engine.model.encoders.families import FAMILIES, architecture_of
from engine.model.encoders.modules import head_of
from engine.model.encoders.network import LoadedEncoder
from engine.model.encoders.proof import answers, proof_sequences, prove
from engine.model.layout import weights_of
from engine.model.own import Proof, first_of_each_kind, fits
from engine.model.placement import choose_device, choose_dtype, context_length
from engine.model.proved import proof_fact, prove_once
from engine.model.sanity import refuse_constant


class Loads(Protocol):
    """Loads a network in a dtype on a device, or the first layers of it."""

    def __call__(
        self, dtype: torch.dtype, device: torch.device, *, num_layers: int | None = None
    ) -> LoadedEncoder:
        """Return it with the head that it came with."""


@dataclass(frozen=True, slots=True)
class _Own:
    """A network of ours for a model: how it is loaded, and how many positions it tells apart.

    `count_layers` says how many of its first layers can be proved, None for all.
    """

    load: Loads
    num_positions: int
    count_layers: Callable[[torch.device], int | None]


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
    read = described(settings.model, description.config)
    if read.quantisation:
        raise ModelRefused(f"{settings.model}: {QUANTISED}")
    try:
        loaded = _run_by_ours(settings, description, read)
    except NotUnderstood as exc:
        loaded = _run_by_transformers(settings, description, read, str(exc))
    return replace(loaded, head=head_of(settings, description, loaded))


def _run_by_ours(
    settings: EngineConfig, description: EncoderDescription, read: Description
) -> LoadedEncoder:
    said, is_classifier = description.config, isinstance(description.head, Classifier)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, read.dtype, device)
    checkpoint = find_checkpoint(settings.model)
    candidate = _candidate(checkpoint, description, read)
    max_model_len = context_length(settings, candidate.num_positions)
    try:
        loaded = candidate.load(dtype, device)

        def prove_now() -> Proof:
            from engine.model.encoders.eager import answer_eagerly

            num_layers = candidate.count_layers(device)
            exactly = partial(candidate.load, torch.float32, device, num_layers=num_layers)
            answer = partial(
                answer_eagerly,
                checkpoint,
                said,
                device=device,
                is_classifier=is_classifier,
                num_layers=num_layers,
            )
            return prove(loaded, exactly, answer, num_layers)

        fact = proof_fact(checkpoint, said, dtype, device, repr(description.head))
        proof = prove_once(fact, prove_now)
    except (TypeError, ValueError, RuntimeError) as exc:
        raise NotUnderstood(f"it cannot run here: {first_line_of(exc)}") from exc
    if not proof.holds:
        raise NotUnderstood(f"the two give other vectors (relative distance {proof.distance:.2g})")
    shown = answers(loaded, proof_sequences(loaded))
    refuse_constant(settings.model, torch.cat([one.hidden for one in shown]))
    notes = []
    if proof.num_layers is not None:
        notes.append(
            f"the engine's network was compared with transformers' by the first {proof.num_layers} "
            f"of {len(loaded.shapes)} layers: all of them in fp32 do not fit here"
        )
    return replace(loaded, max_model_len=max_model_len, notes=tuple(notes))


def _candidate(checkpoint: Checkpoint, description: EncoderDescription, read: Description) -> _Own:
    """Return the network of ours that knows the model's family; `NotUnderstood` if none does."""
    head = description.head
    if read.kind in FAMILIES:
        num_labels = head.num_labels if isinstance(head, Classifier) else None
        encoder = architecture_of(checkpoint.name, description.config, num_labels)

        def load(
            dtype: torch.dtype, device: torch.device, *, num_layers: int | None = None
        ) -> LoadedEncoder:
            assert num_layers is None
            return own.load(checkpoint, encoder, dtype, device)

        return _Own(load, encoder.max_positions, lambda _: None)
    decoder = causal.decoder_of(read)

    def count_layers(device: torch.device) -> int | None:
        return None if fits(weights_of(decoder), device) else first_of_each_kind(decoder)

    return _Own(
        partial(causal.load, checkpoint, read, decoder, head=head),
        decoder.max_positions,
        count_layers,
    )


def _run_by_transformers(
    settings: EngineConfig, description: EncoderDescription, read: Description, why: str
) -> LoadedEncoder:
    from engine.model.encoders import foreign

    is_classifier = isinstance(description.head, Classifier)
    if description.head is not None and not is_classifier:
        raise ModelRefused(f"{settings.model}: the engine's decoder cannot run it: {why}")
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, read.dtype, device)
    checkpoint = find_checkpoint(settings.model)
    loaded = foreign.load(
        checkpoint, description.config, dtype, device, is_classifier=is_classifier
    )
    note = (
        "transformers runs this model, sequences of one length together and more slowly than the "
        f"engine's own networks would: {why}"
    )
    max_model_len = context_length(settings, loaded.max_model_len)
    return replace(loaded, max_model_len=max_model_len, notes=(note,))

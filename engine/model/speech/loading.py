"""Loading a speech model, and proving it: our network is held to transformers' at load.

As for decoders the proof is of a function, in fp32 where nothing but the order of sums tells the
two apart, and roughly of the dtype that is served.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import EngineError, ModelRefused, first_line_of
from engine.kernels.attention import MakesBackend
from engine.kernels.backends import choose_backend
from engine.model.checkpoint import Checkpoint, find_checkpoint
from engine.model.description import STORED_DTYPES, read_description
from engine.model.layout import whole
from engine.model.own import TOLERANCE, TOLERANCE_OF_DTYPE, Proof, distances, fits
from engine.model.placement import choose_device, choose_dtype
from engine.model.proved import proof_fact, prove_once
from engine.model.sanity import refuse_noise
from engine.model.speech.architecture import SpeechArchitecture
from engine.model.speech.description import SpeechDescription, read_speech
from engine.model.speech.layout import HEAD, weights_of
from engine.model.speech.network import SpeechNetwork
from engine.model.speech.runner import SpeechRunner, TextStep
from engine.model.weights import check_stored, filled, stored_in

TITLE = "WhisperForConditionalGeneration"
PROOF_TOKENS = 20
# So many layers of either side are compared where not all of them fit in fp32.
FIRST_LAYERS = 2


@dataclass(frozen=True, slots=True)
class LoadedSpeech:
    """A speech model on its device; `backend` makes the pages of its text and of its windows."""

    description: SpeechDescription
    network: SpeechNetwork
    backend: MakesBackend
    dtype: torch.dtype
    device: torch.device
    notes: tuple[str, ...] = ()

    @property
    def architecture(self) -> SpeechArchitecture:
        """Return what the network is made of."""
        return self.network.architecture


def load_speech(settings: EngineConfig) -> LoadedSpeech:
    """Load and prove the model; `ModelRefused` says by name why one cannot be served."""
    try:
        return _loaded(settings)
    except EngineError:
        raise
    except Exception as exc:  # a broken folder may fail anywhere
        raise ModelRefused(f"{settings.model}: cannot be loaded: {first_line_of(exc)}") from exc


def _loaded(settings: EngineConfig) -> LoadedSpeech:
    description = read_speech(settings.model)
    device = choose_device(settings.device)
    stored = STORED_DTYPES.get(str(description.said_dtype))
    dtype = choose_dtype(settings.dtype, stored, device)
    checkpoint = find_checkpoint(settings.model)
    fact = proof_fact(checkpoint, read_description(settings.model).whole, dtype, device)
    loaded = load(checkpoint, description, dtype, device)
    proof = prove_once(fact, partial(prove, checkpoint, loaded))
    if not proof.holds:
        raise ModelRefused(
            f"{settings.model}: the engine's network and transformers' give other logits "
            f"(relative distance {proof.distance:.2g}), so that it would answer wrong."
        )
    refuse_noise(settings.model, answers(loaded))
    if proof.num_layers is None:
        return loaded
    note = (
        f"the engine's network was compared with transformers' by the first {proof.num_layers} "
        "layers of either side: all of them in fp32 do not fit here"
    )
    return replace(loaded, notes=(note,))


def load(
    checkpoint: Checkpoint,
    description: SpeechDescription,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_layers: int | None = None,
) -> LoadedSpeech:
    """Return the model in a dtype on a device, or the first layers of either side of it."""
    architecture = description.architecture
    wanted = list(weights_of(architecture))
    stored = stored_in(checkpoint.files, wanted, HEAD)
    if architecture.is_tied and HEAD in stored:
        wanted.append(
            whole("decoder.head", HEAD, architecture.vocab_size, architecture.hidden_size)
        )
    check_stored(checkpoint, TITLE, wanted, stored)
    if num_layers is not None:
        architecture = first_layers(architecture, num_layers)
        kept = {weight.role for weight in weights_of(architecture)} | {"decoder.head"}
        wanted = [weight for weight in wanted if weight.role in kept]
    weights = filled(checkpoint.name, wanted, stored, dtype, device)
    return LoadedSpeech(
        description=description,
        network=SpeechNetwork(architecture, weights),
        backend=choose_backend([architecture.shape, architecture.encoder_shape], dtype, device),
        dtype=dtype,
        device=device,
    )


def first_layers(architecture: SpeechArchitecture, count: int) -> SpeechArchitecture:
    """Return a model of at most so many layers on either side."""
    return replace(
        architecture,
        encoder_layers=min(count, architecture.encoder_layers),
        decoder_layers=min(count, architecture.decoder_layers),
    )


@torch.inference_mode()
def prove(checkpoint: Checkpoint, loaded: LoadedSpeech) -> Proof:
    """Compare our logits with those of transformers' class and its eager attention, in fp32.

    And roughly those of what is `loaded`, in its dtype.
    """
    architecture, device = loaded.architecture, loaded.device
    num_layers = None if fits(weights_of(architecture), device) else FIRST_LAYERS
    exact = loaded
    if num_layers is not None or loaded.dtype != torch.float32:
        parts = (checkpoint, loaded.description, torch.float32, device)
        exact = load(*parts, num_layers=num_layers)
    got = answers(exact)
    expected = _answered_eagerly(checkpoint, exact)
    del exact
    apart = float(distances(got, expected).max())
    if apart > TOLERANCE or num_layers is not None or loaded.dtype == torch.float32:
        return Proof(apart <= TOLERANCE, apart, num_layers)
    rounded = answers(loaded).float() - expected
    distance = float(rounded.norm() / expected.norm().clamp(min=1e-6))
    return Proof(distance <= TOLERANCE_OF_DTYPE, distance, None)


@torch.inference_mode()
def answers(loaded: LoadedSpeech) -> Tensor:
    """Return the logits `[2, t, V]` of two texts that are said of one window.

    Their tokens come in two chunks and a last one alone, over pages, side by side.
    """
    tokens = _proof_tokens(loaded.architecture)
    texts, total = tokens.shape
    runner = SpeechRunner(loaded.network, loaded.backend, texts)
    features = _proof_features(loaded.architecture)
    for slot in range(texts):
        runner.hear([slot], features)
    parts = []
    for start, stop in ((0, total // 2), (total // 2, total - 1), (total - 1, total)):
        count = stop - start
        step = TextStep(
            slots=np.arange(texts),
            starts=np.full(texts, start),
            counts=np.full(texts, count),
            token_ids=tokens[:, start:stop].numpy().astype(np.int32).ravel(),
            rows=np.arange(texts * count),
        )
        parts.append(runner.write(step).view(texts, count, -1))
    return torch.cat(parts, dim=1)


def _proof_tokens(architecture: SpeechArchitecture) -> Tensor:
    """Return random tokens `[2, t]`."""
    count = min(PROOF_TOKENS, architecture.targets)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, architecture.vocab_size, (2, count), generator=generator)


def _proof_features(architecture: SpeechArchitecture) -> Tensor:
    """Return random features `[1, mels, frames]`."""
    shape = (1, architecture.num_mels, architecture.window_frames)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _answered_eagerly(checkpoint: Checkpoint, exact: LoadedSpeech) -> Tensor:
    """Return what transformers' class answers to the same in fp32, `[2, t, V]`."""
    from transformers import AutoConfig, WhisperForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    config.encoder_layers = exact.architecture.encoder_layers
    config.decoder_layers = exact.architecture.decoder_layers
    config.transformers_weights = None  # the name of a file, which no config decides
    module = WhisperForConditionalGeneration.from_pretrained(
        checkpoint.folder,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        use_safetensors=True,
    )
    module = module.eval().to(exact.device)
    tokens = _proof_tokens(exact.architecture).to(exact.device)
    features = _proof_features(exact.architecture).to(exact.device)
    states = module.model.encoder(features).last_hidden_state
    logits: Tensor = module(
        encoder_outputs=(states.expand(len(tokens), -1, -1),),
        decoder_input_ids=tokens,
        use_cache=False,
    ).logits
    return logits

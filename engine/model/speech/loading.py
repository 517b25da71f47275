"""Loading of speech models, with a parity check of our network against transformers'.

As for decoders, the check in fp32 shows whether both are the same function, since only the order of
sums may differ; the check in the served dtype is approximate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tidemill.protocol.contract import EngineError

from ...config import EngineConfig
from ...errors import ModelRefused, OutOfCacheMemory, first_line_of
from ...kernels.attention import AttentionBackendType
from ...kernels.backends import choose_backend
from ...kernels.step import MAX_SLOTS
from ..config.device import choose_device, choose_dtype, step_limits
from ..config.hf_config import STORED_DTYPES, read_hf_config
from ..hf.pretrained import from_pretrained
from ..native import TOLERANCE, ParityResult, token_distances
from ..network.kv_cache_size import SHARE_OF_FREE, free_bytes
from ..parity.logits import is_rounding, relative_distance, round_parameters
from ..parity.parity_inputs import fits
from ..parity_cache import parity_fact, run_once
from ..weights.checkpoint import Checkpoint, find_checkpoint
from ..weights.sanity import check_logits
from ..weights.weight_parts import Part, Weight, stacked, whole
from ..weights.weights import check_stored, fill_weights, find_stored
from .architecture import KERNEL, SpeechArchitecture
from .runner import SpeechRunner, TextStep, slot_pages, windows_at_once
from .whisper import WhisperModel
from .whisper_config import WhisperConfig, read_speech

HEAD = "proj_out.weight"


def weights_of(model: SpeechArchitecture) -> Iterator[Weight]:
    """Yield all weights; roles begin with `encoder.` or `decoder.`, and then `i.` for layer i."""
    hidden = model.hidden_size
    yield from _convolution("encoder.conv1", model.num_mels, hidden)
    yield from _convolution("encoder.conv2", hidden, hidden)
    yield whole(
        "encoder.embed_positions",
        "model.encoder.embed_positions.weight",
        model.max_source_positions,
        hidden,
    )
    yield whole(
        "decoder.embed_tokens", "model.decoder.embed_tokens.weight", model.vocab_size, hidden
    )
    yield whole(
        "decoder.embed_positions",
        "model.decoder.embed_positions.weight",
        model.max_target_positions,
        hidden,
    )
    if not model.tie_word_embeddings:
        yield whole("decoder.proj_out", HEAD, model.vocab_size, hidden)
    for side, count, inner in (
        ("encoder", model.encoder_layers, model.encoder_ffn_dim),
        ("decoder", model.decoder_layers, model.decoder_ffn_dim),
    ):
        yield from _norm(f"{side}.layer_norm", f"model.{side}.layer_norm", hidden)
        for index in range(count):
            role, prefix = f"{side}.{index}.", f"model.{side}.layers.{index}."
            yield from _norm(f"{role}self_attn_layer_norm", f"{prefix}self_attn_layer_norm", hidden)
            yield from _attention(role, f"{prefix}self_attn.", "qkv", hidden)
            if side == "decoder":
                yield from _norm(
                    f"{role}cross_attn_layer_norm", f"{prefix}encoder_attn_layer_norm", hidden
                )
                yield from _attention(f"{role}cross_", f"{prefix}encoder_attn.", "kv", hidden)
                yield from _linear(
                    f"{role}cross_q_proj", f"{prefix}encoder_attn.q_proj", hidden, hidden
                )
            yield from _norm(f"{role}final_layer_norm", f"{prefix}final_layer_norm", hidden)
            yield from _linear(f"{role}fc1", f"{prefix}fc1", inner, hidden)
            yield from _linear(f"{role}fc2", f"{prefix}fc2", hidden, inner)


def _attention(role: str, prefix: str, letters: str, hidden: int) -> Iterator[Weight]:
    """Yield products of some of queries, keys and values as one, and the one that joins the heads.

    Keys have no bias; their part of a joint bias stays zero.
    """
    rows = [(f"{letter}_proj", hidden) for letter in letters]
    yield stacked(f"{role}{letters}_proj", prefix, "weight", rows, hidden)
    bias = stacked(f"{role}{letters}_proj_bias", prefix, "bias", rows)
    own = tuple(part for part in bias.parts if part.key != f"{prefix}k_proj.bias")
    yield Weight(bias.role, bias.shape, own)
    yield from _linear(f"{role}o_proj", f"{prefix}out_proj", hidden, hidden)


def _linear(role: str, prefix: str, outputs: int, inputs: int) -> Iterator[Weight]:
    yield whole(role, f"{prefix}.weight", outputs, inputs)
    yield whole(f"{role}_bias", f"{prefix}.bias", outputs)


def _norm(role: str, prefix: str, hidden: int) -> Iterator[Weight]:
    yield whole(role, f"{prefix}.weight", hidden)
    yield whole(f"{role}_bias", f"{prefix}.bias", hidden)


def _convolution(role: str, inputs: int, outputs: int) -> Iterator[Weight]:
    """Yield a convolution as a product with the frames of each position, one after the other."""
    key = f"model.{role}"
    shape = (outputs, KERNEL * inputs)
    part = Part(f"{key}.weight", (outputs, inputs, KERNEL), lambda own: _by_inputs(own, inputs))
    yield Weight(role, shape, (part,))
    yield whole(f"{role}_bias", f"{key}.bias", outputs)


def _by_inputs(weight: Tensor, inputs: int) -> Tensor:
    """Return `[O, 3·I]`, frame by frame, as `[O, I, 3]`."""
    return weight.view(len(weight), KERNEL, inputs).transpose(1, 2)


TITLE = "WhisperForConditionalGeneration"
PARITY_TOKENS = 20
# Layers of encoder and decoder that are compared if not all of them fit in fp32.
FIRST_LAYERS = 2


@dataclass(frozen=True, slots=True)
class LoadedSpeech:
    """A speech model on its device; `backend` makes the pages of its text and of its windows."""

    description: WhisperConfig
    network: WhisperModel
    backend: AttentionBackendType
    dtype: torch.dtype
    device: torch.device
    notes: tuple[str, ...] = ()

    @property
    def architecture(self) -> SpeechArchitecture:
        """Return the network's architecture."""
        return self.network.architecture


def load_speech(settings: EngineConfig) -> LoadedSpeech:
    """Load and check the model; `ModelRefused` names the reason if it cannot be served."""
    try:
        return _loaded(settings)
    except EngineError:
        raise
    except Exception as exc:  # a broken folder may fail anywhere
        raise ModelRefused(f"{settings.model}: cannot be loaded: {first_line_of(exc)}") from exc


def _loaded(settings: EngineConfig) -> LoadedSpeech:
    description = read_speech(settings.model)
    device = choose_device(settings.device)
    stored = STORED_DTYPES.get(str(description.stored_dtype))
    dtype = choose_dtype(settings.dtype, stored, device)
    checkpoint = find_checkpoint(settings.model)
    fact = parity_fact(checkpoint, read_hf_config(settings.model).raw, dtype, device)
    loaded = load(checkpoint, description, dtype, device)
    parity = run_once(fact, partial(check_parity, checkpoint, loaded))
    if not parity.holds:
        raise ModelRefused(
            f"{settings.model}: the engine's logits differ from transformers' (relative distance "
            f"{parity.distance:.2g}), so its answers would be wrong."
        )
    check_logits(settings.model, chunked_logits(loaded))
    if parity.num_layers is None:
        return loaded
    note = (
        f"the parity check against transformers covered the first {parity.num_layers} layers of "
        "encoder and decoder: all of them in fp32 do not fit into memory"
    )
    return replace(loaded, notes=(note,))


def load(
    checkpoint: Checkpoint,
    description: WhisperConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_layers: int | None = None,
) -> LoadedSpeech:
    """Return the model in a dtype on a device, or the first layers of its encoder and decoder."""
    architecture = description.architecture
    wanted = list(weights_of(architecture))
    stored = find_stored(checkpoint.files, wanted, HEAD)
    if architecture.tie_word_embeddings and HEAD in stored:
        wanted.append(
            whole("decoder.proj_out", HEAD, architecture.vocab_size, architecture.hidden_size)
        )
    check_stored(checkpoint, TITLE, wanted, stored)
    if num_layers is not None:
        architecture = first_layers(architecture, num_layers)
        roles = {weight.role for weight in weights_of(architecture)} | {"decoder.proj_out"}
        wanted = [weight for weight in wanted if weight.role in roles]
    weights = fill_weights(checkpoint.name, wanted, stored, dtype, device)
    return LoadedSpeech(
        description=description,
        network=WhisperModel(architecture, weights),
        backend=choose_backend([architecture.shape, architecture.encoder_shape], dtype, device),
        dtype=dtype,
        device=device,
    )


def first_layers(architecture: SpeechArchitecture, count: int) -> SpeechArchitecture:
    """Return a model of at most `num_layers` layers in encoder and decoder."""
    return replace(
        architecture,
        encoder_layers=min(count, architecture.encoder_layers),
        decoder_layers=min(count, architecture.decoder_layers),
    )


@torch.inference_mode()
def check_parity(checkpoint: Checkpoint, loaded: LoadedSpeech) -> ParityResult:
    """Compare our logits with those of transformers' class and its eager attention, in fp32.

    The logits of the `loaded` model, in its dtype, may differ by twice as much as eager's in it.
    """
    architecture, device = loaded.architecture, loaded.device
    num_layers = None if fits(weights_of(architecture), device) else FIRST_LAYERS
    exact = loaded
    if num_layers is not None or loaded.dtype != torch.float32:
        parts = (checkpoint, loaded.description, torch.float32, device)
        exact = load(*parts, num_layers=num_layers)
    got = chunked_logits(exact)
    expected, rounded = _eager_logits(checkpoint, exact, loaded.dtype)
    del exact
    apart = float(token_distances(got, expected).max())
    if apart > TOLERANCE or num_layers is not None or loaded.dtype == torch.float32:
        return ParityResult(apart <= TOLERANCE, apart, num_layers)
    distance, eagers = (
        relative_distance(logits, expected) for logits in (chunked_logits(loaded), rounded)
    )
    return ParityResult(is_rounding(distance, eagers, loaded.dtype), distance, None)


@torch.inference_mode()
def chunked_logits(loaded: LoadedSpeech) -> Tensor:
    """Return the logits `[2, t, V]` of two texts for one window.

    Their tokens come in two chunks and a last one alone, over pages, side by side.
    """
    tokens = _parity_tokens(loaded.architecture)
    texts, total = tokens.shape
    runner = SpeechRunner(loaded.network, loaded.backend, texts)
    features = _parity_features(loaded.architecture)
    for slot in range(texts):
        runner.encode([slot], features)
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
        parts.append(runner.decode(step).view(texts, count, -1))
    return torch.cat(parts, dim=1)


def _parity_tokens(architecture: SpeechArchitecture) -> Tensor:
    """Return random tokens `[2, t]`."""
    count = min(PARITY_TOKENS, architecture.max_target_positions)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, architecture.vocab_size, (2, count), generator=generator)


def _parity_features(architecture: SpeechArchitecture) -> Tensor:
    """Return random features `[1, mels, frames]`."""
    shape = (1, architecture.num_mels, architecture.window_frames)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _eager_logits(
    checkpoint: Checkpoint, exact: LoadedSpeech, served: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return transformers' logits for the same in fp32, and as `served`: `[2, t, V]`."""
    from transformers import AutoConfig, WhisperForConditionalGeneration

    config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    config.encoder_layers = exact.architecture.encoder_layers
    config.decoder_layers = exact.architecture.decoder_layers
    module, _ = from_pretrained(
        WhisperForConditionalGeneration,
        checkpoint,
        config,
        torch.float32,
        exact.device,
        attention="eager",
    )
    tokens = _parity_tokens(exact.architecture).to(exact.device)
    features = _parity_features(exact.architecture).to(exact.device)

    def answer(dtype: torch.dtype) -> Tensor:
        states = module.model.encoder(features.to(dtype)).last_hidden_state
        logits: Tensor = module(
            encoder_outputs=(states.expand(len(tokens), -1, -1),),
            decoder_input_ids=tokens,
            use_cache=False,
        ).logits
        return logits

    logits = answer(torch.float32)
    if served == torch.float32:
        return logits, logits
    round_parameters(module, served)
    return logits, answer(served)


def count_slots(loaded: LoadedSpeech, settings: EngineConfig) -> int:
    """Return how many windows fit with their cross-attention pages.

    Raises `OutOfCacheMemory` if there is no room for one.
    """
    pages = slot_pages(loaded.architecture, loaded.backend, loaded.dtype)
    budget = settings.kv_cache_memory
    if budget is None:
        free = free_bytes(loaded.device) - _activation_bytes(loaded, settings)
        budget = int(free * SHARE_OF_FREE[loaded.device.type])
    most = MAX_SLOTS // (pages.of_window * loaded.backend.page_size)
    sequences = step_limits(settings, loaded.device).max_num_seqs
    slots = min(budget // pages.num_bytes, sequences, most)
    if slots < 1:
        raise OutOfCacheMemory(
            f"A window of this model needs {pages.num_bytes:,} bytes of cache, but only "
            f"{max(budget, 0):,} are available: free memory, use a smaller model, or set "
            "--kv-cache-memory."
        )
    return slots


def _activation_bytes(loaded: LoadedSpeech, settings: EngineConfig) -> int:
    """Bound the transient memory of a step: states of the encoded windows, and logits.

    On a GPU, graphs keep separate memory for the same.
    """
    model, size = loaded.architecture, loaded.dtype.itemsize
    widths = 8 * model.hidden_size + 2 * max(model.encoder_ffn_dim, model.decoder_ffn_dim)
    frames = windows_at_once(loaded.device) * model.window_frames
    frames *= 2 if loaded.device.type == "cuda" else 1
    logits = 2 * step_limits(settings, loaded.device).max_num_seqs * model.vocab_size * (size + 4)
    return frames * widths * size + logits

"""Loading a decoder model from a folder or the hub, and refusing what would run silently wrong.

The model is transformers' own class with our attention function. What each layer attends with
comes from a one-token probe, not from reading configs. Before use the model must prove itself:
packed, paged and chunked it gives the logits of its own eager attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine.config import EngineConfig
from engine.errors import ModelRefused
from engine.kernels.reference import AttentionShape, Chunk, PackedStep
from engine.model import paged_attention, swaps

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
POSITION_DEPENDENT_ROPE = {"dynamic", "longrope"}
PROOF_TOKENS = 40
# Relative L2 distance of logits above which paged and eager attention cannot be the same function.
PROOF_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that proved itself: `network` maps packed tokens to logits.

    `layers[i]` is the attention module that `shapes[i]` describes.
    """

    network: nn.Module
    layers: tuple[nn.Module, ...]
    shapes: tuple[AttentionShape, ...]
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    max_model_len: int

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        paged: paged_attention.PagedAttention | paged_attention.RecordingAttention,
    ) -> Tensor:
        """Run one step: `token_ids [T]`, `positions [T]`, `logit_rows [N]` → logits `[N, V]`."""
        return _forward(self.network, token_ids, positions, logit_rows, paged)


def load_model(settings: EngineConfig) -> LoadedModel:
    """Load, probe and prove the model; `ModelRefused` says by name why one cannot be served."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(settings.model, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as exc:
        raise ModelRefused(
            f"{settings.model}: cannot be read as a model: {_first_line(exc)}"
        ) from exc
    config = config.get_text_config(decoder=True)
    refuse_by_config(settings.model, config)
    device = _device(settings.device)
    dtype = _dtype(settings.dtype, config, device)
    try:
        network = AutoModelForCausalLM.from_pretrained(
            settings.model,
            config=config,
            dtype=dtype,
            attn_implementation=paged_attention.NAME,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as exc:
        raise ModelRefused(f"{settings.model}: cannot be loaded: {_first_line(exc)}") from exc
    network = network.eval().requires_grad_(requires_grad=False).to(device)
    try:
        return prepare(network, settings, dtype, device)
    except (TypeError, ValueError, RuntimeError) as exc:
        name = type(network).__name__
        raise ModelRefused(f"{settings.model}: {name} cannot run here: {_first_line(exc)}") from exc


@torch.inference_mode()
def prepare(
    network: nn.Module, settings: EngineConfig, dtype: torch.dtype, device: torch.device
) -> LoadedModel:
    """Probe a network, put the faster modules in, and prove the whole against eager attention."""
    config: Any = network.config
    layers, shapes = probe(settings.model, network, device)
    loaded = LoadedModel(
        network=network,
        layers=layers,
        shapes=shapes,
        dtype=dtype,
        device=device,
        vocab_size=config.vocab_size,
        max_model_len=context_length(settings, config),
    )
    token_ids = torch.randint(
        0, loaded.vocab_size, (PROOF_TOKENS,), generator=torch.Generator().manual_seed(0)
    ).to(device)
    config._attn_implementation = "eager"  # noqa: SLF001 - transformers has no other switch
    expected = network(input_ids=token_ids[None], use_cache=False).logits[0]
    config._attn_implementation = paged_attention.NAME  # noqa: SLF001
    swaps.apply(network)
    prove(settings, loaded, token_ids, expected)
    return loaded


def refuse_by_config(name: str, config: Any) -> None:
    """Refuse by what the config says: layers that are no attention, quantised weights."""
    kind = getattr(config, "model_type", "unknown")
    others = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS
    if others:
        raise ModelRefused(
            f"{name}: model type {kind!r} has layers of type {', '.join(sorted(others))}. Only "
            "models of full or sliding-window attention can be served: a paged attention function "
            "would leave the other layers' state wrong without any error."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused(f"{name}: model type {kind!r} is an encoder-decoder, not a decoder.")
    if getattr(config, "quantization_config", None):
        raise ModelRefused(
            f"{name}: its weights are quantised, which is not supported; use the unquantised model."
        )


def probe(
    name: str, network: nn.Module, device: torch.device
) -> tuple[tuple[nn.Module, ...], tuple[AttentionShape, ...]]:
    """Run one token and return each layer's attention module and shape, in order."""
    recording = paged_attention.RecordingAttention()
    one = torch.zeros(1, dtype=torch.long, device=device)
    try:
        _forward(network, one, one, one, recording)
    except (TypeError, ValueError, KeyError, AttributeError) as exc:
        raise ModelRefused(
            f"{name}: {type(network).__name__} does not pass the attention interface's arguments "
            f"through: {_first_line(exc)}"
        ) from exc
    config: Any = network.config
    expected = config.num_hidden_layers
    if len(recording.modules) != expected or len(set(map(id, recording.modules))) != expected:
        raise ModelRefused(
            f"{name}: {type(network).__name__} has {expected} layers but made "
            f"{len(recording.modules)} attention calls a token. Every layer must be one attention "
            "layer: the state of any other kind would be silently wrong."
        )
    return tuple(recording.modules), tuple(recording.shapes)


def context_length(settings: EngineConfig, config: Any) -> int:
    """Return the longest sequence to serve; refuse one that the positions cannot tell apart."""
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    # Models with two kinds of layers nest one set of parameters under each kind's name.
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    if any(part.get("rope_type") in POSITION_DEPENDENT_ROPE for part in parts):
        # These switch their frequencies by the longest position of the packed batch, so that one
        # request would change another: stay where they never switch.
        originals = [part.get("original_max_position_embeddings") for part in parts]
        limit = min([found for found in originals if found] or [limit])
    if settings.max_model_len is None:
        return int(limit or 4096)
    if limit and settings.max_model_len > limit:
        raise ModelRefused(
            f"{settings.model}: --max-model-len {settings.max_model_len} is more than the "
            f"{limit} positions that this model can tell apart here."
        )
    return settings.max_model_len


def prove(settings: EngineConfig, loaded: LoadedModel, token_ids: Tensor, expected: Tensor) -> None:
    """Refuse a model whose paged, packed and chunked logits are not those of eager attention.

    `token_ids [t]` run twice side by side, in two chunks each and a final single token, against
    `expected [t, V]` from one eager pass: state that does not live in keys and values shows here.
    """
    total = token_ids.shape[0]
    cut = total // 2
    pages_each = -(-total // settings.page_size)
    cache = paged_attention.KVCache(
        loaded.shapes, 2 * pages_each, settings.page_size, loaded.dtype, loaded.device
    )
    pages = torch.arange(2 * pages_each, device=loaded.device).view(2, pages_each)
    paged = paged_attention.PagedAttention(loaded.layers, loaded.shapes, cache)
    logits = [
        _proof_step(
            loaded, paged, token_ids[start:stop], start, pages, page_size=settings.page_size
        )
        for start, stop in ((0, cut), (cut, total - 1), (total - 1, total))
    ]
    for sequence in range(2):
        got = torch.cat([part.view(2, -1, part.shape[-1])[sequence] for part in logits])
        scale = expected.float().norm().clamp(min=1e-6)
        distance = float((got.float() - expected.float()).norm() / scale)
        if not distance <= PROOF_TOLERANCE[loaded.dtype]:
            raise ModelRefused(
                f"{settings.model}: {type(loaded.network).__name__} gives other logits with paged "
                f"attention than with its own (relative distance {distance:.2g}): it keeps state "
                "that is not in keys and values, or masks in a way that its attention call does "
                "not tell."
            )


def _proof_step(
    loaded: LoadedModel,
    paged: paged_attention.PagedAttention,
    token_ids: Tensor,
    start: int,
    pages: Tensor,
    *,
    page_size: int,
) -> Tensor:
    """Run `token_ids [t]` from position `start` for both copies as one step → `[2·t, V]`."""
    device, span = loaded.device, token_ids.shape[0]
    positions = torch.arange(start, start + span, device=device)
    single = span == 1
    step = PackedStep(
        num_decodes=2 if single else 0,
        token_pages=pages[:, positions // page_size].reshape(-1),
        token_offsets=(positions % page_size).repeat(2),
        decode_pages=pages[: 2 * single].int(),
        decode_lengths=torch.full((2 * single,), start + 1, dtype=torch.int32, device=device),
        chunks=()
        if single
        else tuple(Chunk(i * span, (i + 1) * span, start, pages[i]) for i in range(2)),
    )
    rows = torch.arange(2 * span, device=device)
    return loaded.forward(token_ids.repeat(2), positions.repeat(2), rows, paged.over(step))


def _forward(
    network: nn.Module, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, paged: Any
) -> Tensor:
    output = network(
        input_ids=token_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=logit_rows,
        paged=paged,
    )
    logits: Tensor = output.logits[0]
    return logits


def _device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelRefused("--device cuda was asked for, but torch sees no CUDA device here.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    if name != "auto":
        chosen = getattr(torch, name)
        assert isinstance(chosen, torch.dtype)
        return chosen
    stored = getattr(config, "dtype", None) or torch.float32
    if device.type == "cpu" and stored != torch.float32 and not _cpu_has_bfloat16():
        return torch.float32
    if device.type == "cpu" and stored == torch.float16:
        return torch.bfloat16  # the CPU has no fp16 arithmetic worth using
    return stored if isinstance(stored, torch.dtype) else getattr(torch, str(stored))


def _cpu_has_bfloat16() -> bool:
    """Say whether bfloat16 products are instructions here; emulated they are 3-5 times slower."""
    # torch tells this nowhere else.
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001


def _first_line(exc: Exception) -> str:
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]

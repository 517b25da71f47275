"""Loading a decoder model from a folder or the hub, and refusing what would run silently wrong.

The model is transformers' own class with our attention function, and proved before use.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from engine.config import EngineConfig
from engine.errors import EngineError, ModelRefused, first_line_of
from engine.kernels.backends import choose_backend
from engine.model import swaps
from engine.model.checkpoint import check_tensors, find_checkpoint
from engine.model.description import check_description, read_description
from engine.model.forward import ATTENTION, TransformersNetwork
from engine.model.network import LoadedModel
from engine.model.proof import probe, prove, run_eagerly

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
# Where a model of text and images keeps the text model that is served by itself.
TEXT_OF_WHOLE = {
    r"^language_model\.(?=model\.|lm_head\.)": "",
    r"^model\.language_model\.": "model.",
}
POSITION_DEPENDENT_ROPE = {"dynamic", "longrope"}


def load_model(settings: EngineConfig) -> LoadedModel:
    """Load, probe and prove the model; `ModelRefused` says by name why one cannot be served."""
    try:
        return _loaded(settings)
    except EngineError:
        raise
    except Exception as exc:  # a broken folder may fail anywhere in transformers
        reason = first_line_of(exc).partition(" For details")[0]
        raise ModelRefused(f"{settings.model}: cannot be loaded: {reason}") from exc


def _loaded(settings: EngineConfig) -> LoadedModel:
    whole = read_description(settings.model)
    config = whole.get_text_config(decoder=True)
    refuse_by_config(settings.model, config)
    device = _device(settings.device)
    dtype = _dtype(settings.dtype, config, device)
    network = _read_network(settings.model, config, dtype, is_part=whole is not config)
    network = network.eval().requires_grad_(requires_grad=False).to(device)
    try:
        return prepare(network, settings, dtype, device)
    except (TypeError, ValueError, RuntimeError) as exc:
        name = type(network).__name__
        raise ModelRefused(
            f"{settings.model}: {name} cannot run here: {first_line_of(exc)}"
        ) from exc


@torch.inference_mode()
def prepare(
    module: nn.Module, settings: EngineConfig, dtype: torch.dtype, device: torch.device
) -> LoadedModel:
    """Probe a module, put the faster parts in, and prove the whole against eager attention."""
    config: Any = module.config
    layers, shapes = probe(settings.model, module, device)
    hidden_width, inner_width = widths(config)
    loaded = LoadedModel(
        network=TransformersNetwork(module, layers),
        shapes=shapes,
        backend=choose_backend(shapes, dtype, device),
        dtype=dtype,
        device=device,
        vocab_size=config.vocab_size,
        max_model_len=context_length(settings, config),
        hidden_width=hidden_width,
        inner_width=inner_width,
        eos_token_ids=config.eos_token_id,
    )
    token_ids, expected = run_eagerly(module, device)
    swaps.apply(module)
    prove(settings.model, loaded, token_ids, expected)
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


def _read_network(name: str, config: Any, dtype: torch.dtype, *, is_part: bool) -> nn.Module:
    """Return the network with its own weights, all of them; `is_part` as in `check_tensors`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # its tables of what does not fit: `check_tensors` says it
    config.transformers_weights = None  # the name of a file, which no config decides
    checkpoint = find_checkpoint(name)
    check_description(name, config, checkpoint.num_bytes)
    network, found = AutoModelForCausalLM.from_pretrained(
        checkpoint.folder,
        config=config,
        dtype=dtype,
        attn_implementation=ATTENTION,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        key_mapping=TEXT_OF_WHOLE if is_part else None,
        output_loading_info=True,
    )
    check_tensors(name, network, found, is_part=is_part)
    read: nn.Module = network
    return read


def widths(config: Any) -> tuple[int, int]:
    """Return the hidden width and the widest inner one: one number, one a layer, or not told."""
    hidden = getattr(config, "hidden_size", 4096)
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    return hidden, inner if isinstance(inner, int) else max(inner)


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

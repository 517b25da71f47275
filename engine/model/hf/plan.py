"""Plan of a model that transformers' class runs, by its network on the meta device."""

from __future__ import annotations

from typing import Any

import torch

from ...config import EngineConfig
from ...errors import TransformersRefused, first_line_of
from ..config.device import choose_dtype, choose_planned_device, context_length
from ..config.hf_config import HFConfig
from ..model_plan import MemoryPlan, ModelPlan, find_weights, plan_memory
from ..weights.quantised.quantization_config import QuantizationConfig
from . import model as transformers_model
from .forward import ATTENTION, probe


def plan_transformers(
    settings: EngineConfig,
    hf_config: HFConfig,
    why: str,
    quantization: QuantizationConfig | None = None,
) -> ModelPlan:
    """Return the plan; `ModelRefused` names the reason if a model cannot be served."""
    name = settings.model
    whole = transformers_model.read_config(hf_config)
    transformers_model.refuse_overrides(name, settings.hf_overrides, whole)
    config = transformers_model.text_config_of(whole, hf_config)
    if quantization is not None:
        transformers_model.remove_quantization(config)
    transformers_model.refuse_by_config(name, config)
    device = choose_planned_device(settings.device)
    stored = getattr(config, "dtype", None)
    dtype = choose_dtype(settings.dtype, stored and getattr(torch, str(stored), stored), device)
    checkpoint, notes = find_weights(name, quantization)
    if checkpoint is not None:
        transformers_model.check_config(checkpoint, config)
    max_model_len = context_length(settings, transformers_model.positions_of(config))
    module = _module(name, config)
    return ModelPlan(
        runs="transformers",
        why=why,
        class_name=type(module).__name__,
        device=device,
        dtype=dtype,
        quantization=None if quantization is None else quantization.method,
        max_model_len=max_model_len,
        memory=_memory(settings, module, dtype, device, max_model_len),
        notes=(*notes, *transformers_model.notes_on_quantization(quantization, dtype)),
    )


def _module(name: str, config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            # Grouped products of experts support no other dtype there.
            module = AutoModelForCausalLM.from_config(
                config,
                attn_implementation=ATTENTION,
                dtype=torch.bfloat16,
                trust_remote_code=False,
            )
    except Exception as exc:  # a config may fail anywhere in transformers
        raise TransformersRefused(f"{name}: cannot be loaded: {first_line_of(exc)}") from exc
    return module.eval()


@torch.inference_mode()
def _memory(
    settings: EngineConfig,
    module: Any,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
) -> MemoryPlan | None:
    """Return the memory of a network; None if its class cannot run without numbers.

    `ModelRefused` explains why its layers are not supported.
    """
    try:
        _, shapes = probe(settings.model, module, torch.device("meta"))
    except (RuntimeError, NotImplementedError):
        return None
    weight_bytes = sum(weight.numel() for weight in module.parameters()) * dtype.itemsize
    return plan_memory(
        settings,
        shapes,
        weight_bytes,
        dtype=dtype,
        device=device,
        widths=transformers_model.widths(module.config),
        vocab_size=module.config.vocab_size,
        max_model_len=max_model_len,
    )

"""Command-line flags of workers, wherever they run."""

from __future__ import annotations

from infra.config import Model


def worker_flags(model: Model) -> list[str]:
    """Return the flags of `tidemill worker` that serve a model as configured."""
    # Without its GPU a worker must end: on the CPU it would only delay shards.
    flags = [
        "--served-model-name",
        model.name,
        *model.aliases,
        "--dtype",
        model.dtype,
        "--kv-cache-dtype",
        model.kv_cache_dtype,
        "--device",
        "cuda",
        "--exit-when-idle",
        str(model.idle_minutes * 60),
    ]
    if model.gpus_per_engine > 1:
        flags += ["--tensor-parallel-size", str(model.gpus_per_engine)]
    if model.gpus_per_engine < model.gpus_per_worker:
        flags += ["--data-parallel-size", "auto"]
    if model.quantization:
        flags += ["--quantization", model.quantization]
    if model.weights:
        flags += ["--model", model.weights]
    if model.weights_region:
        flags += ["--weights-region", model.weights_region]
    if model.min_workers:
        flags += ["--min-workers", str(model.min_workers)]
    if model.min_workers_hours:
        flags += ["--min-workers-hours", model.min_workers_hours]
    flags += adapter_flags(model)
    return [*flags, *model.args]


def adapter_flags(model: Model) -> list[str]:
    """Return the flags of `tidemill worker` that serve a model's adapters."""
    named = [f"{adapter.name}={adapter.weights}" for adapter in model.adapters]
    return ["--lora-modules", *named] if named else []

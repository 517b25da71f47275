"""From settings to something that answers requests: what the model is decides what that takes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

import torch

from engine.config import EngineConfig
from engine.contract import EngineInfo
from engine.endpoints.served import ServedEngine
from engine.errors import EngineError
from engine.files import find_folder, revision_of
from engine.kinds import KINDS, Kind, kind_of
from engine.model.placement import choose_device, step_limits
from engine.remembered import sources_digest
from engine.timings import steps_taken, timed


def load_served(
    config: EngineConfig,
    *,
    served_names: tuple[str, ...] = (),
    chat_template: str | None = None,
    kinds: Sequence[Kind] = KINDS,
) -> ServedEngine:
    """Load `config.model` and serve it under `served_names` (default: the model's own name).

    `chat_template` is a template's text or the path of a file that holds it; `kinds` are what a
    model may be. Raises `EngineError` for what cannot be loaded.
    """
    names = served_names or (config.model,)
    adapters = tuple(module.name for module in config.lora_modules)
    if taken := set(adapters) & set(names):
        raise EngineError(f"an adapter and its model are both called {min(taken)}")
    folder = find_folder(config.model)
    kind = kind_of(folder, config, kinds)
    with timed("load"):
        loaded = kind.load(config, folder=folder, chat_template=chat_template)
    is_gpu = loaded.device.type == "cuda"
    info = EngineInfo(
        model=config.model,
        revision=None if folder is None else revision_of(folder),
        engine_version=_version(),
        device=torch.cuda.get_device_name(loaded.device) if is_gpu else loaded.device.type,
        num_gpus=config.tensor_parallel_size if is_gpu else 0,
        max_num_seqs=step_limits(config, loaded.device).max_num_seqs,
        notes=loaded.notes,
        adapters=adapters,
        endpoints=tuple(endpoint.route.name for endpoint in loaded.endpoints),
        load_seconds=steps_taken(),
    )
    return ServedEngine(
        loaded.endpoints,
        loaded.engine,
        info,
        model_names=names,
        adapters=adapters,
        online=loaded.online,
    )


def prepare(config: EngineConfig) -> None:
    """Do what a load begins with and needs no weights for; raises `EngineError` without a GPU."""
    device = choose_device(config.device)
    if device.type == "cuda":
        torch.empty(1, device=device)  # which makes its context


def _version() -> str:
    """Return the version that is installed, or for a tree of sources what lies in them."""
    try:
        return metadata.version("tidemill")
    except metadata.PackageNotFoundError:
        return f"source-{sources_digest()}"

"""Loading: settings to a dispatcher that answers requests, depending on the kind of model."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from tidemill.protocol.contract import EngineError, EngineInfo

from .config import EngineConfig
from .endpoints.dispatcher import Dispatcher
from .heap_trim import keep_heap
from .model.config.device import choose_device, step_limits
from .model.load_timing import downloading, step_seconds, timed
from .storage.disk_cache import sources_digest
from .storage.gguf.unpacked import unpack_weights
from .storage.hub import find_folder, find_gguf, snapshot_commit
from .storage.model_digest import sampled_digest
from .tasks import TASKS, Task, find_task


def load_served(
    config: EngineConfig,
    *,
    served_names: tuple[str, ...] = (),
    chat_template: str | None = None,
    tasks: Sequence[Task] = TASKS,
) -> Dispatcher:
    """Load `config.model` and serve it under `served_names` (default: the model's own name).

    `chat_template` is a template's text or the path of a file that contains it; `tasks` are the
    supported kinds of models. Raises `EngineError` if the model cannot be loaded.
    """
    names = served_names or (config.model,)
    adapters = tuple(module.name for module in config.lora_modules)
    if shared := set(adapters) & set(names):
        raise EngineError(f"the name {min(shared)!r} is used for both an adapter and the model")
    with downloading():
        folder = find_folder(config.model)
    gguf = find_gguf(config.model)
    source = gguf or folder
    unpacking = None if gguf is None else _unpacked(gguf)
    task = find_task(folder, config, tasks)
    with timed("load"):
        loaded = task.load(config, folder=folder, chat_template=chat_template)
    is_gpu = loaded.device.type == "cuda"
    if not is_gpu:
        keep_heap()
    info = EngineInfo(
        model=config.model,
        revision=None if source is None else snapshot_commit(source),
        engine_version=_version(),
        device=torch.cuda.get_device_name(loaded.device) if is_gpu else loaded.device.type,
        num_gpus=config.tensor_parallel_size if is_gpu else 0,
        max_num_seqs=loaded.max_num_seqs or step_limits(config, loaded.device).max_num_seqs,
        notes=loaded.notes if unpacking is None else (unpacking, *loaded.notes),
        adapters=adapters,
        endpoints=tuple(endpoint.route.name for endpoint in loaded.endpoints),
        load_seconds=step_seconds(),
        model_digest=None if source is None else sampled_digest(source),
        labels_spans=any(getattr(each, "labels_spans", False) for each in loaded.endpoints),
    )
    return Dispatcher(
        loaded.endpoints,
        loaded.engine,
        info,
        model_names=names,
        adapters=adapters,
        online=loaded.online,
        shows_cached_tokens=config.enable_prompt_tokens_details,
    )


def prepare(config: EngineConfig) -> None:
    """Do the first steps of a load, which need no weights; raise `EngineError` without a GPU."""
    device = choose_device(config.device)
    if device.type == "cuda":
        torch.empty(1, device=device)  # this creates its context


def _unpacked(gguf: Path) -> str | None:
    """Dequantize a GGUF file's weights if that was not done before; return a note on it."""
    with downloading(), timed("dequantization"):
        return unpack_weights(gguf)[1]


def _version() -> str:
    """Return the installed version, or a digest of the sources in a source tree."""
    try:
        return metadata.version("tidemill")
    except metadata.PackageNotFoundError:
        return f"source-{sources_digest()}"

"""The head that a model's files describe: pooling, and the modules saved beside its network."""

from __future__ import annotations

import torch

from ...config import EngineConfig
from ...errors import ModelRefused
from ...storage.hub import find_file
from ..weights.checkpoint import WHOLE, find_checkpoint
from ..weights.weights import check_stored, fill_weights, find_stored
from .architecture import HeadLinear, HeadNorm, HeadPart
from .loaded_encoder import LoadedEncoder
from .pooler import HeadFunction, Pooler, parts_of, unit
from .pooling_config import PoolingConfig
from .sentence_transformers import Dense, LayerNorm, Module
from .weight_map import head_weights

# torch's own default.
NORM_EPS = 1e-5


def make_pooler(
    settings: EngineConfig, pooling_config: PoolingConfig, loaded: LoadedEncoder
) -> Pooler:
    """Return what comes after the network: what is described, or the head that it came with."""
    if pooling_config.pooling is None:
        return loaded.pooler
    parts: list[HeadFunction] = []
    width = loaded.hidden_size * len(pooling_config.pooling.modes)
    for module in pooling_config.modules:
        takes = module.in_features if isinstance(module, Dense) else width
        takes = module.width if isinstance(module, LayerNorm) else takes
        if takes != width:
            raise ModelRefused(
                f"{settings.model}: {module} takes {takes} numbers where there are {width}."
            )
        parts.append(_part(settings.model, module, loaded.device))
        width = module.out_features if isinstance(module, Dense) else width
    return Pooler(pooling_config.pooling.modes, tuple(parts))


def _part(model: str, module: Module, device: torch.device) -> HeadFunction:
    head: HeadPart
    if isinstance(module, Dense):
        names = ("linear", module.in_features, module.out_features)
        head = HeadLinear(*names, module.activation, module.bias)
    elif isinstance(module, LayerNorm):
        head = HeadNorm("norm", module.width, NORM_EPS)
    else:
        return unit
    path = find_file(model, f"{module.folder}/{WHOLE}") or find_file(
        model, f"{module.folder}/config.json"
    )
    assert path is not None, "a module's fields were read from there"
    checkpoint = find_checkpoint(str(path.parent))
    wanted = list(head_weights((head,)))
    stored = find_stored(checkpoint.files, wanted)
    check_stored(checkpoint, type(module).__name__, wanted, stored)
    weights = fill_weights(checkpoint.name, wanted, stored, torch.float32, device)
    return parts_of((head,), weights)[0]

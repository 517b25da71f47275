"""The head that a model's files describe: pooling, and the modules saved beside its network."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.errors import ModelRefused
from engine.files import find_file
from engine.model.checkpoint import WHOLE, find_checkpoint
from engine.model.encoders.architecture import HeadLinear, HeadNorm, HeadPart
from engine.model.encoders.description import EncoderDescription
from engine.model.encoders.heads import Head, Part, parts_of, unit
from engine.model.encoders.layout import head_weights
from engine.model.encoders.network import LoadedEncoder
from engine.model.encoders.saved_modules import Dense, LayerNorm, Module
from engine.model.weights import check_stored, filled, stored_in

# torch's own default.
NORM_EPS = 1e-5


def head_of(settings: EngineConfig, description: EncoderDescription, loaded: LoadedEncoder) -> Head:
    """Return what comes after the network: what is described, or the head that it came with."""
    if description.pooling is None:
        return loaded.head
    parts: list[Part] = []
    width = loaded.hidden_size * len(description.pooling.modes)
    for module in description.modules:
        takes = module.in_features if isinstance(module, Dense) else width
        takes = module.width if isinstance(module, LayerNorm) else takes
        if takes != width:
            raise ModelRefused(
                f"{settings.model}: {module} takes {takes} numbers where there are {width}."
            )
        parts.append(_part(settings.model, module, loaded.device))
        width = module.out_features if isinstance(module, Dense) else width
    return Head(description.pooling.modes, tuple(parts))


def _part(model: str, module: Module, device: torch.device) -> Part:
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
    stored = stored_in(checkpoint.files, wanted)
    check_stored(checkpoint, type(module).__name__, wanted, stored)
    weights = filled(checkpoint.name, wanted, stored, torch.float32, device)
    return parts_of((head,), weights)[0]

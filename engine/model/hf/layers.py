"""Transformers' class layer by layer: the weights of a few layers are in memory at a time.

Each layer is a module that reads its weights when it is called. transformers' own loading converts
the names, for a class that is built without the other layers.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.quantised import as_tensor
from ..config.hf_config import HFConfig
from ..parity.layerwise import OUTER, TABLES, LayerReader
from ..parity.logits import round_parameters
from ..weights.checkpoint import LoadingInfo, check_tensors
from .dequantize import by_stored_names, with_tied_head
from .model import cut_config
from .pretrained import from_state

# Layers are read together up to this size: each read takes transformers a tenth of a second.
GROUP_BYTES = 2**27


def load_layerwise(reader: LayerReader, hf_config: HFConfig, dtype: torch.dtype) -> nn.Module:
    """Return transformers' class with parameters in a dtype, rounded from fp32."""
    from transformers import AutoModelForCausalLM

    architecture = reader.architecture
    config = cut_config(hf_config, len(architecture.blocks))
    config.vocab_size, config.pad_token_id = architecture.vocab_size, None
    with torch.device("meta"):
        shells: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    parts = _Parts(reader, type(shells), config, dtype)
    module = parts.read(())
    path = architecture.names.layers
    for shell in shells.modules():
        if hasattr(shell, "config"):
            shell.config = module.config
    path = path_in(module, path)
    layers: Any = module.get_submodule(path)
    for index, shell in enumerate(shells.get_submodule(path)):
        layers[index] = _StreamedLayer(index, shell, parts)
    return module


def path_in(module: nn.Module, path: str) -> str:
    """Return the path of layers in a class, which may name its base differently from files."""
    base, _, rest = path.partition(".")
    return path if hasattr(module, base) else f"{module.base_model_prefix}.{rest}"


class _Parts:
    """Reads modules of the same class that have only some of the layers."""

    def __init__(self, reader: LayerReader, kind: Any, config: Any, dtype: torch.dtype) -> None:
        self._reader, self._kind, self._dtype = reader, kind, dtype
        self._config = config
        self._path = reader.architecture.names.layers
        self._group: dict[int, nn.Module] = {}

    def layer(self, index: int) -> nn.Module:
        """Return a layer, which stays in memory until one of another group is requested."""
        if index not in self._group:
            self._group = {}
            stop, num_bytes = index + 1, self._reader.num_bytes(index)
            while stop < len(self._reader.architecture.blocks):
                num_bytes += self._reader.num_bytes(stop)
                if num_bytes > GROUP_BYTES:
                    break
                stop += 1
            part = self.read(range(index, stop))
            layers: Any = part.get_submodule(path_in(part, self._path))
            self._group = {each: layers[each] for each in range(index, stop)}
        return self._group[index]

    def read(self, kept: Collection[int]) -> nn.Module:
        """Return a module with some layers, or with everything outside of layers."""
        path, reader, kind = self._path, self._reader, self._kind

        def make(module: Any, config: Any) -> None:
            kind.__init__(module, config)
            layers = module.get_submodule(path_in(module, path))
            for index in range(len(layers)):
                if index not in kept:
                    layers[index] = _AbsentLayer(layers[index])

        # transformers decides by its module whether to convert names.
        own_class = {"__init__": make, "__module__": kind.__module__}
        part: Any = type(kind.__name__, (kind,), own_class)
        config = self._config
        if kept:
            config = deepcopy(config)
            config.vocab_size = 1
        module, found = from_state(
            part, config, self._tensors(kept), torch.float32, reader.device, attention="eager"
        )
        own = tuple(f"{path_in(module, path)}.{index}." for index in kept)
        missing = [key for key in found["missing_keys"] if not kept or key.startswith(own)]
        lost = LoadingInfo(missing=missing, unexpected=(), mismatched=())
        title, base = kind.__name__, module.base_model_prefix
        check_tensors(reader.checkpoint.name, title, (), base, lost, is_multimodal=False)
        if self._dtype != torch.float32:
            round_parameters(module, self._dtype)
        result: nn.Module = module
        return result

    def _tensors(self, kept: Collection[int]) -> dict[str, Tensor]:
        """Return weights in fp32 by the names of a checkpoint."""
        reader, tensors = self._reader, dict[str, Tensor]()
        for index in kept or (OUTER,):
            weights, wanted = reader.read(index, torch.float32), reader.weights[index]
            tables = [weight for weight in wanted if weight.role in TABLES]
            tensors |= {one.parts[0].key: as_tensor(weights[one.role]) for one in tables}
            tensors |= by_stored_names((one for one in wanted if one not in tables), weights)
            if index == OUTER:
                tensors = with_tied_head(reader.architecture, weights, tensors)
        return tensors


class _AbsentLayer(nn.Identity):
    """Layer without weights; reading a part of it gives that part without numbers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = (layer.to("meta"),)  # a tuple, so that it does not become a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"][0], name)


class _StreamedLayer(nn.Module):
    """Layer whose weights are read when it is called; all else comes from its `shell`.

    The probe of `windows_by_masks` runs without weights.
    """

    def __init__(self, index: int, shell: nn.Module, parts: _Parts) -> None:
        super().__init__()
        self._index, self._parts = index, parts
        self._shell = (shell,)  # a tuple, so that it does not become a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_shell"][0], name)

    def forward(self, hidden: Tensor, *others: Any, **options: Any) -> Any:
        """Return the layer's output."""
        if "note" not in options:
            return self._parts.layer(self._index)(hidden, *others, **options)
        with suppress(RuntimeError, NotImplementedError):  # experts, after attention, need values
            self._shell[0](*_on_meta((hidden, *others)), **_on_meta(options))
        return hidden


def _on_meta(value: Any) -> Any:
    """Return a layer's arguments without numbers, except for masks with a window."""
    if isinstance(value, Tensor):
        return value if value.dtype == torch.float64 else value.to("meta")
    if isinstance(value, dict):
        return {key: _on_meta(own) for key, own in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_on_meta(own) for own in value)
    return value

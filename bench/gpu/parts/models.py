"""Models of random weights on the device, with the pages and graphs that a run would have."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from bench.gpu.random_models import loaded, random_weights
from bench.gpu.shapes import architecture
from tidemill.engine.config import EngineConfig
from tidemill.engine.kernels.attention import AttentionBackendType
from tidemill.engine.kernels.quantised import FP8
from tidemill.engine.loop.assembly import make_core, measured_room
from tidemill.engine.loop.cuda_graphs import Capture, Graph, capture_on
from tidemill.engine.loop.generation import GenerationCore
from tidemill.engine.model.network.kv_cache_size import KVCacheSize
from tidemill.engine.model.network.loaded_model import LoadedModel

# Pages that are filled with random numbers at a time: torch draws none in fp8.
NOISY_PAGES = 4096
TINY_ROOM = KVCacheSize(16, 64, 6)


class Made(NamedTuple):
    """A model on the device, and its pages."""

    model: LoadedModel
    room: KVCacheSize
    config: EngineConfig


@dataclass(slots=True)
class CountedCapture:
    """A capture that counts its graphs, and the attempts that failed."""

    capture: Capture
    captured: int = 0
    failed: int = 0

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """Capture; see `Capture`."""
        try:
            result = self.capture(compute)
        except Exception:
            self.failed += 1
            raise
        self.captured += 1
        return result


# The model of the last call: pages take all free memory, so there is only one at a time.
_made: dict[tuple[str, str, bool], Made] = {}


def made(
    name: str,
    device: torch.device,
    form: str = "",
    *,
    has_fp8_cache: bool = False,
    is_tiny: bool = False,
) -> Made:
    """Return a model of random weights in a form, the previous one if it is the same."""
    key = name, form, has_fp8_cache
    if key not in _made:
        _made.clear()
    gc.collect()  # frees the pages and graphs of the previous call
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if key not in _made:
        _made[key] = _make(name, device, form, has_fp8_cache=has_fp8_cache, is_tiny=is_tiny)
    return _made[key]


def _make(
    name: str, device: torch.device, form: str, *, has_fp8_cache: bool, is_tiny: bool
) -> Made:
    dtype = torch.float32 if is_tiny else torch.bfloat16
    shape = architecture(name)
    with torch.inference_mode():
        model = loaded(shape, random_weights(shape, dtype, device, form))
    model = model.with_kv_cache_dtype(FP8 if has_fp8_cache else None)
    model = replace(model, backend=with_noise(model.backend))
    if is_tiny:
        config = EngineConfig(name, max_num_seqs=4, max_num_batched_tokens=32)
        return Made(model, TINY_ROOM, config)
    config = EngineConfig(name)
    return Made(model, measured_room(model, config), config)


def core_of(made_model: Made, config: EngineConfig) -> tuple[GenerationCore, CountedCapture | None]:
    """Return the loop over a model, and the counter of its graphs if it has any."""
    capture = capture_on(made_model.model.device)
    counted = None if capture is None else CountedCapture(capture)
    return make_core(made_model.model, made_model.room, config, counted), counted


def with_noise(backend: AttentionBackendType) -> AttentionBackendType:
    """Return a backend whose pages contain random numbers: zeros would use less power."""
    assert isinstance(backend, type)

    class Noisy(backend):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **others: Any) -> None:
            super().__init__(*args, **others)
            for pages in (*self.keys, *self.values):
                for some in pages.split(NOISY_PAGES):
                    some.copy_(torch.randn(some.shape, dtype=torch.float16, device=some.device))

    return cast("AttentionBackendType", Noisy)

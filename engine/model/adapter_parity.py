"""Parity check of LoRA adapters against their model with the adapter merged into it.

Adapters are checked like the model itself: in fp32, in the same steps as rows of the plain model,
and in the dtype that is served. For models that do not fit in fp32, only the first layers are
compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat

import torch
from torch import Tensor, nn

from ..errors import ModelRefused
from ..storage.disk_cache import CacheEntry
from ..storage.hub import snapshot_commit
from . import native
from .adapters.adapter_config import CONFIG
from .adapters.loading import TENSORS, Adapter
from .config.architecture import Architecture
from .config.hf_config import HFConfig
from .native import EagerLogits, LeaderRank, ParityResult
from .network.loaded_model import LoadedModel
from .parity.logits import chunked_logits, relative_distance, round_parameters
from .parity.parity_inputs import parity_inputs
from .parity_cache import parity_fact, run_once
from .weights.checkpoint import Checkpoint
from .weights.sanity import check_logits


def check_adapters(
    checkpoint: Checkpoint,
    hf_config: HFConfig,
    architecture: Architecture,
    loaded: LoadedModel,
    adapters: Sequence[Adapter],
    *,
    leader: LeaderRank | None = None,
) -> None:
    """Refuse an adapter whose loaded form computes different or invalid logits."""
    parities = _AdapterParity(checkpoint, hf_config, architecture, loaded, adapters, leader)
    _, tokens = parity_inputs(architecture, loaded.device)[0]
    for index, adapter in enumerate(adapters):
        check_logits(_called(adapter), chunked_logits(loaded, tokens, adapter=index + 1)[0])
    for index, adapter in enumerate(adapters):
        ranks = () if leader is None else (f"{leader.size} ranks",)
        parity = run_once(
            _fact(checkpoint, hf_config, loaded, adapter, *ranks), partial(parities.result, index)
        )
        if not parity.holds:
            raise ModelRefused(
                f"{_called(adapter)}: its logits differ from those of the merged model "
                f"(relative distance {parity.distance:.2g}). Merge the adapter into the model."
            )


def _called(adapter: Adapter) -> str:
    return f"adapter {adapter.name} ({adapter.folder})"


@dataclass(frozen=True)
class _AdapterParity:
    """Results for all adapters, computed together, because loading a network in fp32 is slow."""

    checkpoint: Checkpoint
    hf_config: HFConfig
    architecture: Architecture
    loaded: LoadedModel
    adapters: Sequence[Adapter]
    leader: LeaderRank | None

    def result(self, index: int) -> ParityResult:
        """Return the result for one adapter."""
        return self.all[index]

    @cached_property
    def all(self) -> list[ParityResult]:
        """Return the result for each adapter."""
        with torch.inference_mode():
            return self._made()

    def _made(self) -> list[ParityResult]:
        from .hf import model as transformers_model

        loaded, device = self.loaded, self.loaded.device
        num_layers, tokens = parity_inputs(self.architecture, device)[0]
        exact = loaded
        if num_layers is not None or loaded.dtype != torch.float32:
            exact = native.load(
                self.checkpoint,
                self.hf_config,
                self.architecture,
                torch.float32,
                device,
                num_layers=num_layers,
                adapters=self.adapters,
                leader=self.leader,
            )
        got = [chunked_logits(exact, tokens, adapter=i + 1) for i in range(len(self.adapters))]
        del exact
        network = transformers_model.load_fp32(self.checkpoint, self.hf_config, device, num_layers)
        exact_logits = self._eager_logits(network, tokens)
        rounded_logits: list[Tensor | None] = [None] * len(self.adapters)
        is_emulated = native.has_quantised_activations(self.checkpoint, loaded)
        if num_layers is None and loaded.dtype != torch.float32 and not is_emulated:
            round_parameters(network, loaded.dtype)
            rounded_logits = [*self._eager_logits(network, tokens)]
        expected = map(EagerLogits, exact_logits, repeat(()), rounded_logits)
        return [
            self._judged(index, got[index], own, num_layers, tokens)
            for index, own in enumerate(expected)
        ]

    def _eager_logits(self, network: nn.Module, tokens: Tensor) -> list[Tensor]:
        """Return the logits `[2, t, V]` through each adapter, and without it."""
        from .hf import model as transformers_model

        run = partial(
            transformers_model.eager_logits,
            self.checkpoint.name,
            network,
            tokens,
            self.loaded.device,
        )
        alone, found = run(), []
        for adapter in self.adapters:
            with _merged(network, adapter):
                found.append(torch.stack([run(), alone]))
        return found

    def _judged(
        self, index: int, got: Tensor, expected: EagerLogits, num_layers: int | None, tokens: Tensor
    ) -> ParityResult:
        apart = native.token_distances(got, expected.logits)
        has_experts = any(block.experts for block in self.architecture.blocks[:num_layers])
        holds = native.is_within_tolerance(apart, has_experts=has_experts)
        if not holds or num_layers is not None or self.loaded.dtype == torch.float32:
            return ParityResult(holds, float(apart.max()), num_layers)
        served = chunked_logits(self.loaded, tokens, adapter=index + 1)
        holds = native.is_rounded(served, expected, has_experts=has_experts)
        return ParityResult(holds, relative_distance(served, expected.logits), None)


@contextmanager
def _merged(network: nn.Module, adapter: Adapter) -> Iterator[None]:
    """While entered, add an adapter's weights to those of an fp32 network."""
    kept: list[tuple[Tensor, Tensor]] = []
    modules = dict(network.named_modules())
    for name, module in adapter.modules.items():
        if name in modules:  # else its layer is left out
            weight = modules[name].get_parameter("weight").data
            kept.append((weight, weight.clone()))
            weight += module.delta().to(weight.device)
    try:
        yield
    finally:
        for weight, before in kept:
            weight.copy_(before)


def _fact(
    checkpoint: Checkpoint,
    hf_config: HFConfig,
    loaded: LoadedModel,
    adapter: Adapter,
    *others: str,
) -> CacheEntry:
    """Return the cache fact of an adapter's check, which also depends on `others`."""
    status = (adapter.folder / TENSORS).stat()
    return parity_fact(
        checkpoint,
        hf_config.raw,
        loaded.dtype,
        loaded.device,
        f"adapter {status.st_size} {snapshot_commit(adapter.folder) or status.st_mtime_ns}",
        (adapter.folder / CONFIG).read_text(encoding="utf-8", errors="replace"),
        *others,
    )

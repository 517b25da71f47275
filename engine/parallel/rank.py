"""A rank other than the leader: loads its shards of models and computes their steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from tidemill.protocol.contract import EngineError

from ..config import EngineConfig
from ..kernels.attention import AttentionBackend, CapturableBackend
from ..kernels.backends import limit_torch_threads
from ..kernels.communicator import Communicator
from ..kernels.step import Step
from ..loop.cuda_graphs import Capture, CudaGraphs, capture_on
from ..loop.device_tokens import DeviceTokens
from ..model.adapters.loading import read_adapters
from ..model.families.overridden_config import read_overridden_config
from ..model.families.registry import architecture_of
from ..model.native import load_shard
from ..model.network.kv_cache_size import free_bytes
from ..model.network.loaded_model import LoadedModel, NetworkWithHead
from ..model.weights.checkpoint import find_checkpoint
from ..model.weights.quantised.quantization_config import read_quantization_config
from .messages import (
    Allocate,
    Answer,
    Command,
    Done,
    ExactLogits,
    Forward,
    FreeMemory,
    Load,
    MeasureMemory,
)


class Rank:
    """Executes the leader's commands, one after another."""

    def __init__(
        self,
        settings: EngineConfig,
        group: Communicator,
        device: torch.device,
        capture_on: Callable[[torch.device], Capture | None] = capture_on,
    ) -> None:
        self._settings, self._communicator, self._device = settings, group, device
        self._capture_on = capture_on
        # By their numbers, which the first rank assigns.
        self._models: dict[int, LoadedModel] = {}
        self._attentions: dict[int, AttentionBackend] = {}
        self._graphs: dict[int, tuple[CudaGraphs, DeviceTokens]] = {}  # of attentions
        self._hidden: torch.Tensor | None = None  # [N, H], of the last step

    def execute(self, command: Command) -> Answer | None:
        """Execute a command, and return its answer, if it has one."""
        for number in command.dropped:
            for objects in (self._models, self._graphs, self._attentions):
                objects.pop(number, None)
        match command.message:
            case Load():
                self._load(command.message)
                return Done()
            case Allocate(number, model, num_pages, num_rows, groups, dtype):
                model_with_cache = self._models[model].with_kv_cache_dtype(dtype)
                self._attentions[number] = model_with_cache.attention(num_pages, num_rows, groups)
                return Done()
            case MeasureMemory():
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()  # memory of the trial steps is free again
                return FreeMemory(free_bytes(self._device))
            case Forward():
                self._hidden = self._forward(command.message)
            case ExactLogits(number, rows, token_ids):
                network = self._models[number].network
                assert isinstance(network, NetworkWithHead)
                assert self._hidden is not None
                network.compute_exact_logits(self._hidden, rows, token_ids)
        return None

    def _load(self, command: Load) -> None:
        settings = self._settings
        description = read_overridden_config(settings)
        architecture = architecture_of(description)
        quantization = read_quantization_config(description, settings.quantization)
        adapters = (
            read_adapters(settings, description, architecture) if command.has_adapters else ()
        )
        model = self._models[command.number] = load_shard(
            find_checkpoint(settings.model, quantization),
            description,
            architecture,
            command.dtype,
            self._device,
            num_layers=command.num_layers,
            adapters=adapters,
            communicator=self._communicator,
        )
        if not model.network.needs_torch:
            limit_torch_threads(self._device)

    def _forward(self, command: Forward) -> torch.Tensor:
        """Compute a step; return its last hidden states `[N, H]`."""
        model, attention = self._models[command.model], self._attentions[command.attention]
        if command.graphs is not None:
            graphs, ids = self._graphs_of(command, model, attention)
            # Graphs do not support adapters.
            arrays = command.arrays() | {"adapters": np.zeros(0, np.int32)}
            if not graphs.can_run(arrays):
                raise EngineError("this rank has no graph for a step that others replay")
            step = graphs.pack(command.num_decodes, arrays)
            if command.has_unknown_ids:
                self._communicator.broadcast(ids.last)
            return graphs.run(step, ids)[0]
        step = Step.pack(command.num_decodes, self._device, **command.arrays())
        if command.has_unknown_ids:
            self._communicator.broadcast(step.token_ids)
        if command.shown is not None:
            vectors = torch.empty(command.shown, dtype=model.dtype, device=self._device)
            step = replace(step, shown=self._communicator.broadcast(vectors))
        attention.prepare(step)
        assert isinstance(model.network, NetworkWithHead)
        return model.network.forward_whole(step, attention)[0]

    def _graphs_of(
        self, command: Forward, model: LoadedModel, attention: AttentionBackend
    ) -> tuple[CudaGraphs, DeviceTokens]:
        if command.attention not in self._graphs:
            network, sizes = model.network, command.graphs
            captures = self._capture_on(self._device)  # one for each set of graphs
            assert isinstance(network, NetworkWithHead)
            assert isinstance(attention, CapturableBackend)
            assert captures is not None
            assert sizes is not None
            graphs = CudaGraphs(
                model,
                network,
                attention,
                most_tokens=sizes.most_tokens,
                most_pages=sizes.most_pages,
                num_slots=sizes.num_slots,
                captures=captures,
                has_ranks=True,
            )
            self._graphs[command.attention] = graphs, DeviceTokens(sizes.num_slots, self._device)
        return self._graphs[command.attention]

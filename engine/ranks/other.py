"""Another rank than the first: the models that it has a share of, and what it computes by them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.kernels.attention import AttentionBackend, CapturableBackend
from engine.kernels.backends import spare_torch_its_threads
from engine.kernels.ranks import Group
from engine.kernels.step import Step
from engine.model.adapters.loading import read_adapters
from engine.model.checkpoint import find_checkpoint
from engine.model.families import architecture_of
from engine.model.memory import free_bytes
from engine.model.network import LoadedModel, NetworkInTwo
from engine.model.overrides import read_overridden
from engine.model.own import load_share
from engine.model.quantised.description import quantisation_of
from engine.ranks.messages import Allocate, Answer, Done, Forward, Free, Load, Measure, Told
from engine.stepping.graphs import Captures, Graphs
from engine.stepping.ids import DeviceIds


class OtherRank:
    """Does what it is told of a model, one thing after another."""

    def __init__(
        self,
        settings: EngineConfig,
        group: Group,
        device: torch.device,
        captures: Captures | None = None,
    ) -> None:
        self._settings, self._group, self._device = settings, group, device
        self._captures = captures
        # By the numbers that the first rank gives them.
        self._models: dict[int, LoadedModel] = {}
        self._attentions: dict[int, AttentionBackend] = {}
        self._graphs: dict[int, tuple[Graphs, DeviceIds]] = {}  # of attentions

    def do(self, told: Told) -> Answer | None:
        """Do it, and return the answer where one is waited for."""
        for number in told.dropped:
            for those in (self._models, self._graphs, self._attentions):
                those.pop(number, None)
        match told.message:
            case Load():
                self._load(told.message)
                return Done()
            case Allocate(number, model, num_pages, dtype):
                kept = self._models[model].kept_in(dtype)
                self._attentions[number] = kept.attention(num_pages)
                return Done()
            case Measure():
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()  # what trials took is free again
                return Free(free_bytes(self._device))
            case Forward():
                self._forward(told.message)
        return None

    def _load(self, told: Load) -> None:
        settings = self._settings
        description = read_overridden(settings)
        architecture = architecture_of(description)
        quantisation = quantisation_of(description, settings.quantization)
        adapters = read_adapters(settings, description, architecture) if told.has_adapters else ()
        model = self._models[told.number] = load_share(
            find_checkpoint(settings.model, quantisation),
            description,
            architecture,
            told.dtype,
            self._device,
            num_layers=told.num_layers,
            adapters=adapters,
            group=self._group,
        )
        if not model.network.needs_torch:
            spare_torch_its_threads(self._device)

    def _forward(self, told: Forward) -> None:
        model, attention = self._models[told.model], self._attentions[told.attention]
        if told.graphs is not None:
            graphs, ids = self._graphs_of(told, model, attention)
            arrays = told.arrays() | {"adapters": np.zeros(0, np.int32)}  # they have none
            if not graphs.may_run(arrays):
                raise EngineError("it has no graph for a step that others replay")
            step = graphs.pack(told.num_decodes, arrays)
            if told.has_unknown_ids:
                self._group.spread(ids.last)
            graphs.run(step, ids)
            return
        step = Step.pack(told.num_decodes, self._device, **told.arrays())
        if told.has_unknown_ids:
            self._group.spread(step.token_ids)
        if told.shown is not None:
            vectors = torch.empty(told.shown, dtype=model.dtype, device=self._device)
            step = replace(step, shown=self._group.spread(vectors))
        attention.prepare(step)
        model.network.forward(step, attention)

    def _graphs_of(
        self, told: Forward, model: LoadedModel, attention: AttentionBackend
    ) -> tuple[Graphs, DeviceIds]:
        if told.attention not in self._graphs:
            network, captures, sizes = model.network, self._captures, told.graphs
            assert isinstance(network, NetworkInTwo)
            assert isinstance(attention, CapturableBackend)
            assert captures is not None
            assert sizes is not None
            graphs = Graphs(
                model,
                network,
                attention,
                most_tokens=sizes.most_tokens,
                most_pages=sizes.most_pages,
                captures=captures,
            )
            self._graphs[told.attention] = graphs, DeviceIds(sizes.num_slots, self._device)
        return self._graphs[told.attention]

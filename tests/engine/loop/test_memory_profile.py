"""The memory profile: the largest step, measured by counting torch's allocations on a CPU."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.families import VOCAB, build
from tests.engine.loop.test_cuda_graphs import CapturableReference
from tests.engine.test_parity import run_by_ours
from tidemill.engine.config import EngineConfig
from tidemill.engine.kernels.attention import AttentionBackend
from tidemill.engine.kernels.step import Step
from tidemill.engine.loop import memory_profile
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.loop.generation import GenerationCore
from tidemill.engine.model.config.device import StepLimits
from tidemill.engine.model.network.kv_cache_size import KVCacheSize
from tidemill.engine.model.network.loaded_model import LoadedModel
from tidemill.engine.scheduling.sequence import SequenceRequest
from tidemill.engine.scheduling.step_plan import StepPlan

LIMITS = StepLimits(6, 300)
CONFIG = EngineConfig("tiny", max_num_seqs=6, max_num_batched_tokens=300, device="cpu")


class Counting(TorchDispatchMode):
    """Counts the bytes of live storages that torch's functions allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function, and count what it returns."""
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, Tensor):
                self._take_in(one)
        return result

    def _take_in(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        name, size = storage._cdata, storage.nbytes()
        if name in self._known:
            return
        self._known.add(name)
        self.held += size
        self.most = max(self.most, self.held)
        weakref.finalize(storage, self._let_go, name, size)

    def _let_go(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.held -= size


def peak_of(call: Callable[[], None]) -> int:
    """Return the peak number of bytes that torch's functions allocated during a call."""
    with Counting() as counting:
        call()
    return counting.most


@pytest.fixture(name="model", scope="module")
def fixture_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A small random native decoder, over pages of the reference."""
    folder: Path = tmp_path_factory.mktemp("model")
    build("Qwen3Config").save_pretrained(folder)
    return replace(run_by_ours(folder, torch.float32), backend=CapturableReference)


def over(model: LoadedModel) -> Callable[[KVCacheSize], GenerationCore]:
    """Return a function that creates a core from the limits."""
    return lambda room: make_core(model, room, CONFIG)


def test_no_step_uses_more_than_the_largest(model: LoadedModel) -> None:
    """The requests vary; all of torch's memory besides the pages is counted.

    A hundredth is excepted: lists of pages, which grow with the attended tokens.
    """
    measured = memory_profile.step_bytes(model, LIMITS, over(model), peak_of)
    assert measured is not None
    rng = random.Random(0)
    requests = [
        SequenceRequest(
            rng.choices(range(VOCAB), k=rng.randint(1, 200)),
            rng.randint(1, 5),
            replace(memory_profile.SAMPLING, seed=number),
            prompt_logprobs=5 if number % 3 == 0 else None,
        )
        for number in range(12)
    ]
    num_pages = 400

    def run() -> None:
        work = over(model)(KVCacheSize(num_pages, model.max_model_len))
        for request in requests:
            work.add(request)
        while work.step() is not None:
            pass

    used = peak_of(run) - num_pages * model.page_bytes
    assert 0.3 * measured < used <= 1.01 * measured


def test_nothing_of_a_trial_is_retained(model: LoadedModel) -> None:
    """The free memory is measured after it."""
    with Counting() as counting:
        memory_profile.step_bytes(model, LIMITS, over(model), peak_of)
        gc.collect()
        assert counting.held < 0.01 * counting.most


@pytest.mark.parametrize("longest", [512, 100, 60])
@pytest.mark.parametrize("limits", [LIMITS, StepLimits(1, 300), StepLimits(6, 6)], ids=str)
def test_the_largest_step_has_the_maximum_size(
    model: LoadedModel, longest: int, limits: StepLimits
) -> None:
    """It has the maximum of tokens and of rows, if sequences are long enough."""
    short, plans = replace(model, max_model_len=longest), []

    def make(room: KVCacheSize) -> GenerationCore:
        config = replace(
            CONFIG,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
        work = make_core(short, room, config)
        launch = work._scheduler.launch

        def noting(plan: StepPlan) -> None:
            plans.append(plan)
            launch(plan)

        work._scheduler.launch = noting  # type: ignore[method-assign]
        return work

    assert memory_profile.step_bytes(short, limits, make, peak_of) is not None
    (plan,) = plans
    assert plan.num_tokens == min(limits.max_num_batched_tokens, limits.max_num_seqs * longest)
    assert len(plan.sampled) == limits.max_num_seqs


def test_a_step_that_does_not_fit_is_logged(
    model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Its memory is then estimated from widths, and steps get smaller when they fail."""
    network = copy(model.network)

    def hidden_states(step: Step, attention: AttentionBackend) -> Tensor:
        if step.num_tokens > 200:
            raise torch.OutOfMemoryError
        return model.network.hidden_states(step, attention)

    network.hidden_states = hidden_states  # type: ignore[method-assign]
    full = replace(model, network=network)
    assert memory_profile.step_bytes(full, LIMITS, over(full), peak_of) is None
    assert "the largest step does not fit into memory" in caplog.text


def test_pages_that_do_not_fit_are_logged(
    model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """These are the trial's pages; the page count reports the available room."""

    def make(_: KVCacheSize) -> GenerationCore:
        raise torch.OutOfMemoryError

    assert memory_profile.step_bytes(model, LIMITS, make, peak_of) is None
    assert "the largest step does not fit into memory" in caplog.text

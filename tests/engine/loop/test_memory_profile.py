"""What a step may take is measured by the largest: by a count of what torch allocates, on a CPU."""

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
    """Counts the bytes of storages that torch's functions make, while they are held."""

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
    """Return the most bytes that torch's functions held for a call."""
    with Counting() as counting:
        call()
    return counting.most


@pytest.fixture(name="model", scope="module")
def fixture_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A small random decoder of our own, over pages of the reference."""
    folder: Path = tmp_path_factory.mktemp("model")
    build("Qwen3Config").save_pretrained(folder)
    return replace(run_by_ours(folder, torch.float32), backend=CapturableReference)


def over(model: LoadedModel) -> Callable[[KVCacheSize], GenerationCore]:
    """Return what makes work of the limits."""
    return lambda room: make_core(model, room, CONFIG)


def test_no_step_takes_more_than_the_largest(model: LoadedModel) -> None:
    """Whatever requests ask for: beside the pages, all of what torch holds is counted.

    But for a hundredth, lists of pages, which grow with what is attended to.
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

    taken = peak_of(run) - num_pages * model.page_bytes
    assert 0.3 * measured < taken <= 1.01 * measured


def test_nothing_of_a_trial_is_held(model: LoadedModel) -> None:
    """What is free is looked at behind it."""
    with Counting() as counting:
        memory_profile.step_bytes(model, LIMITS, over(model), peak_of)
        gc.collect()
        assert counting.held < 0.01 * counting.most


@pytest.mark.parametrize("longest", [512, 100, 60])
@pytest.mark.parametrize("limits", [LIMITS, StepLimits(1, 300), StepLimits(6, 6)], ids=str)
def test_the_largest_step_holds_all_that_a_step_may(
    model: LoadedModel, longest: int, limits: StepLimits
) -> None:
    """As many tokens and as many rows, as far as sequences are long enough for that."""
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


def test_a_step_that_does_not_fit_is_told(
    model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Then what it takes is bounded by widths, and steps get smaller when they fail."""
    network = copy(model.network)

    def hidden_states(step: Step, attention: AttentionBackend) -> Tensor:
        if step.num_tokens > 200:
            raise torch.OutOfMemoryError
        return model.network.hidden_states(step, attention)

    network.hidden_states = hidden_states  # type: ignore[method-assign]
    full = replace(model, network=network)
    assert memory_profile.step_bytes(full, LIMITS, over(full), peak_of) is None
    assert "the largest step does not fit into memory" in caplog.text


def test_pages_that_do_not_fit_are_told(
    model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of a trial; how much room there is, whoever counts pages says."""

    def make(_: KVCacheSize) -> GenerationCore:
        raise torch.OutOfMemoryError

    assert memory_profile.step_bytes(model, LIMITS, make, peak_of) is None
    assert "the largest step does not fit into memory" in caplog.text

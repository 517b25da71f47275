"""Steps as graphs, with a stand-in that computes again: the rows never change."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.families import FAMILIES, LATENTS, RECURRENT, VOCAB, build
from tests.engine.test_parity import run_by_ours
from tests.long_parameters import with_long
from tidemill.engine.config import EngineConfig
from tidemill.engine.kernels import elementwise, sampling
from tidemill.engine.kernels.attention import ANY_PROGRAMS, AttentionShape
from tidemill.engine.kernels.reference import ReferenceAttention
from tidemill.engine.kernels.step import Step
from tidemill.engine.loop import cuda_graphs, launch_cost, sampler
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.loop.cuda_graphs import Capture, buckets
from tidemill.engine.loop.device_tokens import DeviceTokens
from tidemill.engine.loop.generation import GenerationCore
from tidemill.engine.loop.step_logits import StepLogits
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.network.decoder import Decoder
from tidemill.engine.model.network.kv_cache_size import KVCacheSize
from tidemill.engine.model.network.loaded_model import LoadedModel, Network
from tidemill.engine.model.weights.weight_map import weights_of
from tidemill.engine.scheduling.sequence import Sampling, Sequence, SequenceRequest
from tidemill.engine.scheduling.table import SequenceTable
from tidemill.protocol.errors import RequestError

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0)
NUM_PAGES = 9
Plain = Callable[[int], list[object]]


class CapturableReference(ReferenceAttention):
    """The reference with a page for tokens of no sequence; its pages are small."""

    page_size = 4
    all_launches = 3

    def __init__(
        self,
        shapes: tuple[AttentionShape, ...],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(shapes, num_pages + 1, dtype, device)
        self.trash_slot = num_pages * self.page_size
        self.workspace: tuple[int, int] | None = None
        self.launches = self.programs = 0

    def prepare(self, step: Step) -> None:
        """Set the required launches, as if chunks and odd steps had their own kernels."""
        super().prepare(step)
        has_chunk = step.num_decodes + 1 < len(step.host.query_starts)
        self.launches = has_chunk + 2 * (len(step.host.token_ids) % 2)
        self.programs = len(step.host.query_starts) // 3

    def allocate_workspace(self, num_tokens: int, num_decodes: int) -> None:
        """Record the sizes once."""
        assert self.workspace is None
        self.workspace = num_tokens, num_decodes

    def capturing(
        self,
        num_tokens: int,
        launches: int,
        num_spans: int | None = None,
        programs: int = ANY_PROGRAMS,
    ) -> AbstractContextManager[None]:
        """Launch as usual, if it includes the launches of the prepared step."""
        del num_spans
        assert self.launches & ~launches == 0
        assert programs in {ANY_PROGRAMS, self.programs}
        assert self.workspace is not None
        assert num_tokens <= self.workspace[0]
        return nullcontext()


@dataclass
class Again:
    """A graph that repeats its captured call, and overwrites the results of other graphs.

    The first replay, which checks a capture, is not counted.
    """

    captures: CapturesByCallingAgain
    compute: Callable[[], Tensor]
    result: Tensor
    is_compared: bool = False

    def replay(self) -> None:
        """Compute from the current contents of the arrays."""
        if not self.is_compared:
            self.is_compared = True
            self.result.copy_(self.compute())
            return
        self.captures.num_replays += 1
        if len(self.result) > 8 and (failure := self.captures.next_failure):
            self.captures.next_failure = None
            raise failure
        for other in self.captures.graphs:
            other.result.fill_(torch.nan)
        self.result.copy_(self.compute())


class CapturesByCallingAgain:
    """A stand-in for a device's captures: graphs share memory, and capturing runs nothing.

    The first replay of a graph of more than 8 tokens raises `next_failure`; after `none_after`
    captures the next one fails.
    """

    def __init__(
        self, next_failure: Exception | None = None, none_after: int | None = None
    ) -> None:
        self.next_failure = next_failure
        self.none_after = none_after
        self.num_replays = 0
        self.graphs: list[Again] = []

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Again, Tensor]:
        """Capture; its launches have no effect."""
        if len(self.graphs) == self.none_after:
            raise torch.OutOfMemoryError("no room for a graph")
        graph = Again(self, compute, torch.full_like(compute(), torch.nan))
        self.graphs.append(graph)
        return graph, graph.result


@pytest.fixture(name="model", scope="module")
def fixture_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A small random native decoder, over pages of the reference; it claims to be wider.

    So steps of more than 24 tokens are launched without a graph.
    """
    folder: Path = tmp_path_factory.mktemp("model")
    build("Qwen3Config").save_pretrained(folder)
    loaded = run_by_ours(folder, torch.float32)
    wide = replace(
        loaded, backend=CapturableReference, hidden_size=2**15, max_intermediate_size=165_000
    )
    assert cuda_graphs.max_graph_tokens(wide) == 24
    return wide


def work_over(
    model: LoadedModel,
    captures: Capture | None,
    steps_ahead: int = 0,
    *,
    keeps_ids: bool | None = None,
) -> GenerationCore:
    """Return a core with few pages and small steps, some of them larger than any graph."""
    config = EngineConfig(
        "tiny", max_num_seqs=6, max_num_batched_tokens=40, steps_ahead=steps_ahead
    )
    room = KVCacheSize(NUM_PAGES, model.max_model_len)
    return make_core(model, room, config, captures, keeps_ids=keeps_ids)


@dataclass(frozen=True)
class Storm:
    """Requests and cancellations, by the step that they precede."""

    arrivals: dict[int, list[SequenceRequest]]
    leaves: dict[int, int]

    def run(self, work: GenerationCore) -> list[object]:
        """Run all of it; the results of cancelled requests do not count."""
        sequences: list[Sequence] = []
        for tick in range(400):
            sequences += map(work.add, self.arrivals.get(tick, []))
            if tick in self.leaves:
                work.abort({sequences[self.leaves[tick]]})
            if work.step() is None and tick > max(self.arrivals):
                break
        left = set(self.leaves.values())
        return [outcome(one) for place, one in enumerate(sequences) if place not in left]


def outcome(sequence: Sequence) -> object:
    """Return the outcome of a sequence."""
    try:
        result = sequence.result()
    except RequestError as error:
        return str(error)
    return result.token_ids, result.finish_reason


def storm(seed: int) -> Storm:
    """Return short and long prompts, some with common prefixes, greedy or sampled, with stops."""
    rng = random.Random(seed)
    common = rng.choices(range(3, VOCAB), k=9)
    arrivals: dict[int, list[SequenceRequest]] = {}
    for index in range(12):
        prompt = (common if index % 3 else []) + rng.choices(range(3, VOCAB), k=rng.randint(1, 9))
        sequence_request = SequenceRequest(
            prompt,
            rng.randint(1, 12),
            Sampling(
                temperature=rng.choice([0.0, 1.0]),
                seed=index,
                presence_penalty=rng.choice([0.0, 0.0, 1.0]),
            ),
            stop_token_ids=frozenset(rng.sample(range(VOCAB), 8)),
        )
        arrivals.setdefault(rng.randint(0, 20), []).append(sequence_request)
    return Storm(arrivals, {rng.randint(21, 25): rng.randrange(12)})


@pytest.fixture(name="plain", scope="module")
def fixture_plain(model: LoadedModel) -> Plain:
    """Return a function that returns the outcomes of a storm in the plain loop."""
    return cache(lambda seed: storm(seed).run(work_over(model, None)))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_rows_are_those_of_the_plain_loop(
    model: LoadedModel, plain: Plain, seed: int, steps_ahead: int
) -> None:
    """Sequences arrive, stop, are preempted and are cancelled at any time."""
    captures = CapturesByCallingAgain()
    work = work_over(model, captures, steps_ahead)
    assert storm(seed).run(work) == plain(seed)
    assert captures.num_replays > len(captures.graphs) > 1
    assert len(captures.graphs[0].result) == 24  # first, so that others find room in the pool
    assert work.stats().preemptions > 0


def test_the_number_of_graphs_is_limited(
    model: LoadedModel, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the limit a bucket has one more, which serves all of its steps."""
    unbounded = CapturesByCallingAgain()
    storm(0).run(work_over(model, unbounded))
    monkeypatch.setattr(cuda_graphs, "MOST_GRAPHS", 2)
    captures = CapturesByCallingAgain()
    work = work_over(model, captures)
    assert storm(0).run(work) == plain(0)
    assert 2 < len(captures.graphs) <= 2 + len(list(buckets(24))) < len(unbounded.graphs)
    assert captures.num_replays > unbounded.num_replays


def test_frequent_steps_have_graphs_of_few_programs(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each serves only steps of its number of programs."""
    rare, frequent = CapturesByCallingAgain(), CapturesByCallingAgain()
    expected = storm(0).run(work_over(model, rare))
    monkeypatch.setattr(cuda_graphs, "REPEATS", 1)
    assert storm(0).run(work_over(model, frequent)) == expected
    assert len(frequent.graphs) > len(rare.graphs)


@pytest.mark.parametrize("is_unloaded", [False, True])
def test_a_step_with_known_kernels_is_captured_at_once(*, is_unloaded: bool) -> None:
    """It is neither launched first nor compared; if it cannot be captured, it is launched first."""
    calls: list[str] = []
    failures = [RuntimeError("not loaded")] if is_unloaded else []

    class CapturedOnce:
        def replay(self) -> None:
            calls.append("replay")

    def capture(compute: Callable[[], Tensor]) -> tuple[CapturedOnce, Tensor]:
        calls.append("capture")
        if failures and len(calls) > 3:
            raise failures.pop()
        return CapturedOnce(), compute()

    def compute() -> Tensor:
        calls.append("compute")
        return torch.ones(4, 2)

    graphs = cuda_graphs.CapturedSteps(capture, SimpleNamespace(num_layers_started=0))
    first = ["compute", "capture", "compute", "replay"]
    for kind, kernels in ((0, "all"), (1, "all"), (1, "all"), (2, "few")):
        graphs.run(kind, compute, 3, kernels)
    second = ["capture", *first] if is_unloaded else ["capture", "compute", "replay"]
    assert calls == [*first, *second, "replay", *first]


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_step_of_more_pages_than_graphs_have_room_for_is_launched(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, steps_ahead: int
) -> None:
    """It runs between replays of others, including scored prompts."""
    monkeypatch.setattr(cuda_graphs, "MOST_PAGES", 5)
    packed: list[int] = []
    pack = cuda_graphs.CudaGraphs.pack

    def noted(self: cuda_graphs.CudaGraphs, num_decodes: int, arrays: cuda_graphs.Arrays) -> Step:
        packed.append(len(arrays["pages"]))
        return pack(self, num_decodes, arrays)

    monkeypatch.setattr(cuda_graphs.CudaGraphs, "pack", noted)
    requests = storm(0)
    for arriving in requests.arrivals.values():
        arriving[:] = [replace(one, prompt_logprobs=2) for one in arriving]
    expected = requests.run(work_over(model, None))
    captures = CapturesByCallingAgain()
    work = work_over(model, captures, steps_ahead)
    assert requests.run(work) == expected
    assert max(packed) <= 5
    assert 0 < captures.num_replays < len(packed) < work.stats().steps


def named(storm: Storm) -> Storm:
    """Return a storm whose rows request the log-probabilities of some tokens."""
    arrivals = {
        tick: [
            replace(one, sampling=replace(GREEDY, logprobs=0, logprob_token_ids=(5, 6, 9)))
            for one in requests
        ]
        for tick, requests in storm.arrivals.items()
    }
    return Storm(arrivals, {})


def named_logprobs(work: GenerationCore, requests: Storm) -> list[list[float]]:
    """Return the log-probabilities of the named tokens after each prompt, by token."""
    sequences = [work.add(one) for some in requests.arrivals.values() for one in some]
    while work.step() is not None:
        pass
    rows = [next(iter(one.result().logprobs or ())) for one in sequences]
    return [[logprob for _, logprob in sorted(row.top)] for row in rows]


@pytest.mark.parametrize("steps_ahead", with_long([1], [0]))
def test_named_tokens_are_scored_in_fp32_by_graphs_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps_ahead: int
) -> None:
    """Their differences are those of the plain loop, and finer than a bf16 logit."""
    build("Qwen3Config").save_pretrained(tmp_path)  # type: ignore[operator]
    model = replace(run_by_ours(tmp_path, torch.bfloat16), backend=CapturableReference)
    expected = named_logprobs(work_over(model, None), named(storm(0)))
    captures = CapturesByCallingAgain()
    got = named_logprobs(work_over(model, captures, steps_ahead), named(storm(0)))
    assert captures.num_replays > len(captures.graphs) > 0
    assert np.diff(got) == pytest.approx(np.diff(expected), abs=1e-5)
    monkeypatch.setattr(StepLogits, "exact", lambda *_: None)
    rounded = named_logprobs(work_over(model, CapturesByCallingAgain()), named(storm(0)))
    assert np.abs(np.diff(rounded) - np.diff(expected)).max() > 1e-4


@pytest.mark.parametrize("is_graphed", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_rows_are_the_same_where_the_device_keeps_ids(
    model: LoadedModel,
    plain: Plain,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    *,
    is_graphed: bool,
) -> None:
    """Penalties use them, including tokens that the host does not know yet."""
    monkeypatch.setattr(sampler, "choose_sampling", lambda *_: sampling)
    requests = penalised(storm(seed))
    expected = requests.run(work_over(model, None, keeps_ids=False))
    assert expected != plain(seed)
    captures = CapturesByCallingAgain() if is_graphed else None
    work = work_over(model, captures, steps_ahead=1, keeps_ids=True)
    assert penalised(storm(seed)).run(work) == expected
    assert work.stats().preemptions > 0


def penalised(storm: Storm) -> Storm:
    """Return a storm whose rows are all greedy, and penalized in one way or another."""
    kinds = ("repetition_penalty", 3.0), ("presence_penalty", 2.0), ("frequency_penalty", 1.5)
    arrivals = {
        tick: [
            replace(one, sampling=Sampling(temperature=0, **dict([kinds[len(one.prompt_ids) % 3]])))
            for one in requests
        ]
        for tick, requests in storm.arrivals.items()
    }
    return replace(storm, arrivals=arrivals)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_replay_that_fails_costs_no_row(
    model: LoadedModel, plain: Plain, steps_ahead: int
) -> None:
    """Its sequences start over, as after any failed step."""
    captures = CapturesByCallingAgain(RuntimeError("no"))
    assert storm(0).run(work_over(model, captures, steps_ahead)) == plain(0)
    assert captures.next_failure is None


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_out_of_memory_there_are_no_graphs_any_more(
    model: LoadedModel, plain: Plain, steps_ahead: int
) -> None:
    """Their memory is released, and no row is lost."""
    captures = CapturesByCallingAgain(torch.OutOfMemoryError("no"))
    work = work_over(model, captures, steps_ahead)
    assert storm(0).run(work) == plain(0)
    assert captures.next_failure is None
    num_replays = captures.num_replays
    assert storm(1).run(work) == plain(1)
    assert captures.num_replays == num_replays


@pytest.mark.parametrize("none_after", [0, 1])
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_steps_that_cannot_be_captured_are_launched(
    model: LoadedModel,
    plain: Plain,
    none_after: int,
    steps_ahead: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All later steps are launched, with a warning; the step itself was computed before."""
    captures = CapturesByCallingAgain(none_after=none_after)
    assert storm(1).run(work_over(model, captures, steps_ahead)) == plain(1)
    assert len(captures.graphs) == none_after
    assert [record.getMessage() for record in caplog.records] == [
        "CUDA graphs are disabled from now on: no room for a graph"
    ]


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_graph_that_replays_other_numbers_is_not_used(
    model: LoadedModel, plain: Plain, steps_ahead: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a graph reads a reused address; no other graph is used either."""
    captures = CapturesByCallingAgain()

    def stale(compute: Callable[[], Tensor]) -> tuple[Again, Tensor]:
        graph, result = captures(compute)
        if len(captures.graphs) == 1:
            graph.compute = lambda: 1.2 * compute()
        return graph, result

    assert storm(1).run(work_over(model, stale, steps_ahead)) == plain(1)
    assert len(captures.graphs) == 1
    [record] = caplog.records
    message = record.getMessage()
    assert "CUDA graphs are disabled from now on: a replayed graph computed other values" in message


def test_a_step_is_filled_up_with_tokens_of_no_sequence(model: LoadedModel) -> None:
    """The fill is on the device, at the same addresses each time; the host has the actual tokens.

    The first step has the largest size; its graph shows that others fit.
    """
    attention = model.attention(7)
    table = SequenceTable(6, 64, attention.page_size)
    packer = cuda_graphs.make_graphs(model, attention, table, 24, CapturesByCallingAgain())
    assert packer is not None
    arrays = {
        "token_ids": np.array([5, 6, 7]),
        "positions": np.array([4, 0, 1]),
        "slots": np.array([8, 12, 13]),
        "query_starts": np.array([0, 1, 3]),
        "context_lengths": np.array([4, 0]),
        "page_starts": np.array([0, 2, 3]),
        "pages": np.array([1, 2, 3]),
        "logit_rows": np.array([0, 2]),
        "adapters": np.zeros(2, np.int64),
        "sampled_slots": np.array([1]),
    }
    ids = DeviceTokens.for_table(table, CPU)
    largest = packer.pack(1, arrays)
    assert (largest.num_tokens, len(largest.query_starts)) == (24, 25)
    with torch.inference_mode():
        expected = packer.run(largest, ids)
    first, step = packer.pack(1, arrays), packer.pack(1, arrays)
    fillings = {"slots": 28, "query_starts": 3, "page_starts": 3}
    for name in arrays.keys() - {"adapters", "pages"}:
        actual = arrays[name]
        numbers: Tensor = getattr(step, name)
        assert numbers.data_ptr() == getattr(first, name).data_ptr()
        assert getattr(step.host, name).tolist() == actual.tolist()
        left = len(numbers) - len(actual)
        assert numbers.tolist() == [*actual, *[fillings.get(name, 0)] * left]
    assert (step.num_tokens, len(step.query_starts)) == (8, 9)
    assert step.pages[:3].tolist() == step.host.pages.tolist() == [1, 2, 3]
    with torch.inference_mode():
        hidden, logits = packer.run(step, ids)
    torch.testing.assert_close((hidden, logits), expected)
    assert logits.shape == (2, model.vocab_size)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 130))
def test_any_storm_ends_as_without_graphs(model: LoadedModel, seed: int) -> None:
    """Failures may come at any step."""
    rng = random.Random(seed)
    failure = rng.choice([None, RuntimeError("no"), torch.OutOfMemoryError("no")])
    captures = CapturesByCallingAgain(failure, rng.choice([None, None, 0, 1, 2]))
    expected = storm(seed).run(work_over(model, None))
    assert storm(seed).run(work_over(model, captures, seed % 2)) == expected


@pytest.fixture(name="calls")
def fixture_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls of a stand-in for torch's CUDA; memory grows with the first capture."""
    calls: list[str] = []

    class CUDAGraph:
        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            calls.append(f"begin {pool} {capture_error_mode}")

        def capture_end(self) -> None:
            calls.append("end")
            if "failing" in calls:
                raise RuntimeError("operation failed due to a previous error during capture")

    @contextmanager
    def stream(one: object) -> Iterator[None]:
        calls.append(f"stream {one}")
        try:
            yield
        finally:
            calls.append("stream before")

    pools, streams = iter(("pool A", "pool B")), iter("AB")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: next(streams))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**21 * ("compute" in calls))
    return calls


def test_a_set_of_graphs_has_a_stream_and_a_pool(
    calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Caches are emptied only before the first capture, and the reserved memory is logged."""

    def compute() -> Tensor:
        calls.append("compute")
        return torch.zeros(1)

    caplog.set_level("INFO")
    captures, others = cuda_graphs.CudaCapture(CPU), cuda_graphs.CudaCapture(CPU)
    for one in (captures, captures, others):
        one(compute)
    captured = ["compute", "end", "stream before"]
    of_first = ["stream A", "begin pool A thread_local", *captured]
    of_other = ["stream B", "begin pool B thread_local", *captured]
    assert calls == ["empty", *of_first, *of_first, "empty", *of_other]
    assert caplog.messages == ["a CUDA graph reserves 2 MiB"]


def test_a_capture_that_fails_ends_and_leaves_the_stream(calls: list[str]) -> None:
    """Otherwise the next launches would be captured; the first error is raised."""

    def compute() -> Tensor:
        calls.append("failing")
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        cuda_graphs.CudaCapture(CPU)(compute)
    assert calls[-3:] == ["failing", "end", "stream before"]


def test_a_graph_is_worth_it_while_the_host_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are 1,811 tokens for a model of 8B and all for one of 0.6B; fewer on an L4.

    Its host launches a norm in 50 µs instead of 70.
    """
    llama = sized(
        AttentionShape(32, 8, 128, 128, 1.0), hidden_size=4096, max_intermediate_size=14336
    )
    assert cuda_graphs.max_graph_tokens(llama) == 1811
    qwen = sized(AttentionShape(16, 8, 128, 128, 1.0), hidden_size=1024, max_intermediate_size=3072)
    assert cuda_graphs.max_graph_tokens(qwen) == 25_113
    l4 = SimpleNamespace(major=8, minor=9, multi_processor_count=58)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: l4)
    times = iter([0, 600, 600, 880, 880, 1300, 1300, 1500, 1500, 1780])  # µs
    monkeypatch.setattr(
        launch_cost,
        "launch_seconds",
        partial(launch_cost.launch_seconds, clock=lambda: 1e-6 * next(times)),
    )
    monkeypatch.setattr(launch_cost, "choose_elementwise", lambda *_: elementwise)
    monkeypatch.setattr(torch, "zeros", lambda *shape, **_: torch.ones(shape))
    launch_cost.layer_seconds.cache_clear()
    assert cuda_graphs.max_graph_tokens(replace(qwen, device=torch.device("cuda"))) == 2203
    launch_cost.layer_seconds.cache_clear()


def sized(shape: AttentionShape, **widths: int) -> LoadedModel:
    """Return a model that only has sizes."""
    network = cast("Network", None)
    return LoadedModel(
        network, (shape,), ReferenceAttention, torch.bfloat16, CPU, 1000, 1000, **widths
    )


def test_buckets_leave_little_room_empty() -> None:
    """At most an eighth is empty above the smallest; the last fits the largest requested step."""
    assert list(buckets(1)) == [8]
    assert list(buckets(64)) == list(range(8, 65, 8))
    sizes = list(buckets(1000))
    assert sizes[-2] < 1000 <= sizes[-1]
    assert all(8 * (upper - lower - 1) < max(lower, 64) for lower, upper in pairwise(sizes))


class Unseen:
    """A backend that only has shapes."""

    page_size, trash_slot = 4, 0

    def __init__(self, shapes: Several[AttentionShape]) -> None:
        self._shapes = shapes

    def prepare(self, step: Step) -> None:
        """Do nothing."""

    def store_qkv(self, layer: int, qkv: Tensor, cos_sin: Tensor, norms: object) -> Tensor:
        """Return queries."""
        del cos_sin, norms
        shape = self._shapes[layer]
        return qkv.new_empty(len(qkv), shape.num_query_heads, shape.key_dim)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store nothing."""

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Return an array of attention's shape."""
        del sinks
        shape = self._shapes[layer]
        return query.new_empty(len(query), shape.num_query_heads, shape.value_dim)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - RECURRENT - LATENTS))
def test_a_capture_reads_no_value_from_the_device(family: str, tmp_path: Path) -> None:
    """The meta device would raise: no size depends on a step's values."""
    build(family).config.save_pretrained(tmp_path)  # type: ignore[operator]
    architecture = architecture_of(read_hf_config(str(tmp_path)))
    nowhere = torch.device("meta")
    weights = {
        weight.role: torch.empty(weight.shape, dtype=torch.bfloat16, device=nowhere)
        for weight in weights_of(architecture)
    }
    each, all_of_them = np.zeros(8, np.int64), np.arange(9)
    step = Step.pack(
        8,
        nowhere,
        **dict.fromkeys(["token_ids", "positions", "slots", "context_lengths", "pages"], each),
        **dict.fromkeys(["query_starts", "page_starts"], all_of_them),
        logit_rows=all_of_them[:8],
    )
    attention = Unseen([block.attention for block in architecture.blocks])
    with torch.inference_mode():
        step = step.with_ids(torch.zeros(4, dtype=torch.int32, device=nowhere))
        hidden = Decoder(architecture, weights).hidden_states(step, attention)
    assert hidden.shape == (8, architecture.hidden_size)

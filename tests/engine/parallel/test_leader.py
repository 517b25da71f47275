"""Processes that share a model return the rows of a single process, and end together."""

from __future__ import annotations

import gc
import json
import os
import random
import select
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from socket import socketpair
from subprocess import PIPE, Popen
from typing import Any, cast

import pytest
import torch

from tests.engine.adapters import halves, write_adapter
from tests.engine.families import VOCAB, build
from tests.engine.rank_threads import Board, ThreadGroup
from tests.engine.test_parity import run_all
from tests.engine.test_vision_parity import requests as seen_requests
from tests.engine.vision_models import build as seeing
from tests.engine.vision_models import save
from tidemill.engine.child_command import module_command
from tidemill.engine.config import EngineConfig, LoraModule
from tidemill.engine.errors import ModelRefused, RankFailed
from tidemill.engine.kernels.communicator import Shard
from tidemill.engine.load import load_served
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.loop.generation import GenerationCore
from tidemill.engine.model import native
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.network.kv_cache_size import KVCacheSize
from tidemill.engine.model.network.loaded_model import LoadedModel
from tidemill.engine.model.weights.checkpoint import find_checkpoint
from tidemill.engine.parallel import leader as leading
from tidemill.engine.parallel import rank as rank_module
from tidemill.engine.parallel.leader import Leader, make_leader
from tidemill.engine.parallel.messages import (
    LESS,
    Allocate,
    Command,
    Failed,
    FreeMemory,
    Init,
    Load,
    MeasureMemory,
)
from tidemill.engine.parallel.process_group import TorchGroup
from tidemill.engine.parallel.rank import Rank
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest
from tidemill.protocol.contract import EngineError

GREEDY = Sampling(temperature=0)
linux = pytest.mark.skipif(sys.platform != "linux", reason="waits for processes as Linux lets it")


def settings(folder: Path, size: int, **other: Any) -> EngineConfig:
    """Return settings of small steps, so that there are chunks, mixed steps and queueing."""
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 24} | other
    return EngineConfig(
        str(folder), dtype="float32", device="cpu", tensor_parallel_size=size, **limits
    )


@contextmanager
def led(config: EngineConfig, **other: Any) -> Iterator[tuple[Leader, LoadedModel]]:
    """Yield the first rank of a model and what it has loaded."""
    leader = Leader(config, torch.device("cpu"), **other)
    with closing(leader):
        yield leader, load_model(config, leader)


def work_of(model: LoadedModel, config: EngineConfig, num_pages: int = 40) -> GenerationCore:
    """Return a core with so few pages that sequences are preempted."""
    return make_core(model, KVCacheSize(num_pages, model.max_model_len), config)


def requests(count: int = 10) -> list[SequenceRequest]:
    """Return greedy requests, half of which have a common prefix."""
    rng = random.Random(5)
    common = rng.choices(range(3, VOCAB), k=21)
    return [
        SequenceRequest(
            (common if index % 2 else []) + rng.choices(range(3, VOCAB), k=rng.randint(1, 40)),
            16,
            GREEDY,
        )
        for index in range(count)
    ]


def rows_of(work: GenerationCore, requested: list[SequenceRequest]) -> list[list[int]]:
    """Run requests to their end and return their tokens."""
    sequences = [work.add(request) for request in requested]
    while work.step() is not None:
        pass
    return [sequence.result().token_ids for sequence in sequences]


def expected_rows(config: EngineConfig, requested: list[SequenceRequest]) -> list[list[int]]:
    """Return the tokens of one process that has the whole model."""
    return rows_of(work_of(load_model(config), config), requested)


def processes_of(leader: Leader) -> list[Any]:
    """Return the processes of the other ranks."""
    return [process._process for process in leader._rank_processes]


def has_ended(pid: int) -> bool:
    """Wait until a process that may be another's child is gone; return whether it is."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], 20)[0])
    finally:
        os.close(watched)


def test_two_ranks_write_the_rows_of_one(tmp_path: Path, folder: Path) -> None:
    """It includes adapters and quantized weights, a failing step, and running out of pages.

    In the end one of the ranks is killed.
    """
    modules = halves(build("Qwen3Config"))
    adapter = str(write_adapter(tmp_path / "adapter", modules, lora_alpha=2))
    extras = {"quantization": "fp8", "lora_modules": (LoraModule("one", adapter),)}
    requested = [replace(one, adapter=index % 3 % 2) for index, one in enumerate(requests())]
    expected = expected_rows(settings(folder, 1, **extras), requested)
    config = settings(folder, 2, steps_ahead=1, **extras)
    with led(config) as (leader, model):
        work = work_of(model, config, num_pages=12)
        sample, failures = work._sampler.sample, iter([False, True])

        def fails(*extras: Any) -> Any:
            if next(failures, False):
                raise RuntimeError("in passing")
            return sample(*extras)

        work._sampler.sample = fails  # type: ignore[method-assign]
        assert rows_of(work, requested) == expected
        assert work.stats().preemptions > 0
        del work
        gc.collect()
        again = work_of(model, config)
        assert not leader._dropped  # the others know that those pages are no longer used
        assert rows_of(again, requested[:4]) == expected[:4]
        (process,) = processes_of(leader)
        process.kill()
        with pytest.raises(RankFailed, match="rank 1: it was ended by signal 9"):
            rows_of(again, requests(11))
        with pytest.raises(RankFailed, match="rank 1: it was ended by signal 9"):
            again.stats()  # which reports it without requests
    assert process.returncode == -signal.SIGKILL


@pytest.mark.long  # the test of two ranks covers everything else
def test_four_ranks_share_experts_and_run_out_of_memory(tmp_path: Path) -> None:
    """Two key heads are duplicated; the failure of one rank is reported and ends all."""
    build("GptOssConfig").save_pretrained(tmp_path / "model")  # type: ignore[operator]
    requested, rows = requests(4), []
    config = settings(tmp_path / "model", 4)
    description = read_hf_config(config.model)
    parts = find_checkpoint(config.model), description, architecture_of(description)
    leader = Leader(config, torch.device("cpu"))
    with closing(leader):
        for of_all in (None, leader):
            model = native.load(*parts, torch.float32, torch.device("cpu"), leader=of_all)
            work = work_of(model, config)
            rows.append(rows_of(work, requested))
        assert rows[0] == rows[1]
        message = ForkingPickler.dumps(Command(Allocate(99, 1, 10**14, 0, ())))
        leader._rank_processes[1].send(message)
        with pytest.raises(RankFailed, match=r"rank 2: it ran out of memory .*--max-num"):
            rows_of(work, requests(5))
        assert all(has_ended(process.pid) for process in processes_of(leader))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_what_the_first_rank_sees_is_shown_to_all(tmp_path: Path, kind: str) -> None:
    """Vectors of images go to the others with the steps that show them."""
    save(seeing(kind), tmp_path)
    rows = []
    for size in (1, 2):
        config = settings(tmp_path, size)
        with led(config) if size > 1 else nullcontext((None, load_model(config))) as (_, model):
            assert model.vision_encoder is not None
            requested = seen_requests(model.vision_encoder.image_spec)
            results, _ = run_all(model, requested, num_pages=9, budget=10, steps_ahead=1)
            rows.append([result.token_ids for result in results])
    assert rows[0] == rows[1]


@contextmanager
def with_one_that_hangs() -> Iterator[Leader]:
    """Yield the first rank of two, the other of which hangs."""
    leader = Leader(EngineConfig("any", tensor_parallel_size=2), torch.device("cpu"))
    with closing(leader):
        leader._start()
        (process,) = processes_of(leader)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        yield leader


@linux
def test_a_rank_that_hangs_ends_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names it, as it does not respond."""
    monkeypatch.setattr(leading, "ANSWER_SECONDS", 0.01)
    with with_one_that_hangs() as leader:
        leader._patience = 0
        leader._awaited = (0.0, None)
        leader._watch()
        with pytest.raises(RankFailed, match="for 0 s: rank 1 does not respond"):
            leader.check()
        assert has_ended(processes_of(leader)[0].pid)


@linux
def test_a_rank_that_ends_before_it_is_connected_ends_all_ranks() -> None:
    """The group does not exist yet, so it cannot notify the waiting ranks."""
    is_over, met = threading.Event(), []

    class Group(ThreadGroup):
        def connect(self, _: Path) -> None:
            met.append(is_over.wait(60))

    with with_one_that_hangs() as leader:
        leader._group = cast("TorchGroup", Group(Board(2), Shard(0, 2)))
        processes_of(leader)[0].kill()
        with pytest.raises(RankFailed, match="rank 1: it was ended by signal 9"):
            leader._connect_ranks()
        assert not met  # the leader has not waited until its end
        is_over.set()


@linux
@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory."),
            "rank 0: it ran out of memory .*: CUDA out",
        ),
        (ValueError("odd"), "rank 0: ValueError: odd"),
    ],
)
def test_a_failure_of_the_first_rank_ends_all_ranks(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, words: str
) -> None:
    """In the middle of a step the others wait for it, and cannot continue."""
    monkeypatch.setattr(leading, "ANSWER_SECONDS", 0.01)

    def fail() -> None:
        raise failure

    with with_one_that_hangs() as leader:
        with pytest.raises(RankFailed, match=words):
            leader._together(fail)
        with pytest.raises(RankFailed, match=words):
            leader.check()
        assert has_ended(processes_of(leader)[0].pid)


def test_an_end_that_others_notice_is_reported_by_its_rank() -> None:
    """Other ranks may report it sooner, as they failed only because of it."""
    leader = Leader(EngineConfig("any", tensor_parallel_size=3), torch.device("cpu"))
    is_waited_for = threading.Event()

    class HasFailed(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            is_waited_for.set()
            return super().wait(timeout)

    leader._has_failed = HasFailed()
    felt = Failed.from_exception(RuntimeError("Connection closed by peer"))
    with ThreadPoolExecutor() as threads:
        ended = threads.submit(leader._end, felt._replace(words=f"rank 1: {felt.words}"))
        assert is_waited_for.wait(60)
        leader._end(Failed("rank 2: it was ended by signal 9"))
        ended.result()
    with pytest.raises(RankFailed, match="rank 2: it was ended by signal 9"):
        leader.check()


@pytest.mark.parametrize(
    ("exc", "failed"),
    [
        (torch.OutOfMemoryError("no\nmore"), Failed(f"it ran out of memory{LESS}: no")),
        (MemoryError(), Failed(f"it ran out of memory{LESS}: MemoryError")),
        (EngineError("odd weights"), Failed("odd weights")),
        (KeyError("a"), Failed("KeyError: the key 'a' is missing")),
        (RuntimeError("closed"), Failed("RuntimeError: closed", is_own=False)),
    ],
)
def test_a_rank_reports_its_failure_in_one_line(exc: Exception, failed: Failed) -> None:
    """It also reports whether the failure was its own."""
    assert Failed.from_exception(exc) == failed


def test_memory_of_a_trial_counts_as_free_on_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's cached memory is released before the free memory is measured."""
    cached = [100]
    monkeypatch.setattr(torch.cuda, "empty_cache", cached.clear)
    monkeypatch.setattr(rank_module, "free_bytes", lambda _: 900 - sum(cached))
    group = ThreadGroup(Board(2), Shard(1, 2))
    rank = Rank(EngineConfig("any", tensor_parallel_size=2), group, torch.device("cuda"))
    assert rank.execute(Command(MeasureMemory())) == FreeMemory(900)


def test_room_is_that_of_the_fullest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU each rank has its share of the memory."""
    leader = Leader(EngineConfig("any", tensor_parallel_size=3), torch.device("cpu"))
    monkeypatch.setattr(leading, "free_bytes", lambda _: 900)
    assert leader.free_bytes() == 300
    monkeypatch.setattr(leader, "_device", torch.device("cuda"))
    monkeypatch.setattr(leader, "_gather_answers", lambda: [FreeMemory(800), FreeMemory(950)])
    assert leader.free_bytes() == 800


LEADS = """
import sys, torch
from tidemill.engine.config import EngineConfig
from tidemill.engine.parallel.leader import Leader
leader = Leader(EngineConfig("any", tensor_parallel_size=2), torch.device("cpu"))
leader._start()
print(leader._rank_processes[0]._process.pid, flush=True)
sys.stdin.read()
"""


def test_a_rank_that_fails_ends_when_the_first_one_ends_it(tmp_path: Path) -> None:
    """It reports the cause first, so that the leader knows it before others notice the end."""
    ours, theirs = socketpair()
    with theirs:
        command = module_command("tidemill.engine.parallel.rank_main", str(theirs.fileno()))
        process = Popen(command, pass_fds=[theirs.fileno()])
    with Connection(ours.detach()) as connection:
        begin = Init(EngineConfig(str(tmp_path)), Shard(1, 2), "cpu", 1.0)
        for message in (begin, Load(1, torch.float32, None, has_adapters=False)):
            connection.send(Command(message))
        failed = connection.recv()
        assert isinstance(failed, Failed)
        assert str(tmp_path) in failed.words
    assert process.wait() == 0  # on its own, since the socket is closed


@linux
@pytest.mark.long
def test_ranks_end_when_the_first_one_is_killed() -> None:
    """No process is left behind."""
    with Popen([sys.executable, "-c", LEADS], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    assert has_ended(pid)


@pytest.mark.parametrize(
    ("config", "other", "words"),
    [
        ({}, {"size": 3}, "4 query heads and 2 key heads cannot be split evenly"),
        ({"attention_chunk_size": 8}, {}, "requires the engine's own decoder"),
        ({}, {"runner": "pooling", "convert": "embed"}, "it runs on one GPU"),
    ],
)
def test_models_that_cannot_be_shared_are_rejected_before_any_rank_starts(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    other: dict[str, Any],
    words: str,
) -> None:
    """The message names it, and has advice."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | config), encoding="utf-8")
    monkeypatch.setattr(Leader, "_start", lambda _: pytest.fail("ranks are started"))
    with pytest.raises(ModelRefused, match=words) as refused:
        load_served(settings(folder, **({"size": 2} | other)))
    assert str(folder) in str(refused.value)
    assert "--tensor-parallel-size" in str(refused.value)


def test_each_rank_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message contains their number."""
    monkeypatch.setattr(leading, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(EngineError, match="--tensor-parallel-size 4 exceeds the 2 GPUs"):
        make_leader(EngineConfig(str(tmp_path), tensor_parallel_size=4))
    assert make_leader(EngineConfig(str(tmp_path))) is None

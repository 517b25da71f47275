"""Encoder steps as graphs, with a stand-in that computes again: the values never change."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.engine.loop.test_cuda_graphs import CapturableReference, CapturesByCallingAgain
from tests.engine.model.encoders.small_encoders import loaded, save
from tests.long_parameters import with_long
from tidemill.engine.kernels import backends
from tidemill.engine.kernels.step import host_buffer
from tidemill.engine.kernels.triton import tiles
from tidemill.engine.kernels.triton.attention import TritonAttention
from tidemill.engine.loop import encoder_runner
from tidemill.engine.loop.cuda_graphs import Capture
from tidemill.engine.loop.encoding import EncodingCore
from tidemill.engine.model.encoders.loaded_encoder import LoadedEncoder
from tidemill.engine.model.encoders.pooler import Pooler
from tidemill.engine.scheduling.encoding import EncodingRequest

pytestmark = pytest.mark.usefixtures("proved")

PADDING = 1


def requests(count: int, longest: int, **changes: Any) -> list[EncodingRequest]:
    """Return sequences of different lengths, some with two segments."""
    rng = np.random.default_rng(0)
    made = []
    for length in rng.integers(1, longest, count).tolist():
        types = [0] * (length // 2) + [1] * (length - length // 2) if length % 2 else None
        ids = rng.integers(200, 30_000, length).tolist()
        made.append(EncodingRequest(ids, types, **changes))
    return made


def values(
    model: LoadedEncoder,
    sequences: list[EncodingRequest],
    captures: Capture | None,
    max_tokens: int = 96,
) -> tuple[NDArray[np.float32], int]:
    """Return the values of some sequences, and the number of steps."""
    rows, num_steps = values_of_each(model, sequences, captures, max_tokens)
    return np.concatenate([np.atleast_2d(row) for row in rows]), num_steps


def values_of_each(
    model: LoadedEncoder,
    sequences: list[EncodingRequest],
    captures: Capture | None,
    max_tokens: int = 96,
) -> tuple[list[NDArray[np.float32]], int]:
    """Return the values of each sequence, and the number of steps."""
    work = EncodingCore(model, max_tokens, 9, int(captures is not None), captures)
    items = [work.add(sequence) for sequence in sequences]
    while work.step() is not None:
        pass
    return [item.result().values for item in items], work.stats().steps


@pytest.mark.parametrize(
    ("family", "modes"),
    with_long(
        [("Bert", ("cls", "max")), ("Bert", ()), ("ModernBert", ("lasttoken",))],
        [("Bert", ("cls",))],
    ),
)
def test_values_are_those_of_launched_steps(
    tmp_path: Path, family: str, modes: tuple[str, ...]
) -> None:
    """Steps have any number of tokens and sequences; each is one replay once it was captured.

    Without modes each token has values, and some see only the beginning of their sequence.
    """
    model = loaded(save(tmp_path, family))
    model = replace(model, pooler=Pooler(modes, model.pooler.parts), backend=CapturableReference)
    sequences = [*requests(60, 40), *requests(9, 3)]
    if not modes:
        sequences[::7] = [
            replace(one, num_unseen=len(one.token_ids) // 2) for one in sequences[::7]
        ]
    expected, _ = values(model, sequences, None)
    captures = CapturesByCallingAgain()
    got, _ = values(model, sequences, captures)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert min(captures.num_replays, len(captures.graphs)) > 5


def test_sparse_values_are_those_of_launched_steps(tmp_path: Path) -> None:
    """The logits of all words are pooled within the graph."""
    folder = save(tmp_path, "Bert", "ForMaskedLM", num_hidden_layers=1, vocab_size=2_100)
    model = loaded(folder, pooler_config={"pooling_type": "SPLADE"})
    model = replace(model, backend=CapturableReference)
    sequences = [
        replace(one, token_ids=[token % 2_000 for token in one.token_ids], type_ids=None)
        for one in requests(50, 40)
    ]

    def dense(captures: Capture | None) -> NDArray[np.float32]:
        rows = np.zeros((len(sequences), 2_100), np.float32)
        pairs, _ = values_of_each(model, sequences, captures)
        for row, own in zip(rows, pairs, strict=True):
            row[own[:, 0].astype(int)] = own[:, 1]
        return rows

    captures = CapturesByCallingAgain()
    np.testing.assert_allclose(dense(captures), dense(None), atol=1e-5)
    assert captures.num_replays >= 2


def test_values_of_gpu_kernels_are_those_of_launched_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of one step serves any other, over the kernels for attention and pooling."""
    model = loaded(save(tmp_path, "Bert", num_hidden_layers=1))
    model = replace(model, pooler=Pooler(("mean",)))
    sequences = requests(16, 12)
    expected, _ = values(model, sequences, None, 32)
    monkeypatch.setattr(backends, "TRITON_TYPES", {"cpu"})
    captures = CapturesByCallingAgain()
    got, _ = values(replace(model, backend=TritonAttention), sequences, captures, 32)
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert captures.num_replays >= 2


def test_tokens_that_change_the_network_are_launched(tmp_path: Path) -> None:
    """Padding within a text changes positions, and prompts that are not pooled other rows."""
    model = replace(loaded(save(tmp_path, "Roberta")), backend=CapturableReference)
    padded = [EncodingRequest([5, PADDING, 6, 7]), EncodingRequest([8, 9])]
    pooled = replace(model, pooler=Pooler(("mean",)))
    skipped = [replace(one, num_skipped=len(one.token_ids) // 2) for one in requests(4, 9)]
    for some, sequences in ((model, padded), (pooled, skipped)):
        captures = CapturesByCallingAgain()
        got, _ = values(some, sequences, captures)
        np.testing.assert_allclose(got, values(some, sequences, None)[0], atol=1e-6)
        assert not captures.graphs


@pytest.mark.parametrize(
    "captures",
    [
        CapturesByCallingAgain(RuntimeError("no")),
        CapturesByCallingAgain(torch.OutOfMemoryError("no")),
        CapturesByCallingAgain(none_after=1),
    ],
    ids=["failed replay", "out of memory", "failed capture"],
)
def test_a_graph_that_fails_costs_no_request(
    tmp_path: Path, captures: CapturesByCallingAgain
) -> None:
    """Its sequences run again, without graphs if memory was the reason."""
    model = replace(loaded(save(tmp_path, "Bert")), backend=CapturableReference)
    sequences = requests(60, 40)
    got, _ = values(model, sequences, captures)
    np.testing.assert_allclose(got, values(model, sequences, None)[0], atol=1e-5)
    assert captures.next_failure is None


def test_tokens_and_graphs_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with an output per token are launched while a graph is in flight, and the reverse."""
    model = loaded(save(tmp_path, "Bert", num_hidden_layers=1))
    model = replace(model, pooler=Pooler(("mean",)))
    pairs = [
        replace(
            one, output="token_vectors" if wants_tokens else "pooled", priority=number % 3 or None
        )
        for number, one in enumerate(requests(8, 12))
        for wants_tokens in (False, True)
    ]
    # A sequence above the largest graph.
    pairs.insert(8, EncodingRequest(list(range(200, 290)), output="token_vectors"))
    expected, _ = all_values(model, pairs, None)
    monkeypatch.setattr(backends, "TRITON_TYPES", {"cpu"})
    captures = CapturesByCallingAgain()
    got, addresses = all_values(replace(model, backend=TritonAttention), pairs, captures)
    assert len(addresses) == 1, "graphs contain the address of the workspace"
    for one, other, sequence in zip(got, expected, pairs, strict=True):
        shape = (len(sequence.token_ids), 48) if sequence.output != "pooled" else (48,)
        assert one.shape == other.shape == shape
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert captures.num_replays >= 2


def all_values(
    model: LoadedEncoder, sequences: list[EncodingRequest], captures: Capture | None
) -> tuple[list[NDArray[np.float32]], set[int]]:
    """Return the values of each sequence, and the addresses of the attention's workspace.

    Sequences are added while others run.
    """
    work = EncodingCore(model, 32, 9, 1, captures)
    backend: Any = work._runner._attention
    addresses: set[int] = set()
    items = []
    for sequence in sequences:
        items.append(work.add(sequence))
        if len(items) % 5 == 0:
            work.step()
    while work.step() is not None:
        if captures is not None:
            addresses.add(backend.backend._parts.values.data_ptr())
    return [item.result().values for item in items], addresses


def test_a_step_is_one_copy_and_one_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All arrays of a step are in one pinned buffer, besides the tiles of its attention."""
    model = replace(loaded(save(tmp_path, "Bert")), backend=CapturableReference)
    captures, buffers = CapturesByCallingAgain(), []

    def noted(length: int, device: torch.device) -> torch.Tensor:
        buffers.append(length)
        return host_buffer(length, device)

    monkeypatch.setattr("tidemill.engine.kernels.step.host_buffer", noted)
    _, num_steps = values(model, requests(60, 40), captures)
    assert len(buffers) == num_steps
    assert captures.num_replays + len(captures.graphs) == num_steps


def test_a_sequence_costs_few_calls_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its request to its result, next to what its step costs: a device waits for the host."""
    model = replace(loaded(save(tmp_path, "Bert")), backend=CapturableReference)
    monkeypatch.setattr(
        encoder_runner,
        "encoded",
        lambda _model, _own, batch: torch.zeros(len(batch.step.context_lengths), 8),
    )

    def calls_of(count: int) -> int:
        sequences = [EncodingRequest([200 + number, 300]) for number in range(count)]
        work = EncodingCore(model, 96, 48, 1)
        num_calls = 0

        def record(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        sys.setprofile(record)
        try:
            for sequence in sequences:
                work.add(sequence)
            while work.step() is not None:
                pass
        finally:
            sys.setprofile(None)
        assert work.stats().steps == 1
        return num_calls

    assert (calls_of(48) - calls_of(8)) / 40 <= 22


def test_programs_are_launched_for_sequences_and_not_for_tokens() -> None:
    """A step of whole texts has a narrow tile for each text at most, besides its padding's."""
    spec = tiles.TileSpec(1, 0, is_causal=False, wide=128, narrow=16, at_once=44)
    most = tiles.TileCounts.upper_bound(spec, 32_768, 32_768, 2_048)
    assert most.narrow == 2_048 + 32_768 // 16 + 44
    assert tiles.TileCounts.upper_bound(spec, 32_768, 32_768).narrow == 32_768 + 44

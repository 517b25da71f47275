"""Speech steps as graphs, with a stand-in that computes again: the texts never change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.engine.loop.test_cuda_graphs import CapturableReference, CapturesByCallingAgain
from tests.engine.speech_models import clip, run, save
from tidemill.engine.config import EngineConfig
from tidemill.engine.loop import speech_graphs
from tidemill.engine.loop.speech import SpeechCore
from tidemill.engine.media.audio_features import FeatureExtractor
from tidemill.engine.model.speech.loading import LoadedSpeech, load_speech
from tidemill.engine.model.speech.runner import windows_at_once
from tidemill.engine.scheduling.speech import SpeechRequest, SpeechResult

pytestmark = pytest.mark.usefixtures("proved")

SHAPE = "many languages"


@pytest.fixture(name="model", scope="module")
def fixture_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedSpeech:
    """A small random model over pages of the reference."""
    folder: Path = tmp_path_factory.mktemp("whisper")
    save(folder, SHAPE)
    loaded = load_speech(EngineConfig(str(folder), device="cpu", dtype="float32"))
    return replace(loaded, backend=CapturableReference)


def texts(
    model: LoadedSpeech, *captures: CapturesByCallingAgain, count: int = 7
) -> list[SpeechResult]:
    """Return the results of recordings of one and two windows, some with times of words."""
    remaining = iter(captures)
    runner = speech_graphs.make_runner(
        model.network, model.backend, 5, lambda _: next(remaining, None)
    )
    extractor = FeatureExtractor(model.description.features)
    work = SpeechCore(runner, model.description.whisper_tokens, extractor, 5)
    requests = [
        SpeechRequest(clip(3 * share, seed), language="de", wants_words=seed == 1)
        for seed, share in enumerate((0.4, 1.5, 0.8, 1.0, 0.2, 0.7, 1.9))
    ]
    return [recording.result() for recording in run(work, *requests[:count])]


@pytest.fixture(name="launched", scope="module")
def fixture_launched(model: LoadedSpeech) -> list[SpeechResult]:
    """Results of steps that are launched without graphs."""
    return texts(model)


def test_texts_are_those_of_launched_steps(
    model: LoadedSpeech, launched: list[SpeechResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows are encoded by their number, and tokens decoded by theirs; long prompts launched."""
    monkeypatch.setattr(speech_graphs, "MOST_TOKENS", 16)
    windows, tokens = CapturesByCallingAgain(), CapturesByCallingAgain()
    assert texts(model, windows, tokens) == launched
    assert len(windows.graphs[0].result) == 4  # first, so that others find room in the pool
    assert len(windows.graphs) > 1
    assert tokens.num_replays > 10 * len(tokens.graphs) > 10


@pytest.mark.parametrize("failure", [RuntimeError("no"), torch.OutOfMemoryError("no")])
def test_a_replay_that_fails_costs_no_recording(
    model: LoadedSpeech, launched: list[SpeechResult], failure: Exception
) -> None:
    """Its windows start over, without graphs if memory was the reason."""
    windows, tokens = CapturesByCallingAgain(), CapturesByCallingAgain(failure)
    assert texts(model, windows, tokens, count=4) == launched[:4]
    assert tokens.next_failure is None


@pytest.mark.parametrize(("gibibytes", "count"), [(79.2, 32), (21.9, 16)])
def test_a_gpu_encodes_more_windows_at_once(
    monkeypatch: pytest.MonkeyPatch, gibibytes: float, count: int
) -> None:
    """A CPU is busy with a few."""
    card = SimpleNamespace(total_memory=int(gibibytes * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    assert windows_at_once(torch.device("cuda")) == count
    assert windows_at_once(torch.device("cpu")) == 4

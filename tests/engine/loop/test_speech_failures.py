"""A step of windows that fails: every recording except the culprit has its normal result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.speech_models import clip, run, save, work_over
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import DeviceFailed
from tidemill.engine.loop.speech import SpeechCore
from tidemill.engine.model.speech.loading import LoadedSpeech, load_speech
from tidemill.engine.model.speech.runner import SpeechRunner, TextStep
from tidemill.engine.scheduling.sequence import Sampling
from tidemill.engine.scheduling.speech import SpeechRequest, SpeechResult
from tidemill.protocol.errors import InternalError

pytestmark = pytest.mark.usefixtures("proved")

CLIPS = [clip(1.0 + seed / 2, seed) for seed in range(5)]
BAD = 2


@pytest.fixture(name="model", scope="module")
def fixture_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedSpeech:
    """Return a tiny model."""
    folder: Path = tmp_path_factory.mktemp("whisper")
    save(folder, "English alone")
    return load_speech(EngineConfig(str(folder), device="cpu", dtype="float32"))


@pytest.fixture(name="expected", scope="module")
def fixture_expected(model: LoadedSpeech) -> list[SpeechResult]:
    """Return the results of steps that do not fail."""
    return [one.result() for one in run(work_over(model), *map(SpeechRequest, CLIPS))]


def features_of(work: SpeechCore, index: int) -> Tensor:
    """Return the features of a clip's first window."""
    extractor = work._extractor
    return extractor.features(CLIPS[index])[:, : extractor.settings.window_frames]


def fail_on_bad(monkeypatch: pytest.MonkeyPatch, work: SpeechCore, error: Exception) -> None:
    """Make every batch with the bad recording fail when it is encoded."""
    bad, hear = features_of(work, BAD), SpeechRunner.encode

    def encode(own: SpeechRunner, slots: Sequence[int], features: Tensor) -> Tensor:
        if any(torch.equal(one, bad) for one in features):
            raise error
        return hear(own, slots, features)

    monkeypatch.setattr(SpeechRunner, "encode", encode)


@pytest.mark.parametrize(
    ("error", "code"),
    [(RuntimeError("boom"), "internal_error"), (torch.OutOfMemoryError(), "out_of_memory")],
)
def test_a_recording_that_cannot_be_encoded_fails_alone(
    model: LoadedSpeech,
    expected: list[SpeechResult],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    code: str,
) -> None:
    """It has its own 500; recordings encoded with it are transcribed normally."""
    work = work_over(model)
    fail_on_bad(monkeypatch, work, error)
    recordings = run(work, *map(SpeechRequest, CLIPS))
    for index, recording in enumerate(recordings):
        if index == BAD:
            with pytest.raises(InternalError) as raised:
                recording.result()
            assert raised.value.code == code
        else:
            assert recording.result() == expected[index]
    assert work.stats().running == work.stats().waiting == 0


def test_a_step_that_fails_once_costs_no_recording(
    model: LoadedSpeech, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the middle of texts: all of them are decoded again."""
    requests = [
        SpeechRequest(samples, sampling=Sampling(temperature=0.7, seed=3)) for samples in CLIPS
    ]
    expected = [one.result() for one in run(work_over(model), *requests)]
    write, calls = SpeechRunner.decode, 0

    def fail_once(own: SpeechRunner, step: TextStep, *more: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise RuntimeError("boom")
        return write(own, step, *more)

    work = work_over(model)
    monkeypatch.setattr(SpeechRunner, "decode", fail_once)
    assert [one.result() for one in run(work, *requests)] == expected


def test_logits_that_are_not_finite_fail_only_their_recording(
    model: LoadedSpeech, expected: list[SpeechResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of the step continue without a retry."""
    work = work_over(model, num_slots=5)
    write, is_broken = SpeechRunner.decode, False

    def broken(own: SpeechRunner, step: TextStep, *more: Any) -> Tensor:
        nonlocal is_broken
        logits = write(own, step, *more).clone()
        if not is_broken and (step.starts > 6).any():
            is_broken = True
            logits[0] = float("nan")
        return logits

    monkeypatch.setattr(SpeechRunner, "decode", broken)
    recordings = run(work, *map(SpeechRequest, CLIPS))
    failed = [one for one in recordings if one.error is not None]
    assert len(failed) == 1
    with pytest.raises(InternalError, match="not finite"):
        failed[0].result()
    for recording, wanted in zip(recordings, expected, strict=True):
        assert recording in failed or recording.result() == wanted


def test_a_suspect_that_is_aborted_is_gone(
    model: LoadedSpeech, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no event, and is not waited for."""
    work = work_over(model)
    fail_on_bad(monkeypatch, work, RuntimeError("boom"))
    recordings = [work.add(SpeechRequest(samples)) for samples in CLIPS]
    work.step()  # the first three fail together
    assert work.stats().waiting == len(CLIPS)
    work.abort({recordings[BAD], recordings[0]})
    finished = []
    while (events := work.step()) is not None:
        finished += [event.request for event in events]
    assert set(finished) == {recordings[1], *recordings[3:]}
    assert all(one.result().num_output_tokens for one in finished)


def test_a_device_that_fails_every_step_ends_the_engine_and_fails_no_recording(
    model: LoadedSpeech, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No recording has an error, since silence cannot be encoded either."""

    def failing(*_: object) -> Tensor:
        raise RuntimeError("CUDA error")

    work = work_over(model)
    monkeypatch.setattr(SpeechRunner, "encode", failing)
    recordings = [work.add(SpeechRequest(samples)) for samples in CLIPS]
    with pytest.raises(DeviceFailed, match="a step of one token fails as well"):
        run(work)
    assert not any(recording.error for recording in recordings)


def test_a_device_without_finite_numbers_ends_the_engine(
    model: LoadedSpeech, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of silence are not finite either."""
    write = SpeechRunner.decode

    def broken(own: SpeechRunner, step: TextStep, *more: Any) -> Tensor:
        return write(own, step, *more) * float("nan")

    work = work_over(model)
    monkeypatch.setattr(SpeechRunner, "decode", broken)
    recordings = [work.add(SpeechRequest(samples)) for samples in CLIPS]
    with pytest.raises(DeviceFailed, match="not finite"):
        work.step()
    assert not any(recording.error for recording in recordings)

"""Speech one step ahead: texts never change, and no step waits for the tokens before it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from tests.engine.speech_models import clip, run, save, work_over
from tests.long_parameters import with_long
from tidemill.engine.config import EngineConfig
from tidemill.engine.loop.runner import Readout
from tidemill.engine.media.audio_features import FeatureExtractor
from tidemill.engine.model.speech.loading import LoadedSpeech, load_speech
from tidemill.engine.model.speech.runner import SpeechRunner, TextStep
from tidemill.engine.scheduling.sequence import Sampling
from tidemill.engine.scheduling.speech import LanguageDetection, SpeechRequest, SpeechResult

pytestmark = pytest.mark.usefixtures("proved")

PENALTY = Sampling(temperature=0.0, repetition_penalty=1.3)
RETRIES = (0.4, 0.8)
# Languages that are given and detected, timestamps, words, draws, penalties, several windows, texts
# that are started again.
REQUESTS = (
    SpeechRequest(clip(2.0, 1), language="de"),
    SpeechRequest(clip(7.0, 2), detection=LanguageDetection(2, 1.0)),
    SpeechRequest(clip(1.0, 3), wants_segments=True, prompt_ids=(5, 9), retry_temperatures=RETRIES),
    SpeechRequest(clip(2.5, 4), language="en", wants_words=True),
    SpeechRequest(clip(2.0, 5), sampling=Sampling(temperature=0.8, seed=4)),
    SpeechRequest(clip(1.5, 6), language="fr", sampling=PENALTY, wants_segments=True),
)


@pytest.fixture(name="model", scope="module")
def fixture_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedSpeech:
    """A small random model with languages."""
    folder: Path = tmp_path_factory.mktemp("whisper")
    save(folder, "many languages")
    return load_speech(EngineConfig(str(folder), device="cpu", dtype="float32"))


@pytest.fixture(name="expected", scope="module")
def fixture_expected(model: LoadedSpeech) -> list[SpeechResult]:
    """Results of steps that are waited for."""
    return [one.result() for one in run(work_over(model), *REQUESTS)]


class Order:
    """Records launches of a step of texts and the arrivals of their tokens, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.failing: dict[str, int] = {}
        decode, wait = SpeechRunner.decode, Readout.wait

        def launch(own: SpeechRunner, step: TextStep, queries: Any = None) -> Tensor:
            if queries is None:  # otherwise it is for timestamps of words
                self._note("launch")
            return decode(own, step, queries)

        def arrive(own: Readout) -> list[Any]:
            self._note("arrive")
            return wait(own)

        monkeypatch.setattr(SpeechRunner, "decode", launch)
        monkeypatch.setattr(Readout, "wait", arrive)

    def _note(self, event: str) -> None:
        self.events.append(event)
        if self.events.count(event) == self.failing.get(event):
            raise RuntimeError("boom")

    def in_flight(self) -> Counter[int]:
        """Return how often a step was launched with each number of steps in flight."""
        counts = Counter[int]()
        for place, event in enumerate(self.events):
            if event == "launch":
                before = Counter(self.events[:place])
                counts[before["launch"] - before["arrive"]] += 1
        return counts


def test_texts_are_those_of_steps_that_are_waited_for(
    model: LoadedSpeech, expected: list[SpeechResult]
) -> None:
    """Three windows run at a time, and others follow in their slots."""
    recordings = run(work_over(model, steps_ahead=1), *REQUESTS)
    assert [one.result() for one in recordings] == expected
    assert recordings[1].windows[1:]
    assert {one.temperature for one in recordings[2].result().segments} == {RETRIES[-1]}


def test_each_step_is_launched_before_the_tokens_of_the_previous_one_arrive(
    model: LoadedSpeech, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first step has none before it."""
    order = Order(monkeypatch)
    words = SpeechRequest(clip(2.5, 9), language="en", wants_words=True)
    recordings = run(work_over(model, steps_ahead=1), REQUESTS[0], words)
    assert [len(one.windows) for one in recordings] == [1, 1]
    counts = order.in_flight()
    assert counts.keys() == {0, 1}
    assert counts[0] == 1
    assert counts[1] > 15


def test_features_are_computed_in_threads_before_they_are_needed(
    model: LoadedSpeech, expected: list[SpeechResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step computes them, and each recording has its features once."""
    features, threads = FeatureExtractor.features, []

    def recorded(own: FeatureExtractor, samples: NDArray[np.float32]) -> Tensor:
        threads.append(threading.get_ident())
        return features(own, samples)

    monkeypatch.setattr(FeatureExtractor, "features", recorded)
    recordings = run(work_over(model, num_slots=2, steps_ahead=1), *REQUESTS)
    assert [one.result() for one in recordings] == expected
    assert len(threads) == len(REQUESTS)
    assert threading.get_ident() not in threads


class _Late(Future[Tensor]):
    """Features that no step may wait for."""

    def result(self, timeout: float | None = None) -> Tensor:
        """Return the features, which must be there."""
        assert self.done()
        return super().result(timeout)


def test_a_long_recording_does_not_keep_others_waiting(
    model: LoadedSpeech, expected: list[SpeechResult]
) -> None:
    """The others finish while its features are computed."""
    late, own = _Late(), FeatureExtractor(model.description.features)

    def submit(call: Callable[[NDArray[np.float32]], Tensor], samples: NDArray[np.float32]) -> Any:
        if samples is REQUESTS[1].samples:
            return late
        early = Future[Tensor]()
        early.set_result(call(samples))
        return early

    work: Any = work_over(model, steps_ahead=1)
    work._threads = SimpleNamespace(submit=submit)
    recordings = [work.add(request) for request in (REQUESTS[1], REQUESTS[0], REQUESTS[3])]
    while not all(one.is_over for one in recordings[1:]):
        assert work.step() is not None
    late.set_result(own.features(REQUESTS[1].samples))
    while work.step() is not None:
        pass
    assert [one.result() for one in recordings] == [expected[1], expected[0], expected[3]]


def test_a_penalty_waits_for_its_text(
    model: LoadedSpeech, expected: list[SpeechResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the host knows all tokens; alone, such a text is never ahead."""
    order = Order(monkeypatch)
    [recording] = run(work_over(model, steps_ahead=1), REQUESTS[5])
    assert recording.result() == expected[5]
    assert order.in_flight().keys() == {0}


@pytest.mark.parametrize(
    "failing", with_long([{"launch": 12, "arrive": 10}], [{"launch": 9}, {"arrive": 9}])
)
def test_a_step_that_fails_in_flight_costs_no_recording(
    model: LoadedSpeech,
    expected: list[SpeechResult],
    monkeypatch: pytest.MonkeyPatch,
    failing: dict[str, int],
) -> None:
    """Its windows start over; those of a newer step do not use its tokens."""
    Order(monkeypatch).failing = failing
    work = work_over(model, steps_ahead=1)
    recordings = run(work, *REQUESTS)
    assert [one.result() for one in recordings] == expected
    assert work.stats().failures == len(failing)


def test_recordings_that_leave_in_flight_change_no_other(
    model: LoadedSpeech, expected: list[SpeechResult]
) -> None:
    """Another window takes the slot while the old step is in flight."""
    work = work_over(model, num_slots=2, steps_ahead=1)
    recordings = [work.add(request) for request in REQUESTS]
    for _ in range(6):
        work.step()
    work.abort({recordings[0], recordings[3]})
    while work.step() is not None:
        pass
    stayed = [1, 2, 4, 5]
    assert [recordings[place].result() for place in stayed] == [expected[i] for i in stayed]
    assert work.stats().running == 0


def test_logits_that_are_not_finite_fail_only_their_recording(
    model: LoadedSpeech, expected: list[SpeechResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that was launched after it is void for the recording."""
    decode, broken = SpeechRunner.decode, np.zeros(1, np.int64)

    def decode_badly(own: SpeechRunner, step: TextStep, queries: Any = None) -> Tensor:
        logits = decode(own, step, queries).clone()
        broken[0] += 1
        if broken[0] == 8:
            logits[0] = float("nan")
        return logits

    monkeypatch.setattr(SpeechRunner, "decode", decode_badly)
    recordings = run(work_over(model, steps_ahead=1), *REQUESTS)
    failed = [one for one in recordings if one.error is not None]
    assert len(failed) == 1
    for recording, wanted in zip(recordings, expected, strict=True):
        assert recording in failed or recording.result() == wanted

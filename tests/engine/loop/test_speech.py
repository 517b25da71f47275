"""Speech: the output and timestamps equal those of transformers' `generate`, token by token.

The models are random, in fp32; every comparison is of whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.engine.speech_models import (
    END,
    RATE,
    SHAPES,
    clip,
    extractor_of,
    run,
    save,
    work_of,
    work_over,
)
from tests.long_parameters import with_long
from tidemill.engine.config import EngineConfig
from tidemill.engine.loop.core import StepOutput
from tidemill.engine.loop.recording import Recording, Window
from tidemill.engine.model.speech.architecture import WhisperTokens
from tidemill.engine.model.speech.loading import LoadedSpeech, load_speech
from tidemill.engine.scheduling.sequence import Sampling
from tidemill.engine.scheduling.speech import (
    LanguageDetection,
    SpeechRequest,
    SpeechResult,
    SpeechSegment,
    Thresholds,
)
from tidemill.protocol.errors import RequestError

pytestmark = pytest.mark.usefixtures("proved")

Samples = NDArray[np.float32]
# Returns transformers' model of a shape and seed, and ours.
Models = Callable[[str, int], tuple[Any, LoadedSpeech]]


@pytest.fixture(name="models", scope="module")
def fixture_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Return a function that builds and loads each model once."""

    @cache
    def models(shape: str, seed: int) -> tuple[Any, LoadedSpeech]:
        folder: Path = tmp_path_factory.mktemp("whisper")
        model = save(folder, shape, seed)
        return model, load_speech(EngineConfig(str(folder), device="cpu", dtype="float32"))

    return models


def features_of(shape: str, samples: Samples) -> torch.Tensor:
    """Return transformers' features `[1, mels, frames]`, of any length."""
    extractor = extractor_of(shape)
    is_long = len(samples) > extractor.n_samples
    options = {"truncation": False, "padding": "longest"} if is_long else {}
    return extractor(samples, sampling_rate=RATE, return_tensors="pt", **options).input_features


def first_window(model: Any, shape: str, samples: Samples, **options: Any) -> list[int]:
    """Return all of transformers' tokens for a first window, including the prompt."""
    features = features_of(shape, samples)
    outputs = model.generate(features, force_unique_generate_call=True, **options)
    return [int(token) for token in outputs[0]]


def options_of(shape: str) -> dict[str, Any]:
    """Return the options of both implementations for a model with languages."""
    return {"language": "de", "task": "translate"} if SHAPES[shape][2] else {}


@pytest.mark.parametrize("shape", with_long([*SHAPES][:1], [*SHAPES][1:]))
@pytest.mark.parametrize(
    ("prompt", "has_times"),
    with_long([((5, 9, 11), True)], [((), False), ((), True), ((5, 9, 11), False)]),
)
def test_windows_have_the_same_result_together_and_alone(
    models: Models, shape: str, *, has_times: bool, prompt: tuple[int, ...]
) -> None:
    """There are more than run at once, with and without timestamps and a prompt."""
    model, loaded = models(shape, 0)
    window = SHAPES[shape][1]
    clips = [clip(window * share, seed) for seed, share in enumerate((0.1, 1.0, 0.6, 0.9, 0.3))]
    language = options_of(shape)
    recordings = run(
        work_over(loaded),
        *(
            SpeechRequest(one, prompt_ids=prompt, wants_segments=has_times, **language)
            for one in clips
        ),
    )
    config = model.generation_config
    before = {"prompt_ids": torch.tensor([config.prev_sot_token_id, *prompt])} if prompt else {}
    options = {"return_timestamps": has_times, **before, **language}
    expected = [first_window(model, shape, samples, **options) for samples in clips]
    assert [one.windows[0].tokens for one in recordings] == expected
    assert len(set(map(tuple, expected))) == len(clips)
    assert len({token for tokens in expected for token in tokens}) > 20


def times_of(pieces: list[dict[str, Any]]) -> list[tuple[float, float, list[int]]]:
    """Return the start, end and text of transformers' segments that contain text."""
    times = [
        (float(one["start"]), float(one["end"]), [t for t in one["tokens"].tolist() if t < END])
        for one in pieces
    ]
    return [one for one in times if one[2]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", with_long([2.5], [1.0, 1.02]))
def test_a_long_recording_is_transcribed_window_by_window(
    models: Models, shape: str, share: float
) -> None:
    """Its segments, timestamps and language equal those of transformers."""
    model, loaded = models(shape, 1)
    samples = clip(SHAPES[shape][1] * share, seed=3)
    (recording,) = run(work_over(loaded), SpeechRequest(samples, wants_words=True))
    features = features_of(shape, samples)
    task = {"task": "transcribe"} if SHAPES[shape][2] else {}
    outputs = model.generate(
        features,
        attention_mask=torch.ones(1, features.shape[-1], dtype=torch.long),
        return_timestamps=True,
        return_segments=True,
        return_token_timestamps=True,
        **task,
    )
    pieces = outputs["segments"][0]
    expected = times_of(pieces)
    got = recording.result().segments
    assert [list(one.token_ids) for one in got] == [text for *_, text in expected]
    np.testing.assert_allclose([one.start for one in got], [start for start, *_ in expected])
    np.testing.assert_allclose([one.end for one in got], [end for _, end, _ in expected])
    if share > 1:
        assert len(recording.windows) > 1
    ends = [float(end) for piece in pieces for end in piece["token_timestamps"]]
    tokens = [int(token) for piece in pieces for token in piece["tokens"]]
    words = [(ends[i - 1], ends[i]) for i, token in enumerate(tokens) if token < END]
    assert words
    np.testing.assert_allclose(words_of(got), words, atol=1e-5)
    if task:
        language = tokens_of_language(model)[recording.result().language or ""]
        assert recording.windows[0].tokens[1] == language


@pytest.mark.parametrize("shape", SHAPES)
def test_a_streamed_recording_yields_its_windows(models: Models, shape: str) -> None:
    """Each part has the new segments; together they are the result."""
    samples = clip(SHAPES[shape][1] * 2.5, seed=3)
    work = work_over(models(shape, 1)[1])
    whole, streamed = (
        work.add(SpeechRequest(samples, is_streamed=is_it)) for is_it in (False, True)
    )
    events: list[StepOutput[SpeechResult]] = []
    while (some := work.step()) is not None:
        events += some
    assert [event.part for event in events if event.request is whole] == [None]
    emitted = [event for event in events if event.request is streamed]
    assert [event.is_finished for event in emitted] == [False] * (len(emitted) - 1) + [True]
    assert len(emitted) == len(streamed.windows) > 1
    parts = [event.part for event in emitted if event.part is not None]
    assert [one for part in parts for one in part.segments] == list(whole.result().segments)
    assert parts[-1].num_output_tokens == whole.result().num_output_tokens


def words_of(segments: tuple[SpeechSegment, ...]) -> list[tuple[float, float]]:
    """Return the timestamps of all tokens."""
    return [times for one in segments for times in one.token_times or ()]


def tokens_of_language(model: Any) -> dict[str, int]:
    """Return a model's languages by their codes."""
    return {name[2:-2]: token for name, token in model.generation_config.lang_to_id.items()}


def test_the_language_is_the_one_that_transformers_detects(tmp_path: Path) -> None:
    """It holds for each of several recordings that run together."""
    shape = "many languages"
    model = save(tmp_path, shape, seed=0)
    clips = [clip(2.0, seed) for seed in range(6)]
    recordings = run(work_of(tmp_path), *(SpeechRequest(one) for one in clips))
    features = torch.cat([features_of(shape, one) for one in clips])
    code_of = {token: code for code, token in tokens_of_language(model).items()}
    expected = [code_of[int(token)] for token in model.detect_language(features)]
    assert [one.result().language for one in recordings] == expected
    assert len(set(expected)) > 1


def test_several_windows_may_detect_the_language(models: Models) -> None:
    """One that is sure enough decides, else most of those that transformers hears.

    It holds with steps that are waited for and with steps ahead.
    """
    shape = "many languages"
    model, loaded = models(shape, 24)
    window = SHAPES[shape][1]
    samples = np.concatenate([clip(window, seed) for seed in range(5)])
    features = torch.cat([features_of(shape, one) for one in np.split(samples, 5)])
    code_of = {token: code for code, token in tokens_of_language(model).items()}
    detected = [code_of[int(token)] for token in model.detect_language(features)]
    cases = {
        (count, 1.0): max(detected[:count], key=detected[:count].count) for count in (1, 3, 5, 9)
    }
    cases |= {(5, 0.0): detected[0]}
    assert len(set(cases.values())) > 1
    given = {
        language: run(work_over(loaded), SpeechRequest(samples, language=language))[0].result()
        for language in set(cases.values())
    }
    for steps_ahead in (0, 1):
        recordings = run(
            work_over(loaded, steps_ahead=steps_ahead),
            *(SpeechRequest(samples, detection=LanguageDetection(*case)) for case in cases),
        )
        languages = [one.result().language for one in recordings]
        assert languages == [*cases.values()]
        assert [one.result() for one in recordings] == [given[one] for one in languages]


def test_a_window_whose_text_failed_is_transcribed_again(models: Models) -> None:
    """Each retry is warmer, the last one stays, and all tokens count."""
    _, loaded = models("English alone", 0)
    samples = clip(3.0, seed=1)
    lax = Thresholds(logprob=-1e9)
    base = SpeechRequest(samples, wants_segments=True, retry_temperatures=(0.4, 1))
    [unsure] = run(work_over(loaded), replace(base, thresholds=lax))
    assert {one.temperature for one in unsure.result().segments} == {0}
    [first] = [[token for token in one.written if token < END] for one in unsure.windows]
    repeating = replace(
        base, thresholds=lax, compression_ratio=lambda ids: 2.5 if ids == first else 2.4
    )
    retried, compressed = run(work_over(loaded), base, repeating)
    for recording, temperature, count in ((retried, 1, 3), (compressed, 0.4, 2)):
        segments = recording.result().segments
        assert {one.temperature for one in segments} == {temperature}
        [window] = recording.windows
        assert window.written != unsure.windows[0].written
        texts = recording.result().num_output_tokens / len(window.written)
        assert count - 1 < texts <= count + 1
    assert retried.windows[0].avg_logprob < -1
    assert {one.compression_ratio for one in compressed.result().segments} == {2.4}


@pytest.mark.parametrize("ratio", [2.3, 2.4, 2.5])
@pytest.mark.parametrize("logprob", [-1.1, -0.9])
@pytest.mark.parametrize("silence", [0.5, 0.7])
def test_a_text_fails_by_transformers_rule(
    monkeypatch: pytest.MonkeyPatch, ratio: float, logprob: float, silence: float
) -> None:
    """A silent window is left out, and not transcribed again."""
    from transformers.generation.logits_process import WhisperNoSpeechDetection
    from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

    class Outputs(dict[str, float]):
        sequences_scores = logprob

    limits = Thresholds()
    theirs = SimpleNamespace(
        compression_ratio_threshold=limits.compression_ratio,
        logprob_threshold=limits.logprob,
        no_speech_threshold=limits.no_speech,
    )
    detection = WhisperNoSpeechDetection.__new__(WhisperNoSpeechDetection)
    detection._no_speech_prob = [silence]
    mixin = WhisperGenerationMixin
    monkeypatch.setattr(mixin, "_retrieve_compression_ratio", lambda *_: ratio)
    expected = mixin._need_fallback(
        mixin(), None, [Outputs(sequences_scores=logprob)], 0, [detection], theirs, 51_865, 0.0
    )
    request = SpeechRequest(clip(1.0, 1), retry_temperatures=(0.2,))
    tokens = WhisperTokens(start=1, end=0, no_timestamps=None, prompt_start=None)
    window = Window(
        Recording(request, tokens, 100),
        has_times=False,
        is_unknown=False,
        seek=0,
        tokens=[5],
        sum_logprobs=logprob,
        no_speech_prob=silence,
        compression_ratio=ratio,
    )
    assert (window.needs_retry, window.is_silent) == expected
    window.num_retries = 1
    assert not window.needs_retry


def test_a_draw_depends_on_its_seed_and_not_on_neighbors(models: Models) -> None:
    """A seed has the same result alone and among others; another seed has another result."""
    _, loaded = models("English alone", 0)
    samples = clip(3.0, seed=1)
    requests = [
        SpeechRequest(samples, sampling=Sampling(temperature=0.8, seed=seed)) for seed in (1, 2)
    ]
    alone = [run(work_over(loaded), one)[0].result().segments for one in requests]
    greedy = SpeechRequest(clip(2.0, seed=2))
    together = run(work_over(loaded), greedy, *requests)
    assert [one.result().segments for one in together[1:]] == alone
    assert alone[0] != alone[1]


def test_silence_is_an_empty_text(tmp_path: Path) -> None:
    """The model predicts silence, and is unsure of its output."""
    model = save(tmp_path, "English alone")
    silence = model.generation_config.no_timestamps_token_id - 1
    with torch.no_grad():
        # In the row of the first position every beginning of a text predicts silence.
        table = model.model.decoder.embed_tokens.weight
        table[silence] = 0
        states = model.model.encoder(
            features_of("English alone", np.zeros(RATE, np.float32))
        ).last_hidden_state
        start = torch.tensor([[model.generation_config.decoder_start_token_id]])
        outputs = model.model.decoder(start, encoder_hidden_states=states).last_hidden_state
        table[silence] = 0.6 * outputs[0, 0]
    model.save_pretrained(tmp_path)
    (quiet,) = run(work_of(tmp_path), SpeechRequest(np.zeros(RATE, np.float32)))
    assert quiet.windows[0].no_speech_prob > 0.6
    assert quiet.windows[0].avg_logprob < -1
    assert quiet.result().segments == ()
    assert quiet.result().num_output_tokens > 0


@pytest.mark.parametrize(
    ("shape", "wrong"),
    [
        ("English alone", {"language": "de"}),
        ("English alone", {"task": "translate"}),
        ("many languages", {"language": "xx"}),
        ("many languages", {"prompt_ids": (END,)}),
        ("many languages", {"samples": np.zeros(0, np.float32)}),
    ],
)
def test_unsupported_requests_are_rejected(
    models: Models, shape: str, wrong: dict[str, Any]
) -> None:
    """They are rejected at once, and the others continue."""
    work = work_over(models(shape, 0)[1])
    good = work.add(SpeechRequest(clip(1.0, seed=1)))
    with pytest.raises(RequestError):
        work.add(SpeechRequest(**{"samples": clip(1.0, seed=1), **wrong}))
    while work.step() is not None:
        pass
    assert good.result().num_output_tokens > 0


def test_aborted_recordings_leave(models: Models) -> None:
    """They wait or run; the others' results do not change."""
    _, loaded = models("English alone", 0)
    clips = [clip(2.0 + seed / 4, seed) for seed in range(5)]
    expected = [one.result() for one in run(work_over(loaded), *map(SpeechRequest, clips))]
    work = work_over(loaded, num_slots=2)
    recordings = [work.add(SpeechRequest(one)) for one in clips]
    work.step()
    work.abort({recordings[0], recordings[4]})
    finished = []
    while (events := work.step()) is not None:
        finished += [event.request for event in events if event.is_finished]
    assert set(finished) == set(recordings[1:4])
    assert [one.result() for one in recordings[1:4]] == expected[1:4]
    stats = work.stats()
    assert stats.running == stats.waiting == 0
    assert stats.output_tokens == sum(one.num_output_tokens for one in expected[1:4])
    assert stats.layers > stats.steps > 0


def test_interactive_recordings_run_before_earlier_rows(models: Models) -> None:
    """They start once there is room for another window."""
    shape = next(iter(SHAPES))
    work = work_over(models(shape, 0)[1], num_slots=1)
    options = options_of(shape)
    lines = [work.add(SpeechRequest(clip(1.0, seed), **options)) for seed in range(2)]
    urgent = work.add(SpeechRequest(clip(1.0, 9), priority=1, **options))
    ended = []
    while (events := work.step()) is not None:
        ended += [event.request for event in events if event.is_finished]
    assert ended == [urgent, *lines]

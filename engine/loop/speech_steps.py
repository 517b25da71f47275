"""Steps of a speech model: encodes windows, and launches the next tokens of their texts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..media.audio_features import FeatureExtractor
from ..model.speech.architecture import WhisperTokens
from ..model.speech.runner import SpeechRunner, TextStep
from .device_health import run_canaries
from .recording import Transcriber, Window
from .runner import Readout
from .whisper_rules import Chosen, DecodingState, WhisperRules, WrittenTokens


class Flight(NamedTuple):
    """A launched step of texts, and the attempt of each of its windows.

    The windows of known language come first; `begun` of them all have started their texts.
    """

    windows: list[Window]
    attempts: list[int]
    begun: list[Window]
    num_known: int
    readout: Readout

    @property
    def valid(self) -> list[Window]:
        """Return the windows that still need its tokens."""
        pairs = zip(self.windows, self.attempts, strict=True)
        return [window for window, attempt in pairs if window.attempt == attempt]


class SpeechSteps:
    """Encodes windows in their slots, and chooses tokens of their texts on the device."""

    def __init__(
        self,
        runner: SpeechRunner,
        whisper_tokens: WhisperTokens,
        extractor: FeatureExtractor,
        transcriber: Transcriber,
    ) -> None:
        device = runner.network.device
        self._runner = runner
        self._whisper_tokens = whisper_tokens
        self._extractor = extractor
        self._transcriber = transcriber
        self._rules = WhisperRules(whisper_tokens, device)
        self._language_ids = torch.tensor([*whisper_tokens.languages.values()], device=device)
        self._texts = WrittenTokens(runner.last_ids, whisper_tokens.first_timestamp)

    def encode(self, windows: list[Window]) -> None:
        """Encode windows, whose features may have been computed ahead."""
        num_frames = self._extractor.settings.window_frames
        for recording in (window.recording for window in windows):
            coming, recording.coming = recording.coming, None
            if coming is not None:
                recording.features = coming.result()
            elif recording.features is None:
                recording.features = self._extractor.features(recording.request.samples)
        features = torch.stack([window.features(num_frames) for window in windows])
        states = self._runner.encode([window.slot for window in windows], features)
        for window, own in zip(windows, states, strict=True):
            if window.recording.request.wants_words:
                window.states = own.clone()

    def launch(self, windows: list[Window]) -> Flight:
        """Launch the new tokens of each window, and the choice of the next one."""
        # Single tokens come first, and windows of unknown language last.
        windows = sorted(windows, key=lambda one: (one.is_unknown, _num_new(one) != 1))
        starts = [window.num_computed for window in windows]
        counts = [_num_new(window) for window in windows]
        last_rows = np.cumsum(counts) - 1
        begun = [i for i, one in enumerate(windows) if not (one.num_computed or one.is_unknown)]
        start_rows = [
            int(last_rows[i]) - counts[i] + 1 + self._transcriber.start_row(windows[i])
            for i in begun
        ]
        ids = [token for window in windows for token in _new_ids(window)]
        step = TextStep(
            slots=np.array([window.slot for window in windows]),
            starts=np.array(starts),
            counts=np.array(counts),
            token_ids=np.array(ids, np.int32),
            rows=np.array([*last_rows, *start_rows]),
        )
        logits = self._runner.decode(step)
        num_known = sum(not window.is_unknown for window in windows)
        chosen = self._choose(windows[:num_known], logits[:num_known])
        languages, probabilities = self._likeliest_languages(logits[num_known : len(windows)])
        silence = self._silence_probs(logits[len(windows) :])
        for window in windows:
            window.num_computed += _num_new(window)
            window.num_pending += 1
        readout = Readout([*chosen, languages, probabilities, silence])
        attempts, begun_windows = [one.attempt for one in windows], [windows[i] for i in begun]
        return Flight(windows, attempts, begun_windows, num_known, readout)

    def run_canaries(self, slot: int) -> None:
        """Encode silence in a slot, and decode one token of it; raise `DeviceFailed` on failure."""
        silence = self._extractor.features(np.zeros(1, np.float32))

        def is_finite(token_id: int) -> bool:
            self._runner.encode([slot], silence[None])
            zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
            step = TextStep(np.array([slot]), zero, one, np.array([token_id], np.int32), zero)
            return bool(self._runner.decode(step).isfinite().any())

        run_canaries(is_finite, self._whisper_tokens.start)

    @torch.inference_mode()
    def _silence_probs(self, logits: Tensor) -> Tensor:
        """Return the probability of silence `[B]`, from the logits at the texts' starts."""
        if self._whisper_tokens.no_timestamps is None:
            return torch.zeros(len(logits), device=logits.device)
        return logits.float().softmax(dim=-1)[:, self._whisper_tokens.no_timestamps - 1]

    @torch.inference_mode()
    def _likeliest_languages(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the place of each row's most likely language, and its probability among languages.

        Both are `[U]`; the logits are those at the start.
        """
        if not len(logits):
            device = logits.device
            return torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, device=device)
        best = logits[:, self._language_ids].float().softmax(dim=-1).max(dim=-1)
        return best.indices, best.values

    def _choose(self, windows: list[Window], logits: Tensor) -> Chosen:
        """Return the next token of each window, on the device."""
        if not windows:
            return Chosen(*torch.zeros(3, 0, device=logits.device))
        places = [
            DecodingState(
                slot=window.slot,
                num_written=window.num_written,
                has_times=window.has_times,
                sampling=window.sampling,
                number=window.recording.num_output_tokens
                + window.num_discarded
                + window.num_written,
                written=window.written,
            )
            for window in windows
        ]
        return self._rules.choose(logits, places, self._texts)


def _num_new(window: Window) -> int:
    """Return the number of tokens without keys and values, including pending ones."""
    return len(window.tokens) + window.num_pending - window.num_computed


def _new_ids(window: Window) -> list[int]:
    """Return the tokens without keys and values; a pending one is on the device."""
    return [-1 - window.slot] if window.num_pending else window.tokens[window.num_computed :]

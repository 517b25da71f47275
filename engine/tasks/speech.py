"""Speech: models of the Whisper family, which transcribe recordings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..endpoints import SpeechModel, speech_endpoints
from ..endpoints.media_fetch import fetch_from
from ..errors import ModelRefused
from ..kernels.backends import limit_torch_threads
from ..loop.cuda_graphs import capture_on
from ..loop.speech import SpeechCore
from ..loop.speech_graphs import make_runner
from ..media.audio_features import FeatureExtractor
from ..model.families.refused_types import REFUSED_TYPES, SPEECH
from ..model.speech.architecture import WhisperTokens
from ..model.speech.loading import LoadedSpeech, count_slots, load_speech
from ..model.speech.whisper_config import GENERATION, KIND
from ..scheduling.speech import SpeechRequest, SpeechResult
from ..text.tokenizer import load_tokenizer
from ..text.vocabulary import Vocabulary
from .task import LoadedTask, refuse_generation_settings, start_engine

START, NO_TIMES = "<|startoftranscript|>", "<|notimestamps|>"


class SpeechTask:
    """The kind of speech recognition models."""

    def matches(self, description: Mapping[str, Any], config: EngineConfig) -> bool:
        """Match the family by name; other families are matched to be refused."""
        del config
        kind = description.get("model_type")
        return kind == KIND or kind in REFUSED_TYPES[SPEECH]

    def load(
        self, config: EngineConfig, *, folder: Path | None, chat_template: str | None
    ) -> LoadedTask[SpeechRequest, SpeechResult]:
        """Load model and vocabulary in parallel, and start to transcribe."""
        refuse_generation_settings(config, "a speech recognition model")
        flags = {
            "--hf-overrides": bool(config.hf_overrides),
            "--pooler-config": bool(config.pooler_config),
            "--truncate-prompt-tokens": config.truncate_prompt_tokens is not None,
        }
        if flag := next((flag for flag, is_set in flags.items() if is_set), None):
            raise ModelRefused(
                f"{config.model} is a speech recognition model: {flag} is not supported for it; "
                "remove it."
            )
        if chat_template is not None:
            raise ModelRefused(
                f"{config.model} is a speech recognition model: remove the chat template."
            )

        def make() -> tuple[LoadedSpeech, SpeechCore]:
            model = load_speech(config)
            return model, make_core(model, config)

        with start_engine(config, folder, make) as (engine, model, vocabulary):
            tokenizer = load_tokenizer(config.model, vocabulary, model.architecture.vocab_size)
            _check_marks(config.model, vocabulary, model.description.whisper_tokens)
        speech = SpeechModel(
            hearing=model.description.hearing,
            tokenizer=tokenizer,
            max_file_bytes=config.fetching.max_bytes,
            max_seconds=config.max_audio_seconds,
            seed=config.seed,
        )
        endpoints = speech_endpoints(speech, fetch_from(config.fetching, config.read_object))
        return LoadedTask(engine, endpoints, model.device, notes=model.notes)


def _check_marks(model: str, vocabulary: Vocabulary, whisper_tokens: WhisperTokens) -> None:
    """Reject a model whose config and vocabulary disagree on control tokens."""
    marks = {START: whisper_tokens.start, NO_TIMES: whisper_tokens.no_timestamps}
    marks |= {f"<|{code}|>": token for code, token in whisper_tokens.languages.items()}
    marks |= {f"<|{task}|>": token for task, token in whisper_tokens.tasks.items()}
    vocabulary_ids = {text: token for token, text in vocabulary.added.items()}
    for mark, token in marks.items():
        if token is not None and vocabulary_ids.get(mark, token) != token:
            raise ModelRefused(
                f"{model}: {mark} is token {token} in {GENERATION}, but {vocabulary_ids[mark]} in "
                "the vocabulary: one of the two belongs to another model."
            )
    has_controls = (
        whisper_tokens.no_timestamps is not None
        or whisper_tokens.languages
        or whisper_tokens.forced
    )
    if NO_TIMES in vocabulary_ids and not has_controls:
        raise ModelRefused(
            f"{model}: {GENERATION} is missing, or lacks no_timestamps_token_id: it must define "
            "how a text begins."
        )


def make_core(model: LoadedSpeech, config: EngineConfig) -> SpeechCore:
    """Return the engine core of a loaded model."""
    if not model.network.needs_torch:
        limit_torch_threads(model.device)
    num_slots = count_slots(model, config)
    runner = make_runner(model.network, model.backend, num_slots, capture_on)
    description, extractor = model.description, FeatureExtractor(model.description.features)
    steps_ahead = config.steps_ahead
    if steps_ahead is None:
        steps_ahead = int(model.device.type == "cuda")
    return SpeechCore(
        runner, description.whisper_tokens, extractor, num_slots, steps_ahead=steps_ahead
    )

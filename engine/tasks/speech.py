"""Speech: models of the Whisper family, which write down what a recording says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidemill.net.fetch import Fetcher

from ..config import EngineConfig
from ..endpoints import SpeechModel, speech_endpoints
from ..errors import ModelRefused
from ..kernels.backends import limit_torch_threads
from ..loop.speech import SpeechCore
from ..media.audio_features import FeatureExtractor
from ..model.speech.architecture import WhisperTokens
from ..model.speech.loading import LoadedSpeech, count_slots, load_speech
from ..model.speech.runner import SpeechRunner
from ..model.speech.whisper_config import GENERATION, KIND
from ..scheduling.speech import SpeechRequest, SpeechResult
from ..text.tokenizer import load_tokenizer
from ..text.vocabulary import Vocabulary
from .task import LoadedTask, refuse_generation_settings, start_engine

START, NO_TIMES = "<|startoftranscript|>", "<|notimestamps|>"


class SpeechTask:
    """The kind of models that hear."""

    def matches(self, description: Mapping[str, Any], config: EngineConfig) -> bool:
        """Take the family's by its name."""
        del config
        return description.get("model_type") == KIND

    def load(
        self, config: EngineConfig, *, folder: Path | None, chat_template: str | None
    ) -> LoadedTask[SpeechRequest, SpeechResult]:
        """Load model and vocabulary beside each other, and begin to hear."""
        refuse_generation_settings(config, "what recordings say")
        given = {
            "--hf-overrides": bool(config.hf_overrides),
            "--pooler-config": bool(config.pooler_config),
            "--truncate-prompt-tokens": config.truncate_prompt_tokens is not None,
        }
        if flag := next((flag for flag, is_given in given.items() if is_given), None):
            raise ModelRefused(
                f"{config.model} hears recordings: {flag} is for models that write text or give "
                "vectors or scores; leave it out."
            )
        if chat_template is not None:
            raise ModelRefused(
                f"{config.model} hears recordings: it has no use for a chat template."
            )

        def make() -> tuple[LoadedSpeech, SpeechCore]:
            model = load_speech(config)
            return model, make_core(model, config)

        with start_engine(config, folder, make) as (engine, model, vocabulary):
            tokenizer = load_tokenizer(config.model, vocabulary, model.architecture.vocab_size)
            _check_marks(config.model, vocabulary, model.description.whisper_tokens)
        known = SpeechModel(
            hearing=model.description.hearing,
            tokenizer=tokenizer,
            max_file_bytes=config.fetching.max_bytes,
            max_seconds=config.max_audio_seconds,
            seed=config.seed,
        )
        endpoints = speech_endpoints(known, Fetcher(config.fetching).fetch)
        return LoadedTask(engine, endpoints, model.device, notes=model.notes)


def _check_marks(model: str, vocabulary: Vocabulary, whisper_tokens: WhisperTokens) -> None:
    """Refuse a model that is told by other tokens than it knows: it would write noise."""
    marks = {START: whisper_tokens.start, NO_TIMES: whisper_tokens.no_timestamps}
    marks |= {f"<|{code}|>": token for code, token in whisper_tokens.languages.items()}
    marks |= {f"<|{task}|>": token for task, token in whisper_tokens.tasks.items()}
    known = {text: token for token, text in vocabulary.added.items()}
    for mark, token in marks.items():
        if token is not None and known.get(mark, token) != token:
            raise ModelRefused(
                f"{model}: {GENERATION} says that token {token} is {mark}, but its vocabulary that "
                f"{known[mark]} is: one of the two is another model's."
            )
    is_told = (
        whisper_tokens.no_timestamps is not None
        or whisper_tokens.languages
        or whisper_tokens.forced
    )
    if NO_TIMES in known and not is_told:
        raise ModelRefused(
            f"{model}: no file says how a text begins, though its vocabulary has marks for it: "
            f"{GENERATION} is missing, or leaves out no_timestamps_token_id."
        )


def make_core(model: LoadedSpeech, config: EngineConfig) -> SpeechCore:
    """Give a loaded model its slots."""
    if not model.network.needs_torch:
        limit_torch_threads(model.device)
    num_slots = count_slots(model, config)
    runner = SpeechRunner(model.network, model.backend, num_slots)
    said = model.description
    return SpeechCore(runner, said.whisper_tokens, FeatureExtractor(said.features), num_slots)

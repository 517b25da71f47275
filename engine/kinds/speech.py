"""Speech: models of the Whisper family, which write down what a recording says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.audio.features import FeatureExtractor
from engine.config import EngineConfig
from engine.endpoints import SpeechModel, speech_endpoints
from engine.errors import ModelRefused
from engine.hosts.fetching import Fetcher
from engine.kernels.backends import spare_torch_its_threads
from engine.kinds.beginning import begun
from engine.kinds.kind import Loaded, refuse_settings_of_text
from engine.model.speech.architecture import Steering
from engine.model.speech.description import GENERATION, KIND
from engine.model.speech.loading import LoadedSpeech, load_speech
from engine.model.speech.memory import count_slots
from engine.model.speech.runner import SpeechRunner
from engine.scheduling.speech import SpeechRequest, SpeechResult
from engine.stepping.speech import SpeechWork
from engine.text.tokenizer import load_tokenizer
from engine.text.vocabulary import Vocabulary

START, NO_TIMES = "<|startoftranscript|>", "<|notimestamps|>"


class Speech:
    """The kind of models that hear."""

    def takes(self, description: Mapping[str, Any], config: EngineConfig) -> bool:
        """Take the family's by its name."""
        del config
        return description.get("model_type") == KIND

    def load(
        self, config: EngineConfig, *, folder: Path | None, chat_template: str | None
    ) -> Loaded[SpeechRequest, SpeechResult]:
        """Load model and vocabulary beside each other, and begin to hear."""
        refuse_settings_of_text(config, "what recordings say")
        if config.hf_overrides or config.pooler_config:
            flag = "--hf-overrides" if config.hf_overrides else "--pooler-config"
            raise ModelRefused(
                f"{config.model} hears recordings: {flag} is for models that write text or give "
                "vectors or scores; leave it out."
            )
        if chat_template is not None:
            raise ModelRefused(
                f"{config.model} hears recordings: it has no use for a chat template."
            )

        def make() -> tuple[LoadedSpeech, SpeechWork]:
            model = load_speech(config)
            return model, make_work(model, config)

        with begun(config, folder, make) as (engine, model, vocabulary):
            tokenizer = load_tokenizer(config.model, vocabulary, model.architecture.vocab_size)
            _check_marks(config.model, vocabulary, model.description.steering)
        known = SpeechModel(
            hearing=model.description.hearing,
            tokenizer=tokenizer,
            max_file_bytes=config.fetching.max_bytes,
            max_seconds=config.max_audio_seconds,
            seed=config.seed,
        )
        endpoints = speech_endpoints(known, Fetcher(config.fetching).fetch)
        return Loaded(engine, endpoints, model.device, notes=model.notes)


def _check_marks(model: str, vocabulary: Vocabulary, steering: Steering) -> None:
    """Refuse a model that is told by other tokens than it knows: it would write noise."""
    marks = {START: steering.start, NO_TIMES: steering.no_timestamps}
    marks |= {f"<|{code}|>": token for code, token in steering.languages.items()}
    marks |= {f"<|{task}|>": token for task, token in steering.tasks.items()}
    known = {text: token for token, text in vocabulary.added.items()}
    for mark, token in marks.items():
        if token is not None and known.get(mark, token) != token:
            raise ModelRefused(
                f"{model}: {GENERATION} says that token {token} is {mark}, but its vocabulary that "
                f"{known[mark]} is: one of the two is another model's."
            )
    is_told = steering.no_timestamps is not None or steering.languages or steering.forced
    if NO_TIMES in known and not is_told:
        raise ModelRefused(
            f"{model}: no file says how a text begins, though its vocabulary has marks for it: "
            f"{GENERATION} is missing, or leaves out no_timestamps_token_id."
        )


def make_work(model: LoadedSpeech, config: EngineConfig) -> SpeechWork:
    """Give a loaded model its slots."""
    if not model.network.needs_torch:
        spare_torch_its_threads(model.device)
    num_slots = count_slots(model, config)
    runner = SpeechRunner(model.network, model.backend, num_slots)
    said = model.description
    return SpeechWork(runner, said.steering, FeatureExtractor(said.features), num_slots)

"""Speech: models of the Whisper family, which write down what a recording says."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine.audio.features import FeatureExtractor
from engine.config import EngineConfig
from engine.endpoints import SpeechModel, speech_endpoints
from engine.errors import ModelRefused
from engine.hosts.fetching import Fetcher
from engine.kernels.backends import spare_torch_its_threads
from engine.kinds.kind import Loaded
from engine.model.speech.description import KIND
from engine.model.speech.loading import LoadedSpeech, load_speech
from engine.model.speech.memory import count_slots
from engine.model.speech.runner import SpeechRunner
from engine.scheduling.speech import SpeechRequest, SpeechResult
from engine.stepping.engine import Engine
from engine.stepping.speech import SpeechWork
from engine.text.tokenizer import load_tokenizer
from engine.text.vocabulary import load_vocabulary, recall_vocabulary


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
        if chat_template is not None:
            raise ModelRefused(
                f"{config.model} hears recordings: it has no use for a chat template."
            )
        loaded: Future[LoadedSpeech] = Future()

        def make() -> SpeechWork:
            model = load_speech(config)
            loaded.set_result(model)
            return make_work(model, config)

        with ThreadPoolExecutor(1, "tidemill-vocabulary") as beside:
            recalled = beside.submit(recall_vocabulary, config.model, folder)
            engine = Engine(make)
        model = loaded.result()
        try:
            vocabulary = recalled.result() or load_vocabulary(config.model, folder)
            tokenizer = load_tokenizer(config.model, vocabulary, model.architecture.vocab_size)
        except BaseException:
            engine.close()
            raise
        known = SpeechModel(
            hearing=model.description.hearing,
            tokenizer=tokenizer,
            max_file_bytes=config.fetching.max_bytes,
            max_seconds=config.max_audio_seconds,
            seed=config.seed,
        )
        endpoints = speech_endpoints(known, Fetcher(config.fetching).fetch)
        return Loaded(engine, endpoints, model.device, model.notes)


def make_work(model: LoadedSpeech, config: EngineConfig) -> SpeechWork:
    """Give a loaded model its slots."""
    if not model.network.needs_torch:
        spare_torch_its_threads(model.device)
    num_slots = count_slots(model, config)
    runner = SpeechRunner(model.network, model.backend, num_slots)
    said = model.description
    return SpeechWork(runner, said.steering, FeatureExtractor(said.features), num_slots)

"""A speech recognition model, from its folder to the bodies of its URLs."""

from __future__ import annotations

import base64
import io
import json
import shutil
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.speech_models import RATE, clip, extractor_of
from tests.engine.speech_tokenizer import build_tokenizer
from tidemill.engine.config import EngineConfig
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.load import load_served
from tidemill.engine.model.endpoint_names import endpoints_of
from tidemill.engine.tasks import find_task
from tidemill.engine.tasks.speech import SpeechTask
from tidemill.protocol.contract import EngineError, Reply

pytestmark = pytest.mark.usefixtures("proved")

SHAPE = "many languages"
WINDOW = 3
TARGETS = 64


@pytest.fixture(name="folder", scope="module")
def fixture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a random model and its own vocabulary."""
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    folder = tmp_path_factory.mktemp("heard")
    tokenizer = build_tokenizer(WINDOW, TARGETS)
    ids = tokenizer.convert_tokens_to_ids
    torch.manual_seed(0)
    config = WhisperConfig(
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=50 * WINDOW,
        max_target_positions=TARGETS,
        vocab_size=len(tokenizer),
        pad_token_id=ids("<|endoftext|>"),
        bos_token_id=ids("<|endoftext|>"),
        eos_token_id=ids("<|endoftext|>"),
        decoder_start_token_id=ids("<|startoftranscript|>"),
        init_std=0.3,
    )
    model = WhisperForConditionalGeneration(config)
    settings = model.generation_config
    settings.no_timestamps_token_id = ids("<|notimestamps|>")
    settings.prev_sot_token_id = ids("<|startofprev|>")
    settings.suppress_tokens, settings.begin_suppress_tokens = None, None
    settings.lang_to_id = {"<|en|>": ids("<|en|>")}
    settings.task_to_id = {task: ids(f"<|{task}|>") for task in ("transcribe", "translate")}
    settings.max_length = TARGETS
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    extractor_of(SHAPE).save_pretrained(folder)
    return folder


@pytest.fixture(name="served", scope="module")
def fixture_served(folder: Path) -> Iterator[Dispatcher]:
    """Return the model, served."""
    engine = load_served(EngineConfig(str(folder), device="cpu", max_num_seqs=2))
    yield engine
    engine.close()


def url_of(seconds: float) -> str:
    """Return a recording as a data URL."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((clip(seconds, seed=1) * 32_000).astype(np.int16).tobytes())
    return "data:audio/wav;base64," + base64.b64encode(buffer.getvalue()).decode()


async def ask(served: Dispatcher, url: str, seconds: float, **fields: Any) -> Reply:
    """Request the transcription of a recording."""
    body = {"model": served.info().model, "file_url": url_of(seconds), **fields}
    return await served.respond(url, body, "r", 0)


async def test_both_urls_answer(served: Dispatcher) -> None:
    """The bodies have a text and the length of the audio in seconds."""
    for task in ("transcriptions", "translations"):
        reply = await ask(served, f"/v1/audio/{task}", 2.5, language="en")
        assert reply.status_code == 200, reply.body
        assert isinstance(reply.body["text"], str)
        assert reply.usage.audio_seconds == pytest.approx(2.5)
        assert reply.usage.completion_tokens > 0


async def test_a_long_recording_has_segments_and_words(served: Dispatcher) -> None:
    """Their times continue from window to window and end with the recording."""
    reply = await ask(
        served,
        "/v1/audio/transcriptions",
        7.0,
        response_format="verbose_json",
        timestamp_granularities=["segment", "word"],
    )
    assert reply.status_code == 200, reply.body
    segments = reply.body["segments"]
    assert {one["seek"] for one in segments} > {0}
    assert all(0 <= one["start"] <= one["end"] <= 7.0 + WINDOW for one in segments)
    starts = [one["start"] for one in segments]
    assert starts == sorted(starts)
    assert reply.body["words"]
    assert reply.body["language"] == "english"


async def test_a_url_of_another_kind_is_not_supported(served: Dispatcher) -> None:
    """The row's error names the URL."""
    body = {"model": served.info().model, "messages": [{"role": "user", "content": "?"}]}
    reply = await served.respond("/v1/chat/completions", body, "r", 0)
    assert reply.status_code == 400
    assert "does not support" in json.dumps(reply.body)


def test_a_folder_of_the_family_is_of_this_kind(folder: Path) -> None:
    """Other files in the folder do not matter."""
    assert isinstance(find_task(folder, EngineConfig(str(folder))), SpeechTask)


@pytest.mark.parametrize("kind", ["canary", "moonshine", "parakeet_tdt", "voxtral", "wav2vec2"])
def test_other_speech_models_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    """A model with a text decoder is not served as a text model."""
    config = {"model_type": kind, "text_config": {"model_type": "llama"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = EngineConfig(str(tmp_path), device="cpu")
    words = f"model type '{kind}' is not supported: it is a speech model; only Whisper"
    with pytest.raises(EngineError, match=words):
        find_task(tmp_path, settings).load(settings, folder=tmp_path, chat_template=None)
    assert endpoints_of(settings) is None  # a run leaves the refusal to the load


def test_a_chat_template_is_refused(folder: Path) -> None:
    """A user who passes one meant another model."""
    with pytest.raises(EngineError, match="remove the chat template"):
        load_served(EngineConfig(str(folder), device="cpu"), chat_template="{{ messages }}")


@pytest.mark.parametrize(
    ("field", "value"),
    [("hf_overrides", {"a": 1}), ("pooler_config", {"a": 1}), ("truncate_prompt_tokens", -1)],
)
def test_settings_of_other_kinds_are_refused(folder: Path, field: str, value: object) -> None:
    """They would have no effect."""
    setting: dict[str, Any] = {field: value}
    flag = f"--{field.replace('_', '-')}"
    with pytest.raises(EngineError, match=f"{flag} is not supported for it"):
        load_served(EngineConfig(str(folder), device="cpu", **setting))


def test_a_model_without_start_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    """Without its generation config, it would write noise in a valid format."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "generation_config.json").unlink()
    with pytest.raises(EngineError, match=r"generation_config\.json"):
        load_served(EngineConfig(str(copy), device="cpu"))


@pytest.mark.parametrize(
    "change",
    [
        {"decoder_start_token_id": 5},
        {"lang_to_id": {"<|en|>": 7}},
        {"task_to_id": {"translate": 9}},
    ],
)
def test_special_tokens_of_another_vocabulary_are_refused(
    folder: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    """The error names the first one that differs."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    path = copy / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(EngineError, match=r"<\|.*\|> is token .* the vocabulary: .*another model"):
        load_served(EngineConfig(str(copy), device="cpu"))

"""OpenAI's client against servers of other kinds of models: speech and embeddings."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from bench.server.served import Place, serving
from tidemill import demo
from tools.demo.train_reranker import base_path

pytestmark = pytest.mark.long  # each loads a separate model

RECORDINGS = Path(__file__).parents[1] / "demo" / "recordings"


@contextmanager
def client_of(model: Path, log: Path) -> Iterator[tuple[openai.OpenAI, Place]]:
    """Return a client of a separate server."""
    with (
        serving("--model", str(model), "--served-model-name", "model", log=log) as place,
        openai.OpenAI(base_url=f"{place.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, place


def test_audio_files_are_transcribed(tmp_path: Path) -> None:
    """A form's file has several response formats; a chat is refused as unsupported."""
    path = RECORDINGS / "words.mp3"
    text = json.loads((RECORDINGS / "said.json").read_text())[path.name]["text"]
    with client_of(demo.SPEECH_PATH, tmp_path / "log") as (client, _):
        transcription = client.audio.transcriptions.create(model="model", file=path)
        assert transcription.text.strip() == text
        with path.open("rb") as file:
            detailed = client.audio.transcriptions.create(
                model="model",
                file=file,
                response_format="verbose_json",
                timestamp_granularities=["segment"],
            )
        assert detailed.segments
        as_text = client.audio.transcriptions.create(
            model="model", file=path, response_format="text"
        )
        assert isinstance(as_text, str)
        stream = client.audio.transcriptions.create(
            model="model",
            file=path,
            language="en",
            temperature=0.0,
            stream=True,
            extra_body={"seed": 420, "top_p": 0.6},
        )
        events = list(stream)
        assert (
            "".join(e.delta for e in events if e.type == "transcript.text.delta")
            == transcription.text
        )
        choices = [event.to_dict()["choices"][0] for event in events]  # type: ignore[index]
        assert "".join(choice["delta"]["content"] for choice in choices) == transcription.text
        assert events[-1].type == "transcript.text.done"
        assert events[-1].text == transcription.text
        assert client.audio.transcriptions.create(
            model="model", file=path, extra_body={"seed": 4419, "repetition_penalty": 1.3}
        ).text
        with pytest.raises(openai.BadRequestError, match="include"):
            client.audio.transcriptions.create(model="model", file=path, include=["logprobs"])
        with pytest.raises(openai.BadRequestError):
            client.audio.transcriptions.create(model="model", file=("a.wav", b"no sound"))
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(
                model="model", messages=[{"role": "user", "content": "a"}]
            )
        assert 400 <= caught.value.status_code < 500


def test_vectors_come_as_numbers_and_in_base64(tmp_path: Path) -> None:
    """The client requests base64 by default; rerank requests have a separate route."""
    with client_of(base_path(), tmp_path / "log") as (client, place):
        texts = ["The tide", "The mill"]
        packed = client.embeddings.create(model="model", input=texts)
        plain = client.embeddings.create(model="model", input=texts, encoding_format="float")
        raw = httpx.post(
            f"{place.url}/v1/embeddings", json={"input": texts, "encoding_format": "base64"}
        ).json()
        for one, other, coded in zip(packed.data, plain.data, raw["data"], strict=True):
            assert np.allclose(one.embedding, other.embedding, atol=1e-6)
            held = np.frombuffer(base64.b64decode(coded["embedding"]), "<f4")
            assert np.allclose(held, other.embedding, atol=1e-6)
        ranked = httpx.post(f"{place.url}/rerank", json={"query": "tide", "documents": texts})
        assert ranked.json()["results"][0]["index"] == 0
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="model", input=[])

"""A model that hears, loaded from a folder behind its endpoints: recordings in, text out."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.engine.audio_models import as_wav, build, clip, generated, save
from tests.engine.tasks.pooled import serving
from tidemill.engine.config import EngineConfig, ImageLimits
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.model.planning import plan_model
from tidemill.net.fetch import Fetcher
from tidemill.protocol.contract import Reply

URL = "/v1/chat/completions"
NEW_TOKENS = 20
WINDOW = 30.0
PLACE = "messages.0.content.0"


class Judge:
    """The result of transformers for the same conversation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = build()
        self.processor = save(self.network, folder)

    def answer(
        self, parts: list[Any], count: int = NEW_TOKENS
    ) -> tuple[list[int], list[int], torch.Tensor]:
        """Return the prompt's tokens, the answer's, and the logits of its first."""
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"audio": "clip.wav"}
            for part in parts
        ]
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        clips = [part for part in parts if not isinstance(part, str)]
        return generated(self.network, self.processor, text, clips, count)


@pytest.fixture(name="judge", scope="module")
def fixture_judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """Return transformers' model, and the folder that ours is loaded from."""
    return Judge(tmp_path_factory.mktemp("qwen2_audio"))


@pytest.fixture(name="served", scope="module")
def fixture_served(judge: Judge) -> Iterator[Dispatcher]:
    """Return the model of that folder, compared with transformers at its load."""
    limits = ImageLimits(max_recordings=3)
    with serving() as serve:
        yield serve(judge.folder, images=limits, max_num_batched_tokens=256, max_num_seqs=8)


def input_audio(samples: NDArray[np.float32]) -> dict[str, Any]:
    """Return a recording part in OpenAI's form."""
    data = b64encode(as_wav(samples)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def parts_of(parts: list[Any]) -> list[dict[str, Any]]:
    """Return the parts of a message with texts and recordings."""
    return [
        {"type": "text", "text": part} if isinstance(part, str) else input_audio(part)
        for part in parts
    ]


async def ask(served: Dispatcher, parts: list[dict[str, Any]], **fields: Any) -> Reply:
    """Return the greedy answer to one message."""
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0, **fields}
    return await served.respond(URL, body, "req_1", 0)


async def refused(served: Dispatcher, *parts: dict[str, Any], **fields: Any) -> tuple[str, str]:
    """Return the parameter and the message of a 400."""
    reply = await ask(served, list(parts), **fields)
    assert reply.status_code == 400, reply.body
    return reply.body["error"]["param"], reply.body["error"]["message"]


PROMPTS: list[list[Any]] = [
    ["What is this?", clip(0.1, 1)],
    [clip(0.07, 2), "And this?"],
    [clip(1.0, 3), clip(2.503, 4), "Which is louder?"],
    ["No recording at all."],
    [clip(WINDOW, 5)],
    [clip(WINDOW - 0.02, 6), "Sum up."],
    ["The same ", clip(1.0, 3), " again, ", clip(1.0, 3), clip(0.4, 7)],
    [clip(7.77, 8), "Who speaks?"],
]


async def test_prompts_and_answers_match_transformers(judge: Judge, served: Dispatcher) -> None:
    """For none, one or several recordings from 0.1 to 30 s, chunked and cached."""
    for parts in PROMPTS:
        prompt_ids, token_ids, logits = judge.answer(parts)
        reply = await ask(
            served,
            parts_of(parts),
            return_token_ids=True,
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            logprobs=True,
            top_logprobs=5,
        )
        assert reply.status_code == 200, reply.body
        assert reply.body["prompt_token_ids"] == prompt_ids
        assert reply.body["choices"][0]["token_ids"] == token_ids
        assert reply.body["usage"]["prompt_tokens"] == len(prompt_ids)
        first = reply.body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        expected = logits.float().log_softmax(-1).topk(5).values.tolist()
        assert [entry["logprob"] for entry in first] == pytest.approx(expected, abs=1e-4)


async def test_another_recording_is_another_prompt(served: Dispatcher) -> None:
    """The cache does not confuse prompts with the same text and different recordings."""
    texts = []
    for seed in (1, 2, 1):
        reply = await ask(
            served, parts_of(["Well? " * 8, clip(0.5, seed)]), max_tokens=4, logprobs=True
        )
        content = reply.body["choices"][0]["logprobs"]["content"]
        texts.append([entry["logprob"] for entry in content])
    assert texts[0] == texts[2] != texts[1]


async def test_recordings_are_fetched(served: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of `audio_url` parts; the answer is that of the same data inline."""
    data, urls = as_wav(clip(0.5, 1)), []

    async def fetch(_: object, url: str, allowance: object) -> bytes:
        del allowance
        urls.append(url)
        return data

    monkeypatch.setattr(Fetcher, "fetch", fetch)
    part = {"type": "audio_url", "audio_url": {"url": "https://files.example.com/a.wav"}}
    replies = [
        await _fetched(served, one) for one in (part, {**part, "audio_url": "https://b.example/"})
    ]
    inline = {"type": "audio_url", "audio_url": f"data:audio/wav;base64,{b64encode(data).decode()}"}
    replies.append(await ask(served, [inline], max_tokens=6))
    texts = {reply.body["choices"][0]["message"]["content"] for reply in replies}
    assert len(texts) == 1
    assert urls == ["https://files.example.com/a.wav", "https://b.example/"]


async def _fetched(served: Dispatcher, part: dict[str, Any]) -> Reply:
    body = {"messages": [{"role": "user", "content": [part]}], "temperature": 0, "max_tokens": 6}
    return await served.respond(URL, body, "req_1", 0)


async def test_responses_read_recordings(served: Dispatcher) -> None:
    """The answer is the chat's, and a recording that does not fit has its place in the input."""
    recording = input_audio(clip(0.5, 1))
    chat = await ask(served, [recording, {"type": "text", "text": "Well?"}], max_tokens=6)
    content = [recording, {"type": "input_text", "text": "Well?"}]
    body = {"input": [{"role": "user", "content": content}], "temperature": 0}
    reply = await served.respond("/v1/responses", {**body, "max_output_tokens": 6}, "req_1", 0)
    assert reply.status_code == 200, reply.body
    [message] = reply.body["output"]
    expected = chat.body["choices"][0]["message"]["content"]
    assert [part["text"] for part in message["content"]] == [expected]
    assert reply.usage.prompt_tokens == chat.usage.prompt_tokens
    content[0] = input_audio(clip(WINDOW + 1, 1))
    reply = await served.respond("/v1/responses", body, "req_1", 0)
    assert reply.body["error"]["message"] == (
        "The recording of `input.0.content.0` is longer than the maximum of 30 s."
    )
    assert reply.body["error"]["param"] == "input.0.content.0"


async def test_recordings_that_do_not_fit_are_named(served: Dispatcher) -> None:
    """A longer one is refused, where transformers would cut it."""
    assert await refused(served, input_audio(clip(WINDOW + 1, 1))) == (
        PLACE,
        f"The recording of `{PLACE}` is longer than the maximum of 30 s.",
    )
    assert await refused(served, input_audio(clip(0.02, 1))) == (
        PLACE,
        f"The recording of `{PLACE}` is too short: 20 ms are less than one token.",
    )
    param, words = await refused(served, *[input_audio(clip(0.1, 1))] * 4)
    assert param == "messages.0.content.3"
    assert "the maximum number of recordings per request, 3 (--limit-mm-per-prompt)" in words
    broken = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    param, words = await refused(served, broken)
    assert param == PLACE
    assert words.startswith(f"The recording of `{PLACE}` is not a valid recording")
    image = {"type": "image_url", "image_url": {"url": "https://files.example.com/a.png"}}
    param, words = await refused(served, image)
    assert words == f"`{PLACE}` is an image: this model does not support images."
    marked = {"type": "text", "text": "<|AUDIO|>"}
    param, words = await refused(served, marked, input_audio(clip(0.1, 1)))
    assert words == (
        "A message with recordings must not contain the model's recording marks in its text."
    )
    param, _ = await refused(served, input_audio(clip(0.1, 1)), truncate_prompt_tokens=9)
    assert param == "truncate_prompt_tokens"


def test_the_plan_counts_the_audio_encoder(judge: Judge) -> None:
    """`tidemill models` names recordings."""
    plan = plan_model(EngineConfig(str(judge.folder), device="cpu"))
    assert plan.runs == "native"
    assert plan.takes_audio
    assert not plan.takes_images


@pytest.mark.usefixtures("proved")
async def test_an_encoder_that_is_not_understood_leaves_text(judge: Judge, tmp_path: Path) -> None:
    """The model is served without recordings, and says why."""
    copytree(judge.folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["audio_config"]["activation_function"] = "relu"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with serving() as serve:
        served = serve(tmp_path)
        _, words = await refused(served, input_audio(clip(0.1, 1)))
    assert words == f"`{PLACE}` is a recording: this model does not support recordings."

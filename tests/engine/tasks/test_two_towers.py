"""CLIP and SigLIP, from their folder to a body, compared with transformers."""

from __future__ import annotations

import asyncio
import json
import shutil
from base64 import b64encode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.engine.tasks.pooled import Serve, answer, refusal, serving
from tests.engine.tasks.two_towers import POSITIONS, PREPARED, SEP, TinyTowers
from tidemill.engine.config import EngineConfig
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.errors import ModelRefused
from tidemill.engine.inspection import inspect_model
from tidemill.engine.model.encoders import two_towers_loading
from tidemill.engine.model.encoders.two_towers import read_two_towers
from tidemill.net.fetch import Fetcher
from tidemill.protocol.contract import EngineError
from tidemill.server.app import make_app, make_context
from tidemill.server.settings import ServerSettings

URL = "/v1/embeddings"
TEXTS = ["a photo of a cat", "tide", "two mills by the water, and a long wall of stones in front"]
Model = tuple[TinyTowers, Dispatcher]


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Return an image of noise; one with transparency is partly transparent."""
    levels = np.random.default_rng(width).integers(0, 256, (height, width, 4), dtype=np.uint8)
    image = Image.fromarray(levels)
    return image if mode == "RGBA" else image.convert("RGB").convert(mode)


IMAGES = {
    "one pixel": noise(1, 1),
    "wide": noise(2000, 10),
    "tall": noise(40, 90),
    "grey": noise(70, 50, "L"),
    "transparent": noise(33, 32, "RGBA"),
    "palette": noise(64, 64, "P"),
}


def inline(image: Image.Image) -> str:
    """Return an image as a data URL."""
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"


def part(image: Image.Image) -> dict[str, Any]:
    """Return an image as a part of a message."""
    return {"type": "image_url", "image_url": {"url": inline(image)}}


def shown(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a conversation of one message."""
    return [{"role": "user", "content": [*parts]}]


def vectors_of(*bodies: dict[str, Any]) -> NDArray[np.float32]:
    """Return the vectors in bodies."""
    return np.array([one["embedding"] for body in bodies for one in body["data"]], np.float32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Model]]:
    """Return the models of all kinds, each behind its endpoints."""
    with serving() as load:
        towers = [TinyTowers(kind, tmp_path_factory.mktemp("towers")) for kind in PREPARED]
        yield {each.kind: (each, load(each.folder)) for each in towers}


@pytest.mark.parametrize("kind", ["clip", "old clip", "siglip"])
async def test_vectors_equal_those_of_transformers(kind: str, models: dict[str, Model]) -> None:
    """Texts and images of all sizes run together; images are prepared by its own processor."""
    towers, served = models[kind]
    texts, *images = await asyncio.gather(
        answer(served, URL, input=TEXTS),
        *(answer(served, URL, messages=shown(part(image))) for image in IMAGES.values()),
    )
    assert np.abs(vectors_of(texts) - towers.texts(TEXTS)).max() < 1e-4
    expected = towers.images([*IMAGES.values()])
    for name, vector, other in zip(IMAGES, vectors_of(*images), expected, strict=True):
        assert np.abs(vector - other).max() < 1e-4, name
    assert len({tuple(vector) for vector in vectors_of(texts, *images).tolist()}) == 9
    num_patches = 16 if kind == "siglip" else 17
    assert images[0]["usage"]["prompt_tokens"] == num_patches


@pytest.mark.parametrize("kind", ["clip", "old clip", "siglip"])
async def test_token_ids_have_the_vector_of_their_end(kind: str, models: dict[str, Model]) -> None:
    """It is the first end token, once the highest ID; without one CLIP takes the first token."""
    towers, served = models[kind]
    ids = [[101, 7592, SEP, 2045, SEP, 9], [101, 7592, 2045], [SEP], [7] * POSITIONS]
    body = await answer(served, URL, input=ids)
    assert np.abs(vectors_of(body) - towers.texts(ids)).max() < 1e-4


async def test_vectors_may_keep_their_length(models: dict[str, Model]) -> None:
    """They equal those of transformers."""
    towers, served = models["clip"]
    body = await answer(served, URL, input="tide", normalize=False)
    assert np.allclose(vectors_of(body)[0], towers.raw_text("tide"), rtol=1e-4, atol=1e-4)


async def test_a_conversation_is_its_text_or_its_image(models: dict[str, Model]) -> None:
    """A text needs no chat template; both at once, or two images, are an error."""
    towers, served = models["clip"]
    text = {"type": "text", "text": "tide"}
    body = await answer(served, URL, messages=shown(text))
    assert np.abs(vectors_of(body) - towers.texts(["tide"])).max() < 1e-4
    image = part(IMAGES["grey"])
    for parts, count in (((text, image), "1 image and text"), ((image, image), "2 images")):
        error = (await refusal(served, URL, messages=shown(*parts))).body["error"]
        assert error["param"] == "messages"
        assert "either text or one image: this model computes separate" in error["message"]
        assert f"these have {count}. Send one request for each." in error["message"]


async def test_what_is_wrong_with_a_request_is_its_error(
    models: dict[str, Model],
) -> None:
    """Others in flight are answered."""
    towers, served = models["siglip"]
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    long = "word " * 30
    no_image, empty, too_long, chat, good = await asyncio.gather(
        served.respond(URL, {"messages": shown(broken)}, "req_1", 0),
        served.respond(URL, {"messages": shown({"type": "text", "text": ""})}, "req_4", 0),
        served.respond(URL, {"input": long}, "req_2", 0),
        served.respond("/v1/chat/completions", {"messages": shown(broken)}, "req_3", 0),
        answer(served, URL, input="tide"),
    )
    assert "is not a PNG" in no_image.body["error"]["message"]
    assert no_image.body["error"]["param"] == "messages.0.content.0"
    assert "must contain text or an image" in empty.body["error"]["message"]
    assert f"maximum context length is {POSITIONS} tokens" in too_long.body["error"]["message"]
    assert chat.status_code == 400
    assert "does not support endpoint: /v1/chat/completions" in chat.body["error"]["message"]
    assert np.abs(vectors_of(good) - towers.texts(["tide"])).max() < 1e-4
    cut = await answer(served, URL, input=long, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == POSITIONS


async def test_images_are_fetched_as_those_of_chats_are(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From public hosts and allowed buckets; paths are not read."""
    buffer, urls = BytesIO(), []
    IMAGES["tall"].save(buffer, "PNG")

    async def fetch(_: object, url: str, allowance: object) -> bytes:
        del allowance
        urls.append(url)
        return buffer.getvalue()

    monkeypatch.setattr(Fetcher, "fetch", fetch)
    towers, served = models["clip"]
    web = {"type": "image_url", "image_url": {"url": "https://files.example.com/a.png"}}
    body = await answer(served, URL, messages=shown(web))
    assert np.abs(vectors_of(body) - towers.images([IMAGES["tall"]])).max() < 1e-4
    assert urls == ["https://files.example.com/a.png"]
    for url, words in (
        ("s3://bucket/a.png", "s3:// URLs are disabled (--allowed-media-buckets)"),
        ("http://127.0.0.1/a.png", "not a public host"),
        ("images/a.png", "paths of files are read only in tables of `tidemill run`"),
    ):
        error = (await refusal(served, URL, messages=shown({**web, "image_url": url}))).body
        assert error["error"]["param"].startswith("messages.0.content.0")
        assert words in error["error"]["message"]
    assert len(urls) == 1


async def test_a_server_has_vectors_of_images(models: dict[str, Model]) -> None:
    """Each client's form of a request has the same vector."""
    towers, served = models["siglip"]
    app = make_app(make_context(served, ("tiny",), ServerSettings()))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        messages = shown(part(IMAGES["tall"]))
        openai = await client.post("/v1/embeddings", json={"messages": messages})
        cohere = await client.post("/v2/embed", json={"images": [inline(IMAGES["tall"])]})
    expected = towers.images([IMAGES["tall"]])
    assert np.abs(vectors_of(openai.json()) - expected).max() < 1e-4
    assert np.abs(np.array(cohere.json()["embeddings"]["float"]) - expected).max() < 1e-4


async def test_cohere_clients_get_vectors_of_images(models: dict[str, Model]) -> None:
    """In the order of `images`, or of `inputs` between texts."""
    towers, served = models["clip"]
    images = [IMAGES["tall"], IMAGES["wide"]]
    expected = towers.images(images)
    body = await answer(
        served, "/v2/embed", images=[inline(image) for image in images], input_type="image"
    )
    assert np.abs(np.array(body["embeddings"]["float"]) - expected).max() < 1e-4
    assert body["meta"]["billed_units"] == {"input_tokens": 34, "images": 2}
    text = {"content": [{"type": "text", "text": "tide"}]}
    inputs = [{"content": [part(images[1])]}, text, {"content": [part(images[0])]}]
    mixed = await answer(served, "/v2/embed", inputs=inputs)
    order = [expected[1], towers.texts(["tide"])[0], expected[0]]
    assert np.abs(np.array(mixed["embeddings"]["float"]) - np.stack(order)).max() < 1e-4
    assert mixed["texts"] == ["tide"]
    both = [{"content": [*text["content"], part(images[0])]}]
    error = (await refusal(served, "/v2/embed", inputs=both)).body["error"]
    assert error["param"] == "inputs.0.content"
    assert "must have either text parts or one image part" in error["message"]


async def test_pooling_gives_the_same_vector(models: dict[str, Model]) -> None:
    """It has no vectors of tokens."""
    towers, served = models["siglip"]
    body = await answer(served, "/pooling", messages=shown(part(IMAGES["tall"])))
    assert np.abs(np.array(body["data"][0]["data"]) - towers.images([IMAGES["tall"]])).max() < 1e-4
    error = (await refusal(served, "/pooling", input="a", task="token_embed")).body["error"]
    assert "this model supports 'embed'" in error["message"]


def changed(towers: TinyTowers, folder: Path, name: str, **fields: Any) -> EngineConfig:
    """Return the settings of a copy of a model with other fields in a file."""
    shutil.copytree(towers.folder, folder, dirs_exist_ok=True)
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_bytes()) | fields))
    return EngineConfig(str(folder), dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("preprocessor_config.json", {"crop_size": 24}, "has a different image size than its"),
        ("preprocessor_config.json", {"size": {"longest_edge": 32}}, "has unsupported size"),
        ("preprocessor_config.json", {"do_rescale": False}, "unsupported do_rescale false"),
        ("preprocessor_config.json", {"do_pad": True}, "has unsupported do_pad"),
        ("config.json", {"projection_dim": 0}, "has unsupported projection_dim 0"),
        ("config.json", {"text_config": {"hidden_act": "swoosh"}}, "unsupported hidden_act"),
        ("config.json", {"text_config_dict": {"hidden_act": "swoosh"}}, "unsupported hidden_act"),
        ("config.json", {"adapters": 1}, "has unsupported adapters"),
        ("config.json", {"architectures": ["CLIPSegModel"]}, "unsupported architectures"),
    ],
)
def test_an_unknown_config_is_refused_with_its_field(
    name: str,
    fields: dict[str, Any],
    reason: str,
    models: dict[str, Model],
    tmp_path: Path,
) -> None:
    """`tidemill models` reports it."""
    report = inspect_model(changed(models["clip"][0], tmp_path, name, **fields))
    assert report.is_refused
    assert reason in report.faults[0]


def test_an_old_config_has_the_defaults_of_its_class() -> None:
    """Its parts contain fields of all models, and newer parts count less than older ones."""
    common = {
        "add_cross_attention": False,
        "bad_words_ids": None,
        "dropout": 0.0,
        "max_length": 20,
        "id2label": {"0": "LABEL_0"},
        "pruned_heads": {},
        "tie_word_embeddings": True,
        "temperature": 1.0,
        "top_k": 50,
        "torch_dtype": None,
        "use_bfloat16": False,
    }
    raw = {
        "architectures": ["CLIPModel"],
        "initializer_factor": 1.0,
        "logit_scale_init_value": 2.6592,
        "model_type": "clip",
        "projection_dim": 768,
        "text_config": common | {"eos_token_id": 2, "hidden_size": 4},
        "text_config_dict": {"hidden_size": 768, "num_attention_heads": 12},
        "vision_config": common | {"hidden_size": 1024, "num_attention_heads": 16},
        "vision_config_dict": None,
    }
    towers = read_two_towers("clip", raw)
    assert (towers.texts.hidden_size, towers.text_form.end) == (768, 49_407)
    assert (towers.images.hidden_size, towers.patches.num_tokens) == (1024, 50)
    with pytest.raises(ModelRefused, match="its vision_config has unsupported hidden_act 'a'"):
        read_two_towers("clip", raw | {"vision_config_dict": {"hidden_act": "a"}})


def test_a_model_whose_vectors_differ_is_refused(
    models: dict[str, Model],
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Every load compares it with transformers' class, unless it is known to be the same."""
    towers, _ = models["siglip"]
    shutil.copytree(towers.folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(two_towers_loading, "_distance", lambda *_: 0.5)
    with pytest.raises(EngineError, match=r"differ from transformers' \(relative distance 0.5\)"):
        serve(tmp_path)


def test_a_report_names_the_engine_and_the_class(models: dict[str, Model]) -> None:
    """It needs no weights."""
    for kind, class_name in (("clip", "CLIPModel"), ("siglip", "SiglipModel")):
        report = inspect_model(EngineConfig(str(models[kind][0].folder), device="cpu"))
        assert (report.runs, report.gives) == ("native", "vectors or scores")
        assert report.plan is not None
        assert (report.plan.class_name, report.plan.max_model_len) == (class_name, POSITIONS)

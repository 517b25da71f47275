"""Vision models, loaded from a folder behind their endpoints: images in, text out."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import cache
from io import BytesIO
from pathlib import Path
from struct import pack
from typing import Any
from zlib import compress, crc32

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import BaseModel

from tests.engine.tasks.pooled import Serve, serving
from tests.engine.vision_models import (
    BEGIN,
    END,
    IMAGE,
    build,
    config_of,
    save_with_vocabulary,
)
from tests.long_parameters import with_long
from tidemill.engine.config import ImageLimits
from tidemill.engine.endpoints import chat, image_inputs
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.net.fetch import ByteBudget, Fetcher, FetchFailed
from tidemill.protocol.contract import Reply, StreamedReply
from tidemill.protocol.fetched_urls import fetched_urls
from tidemill.protocol.requests import read_body

pytestmark = pytest.mark.usefixtures("proved")

KINDS = ["gemma3", "qwen2_5_vl"]
URL = "/v1/chat/completions"
PLACE = "https://files.example.com/images/"


def picture(width: int, height: int, seed: int = 1) -> Image.Image:
    """Return an image of noise with a gradient, so that no two pixels are alike."""
    levels = np.random.default_rng(seed).integers(0, 200, (height, width, 3))
    return Image.fromarray((levels + np.arange(width)[:, None] % 56).astype(np.uint8))


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """Return an image's bytes."""
    buffer = BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def inline(data: bytes, kind: str = "image/png") -> str:
    """Return a data URL."""
    return f"data:{kind};base64,{b64encode(data).decode()}"


def image_part(url: str, **fields: Any) -> dict[str, Any]:
    """Return an image part."""
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def text_part(text: str) -> dict[str, Any]:
    """Return a text part."""
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a conversation of one turn."""
    return [{"role": "user", "content": list(parts)}]


class Judge:
    """The result of transformers for the same conversation."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.network = build(kind)
        self.tokenizer = save_with_vocabulary(self.network, folder)
        self.folder = folder

    @torch.inference_mode()
    def answer(
        self, messages: list[dict[str, Any]], images: list[Image.Image], max_tokens: int
    ) -> tuple[list[int], str]:
        """Return the prompt's tokens, including image tokens, and the answer's text."""
        from transformers import AutoImageProcessor

        conversation = [
            {
                **message,
                "content": [
                    {"type": "image"} if part["type"] == "image_url" else part
                    for part in message["content"]
                ],
            }
            for message in messages
        ]
        text = self.tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        processor = AutoImageProcessor.from_pretrained(self.folder, use_fast=False)
        inputs = dict(processor(images, return_tensors="pt"))
        counts = [16] * len(images)
        if self.kind != "gemma3":
            counts = (inputs["image_grid_thw"].prod(-1) // 4).tolist()
        else:
            inputs.pop("num_crops")
        for count in counts:
            begin, image = self.tokenizer.convert_ids_to_tokens([BEGIN, IMAGE])
            if self.kind == "gemma3":
                text = text.replace(begin, f"\n\n<B>{'<I>' * count}<E>\n\n", 1)
            else:
                text = text.replace(image, "<I>" * count, 1)
        for short, token in (("<B>", BEGIN), ("<I>", IMAGE), ("<E>", END)):
            text = text.replace(short, self.tokenizer.convert_ids_to_tokens(token))
        ids = torch.tensor([self.tokenizer.encode(text)])
        name = "token_type_ids" if self.kind == "gemma3" else "mm_token_type_ids"
        written = self.network.generate(
            **{**inputs, "input_ids": ids, name: (ids == IMAGE).long()},
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=0,
        )
        return ids[0].tolist(), self.tokenizer.decode(
            written[0, ids.shape[1] :], skip_special_tokens=True
        )


@pytest.fixture(name="judge", scope="module", params=KINDS)
def fixture_judge(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Judge:
    """Return transformers' model of a kind, and the folder that ours is loaded from."""
    return Judge(request.param, tmp_path_factory.mktemp(request.param))


class Host:
    """The responses of URLs: one image, or an error."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.answer: bytes | FetchFailed = b""

    async def fetch(self, url: str, _: ByteBudget | None = None) -> bytes:
        """Return the response of a URL."""
        self.urls.append(url)
        if isinstance(self.answer, FetchFailed):
            raise self.answer
        return self.answer


@pytest.fixture(name="host", scope="module")
def fixture_host() -> Iterator[Host]:
    """Return the replacement for the internet."""
    host = Host()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fetcher, "fetch", lambda _, url, allowance: host.fetch(url, allowance))
        yield host


@pytest.fixture(name="served", scope="module")
def fixture_served(judge: Judge, host: Host) -> Iterator[Dispatcher]:
    """Return the model of that folder behind its endpoints, with at most four images."""
    del host  # which must be created first
    limits = ImageLimits(max_bytes=2**18, max_pixels=2**20, max_per_prompt=4)
    with serving() as serve:
        yield serve(judge.folder, images=limits, max_num_batched_tokens=32, max_num_seqs=8)


async def ask(served: Dispatcher, messages: list[dict[str, Any]], **fields: Any) -> Reply:
    """Return the answer to a conversation with greedy decoding."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, **fields}
    return await served.respond(URL, body, "req_1", 0)


async def refused(served: Dispatcher, *parts: dict[str, Any], **fields: Any) -> tuple[str, str]:
    """Return the parameter and the message of a 400."""
    reply = await ask(served, user(*parts), **fields)
    assert reply.status_code == 400, reply.body
    return reply.body["error"]["param"], reply.body["error"]["message"]


async def test_images_are_read_as_transformers_reads_them(judge: Judge, served: Dispatcher) -> None:
    """Prompts and answers match for one or several images of any size in any turn."""
    small, wide, tall = picture(60, 40), picture(300, 100, 2), picture(50, 170, 3)
    first = user(text_part("What is in "), image_part(inline(encoded(wide))), text_part(" this?"))
    urls: list[tuple[list[dict[str, Any]], list[Image.Image]]] = [
        (first, [wide]),
        (
            user(image_part(inline(encoded(small))), image_part(inline(encoded(tall)))),
            [small, tall],
        ),
        (
            [
                *first,
                {"role": "assistant", "content": [text_part("Paris.")]},
                *user(
                    text_part("And "),
                    image_part(inline(encoded(wide)), detail="low"),
                    text_part("here?"),
                ),
            ],
            [wide, wide],
        ),
    ]
    for messages, images in urls:
        ids, text = judge.answer(messages, images, 12)
        reply = await ask(served, messages, return_token_ids=True)
        assert reply.status_code == 200, reply.body
        assert reply.body["prompt_token_ids"] == ids
        assert reply.body["choices"][0]["message"]["content"] == text
        assert reply.body["usage"]["prompt_tokens"] == len(ids)


async def test_another_image_is_another_prompt(served: Dispatcher) -> None:
    """The cache does not confuse prompts with the same text and different images."""
    texts = []
    for seed in (1, 2, 3, 1):
        part = image_part(inline(encoded(picture(60, 60, seed))))
        reply = await ask(served, user(text_part("What is this? " * 4), part), logprobs=True)
        tokens = reply.body["choices"][0]["logprobs"]["content"]
        texts.append([entry["logprob"] for entry in tokens])
    assert texts[0] == texts[3]
    assert texts[0] != texts[1] != texts[2] != texts[0]


async def test_choices_of_one_image_differ_and_repeat(served: Dispatcher) -> None:
    """They differ by their seeds; the first is the same as alone."""
    messages = user(image_part(inline(encoded(picture(60, 60)))), text_part("Well?"))
    several, again, alone = [
        [
            choice["message"]["content"]
            for choice in (await ask(served, messages, n=n, seed=5, temperature=1.0)).body[
                "choices"
            ]
        ]
        for n in (3, 3, 1)
    ]
    assert several == again
    assert several[0] == alone[0]
    assert len(set(several)) > 1


async def test_an_answer_about_an_image_is_streamed(served: Dispatcher) -> None:
    """The text is the same as without streaming."""
    messages = user(image_part(inline(encoded(picture(60, 60)))), text_part("Well?"))
    whole = await ask(served, messages)
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, "stream": True}
    reply = await served.answer(URL, body, "req_1", 0)
    assert isinstance(reply, StreamedReply)
    chunks = [chunk async for chunk in reply.chunks]
    text = "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )
    assert text == whole.body["choices"][0]["message"]["content"]


async def test_each_image_is_fetched_once(judge: Judge, served: Dispatcher, host: Host) -> None:
    """A URL may be a plain string and may repeat; other errors are reported before fetching."""
    image = picture(80, 60)
    host.answer = encoded(image)
    host.urls.clear()
    part = {"type": "image_url", "image_url": f"{PLACE}a.png"}
    messages = user(
        part, text_part("and "), image_part(f"{PLACE}a.png"), image_part(f"{PLACE}b.png")
    )
    _, text = judge.answer(messages, [image] * 3, 12)
    reply = await ask(served, messages)
    assert reply.body["choices"][0]["message"]["content"] == text
    assert sorted(host.urls) == [f"{PLACE}a.png", f"{PLACE}b.png"]
    assert (await refused(served, part, top_p=5))[0] == "top_p"
    assert len(host.urls) == 2


@pytest.mark.parametrize("url", [URL, "/v1/responses"])
async def test_a_body_with_images_is_parsed_once(
    url: str, served: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fetch hands the request on; a field of the body's cannot replace it."""
    parsed = []

    def counted(kind: type[BaseModel], body: dict[str, Any]) -> BaseModel:
        parsed.append(kind)
        return read_body(kind, body)

    for module in (chat, image_inputs):
        monkeypatch.setattr(module, "read_body", counted)
    image = inline(encoded(picture(80, 60)))
    item = {"role": "user", "content": [{"type": "input_image", "image_url": image}]}
    field = {"messages": user(image_part(image))} if url == URL else {"input": [item]}
    limit = {"max_tokens": 4} if url == URL else {"max_output_tokens": 4}
    body = {**field, **limit, "temperature": 0, "fetched_images": {"a": "b"}}
    reply = await served.respond(url, body, "req_1", 0)
    assert reply.status_code == 200
    assert len(parsed) == 1


async def test_fetched_images_are_the_listed_urls(served: Dispatcher, host: Host) -> None:
    """Each spelling that is fetched is listed, and no URL in a text or another field is fetched."""
    host.answer = encoded(picture(80, 60))
    host.urls.clear()
    urls = [f"{PLACE}a.png", "HTTPS://files.example.com/b.png", f"{PLACE}c.png"]
    parts = [
        image_part(urls[0]),
        {"type": "image_url", "image_url": urls[1]},
        {"type": "text", "text": f"{PLACE}d.png", "image_url": f"{PLACE}e.png"},
        image_part(inline(host.answer)),
        {"type": "image_url", "image_url": {"url": urls[2], "detail": "low"}},
    ]
    reply = await ask(served, user(*parts), file_url=f"{PLACE}f.png")
    assert reply.status_code == 200
    assert sorted(host.urls) == sorted(fetched_urls({"messages": user(*parts)}).values())
    assert sorted(host.urls) == sorted(urls)


async def test_an_image_that_cannot_be_fetched_is_named(served: Dispatcher, host: Host) -> None:
    """The message is that of the fetcher."""
    host.answer = FetchFailed("its host returned HTTP 404")
    param, words = await refused(served, text_part("Look: "), image_part(f"{PLACE}a.png"))
    assert param == "messages.0.content.1"
    assert words == "`messages.0.content.1` could not be fetched: its host returned HTTP 404."


@cache
def bomb() -> bytes:
    """Return a PNG of 400 million black pixels, which are never in memory."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return pack(">I", len(data)) + name + data + pack(">I", crc32(name + data))

    header = pack(">2I5B", 20_000, 20_000, 1, 0, 0, 0, 0)  # a bit for each pixel
    pixels = compress(bytes(20_000 * (1 + 20_000 // 8)), 1)
    chunks = chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "an SVG": (lambda: b'<?xml version="1.0"?><svg/>', "an SVG"),
    "no image": (lambda: b"GIF, or what?", "not a PNG, JPEG, WebP, GIF, BMP, TIFF"),
    "empty": (lambda: b"", "empty"),
    "cut off": (lambda: encoded(picture(90, 90))[:-900], "damaged or truncated"),
    "a bomb": (bomb, "20,000 x 20,000 pixels"),
    "too large": (lambda: encoded(picture(400, 400)), "larger than 262,144 bytes"),
    "of another form": (
        lambda: encoded(picture(9, 9), "PPM"),
        "not a PNG, JPEG, WebP, GIF, BMP, TIFF",
    ),
}


@pytest.mark.parametrize("case", BAD)
async def test_an_invalid_image_is_a_400_that_names_it(served: Dispatcher, case: str) -> None:
    """The error includes the reason."""
    make, why = BAD[case]
    good = image_part(inline(encoded(picture(30, 30))))
    param, words = await refused(served, text_part("Look: "), good, image_part(inline(make())))
    assert param == "messages.0.content.2"
    assert "`messages.0.content.2`" in words
    assert why in words


async def test_an_extreme_aspect_ratio_is_refused(judge: Judge, served: Dispatcher) -> None:
    """It applies to models that preserve aspect ratios; others accept any image."""
    part = image_part(inline(encoded(Image.new("RGB", (402, 2)))))
    reply = await ask(served, user(part))
    if judge.kind == "gemma3":
        assert reply.status_code == 200
    else:
        assert "aspect ratio is above 200" in reply.body["error"]["message"]


async def test_the_number_of_images_is_limited(served: Dispatcher) -> None:
    """The error names the first image above the limit, before any is fetched."""
    parts = [image_part(f"{PLACE}{i}.png") for i in range(5)]
    param, words = await refused(served, *parts)
    assert param == "messages.0.content.4"
    assert "per request, 4" in words


def tiff(*images: Image.Image) -> str:
    """Return images as the pages of a TIFF in a data URL."""
    first, *others = (image.copy() for image in images)  # Pillow keeps settings in images
    return inline(encoded(first, "TIFF", save_all=True, append_images=others), "image/tiff")


async def test_pages_are_images_of_the_same_conversation(served: Dispatcher) -> None:
    """A TIFF, in an image or file part, has the answer of its pages as separate images."""
    images = [picture(50 + 10 * n, 40, n) for n in range(3)]
    separate = [image_part(inline(encoded(each))) for each in images]
    ask_what = text_part("What is it?")
    expected = await ask(served, user(text_part("See "), *separate, ask_what), logprobs=True)
    document = {"type": "file", "file": {"file_data": tiff(*images), "filename": "a.tif"}}
    for part in (image_part(tiff(*images)), document, {**document, "pages": "1, 2-3"}):
        reply = await ask(served, user(text_part("See "), part, ask_what), logprobs=True)
        assert reply.status_code == 200, reply.body
        assert reply.body["choices"] == expected.body["choices"]
        assert reply.usage.prompt_tokens == expected.usage.prompt_tokens
    item = {"type": "input_file", "file_data": tiff(*images), "pages": "3,1"}
    body = {"input": [{"role": "user", "content": [item]}], "temperature": 0}
    body["max_output_tokens"] = 4
    response = await served.respond("/v1/responses", body, "req_1", 0)
    assert response.status_code == 200, response.body
    two = await ask(served, user(separate[2], separate[0]), max_tokens=4)
    assert response.body["usage"]["input_tokens"] == two.usage.prompt_tokens
    assert (
        response.body["output"][0]["content"][0]["text"]
        == (two.body["choices"][0]["message"]["content"])
    )


async def test_pages_are_bounded(served: Dispatcher) -> None:
    """They count against the limit of images, and must exist."""
    document = {"type": "file", "file": {"file_data": tiff(*[picture(20, 20)] * 6)}}
    single = image_part(inline(encoded(picture(30, 30))))
    param, words = await refused(served, single, document)
    assert param == "messages.0.content.1"
    assert "maximum number of images per request, 4" in words
    assert "with `pages`" in words
    assert "`pages`" not in (await refused(served, image_part(tiff(*[picture(20, 20)] * 6))))[1]
    assert "exceeds" in (await refused(served, single, {**document, "pages": "1-4"}))[1]
    assert (await ask(served, user(single, {**document, "pages": "6,1-2"}))).status_code == 200
    param, words = await refused(served, {**document, "pages": "2,7"})
    missing = "The document of `messages.0.content.0` has 6 pages: page {} does not exist."
    assert words == missing.format(7)
    for selected, page in (("1-999999", 7), ("9-12,1", 9), ("1,2-3,8", 8)):
        words = (await refused(served, {**document, "pages": selected}))[1]
        assert words == missing.format(page)
    text = {"type": "file", "file": {"file_data": "data:text/plain;base64,aGVsbG8="}}
    assert "is not a PNG" in (await refused(served, text))[1]
    pdf = {"type": "file", "file": {"file_data": inline(b"%PDF-1.7 hello", "application/pdf")}}
    words = (await refused(served, pdf))[1]
    assert "is a damaged PDF" in words or "pip install 'tidemill[pdf]'" in words


async def test_objects_are_read_by_the_given_reader(judge: Judge, serve: Serve) -> None:
    """A failure of the store is a 500; without a reader the part is a 400."""
    objects: dict[str, bytes] = {"s3://bucket/a.png": encoded(picture(30, 30))}

    async def read(url: str, max_bytes: int, allowance: ByteBudget) -> bytes:
        allowance.acquire(1)
        assert max_bytes == ImageLimits().max_bytes
        if url not in objects:
            raise FetchFailed("S3 failed", is_of_service=True)
        return objects[url]

    served = serve(judge.folder, read_object=read, max_num_batched_tokens=32, max_num_seqs=8)
    good = image_part("s3://bucket/a.png")
    reply = await ask(served, user(good))
    same = await ask(served, user(image_part(inline(objects["s3://bucket/a.png"]))))
    assert reply.body["choices"] == same.body["choices"]
    reply = await ask(served, user(good, image_part("s3://bucket/b.png")))
    assert reply.status_code == 500
    assert reply.body["error"]["code"] == "fetch_failed"
    assert (
        "`messages.0.content.1` could not be fetched: S3 failed." in reply.body["error"]["message"]
    )


async def test_objects_are_disabled_by_default(served: Dispatcher) -> None:
    """The message names the flag."""
    param, words = await refused(served, image_part("s3://bucket/a.png"))
    assert param == "messages.0.content.0"
    assert "--allowed-media-buckets" in words


async def test_parameters_that_conflict_with_images_are_named(served: Dispatcher) -> None:
    """A prompt with images is not truncated, and image tokens are not allowed in its text."""
    part = image_part(inline(encoded(picture(30, 30))))
    assert (await refused(served, part, truncate_prompt_tokens=9))[0] == "truncate_prompt_tokens"
    param, words = await refused(served, text_part("<|image_pad|><image_soft_token>"), part)
    assert param == "messages"
    assert "image marks" in words
    messages = [*user(text_part("Hm?")), {"role": "assistant", "content": [part]}]
    reply = await ask(served, messages, continue_final_message=True)
    assert reply.status_code == 400
    assert "continue_final_message" in reply.body["error"]["message"]


async def test_an_image_that_exceeds_the_context_is_an_error(judge: Judge, serve: Serve) -> None:
    """The error has the number of prompt tokens including the image."""
    served = serve(judge.folder, max_model_len=24)
    param, words = await refused(served, *[image_part(inline(encoded(picture(90, 90))))] * 2)
    assert param == "messages"
    assert "maximum context length is 24" in words


async def test_a_template_without_image_support_is_an_error(judge: Judge, serve: Serve) -> None:
    """Otherwise the model would answer without seeing the image."""
    served = serve(judge.folder, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    param, words = await refused(served, image_part(inline(encoded(picture(30, 30)))))
    assert param == "messages"
    assert "0 of the 1 images" in words


async def test_image_rows_end_with_the_tokens_of_the_vocabulary(
    serve: Serve, tmp_path: Path
) -> None:
    """Rows of Mistral 3 end with break tokens, which count as prompt tokens."""
    save_with_vocabulary(build("mistral3"), tmp_path)
    served = serve(tmp_path)
    parts = text_part("Look: "), image_part(inline(encoded(picture(60, 40)))), text_part(" well?")
    reply = await ask(served, user(*parts), return_token_ids=True)
    ids = reply.body["prompt_token_ids"]
    row, (row_break, end) = [IMAGE] * 3, (IMAGE + 2, IMAGE + 3)
    start = ids.index(IMAGE)
    assert ids[start : start + 8] == [*row, row_break, *row, end]
    assert ids.count(IMAGE) == 6
    assert reply.body["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("kind", with_long(["glm_ocr"], ["paddleocr_vl"]))
async def test_document_readers_read_images_as_transformers_does(
    serve: Serve, tmp_path: Path, kind: str
) -> None:
    """Three images of extreme shapes in one request; a video and a long strip are refused."""
    judge = Judge(kind, tmp_path)
    served = serve(tmp_path)
    images = [picture(1, 1), picture(10, 2000, 2), picture(60, 40, 3)]
    parts = [image_part(inline(encoded(image))) for image in images]
    messages = user(parts[0], text_part("and "), *parts[1:], text_part("Text Recognition:"))
    ids, text = judge.answer(messages, images, 12)
    reply = await ask(served, messages, return_token_ids=True)
    assert reply.status_code == 200, reply.body
    assert reply.body["prompt_token_ids"] == ids
    assert reply.body["choices"][0]["message"]["content"] == text
    video = {"type": "video_url", "video_url": {"url": f"{PLACE}a.mp4"}}
    param, words = await refused(served, parts[0], video)
    assert param == "messages.0.content.1.type"
    assert "video_url" in words
    strip = image_part(inline(encoded(Image.new("RGB", (402, 2)))))
    assert "aspect ratio is above 200" in (await refused(served, strip))[1]


@pytest.mark.parametrize(("kind", "token"), [("qwen2_5_vl", 310), ("mistral3", IMAGE + 1)])
async def test_a_model_with_unknown_image_tokens_serves_only_text(
    serve: Serve, tmp_path: Path, kind: str, token: int
) -> None:
    """A note is logged; the error for an image names its place."""
    network = build(kind)
    network.config = config_of(kind)
    network.config.image_token_id = token
    save_with_vocabulary(network, tmp_path)
    served = serve(tmp_path)
    assert any("images are disabled" in note for note in served.info().notes)
    param, words = await refused(served, image_part(inline(encoded(picture(30, 30)))))
    assert param == "messages.0.content.0"
    assert "does not support images" in words
    assert (await ask(served, user(text_part("Well?")))).status_code == 200

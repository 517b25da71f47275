"""Chats with images of any form, against transformers' whole processors and classes."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from tests.engine.tasks.pooled import serving
from tests.engine.vision_models import BEGIN, END, IMAGE, build, save_with_vocabulary
from tests.long_parameters import with_long
from tidemill.engine.config import ImageLimits
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.protocol.contract import Reply

pytestmark = pytest.mark.usefixtures("proved")

KINDS = ["internvl", "gemma4"]
NOISE = np.random.default_rng(0).integers(0, 256, (60, 130, 3), dtype=np.uint8)
PICTURE = Image.fromarray(NOISE)
SHAPES = ["1x1", "2000x10", "three", "RGBA"]
TEXT, NEW_TOKENS = "What is it?", 6


class Served(NamedTuple):
    """A model behind its endpoints, and transformers' class and processor of its folder."""

    dispatcher: Dispatcher
    network: Any
    processor: Any


@pytest.fixture(name="served", scope="module", params=KINDS)
def fixture_served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Return the tiny model of a kind in its folder, run by both."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    network = build(kind)
    network.lm_head.weight[[IMAGE, BEGIN, END]] = 0  # so that they are never generated
    tokenizer = save_with_vocabulary(network, folder)
    with serving() as serve:
        dispatcher = serve(folder, images=ImageLimits(max_per_prompt=3))
        yield Served(dispatcher, network, processor_of(kind, folder, tokenizer))


def processor_of(kind: str, folder: Path, tokenizer: Any) -> Any:
    """Return transformers' processor of text and images."""
    import transformers

    images = transformers.AutoImageProcessor.from_pretrained(folder, use_fast=False)
    tokenizer.image_token_id = tokenizer.context_image_token_id = IMAGE
    tokenizer.start_image_token_id, tokenizer.end_image_token_id = BEGIN, END
    image, begin, end = tokenizer.convert_ids_to_tokens([IMAGE, BEGIN, END])
    tokenizer.image_token, tokenizer.context_image_token = image, image
    tokenizer.boi_token, tokenizer.start_image_token = begin, begin
    tokenizer.eoi_token, tokenizer.end_image_token = end, end
    tokenizer.boa_token = tokenizer.eoa_token = tokenizer.video_token = "<|none|>"
    tokenizer.pad_token = tokenizer.eos_token
    with pytest.MonkeyPatch.context() as patch:  # its part for videos needs torchvision
        patch.setattr(transformers.ProcessorMixin, "check_argument_for_proper_class", lambda *_: 0)
        if kind == "gemma4":
            return transformers.Gemma4Processor(None, images, tokenizer, None)
        return transformers.InternVLProcessor(images, tokenizer, image_seq_length=4)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """Return an image's bytes."""
    buffer = BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def turned() -> tuple[bytes, Image.Image]:
    """Return an image that its EXIF rotates, and the rotated image."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(PICTURE, exif=exif), PICTURE.transpose(Image.Transpose.ROTATE_270)


def deep() -> tuple[bytes, Image.Image]:
    """Return an image of 16 bits per pixel, and its upper eight."""
    levels = NOISE[:, :, 0].astype(np.uint16) << 8
    return encoded(Image.fromarray(levels)), Image.fromarray(NOISE[:, :, 0]).convert("RGB")


def transparent() -> tuple[bytes, Image.Image]:
    """Return an image of which a half is transparent, and the image on white."""
    alpha = np.where(np.arange(130) < 60, 0, 255).astype(np.uint8)
    levels = np.dstack([NOISE, np.tile(alpha, (60, 1))])
    return encoded(Image.fromarray(levels)), Image.fromarray(np.where(alpha[:, None], NOISE, 255))


def pictures() -> dict[str, list[tuple[bytes, Image.Image]]]:
    """Return the images of chats as their bytes and as what they show."""
    grey, inks = PICTURE.convert("L"), PICTURE.convert("CMYK")
    frames = [PICTURE.rotate(180).quantize(16), PICTURE.quantize(16)]
    moving = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    plain = [
        Image.fromarray(NOISE[:1, :1]),
        PICTURE.resize((2000, 10)),
        PICTURE.resize((130, 130)),
    ]
    shown = {f"{one.width}x{one.height}": [(encoded(one), one)] for one in plain}
    return shown | {
        "three": [(encoded(one), one) for one in (PICTURE, plain[2], PICTURE)],
        "grey": [(encoded(grey), grey.convert("RGB"))],
        "CMYK": [(encoded(inks, "TIFF"), inks.convert("RGB"))],
        "RGBA": [transparent()],
        "16 bits": [deep()],
        "EXIF": [turned()],
        "animated": [(moving, Image.open(BytesIO(moving)).convert("RGB"))],
    }


def user(files: list[bytes]) -> list[dict[str, Any]]:
    """Return a turn with images and text."""
    urls = [f"data:image/png;base64,{b64encode(data).decode()}" for data in files]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}]


async def ask(served: Served, messages: list[dict[str, Any]]) -> Reply:
    """Return the answer to a conversation with greedy decoding."""
    body = {"messages": messages, "temperature": 0, "max_tokens": NEW_TOKENS, "logprobs": True}
    body |= {"ignore_eos": True, "return_token_ids": True}
    return await served.dispatcher.respond("/v1/chat/completions", body, "req_1", 0)


@torch.inference_mode()
def judge(
    served: Served, text: str, images: list[Image.Image]
) -> tuple[list[int], list[int], list[float]]:
    """Return transformers' prompt, its greedy tokens and their log-probabilities."""
    turn = {"role": "user", "content": [*[{"type": "image"}] * len(images), {"text": text}]}
    prompt = served.processor.tokenizer.apply_chat_template(
        [turn], tokenize=False, add_generation_prompt=True
    )
    inputs = served.processor(images=[images], text=[prompt], return_tensors="pt")
    written = served.network.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=-1,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids, num_prompt = written.sequences[0].tolist(), inputs["input_ids"].shape[1]
    logprobs = torch.cat(written.logits).log_softmax(-1).max(-1).values
    return ids[:num_prompt], ids[num_prompt:], logprobs.tolist()


@pytest.mark.parametrize("name", with_long(SHAPES, sorted(pictures().keys() - SHAPES)))
async def test_a_chat_is_answered_as_by_transformers(served: Served, name: str) -> None:
    """Prompt tokens, generated tokens and log-probabilities are equal."""
    files, images = zip(*pictures()[name], strict=True)
    reply = await ask(served, user([*files]))
    assert reply.status_code == 200, reply.body
    prompt, ids, logprobs = judge(served, TEXT, [*images])
    [choice] = reply.body["choices"]
    assert reply.body["prompt_token_ids"] == prompt
    assert choice["token_ids"] == ids
    own = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert own == pytest.approx(logprobs, abs=1e-4)


async def test_a_video_is_refused(served: Served) -> None:
    """The error names its place."""
    part = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}
    reply = await ask(served, [{"role": "user", "content": [part]}])
    assert reply.status_code == 400
    assert reply.body["error"]["param"] == "messages.0.content.0.type"
    assert "other types are not supported; got 'video_url'" in reply.body["error"]["message"]


async def test_a_mark_without_an_image_is_refused(served: Served) -> None:
    """A text may not contain the model's mark of an image next to one."""
    messages = user([encoded(PICTURE)])
    mark = served.processor.tokenizer.convert_ids_to_tokens(IMAGE)
    messages[0]["content"].append({"type": "text", "text": mark})
    reply = await ask(served, messages)
    assert reply.status_code == 400
    assert "must not contain the model's image marks" in str(reply.body)

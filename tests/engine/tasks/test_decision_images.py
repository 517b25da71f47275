"""Images of decisions: fetched once, placed in the prompt of each read, never reused by URL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tasks.pooled import serving
from tests.engine.tasks.test_vision import PLACE, Host, encoded, image_part, inline, picture, tiff
from tests.engine.vision_models import build, save_with_vocabulary
from tidemill.batch.result_key import ResultKeys
from tidemill.engine.config import ImageLimits
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.net.fetch import Fetcher, FetchFailed
from tidemill.protocol.contract import Reply

pytestmark = pytest.mark.usefixtures("proved")

PREDICATE = {"type": "predicate", "instructions": "Torn?"}
NOUL = {"type": "noul", "instructions": "Torn?"}


@pytest.fixture(name="host", scope="module")
def fixture_host() -> Iterator[Host]:
    """Return the replacement for the internet."""
    host = Host()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fetcher, "fetch", lambda _, url, allowance: host.fetch(url, allowance))
        yield host


@pytest.fixture(name="served", scope="module")
def fixture_served(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    """Return a tiny Qwen2.5-VL with at most two images per prompt."""
    del host  # which must be created first
    folder: Path = tmp_path_factory.mktemp("vision")
    save_with_vocabulary(build("qwen2_5_vl"), folder)
    limits = ImageLimits(max_bytes=2**18, max_pixels=2**20, max_per_prompt=2)
    with serving() as serve:
        yield serve(folder, images=limits, max_num_batched_tokens=64, max_num_seqs=8)


def part(url: str) -> dict[str, Any]:
    """Return an image part of a decision."""
    return {"type": "input_image", "image_url": url, "detail": "low"}


def of_user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the input of one user message."""
    return [{"role": "user", "content": [*parts]}]


async def decide(served: Dispatcher, given: object, *questions: object, **fields: Any) -> Reply:
    """Return the reply to a decision."""
    body = {"input": given, "questions": [*questions] or [PREDICATE], **fields}
    return await served.respond("/v1/decisions", body, "req_1", 0)


async def test_an_image_is_placed_as_in_a_chat(served: Dispatcher) -> None:
    """The prompt has the tokens of a chat with the same parts; the answer depends on the image."""
    image, other = (inline(encoded(picture(60, 60, seed))) for seed in (1, 2))
    probabilities = []
    for url in (image, other, image):
        reply = await decide(served, of_user(part(url)))
        assert reply.status_code == 200, reply.body
        probabilities.append(reply.body["answers"][0]["probability"])
    assert probabilities[0] == pytest.approx(probabilities[2], rel=1e-3)
    assert probabilities[0] != pytest.approx(probabilities[1], rel=0.01)
    question = "\n\nQuestion: Torn?\nAnswer only with one letter: Y for yes or N for no."
    text = {"type": "text", "text": question}
    chat = {"messages": [{"role": "user", "content": [image_part(image), text]}], "max_tokens": 1}
    usage = (await served.respond("/v1/chat/completions", chat, "req_1", 0)).usage
    # All full pages of the chat's prompt are those of the decision; labels are a few more tokens.
    assert usage.cached_tokens == usage.prompt_tokens // 16 * 16 > 32
    assert usage.prompt_tokens <= reply.usage.prompt_tokens <= usage.prompt_tokens + 16


async def test_both_endpoints_see_the_same_image(served: Dispatcher) -> None:
    """The images of System One precede its state."""
    image = inline(encoded(picture(60, 60)))
    text = {"type": "input_text", "text": "a box"}
    one = await decide(served, of_user(part(image), text))
    body = {"state": "a box", "questions": {"q": NOUL}, "images": [image]}
    other = await served.respond("/v1/systemone", body, "req_1", 0)
    assert other.body["answers"]["q"]["noul"] == pytest.approx(
        one.body["answers"][0]["probability"], rel=1e-3
    )


@pytest.mark.parametrize("layout", ["row_first", "questions_first"])
async def test_each_image_is_fetched_once_for_all_reads(
    served: Dispatcher, host: Host, layout: str
) -> None:
    """A question may have its own image; URLs in text and JSON are not fetched."""
    host.answer = encoded(picture(60, 60))
    host.urls.clear()
    data = {"type": "input_json", "data": {"image_url": f"{PLACE}c.png"}}
    own = [{"type": "input_text", "text": f"Like {PLACE}d.png?"}, part(f"{PLACE}b.png")]
    questions = [PREDICATE, {"type": "predicate", "instructions": own}]
    given = of_user(part(f"{PLACE}a.png"), data)
    reply = await decide(served, given, *questions, question_layout=layout, debias=2)
    assert reply.status_code == 200, reply.body
    assert sorted(host.urls) == [f"{PLACE}a.png", f"{PLACE}b.png"]
    by_data = await decide(
        served,
        of_user(part(inline(host.answer)), data),
        PREDICATE,
        {"type": "predicate", "instructions": [own[0], part(inline(host.answer))]},
        question_layout=layout,
        debias=2,
    )
    for here, there in zip(reply.body["answers"], by_data.body["answers"], strict=True):
        assert here["probability"] == pytest.approx(there["probability"], rel=1e-3)


async def test_an_image_that_cannot_be_shown_is_named(served: Dispatcher, host: Host) -> None:
    """The error has its place: too many per prompt, not fetched, or no image."""
    host.urls.clear()
    three = of_user(*[part(f"{PLACE}{i}.png") for i in range(3)])
    reply = await decide(served, three)
    assert reply.body["error"]["param"] == "input.0.content.2"
    assert not host.urls
    own = {"type": "predicate", "instructions": [part(f"{PLACE}{i}.png") for i in range(2)]}
    reply = await decide(served, of_user(part(f"{PLACE}a.png")), PREDICATE, own)
    assert reply.body["error"]["param"] == "questions.1.instructions.1"
    host.answer = FetchFailed("its host returned HTTP 404")
    reply = await decide(served, of_user(part(f"{PLACE}a.png")))
    assert "`input.0.content.0` could not be fetched" in reply.body["error"]["message"]
    body = {"state": "x", "questions": {"q": NOUL}, "images": [inline(b"GIF, or what?")]}
    reply = await served.respond("/v1/systemone", body, "req_1", 0)
    assert (reply.status_code, reply.body["error"]["param"]) == (400, "images.0")


def test_decisions_about_urls_are_not_reused() -> None:
    """Data URLs are content; an image of a question counts, too."""
    keys = ResultKeys(["m"])
    own = {"type": "predicate", "instructions": [part(f"{PLACE}a.png")]}
    calls = [{"type": "function_call_output", "output": [part(f"{PLACE}a.png")]}]
    fetched = [
        {"input": of_user(part(f"{PLACE}a.png")), "questions": [PREDICATE]},
        {"input": calls, "questions": [PREDICATE]},
        {"input": "x", "questions": [own]},
        {"state": "x", "questions": {"q": NOUL}, "images": [f"{PLACE}a.png"]},
    ]
    assert [keys.key_of("/v1/decisions", body, "a") for body in fetched] == [None] * 4
    stored = [
        {"input": of_user(part("data:image/png;base64,AAAA")), "questions": [PREDICATE]},
        {"input": of_user(part("data:image/png;base64,AAAB")), "questions": [PREDICATE]},
        {"input": f"See {PLACE}a.png", "questions": [PREDICATE]},
        {"input": f"See {PLACE}a.png", "questions": [own | {"instructions": "Torn?"}, PREDICATE]},
    ]
    found = {keys.key_of("/v1/decisions", body, "a") for body in stored}
    assert len(found) == 4
    assert None not in found


async def test_each_page_is_an_image(served: Dispatcher) -> None:
    """The prompt is that of the pages as separate images."""
    images = [picture(60, 60), picture(60, 30, 2)]
    whole = await decide(served, of_user(part(tiff(*images))))
    single = await decide(served, of_user(*(part(inline(encoded(each))) for each in images)))
    assert whole.status_code == 200, whole.body
    assert whole.usage.prompt_tokens == single.usage.prompt_tokens
    assert whole.body["answers"][0]["probability"] == pytest.approx(
        single.body["answers"][0]["probability"], rel=1e-3
    )
    refused = await decide(served, of_user(part(tiff(*images, *images))))
    assert "exceeds the maximum number of images" in refused.body["error"]["message"]

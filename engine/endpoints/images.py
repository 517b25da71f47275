"""Images that messages name: brought, looked at, and put where a prompt has their marks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.backpressure import MemoryBudget
from engine.config import MAX_DECODING_BYTES, ImageLimits
from engine.endpoints.bringing import Bringing
from engine.protocol.chat import ChatCompletionRequest
from engine.protocol.errors import RequestError
from engine.protocol.parts import IMAGE, has_images
from engine.protocol.requests import read_body
from engine.protocol.urls import inline_bytes, is_inline, too_large
from engine.scheduling.pictures import Picture, Sight
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.images.seeing import Seen

# Of one request, in memory until it is prepared.
MAX_BYTES_TOGETHER = 64 * 2**20
# Where images stand in a body once they are fetched.
FETCHED = "fetched_images"


class Fetched(dict[str, bytes]):
    """Images by their urls: of a type that no JSON holds."""


@dataclass(frozen=True, slots=True)
class Eyes:
    """How a model sees, what may be shown to it, who brings it, and memory to decode it in."""

    sight: Sight
    limits: ImageLimits
    bringing: Bringing
    decoding: MemoryBudget = field(default_factory=lambda: MemoryBudget(MAX_DECODING_BYTES))


class Images:
    """The images of one model's conversations; without `eyes` it refuses them."""

    def __init__(self, tokenizer: Tokenizer, eyes: Eyes | None) -> None:
        self._eyes = eyes
        self._mark = self._spelling = ""
        if eyes is not None:
            added = tokenizer.vocabulary.added
            self._mark = added[eyes.sight.mark]
            spelling = eyes.sight.spelling
            self._spelling = "".join(
                one if isinstance(one, str) else added[one] for one in spelling
            )

    def fetched(self, body: dict[str, Any]) -> AbstractAsyncContextManager[dict[str, Any]] | None:
        """Return the step that brings a body's images; None where it has none to look at."""
        if self._eyes is None or not has_images(body):
            return None
        return self._brought(self._eyes, body)

    @asynccontextmanager
    async def _brought(self, eyes: Eyes, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        request = read_body(ChatCompletionRequest, body)
        urls = {url: place for place, url in self._told(request, eyes) if not is_inline(url)}
        if not urls:
            yield body
            return
        async with eyes.bringing.brought(urls, max_bytes=MAX_BYTES_TOGETHER) as found:
            yield body | {FETCHED: Fetched(found)}

    def seen(self, request: ChatCompletionRequest, body: Mapping[str, Any]) -> list[Seen]:
        """Return what a model sees of a request's images, in their order.

        Raises `RequestError` for one that cannot be taken, and where the model sees none.
        """
        brought = body.get(FETCHED)
        found: Mapping[str, bytes] = brought if isinstance(brought, Fetched) else {}
        by_url: dict[str, Seen] = {}
        images = []
        for place, url in self._told(request, self._eyes):
            assert self._eyes is not None
            if url not in by_url:
                by_url[url] = _looked_at(place, url, found, self._eyes)
            images.append(by_url[url])
        return images

    def spelled(self, prompt: str, images: Sequence[Seen]) -> str:
        """Return a prompt's text with the mark of each image spelled out."""
        if not images:
            return prompt
        self._check_marks(prompt.count(self._mark), images)
        return prompt.replace(self._mark, self._spelling)

    def shown(
        self, ids: list[int], images: Sequence[Seen]
    ) -> tuple[list[int], tuple[Picture, ...]]:
        """Return a prompt's tokens with as many for each image as it has, and the images there."""
        if not images or self._eyes is None:
            return ids, ()
        sight = self._eyes.sight
        places = [place for place, token in enumerate(ids) if token == sight.token]
        self._check_marks(len(places), images)
        told: list[int] = []
        pictures = []
        done = 0
        for place, image in zip(places, images, strict=True):
            told += ids[done:place]
            pictures.append(image.placed(len(told), sight))
            told += [sight.token] * image.num_tokens
            done = place + 1
        return told + ids[done:], tuple(pictures)

    def _told(self, request: ChatCompletionRequest, eyes: Eyes | None) -> Iterator[tuple[str, str]]:
        """Yield the place of each image, and its url."""
        count = 0
        for i, message in enumerate(request.messages):
            for j, part in message.images():
                place = f"messages.{i}.content.{j}"
                if eyes is None:
                    raise RequestError(
                        f"`{place}` is an image: this model reads no images.",
                        param=place,
                        code="images_not_supported",
                    )
                if not count and request.truncate_prompt_tokens is not None:
                    raise RequestError(
                        "`truncate_prompt_tokens` cannot cut a prompt with images.",
                        param="truncate_prompt_tokens",
                    )
                count += 1
                if count > eyes.limits.max_per_prompt:
                    raise RequestError(
                        f"`{place}` is one image too many: a request may have"
                        f" {eyes.limits.max_per_prompt} (--limit-mm-per-prompt).",
                        param=place,
                    )
                yield place, part.image_url.url

    def _check_marks(self, count: int, images: Sequence[Seen]) -> None:
        if count < len(images):
            raise RequestError(
                f"The chat template shows the model {count} of the {len(images)} images: pass one"
                " that shows all with --chat-template.",
                param="messages",
                code="chat_template_error",
            )
        if count > len(images):
            raise RequestError(
                "A text among images must not hold the model's own marks of an image.",
                param="messages",
            )


def _looked_at(place: str, url: str, found: Mapping[str, bytes], eyes: Eyes) -> Seen:
    # Here, for most models never see an image: what decodes them would only lengthen their start.
    from engine.images.decoding import ImageRefused
    from engine.images.seeing import see

    data = inline_bytes(url, IMAGE) if is_inline(url) else found.get(url)
    if data is None:
        raise RequestError(f"The image of `{place}` was not fetched.", param=place)
    if len(data) > eyes.limits.max_bytes:
        raise RequestError(f"`{place}` {too_large(IMAGE, eyes.limits.max_bytes)}.", param=place)
    try:
        return see(data, eyes.sight, max_pixels=eyes.limits.max_pixels, budget=eyes.decoding)
    except ImageRefused as exc:
        raise RequestError(f"The image of `{place}` {exc}.", param=place) from exc

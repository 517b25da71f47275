"""Image inputs: fetches and decodes images, and places them at a prompt's placeholders."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.errors import RequestError
from tidemill.protocol.fetched_urls import fetched_urls
from tidemill.protocol.in_flight import MemoryBudget
from tidemill.protocol.parts import IMAGE, has_images
from tidemill.protocol.requests import read_body
from tidemill.protocol.urls import inline_bytes, is_inline, too_large

from ..config import MAX_DECODING_BYTES, ImageLimits
from ..scheduling.images import ImageSpec, PromptImage
from ..text.tokenizer import Tokenizer
from .media_fetch import MediaFetcher

if TYPE_CHECKING:
    from ..media.image_resize import ResizedImage

# Fetched images of one request, in memory until it is prepared.
MAX_BYTES_TOGETHER = 64 * 2**20
# The field of a body that contains fetched images.
FETCHED = "fetched_images"


class FetchedImages(dict[str, bytes]):
    """Images by URL, in a type that JSON cannot represent: a client cannot send it."""


@dataclass(frozen=True, slots=True)
class ImageSupport:
    """A vision model's image settings, limits, fetcher, and memory budget for decoding."""

    image_spec: ImageSpec
    limits: ImageLimits
    fetcher: MediaFetcher
    decoding: MemoryBudget = field(default_factory=lambda: MemoryBudget(MAX_DECODING_BYTES))


class ImageInputs:
    """The images of one model's conversations; without `image_support` images are rejected."""

    def __init__(self, tokenizer: Tokenizer, image_support: ImageSupport | None) -> None:
        self._image_support = image_support
        self._mark = self._spelling = ""
        if image_support is not None:
            added = tokenizer.vocabulary.added
            self._mark = added[image_support.image_spec.mark]
            spelling = image_support.image_spec.spelling
            self._spelling = "".join(
                one if isinstance(one, str) else added[one] for one in spelling
            )

    def fetched(self, body: dict[str, Any]) -> AbstractAsyncContextManager[dict[str, Any]] | None:
        """Return the fetch of a body's images; None for a body without images."""
        if self._image_support is None or not has_images(body):
            return None
        return self._fetched_body(self._image_support, body)

    @asynccontextmanager
    async def _fetched_body(
        self, image_support: ImageSupport, body: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        request = read_body(ChatCompletionRequest, body)
        image_urls = dict(self._image_urls(request, image_support))
        # A URL in another field of the body is not fetched.
        urls = {url: place for place, url in fetched_urls(body).items() if place in image_urls}
        if not urls:
            yield body
            return
        async with image_support.fetcher.fetched(urls, max_bytes=MAX_BYTES_TOGETHER) as images:
            yield body | {FETCHED: FetchedImages(images)}

    def decode(self, request: ChatCompletionRequest, body: Mapping[str, Any]) -> list[ResizedImage]:
        """Return a request's images, decoded and resized for the model, in their order.

        Raises `RequestError` for an invalid image, and for any image if the model does not support
        images.
        """
        fetched = body.get(FETCHED)
        images_by_url: Mapping[str, bytes] = fetched if isinstance(fetched, FetchedImages) else {}
        by_url: dict[str, ResizedImage] = {}
        images = []
        for place, url in self._image_urls(request, self._image_support):
            assert self._image_support is not None
            if url not in by_url:
                by_url[url] = _decoded(place, url, images_by_url, self._image_support)
            images.append(by_url[url])
        return images

    def expand_marks(self, prompt: str, images: Sequence[ResizedImage]) -> str:
        """Return a prompt's text with each image mark expanded to a placeholder."""
        if not images:
            return prompt
        self._check_marks(prompt.count(self._mark), images)
        return prompt.replace(self._mark, self._spelling)

    def place(
        self, ids: list[int], images: Sequence[ResizedImage]
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return a prompt's tokens with each image's placeholder tokens, and the placed images."""
        if not images or self._image_support is None:
            return ids, ()
        image_spec = self._image_support.image_spec
        places = [place for place, token in enumerate(ids) if token == image_spec.token]
        self._check_marks(len(places), images)
        expanded: list[int] = []
        prompt_images = []
        done = 0
        for place, image in zip(places, images, strict=True):
            expanded += ids[done:place]
            prompt_images.append(image.at(len(expanded), image_spec))
            expanded += image_spec.placeholders(image.rows, image.columns)
            done = place + 1
        return expanded + ids[done:], tuple(prompt_images)

    def _image_urls(
        self, request: ChatCompletionRequest, image_support: ImageSupport | None
    ) -> Iterator[tuple[str, str]]:
        """Yield the place of each image, and its URL."""
        count = 0
        for i, message in enumerate(request.messages):
            for j, part in message.images():
                place = f"messages.{i}.content.{j}"
                if image_support is None:
                    raise RequestError(
                        f"`{place}` is an image: this model does not support images.",
                        param=place,
                        code="images_not_supported",
                    )
                if not count and request.truncate_prompt_tokens is not None:
                    raise RequestError(
                        "`truncate_prompt_tokens` does not support prompts with images.",
                        param="truncate_prompt_tokens",
                    )
                count += 1
                if count > image_support.limits.max_per_prompt:
                    raise RequestError(
                        f"`{place}` exceeds the maximum number of images per request,"
                        f" {image_support.limits.max_per_prompt} (--limit-mm-per-prompt).",
                        param=place,
                    )
                yield place, part.image_url.url

    def _check_marks(self, count: int, images: Sequence[ResizedImage]) -> None:
        if count < len(images):
            raise RequestError(
                f"The chat template renders {count} of the {len(images)} images: pass one that"
                " renders all of them with --chat-template.",
                param="messages",
                code="chat_template_error",
            )
        if count > len(images):
            raise RequestError(
                "A message with images must not contain the model's image marks in its text.",
                param="messages",
            )


def _decoded(
    place: str, url: str, images_by_url: Mapping[str, bytes], image_support: ImageSupport
) -> ResizedImage:
    # Imported here: most models never decode images, and start faster without Pillow.
    from ..media.image_decoding import ImageRefused
    from ..media.image_resize import decode_and_resize

    data = inline_bytes(url, IMAGE) if is_inline(url) else images_by_url.get(url)
    if data is None:
        raise RequestError(f"The image of `{place}` was not fetched.", param=place)
    if len(data) > image_support.limits.max_bytes:
        raise RequestError(
            f"`{place}` {too_large(IMAGE, image_support.limits.max_bytes)}.", param=place
        )
    try:
        return decode_and_resize(
            data,
            image_support.image_spec,
            max_pixels=image_support.limits.max_pixels,
            budget=image_support.decoding,
        )
    except ImageRefused as exc:
        raise RequestError(f"The image of `{place}` {exc}.", param=place) from exc

"""Image inputs: fetches and decodes images, and places them at a prompt's placeholders.

Recordings are inputs of the same form, for models that hear instead of see.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from pydantic import BaseModel

from tidemill.protocol.errors import RequestError
from tidemill.protocol.fetched_urls import fetched_urls
from tidemill.protocol.in_flight import MemoryBudget
from tidemill.protocol.messages import Message
from tidemill.protocol.page_ranges import page_ranges
from tidemill.protocol.parts import (
    DOCUMENT,
    IMAGE,
    RECORDING,
    AudioPart,
    FilePart,
    InputAudioPart,
    PlacedImage,
)
from tidemill.protocol.requests import read_body
from tidemill.protocol.urls import inline_bytes, inline_head, is_inline, too_large

from ..config import MAX_DECODING_BYTES, ImageLimits
from ..scheduling.images import ImageForm, ImageSpec, PromptImage
from ..scheduling.prompt_audio import AudioSpec
from ..text.tokenizer import Tokenizer
from .media_fetch import MediaFetcher, in_thread

if TYPE_CHECKING:
    from ..media.image_resize import ResizedImage
    from ..media.recording_features import PreparedRecording

    PreparedImage = ResizedImage | PreparedRecording

# Fetched images of one request, in memory until it is prepared.
MAX_BYTES_TOGETHER = 64 * 2**20
# Pages of a document that `pages` selects from.
MAX_PAGES = 10_000
_HEAD_BYTES = 64
# The field of a body that contains fetched images.
FETCHED = "fetched_images"

_RequestT = TypeVar("_RequestT", bound=BaseModel)


class FetchedImages(dict[str, bytes]):
    """Images by URL and their request, in a type without a JSON form: no client can send it."""

    def __init__(self, images: Mapping[str, bytes], request: BaseModel) -> None:
        super().__init__(images)
        self.request = request


def request_with_images(kind: type[_RequestT], body: Mapping[str, Any]) -> _RequestT:
    """Return a body as a request; the fetch of its images has parsed it already."""
    fetched = body.get(FETCHED)
    request = fetched.request if isinstance(fetched, FetchedImages) else None
    return request if isinstance(request, kind) else read_body(kind, body)


def placed_in(messages: Sequence[Message]) -> list[PlacedImage]:
    """Return the images, documents and recordings of a conversation."""
    return [
        PlacedImage(
            f"messages.{i}.content.{j}",
            part.url,
            part.pages,
            isinstance(part, FilePart),
            isinstance(part, AudioPart | InputAudioPart),
        )
        for i, message in enumerate(messages)
        for j, part in message.media()
    ]


@dataclass(frozen=True, slots=True)
class ImageSupport:
    """A multimodal model's image settings, limits, fetcher, and memory budget for decoding.

    `image_spec` is that of recordings for a model that hears.
    """

    image_spec: ImageSpec | ImageForm | AudioSpec
    limits: ImageLimits
    fetcher: MediaFetcher
    decoding: MemoryBudget = field(default_factory=lambda: MemoryBudget(MAX_DECODING_BYTES))

    @property
    def max_per_prompt(self) -> int:
        """Return the limit of images, or of recordings, per prompt."""
        hears = isinstance(self.image_spec, AudioSpec)
        return self.limits.max_recordings if hears else self.limits.max_per_prompt


class ShownImage(NamedTuple):
    """An image of a prompt: its place in the body, its URL, and its page there, from 0."""

    place: str
    url: str
    page: int = 0
    is_recording: bool = False


DecodedImages = dict[tuple[str, int], "PreparedImage"]
"""Decoded images by URL and page."""


class ImageReader:
    """Fetches and decodes the images of bodies; without `image_support` images are rejected."""

    def __init__(self, image_support: ImageSupport | None) -> None:
        self._image_support = image_support
        self._nouns = "images"
        if image_support is not None and isinstance(image_support.image_spec, AudioSpec):
            self._nouns = "recordings"

    def fetched(
        self,
        body: dict[str, Any],
        kind: type[_RequestT],
        images_of: Callable[[_RequestT], Sequence[PlacedImage]],
    ) -> AbstractAsyncContextManager[dict[str, Any]] | None:
        """Return the fetch of the images of a body that has any; None for a blind model."""
        if self._image_support is None:
            return None
        return self._fetched_body(self._image_support, body, kind, images_of)

    @asynccontextmanager
    async def _fetched_body(
        self,
        image_support: ImageSupport,
        body: dict[str, Any],
        kind: type[_RequestT],
        images_of: Callable[[_RequestT], Sequence[PlacedImage]],
    ) -> AsyncIterator[dict[str, Any]]:
        request, urls = await in_thread(self._read, body, kind, images_of)
        if not urls:
            yield body | {FETCHED: FetchedImages({}, request)}
            return
        async with image_support.fetcher.fetched(urls, max_bytes=MAX_BYTES_TOGETHER) as images:
            yield body | {FETCHED: FetchedImages(images, request)}

    def _read(
        self,
        body: dict[str, Any],
        kind: type[_RequestT],
        images_of: Callable[[_RequestT], Sequence[PlacedImage]],
    ) -> tuple[_RequestT, dict[str, str]]:
        """Return the request of a body, and the places of the URLs to fetch."""
        request = read_body(kind, body)
        images = images_of(request)
        self._check(images)
        places = {image.place for image in images}
        # A URL in another field of the body is not fetched.
        urls = {url: place for place, url in fetched_urls(body).items() if place in places}
        return request, urls

    def shown(
        self, images: Sequence[PlacedImage], body: Mapping[str, Any]
    ) -> list[list[ShownImage]]:
        """Return the images that each image or document of a prompt is: its selected pages.

        Raises `RequestError` for an invalid document, pages that it does not have, and too many.
        """
        self._check(images)
        shown, total = [], 0
        for image in images:
            pages: Sequence[int] = (0,)
            if self._image_support is not None and not image.is_recording:
                most = self._image_support.limits.max_per_prompt
                pages = _selected(image, self._document(image, body), most - total)
                total += len(pages)
                if total > most:
                    hint = " Select fewer pages with `pages`." if image.is_document else ""
                    self._refuse_more(image.place, most, hint)
            parts = (image.place, image.url)
            shown.append([ShownImage(*parts, page, image.is_recording) for page in pages])
        return shown

    def decode(
        self,
        images: Sequence[ShownImage],
        body: Mapping[str, Any],
        decoded: DecodedImages | None = None,
    ) -> list[PreparedImage]:
        """Return a prompt's images, decoded and resized for the model, in their order.

        `decoded` has the images that other prompts of the body need, too. Raises `RequestError` for
        an invalid image, and for any image if the model does not support images.
        """
        results: DecodedImages = {} if decoded is None else decoded
        self._check(images)
        for image in images:
            assert self._image_support is not None
            if image[1:3] not in results:
                data = self._data_of(image, body)
                results[image[1:3]] = _decoded(image, data, self._image_support)
        return [results[image[1:3]] for image in images]

    def _document(self, image: PlacedImage, body: Mapping[str, Any]) -> bytes | None:
        """Return the bytes of an image that may have pages, None for any other."""
        # Imported here and below: most models never decode images, and start faster without Pillow.
        from ..media.image_decoding import may_have_pages

        if is_inline(image.url):  # most are decoded once
            head = inline_head(image.url)
            if len(head) >= _HEAD_BYTES and not may_have_pages(head):
                return None
        data = self._data_of(image, body)
        return data if may_have_pages(data[:_HEAD_BYTES]) else None

    def _data_of(self, image: PlacedImage | ShownImage, body: Mapping[str, Any]) -> bytes:
        """Return the bytes of a fetched or inline image; raises `RequestError`."""
        assert self._image_support is not None
        fetched, place = body.get(FETCHED), image.place
        what = RECORDING if image.is_recording else IMAGE
        if is_inline(image.url):
            data = inline_bytes(image.url, what)
        else:
            data = fetched.get(image.url) if isinstance(fetched, FetchedImages) else None
        if data is None:
            raise RequestError(f"The {_noun(image)} of `{place}` was not fetched.", param=place)
        max_bytes = self._image_support.limits.max_bytes
        if len(data) > max_bytes:
            raise RequestError(f"`{place}` {too_large(what, max_bytes)}.", param=place)
        return data

    def _check(self, images: Sequence[PlacedImage | ShownImage]) -> None:
        """Refuse images for a model that does not see, recordings likewise, and too many."""
        support = self._image_support
        hears = support is not None and isinstance(support.image_spec, AudioSpec)
        for image in images:
            if support is None or image.is_recording != hears:
                noun = _noun(image)
                given = RECORDING if image.is_recording else IMAGE
                if isinstance(image, PlacedImage) and image.is_document:
                    given = f"{DOCUMENT}, which is shown as images"
                raise RequestError(
                    f"`{image.place}` is {given}: this model does not support {noun}s.",
                    param=image.place,
                    code=f"{noun}s_not_supported",
                )
        if support is not None and len(images) > support.max_per_prompt:
            self._refuse_more(images[support.max_per_prompt].place, support.max_per_prompt)

    def _refuse_more(self, place: str, most: int, hint: str = "") -> NoReturn:
        raise RequestError(
            f"`{place}` exceeds the maximum number of {self._nouns} per request,"
            f" {most} (--limit-mm-per-prompt).{hint}",
            param=place,
        )


class ImageInputs(ImageReader):
    """The images of one model's prompts; without `image_support` images are rejected."""

    def __init__(self, tokenizer: Tokenizer, image_support: ImageSupport | None) -> None:
        super().__init__(image_support)
        self._image_spec: ImageSpec | AudioSpec | None = None
        self._mark = self._spelling = ""
        if image_support is not None:
            image_spec, added = image_support.image_spec, tokenizer.vocabulary.added
            assert not isinstance(image_spec, ImageForm), "a model of text has marks of images"
            self._image_spec = image_spec
            self._mark = added[image_spec.mark]
            self._spelling = "".join(
                one if isinstance(one, str) else added[one] for one in image_spec.spelling
            )

    def expand_marks(
        self, prompt: str, images: Sequence[PreparedImage], param: str = "messages"
    ) -> str:
        """Return a prompt's text with each image mark expanded to a placeholder."""
        if not images:
            return prompt
        self._check_marks(prompt.count(self._mark), images, param)
        return prompt.replace(self._mark, self._spelling)

    def place(
        self, ids: list[int], images: Sequence[PreparedImage], param: str = "messages"
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return a prompt's tokens with each image's placeholder tokens, and the placed images."""
        image_spec = self._image_spec
        if not images or image_spec is None:
            return ids, ()
        places = [place for place, token in enumerate(ids) if token == image_spec.token]
        self._check_marks(len(places), images, param)
        expanded: list[int] = []
        prompt_images = []
        done = 0
        for place, image in zip(places, images, strict=True):
            expanded += ids[done:place]
            parts = (image.pixels, image.digest, len(expanded), image.rows, image.columns)
            prompt_images.append(image_spec.prompt_image(*parts))
            expanded += image_spec.placeholders(image.rows, image.columns)
            done = place + 1
        return expanded + ids[done:], tuple(prompt_images)

    def _check_marks(self, count: int, images: Sequence[PreparedImage], param: str) -> None:
        if count < len(images):
            raise RequestError(
                f"The chat template renders {count} of the {len(images)} {self._nouns}: pass one"
                " that renders all of them with --chat-template.",
                param=param,
                code="chat_template_error",
            )
        if count > len(images):
            raise RequestError(
                f"A message with {self._nouns} must not contain the model's {self._nouns[:-1]}"
                " marks in its text.",
                param=param,
            )


def _selected(image: PlacedImage, document: bytes | None, most: int) -> Sequence[int]:
    """Return the selected pages of an image or a document, from 0; raises `RequestError`.

    They are at most `most` + 1.
    """
    from ..media.image_decoding import count_images
    from ..media.image_headers import ImageRefused

    limit = most if image.pages is None else MAX_PAGES
    try:
        count = 1 if document is None else count_images(document, limit)
    except ImageRefused as exc:
        raise RequestError(f"The image of `{image.place}` {exc}.", param=image.place) from exc
    if image.pages is None:
        return range(count)
    selected = [*page_ranges(image.pages)]
    for pages in selected:
        if pages[-1] > count:
            raise RequestError(
                f"The document of `{image.place}` has {count} pages: page"
                f" {max(pages[0], count + 1)} does not exist.",
                param=image.place,
            )
    return [page - 1 for page in islice(chain.from_iterable(selected), most + 1)]


def _noun(image: PlacedImage | ShownImage) -> str:
    return "recording" if image.is_recording else "image"


def _decoded(image: ShownImage, data: bytes, image_support: ImageSupport) -> PreparedImage:
    image_spec = image_support.image_spec
    if isinstance(image_spec, AudioSpec):
        from ..media.recording_features import decode_recording

        return decode_recording(data, image_spec, place=image.place, budget=image_support.decoding)
    from ..media.image_headers import ImageRefused
    from ..media.image_resize import decode_and_resize

    try:
        return decode_and_resize(
            data,
            image_spec,
            max_pixels=image_support.limits.max_pixels,
            budget=image_support.decoding,
            page=image.page,
        )
    except ImageRefused as exc:
        raise RequestError(f"The image of `{image.place}` {exc}.", param=image.place) from exc

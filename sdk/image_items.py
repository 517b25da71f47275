"""Items of images: the answer to each image of a list, from a request for each."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

from tidemill.protocol.validation import short_repr

from .errors import RequestFailed
from .progress import progress_of

_URLS = ("http://", "https://", "s3://", "data:")
_PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")


class PillowImage(Protocol):
    """An image of Pillow."""

    @property
    def mode(self) -> str:
        """Return the kind of its pixels."""

    def convert(self, mode: str, /) -> PillowImage:
        """Return a copy with pixels of another kind."""

    def save(self, fp: Any, format: str) -> None:
        """Write it to a file in a format."""


Image = str | bytes | Path | PillowImage
"""A URL, a path, the bytes of a file, or an image of Pillow."""


def items_of_images(
    answer_many: Callable[..., Iterable[Any]],
    images: Iterable[Image],
    url: str,
    params: Mapping[str, Any],
    *,
    progress: bool,
) -> Iterator[dict[str, Any]]:
    """Yield the item of each image; raises RequestFailed, and OSError for an unreadable file."""
    is_one = isinstance(images, (str, bytes, bytearray, Path)) or hasattr(images, "save")
    if is_one or isinstance(images, Mapping) or not isinstance(images, Iterable):
        raise TypeError(f"`images` must be a list of images; got {short_repr(images)}")
    some = [*images]
    with progress_of("images", len(some), is_wanted=progress) as shown:
        bodies = ({**params, "messages": _messages(image)} for image in some)
        for answer in answer_many(bodies, url=url, progress=False):
            if isinstance(answer, RequestFailed):
                raise answer
            yield answer["data"][0]
            shown.add(1)


def _messages(image: Image) -> list[dict[str, Any]]:
    part = {"type": "image_url", "image_url": {"url": _url_of(image)}}
    return [{"role": "user", "content": [part]}]


def _url_of(image: Image) -> str:
    """Return the URL of an image; that of a file contains its bytes."""
    if isinstance(image, str) and image.lower().startswith(_URLS):
        return image
    if isinstance(image, (str, Path)):
        data = Path(image).read_bytes()
    elif isinstance(image, bytes):
        data = image
    elif hasattr(image, "save"):
        buffer = BytesIO()
        (image if image.mode in _PNG_MODES else image.convert("RGB")).save(buffer, "PNG")
        data = buffer.getvalue()
    else:
        raise TypeError(f"an image must be a URL, a path or bytes; got {short_repr(image)}")
    return f"data:image/*;base64,{b64encode(data).decode('ascii')}"

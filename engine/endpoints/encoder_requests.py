"""Encoder requests: texts and pairs of texts, tokenized for embedding models and rerankers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

from tidemill.protocol.embeddings import InputRequest, PoolingRequest
from tidemill.protocol.errors import RequestError
from tidemill.protocol.messages import Message, has_media
from tidemill.protocol.parts import PlacedImage
from tidemill.protocol.prompts import Prompt
from tidemill.protocol.scoring import ScoringRequest
from tidemill.protocol.validation import short_repr

from ..model.encoders.pooling_config import PoolingConfig
from ..model.encoders.two_towers import TextForm
from ..scheduling.encoding import EncodingImage, EncodingRequest
from ..text.chat_template import ChatTemplate
from ..text.text_tokens import TextTokens, TokenLocator
from ..text.truncation import TruncatingTokenizer, Truncation
from .image_inputs import ImageReader, ImageSupport, placed_in
from .request_bounds import check_pair_chars
from .text_draft import TextDraft

QUERY, DOCUMENT = "query", "document"
"""Names of the prompts of ColBERT, which reads both kinds of texts in different ways."""

_MAX_NAMES_SHOWN = 20


def image_bytes(requests: Sequence[EncodingRequest]) -> int:
    """Return the size of the images of requests, as they wait for the engine."""
    return sum(request.image.pixels.nbytes for request in requests if request.image is not None)


def _placed_images(request: InputRequest) -> list[PlacedImage]:
    """Return the images and documents of a request's conversation."""
    return placed_in(request.messages or ())


@dataclass(frozen=True, slots=True)
class EncoderModel:
    """An embedding model or reranker, as the endpoints see it.

    `template` renders conversations, and pairs for a reranker that `reads_pairs_by_template`.
    `max_model_len` counts all tokens of a sequence, including special ones. Ids are below
    `vocab_size`. `width` is the number of dimensions of a vector. With `has_types` the segments of
    a pair have different types. `truncate_prompt_tokens` is the default for requests without one.
    `special_tokens` are the texts and ids of special tokens by their names, such as cls_token. The
    `locator` is that of a token classifier. Tokens of documents with `skipped_ids` have no vector.
    A model of two towers supports `images`, each of which counts as `num_image_tokens`, and reads
    texts in a `text_form`, padded with `padding_id`. Short queries of ColBERT are padded with
    `query_padding_id`, if the model does that.
    """

    reader: TruncatingTokenizer
    template: ChatTemplate | None
    reads_pairs_by_template: bool
    max_model_len: int
    vocab_size: int
    width: int
    has_types: bool
    description: PoolingConfig
    truncate_prompt_tokens: int | None = None
    special_tokens: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    locator: TokenLocator | None = None
    skipped_ids: frozenset[int] = frozenset()
    images: ImageSupport | None = None
    num_image_tokens: int = 0
    text_form: TextForm | None = None
    padding_id: int = 0
    query_padding_id: int | None = None


class EncodingRequestBuilder:
    """Builds the encoder requests of one model."""

    def __init__(self, model: EncoderModel) -> None:
        self._model = model
        self._reader = model.reader
        self.images = ImageReader(model.images)
        mode = model.description.multi_vector
        length = None if mode is None else mode.query_length
        self._query_length = length and min(length, model.max_model_len)
        self._expansion = None if mode is None else mode.expansion

    def from_prompts(
        self,
        prompts: Sequence[Prompt],
        request: PoolingRequest,
        *,
        param: str,
        add_special_tokens: bool = True,
        prefix: str = "",
        limit: int | None = None,
        is_query: bool = False,
    ) -> TextDraft[list[EncodingRequest]]:
        """Draft a sequence for each list of token ids or text; `prefix` is put before each text.

        Each text is truncated to `limit` tokens; 0 and None mean no limit. With `is_query` they are
        queries of ColBERT. Raises `RequestError` naming `param` for input that the model cannot
        process, some of it once it is tokenized.
        """
        cut, reader = self._truncation(request), self._reader
        if is_query and self._expansion is not None and self._model.query_padding_id is None:
            raise RequestError(
                "This model pads its queries, which is not supported for causal networks: send "
                "only documents, or use a model with a bidirectional network.",
                param=param,
            )
        most = self._query_length if is_query else None
        if most is not None and cut.max_tokens is not None:
            cut = replace(cut, max_tokens=min(most, cut.max_tokens))
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if limit:
            texts = [reader.truncated_text(text, limit) for text in texts]
        texts = [prefix + text for text in texts]
        parts = reader.relevant_parts(texts, cut)

        def complete(encodings: list[Any]) -> list[EncodingRequest]:
            num_skipped = 0
            if texts:
                read = reader.truncated_ids(
                    parts, encodings, cut, add_special_tokens=add_special_tokens
                )
                num_skipped = self._num_skipped(prefix, add_special_tokens=add_special_tokens)
            else:
                read = [_shortened(ids, cut) for ids in prompts if isinstance(ids, list)]
                self._check_ids(read, param)
            self._check_lengths(read, request, param, texts, most)
            if is_query:
                return [self._padded(ids) for ids in read]
            if (form := self._model.text_form) is not None:
                read = [form.read(ids, self._model.padding_id) for ids in read]
            return [EncodingRequest(ids, num_skipped=num_skipped) for ids in read]

        return TextDraft(reader, parts, add_special_tokens, complete)

    def fetched(
        self, body: dict[str, Any], kind: type[InputRequest]
    ) -> AbstractAsyncContextManager[dict[str, Any]] | None:
        """Return the fetch of a conversation's images; None for a body without images."""
        return self.images.fetched(body, kind, _placed_images) if has_media(body) else None

    def from_images(
        self, images: Sequence[PlacedImage], body: Mapping[str, Any]
    ) -> list[list[EncodingRequest]]:
        """Return the sequences of each image or document, one for each selected page.

        `body` contains the fetched images. Raises `RequestError` for an invalid image, and for any
        image if the model does not support images.
        """
        shown = self.images.shown(images, body)
        decoded = iter(self.images.decode([*chain.from_iterable(shown)], body))
        blank = [0] * self._model.num_image_tokens
        return [
            [
                EncodingRequest(blank, output="image", image=EncodingImage(one.pixels, one.digest))
                for one in islice(decoded, len(pages))
            ]
            for pages in shown
        ]

    def from_located_texts(
        self, texts: Sequence[str], request: PoolingRequest, *, add_special_tokens: bool
    ) -> TextDraft[list[tuple[EncodingRequest, TextTokens]]]:
        """Draft the sequence of each text of `input`, and where its tokens are in the text."""
        cut, reader, locator = self._truncation(request), self._reader, self._model.locator
        assert locator is not None, "the model is a token classifier"
        parts = reader.relevant_parts(texts, cut)

        def complete(encodings: list[Any]) -> list[tuple[EncodingRequest, TextTokens]]:
            read = reader.truncated(parts, encodings, cut, add_special_tokens=add_special_tokens)
            self._check_lengths([encoding.ids for encoding in read], request, "input", parts)
            return [
                (
                    EncodingRequest(encoding.ids),
                    # A part that is truncated on the left is the end of its text.
                    locator.locate(
                        encoding, text, len(text) - len(part) if cut.side == "left" else 0
                    ),
                )
                for encoding, text, part in zip(read, texts, parts, strict=True)
            ]

        return TextDraft(reader, parts, add_special_tokens, complete)

    def from_conversation(
        self, request: InputRequest, body: Mapping[str, Any], *, created: int
    ) -> TextDraft[list[EncodingRequest]]:
        """Draft the sequence of `messages`, rendered by the chat template.

        Templates write the opening special tokens themselves, so none are added by default. A model
        of two towers needs no template: it reads the texts, or one image, which `body` contains.
        """
        messages = request.messages or []
        if images := placed_in(messages):
            sequences = self._only_image(messages, images, body)
            return TextDraft(
                self._reader, (), add_special_tokens=False, complete=lambda _: sequences
            )
        if self._model.images is not None and self._model.template is None:
            text = "\n".join(text for message in messages for text in message.texts())
            if not text:
                raise RequestError("`messages` must contain text or an image.", param="messages")
            return self.from_prompts(
                [text],
                request,
                param="messages",
                add_special_tokens=request.add_special_tokens is not False,
            )
        text = self.render(
            messages,
            created=created,
            add_generation_prompt=bool(request.add_generation_prompt),
            continue_final_message=bool(request.continue_final_message),
            variables=request.chat_template_kwargs,
        )
        return self.from_prompts(
            [text],
            request,
            param="messages",
            add_special_tokens=bool(request.add_special_tokens),
        )

    def from_pairs(
        self,
        firsts: Sequence[str],
        seconds: Sequence[str],
        request: PoolingRequest,
        *,
        param: str,
        created: int,
    ) -> TextDraft[list[EncodingRequest]]:
        """Draft a sequence for each of `seconds`, after its first text or the only one.

        Raises `RequestError` naming `param` for input that the model cannot process.
        """
        check_pair_chars(firsts, seconds, param)
        if self._model.reads_pairs_by_template:
            read = self._template_pairs(firsts, seconds, request, created)
            self._check_lengths(read, request, param, seconds)
            requests = [EncodingRequest(ids) for ids in read]
            return TextDraft(
                self._reader, (), add_special_tokens=False, complete=lambda _: requests
            )
        for name in ("instruction", "chat_template_kwargs"):
            if getattr(request, name, None) is not None:
                raise RequestError(
                    f"`{name}` requires a chat template, and this model has none for pairs: "
                    "pass `--chat-template`.",
                    param=name,
                )
        cut, reader = self._truncation(request), self._reader

        def complete(encodings: list[Any]) -> list[EncodingRequest]:
            pairs = reader.joined_pairs(len(firsts), encodings, cut)
            self._check_lengths([pair.ids for pair in pairs], request, param, seconds)
            has_types = self._model.has_types
            return [
                EncodingRequest(pair.ids, pair.type_ids if has_types else None) for pair in pairs
            ]

        texts = reader.relevant_parts([*firsts, *seconds], cut)
        return TextDraft(reader, texts, add_special_tokens=False, complete=complete)

    def render(self, messages: Sequence[Message], *, created: int, **options: Any) -> str:
        """Render a conversation; raises `RequestError` if the model has no template."""
        if self._model.template is None:
            raise RequestError(
                "This model has no chat template: send `input`, or pass `--chat-template`.",
                param="messages",
            )
        return self._model.template.render(messages, created=created, **options)

    def _only_image(
        self, messages: Sequence[Message], images: Sequence[PlacedImage], body: Mapping[str, Any]
    ) -> list[EncodingRequest]:
        """Return the sequence of a conversation that is one image."""
        has_text = any(text.strip() for message in messages for text in message.texts())
        sequences = [*chain.from_iterable(self.from_images(images, body))]
        if has_text or len(sequences) > 1:
            raise RequestError(
                "`messages` must contain either text or one image: this model computes separate "
                f"vectors for texts and images, and these have {len(sequences)} "
                f"{'image' if len(sequences) == 1 else 'images'}"
                f"{' and text' if has_text else ''}. Send one request for each.",
                param="messages",
            )
        return sequences

    def prompt_named(self, name: str | None) -> str:
        """Return the prompt with this name, or the model's default prompt for None."""
        description = self._model.description
        if name is None:
            default = description.default_prompt_name
            return "" if default is None else description.prompts[default]
        if name not in description.prompts:
            names = ", ".join(sorted(description.prompts)[:_MAX_NAMES_SHOWN])
            raise RequestError(
                f"Unknown `prompt_name` {short_repr(name)}; this model has "
                f"{names or 'no prompts'}.",
                param="prompt_name",
            )
        return description.prompts[name]

    def _padded(self, token_ids: list[int]) -> EncodingRequest:
        """Return the sequence of a query, which some models pad."""
        expansion, padding_id = self._expansion, self._model.query_padding_id
        if expansion is None or padding_id is None:
            return EncodingRequest(token_ids)
        num_added = max(0, expansion.length - len(token_ids))
        return EncodingRequest(
            token_ids + [padding_id] * num_added,
            num_unseen=0 if expansion.is_attended else num_added,
        )

    def _num_skipped(self, prefix: str, *, add_special_tokens: bool) -> int:
        """Return the number of tokens, up to the prompt's end, that are excluded from pooling."""
        pooling = self._model.description.pooling
        if not prefix or pooling is None or pooling.include_prompt:
            return 0
        return self._reader.num_prefix_tokens(prefix, add_special_tokens=add_special_tokens)

    def _template_pairs(
        self, firsts: Sequence[str], seconds: Sequence[str], request: PoolingRequest, created: int
    ) -> list[list[int]]:
        cut = self._truncation(request)
        heads = list(firsts) * (len(seconds) if len(firsts) == 1 else 1)
        named = request.instruction if isinstance(request, ScoringRequest) else None
        instruction = {} if named is None else {"instruction": named}
        variables = {
            "add_generation_prompt": False,
            **self._model.description.template_variables,
            **instruction,
            **(request.chat_template_kwargs or {}),
        }
        opens = bool(variables.pop("add_generation_prompt"))

        def text_of(first: str, second: str) -> str:
            pair = [Message(role="query", content=first), Message(role="document", content=second)]
            return self.render(
                pair, created=created, add_generation_prompt=opens, variables=variables
            )

        return [
            self._template_pair(first, second, cut, text_of)
            for first, second in zip(heads, seconds, strict=True)
        ]

    def _template_pair(
        self, first: str, second: str, cut: Truncation, text_of: Callable[[str, str], str]
    ) -> list[int]:
        """Return a pair rendered by the template, its second text truncated until the pair fits."""
        if cut.max_first:
            first = self._reader.truncated_text(first, cut.max_first)
        if cut.max_second:
            second = self._reader.truncated_text(second, cut.max_second)
        while True:
            [ids] = self._reader.encode([text_of(first, second)], Truncation())
            excess = 0 if cut.max_tokens is None else len(ids) - cut.max_tokens
            if excess <= 0:
                return ids
            num_left = self._reader.count_tokens(second) - excess
            if num_left < 1:
                raise RequestError(
                    "`truncate_prompt_tokens` is too small: no token of the document remains.",
                    param="truncate_prompt_tokens",
                )
            second = self._reader.truncated_text(second, num_left)

    def _truncation(self, request: PoolingRequest) -> Truncation:
        max_tokens, limit = request.truncate_prompt_tokens, self._model.max_model_len
        if max_tokens is None and request.is_cut_by_default:
            max_tokens = self._model.truncate_prompt_tokens
        if max_tokens is not None and max_tokens > limit:
            raise RequestError(
                f"`truncate_prompt_tokens` ({max_tokens}) must be at most {limit}, this model's "
                "maximum context length; use -1 for that length.",
                param="truncate_prompt_tokens",
            )
        cut = Truncation(
            max_tokens=limit if max_tokens == -1 else max_tokens,
            side=request.truncation_side or "right",
            is_longest_first=not isinstance(request, ScoringRequest),
        )
        if not isinstance(request, ScoringRequest):
            return cut
        first, second = (
            min(tokens, limit) if tokens else None
            for tokens in (request.max_tokens_per_query, request.max_tokens_per_doc)
        )
        return replace(cut, max_first=first, max_second=second)

    def _check_lengths(
        self,
        read: Sequence[list[int]],
        request: PoolingRequest,
        param: str,
        texts: Sequence[str],
        most: int | None = None,
    ) -> None:
        """Reject inputs above the context length, or above `most` tokens.

        `texts` are the texts of `read`, if any.
        """
        limit = most or self._model.max_model_len
        what = "maximum context length is" if most is None else "queries have at most"
        for number, ids in enumerate(read, 1):
            if len(ids) > limit:
                which = f"text {number} of `{param}`" if len(read) > 1 else f"`{param}`"
                is_part = bool(texts) and len(texts[number - 1]) > self._reader.max_chars
                raise RequestError(
                    f"This model's {what} {limit} tokens. However, {which} has "
                    f"{'at least ' if is_part else ''}{len(ids)} tokens. To truncate it, "
                    f"{request.how_to_truncate}.",
                    param=param,
                    code="context_length_exceeded",
                )
            if not ids:
                raise RequestError(f"`{param}` has no tokens.", param=param)

    def _check_ids(self, read: Sequence[list[int]], param: str) -> None:
        size = self._model.vocab_size
        for ids in read:
            for token_id in (min(ids), max(ids)):
                if not 0 <= token_id < size:
                    raise RequestError(
                        f"`{param}` contains token ID {token_id}; token IDs of this model must be "
                        f"between 0 and {size - 1}.",
                        param=param,
                    )


def _shortened(ids: list[int], cut: Truncation) -> list[int]:
    if cut.max_tokens is None:
        return ids
    return ids[-cut.max_tokens :] if cut.side == "left" else ids[: cut.max_tokens]

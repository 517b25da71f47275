"""`/v1/chat/completions`: a conversation in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from itertools import chain
from typing import Any

from tidemill.protocol.bodies import completion_body, response_id
from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.contract import Reply, Usage
from tidemill.protocol.errors import RequestError
from tidemill.protocol.messages import has_media
from tidemill.protocol.parts import PlacedImage
from tidemill.protocol.requests import read_body
from tidemill.protocol.routes import CHAT_COMPLETIONS
from tidemill.protocol.stream import StreamOptions

from ..parsers.parsed_output import ParsedMessage
from ..parsers.registry import ParserSet
from ..scheduling.images import PromptImage
from ..scheduling.sequence import SequenceRequest, SequenceResult
from ..scheduling.token_logprobs import NO_LOGPROBS
from ..text.text_model import TextModel
from .chat_messages import choice_body, count_reasoning_tokens, parse_choice
from .chat_preprocessor import ChatPreprocessor, Conversation
from .choices import (
    FinishedChoice,
    choices_by_prompt,
    usage_of,
    verification_field,
)
from .confidence import AnswersConfidence, ScoredAnswer, ScoredCall
from .endpoint import Prepared, RequestMetadata, ResponseStream
from .generation_requests import EndpointOptions, SequenceRequestBuilder
from .image_inputs import (
    FETCHED,
    ImageInputs,
    ImageSupport,
    placed_in,
    request_with_images,
)
from .logprob_bodies import prompt_logprobs
from .streaming import ChatStream, ChoiceStreams, ChunkBuilder

_Prepared = Prepared[SequenceRequest, Conversation]


class ChatCompletions:
    """The chat endpoint of a model; `seed` is the default for requests without one.

    With `verifies`, constrained answers carry a verdict.
    """

    route = CHAT_COMPLETIONS

    def __init__(
        self,
        model: TextModel,
        *,
        seed: int,
        parsers: ParserSet,
        image_support: ImageSupport | None = None,
        verifies: bool = False,
    ) -> None:
        self._tokenizer = model.tokenizer
        self.images = ImageInputs(model.tokenizer, image_support)
        self._preprocessor = ChatPreprocessor(model, parsers)
        self._sequences = SequenceRequestBuilder(model, seed=seed)
        self._verifies = verifies

    def fetched(self, body: dict[str, Any]) -> AbstractAsyncContextManager[dict[str, Any]] | None:
        """Return the fetch of a body's images; None for a body without images."""
        return (
            self.images.fetched(body, ChatCompletionRequest, _placed_images)
            if has_media(body)
            else None
        )

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> _Prepared:
        """Return a sequence for each choice of the conversation's next message."""
        read = request_with_images if FETCHED in body else read_body
        return self.prepare_request(read(ChatCompletionRequest, body), body, metadata)

    def prepare_request(
        self, request: ChatCompletionRequest, body: Mapping[str, Any], metadata: RequestMetadata
    ) -> _Prepared:
        """Return the sequences of a parsed request; `body` contains its fetched images."""
        # A plain chat is not shown to the image inputs.
        shows_images = any(message.media() for message in request.messages)
        shown = self.images.shown(_placed_images(request), body) if shows_images else []
        if any(len(pages) > 1 for pages in shown):
            request = _with_pages(request, [*map(len, shown)])
        conversation = self._preprocessor.preprocess(request, metadata)
        options = _options(conversation)
        if not shows_images:  # image prompts cannot be truncated
            request = self._sequences.with_truncation(request)
        images = self.images.decode([*chain.from_iterable(shown)], body) if shown else []
        prompt = conversation.prompt
        if images:
            prompt = self.images.expand_marks(prompt, images)
        # Templates write the opening special tokens themselves, so none are added by default.
        prompt_ids = self._sequences.tokenize_prompt(
            prompt,
            request,
            options,
            add_special_tokens=bool(request.add_special_tokens),
        )
        prompt_images: tuple[PromptImage, ...] = ()
        if images:
            prompt_ids, prompt_images = self.images.place(prompt_ids, images)
        sequences = self._sequences.build([prompt_ids], request, options, metadata=metadata)
        if prompt_images:
            sequences = [replace(sequence, images=prompt_images) for sequence in sequences]
        num_bytes = sum(prompt_image.pixels.nbytes for prompt_image in prompt_images)
        return Prepared(
            sequences, conversation, metadata, num_bytes, may_follow=bool(request.confidence)
        )

    def finish(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Reply:
        """Return the chat completion with one message for each choice."""
        conversation, metadata = prepared.context, prepared.metadata
        request = conversation.request
        choices, answers = self._choices(prepared, results)
        usage, thought = self._usage(prepared, choices, answers)
        bodies = [
            choice_body(i, choice, answer, conversation, self._tokenizer)
            for i, (choice, answer) in enumerate(zip(choices, answers, strict=True))
        ]
        if request.confidence:
            confidence = self._confidence(prepared, results)
            for body, field in zip(bodies, confidence.fields, strict=True):
                body["confidence"] = field
        answer = completion_body(
            "chat.completion",
            response_id("chatcmpl", metadata.request_id),
            created=metadata.created,
            model=metadata.model,
            choices=bodies,
            usage=metadata.usage_body(usage, thought),
        )
        if request.return_token_ids:
            answer["prompt_token_ids"] = choices[0].prompt_ids
        if request.prompt_logprobs is not None:
            entries = choices[0].result.prompt_logprobs or NO_LOGPROBS
            answer["prompt_logprobs"] = prompt_logprobs(entries, self._tokenizer)
        if self._verifies and request.output_constraint is not None:
            texts = [None if message.calls else message.content for message in answers]
            answer["tidemill"] = verification_field(texts, request.output_constraint)
        return Reply(200, answer, usage)

    def usage(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Usage:
        """Return the tokens of a chat, those of its reasoning included."""
        return self._usage(prepared, *self._choices(prepared, results))[0]

    def _usage(
        self,
        prepared: _Prepared,
        choices: Sequence[FinishedChoice],
        answers: Sequence[ParsedMessage],
    ) -> tuple[Usage, int | None]:
        """Return the tokens of a chat, and of its reasoning; None if that is unknown."""
        thought = count_reasoning_tokens(choices, answers, prepared.context, self._tokenizer)
        return usage_of([choices])._replace(reasoning_tokens=thought or 0), thought

    def follow_up(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> _Prepared | None:
        """Return the chat with the reads that the confidence of its answers needs, if any."""
        return self._confidence(prepared, results).extended()

    def _choices(
        self, prepared: _Prepared, results: Sequence[SequenceResult]
    ) -> tuple[list[FinishedChoice], list[ParsedMessage]]:
        """Return the choices and their messages, without the reads that followed them."""
        conversation = prepared.context
        num_choices = conversation.request.n or 1
        [choices] = choices_by_prompt(
            prepared.requests[:num_choices],
            results[:num_choices],
            conversation.request,
            self._tokenizer,
            markers=conversation.parser.markers,
        )
        return choices, [parse_choice(i, choice, conversation) for i, choice in enumerate(choices)]

    def _confidence(
        self, prepared: _Prepared, results: Sequence[SequenceResult]
    ) -> AnswersConfidence:
        request = prepared.context.request
        tools = request.callable_tools if request.constrains_calls else ()
        schemas = {tool.function.name: tool.arguments_schema() for tool in tools}

        def scored(choice: FinishedChoice, message: ParsedMessage) -> ScoredAnswer:
            if not message.calls:
                return ScoredAnswer(choice, message.content)
            if not schemas:  # a structural tag may have the form of calls
                return ScoredAnswer(choice)
            calls = [
                ScoredCall(call.name, call.arguments, schemas[call.name]) for call in message.calls
            ]
            return ScoredAnswer(choice, calls=calls)

        return AnswersConfidence(
            prepared,
            results,
            [*map(scored, *self._choices(prepared, results))],
            constraint=request.output_constraint,
            tokenizer=self._tokenizer,
            functions=[*schemas],
        )

    def stream(self, prepared: _Prepared, options: StreamOptions) -> ResponseStream:
        """Return the stream of a chat completion."""
        conversation = prepared.context
        choices = ChoiceStreams(
            prepared.requests,
            conversation.request,
            self._tokenizer,
            markers=conversation.parser.markers,
        )
        return ChatStream(
            choices,
            conversation,
            prepared.requests[0].prompt_ids,
            ChunkBuilder("chat.completion.chunk", "chatcmpl", prepared.metadata, options),
            self._tokenizer,
            confidence_of=self._confidence,
        )


def _with_pages(request: ChatCompletionRequest, counts: Sequence[int]) -> ChatCompletionRequest:
    """Return a conversation that the template reads with an image for each page."""
    left = iter(counts)
    messages = [message.repeat_media(left) for message in request.messages]
    return request.model_copy(update={"messages": messages})


def _placed_images(request: ChatCompletionRequest) -> list[PlacedImage]:
    """Return the images, documents and recordings of a conversation."""
    if request.truncate_prompt_tokens is not None:
        raise RequestError(
            "`truncate_prompt_tokens` does not support prompts with images or recordings.",
            param="truncate_prompt_tokens",
        )
    return placed_in(request.messages)


def _options(conversation: Conversation) -> EndpointOptions:
    request = conversation.request
    old_name = request.max_completion_tokens is None
    return EndpointOptions(
        prompt_param="messages",
        max_tokens=request.max_tokens if old_name else request.max_completion_tokens,
        max_tokens_param="max_tokens" if old_name else "max_completion_tokens",
        logprobs=request.num_logprobs,
        logprobs_param="top_logprobs",
        prompt_logprobs=request.prompt_logprobs,
        markers=conversation.parser.markers,
        constraint=conversation.constraint,
        reads_confidence=bool(request.confidence),
    )

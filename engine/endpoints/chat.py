"""`/v1/chat/completions`: a conversation in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.answers.forms import AnswerForms
from engine.contract import Reply
from engine.endpoints.choices import choices_of, usage_of
from engine.endpoints.conversations import Conversation, Conversations
from engine.endpoints.deltas import ChatUnfolding
from engine.endpoints.endpoint import Heading, Prepared, Unfolding
from engine.endpoints.growing import Chunks, GrowingChoices
from engine.endpoints.images import Eyes, Images
from engine.endpoints.logprobs import prompt_logprobs
from engine.endpoints.messages import answer_of, shown_choice, thinking_tokens
from engine.endpoints.proofs import proof
from engine.endpoints.sequences import Terms, TextSequences
from engine.protocol.bodies import completion_body, response_id, usage_body
from engine.protocol.chat import ChatCompletionRequest
from engine.protocol.requests import read_body
from engine.protocol.routes import CHAT_COMPLETIONS
from engine.protocol.stream import StreamOptions
from engine.scheduling.sequence import SequenceRequest, SequenceResult
from engine.text.text_model import TextModel

_Prepared = Prepared[SequenceRequest, Conversation]


class ChatCompletions:
    """The endpoint of a chat model that answers in `forms`; `seed` keys requests that name none.

    It `proves` answers that were held to a form.
    """

    route = CHAT_COMPLETIONS

    def __init__(
        self,
        model: TextModel,
        *,
        seed: int,
        forms: AnswerForms,
        eyes: Eyes | None = None,
        proves: bool = False,
    ) -> None:
        self._tokenizer = model.tokenizer
        self._images = Images(model.tokenizer, eyes)
        self.fetched = self._images.fetched
        self._conversations = Conversations(model, forms)
        self._sequences = TextSequences(model, seed=seed)
        self._proves = proves

    def prepare(self, body: dict[str, Any], heading: Heading) -> _Prepared:
        """Return a sequence for each choice of the conversation's next message."""
        request = read_body(ChatCompletionRequest, body)
        conversation = self._conversations.of(request, heading)
        terms = _terms(conversation)
        images = self._images.seen(request, body)
        # Templates write the tokens that open a text themselves, so none are added by default.
        prompt_ids = self._sequences.tokenized(
            self._images.spelled(conversation.prompt, images),
            request,
            terms,
            add_special_tokens=bool(request.add_special_tokens),
        )
        prompt_ids, pictures = self._images.shown(prompt_ids, images)
        sequences = self._sequences.of([prompt_ids], request, terms, heading=heading)
        if pictures:
            sequences = [replace(sequence, pictures=pictures) for sequence in sequences]
        num_bytes = sum(picture.pixels.nbytes for picture in pictures)
        return Prepared(sequences, conversation, heading, num_bytes)

    def finish(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Reply:
        """Return the chat completion with one message for each choice."""
        conversation, heading = prepared.context, prepared.heading
        request, markers = conversation.request, conversation.reading.markers
        [choices] = choices_of(
            prepared.requests, results, request, self._tokenizer, markers=markers
        )
        answers = [answer_of(i, choice, conversation) for i, choice in enumerate(choices)]
        thought = thinking_tokens(choices, answers, conversation, self._tokenizer)
        usage = replace(usage_of([choices]), reasoning_tokens=thought or 0)
        answer = completion_body(
            "chat.completion",
            response_id("chatcmpl", heading.request_id),
            created=heading.created,
            model=heading.model,
            choices=[
                shown_choice(i, choice, answer, conversation, self._tokenizer)
                for i, (choice, answer) in enumerate(zip(choices, answers, strict=True))
            ],
            usage=usage_body(
                usage.prompt_tokens, usage.completion_tokens, reasoning_tokens=thought
            ),
        )
        if request.return_token_ids:
            answer["prompt_token_ids"] = choices[0].prompt_ids
        if request.prompt_logprobs is not None:
            entries = choices[0].result.prompt_logprobs or []
            answer["prompt_logprobs"] = prompt_logprobs(entries, self._tokenizer)
        if self._proves and request.asked is not None:
            texts = [None if said.calls else said.content for said in answers]
            answer["tidemill"] = proof(texts, request.asked)
        return Reply(200, answer, usage)

    def unfold(self, prepared: _Prepared, options: StreamOptions) -> Unfolding:
        """Return the chat completion before anything of it has come."""
        conversation = prepared.context
        choices = GrowingChoices(
            prepared.requests,
            conversation.request,
            self._tokenizer,
            markers=conversation.reading.markers,
        )
        return ChatUnfolding(
            choices,
            conversation,
            prepared.requests[0].prompt_ids,
            Chunks("chat.completion.chunk", "chatcmpl", prepared.heading, options),
            self._tokenizer,
        )


def _terms(conversation: Conversation) -> Terms:
    request = conversation.request
    old_name = request.max_completion_tokens is None
    return Terms(
        prompt_param="messages",
        max_tokens=request.max_tokens if old_name else request.max_completion_tokens,
        max_tokens_param="max_tokens" if old_name else "max_completion_tokens",
        logprobs=request.num_logprobs,
        prompt_logprobs=request.prompt_logprobs,
        markers=conversation.reading.markers,
        constraint=conversation.constraint,
    )

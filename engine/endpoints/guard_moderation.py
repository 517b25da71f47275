"""`/v1/moderations` of a guard model: its answer to each text, in OpenAI's categories.

The score of a verdict is its probability where the answer states it, among the words of verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tidemill.protocol.bodies import response_id
from tidemill.protocol.contract import Reply, Usage
from tidemill.protocol.errors import RequestError
from tidemill.protocol.moderation import ModerationRequest, moderation_body
from tidemill.protocol.requests import read_body
from tidemill.protocol.routes import MODERATIONS
from tidemill.protocol.validation import short_repr

from ..parsers.guards import HARMFUL, GuardFormat
from ..parsers.registry import ParserSet
from ..scheduling.sequence import SequenceRequest, SequenceResult
from ..scheduling.token_logprobs import NO_LOGPROBS
from ..text.text_model import TextModel
from .chat import ChatCompletions
from .endpoint import Prepared, RequestMetadata
from .request_bounds import check_prompt_tokens

_NUM_TOP = 20

_Prepared = Prepared[SequenceRequest, ModerationRequest]


class GuardModerations:
    """The endpoint of a guard model, which answers chats.

    Their prompts are never truncated: that would cut off the guard's instructions.
    """

    route = MODERATIONS

    def __init__(self, model: TextModel, guard: GuardFormat) -> None:
        untruncated = replace(model, truncate_prompt_tokens=None)
        self._chat = ChatCompletions(untruncated, seed=0, parsers=ParserSet())
        self._tokenizer = model.tokenizer
        self._guard = guard
        most = model.max_logprobs
        self._num_top = _NUM_TOP if most < 0 else min(_NUM_TOP, most)
        self.chats_per_text = len(guard.questions)  # the dispatcher estimates the work by it

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> _Prepared:
        """Return a sequence for each text and question."""
        request = read_body(ModerationRequest, body)
        if request.truncate_prompt_tokens is not None:
            raise RequestError(
                "`truncate_prompt_tokens` is not supported by guard models, whose instructions it"
                " would cut off: shorten the text.",
                param="truncate_prompt_tokens",
                code="unsupported_parameter",
            )
        sequences: list[SequenceRequest] = []
        num_tokens = 0
        for text in request.input:
            for _, variables in self._guard.questions:
                sequence = self._sequence(text, variables, request, metadata)
                num_tokens += len(sequence.prompt_ids)
                check_prompt_tokens(num_tokens, "input")
                sequences.append(sequence)
        return Prepared(sequences, request, metadata)

    def finish(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Reply:
        """Return the categories of each text, in the order of the inputs."""
        metadata, questions = prepared.metadata, self._guard.questions
        scores: list[dict[str, float]] = []
        for place, result in enumerate(results):
            number = place % len(questions)
            if not number:
                scores.append({})
            category, _ = questions[number]
            scores[-1] |= self._scores(category, result, f"text {len(scores)} of `input`")
        categories = self._guard.categories
        answer = moderation_body(
            response_id("modr", metadata.request_id),
            model=metadata.model,
            categories=categories,
            values=[[each.get(category, 0.0) for category in categories] for each in scores],
            is_exclusive=False,
        )
        usage = Usage(
            prompt_tokens=sum(len(each.prompt_ids) for each in prepared.requests),
            completion_tokens=sum(len(each.token_ids) for each in results),
            cached_tokens=sum(each.num_cached_tokens for each in results),
        )
        return Reply(200, answer, usage)

    def _sequence(
        self,
        text: str,
        variables: Mapping[str, Any],
        request: ModerationRequest,
        metadata: RequestMetadata,
    ) -> SequenceRequest:
        """Return the sequence of one chat."""
        body = {
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_completion_tokens": self._guard.max_tokens,
            "logprobs": True,
            "top_logprobs": self._num_top,
            "chat_template_kwargs": {**(request.chat_template_kwargs or {}), **variables},
        }
        try:
            [sequence] = self._chat.prepare(body, metadata).requests
        except RequestError as exc:
            if exc.param is not None and exc.param != "chat_template_kwargs":
                exc.param = "input"
            raise
        return sequence

    def _scores(self, category: str, result: SequenceResult, text: str) -> dict[str, float]:
        """Return the score of a question's category, and of the harms that the answer names.

        An answer without a verdict is the error of all texts: OpenAI's form has no other result,
        and clients would take a missing one for a harmless text.
        """
        guard, ids = self._guard, result.token_ids
        answer = self._tokenizer.text(ids)
        verdict = guard.verdict.search(answer)
        if verdict is None:
            raise RequestError(
                f"The guard model's answer to {text} has no verdict: {short_repr(answer)}. Send"
                " that text separately, or use the chat template that the model was published"
                " with, without `chat_template_kwargs`.",
                code="verdict_missing",
            )
        lengths = (len(self._tokenizer.text(ids[: place + 1])) for place in range(len(ids)))
        place = next(i for i, length in enumerate(lengths) if length > verdict.start(1))
        score = self._harm_at(result, place, guard.harm[verdict[1].lower()])
        harms = guard.named_harms(answer[verdict.end() :]) if category == HARMFUL else ()
        return dict.fromkeys((category, *harms), score)

    def _harm_at(self, result: SequenceResult, place: int, stated: float) -> float:
        """Return the expected harm of the verdicts that may begin with this token."""
        logprobs = result.logprobs or NO_LOGPROBS
        [row] = logprobs.part(place, place + 1).rows()
        assert row is not None
        token_id, logprob, _, top = row
        total, harm = math.exp(logprob), math.exp(logprob) * stated
        for other, other_logprob in top:
            for other_harm in self._guard.verdicts_of(self._tokenizer.text([other])):
                if other != token_id:
                    total += math.exp(other_logprob)
                    harm += math.exp(other_logprob) * other_harm
        return harm / total if total else stated

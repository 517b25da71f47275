"""`/v1/decisions` and `/v1/systemone`: probabilities of the options of questions about an input.

Every question is read once per order of its options: the prompt ends where the answer begins, and
the next token's probabilities are those of the labels. The probability of a label is the sum over
all token paths that spell it; a path of several tokens is followed if its beginning is likely
enough to matter. No token of an answer is generated.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from tidemill.protocol.contract import Usage
from tidemill.protocol.decisions.openai_body import DecisionRequest
from tidemill.protocol.decisions.questions import Answer, Decision, Image, Part, Question
from tidemill.protocol.decisions.systemone_body import SystemOneRequest
from tidemill.protocol.errors import InternalError
from tidemill.protocol.fetched_urls import has_decision_images
from tidemill.protocol.parts import PlacedImage

from ...parsers.registry import ParserSet
from ...scheduling.sequence import Sampling, SequenceRequest, SequenceResult
from ...text.label_tokens import Path
from ...text.text_model import TextModel
from ..endpoint import Prepared, RequestMetadata
from ..image_inputs import DecodedImages, ImageInputs, ImageSupport
from ..prompt_tokens import PromptTokenizer
from ..request_bounds import check_prompt_chars, check_prompt_tokens
from .orders import decision_seed, mean_answers
from .prompts import DecisionPrompts, Read

if TYPE_CHECKING:
    from ..image_inputs import PreparedImage

# Beginnings of labels that are left out have this share of the labels' mass at most, together.
_NEGLIGIBLE = 1e-7


@dataclass(frozen=True, slots=True)
class DecisionReads:
    """A decision with its questions and reads.

    `paths` has for each request its read, and the tokens that follow the read's prompt; the first
    requests are the reads themselves. `known` are each read's log-probabilities of paths, from the
    first `num_known` results.
    """

    decision: Decision
    questions: list[Question]
    reads: list[Read]
    paths: list[tuple[int, Path]]
    known: Sequence[Mapping[Path, float]]
    num_known: int = 0


_Prepared = Prepared[SequenceRequest, DecisionReads]


class NextTokenReader:
    """A `DecisionReader` of a generation model, which reads the next token after each question."""

    def __init__(
        self, model: TextModel, parsers: ParserSet, image_support: ImageSupport | None = None
    ) -> None:
        self._model = model
        self._prompts = DecisionPrompts(model, parsers)
        self._tokenizer = PromptTokenizer(model)
        self._images = ImageInputs(model.tokenizer, image_support)

    def fetched(
        self, body: dict[str, Any], kind: type[DecisionRequest | SystemOneRequest]
    ) -> AbstractAsyncContextManager[dict[str, Any]] | None:
        """Return the fetch of a body's images; None for a body without images."""
        if not has_decision_images(body):
            return None
        return self._images.fetched(body, kind, _placed_urls)

    def prepare(
        self, decision: Decision, param: str, metadata: RequestMetadata, body: Mapping[str, Any]
    ) -> _Prepared:
        """Return a sequence of one new token for each read; `param` is the input's field.

        `body` contains the fetched images.
        """
        questions = decision.parsed_questions
        reads = self._prompts.reads(decision, questions, decision_seed(decision))
        texts, images, num_bytes = self._texts(decision, reads, param, metadata, body)
        has_template = self._model.chat_template is not None
        prompts = self._tokenizer.encode_branches(texts, param, add_special_tokens=not has_template)
        reads = [
            self._prompts.with_tree(read, text) for read, text in zip(reads, texts, strict=True)
        ]
        requests = []
        for ids, read, shown in zip(prompts, reads, images, strict=True):
            placed_ids, placed = self._images.place(ids, shown, param)
            # Beginnings of labels are part of further prompts.
            longest = max(map(len, read.tree.label_of))
            self._tokenizer.check_length(len(placed_ids), param, num_to_come=longest)
            request = self._request(placed_ids, (), read, decision, metadata)
            requests.append(replace(request, images=placed) if placed else request)
        check_prompt_tokens(sum(len(request.prompt_ids) for request in requests), "questions")
        paths: list[tuple[int, Path]] = [(number, ()) for number in range(len(reads))]
        context = DecisionReads(decision, questions, reads, paths, [{(): 0.0} for _ in reads])
        # A label of several tokens, or with a space before it, has an unfinished beginning.
        may_follow = any(len(read.tree.next_tokens) > 1 for read in reads)
        return Prepared(requests, context, metadata, num_bytes, may_follow=may_follow)

    def _texts(
        self,
        decision: Decision,
        reads: Sequence[Read],
        param: str,
        metadata: RequestMetadata,
        body: Mapping[str, Any],
    ) -> tuple[list[str], list[list[PreparedImage]], int]:
        """Return the text and the images of each read's prompt, and the bytes of all images."""
        questions = decision.parsed_questions
        texts, num_chars = list[str](), 0
        images: list[list[PreparedImage]] = []
        decoded: DecodedImages = {}
        shared: list[Part] | None = None
        for read, content in zip(
            reads, self._prompts.contents(decision, questions, reads), strict=True
        ):
            if content is not shared:
                placed = self._images.shown(_placed(content), body)
                shown = self._images.decode([*chain.from_iterable(placed)], body, decoded)
                pages = _with_pages(content, [*map(len, placed)])
                rendered = self._prompts.rendered(decision, pages, metadata)
                shared = content
            text = rendered + self._prompts.lead(decision, questions, read)
            if not texts:  # all others have the same input
                self._tokenizer.check_text(text, param)
            num_chars += len(text)
            check_prompt_chars(num_chars, "questions")
            texts.append(self._images.expand_marks(text, shown, param))
            images.append(shown)
        return texts, images, sum(image.pixels.nbytes for image in decoded.values())

    def follow_up(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> _Prepared:
        """Add sequences after beginnings of labels that are likely enough to matter."""
        context = prepared.context
        known = _logprobs_by_read(context, results)
        requests, paths = list(prepared.requests), list(context.paths)
        for number, read in enumerate(context.reads):
            prompt = requests[number].prompt_ids
            for path in _likely_beginnings(read, known[number]):
                ids = [*prompt, *path]
                longer = self._request(ids, path, read, context.decision, prepared.metadata)
                requests.append(replace(longer, images=requests[number].images))
                paths.append((number, path))
        context = replace(context, paths=paths, known=known, num_known=len(results))
        return replace(prepared, requests=requests, context=context)

    def answers(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> list[Answer]:
        """Return the answer of each question: the mean over the orders of its options."""
        context = prepared.context
        known = _logprobs_by_read(context, results)
        return mean_answers(
            (read.question, _answer(read, logprobs, result.token_ids[0]))
            for read, logprobs, result in zip(context.reads, known, results, strict=False)
        )

    def usage(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Usage:
        """Return the usage; tokens that prompts share count once."""
        return usage_of(prepared.requests, results)

    def _request(
        self,
        ids: list[int],
        path: Path,
        read: Read,
        decision: Decision,
        metadata: RequestMetadata,
    ) -> SequenceRequest:
        return SequenceRequest(
            prompt_ids=ids,
            max_tokens=1,
            sampling=Sampling(
                temperature=0.0, logprobs=0, logprob_token_ids=read.tree.next_tokens[path]
            ),
            cache_salt=decision.cache_salt or "",
            adapter=metadata.adapter,
            request_id=metadata.request_id,
        )


def _placed(content: Iterable[Part]) -> list[PlacedImage]:
    return [PlacedImage(part.place, part.url) for part in content if isinstance(part, Image)]


def _with_pages(content: Iterable[Part], counts: Iterable[int]) -> list[Part]:
    """Return content with as many copies of each image as it has pages."""
    left = iter(counts)
    return [part for part in content for _ in range(next(left) if isinstance(part, Image) else 1)]


def _placed_urls(decision: Decision) -> list[PlacedImage]:
    """Return all images of a decision."""
    of_questions = chain.from_iterable(
        question.instructions for question in decision.parsed_questions
    )
    return _placed([*decision.state_parts, *of_questions])


def _logprobs_by_read(
    context: DecisionReads, results: Sequence[SequenceResult]
) -> Sequence[Mapping[Path, float]]:
    """Return for each read the log-probabilities of the paths that were computed."""
    if context.num_known == len(results):
        return context.known
    known = [dict(logprobs) for logprobs in context.known]
    new = slice(context.num_known, None)
    for (number, path), result in zip(context.paths[new], results[new], strict=True):
        assert result.logprobs is not None
        [row] = result.logprobs.rows()
        assert row is not None
        before = known[number][path]
        for token, logprob in row[3]:
            known[number][*path, token] = before + logprob
    return known


def _likely_beginnings(read: Read, known: Mapping[Path, float]) -> list[Path]:
    """Return the computed paths that are unfinished and must be followed, the likeliest first.

    The rest together has a negligible share of the labels' mass.
    """
    tree = read.tree
    finished = [known[path] for path in tree.label_of if path in known]
    open_paths = [
        path
        for path in tree.next_tokens
        if path in known and (*path, tree.next_tokens[path][0]) not in known
    ]
    open_paths.sort(key=known.__getitem__)
    if not open_paths:
        return []
    # Relative to the likeliest, as the probabilities of all may be too small for a number.
    most = max(*finished, known[open_paths[-1]], -sys.float_info.max)
    mass, rest = sum(math.exp(logprob - most) for logprob in finished), 0.0
    for place, path in enumerate(open_paths):
        rest += math.exp(known[path] - most)
        if not rest <= _NEGLIGIBLE * mass:
            return open_paths[place:][::-1]
    return []


def _answer(read: Read, known: Mapping[Path, float], first: int) -> Answer:
    """Return the answer of one read; `first` is its most likely token."""
    tree = read.tree
    paths: list[list[float]] = [[] for _ in read.labels]
    for path, label in tree.label_of.items():
        if path in known:
            paths[label].append(known[path])
    logprobs = [_log_sum(of_label) for of_label in paths]
    # A choice's labels belong to places, and its order says which option has which place.
    own = [logprobs[place] for place in read.places]
    total = _log_sum(own)
    if math.isnan(total):
        raise InternalError("The model returned NaN instead of probabilities.")
    return Answer(
        tuple(math.exp(one - total) if total > -math.inf else 1 / len(own) for one in own),
        min(1.0, math.exp(total)),
        (first,) in tree.label_of or (first,) in tree.next_tokens,
    )


def _log_sum(logs: Sequence[float]) -> float:
    """Return the logarithm of the sum of exponentials; -inf for none."""
    most = max(logs, default=-math.inf)
    if most == -math.inf or math.isnan(most):
        return most
    return most + math.log(math.fsum(math.exp(one - most) for one in logs))


def usage_of(requests: Sequence[SequenceRequest], results: Sequence[SequenceResult]) -> Usage:
    """Return the usage; tokens that prompts share count once."""
    prompts = [request.prompt_ids for request in requests]
    total = num_distinct_tokens(prompts)
    cached = sum(result.num_cached_tokens for result in results)
    summed = sum(map(len, prompts))
    return Usage(prompt_tokens=total, cached_tokens=max(0, cached - (summed - total)))


def num_distinct_tokens(prompts: Iterable[list[int]]) -> int:
    """Return the number of tokens of prompts, with those that prompts share counted once."""
    total, before = 0, list[int]()
    for prompt in sorted(prompts):
        shared = next(
            (i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b),
            min(len(before), len(prompt)),
        )
        total, before = total + len(prompt) - shared, prompt
    return total

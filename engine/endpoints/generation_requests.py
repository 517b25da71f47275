"""Generation requests: prompts and sampling parameters of completions as sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TypeVar

from tidemill.protocol.errors import RequestError
from tidemill.protocol.fields import GenerationRequest, Side

from ..scheduling.repetition import Repetition
from ..scheduling.sequence import Constraint, Sampling, SequenceRequest
from ..structured_output.token_constraints import AllowedTokens, BadWords, all_of
from ..text.stop_patterns import StopPattern
from ..text.stop_strings import StopStrings
from ..text.text_model import TextModel
from ..text.truncation import Truncation
from .endpoint import RequestMetadata
from .prompt_tokens import PromptTokenizer
from .request_bounds import check_prompt_tokens, open_max_tokens

# Lower temperatures are greedy; higher ones are uniform, and would overflow in half precision.
_MIN_TEMPERATURE = 1e-5
_MAX_TEMPERATURE = 1e4
_SEED_BITS = 63
# More copies than any context has tokens, and few enough for 64-bit counters.
_NEVER_COPIES = 2**40

_Number = TypeVar("_Number", int, float)
_Request = TypeVar("_Request", bound=GenerationRequest)


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """An endpoint's own parameters, in addition to those of all generation requests.

    `max_tokens` is the value of the request's field `max_tokens_param`; `default_max_tokens` is its
    default (None: the rest of the context). `logprobs`, from the field `logprobs_param`, and
    `prompt_logprobs` count alternatives; None means no logprobs and -1 means all. `markers` are
    special tokens that stay in the text. `constraint` applies to every choice. With
    `reads_confidence` results have the choice of each token. With
    `repeats_prompts` every choice includes the requested fields of its prompt.
    """

    prompt_param: str
    max_tokens: int | None
    max_tokens_param: str = "max_tokens"
    default_max_tokens: int | None = None
    logprobs: int | None = None
    logprobs_param: str = "logprobs"
    prompt_logprobs: int | None = None
    markers: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    repeats_prompts: bool = False
    reads_confidence: bool = False


class SequenceRequestBuilder:
    """Builds the sequence requests of one model; `seed` is the default for requests without one."""

    def __init__(self, model: TextModel, *, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._tokenizer = PromptTokenizer(model)

    def with_truncation(self, request: _Request) -> _Request:
        """Return the request with the default `truncate_prompt_tokens`, if it has none."""
        default = self._model.truncate_prompt_tokens
        if default is None or request.truncate_prompt_tokens is not None:
            return request
        return request.model_copy(update={"truncate_prompt_tokens": default})

    def tokenize_prompt(
        self,
        text: str,
        request: GenerationRequest,
        options: EndpointOptions,
        *,
        add_special_tokens: bool,
    ) -> list[int]:
        """Return the token ids of a prompt, truncated if the request sets a limit.

        Raises `RequestError` if the prompt exceeds the context; a prompt that must exceed it by its
        number of bytes is not tokenized.
        """
        limit = self._truncation_limit(request, options)
        if limit is None:
            param = options.prompt_param
            ids = self._tokenizer.encode(text, param, add_special_tokens=add_special_tokens)
            self._tokenizer.check_length(len(ids), param)
            return ids
        cut = Truncation(limit, side=_truncation_side(request))
        truncated = self._tokenizer.encode_truncated(
            text, cut, add_special_tokens=add_special_tokens
        )
        if truncated is not None:
            return truncated
        return self._model.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def build(
        self,
        prompts: Sequence[list[int]],
        request: GenerationRequest,
        options: EndpointOptions,
        *,
        metadata: RequestMetadata,
    ) -> list[SequenceRequest]:
        """Return a sequence for each of the `n` choices of each prompt, prompt by prompt.

        Raises `RequestError` for unsupported parameters.
        """
        limit = self._truncation_limit(request, options)
        if limit is not None:
            retained = slice(-limit, None) if _truncation_side(request) == "left" else slice(limit)
            prompts = [ids[retained] for ids in prompts]
        options = replace(
            options,
            logprobs=self._num_logprobs(options.logprobs, options.logprobs_param),
            prompt_logprobs=self._num_logprobs(options.prompt_logprobs, "prompt_logprobs"),
        )
        self._check_tokens(prompts, request, options)
        shows_values = options.logprobs is not None or options.prompt_logprobs is not None
        if shows_values or (request.n or 1) > 1:
            options = self._bounded(prompts, request, options)
        sampling, constraint = self._sampling(request, options), self._constraint(request, options)
        return [
            self._sequence(
                ids,
                request,
                # The choices of a prompt share its logprobs: only the first one requests them.
                options if choice == 0 else replace(options, prompt_logprobs=None),
                sampling=replace(sampling, seed=seed),
                metadata=metadata,
                constraint=constraint,
            )
            for number, ids in enumerate(prompts)
            for choice, seed in enumerate(self._seeds(request, number, metadata.request_id))
        ]

    def _bounded(
        self, prompts: Sequence[list[int]], request: GenerationRequest, options: EndpointOptions
    ) -> EndpointOptions:
        """Return the options with the default `max_tokens` that the limit on values allows."""
        num_choices = request.n or 1
        check_prompt_tokens(num_choices * sum(map(len, prompts)), options.prompt_param)
        values_per_token = 0
        if options.logprobs is not None:
            values_per_token = 1 + (len(request.logprob_token_ids or ()) or options.logprobs)
        default = options.default_max_tokens
        limit = open_max_tokens(
            default if options.max_tokens is None else options.max_tokens,
            max_model_len=self._model.max_model_len,
            num_sequences=len(prompts) * num_choices,
            values_per_token=values_per_token,
            prompt_values=_prompt_values(prompts, request, options),
            param=options.logprobs_param if values_per_token else "n",
        )
        return options if limit is None else replace(options, default_max_tokens=limit)

    def _seeds(self, request: GenerationRequest, prompt: int, request_id: str) -> list[int]:
        return [
            seed_of_choice(
                request.seed,
                engine_seed=self._seed,
                request_id=request_id,
                prompt=prompt,
                choice=choice,
            )
            for choice in range(request.n or 1)
        ]

    def _num_logprobs(self, requested: int | None, param: str) -> int | None:
        """Return the number of alternatives; raise `RequestError` above the engine's limit."""
        if requested is None:
            return None
        most, size = self._model.max_logprobs, self._model.vocab_size
        count = size if requested == -1 else min(requested, size)
        if most != -1 and count > most:
            raise RequestError(
                f"`{param}` requests {count} alternatives; the maximum is {most} (--max-logprobs).",
                param=param,
            )
        return count

    def _sampling(self, request: GenerationRequest, options: EndpointOptions) -> Sampling:
        defaults = self._model.defaults
        temperature = _value_or(request.temperature, defaults.temperature)
        top_p = _value_or(request.top_p, defaults.top_p)
        top_k = max(0, _value_or(request.top_k, defaults.top_k))
        if top_p == 0:  # only the most likely token is within a share of 0
            top_p, top_k = 1.0, 1
        return Sampling(
            temperature=0.0
            if temperature < _MIN_TEMPERATURE
            else min(temperature, _MAX_TEMPERATURE),
            top_p=top_p,
            top_k=0 if top_k >= self._model.vocab_size else top_k,
            min_p=_value_or(request.min_p, defaults.min_p),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=_value_or(request.repetition_penalty, defaults.repetition_penalty),
            logit_bias=request.logit_bias or {},
            logprobs=0 if request.logprob_token_ids else options.logprobs,
            logprob_token_ids=tuple(dict.fromkeys(request.logprob_token_ids or ())),
            reads_confidence=options.reads_confidence,
        )

    def _sequence(
        self,
        ids: list[int],
        request: GenerationRequest,
        options: EndpointOptions,
        *,
        sampling: Sampling,
        metadata: RequestMetadata,
        constraint: Constraint | None,
    ) -> SequenceRequest:
        max_tokens = self._max_tokens(len(ids), options)
        min_tokens = request.min_tokens or 0
        if min_tokens > max_tokens:
            raise RequestError(
                f"`min_tokens` ({min_tokens}) must be at most the maximum number of generated"
                f" tokens ({max_tokens}).",
                param="min_tokens",
            )
        stops = frozenset(request.stop_token_ids or ())
        # Constrained output always ends: the model's end token marks it.
        goes_on = request.ignore_eos and options.constraint is None
        return SequenceRequest(
            prompt_ids=ids,
            max_tokens=max_tokens,
            sampling=sampling,
            min_tokens=min_tokens,
            stop_token_ids=stops if goes_on else stops | self._model.eos_token_ids,
            stop_text=self._stop_strings(request, min_tokens, options.markers),
            repetition=_repetition(request),
            prompt_logprobs=options.prompt_logprobs,
            logprob_start=_logprob_start(request, len(ids)),
            cache_salt=request.cache_salt or "",
            adapter=metadata.adapter,
            constraint=constraint,
            request_id=metadata.request_id,
        )

    def _constraint(
        self, request: GenerationRequest, options: EndpointOptions
    ) -> Constraint | None:
        """Return all constraints of an output: its grammar first, then the token constraints."""
        if not request.allowed_token_ids and not request.bad_words:
            return options.constraint
        constraints: list[Constraint | None] = [options.constraint]
        if request.allowed_token_ids:
            constraints.append(AllowedTokens(frozenset(request.allowed_token_ids)))
        words = [tokens for word in request.bad_words or () for tokens in self._bad_word_ids(word)]
        if words:
            constraints.append(BadWords(frozenset(words)))
        return all_of(constraints)

    def _bad_word_ids(self, word: str) -> list[tuple[int, ...]]:
        """Return the tokens of a bad word at the beginning of a text and after another word.

        As in vLLM, the latter is included only if it has the same length and another first token.
        """
        bare = word.lstrip()
        first, second = (
            tuple(self._model.tokenizer.encode(text, add_special_tokens=False))
            for text in (bare, f" {bare}")
        )
        if not first:
            raise RequestError(
                f"`bad_words` contains {word[:80]!r}, which has no tokens.", param="bad_words"
            )
        differs = len(second) == len(first) and second[0] != first[0]
        return [first, second] if differs else [first]

    def _truncation_limit(self, request: GenerationRequest, options: EndpointOptions) -> int | None:
        """Return the number of tokens that prompts are truncated to; None for no limit."""
        requested = request.truncate_prompt_tokens
        if requested is None:
            return None
        context = self._model.max_model_len
        if requested == -1:
            to_come = _value_or(options.max_tokens, _value_or(options.default_max_tokens, 1))
            return max(1, context - to_come)
        if requested > context:
            raise RequestError(
                f"`truncate_prompt_tokens` ({requested}) must be at most {context}, this model's "
                "maximum context length.",
                param="truncate_prompt_tokens",
            )
        return requested

    def _stop_strings(
        self, request: GenerationRequest, min_tokens: int, markers: frozenset[int]
    ) -> StopStrings | None:
        if not (request.stop or request.stop_regex):
            return None
        return StopStrings(
            tuple(request.stop or ()),
            self._model.tokenizer,
            patterns=tuple(map(StopPattern, request.stop_regex or ())),
            min_tokens=min_tokens,
            skip_special_tokens=request.skip_special_tokens is not False,
            markers=markers,
        )

    def _max_tokens(self, num_prompt_tokens: int, options: EndpointOptions) -> int:
        """Return the token limit after a prompt; raise `RequestError` if it does not fit."""
        rest = self._model.max_model_len - num_prompt_tokens
        least = 0 if options.max_tokens == 0 else 1
        self._tokenizer.check_length(num_prompt_tokens, options.prompt_param, num_to_come=least)
        if options.max_tokens is None:
            return (
                rest
                if options.default_max_tokens is None
                else min(rest, options.default_max_tokens)
            )
        if options.max_tokens > rest:
            num_tokens = num_prompt_tokens + options.max_tokens
            raise RequestError(
                f"{self._tokenizer.limit}you requested {num_tokens} tokens:"
                f" {num_prompt_tokens} in the prompt and {options.max_tokens} in the completion.",
                param=options.max_tokens_param,
                code="context_length_exceeded",
            )
        return options.max_tokens

    def _check_tokens(
        self, prompts: Sequence[list[int]], request: GenerationRequest, options: EndpointOptions
    ) -> None:
        """Reject an empty prompt and unknown token ids."""
        for ids in prompts:
            if not ids:
                raise RequestError("The prompt has no tokens.", param=options.prompt_param)
            self._check_ids((min(ids), max(ids)), options.prompt_param)
        self._check_ids(request.logit_bias or (), "logit_bias")
        self._check_ids(request.stop_token_ids or (), "stop_token_ids")
        self._check_ids(request.logprob_token_ids or (), "logprob_token_ids")
        self._check_ids(request.allowed_token_ids or (), "allowed_token_ids")

    def _check_ids(self, ids: Sequence[int] | dict[int, float], param: str) -> None:
        size = self._model.vocab_size
        for token_id in ids:
            if not 0 <= token_id < size:
                raise RequestError(
                    f"`{param}` contains token ID {token_id}; token IDs of this model must be "
                    f"between 0 and {size - 1}.",
                    param=param,
                )


def seed_of_choice(
    request_seed: int | None, *, engine_seed: int, request_id: str, prompt: int, choice: int
) -> int:
    """Return the sampler's seed of one choice, in [0, 2**63).

    With a `request_seed` it depends only on that and on the number of the `choice`: choice 0 is the
    same as with `n: 1`, and each prompt of a list draws the same tokens as in a separate request.
    Without one, the engine's seed, the request's id and the number of the `prompt` replace it:
    equal prompts differ, and a resumed job repeats its rows.
    """
    if request_seed is None:
        key = f"request {engine_seed} {request_id} {prompt} {choice}"
    else:
        key = f"seed {request_seed} {choice}"
    digest = blake2b(key.encode(errors="backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def _truncation_side(request: GenerationRequest) -> Side:
    """Return the end of a prompt that truncation removes: the left one by default, as in vLLM."""
    return request.truncation_side or "left"


def _prompt_values(
    prompts: Sequence[list[int]], request: GenerationRequest, options: EndpointOptions
) -> int:
    """Return the number of an answer's values about its prompts, not counting the first copy."""
    num_shown = (request.n or 1) if options.repeats_prompts else 1
    num_values = 0
    if options.prompt_logprobs is not None:
        num_scored = sum(len(ids) - _logprob_start(request, len(ids)) for ids in prompts)
        num_values += num_shown * num_scored * (1 + options.prompt_logprobs)
    if request.echo or request.return_token_ids:
        num_values += (num_shown - 1) * sum(map(len, prompts))
    return num_values


def _logprob_start(request: GenerationRequest, num_prompt_tokens: int) -> int:
    """Return the position of the first scored prompt token; -1, as in SGLang, scores none."""
    requested = request.logprob_start_len or 0
    return num_prompt_tokens if requested == -1 else min(requested, num_prompt_tokens)


def _repetition(request: GenerationRequest) -> Repetition | None:
    requested = request.repetition_detection
    if requested is None or not requested.max_pattern_size:
        return None
    num_copies = min(requested.min_count, _NEVER_COPIES)
    return Repetition(max(1, requested.min_pattern_size), requested.max_pattern_size, num_copies)


def _value_or(value: _Number | None, default: _Number) -> _Number:
    return default if value is None else value

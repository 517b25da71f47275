"""What chat and text completions ask of the engine: prompts and parameters into sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TypeVar

from engine.endpoints.endpoint import Heading
from engine.grammar.named_tokens import AllowedTokens, BadWords, all_of
from engine.protocol.errors import RequestError
from engine.protocol.fields import GenerationRequest, Side
from engine.scheduling.repetition import Repetition
from engine.scheduling.sequence import Constraint, Sampling, SequenceRequest
from engine.text.reader import Cut, TextReader
from engine.text.stop_patterns import StopPattern
from engine.text.stop_strings import StopStrings
from engine.text.text_model import TextModel

# Up to this a text is tokenized without a look at its bytes: it takes a few milliseconds at most.
_LONG_TEXT_CHARS = 20_000
# Cooler than this is greedy; hotter than that is uniform, and would overflow in half precision.
_MIN_TEMPERATURE = 1e-5
_MAX_TEMPERATURE = 1e4
_SEED_BITS = 63
# More copies than any context has tokens, and few enough to be counted in 64 bits.
_NEVER_COPIES = 2**40

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class Terms:
    """What an endpoint asks for beside the parameters that all requests share.

    `max_tokens` is what the request named in its field `max_tokens_param`, `default_max_tokens`
    what holds otherwise (None: the rest of the context). `logprobs` and `prompt_logprobs` count
    alternatives; None asks for none. `markers` are special tokens that stay in the text. Each
    choice is held to the `constraint`.
    """

    prompt_param: str
    max_tokens: int | None
    max_tokens_param: str = "max_tokens"
    default_max_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    markers: frozenset[int] = frozenset()
    constraint: Constraint | None = None


class TextSequences:
    """Makes the sequences of one model's requests; `seed` keys those that name none."""

    def __init__(self, model: TextModel, *, seed: int) -> None:
        self._model = model
        self._seed = seed
        # A tokenizer that Python runs is cut behind it, special tokens or not.
        has_backend = model.tokenizer.vocabulary.backend is not None
        self._reader = TextReader(model.tokenizer, model.max_model_len) if has_backend else None

    def tokenized(
        self, text: str, request: GenerationRequest, terms: Terms, *, add_special_tokens: bool
    ) -> list[int]:
        """Return the token ids of a prompt, cut where the request has it so.

        Raises `RequestError` when the context cannot hold it; one that its bytes show to be too
        long is not tokenized.
        """
        tokenizer, param = self._model.tokenizer, terms.prompt_param
        limit = self._cut_to(request, terms)
        if limit is not None and self._reader is not None:
            cut = Cut(limit, side=_side(request))
            return self._reader.texts([text], cut, add_special_tokens=add_special_tokens)[0]
        if limit is None and len(text) > _LONG_TEXT_CHARS:
            least = tokenizer.least_tokens(text)
            self._check_prompt(least, param, words=f"at least {least} tokens")
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if limit is None:
            self._check_prompt(len(ids), param, words=f"{len(ids)} tokens")
        return ids

    def of(
        self,
        prompts: Sequence[list[int]],
        request: GenerationRequest,
        terms: Terms,
        *,
        heading: Heading,
    ) -> list[SequenceRequest]:
        """Return a sequence for each of the `n` choices of each prompt, prompt by prompt.

        Raises `RequestError` for what the model cannot do.
        """
        limit = self._cut_to(request, terms)
        if limit is not None:
            kept = slice(-limit, None) if _side(request) == "left" else slice(limit)
            prompts = [ids[kept] for ids in prompts]
        self._check_tokens(prompts, request, terms)
        sampling, constraint = self._sampling(request, terms), self._constraint(request, terms)
        return [
            self._sequence(
                ids,
                request,
                # The choices of a prompt share its scores: the first one asks for them.
                terms if choice == 0 else replace(terms, prompt_logprobs=None),
                sampling=replace(sampling, seed=seed),
                heading=heading,
                constraint=constraint,
            )
            for number, ids in enumerate(prompts)
            for choice, seed in enumerate(self._seeds(request, number, heading.request_id))
        ]

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

    def _sampling(self, request: GenerationRequest, terms: Terms) -> Sampling:
        defaults = self._model.defaults
        temperature = _or(request.temperature, defaults.temperature)
        top_p = _or(request.top_p, defaults.top_p)
        top_k = max(0, _or(request.top_k, defaults.top_k))
        if top_p == 0:  # nothing but the likeliest token is within a share of 0
            top_p, top_k = 1.0, 1
        return Sampling(
            temperature=0.0
            if temperature < _MIN_TEMPERATURE
            else min(temperature, _MAX_TEMPERATURE),
            top_p=top_p,
            top_k=0 if top_k >= self._model.vocab_size else top_k,
            min_p=_or(request.min_p, defaults.min_p),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
            logit_bias=request.logit_bias or {},
            logprobs=0 if request.logprob_token_ids else terms.logprobs,
            logprob_token_ids=tuple(dict.fromkeys(request.logprob_token_ids or ())),
        )

    def _sequence(
        self,
        ids: list[int],
        request: GenerationRequest,
        terms: Terms,
        *,
        sampling: Sampling,
        heading: Heading,
        constraint: Constraint | None,
    ) -> SequenceRequest:
        max_tokens = self._max_tokens(len(ids), terms)
        min_tokens = request.min_tokens or 0
        if min_tokens > max_tokens:
            raise RequestError(
                f"`min_tokens` ({min_tokens}) must not be above the {max_tokens} tokens that"
                " may be generated.",
                param="min_tokens",
            )
        stops = frozenset(request.stop_token_ids or ())
        # What a constraint allows has an end, which the model's own end token tells.
        goes_on = request.ignore_eos and terms.constraint is None
        return SequenceRequest(
            prompt_ids=ids,
            max_tokens=max_tokens,
            sampling=sampling,
            min_tokens=min_tokens,
            stop_token_ids=stops if goes_on else stops | self._model.eos_token_ids,
            stop_text=self._stop_strings(request, min_tokens, terms.markers),
            repetition=_repetition(request),
            prompt_logprobs=terms.prompt_logprobs,
            cache_salt=request.cache_salt or "",
            adapter=heading.adapter,
            constraint=constraint,
            request_id=heading.request_id,
        )

    def _constraint(self, request: GenerationRequest, terms: Terms) -> Constraint | None:
        """Return all that an output is held to: its form first, then the tokens that are named."""
        held: list[Constraint | None] = [terms.constraint]
        if request.allowed_token_ids:
            held.append(AllowedTokens(frozenset(request.allowed_token_ids)))
        words = [tokens for word in request.bad_words or () for tokens in self._spellings(word)]
        if words:
            held.append(BadWords(frozenset(words)))
        return all_of(held)

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """Return the tokens of a word at the beginning of a text and behind another word.

        As in vLLM: the latter only where it is as many tokens, and begins with another.
        """
        bare = word.lstrip()
        first, second = (
            tuple(self._model.tokenizer.encode(text, add_special_tokens=False))
            for text in (bare, f" {bare}")
        )
        if not first:
            raise RequestError(
                f"`bad_words` names {word[:80]!r}, which is no token.", param="bad_words"
            )
        differs = len(second) == len(first) and second[0] != first[0]
        return [first, second] if differs else [first]

    def _cut_to(self, request: GenerationRequest, terms: Terms) -> int | None:
        """Return how many tokens of a prompt are read; None for all."""
        asked = request.truncate_prompt_tokens
        if asked is None:
            return None
        context = self._model.max_model_len
        if asked == -1:
            to_come = _or(terms.max_tokens, _or(terms.default_max_tokens, 1))
            return max(1, context - to_come)
        if asked > context:
            raise RequestError(
                f"`truncate_prompt_tokens` ({asked}) must not be above {context}, which is the "
                "context of this model.",
                param="truncate_prompt_tokens",
            )
        return asked

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

    def _max_tokens(self, num_prompt_tokens: int, terms: Terms) -> int:
        """Return how many tokens may be generated after a prompt that must fit the context."""
        rest = self._model.max_model_len - num_prompt_tokens
        least = 0 if terms.max_tokens == 0 else 1
        self._check_prompt(
            num_prompt_tokens + least, terms.prompt_param, words=f"{num_prompt_tokens} tokens"
        )
        if terms.max_tokens is None:
            return rest if terms.default_max_tokens is None else min(rest, terms.default_max_tokens)
        if terms.max_tokens > rest:
            raise RequestError(
                f"{self._limit}you asked for {num_prompt_tokens + terms.max_tokens} tokens:"
                f" {num_prompt_tokens} in the prompt and {terms.max_tokens} to generate.",
                param=terms.max_tokens_param,
                code="context_length_exceeded",
            )
        return terms.max_tokens

    @property
    def _limit(self) -> str:
        return (
            f"This model's maximum context length is {self._model.max_model_len} tokens. However, "
        )

    def _check_prompt(self, num_tokens: int, param: str, *, words: str) -> None:
        """Refuse a prompt whose tokens, and those that must follow, the context cannot hold."""
        if num_tokens > self._model.max_model_len:
            raise RequestError(
                f"{self._limit}the prompt has {words}, which leaves none to generate.",
                param=param,
                code="context_length_exceeded",
            )

    def _check_tokens(
        self, prompts: Sequence[list[int]], request: GenerationRequest, terms: Terms
    ) -> None:
        """Refuse an empty prompt, and every token id that the model does not have."""
        for ids in prompts:
            if not ids:
                raise RequestError("The prompt has no tokens.", param=terms.prompt_param)
            self._check_ids((min(ids), max(ids)), terms.prompt_param)
        self._check_ids(request.logit_bias or (), "logit_bias")
        self._check_ids(request.stop_token_ids or (), "stop_token_ids")
        self._check_ids(request.logprob_token_ids or (), "logprob_token_ids")
        self._check_ids(request.allowed_token_ids or (), "allowed_token_ids")

    def _check_ids(self, ids: Sequence[int] | dict[int, float], param: str) -> None:
        size = self._model.vocab_size
        for token_id in ids:
            if not 0 <= token_id < size:
                raise RequestError(
                    f"`{param}` names token {token_id}; this model has tokens 0 to {size - 1}.",
                    param=param,
                )


def seed_of_choice(
    request_seed: int | None, *, engine_seed: int, request_id: str, prompt: int, choice: int
) -> int:
    """Return the sampler's seed of one choice, in [0, 2**63).

    With a `request_seed` it depends on that and on the number of the `choice` alone: choice 0 is
    what `n: 1` would give, and every prompt of a list draws as if it were sent by itself. Without
    one, the engine's seed, the request's id and the number of the `prompt` stand in for it, so
    that equal prompts differ and a resumed job repeats its rows.
    """
    if request_seed is None:
        key = f"request {engine_seed} {request_id} {prompt} {choice}"
    else:
        key = f"seed {request_seed} {choice}"
    digest = blake2b(key.encode(errors="backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def _side(request: GenerationRequest) -> Side:
    """Return which end of a prompt is cut off: the beginning, as in vLLM, unless it is said."""
    return request.truncation_side or "left"


def _repetition(request: GenerationRequest) -> Repetition | None:
    asked = request.repetition_detection
    if asked is None or not asked.max_pattern_size:
        return None
    num_copies = min(asked.min_count, _NEVER_COPIES)
    return Repetition(max(1, asked.min_pattern_size), asked.max_pattern_size, num_copies)


def _or(value: _Number | None, default: _Number) -> _Number:
    return default if value is None else value

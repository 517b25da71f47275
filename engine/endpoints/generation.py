"""What chat and text completions share: from prompt ids and parameters to finished texts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol, TypeVar

from engine.contract import Usage
from engine.protocol.errors import RequestError
from engine.protocol.fields import GenerationRequest
from engine.scheduling.sequence import Sampling, SequenceRequest, SequenceResult
from engine.text.long_texts import LongTexts
from engine.text.stop_strings import StopStrings
from engine.text.text_model import TextModel

# Below this a text takes a few milliseconds at most, less than it is worth to hand it over.
_LARGE_TEXT_CHARS = 20_000
# Cooler than this is greedy; hotter than that is uniform, and would overflow in half precision.
_MIN_TEMPERATURE = 1e-5
_MAX_TEMPERATURE = 1e4
_SEED_BITS = 63

_Number = TypeVar("_Number", int, float)


class Generator(Protocol):
    """Anything that runs token sequences: the engine core, or a scripted stand-in."""

    async def generate(self, requests: Sequence[SequenceRequest]) -> list[SequenceResult]:
        """Run the sequences of one request together and return their results in the same order.

        Raises `RequestError` when one of them can never run (it needs more KV cache than there
        is): the whole request then fails. Cancelling the call drops the sequences.
        """


@dataclass(frozen=True, slots=True)
class Terms:
    """What an endpoint asks for beside the parameters that all requests share.

    `max_tokens` is what the request named in its field `max_tokens_param`, `default_max_tokens`
    what holds otherwise (None: the rest of the context). `logprobs` and `prompt_logprobs` count
    alternatives; None asks for none.
    """

    prompt_param: str
    max_tokens: int | None
    max_tokens_param: str = "max_tokens"
    default_max_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Generated:
    """One finished choice: the sequence's result, its text, and what a row says ended it."""

    result: SequenceResult
    text: str
    stop_reason: int | str | None


class TextGeneration:
    """Runs the prompts of one request through the generator; `seed` keys unseeded requests."""

    def __init__(self, model: TextModel, generator: Generator, *, seed: int) -> None:
        self.model = model
        self._generator = generator
        self._seed = seed
        self._long_texts = LongTexts(model.tokenizer)

    async def tokenize(self, text: str, *, param: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a prompt, in another thread when it is long.

        Raises `RequestError` naming `param` when the context cannot hold it; one that its bytes
        show to be too long is not tokenized.
        """
        tokenizer = self.model.tokenizer
        if len(text) <= _LARGE_TEXT_CHARS:
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            least = await asyncio.to_thread(tokenizer.least_tokens, text)
            self._check_prompt(least, param, words=f"at least {least} tokens")
            ids = await self._long_texts.encode(text, add_special_tokens=add_special_tokens)
        self._check_prompt(len(ids), param, words=f"{len(ids)} tokens")
        return ids

    async def run(
        self,
        prompts: Sequence[list[int]],
        request: GenerationRequest,
        terms: Terms,
        *,
        request_id: str,
    ) -> list[list[Generated]]:
        """Return the `n` choices of each prompt; raises `RequestError` before anything runs."""
        self._check_tokens(prompts, request, terms)
        sampling = self._sampling(request, terms)
        choices = request.n or 1
        sequences = [
            self._sequence(
                ids,
                request,
                # The choices of a prompt share its scores: the first one asks for them.
                terms if choice == 0 else replace(terms, prompt_logprobs=None),
                sampling=replace(sampling, seed=seed),
            )
            for number, ids in enumerate(prompts)
            for choice, seed in enumerate(self._seeds(request, choices, number, request_id))
        ]
        results = await self._generator.generate(sequences)
        if terms.prompt_logprobs is not None:
            results = [
                replace(result, prompt_logprobs=results[i - i % choices].prompt_logprobs)
                for i, result in enumerate(results)
            ]
        generated = [
            self._generated(sequence, result, request)
            for sequence, result in zip(sequences, results, strict=True)
        ]
        return [generated[i : i + choices] for i in range(0, len(generated), choices)]

    def _seeds(
        self, request: GenerationRequest, choices: int, prompt: int, request_id: str
    ) -> list[int]:
        return [
            seed_of_choice(
                request.seed,
                engine_seed=self._seed,
                request_id=request_id,
                prompt=prompt,
                choice=choice,
            )
            for choice in range(choices)
        ]

    def _sampling(self, request: GenerationRequest, terms: Terms) -> Sampling:
        defaults = self.model.defaults
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
            top_k=0 if top_k >= self.model.vocab_size else top_k,
            min_p=_or(request.min_p, defaults.min_p),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
            logit_bias=request.logit_bias or {},
            logprobs=terms.logprobs,
        )

    def _sequence(
        self, ids: list[int], request: GenerationRequest, terms: Terms, *, sampling: Sampling
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
        return SequenceRequest(
            prompt_ids=ids,
            max_tokens=max_tokens,
            sampling=sampling,
            min_tokens=min_tokens,
            stop_token_ids=stops if request.ignore_eos else stops | self.model.eos_token_ids,
            stop_text=self._stop_strings(request, min_tokens),
            prompt_logprobs=terms.prompt_logprobs,
            cache_salt=request.cache_salt or "",
        )

    def _stop_strings(self, request: GenerationRequest, min_tokens: int) -> StopStrings | None:
        if not request.stop:
            return None
        return StopStrings(
            tuple(request.stop),
            self.model.tokenizer,
            min_tokens=min_tokens,
            skip_special_tokens=request.skip_special_tokens is not False,
        )

    def _max_tokens(self, num_prompt_tokens: int, terms: Terms) -> int:
        """Return how many tokens may be generated after a prompt that must fit the context."""
        rest = self.model.max_model_len - num_prompt_tokens
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
            f"This model's maximum context length is {self.model.max_model_len} tokens. However, "
        )

    def _check_prompt(self, num_tokens: int, param: str, *, words: str) -> None:
        """Refuse a prompt whose tokens, and those that must follow, the context cannot hold."""
        if num_tokens > self.model.max_model_len:
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

    def _check_ids(self, ids: Sequence[int] | dict[int, float], param: str) -> None:
        size = self.model.vocab_size
        for token_id in ids:
            if not 0 <= token_id < size:
                raise RequestError(
                    f"`{param}` names token {token_id}; this model has tokens 0 to {size - 1}.",
                    param=param,
                )

    def _generated(
        self, sequence: SequenceRequest, result: SequenceResult, request: GenerationRequest
    ) -> Generated:
        """Return a result with its text, cut where a stop string or stop token ended it."""
        with_stop = bool(request.include_stop_str_in_output)
        skip_special_tokens = request.skip_special_tokens is not False
        ids, stops = result.token_ids, sequence.stop_text
        if isinstance(stops, StopStrings) and isinstance(result.stop_reason, str):
            data = stops.kept(ids, result.stop_reason, with_stop=with_stop)
        else:
            kept = ids[:-1] if result.finish_reason == "stop" and not with_stop else ids
            data = self.model.tokenizer.text_bytes(kept, skip_special_tokens=skip_special_tokens)
        return Generated(result, data.decode("utf-8", "replace"), _stop_reason(result, request))


def _stop_reason(result: SequenceResult, request: GenerationRequest) -> int | str | None:
    """Return what ended the sequence, as vLLM says it: nothing for the model's own end."""
    reason = result.stop_reason
    if isinstance(reason, int) and reason not in (request.stop_token_ids or ()):
        return None
    return reason


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


def usage_of(prompts: Sequence[list[int]], generated: Sequence[Sequence[Generated]]) -> Usage:
    """Return what a request cost: each prompt once, every choice's tokens."""
    return Usage(
        prompt_tokens=sum(map(len, prompts)),
        cached_tokens=sum(choices[0].result.num_cached_tokens for choices in generated),
        completion_tokens=sum(
            len(choice.result.token_ids) for choices in generated for choice in choices
        ),
    )


def _or(value: _Number | None, default: _Number) -> _Number:
    return default if value is None else value

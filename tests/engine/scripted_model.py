"""A text model of a few hundred tokens and a generator with scripted output."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tidemill.engine.endpoints import text_endpoints
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.endpoints.endpoint import Endpoint, RequestMetadata
from tidemill.engine.loop.core import StepOutput
from tidemill.engine.scheduling.sequence import SequenceRequest, SequenceResult
from tidemill.engine.scheduling.token_logprobs import (
    NO_LOGPROBS,
    TokenLogprob,
    TokenLogprobs,
    pack_logprobs,
)
from tidemill.engine.structured_output.grammar_backend import GrammarBackend
from tidemill.engine.text.chat_template import ChatTemplate
from tidemill.engine.text.text_model import SamplingDefaults, TextModel
from tidemill.engine.text.tokenizer import Tokenizer
from tidemill.engine.text.vocabulary import vocabulary_of
from tidemill.protocol.contract import EngineInfo, EngineStats, Reply
from tidemill.protocol.errors import RequestError

END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CREATED = 1_700_000_000
MAX_MODEL_LEN = 64
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = [
    "The capital of France is Paris.",
    "the capital of Norway is Oslo. user system assistant",
]


@cache
def byte_level_backend() -> Backend:
    """Return a byte-level BPE vocabulary with a few merges, so that words are several tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[END, TURN, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def pretrained_tokenizer(chat_template: str | None = TEMPLATE) -> Any:
    """Return transformers' tokenizer over the tiny vocabulary."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), eos_token=TURN_END, chat_template=chat_template
    )


def sentencepiece_tokenizer() -> Any:
    """Return a tokenizer of Llama 2's kind: a mark for spaces, bytes for the rest, `<s>` first."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for token in ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab"]:
        vocab[token] = len(vocab)
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template="{{ bos_token }}{{ messages[0].content }}",
    )


def text_model_of(
    pretrained: Any, *, has_template: bool = True, defaults: SamplingDefaults | None = None
) -> TextModel:
    """Return the text side of a model with this tokenizer and `MAX_MODEL_LEN` tokens of context."""
    vocabulary = vocabulary_of(pretrained)
    tokenizer, ends = Tokenizer(vocabulary), frozenset({pretrained.eos_token_id})
    return TextModel(
        tokenizer=tokenizer,
        chat_template=ChatTemplate(vocabulary) if has_template else None,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=len(pretrained),
        eos_token_ids=ends,
        grammars=GrammarBackend(tokenizer, len(pretrained), ends),
        defaults=defaults or SamplingDefaults(),
    )


def text_model(
    *, chat_template: str | None = TEMPLATE, defaults: SamplingDefaults | None = None
) -> TextModel:
    """Return the text side of the tiny byte-level model."""
    return text_model_of(
        pretrained_tokenizer(chat_template),
        has_template=chat_template is not None,
        defaults=defaults,
    )


INFO = EngineInfo("tiny", None, "test", "cpu", 0, 4)
METADATA = RequestMetadata("tiny", "req_0123", CREATED)

TextEndpoint = Endpoint[SequenceRequest, SequenceResult, Any]


class ScriptedGenerator:
    """Gives every sequence the same tokens, and ends it as an engine must.

    The log-probability of token `i` is `-i / 100`; the likeliest tokens are 0, 1, 2, …
    """

    def __init__(self, token_ids: Sequence[int], *, num_cached_tokens: int = 0) -> None:
        self.token_ids = list(token_ids)
        self.num_cached_tokens = num_cached_tokens
        self.requests: list[SequenceRequest] = []
        self.failure: Exception | None = None
        self.is_closed = False

    async def generate(self, requests: Sequence[SequenceRequest]) -> list[SequenceResult]:
        """Run the script once for each sequence."""
        return self.results(requests)

    def results(self, requests: Sequence[SequenceRequest]) -> list[SequenceResult]:
        """Return the results of the sequences without an event loop."""
        self.requests += requests
        if self.failure is not None:
            raise self.failure
        return [self._result(request) for request in requests]

    async def stream(
        self, requests: Sequence[SequenceRequest]
    ) -> AsyncGenerator[tuple[int, StepOutput[SequenceResult]], None]:
        """Run the script, one token of each sequence after another."""
        for place, event in events_of(requests, self.results(requests)):
            yield place, event

    def stats(self) -> EngineStats:
        """Return the number of sequences requested so far."""
        return EngineStats(waiting=len(self.requests))

    def close(self) -> None:
        """Note that there will be no more requests."""
        self.is_closed = True

    def _result(self, request: SequenceRequest) -> SequenceResult:
        token_ids: list[int] = []
        finish, reason = "length", None
        watch = None if request.stop_text is None else request.stop_text.watch()
        for token_id in self.token_ids[: request.max_tokens]:
            token_ids.append(token_id)
            stop = None if watch is None else watch.push(token_id)
            if len(token_ids) < request.min_tokens:
                continue
            if token_id in request.stop_token_ids or stop is not None:
                finish, reason = "stop", token_id if token_id in request.stop_token_ids else stop
                break
        num_top = request.sampling.logprobs
        num_prompt_top = request.prompt_logprobs
        first = min(max(1, request.logprob_start), len(request.prompt_ids))
        return SequenceResult(
            token_ids=token_ids,
            finish_reason="stop" if finish == "stop" else "length",
            stop_reason=reason,
            num_cached_tokens=self.num_cached_tokens,
            logprobs=None
            if num_top is None
            else pack_entries(
                [_logprob(i, num_top, request.sampling.logprob_token_ids) for i in token_ids]
            ),
            prompt_logprobs=None
            if num_prompt_top is None
            else pack_entries(
                [_logprob(i, num_prompt_top) for i in request.prompt_ids[first:]], first
            ),
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished item with this result."""

    outcome: SequenceResult

    def result(self) -> SequenceResult:
        """Return it."""
        return self.outcome


def events_of(
    requests: Sequence[SequenceRequest], results: Sequence[SequenceResult]
) -> Iterator[tuple[int, StepOutput[SequenceResult]]]:
    """Yield the engine's events of streamed sequences, one token at a time."""
    last = [max(1, len(result.token_ids)) - 1 for result in results]
    for number in range(max(last) + 1):
        for place, (request, result) in enumerate(zip(requests, results, strict=True)):
            assert request.is_streamed
            if number <= last[place]:
                here = slice(number, number + 1)
                yield (
                    place,
                    StepOutput(
                        Finished(result),
                        result.token_ids[here],
                        number == last[place],
                        (result.logprobs or NO_LOGPROBS).part(number, number + 1),
                        NO_LOGPROBS if number else result.prompt_logprobs or NO_LOGPROBS,
                    ),
                )


def pack_entries(entries: Sequence[TokenLogprob], num_unscored: int = 0) -> TokenLogprobs:
    """Return entries that have as many alternatives as each other, packed."""
    num_top = len(entries[0].top) if entries else 0
    packed = TokenLogprobs(num_top, num_unscored)
    tops = np.array([entry.top for entry in entries]).reshape(len(entries), num_top, 2)
    ids = np.array([entry.token_id for entry in entries])
    logprobs = np.array([entry.logprob for entry in entries])
    ranks = np.array([entry.rank or 0 for entry in entries])
    records = pack_logprobs(ids, logprobs, tops[..., 0], tops[..., 1], ranks)
    packed.append(records.tobytes())
    return packed


def _logprob(token_id: int, num_top: int, named: Sequence[int] = ()) -> TokenLogprob:
    top = sorted(named) or range(num_top)
    return TokenLogprob(token_id, -token_id / 100, tuple((i, -i / 100) for i in top), token_id + 1)


class Scene:
    """Endpoints over a scripted generator, which generates `answer` and then ends its turn.

    `served` is all of it behind the path that an engine's requests take; the functions here call
    the endpoints themselves.
    """

    def __init__(
        self,
        answer: str = " Paris.",
        *,
        model: TextModel | None = None,
        model_names: Sequence[str] = ("tiny", "tiny-alias"),
        adapters: Sequence[str] = (),
    ) -> None:
        self.model = model or text_model()
        self.tokenizer = self.model.tokenizer
        ids = self.tokenizer.encode(answer, add_special_tokens=False)
        self.generator = ScriptedGenerator([*ids, *self.model.eos_token_ids])
        endpoints = text_endpoints(self.model, seed=7)
        self.chats, self.completions, self.scoring, *_ = endpoints
        self.served = Dispatcher(
            endpoints, self.generator, INFO, model_names=model_names, adapters=adapters
        )

    def chat(self, content: object = "Hi", **fields: object) -> dict[str, Any]:
        """Return the body that answers one user message."""
        messages = [{"role": "user", "content": content}]
        return self.reply(self.chats, {"messages": messages, **fields}).body

    def complete(self, prompt: object = "The capital", **fields: object) -> dict[str, Any]:
        """Return the body that answers a prompt."""
        return self.reply(self.completions, {"prompt": prompt, **fields}).body

    def reply(self, endpoint: TextEndpoint, body: dict[str, Any]) -> Reply:
        """Return an endpoint's reply to a body."""
        prepared = endpoint.prepare(body, METADATA)
        return endpoint.finish(prepared, self.generator.results(prepared.requests))

    def chat_fault(self, **fields: object) -> RequestError:
        """Return the error that a chat body with these fields gets."""
        return self.fault(self.chats, {"messages": [{"role": "user", "content": "Hi"}], **fields})

    def completion_fault(self, **fields: object) -> RequestError:
        """Return the error that a completion body with these fields gets."""
        return self.fault(self.completions, {"prompt": "The capital", **fields})

    def fault(self, endpoint: TextEndpoint, body: dict[str, Any]) -> RequestError:
        """Return the error that a body gets before the generator hears of it."""
        with pytest.raises(RequestError) as raised:
            endpoint.prepare(body, METADATA)
        return raised.value

    def last(self) -> SequenceRequest:
        """Return the last sequence that the generator received."""
        return self.generator.requests[-1]

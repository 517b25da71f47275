"""Engine for Python programs: a child process, callable from any thread, task or notebook."""

from __future__ import annotations

import asyncio
import json
import re
import weakref
from base64 import b64decode
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from concurrent.futures import Future
from contextlib import AbstractContextManager, aclosing, suppress
from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, Self

from tidemill.offline.arguments.parser import Parser
from tidemill.offline.console.errors import CliError, Refused
from tidemill.offline.engine.demo_model import with_demo_model
from tidemill.offline.engine.engine import require_engine
from tidemill.offline.engine.options import (
    EngineOptions,
    add_engine_flags,
    engine_arguments,
    engine_command,
    engine_fields,
    stall_limit,
)
from tidemill.protocol.contract import EngineInfo, EngineStats
from tidemill.protocol.parameters import unknown_parameters
from tidemill.protocol.validation import short_repr

from .engine_process import EngineProcess
from .errors import RequestFailed, TidemillError
from .image_items import Image, items_of_images
from .in_flight import MAX_WAIT_SECONDS, InFlight, Sent, answers_to
from .progress import Progress, progress_of
from .public import public
from .text_items import Text, items_of

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

CHAT: Final = "/v1/chat/completions"
EMBEDDINGS: Final = "/v1/embeddings"
_CLASSIFY: Final = "/v1/classify"
_POOLING: Final = "/pooling"
_DECISIONS: Final = "/v1/decisions"
_END: Final = object()
"""Marks the end of an async iterable, which may yield any malformed request."""

Request = Mapping[str, Any] | tuple[str, Mapping[str, Any]]
"""A request body, or a pair of URL and body."""


DecisionInput = str | Sequence[Mapping[str, Any]]
"""The input of a decision: text, or messages, tool calls and their outputs."""

Question = str | Mapping[str, Any]
"""A question: its body or, as a string, a yes/no question or one with options."""

Questions = Question | Sequence[Question]
"""One question, or several."""

_WITH_OPTIONS: Final = re.compile(r"\s*\w+\s*=(\s*:|[^:?]*[|<][^:?]*(:|$))")


@public
class Engine:
    """An engine in a child process, which starts immediately and loads in the background.

    `options` are the flags of `tidemill run` for model and engine, with underscores
    (`max_num_seqs=64`). The process ends with `close`, at exit, or when the engine is
    garbage-collected. Methods may be called from any thread and any event loop, and wait for the
    model; they raise EngineDied once the process has ended.

    >>> with Engine(max_num_seqs=64) as engine:
    ...     engine.info().max_num_seqs
    64
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        try:
            given = options_of({"model": model, **options})
            require_engine("an engine", given.model)
        except CliError as exc:
            raise TidemillError(str(exc)) from exc
        command = engine_command(with_demo_model(given), "--own-weights")
        self.process = EngineProcess(command, stall_seconds=stall_limit(given))
        self._close = weakref.finalize(self, self.process.close)

    async def answer(self, body: Mapping[str, Any], *, url: str = CHAT) -> dict[str, Any]:
        """Return the body of the response; raises RequestFailed if the request fails.

        Cancelling the call cancels the request.

        >>> ask = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
        >>> answer = asyncio.run(engine.answer({**ask, "temperature": 0}))
        >>> "Paris" in answer["choices"][0]["message"]["content"]
        True
        """
        return await asyncio.wrap_future(self.process.send(url, body).future)

    def answer_one(self, body: Mapping[str, Any], *, url: str = CHAT) -> dict[str, Any]:
        """Return the body of the response, like `answer`, but without `await`.

        >>> ask = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
        >>> answer = engine.answer_one({**ask, "temperature": 0})
        >>> "Paris" in answer["choices"][0]["message"]["content"]
        True
        """
        future = self.process.send(url, body).future
        try:
            return future.result()
        finally:
            future.cancel()

    def answer_many(
        self,
        requests: Iterable[Request] | AsyncIterable[Request],
        *,
        url: str = CHAT,
        in_order: bool = True,
        max_inflight: int | None = None,
        progress: bool = True,
    ) -> Answers:
        """Return the answers to many requests, to iterate over with `for` or `async for`.

        A failed request yields its RequestFailed in its place. Requests are consumed as the
        engine needs them, so that an infinite iterable is possible. Without `in_order`, answers
        are yielded as they finish, each with its position: `(3, {…})`. Notebooks and terminals
        show a progress bar unless `progress` is False.

        >>> ask = {"messages": [{"role": "user", "content": "What is the capital of Japan?"}]}
        >>> answer, failed = engine.answer_many([{**ask, "temperature": 0}, {"messages": []}])
        >>> "Tokyo" in answer["choices"][0]["message"]["content"], failed.message
        (True, '`messages` must not be empty.')
        """
        return Answers(self, requests, url, in_order, max_inflight, progress=progress)

    def embed(self, texts: Iterable[str], *, progress: bool = True, **params: Any) -> NDArray[Any]:
        """Return one vector per text, as rows; `params` are parameters of `/v1/embeddings`.

        For a model with 384 dimensions, `engine.embed(["ebb", "flow"]).shape` is `(2, 384)`. The
        elements are `float32`, or have the type of an `output_dtype`.
        """
        params |= {"encoding_format": "base64"}
        items = [*items_of(self.answer_many, texts, EMBEDDINGS, params, progress=progress)]
        return _rows_of(items, params)

    def embed_images(
        self, images: Iterable[Image], *, progress: bool = True, **params: Any
    ) -> NDArray[Any]:
        """Return one vector per image, as rows, in the same space as the vectors of texts.

        An image is a URL (`https://`, `s3://` or `data:`), a path, the bytes of a file, or an image
        of Pillow. The model is CLIP or SigLIP; `params` are parameters of `/v1/embeddings`.
        """
        params |= {"encoding_format": "base64"}
        items = [*items_of_images(self.answer_many, images, EMBEDDINGS, params, progress=progress)]
        return _rows_of(items, params)

    def embed_sparse(
        self, texts: Iterable[str], *, progress: bool = True, **params: Any
    ) -> list[dict[int, float]]:
        """Return the sparse vector of each text: weights by token ID, such as `{1012: 0.4}`.

        The model is one of SPLADE or BGE-M3; `params` are parameters of `/pooling`.
        """
        params |= {"task": "embed_sparse"}
        return [
            {pair["index"]: pair["value"] for pair in item["data"]}
            for item in items_of(self.answer_many, texts, _POOLING, params, progress=progress)
        ]

    def embed_tokens(
        self, texts: Iterable[str], *, progress: bool = True, **params: Any
    ) -> list[NDArray[Any]]:
        """Return the vectors of each text's tokens, as rows; `params` are those of `/pooling`.

        ColBERT models need `prompt_name="document"` or `"query"`.
        """
        import numpy as np

        params |= {"task": "token_embed", "encoding_format": "float"}
        # Several long texts would have more numbers than a response may have.
        items = items_of(
            self.answer_many, texts, _POOLING, params, progress=progress, per_request=1
        )
        return [np.array(item["data"], np.float32) for item in items]

    def classify(
        self, texts: Iterable[Text], *, progress: bool = True, **params: Any
    ) -> list[dict[str, Any]]:
        """Return the label of each text or pair of texts, and the number of each label.

        `params` are parameters of `/v1/classify`. A classifier of moods may return
        `{"label": "good", "score": 0.9, "scores": {"bad": 0.1, "good": 0.9}}` for a text. A token
        classifier returns the labeled spans of a text: `{"spans": [{"label": "PER", "score": 0.9,
        "start": 0, "end": 3, "text": "Ada"}]}`.
        """
        return [
            {"spans": item["spans"]}
            if "spans" in item
            else {
                "label": item["label"],
                "score": max(item["probs"]),
                "scores": dict(zip(item["labels"], item["probs"], strict=True)),
            }
            for item in items_of(self.answer_many, texts, _CLASSIFY, params, progress=progress)
        ]

    def decide(
        self, input: DecisionInput, questions: Questions, **params: Any
    ) -> list[dict[str, Any]]:
        """Return the answers to questions about one input, in the order of the questions.

        `input` and `questions` have the forms of `/v1/decisions`. A string is a yes/no question, or
        has a name and options: `"team = billing|shipping: Which team?"`. `params` are further
        parameters of `/v1/decisions`. Raises RequestFailed, and TidemillError for invalid options.

        >>> [answer] = engine.decide("The Seine flows through Paris.", ["Is a city named?"])
        >>> answer["type"], 0 <= answer["probability"] <= 1
        ('predicate', True)
        """
        body = {**_fixed(questions, params), "input": input}
        answers: list[dict[str, Any]] = self.answer_one(body, url=_DECISIONS)["answers"]
        return answers

    def decide_many(
        self,
        inputs: Iterable[DecisionInput],
        questions: Questions,
        *,
        progress: bool = True,
        **params: Any,
    ) -> list[list[dict[str, Any]] | RequestFailed]:
        """Return the answers of `decide` for each input; a failed one has its RequestFailed."""
        if isinstance(inputs, (str, bytes, Mapping)) or not isinstance(inputs, Iterable):
            raise TypeError("`inputs` must be a list of inputs: use `decide` for a single one")
        fixed = _fixed(questions, params)
        bodies = [{**fixed, "input": each} for each in inputs]
        answers = self.answer_many(bodies, url=_DECISIONS, progress=progress)
        return [
            answer if isinstance(answer, RequestFailed) else answer["answers"] for answer in answers
        ]

    def answer_table(self, table: Any, *, progress: bool = True, **recipe: Any) -> pa.Table:
        """Return a table with answers in columns next to its own, as `tidemill run` does.

        `table` is a `pyarrow.Table`, a data frame, a `datasets.Dataset`, a list of dicts, the path
        of a table or anything that Arrow can read; `recipe` has the keys of a recipe
        (`prompt="Label: {{ text }}"`). Only a table given by its path may have paths of images,
        PDFs and recordings in its cells. Raises TidemillError for an invalid recipe; column `error`
        contains the error of a failed row.

        >>> cities = {"country": ["France", "Japan"]}
        >>> prompt = "What is the capital of {{ country }}?"
        >>> found = engine.answer_table(cities, prompt=prompt, params={"temperature": 0})
        >>> ["Paris" in text or "Tokyo" in text for text in found.column("text").to_pylist()]
        [True, True]
        """
        from .tables import answer_table

        return answer_table(self.process, table, recipe, progress=progress)

    def info(self) -> EngineInfo:
        """Return model, device and limits, once the model is loaded."""
        return self.process.info()

    @property
    def pid(self) -> int:
        """Return the ID of the engine's process, once the model is loaded."""
        return self.process.pid()

    def stats(self) -> EngineStats:
        """Return the numbers of running and waiting requests, and totals since the start."""
        return self.process.stats()

    def close(self) -> None:
        """End the process; requests in flight raise EngineDied."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


def _rows_of(items: Sequence[Mapping[str, Any]], params: Mapping[str, Any]) -> NDArray[Any]:
    """Return the vectors of items in base64."""
    import numpy as np

    from tidemill.protocol.embeddings import TYPE_CODES

    if not items:
        return np.zeros((0, 0), np.float32)
    code = TYPE_CODES[params.get("output_dtype") or "float"]
    return np.stack([np.frombuffer(b64decode(one["embedding"]), f"<{code}") for one in items])


class Answers:
    """Answers to many requests; iterate over them once, with `for` or `async for`."""

    def __init__(
        self,
        engine: Engine,
        requests: Iterable[Request] | AsyncIterable[Request],
        url: str,
        in_order: bool,  # noqa: FBT001 - as `answer_many` was called
        max_inflight: int | None,
        *,
        progress: bool,
    ) -> None:
        self._engine = engine  # keeps the engine's process alive
        self._requests = requests
        self._url = url
        self._in_order = in_order
        self._max_inflight = max_inflight
        self._progress = progress

    def __iter__(self) -> Iterator[Any]:
        """Yield the answers; the requests must be an iterable."""
        if not isinstance(self._requests, Iterable):
            raise TypeError("these requests come from an async iterable: use `async for`")
        sent = map(self._send, self._requests)
        limit = self._limit()
        with self._shown() as shown:
            for place, answer in answers_to(sent, limit, in_order=self._in_order):
                shown.add(is_failed=isinstance(answer, RequestFailed))
                yield answer if self._in_order else (place, answer)

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Yield the answers; the requests may be an async iterable."""
        limit = await asyncio.to_thread(self._limit)
        with self._shown() as shown:
            async with aclosing(self._in_loop(limit)) as answers:
                async for place, answer in answers:
                    shown.add(is_failed=isinstance(answer, RequestFailed))
                    yield answer if self._in_order else (place, answer)

    async def _in_loop(self, limit: int) -> AsyncGenerator[tuple[int, Any], None]:
        """Yield the positions and the answers."""
        answered, loop = asyncio.Event(), asyncio.get_running_loop()

        def notify() -> None:
            with suppress(RuntimeError):  # the loop is closed, so nothing waits
                loop.call_soon_threadsafe(answered.set)

        remaining, is_more = aiter(_as_async(self._requests)), True
        reading: asyncio.Task[Any] | None = None
        running = InFlight[dict[str, Any]](limit, notify, in_order=self._in_order)
        try:
            while is_more or running:
                # In a separate task, because the source may itself wait for answers.
                if is_more and reading is None and not running.is_full:
                    reading = asyncio.create_task(_next(remaining))
                waiting = asyncio.create_task(answered.wait())
                parts = {waiting} if reading is None else {waiting, reading}
                await asyncio.wait(
                    parts, timeout=MAX_WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                waiting.cancel()
                answered.clear()
                if reading is not None and reading.done():
                    if (request := reading.result()) is _END:
                        is_more = False
                    else:
                        running.add(self._send(request))
                    reading = None
                for found in running.take():
                    yield found
        finally:
            if reading is not None:
                reading.cancel()
            running.cancel()

    def _shown(self) -> AbstractContextManager[Progress]:
        total = len(self._requests) if isinstance(self._requests, Sized) else None
        return progress_of("requests", total, is_wanted=self._progress)

    def _limit(self) -> int:
        return self._max_inflight or self._engine.process.max_inflight()

    def _send(self, request: Request) -> Sent[dict[str, Any]]:
        try:
            return self._engine.process.send(*self._pair_of(request))
        except TypeError as exc:
            failed: Future[dict[str, Any]] = Future()
            failed.set_exception(
                RequestFailed(str(exc), status_code=400, code="invalid_json", param=None)
            )
            return Sent(failed, 0)

    def _pair_of(self, request: object) -> tuple[str, Mapping[str, Any]]:
        """Return the url and the body of a request; raises TypeError for another value."""
        match request:
            case Mapping():
                return self._url, request
            case (str(url), Mapping() as body):
                return url, body
        raise TypeError(
            f"a request must be a body, or a pair such as ('{CHAT}', body); got "
            f"{short_repr(request)}"
        )


def _fixed(questions: Questions, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of decisions without input; raises TidemillError for unknown parameters."""
    if unknown := unknown_parameters(_DECISIONS, params):
        from tidemill.protocol.decisions.openai_body import DecisionRequest  # late: slow to load

        known = [*DecisionRequest.model_fields.keys() - {"model", "input", "questions"}]
        raise TidemillError(
            f"`{unknown[0]}` is not a parameter of {_DECISIONS}: use {', '.join(sorted(known))}"
        )
    each: object = [questions] if isinstance(questions, (str, Mapping)) else questions
    if isinstance(each, bytes) or not isinstance(each, Iterable):
        raise TypeError(f"`questions` must be a question or a list; got {short_repr(questions)}")
    return {**params, "questions": [*map(_question, each)]}


def _question(given: Question) -> Mapping[str, Any]:
    """Return the body of a question; raises TidemillError for a text with invalid options."""
    if not isinstance(given, str):
        return given
    if not _WITH_OPTIONS.match(given):
        return {"type": "predicate", "instructions": given}
    from tidemill.batch.table.errors import RecipeError  # late: few questions need these
    from tidemill.batch.table.questions import questions_of

    try:
        [question] = questions_of({"ask": given})
    except RecipeError as exc:
        raise TidemillError(str(exc)) from exc
    return question.body


def options_of(given: Mapping[str, Any]) -> EngineOptions:
    """Return the options, parsed like flags; raises Refused for an invalid option or value."""
    known = [option.name for option in fields(EngineOptions)]
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f": did you mean `{near[0]}`?" if near else ""
            raise Refused(f"unknown engine option `{name}`{hint}")
    texts: dict[str, Any] = {
        name: json.dumps(value) if isinstance(value, Mapping) else value
        for name, value in given.items()
    }
    parser = Parser(prog="tidemill run", allow_abbrev=False)
    add_engine_flags(parser)
    return EngineOptions(
        **engine_fields(parser.parse_args(engine_arguments(EngineOptions(**texts))))
    )


async def _next(requests: AsyncIterator[Request]) -> Any:
    return await anext(requests, _END)


async def _as_async(requests: Iterable[Request] | AsyncIterable[Request]) -> AsyncIterator[Request]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
        return
    for request in requests:
        yield request

"""Texts of many bodies are tokenized together, off the event loop; each has its own result."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.scripted_encoder import SCORE, Scene, encoder_model
from tidemill.engine.endpoints.classification import Classify
from tidemill.engine.endpoints.endpoint import RequestMetadata
from tidemill.engine.endpoints.text_batches import TextBatcher
from tidemill.engine.endpoints.text_draft import TextDraft

EMBEDDINGS = "/v1/embeddings"


class Reader:
    """Returns the letters of each text; records each call's texts and thread."""

    def __init__(self, read: Callable[..., list[Any]] | None = None) -> None:
        self._read = read
        self.calls: list[Sequence[str]] = []
        self.threads: set[int] = set()
        self.go_on = threading.Event()
        self.go_on.set()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the reader that this one records."""
        return getattr(self._read.__self__, name)  # type: ignore[union-attr]

    async def called(self) -> None:
        """Wait for the first call."""
        while not self.calls:  # noqa: ASYNC110 - it is in a thread
            await asyncio.sleep(0.001)

    def read(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Any]:
        """Return the letters of each text, "bad" excepted."""
        self.calls.append(list(texts))
        self.threads.add(threading.get_ident())
        self.go_on.wait()
        if self._read is not None:
            return self._read(texts, add_special_tokens=add_special_tokens)
        if "bad" in texts:
            raise TypeError("a bad text")
        return [list(text) if add_special_tokens else text for text in texts]


def read_all(
    batcher: TextBatcher, reader: Reader, *drafts: Sequence[str], add_special_tokens: bool = True
) -> list[asyncio.Task[Any]]:
    """Start to read drafts of such texts, each with its number of letters as its bytes."""
    return [
        asyncio.create_task(
            batcher.read(TextDraft(reader, texts, add_special_tokens, tuple), sum(map(len, texts)))
        )
        for texts in drafts
    ]


async def test_texts_of_one_turn_are_one_call_in_a_thread() -> None:
    """Each draft gets its own encodings; one without texts needs no call."""
    reader, batcher = Reader(), TextBatcher(short_bytes=10)
    tasks = read_all(batcher, reader, ["ab", "c"], [], ["d"])
    assert await asyncio.gather(*tasks) == [(["a", "b"], ["c"]), (), (["d"],)]
    assert reader.calls == [["ab", "c", "d"]]
    assert threading.get_ident() not in reader.threads
    assert batcher.seconds > 0


async def test_a_short_draft_alone_stays_on_the_loop() -> None:
    """Moving it to a thread would take longer; a longer one moves."""
    reader, batcher = Reader(), TextBatcher(short_bytes=3)
    await asyncio.gather(*read_all(batcher, reader, ["abc"]))
    assert reader.threads == {threading.get_ident()}
    await asyncio.gather(*read_all(batcher, reader, ["abcd"]))
    assert len(reader.threads) == 2


async def test_drafts_that_arrive_during_a_batch_are_the_next_one() -> None:
    """A batch is limited in bytes, and has one kind of special tokens."""
    reader, batcher = Reader(), TextBatcher(short_bytes=0, max_bytes=4)
    reader.go_on.clear()
    tasks = read_all(batcher, reader, ["aaaaaaaa"])
    await reader.called()
    tasks += read_all(batcher, reader, ["bb"], ["cc"], ["dd"])
    tasks += read_all(batcher, reader, ["ee"], add_special_tokens=False)
    reader.go_on.set()
    *_, last = await asyncio.gather(*tasks)
    assert last == ("ee",)
    assert reader.calls == [["aaaaaaaa"], ["bb", "cc"], ["dd"], ["ee"]]


async def test_a_bad_text_fails_its_own_draft_only() -> None:
    """The others of its batch are read one by one."""
    reader, batcher = Reader(), TextBatcher(short_bytes=0)
    results = await asyncio.gather(
        *read_all(batcher, reader, ["a"], ["bad"], ["b"]), return_exceptions=True
    )
    assert results[0] == (["a"],)
    assert isinstance(results[1], TypeError)
    assert results[2] == (["b"],)


async def test_an_aborted_draft_leaves_the_others() -> None:
    """It is not read if it had not started, and its batch goes on if it had."""
    reader, batcher = Reader(), TextBatcher(short_bytes=0, max_bytes=2)
    reader.go_on.clear()
    tasks = read_all(batcher, reader, ["a"], ["b"], ["c"], ["d"])
    await reader.called()
    tasks[0].cancel()
    tasks[2].cancel()
    reader.go_on.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [results[1], results[3]] == [(["b"],), (["d"],)]
    assert reader.calls == [["a", "b"], ["d"]]


def test_another_event_loop_starts_from_scratch() -> None:
    """A loop that ended during a batch does not block the next one."""
    reader, batcher = Reader(), TextBatcher(short_bytes=0)
    reader.go_on.clear()

    async def leave() -> None:
        read_all(batcher, reader, ["a"])
        await reader.called()

    async def read() -> list[Any]:
        return await asyncio.gather(*read_all(batcher, reader, ["b"]))

    asyncio.run(leave())
    reader.go_on.set()
    assert asyncio.run(read()) == [(["b"],)]


async def test_thousands_of_short_drafts_that_are_alone_are_read() -> None:
    """Neighbours with other special tokens do not form a batch; each is read by itself."""
    batcher, reader = TextBatcher(short_bytes=10), Reader()
    tasks = [
        task
        for number in range(2000)
        for task in read_all(batcher, reader, ["a"], add_special_tokens=number % 2 == 0)
    ]
    assert len(await asyncio.wait_for(asyncio.gather(*tasks), 60)) == 2000


@pytest.mark.parametrize(
    ("url", "model", "body"),
    [
        (EMBEDDINGS, encoder_model(), lambda n: {"input": [f"row {n}", "tide " * (n % 9 + 1)]}),
        (EMBEDDINGS, encoder_model(), lambda n: {"input": [101, 1000 + n, 102]}),
        ("/score", encoder_model(), lambda n: {"text_1": f"row {n}", "text_2": ["tide", f"{n}"]}),
        ("/score", encoder_model(SCORE), lambda n: {"text_1": f"row {n}", "text_2": "tide"}),
        ("/rerank", encoder_model(SCORE), lambda n: {"query": f"{n}", "documents": ["a", "b"]}),
    ],
)
async def test_rows_are_those_of_single_requests(
    url: str, model: Any, body: Callable[[int], dict[str, Any]]
) -> None:
    """Sixty rows take one call of the tokenizer, in a thread; errors are their own row's."""
    reader = Reader(model.reader.read)
    batched, single = (Scene(replace(model, reader=own)) for own in (reader, model.reader))
    bodies = [
        {**body(number), "truncate_prompt_tokens": 1000 * (number == 7)} for number in range(60)
    ]
    bodies = [
        {key: value for key, value in one.items() if value} | {"model": "tiny"} for one in bodies
    ]
    together = await asyncio.gather(*(batched.reply(url, **one) for one in bodies))
    alone = [await single.reply(url, **one) for one in bodies]
    assert together == alone
    assert [place for place, one in enumerate(alone) if one.status_code != 200][:1] == [7]
    assert len(reader.calls) <= 1
    assert threading.get_ident() not in reader.threads


def test_pairs_of_a_template_are_not_drafted() -> None:
    """Templates are rendered in a thread, also those of a classifier; single texts need none."""
    model = encoder_model(SCORE, template="{{ messages[0].content }}", labels=("LABEL_0",))
    metadata = RequestMetadata("tiny", "req_1", 0)
    pair = {"text": "a", "text_pair": "b"}
    for body in ({"input": pair}, {"messages": [{"role": "user", "content": "a"}]}):
        assert Classify(model).draft(body, metadata) is None
    assert Classify(model).draft({"input": "a"}, metadata) is not None
    assert Classify(encoder_model(SCORE)).draft({"input": pair}, metadata) is not None

"""How many bytes of long texts are tokenized at once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from engine.protocol.errors import RequestError
from engine.text.long_texts import LongTexts
from engine.text.tokenizer import Tokenizer
from engine.text.vocabulary import vocabulary_of
from tests.engine.scripted_model import pretrained_tokenizer


class SlowTokenizer(Tokenizer):
    """Tokenizes when it is let, and notes how much it had in hand at most."""

    def __init__(self) -> None:
        super().__init__(vocabulary_of(pretrained_tokenizer()))
        self.go_on = threading.Event()
        self.now = self.most = 0
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Wait for the word, then tokenize."""
        with self._lock:
            self.now += len(text)
            self.most = max(self.most, self.now)
        self.go_on.wait()
        try:
            return super().encode(text, add_special_tokens=add_special_tokens)
        finally:
            with self._lock:
                self.now -= len(text)


def start(texts: LongTexts, *given: str) -> list[asyncio.Task[list[int]]]:
    """Begin to tokenize some texts."""
    return [asyncio.ensure_future(texts.encode(text, add_special_tokens=False)) for text in given]


async def settle(condition: Any) -> None:
    """Let others run until something holds."""
    while not condition():  # noqa: ASYNC110 - what is waited for happens in threads
        await asyncio.sleep(0.001)


async def test_texts_share_the_room_and_come_out_right() -> None:
    """Ten texts of 40 in a room of 100: two at a time, each with its own tokens."""
    tokenizer = SlowTokenizer()
    given = [chr(ord("a") + number) * 40 for number in range(10)]
    tasks = start(LongTexts(tokenizer, 100), *given)
    await settle(lambda: tokenizer.now == 80)
    tokenizer.go_on.set()
    results = await asyncio.gather(*tasks)
    assert tokenizer.most <= 100
    assert [tokenizer.text(ids) for ids in results] == given


async def test_a_text_above_the_bound_has_its_turn_alone() -> None:
    """It waits for those before it, and those behind it wait."""
    tokenizer = SlowTokenizer()
    tokenizer.go_on.set()
    texts = LongTexts(tokenizer, 100)
    results = await asyncio.gather(*start(texts, "a" * 60, "b" * 1_000, "c" * 60))
    assert tokenizer.most == 1_000
    assert list(map(len, results)) == [60, 1_000, 60]


async def test_bytes_are_counted_not_characters() -> None:
    """Three characters of four bytes each leave no room for a fourth in twelve bytes."""
    tokenizer = SlowTokenizer()
    tasks = start(LongTexts(tokenizer, 12), "😀😀😀", "a")
    await settle(lambda: tokenizer.now == 3)
    tokenizer.go_on.set()
    await asyncio.gather(*tasks)
    assert tokenizer.most == 3


async def test_one_that_is_called_off_keeps_its_room_until_its_thread_is_done() -> None:
    """Nothing stops the thread; one that had not begun gives its turn to the next."""
    tokenizer = SlowTokenizer()
    working, waiting, last = start(LongTexts(tokenizer, 100), "a" * 90, "b" * 90, "c" * 90)
    await settle(lambda: tokenizer.now == 90)
    working.cancel()
    waiting.cancel()
    await asyncio.wait([working, waiting])
    assert tokenizer.most == 90
    tokenizer.go_on.set()
    assert tokenizer.text(await last) == "c" * 90
    assert tokenizer.most == 90


async def test_a_text_that_fails_gives_its_room_back() -> None:
    """What is no Unicode is refused, and the next one runs."""
    tokenizer = SlowTokenizer()
    tokenizer.go_on.set()
    broken, good = start(LongTexts(tokenizer, 100), "\ud800" * 90, "a" * 90)
    with pytest.raises(RequestError):
        await broken
    assert len(await good) == 90

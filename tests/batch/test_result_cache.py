"""Which results are reused, and the handling of broken databases."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch import result_cache
from tidemill.batch.file.lines import Line
from tidemill.batch.file.rows import print_cached, print_reply
from tidemill.batch.result_cache import (
    FILE_NAME,
    ResultCache,
    list_totals,
    open_database,
    remove_results,
    trim,
)
from tidemill.batch.result_key import VERSION, CacheError, ResultKeys, Scope

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
RESPONSES = "/v1/responses"
GREEDY = {"messages": [], "temperature": 0}
FIRST, SECOND = "a" * 24, "b" * 24
BODY = b'{"id":"chatcmpl-%s","created":100,"text":"\\"created\\":100"}'
REPLY = BODY % FIRST.encode()
SCOPE = Scope(b"one", "model")
KEY = b"k" * 16


def key_of(body: dict[str, Any], url: str = CHAT, digest: str = FIRST) -> bytes | None:
    """Return the key of a request to a server of `m`, which has an adapter `b`."""
    return ResultKeys(["m", "b"]).key_of(url, body, digest)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ResultCache]:
    """Return a cache with one result."""
    with closing(ResultCache.open(tmp_path, SCOPE)) as cache:
        cache.add(KEY, FIRST, 100, REPLY)
        cache.flush()
        yield cache


def test_a_result_is_adapted_to_its_line(cache: ResultCache) -> None:
    """It gets the line's IDs and time; the model's text stays."""
    text = b'{"id":"chatcmpl-%s","created":7,"text":"\\"created\\":100"}' % SECOND.encode()
    assert cache.find(KEY, SECOND, 7) == text
    assert cache.find(b"x" * 16, SECOND, 7) is None
    response = b'{"id":"resp_%s","created_at":100}'
    cache.add(b"r" * 16, FIRST, 100, response % FIRST.encode())
    assert cache.find(b"r" * 16, SECOND, 7) == response.replace(b"100", b"7") % SECOND.encode()


def test_another_scope_finds_nothing(cache: ResultCache, tmp_path: Path) -> None:
    """Results of another model, or of another way to compute them, are different."""
    with closing(ResultCache.open(tmp_path, Scope(b"two", "model"))) as other:
        assert other.find(KEY, SECOND, 7) is None
        assert cache.find(KEY, SECOND, 7) is not None


def test_several_runs_share_a_folder(tmp_path: Path) -> None:
    """Each run finds what another has written at the same time, without waiting for its end."""
    with (
        closing(ResultCache.open(tmp_path, SCOPE)) as one,
        closing(ResultCache.open(tmp_path, SCOPE)) as other,
    ):
        for number in range(600):
            one.add(b"one %d" % number, FIRST, 1, REPLY)
            other.add(b"other %d" % number, FIRST, 1, REPLY)
            other.add(b"both %d" % number, FIRST, 1, REPLY)
            one.add(b"both %d" % number, FIRST, 1, REPLY)
        assert other.find(b"one 0", SECOND, 7) is not None
    with closing(open_database(tmp_path)) as database:
        assert [total.num_results for total in list_totals(database)] == [1_800]


@pytest.mark.parametrize(
    ("url", "body", "is_determined"),
    [
        (CHAT, GREEDY, True),
        (CHAT, {"messages": [], "seed": 0}, True),
        (CHAT, {"messages": []}, False),
        (CHAT, {"messages": [], "temperature": 0.5}, False),
        (EMBEDDINGS, {"input": "x"}, True),
        (RESPONSES, {"input": "x"}, False),
        ("/v1/none", GREEDY, None),
        (CHAT, {**GREEDY, "messages": [{"content": '"url":"http://x"'}]}, True),
        (CHAT, {**GREEDY, "model": "another"}, None),
        (CHAT, {**GREEDY, "model": 1}, None),
    ],
)
def test_only_reproducible_requests_have_a_key(
    url: str, body: dict[str, Any], *, is_determined: bool | None
) -> None:
    """With `sampled`, every request has one."""
    assert (key_of(body, url) is not None) == bool(is_determined)
    sampled = ResultKeys(["m"], sampled=True).key_of(url, body, FIRST)
    assert (sampled is not None) == (is_determined is not None)


def test_keys_ignore_parameters_without_effect() -> None:
    """They ignore the order of parameters too, and nothing else."""
    key = key_of({**GREEDY, "max_tokens": 3})
    assert key == key_of({"max_tokens": 3, **GREEDY, "user": "me", "metadata": {}})
    others = [{**GREEDY, "max_tokens": 4}, GREEDY, {**GREEDY, "max_tokens": 3, "model": "b"}]
    assert key not in {key_of(body) for body in others}
    assert key_of({**GREEDY, "max_tokens": 3}, "/v1/completions") != key
    response = {"input": "Hi", "temperature": 0}
    assert key_of({**response, "user": "me"}, RESPONSES) == key_of(response, RESPONSES)
    assert key_of({**response, "metadata": {"a": "b"}}, RESPONSES) != key_of(response, RESPONSES)


@given(custom_id=st.text(), text=st.text(st.characters(codec="utf-8")))
def test_a_row_of_a_cached_reply_is_the_row_of_the_reply(custom_id: str, text: str) -> None:
    """They are equal byte for byte."""
    line = Line(1, custom_id.encode("utf-8", "replace").decode(), CHAT, {}, FIRST, f"req_{FIRST}")
    body = {"id": "x", "text": text}
    printed = print_reply(line, 200, body)
    start = printed.index(b'"body":') + len(b'"body":')
    assert print_cached(line, printed[start : -len(b'},"error":null}\n')]) == printed


def test_a_damaged_body_is_not_found(cache: ResultCache, tmp_path: Path) -> None:
    """It is computed and written again."""
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database, database:
        database.execute("UPDATE results SET record = X'00'")
    assert cache.find(KEY, SECOND, 7) is None
    cache.add(KEY, SECOND, 7, REPLY)
    cache.flush()
    assert cache.find(KEY, SECOND, 7) is not None


def foreign(path: Path) -> None:
    """Write a file that is not a database."""
    path.write_bytes(b"no database" * 1_000)


def newer(path: Path) -> None:
    """Write a database of a future version."""
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 99")


def torn(path: Path) -> None:
    """Truncate a database in the middle of its first page."""
    with closing(ResultCache.open(path.parent, SCOPE)) as cache:
        cache.add(KEY, FIRST, 100, REPLY)
    path.write_bytes(path.read_bytes()[:2_000])


def unwritable(path: Path) -> None:
    """Put a folder in its place."""
    path.mkdir()


@pytest.mark.parametrize("version", [0, VERSION])
@pytest.mark.parametrize("name", ["runs", "results"])
def test_another_programs_database_stays_unchanged(tmp_path: Path, name: str, version: int) -> None:
    """The cache adds no table to it, and no journal next to it."""
    path = tmp_path / FILE_NAME
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"CREATE TABLE {name} (id INTEGER)")
        database.execute(f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    with pytest.raises(CacheError, match=f"another program's database, with the table '{name}'"):
        ResultCache.open(tmp_path, SCOPE)
    assert (path.read_bytes(), [*tmp_path.iterdir()]) == (before, [path])


@pytest.mark.parametrize("harm", [foreign, newer, torn, unwritable])
def test_an_unusable_database_is_reported(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """There is one type of error."""
    harm(tmp_path / FILE_NAME)
    with pytest.raises(CacheError):
        ResultCache.open(tmp_path, SCOPE)


def test_an_unusable_folder_is_reported(tmp_path: Path) -> None:
    """A file is in its place."""
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="cannot create the folder"):
        ResultCache.open(tmp_path / "file", SCOPE)


def filled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> sqlite3.Connection:
    """Return a database of two models, whose results were used on days 1 to 4."""
    for day in (1, 2, 3, 4):
        monkeypatch.setattr(result_cache.time, "time", lambda day=day: day * 86_400 + 5.0)
        with closing(ResultCache.open(folder, Scope(b"%d" % day, f"m{day % 2}"))) as cache:
            for number in range(1_500):
                cache.add(b"%d" % number, FIRST, 100, b"x" * 1_000)
    return open_database(folder)


def test_the_least_recently_used_results_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file shrinks, and recently used results stay."""
    with closing(filled(tmp_path, monkeypatch)) as database:
        before = [(total.model, total.num_results, total.used) for total in list_totals(database)]
        assert before == [("m0", 3_000, 4 * 86_400), ("m1", 3_000, 3 * 86_400)]
        trim(database, 4_000_000)
        left = [(total.model, total.num_results) for total in list_totals(database)]
        assert left == [("m0", 1_500), ("m1", 500)]
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert (tmp_path / FILE_NAME).stat().st_size < 5_000_000


def test_unused_results_are_removed_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It happens when a cache is closed; each use restarts the time."""
    filled(tmp_path, monkeypatch).close()
    monkeypatch.setattr(result_cache.time, "time", lambda: 93 * 86_400 + 5.0)
    with closing(ResultCache.open(tmp_path, Scope(b"1", "m1"))) as cache:
        assert cache.find(b"7", SECOND, 7) is not None
    with closing(open_database(tmp_path)) as database:
        left = [(total.model, total.num_results) for total in list_totals(database)]
        assert left == [("m1", 1_501), ("m0", 1_500)]
        assert remove_results(database, model="m0") == 1_500
        assert remove_results(database, before=4 * 86_400) == 1_500
        assert remove_results(database) == 1
        assert list_totals(database) == []

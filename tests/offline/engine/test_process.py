"""The real engine's process at a worker's link: the demo model answers, or it says why not."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tidemill.demo import MODEL_PATH, NAME
from tidemill.engine_process.client import EngineClient, EngineDied, EngineFailed
from tidemill.offline.engine.options import EngineOptions, engine_command

PATIENCE_SECONDS = 120  # a model loads within seconds, but not on a machine that does much else

MakeLink = Callable[..., EngineClient]


def line(**fields: Any) -> bytes:
    """Return a chat line."""
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    whole = {"custom_id": "a", "url": "/v1/chat/completions", "body": body | fields}
    return json.dumps(whole).encode()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what the engine does."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - another process knows no event loop of ours
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture
async def make_link() -> AsyncIterator[MakeLink]:
    """Return a function that makes a link to the real engine's process with these options."""
    links: list[EngineClient] = []

    def make(
        options: EngineOptions, folders: asyncio.Future[Mapping[str, str]] | None = None
    ) -> EngineClient:
        command = engine_command(options)
        links.append(
            EngineClient(
                command,
                stall_seconds=PATIENCE_SECONDS,
                start_seconds=PATIENCE_SECONDS,
                folders=folders,
            )
        )
        return links[-1]

    yield make
    for link in links:
        await link.close()


async def test_the_demo_model_answers_lines_of_many_batches(make_link: MakeLink) -> None:
    """Each row carries its batch's time, and the same line at the same time gets the same bytes.

    The weights' folder is found by the address in the command; the engine reports its load times.
    """
    folders: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
    options = EngineOptions(
        model="s3://b/m", served_model_names=(NAME,), kv_cache_memory=8 * 2**20, max_num_seqs=4
    )
    link = make_link(options, folders)
    starting = asyncio.create_task(link.start())
    folders.set_result({"s3://b/m": str(MODEL_PATH)})
    info = await starting
    assert (info.model, info.num_gpus, info.max_num_seqs) == (str(MODEL_PATH), 0, 4)
    assert {"imports", "waiting", "weights", "proof", "trial", "load"} <= info.load_seconds.keys()
    assert info.load_seconds["load"] >= info.load_seconds["weights"] > 0
    data = line(temperature=0)
    rows = await asyncio.gather(*(link.fetch_row(1, created, data) for created in (7, 8, 7)))
    bodies = [json.loads(row.row)["response"]["body"] for row in rows]
    assert [body["created"] for body in bodies] == [7, 8, 7]
    assert all("Paris" in body["choices"][0]["message"]["content"] for body in bodies)
    assert rows[0].row == rows[2].row
    assert rows[0].usage.prompt_tokens == bodies[0]["usage"]["prompt_tokens"]
    assert bodies[0]["model"] == NAME

    long = line(n=128, max_tokens=200, ignore_eos=True)
    pending = link.fetch_row(2, 7, long)
    await until(lambda: link.stats.running > 0)
    pending.cancel()
    await until(lambda: not (link.stats.running or link.stats.waiting or link.stats.kv_cache_usage))
    assert link.stats.output_tokens < 128 * 200

    waiting = link.fetch_row(3, 7, long)
    await asyncio.sleep(0)
    await link.close()
    with pytest.raises(EngineDied, match="closed"):
        await waiting
    assert link._process.returncode == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (EngineOptions(model="/nowhere/model"), "/nowhere/model"),
        (EngineOptions(model="m", chat_template="/nowhere/t.jinja"), "/nowhere/t.jinja"),
        (EngineOptions(model="m", max_num_seqs=9, max_num_batched_tokens=1), "max_num_seqs"),
    ],
)
async def test_an_engine_that_cannot_be_had_says_why(
    make_link: MakeLink, options: EngineOptions, words: str
) -> None:
    """The error is the one that the command line prints."""
    link = make_link(options)
    with pytest.raises(EngineFailed, match=words) as caught:
        await link.start()
    assert caught.value.code in {"engine_error", "model_refused"}


async def test_a_model_without_its_weights_is_refused_in_the_same_words(
    make_link: MakeLink, tmp_path: Path
) -> None:
    """The worker gets the same error, so no line is answered by random weights."""
    model = Path(shutil.copytree(MODEL_PATH, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(EngineFailed, match=r"its weights lack lm_head\.weight") as caught:
        await make_link(EngineOptions(model=str(model))).start()
    assert caught.value.code == "model_refused"


async def test_a_missing_gpu_is_reported_before_the_weights_are_downloaded(
    make_link: MakeLink,
) -> None:
    """Otherwise a machine without one would download for an hour first."""
    never: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
    options = EngineOptions(model="s3://b/m", device="cuda")
    with pytest.raises(EngineFailed, match="finds no CUDA device"):
        await make_link(options, never).start()


async def test_a_flag_that_it_does_not_know_ends_it(make_link: MakeLink) -> None:
    """Before anything is loaded, with the exit status of wrong arguments."""
    link = make_link(EngineOptions())
    link._command = [*link._command, "--no-such-flag"]
    with pytest.raises(EngineFailed, match="exited with status 2"):
        await link.start()

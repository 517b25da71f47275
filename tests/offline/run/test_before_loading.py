"""Input that cannot run is reported before a model is loaded, with a way to fix it."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.offline.given import CHAT, line, rows
from tidemill.batch.file.lines import EXAMPLE_LINE
from tidemill.demo import MODEL_PATH
from tidemill.engine.config import EngineConfig
from tidemill.engine.model.endpoint_names import endpoints_of
from tidemill.offline.console.errors import BadInput, InputChanged
from tidemill.protocol.requests import check_request
from tidemill.protocol.routes import ENDPOINTS

Write = Callable[..., Path]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return the path of the output."""
    return tmp_path / "out.jsonl"


def refused(run: Any, *arguments: object) -> str:
    """Return the words that a file is refused with; nothing was loaded for it."""
    run.engine = None
    with pytest.raises(BadInput) as caught:
        run(*arguments)
    assert run.engine is None
    return str(caught.value)


def test_a_file_for_another_model_is_refused_with_both_ways_to_run_it(
    run: Any, write_input: Write, out: Path
) -> None:
    """The first file of a new user typically names a model of OpenAI."""
    source = write_input(*(line(str(n), model="gpt-4o-mini") for n in range(20)))
    assert refused(run, "-i", source, "-o", out) == (
        "20 of 20 lines request gpt-4o-mini, but the served model is m; to run them, pass "
        "`--served-model-name gpt-4o-mini` or `--any-model`. Nothing was run"
    )
    assert not out.exists()
    for flags in (["--any-model"], ["--served-model-name", "gpt-4o-mini"]):
        assert run("-i", source, "-o", out, *flags, "--force") == 0
        assert len(rows(out)) == 20
    assert run.loaded_with["served_names"] == ("gpt-4o-mini",)


def test_several_models_are_named_with_how_many_ask_for_each(
    run: Any, write_input: Write, out: Path
) -> None:
    """The flags can be typed as they stand, whatever the names are."""
    models = ["gpt-4o", "gpt-4o", "a b"]
    source = write_input(*(line(str(n), model=model) for n, model in enumerate(models)))
    assert refused(run, "-i", source, "-o", out, "--served-model-name", "x", "y") == (
        "3 of 3 lines request gpt-4o (2), a b (1), but the served models are x, y; to run them, "
        "pass `--served-model-name gpt-4o 'a b'` or `--any-model`. Nothing was run"
    )


def test_where_some_lines_ask_for_another_model_the_others_run(
    run: Any, write_input: Write, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning is printed before the model is loaded, when it can still be fixed."""
    assert run("-i", write_input(line("a", model="m"), line("b", model="gpt")), "-o", out) == 0
    stderr = capsys.readouterr().err
    assert stderr.startswith(
        "tidemill: warning: 1 of 2 lines will get an error row:\n"
        "  1 × The model `gpt` does not exist. Served: m. (line 2)\n"
        "to run requests for other models, pass `--served-model-name m gpt` or `--any-model`\n"
        "tidemill: loading m\n"
    )


def test_a_file_that_uses_only_unsupported_features_is_refused(
    run: Any, write_input: Write, out: Path
) -> None:
    """Errors of one kind are one sentence, the engine's error."""
    bodies = [*[{"suffix": "end"}] * 3, {"max_tokens": "8"}, {"stream": True}]
    words = refused(run, "-i", write_input(*(line("a", **body) for body in bodies)), "-o", out)
    with pytest.raises(Exception, match="`max_tokens`") as failure:
        check_request(CHAT, json.loads(line("a", max_tokens="8"))["body"], ["m"])
    first, *reasons = words.splitlines()
    assert first.startswith("none of the 5 lines of ")
    assert first.endswith("in.jsonl can run; nothing was run:")
    assert reasons[0].startswith("  3 × `suffix` is not supported: remove it or send null or ")
    assert reasons[0].endswith(" (first: line 1)")
    assert reasons[1:] == [
        f"  1 × {failure.value} (line 4)",
        "  1 × Request must not be sent in stream mode (line 5)",
    ]


def test_a_url_that_nothing_here_serves_is_refused(run: Any, write_input: Write, out: Path) -> None:
    """The suggestions are URLs that are supported."""
    source = write_input(
        '{"custom_id":"a","url":"/v1/embedding","body":{"input":"x"}}',
        '{"custom_id":"b","url":"/v1/response","body":{"input":"x"}}',
    )
    words = refused(run, "-i", source, "-o", out)
    offered = f"is not supported. Supported endpoints: {', '.join(ENDPOINTS)}."
    assert f"The URL /v1/embedding {offered} (line 1)" in words
    assert f"The URL /v1/response {offered} (line 2)" in words


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"id,prompt\na,Hello\n", "This looks like CSV: define a request for each row"),
        (b"id\tprompt\na\tHello\n", "This looks like tab-separated values: define"),
        (b"Tell me a joke\nAnd another\n", "This looks like plain text: write one JSON object per"),
        (line("a").encode("utf-16"), "The file is UTF-16: save it as UTF-8."),
        (b"PK\x03\x04rest", "The file is a zip archive"),
        (gzip.compress(line("a").encode())[:-9], "The gzip data is truncated"),
        (json.dumps({"a": 1}, indent=1).encode(), "This looks like JSON over several lines"),
    ],
    ids=["CSV", "TSV", "text", "UTF-16", "zip", "torn gzip", "JSON"],
)
def test_a_file_of_another_kind_is_identified(
    run: Any, tmp_path: Path, out: Path, content: bytes, words: str
) -> None:
    """The error is one sentence with advice, not a list of all lines."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(content)
    assert refused(run, "-i", source, "-o", out).startswith(f"{source} cannot be run. {words}")


def test_a_line_that_lacks_its_parts_is_shown_a_whole_one(
    run: Any, write_input: Write, out: Path
) -> None:
    """The example in the error is valid."""
    words = refused(run, "-i", write_input(line("a"), '{"prompt":"Hi"}'), "-o", out)
    assert "  line 2: `custom_id` is required and must be a string\n" in words
    assert f"Example of a valid line:\n{EXAMPLE_LINE}\n" in words
    assert run("-i", write_input(EXAMPLE_LINE), "-o", out) == 0


@pytest.mark.parametrize("form", ["gzip", "array", "array in gzip"])
def test_compressed_files_and_arrays_run_as_their_lines_would(
    run: Any, out: Path, tmp_path: Path, form: str
) -> None:
    """They are resumed like any other."""
    lines = [line(str(n)) for n in range(3)]
    content = f"[{', '.join(lines)}]" if "array" in form else "\n".join(lines)
    source = tmp_path / "in"
    data = content.encode()
    source.write_bytes(gzip.compress(data) if "gzip" in form else data)
    assert run("-i", source, "-o", out) == 0
    whole = out.read_bytes()
    assert [row["custom_id"] for row in rows(out)] == ["0", "1", "2"]
    out.write_bytes(whole[: whole.index(b"\n") + 5])
    assert run("-i", source, "-o", out, "--resume") == 0
    assert run.engine.num_requests == 2
    assert out.read_bytes() == whole


def test_with_nothing_but_malformed_lines_nothing_is_loaded(
    run: Any, write_input: Write, out: Path
) -> None:
    """Error rows do not help, as there would be no others."""
    source = write_input("[1]", '{"custom_id":"a"}')
    words = refused(run, "-i", source, "-o", out, "--on-invalid-line", "skip")
    assert "can run; nothing was run:\n  1 × " in words
    assert words.endswith("\n  1 × `url` is required and must be a string (line 2)")


def write_more(path: Path) -> None:
    """Add a line."""
    with path.open("a") as file:
        file.write(f"{line('new')}\n")


def write_in_place(path: Path) -> None:
    """Change bytes and not their number."""
    with path.open("r+b") as file:
        file.write(b"{")
    os.utime(path, (1, 1))


def replace(path: Path) -> None:
    """Put another file in its place."""
    other = path.with_name("other")
    other.write_text(f"{line('other')}\n")
    other.replace(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            write_more,
            r"has changed \(from [\d,]+ to [\d,]+ bytes\) during the run; the rows belong",
        ),
        (write_in_place, "has changed during the run; the rows belong to its earlier content"),
        (replace, "was replaced during the run; the rows belong to the earlier file"),
    ],
)
def test_an_input_that_changes_when_it_was_read_ends_with_1(
    run: Any, write_input: Write, out: Path, change: Callable[[Path], None], words: str
) -> None:
    """The rows are correct for the old content, and the error says that the file has changed."""
    source = write_input(line("a"), line("b", wait=0.01))
    load = run._load

    def changed_meanwhile(*arguments: Any, **given: Any) -> Any:
        engine = load(*arguments, **given)
        respond = engine.respond

        async def answer(*args: Any) -> Any:
            if engine.num_requests == 1:
                change(source)
            return await respond(*args)

        engine.respond = answer
        return engine

    run._load = changed_meanwhile
    with pytest.raises(InputChanged, match=words) as changed:
        run("-i", source, "-o", out)
    assert changed.value.exit_status == 1
    assert [row["custom_id"] for row in rows(out)] == ["a", "b"]


@pytest.mark.parametrize("change", [write_more, write_in_place])
def test_an_input_that_changes_while_it_is_read_ends_the_run(
    run: Any, write_input: Write, out: Path, change: Callable[[Path], None]
) -> None:
    """No line is run whose block was read after a write; what is there can be gone on with."""
    source = write_input(line("a"), line("b"))
    load = run._load

    def change_and_load(*arguments: Any, **given: Any) -> Any:
        change(source)
        return load(*arguments, **given)

    run._load = change_and_load
    words = r"has changed .*while it was read: run it again when no process is writing to it\."
    with pytest.raises(InputChanged, match=words):
        run("-i", source, "-o", out)
    assert run.engine.num_requests == 0
    run._load = load
    assert run("-i", source, "-o", out, "--resume") == 0


def test_a_deleted_input_is_not_a_change(run: Any, write_input: Write, out: Path) -> None:
    """An open file can be read to its end."""
    source = write_input(line("a"))
    load = run._load

    def remove_and_load(*arguments: Any, **given: Any) -> Any:
        source.unlink()
        return load(*arguments, **given)

    run._load = remove_and_load
    assert run("-i", source, "-o", out) == 0
    assert len(rows(out)) == 1


def test_a_file_of_embeddings_for_a_chat_model_is_refused_by_its_url(
    run: Any, tmp_path: Path, out: Path
) -> None:
    """Another name for the model would not make it run."""
    source = tmp_path / "in.jsonl"
    body = {"model": "text-embedding-3-small", "input": "x"}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}
    source.write_text(f"{json.dumps(request)}\n" * 3)
    words = refused(run, "-i", source, "-o", out, "--model", MODEL_PATH)
    supported = endpoints_of(EngineConfig(str(MODEL_PATH))) or ()
    assert CHAT in supported
    assert words.splitlines()[1] == (
        "  3 × Model does not support endpoint: /v1/embeddings. It requires an embedding "
        f"model; this model supports {', '.join(supported)}. (first: line 1)"
    )


def test_unknown_parameters_are_counted_before_the_model_loads(
    run: Any, write_input: Write, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have no effect, so the lines run; a strict run refuses the file for the same reason."""
    source = write_input(line("a", temprature=0), line("b"), line("c", temprature=0))
    sentence = (
        "  `temprature` in 2 lines (first: line 1) is not a parameter of /v1/chat/completions; "
        "did you mean `temperature`?\n"
    )
    assert run("-i", source, "-o", out) == 0
    assert capsys.readouterr().err.startswith(
        f"tidemill: warning: unknown parameters have no effect:\n{sentence}tidemill: loading m\n"
    )
    out.unlink()
    words = refused(run, "-i", source, "-o", out, "--strict-parameters")
    assert sentence in words
    assert not out.exists()

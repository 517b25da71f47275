"""`tidemill local`, as far as it comes without a cloud; with one: tests/localstack."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tidemill.cli.commands.local import _model_names, _with_absolute_paths
from tidemill.cli.main import main
from tidemill.offline.engine.options import EngineOptions


def test_an_input_that_is_not_there_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The error has the path and the reason."""
    missing = tmp_path / "none.jsonl"
    assert main(["local", "run", "-i", str(missing), "-o", str(tmp_path / "out.jsonl")]) == 2
    assert f"{missing} cannot be read: No such file or directory" in capsys.readouterr().err


def test_a_wrong_configuration_ends_with_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The sentence names the file and the key."""
    config = tmp_path / "config.toml"
    config.write_text('[[models]]\nname = "m"\ngpu = "l5"\n')
    assert main(["local", "up", "--config", str(config)]) == 2
    assert f'{config}: models[1].gpu is "l5"; it can be t4' in capsys.readouterr().err


def test_an_emulator_that_is_not_installed_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error contains the command that installs it."""
    monkeypatch.setattr("localstack.ministack._ROOT", tmp_path)
    monkeypatch.delenv("MINISTACK", raising=False)
    assert main(["local", "up"]) == 2
    assert "MiniStack is not installed: run `make" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The stacks are not deployed to the server on that port."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["local", "up", "--port", str(port)]) == 2
    assert f"port {port} is not available: " in capsys.readouterr().err


def test_a_missing_node_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CDK needs Node.js; the error has the version to install."""
    monkeypatch.setenv("JSII_NODE", "no-such-node")
    assert main(["local", "up"]) == 1
    assert "Node.js is not installed: install version 20 or newer" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command reports it, not a worker after minutes."""
    assert main(["local", "up", "--model", "./nothere"]) == 2
    assert capsys.readouterr().err == "tidemill: --model ./nothere: folder not found\n"


def test_workers_find_what_was_named_from_another_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They run in the checkout; a template that was typed stays what it is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    typed = "{{ messages }}" * 500
    seen = _with_absolute_paths(EngineOptions(model="./m", chat_template=typed))
    assert (seen.model, seen.chat_template) == (str(tmp_path / "m"), typed)
    assert _with_absolute_paths(EngineOptions(model="org/name")).model == "org/name"


def test_more_names_need_one_model_that_they_can_mean(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With two models, the configuration must contain the names."""
    config = tmp_path / "config.toml"
    config.write_text("".join(f'[[models]]\nname = "{name}"\ngpu = "l4"\n' for name in "ab"))
    assert main(["local", "up", "--config", str(config), "--any-model"]) == 2
    assert "there are 2 models; set `aliases` in the configuration" in capsys.readouterr().err


def test_a_model_is_served_under_its_own_name(tmp_path: Path) -> None:
    """The name is that of the folder, file or hub ID; a flag overrides it."""
    (tmp_path / "llama-8b").mkdir()
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")

    def names(model: str | None, *served: str) -> tuple[str, tuple[str, ...]]:
        return _model_names(EngineOptions(model=model, served_model_names=served))

    assert names(str(tmp_path / "llama-8b")) == ("llama-8b", ())
    assert names(str(tmp_path / "tiny.gguf")) == ("tiny", ())
    assert names("org/name") == ("org/name", ())
    assert names("org/name", "gpt", "*") == ("gpt", ("*",))
    assert names("org/name", "*") == ("org/name", ("*",))
    assert names(None, "gpt") == ("", ("gpt",))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prompt", "Who wrote {{ mesage }}?"], "did you mean `message`?"),
        (["--id", "message"], "pass --prompt or --ask, or create messages.recipe.toml"),
        (["--prompt", "{{ message }}", "-o", "messages.xlsx"], "an Excel workbook"),
    ],
)
def test_a_table_that_cannot_be_run_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: list[str],
    words: str,
) -> None:
    """The checks are those of `run` and `drop`."""
    monkeypatch.chdir(tmp_path)
    Path("messages.csv").write_text("message\nHello\n")
    assert main(["local", "run", "-i", "messages.csv", *flags]) in {1, 2}
    assert words in capsys.readouterr().err


def test_an_output_that_exists_is_not_overwritten(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its default name is next to the input; --force overwrites it."""
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("not json\n")
    Path("in.output.jsonl").write_text("precious\n")
    assert main(["local", "run", "-i", "in.jsonl"]) == 2
    assert "in.output.jsonl already exists" in capsys.readouterr().err
    assert main(["local", "run", "-i", "in.jsonl", "--force"]) == 1
    assert "is not a valid batch" in capsys.readouterr().err
    assert Path("in.output.jsonl").read_text() == "precious\n"

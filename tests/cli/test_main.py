"""The command line as it is typed."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from tidemill.cli.main import exit_status_of, main, make_parser, parse
from tidemill.offline.arguments.argument_types import size_in_bytes
from tidemill.offline.arguments.defaults import Defaults
from tidemill.offline.console.errors import BadInput, Refused, Stopped
from tidemill.offline.run.run_flags import options_from
from tidemill.offline.run.run_options import RunOptions

ROOT = Path(__file__).parents[2]
FILES = ["run", "-i", "in", "-o", "out"]


def options(*arguments: str) -> RunOptions:
    """Return what the arguments ask for."""
    return options_from(parse([*FILES, *arguments]))


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_loads_nothing_but_the_standard_library(arguments: list[str]) -> None:
    """It answers at once because neither pydantic nor any library of a run is imported."""
    code = f"""
import sys
from tidemill.cli.main import main
try:
    main({arguments})
except SystemExit as exc:
    assert exc.code == 0
own = ("tidemill.cli.", "tidemill.offline.")
others = {{name for name in sys.modules if not (name + ".").startswith(own)}}
loaded = {{name if "tidemill." in name else name.partition(".")[0] for name in others}}
print("loaded:", loaded - set(sys.stdlib_module_names) - {{"tidemill", "__main__"}})
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.rstrip().endswith("loaded: set()")


def test_a_commands_name_limits_the_parser_to_it() -> None:
    """Each module has its command's name: otherwise a command would build the flags of all."""
    names = _commands(make_parser())
    assert len(names) > 20
    own = [name for name in names if name != "completion"]  # whose script has all commands
    assert [_commands(make_parser(name)) for name in own] == [[name] for name in own]
    assert _commands(make_parser("completion")) == names
    assert _commands(make_parser("rnu")) == names


def _commands(parser: ArgumentParser) -> list[str]:
    [commands] = [action for action in parser._actions if action.dest == "==SUPPRESS=="]
    return [*(commands.choices or ())]


def test_it_runs_as_a_module() -> None:
    """`python -m tidemill` is the command."""
    command = [sys.executable, "-m", "tidemill", "run", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: tidemill run")


NO_INPUT = "no input: pass the file to run before any flags, as in `tidemill run requests.jsonl`"


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("", "no command: use one, such as `tidemill run FILE`; `tidemill --help` lists all"),
        ("rnu x.jsonl", "`tidemill` has no command 'rnu': did you mean `tidemill run`?"),
        ("run-batch -i x", "`tidemill` has no command 'run-batch': did you mean `tidemill run`?"),
        ("walk", "`tidemill` has no command 'walk': see `tidemill --help`"),
        ("keys lst", "`tidemill keys` has no command 'lst': did you mean `tidemill keys list`?"),
        # A command that destroys something is never suggested.
        ("eras batch_1", "`tidemill` has no command 'eras': see `tidemill --help`"),
        ("tenants list", "`tidemill tenants` has no command 'list': see `tidemill tenants --help`"),
        ("help rnu", "`tidemill` has no command 'rnu': did you mean `tidemill run`?"),
        ("keys", "`tidemill keys` requires ACTION: see `tidemill keys --help`"),
        ("submit", "`tidemill submit` requires FILE: see `tidemill submit --help`"),
        ("run", NO_INPUT),
        ("run -o out", NO_INPUT),
        ("run x --port", "--port: expected one argument: see `tidemill run --help`"),
        (
            "run x --resume --force",
            "--force: cannot be combined with --resume: see `tidemill run --help`",
        ),
        (
            "run x --dialect ollama",
            "--dialect: 'ollama' is not one of openai, vllm: see `tidemill run --help`",
        ),
    ],
)
def test_a_usage_error_is_one_sentence(
    typed: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, without the usage of the command."""
    assert main(typed.split()) == 2
    assert capsys.readouterr().err == f"tidemill: {sentence}\n"


@pytest.mark.parametrize(
    ("typed", "flag"),
    [("version", "--version"), ("help", "--help"), ("help keys create", "keys create --help")],
)
def test_version_and_help_are_commands_too(
    typed: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They print the same as the flags."""
    shown = []
    for words in (typed, flag):
        with pytest.raises(SystemExit) as ended:
            main(words.split())
        assert ended.value.code == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != ""


@pytest.mark.parametrize("typed", ["run a b", "run -i a b"])
def test_several_files_are_refused_with_advice(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command does not guess which one was meant."""
    assert main(typed.split()) == 2
    assert capsys.readouterr().err == (
        "tidemill: a run takes one file, but 2 were given (a, b): run each of them, or all "
        "lines of JSONL files together: cat FILES | tidemill run - -o rows.jsonl; for tables, pass "
        "a folder\n"
    )


def test_a_template_without_quotes_is_not_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """The shell splits it at spaces."""
    assert main(["run", "a.csv", "--prompt", "{{ row[b", "c] }}"]) == 2
    assert "(a.csv, c] }}): put single quotes around a template" in capsys.readouterr().err


def test_files_alone_are_enough() -> None:
    """Everything else has a default, and the engine's own are left to the engine."""
    assert options() == RunOptions(input_file="in", output_file="out")


def test_each_flag_reaches_its_option() -> None:
    """All flags at once, sizes and names as people write them."""
    typed = (
        "-e err --output-tmp-dir tmp --resume --dialect vllm --on-invalid-line skip "
        "--max-inflight 7 --max-line-bytes 2M --enable-metrics --host 0.0.0.0 --port 0 "
        "--model m --served-model-name one two --chat-template t --dtype half --device cuda "
        "--max-model-len 100 --max-num-seqs 8 --max-num-batched-tokens 64 "
        "--temperature 0.5 --max-tokens 9 --system-prompt brief "
        "--kv-cache-memory 4GiB --kv-cache-dtype fp8_e4m3 --quantization fp8 --seed 5"
    )
    assert options(*typed.split()) == RunOptions(
        input_file="in",
        output_file="out",
        error_file="err",
        output_tmp_dir=Path("tmp"),
        resume=True,
        dialect="vllm",
        on_invalid_line="skip",
        max_inflight=7,
        max_line_bytes=2 * 2**20,
        enable_metrics=True,
        host="0.0.0.0",  # noqa: S104 - nothing is bound here
        port=0,
        model="m",
        served_model_names=("one", "two"),
        chat_template="t",
        dtype="float16",
        device="cuda",
        max_model_len=100,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_cache_memory=4 * 2**30,
        kv_cache_dtype="fp8_e4m3",
        quantization="fp8",
        seed=5,
        defaults=Defaults(temperature=0.5, max_tokens=9, system_prompt="brief"),
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("512M", 512 * 2**20), ("4g", 2**32), ("1.5KiB", 1536), ("2 TB", 2**41)],
)
def test_sizes_have_binary_units(text: str, size: int) -> None:
    """512M and 512MiB are the same."""
    assert size_in_bytes(text) == size


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kv-cache-memory", "lots"],
        ["--kv-cache-memory", "0"],
        ["--max-line-bytes", "-1"],
        ["--max-inflight", "0"],
        ["--max-num-seqs", "1.5"],
        ["--port", "65536"],
        ["--seed", "-1"],
        ["--dtype", "int8"],
        ["--quantization", "bitsandbytes"],
        ["--kv-cache-dtype", "fp8_e5m2"],
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--temperature", "hot"],
        ["--max-tokens", "0"],
        ["--system-prompt", " "],
        ["--dialect", "other"],
        ["--on-invalid-line", "ignore"],
        ["--tensor-parallel-size", "0"],
        ["--resum"],
    ],
)
def test_values_and_flags_that_do_not_exist_are_refused(
    arguments: list[str],
) -> None:
    """Flags of what is not there yet are unknown, and none can be shortened."""
    with pytest.raises(Refused, match=f"{arguments[0]}[: /]"):
        options(*arguments)


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (Refused("No."), 2, "No."),
        (BadInput("Bad."), 1, "Bad."),
        (OSError(5, "Input/output error"), 1, "failed: [Errno 5] Input/output error"),
        (Stopped(2), 130, "stopped by SIGINT: nothing was written"),
        (Stopped(15), 143, "stopped by SIGTERM: nothing was written"),
    ],
)
def test_an_early_end_is_one_sentence_and_a_status(
    error: BaseException, status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No traceback for what users can mend."""

    def command() -> int:
        raise error

    assert exit_status_of(command) == status
    assert capsys.readouterr().err == f"tidemill: {words}\n"

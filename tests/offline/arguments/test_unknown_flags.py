"""Unknown flags: vLLM's are ignored or explained, others get the closest match as a suggestion."""

from __future__ import annotations

import pytest

from tidemill.cli.main import main, make_parser, parse
from tidemill.offline.arguments import vllm_flags
from tidemill.offline.arguments.unknown_flags import parse_known
from tidemill.offline.console.errors import Refused

RUN = ["run", "-i", "/no/such/file", "-o", "out"]


def words_on(*typed: str) -> str:
    """Return the error message for a command line."""
    with pytest.raises(Refused) as refused:
        parse_known(make_parser(typed[0]), typed)
    return str(refused.value)


def test_vllm_flags_without_effect_are_accepted_with_a_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They may have a value or not, in either spelling; the command then runs as usual."""
    flags = "--gpu-memory-utilization 0.9 --enforce-eager --no-enable-prefix-caching".split()
    flags += "--max-num-queued-reqs 64 --max-num-queued-tokens=9".split()
    flags += "--swap_space=4 -pp 1 --seed 3 -O3 --disable-log-stats --load-format auto".split()
    assert main([*RUN, *flags]) == 2
    assert capsys.readouterr().err == (
        "tidemill: warning: vLLM flags without effect here: --gpu-memory-utilization, "
        "--enforce-eager, --no-enable-prefix-caching, --max-num-queued-reqs, "
        "--max-num-queued-tokens, --swap_space, -pp, -O3, --disable-log-stats, --load-format\n"
        "tidemill: the input /no/such/file does not exist\n"
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("-pp 2", "vLLM's -pp is not supported: use --tensor-parallel-size"),
        ("--rope-scaling {}", "use --hf-overrides '{\"rope_scaling\": …}'"),
        ("--hf-token x", "set the environment variable HF_TOKEN"),
        ("--default-chat-template-kwargs {}", "set `chat_template_kwargs` in the requests"),
        ("--enforce-eager --lora-dtype float16", "adapters always have the type of the weights"),
    ],
)
def test_vllm_flags_that_would_change_rows_are_refused_with_an_alternative(
    flags: str, words: str
) -> None:
    """No flag that would change an answer is ignored."""
    assert words in words_on(*RUN, *flags.split())


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (
            [*RUN, "--max-model-length", "9"],
            "has no --max-model-length: did you mean --max-model-len?",
        ),
        ([*RUN, "--served_model_name", "x"], "did you mean --served-model-name?"),
        ([*RUN, "--resumee"], "`tidemill run` has no --resumee: did you mean --resume?"),
        ([*RUN, "--zzz"], "`tidemill run` has no --zzz: see `tidemill run --help`"),
        (["status", "x", "y"], "unexpected argument 'y': see `tidemill status --help`"),
        (["check", "x.csv", "b] }}"], "unexpected argument 'b] }}': put single quotes around"),
        (["status", "--watchh"], "`tidemill status` has no --watchh: did you mean --watch?"),
        (
            ["local", "up", "--worker", "2"],
            "`tidemill local up` has no --worker: did you mean --work",
        ),
        (["submit", "f", "--enforce-eager"], "`tidemill submit` has no --enforce-eager: see "),
    ],
)
def test_other_flags_get_the_closest_match(typed: list[str], words: str) -> None:
    """The suggestion belongs to the same command."""
    assert words in words_on(*typed)


def test_no_flag_of_ours_is_taken_for_one_of_vllms() -> None:
    """Both tables are about flags that we do not have, and none is in both of them."""
    parser = make_parser()
    [commands] = [action for action in parser._actions if action.dest == "==SUPPRESS=="]
    ours = {
        name.removeprefix("--")
        for action in commands.choices["run"]._actions  # type: ignore[union-attr, call-overload]
        for name in action.option_strings
    }
    ours.remove("data-parallel-size")  # which other commands have not
    assert not ours & (vllm_flags._PASSED_OVER | vllm_flags._INSTEAD.keys())
    assert not vllm_flags._PASSED_OVER & vllm_flags._INSTEAD.keys()
    assert vllm_flags._NEUTRAL_VALUES.keys() <= vllm_flags._INSTEAD.keys()


@pytest.mark.parametrize(
    ("typed", "files"),
    [
        ("x.jsonl --seed 3", ["x.jsonl"]),
        ("--seed 3 x.jsonl", ["x.jsonl"]),
        ("--gpu-memory-utilization 0.9 x.jsonl", ["x.jsonl"]),
        ("--enforce-eager x.jsonl --swap-space=4", ["x.jsonl"]),
        ("--disable-log-stats -", ["-"]),
        ("--kv-cache-metrics-sample 0.1 x.jsonl", ["x.jsonl"]),
        ("-- a.jsonl b.jsonl", ["a.jsonl", "b.jsonl"]),
    ],
)
def test_files_stand_wherever_they_are_typed(typed: str, files: list[str]) -> None:
    """Values of vLLM's flags are none, and what follows a switch of vLLM's is one."""
    assert parse(["run", *typed.split()]).files == files


@pytest.mark.parametrize("flag", sorted(vllm_flags._OTHER_SWITCHES))
def test_a_file_may_follow_any_switch(flag: str) -> None:
    """Switches whose names do not begin like one are listed explicitly."""
    assert parse(["run", f"--{flag}", "x.jsonl"]).files == ["x.jsonl"]
    assert flag in vllm_flags._PASSED_OVER

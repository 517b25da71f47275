"""The engine's flags: the same for each command, and passed on to an engine process."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cli.main import make_parser
from tidemill.demo import NAME
from tidemill.engine.config import ImageLimits
from tidemill.net.fetch import FetchLimits
from tidemill.offline.engine.engine import engine_config, served_names
from tidemill.offline.engine.options import (
    EngineOptions,
    add_engine_flags,
    engine_arguments,
    engine_fields,
    stall_limit,
)
from tidemill.protocol.stall import STALL_SECONDS

NUMBERS = st.integers(1, 2**40)
WORDS = st.text(min_size=1, max_size=12).filter(lambda word: not word.startswith("-"))

BUCKETS = st.sampled_from(["*", "bucket", "my.bucket/media/a b/"])
HOSTS = st.from_regex(r"[a-zA-Z0-9_.][a-zA-Z0-9_.-]*", fullmatch=True) | st.ip_addresses(v=6).map(
    str
)


def parsed(arguments: list[str]) -> EngineOptions:
    """Return what a command understands."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_engine_flags(parser)
    return EngineOptions(**engine_fields(parser.parse_args(arguments)))


def test_without_flags_the_engine_decides_everything() -> None:
    """The flags' defaults are those of the options."""
    assert parsed([]) == EngineOptions()


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "model": st.text(),
            "weights_cache": st.text(),
            "served_model_names": st.lists(WORDS, min_size=1, max_size=3).map(tuple),
            "any_model": st.booleans(),
            "proof_rows": st.booleans(),
            "enable_prompt_tokens_details": st.booleans(),
            "max_logprobs": st.integers(-1, 100),
            "truncate_prompt_tokens": st.just(-1) | NUMBERS,
            "no_speculative_decoding": st.booleans(),
            "batch_invariant": st.booleans(),
            "chat_template": st.text(),
            "runner": st.sampled_from(["auto", "generate", "pooling"]),
            "convert": st.sampled_from(["auto", "none", "embed", "classify"]),
            "hf_overrides": st.dictionaries(st.text(), st.integers() | st.text()).map(json.dumps),
            "pooler_config": st.dictionaries(st.text(), st.booleans()).map(json.dumps),
            "dtype": st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
            "device": st.sampled_from(["auto", "cpu", "cuda"]),
            "max_model_len": NUMBERS,
            "max_num_seqs": NUMBERS,
            "max_num_batched_tokens": NUMBERS,
            "kv_cache_memory": NUMBERS,
            "seed": st.integers(0, 2**63 - 1),
            "allowed_media_domains": st.lists(HOSTS, min_size=1, max_size=3).map(tuple),
            "allowed_media_buckets": st.lists(BUCKETS, min_size=1, max_size=3).map(tuple),
            "max_audio_clip_filesize_mb": NUMBERS,
            "max_audio_decode_duration_s": NUMBERS,
            "audio_fetch_timeout": NUMBERS,
            "lora_modules": st.lists(WORDS, min_size=1, max_size=3).map(tuple),
            "max_loras": NUMBERS,
            "max_lora_rank": NUMBERS,
            "limit_mm_per_prompt": NUMBERS.map(lambda count: json.dumps({"image": count})),
            "mm_processor_kwargs": NUMBERS.map(lambda count: json.dumps({"max_pixels": count})),
            "max_image_mb": NUMBERS,
            "max_image_pixels": NUMBERS,
            "stall_seconds": st.floats(0.001, 1e6),
        },
    )
)
def test_options_survive_a_round_trip_through_flags(
    given_options: dict[str, Any],
) -> None:
    """A template may contain any text, and a model name almost any."""
    options = EngineOptions(**given_options)
    assert parsed(engine_arguments(options)) == options


@pytest.mark.parametrize(
    "typed",
    [
        "https://a.example",
        "*.a.example",
        "a.example,b.example",
        "a.example:443",
        "[2001:db8::1]",
        "",
    ],
)
def test_a_domain_that_no_url_could_be_of_is_refused(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would refuse every line, one by one."""
    with pytest.raises(SystemExit):
        parsed(["--allowed-media-domains", "b.example", typed])
    assert f"{typed!r} is not a host" in capsys.readouterr().err


@pytest.mark.parametrize("typed", ["", "**", "a", "https://bucket/a", "/media", "a b"])
def test_a_bucket_that_cannot_exist_is_refused(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would refuse every line, one by one."""
    with pytest.raises(SystemExit):
        parsed(["--allowed-media-buckets", "mine/pictures", typed])
    assert f"{typed!r} is not BUCKET" in capsys.readouterr().err


@pytest.mark.parametrize("typed", ["[]", "{", "is_matryoshka", ""])
def test_overrides_are_a_json_object(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error quotes an invalid value as it was typed."""
    with pytest.raises(SystemExit):
        parsed([f"--hf-overrides={typed}"])
    assert f"{typed!r} is not a JSON object" in capsys.readouterr().err


def test_what_a_model_shall_give_reaches_the_engine(tmp_path: Path) -> None:
    """The flags are those of vLLM."""
    flags = [
        "--runner",
        "pooling",
        "--convert",
        "embed",
        "--hf-overrides",
        '{"is_matryoshka": true}',
    ]
    config = engine_config(parsed(["--model", str(tmp_path), *flags]))
    assert (config.runner, config.convert) == ("pooling", "embed")
    assert config.hf_overrides == {"is_matryoshka": True}


def test_bounds_of_recordings_reach_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By flags, or by the names that vLLM reads from the environment; flags win."""
    model = ["--model", str(tmp_path)]
    config = engine_config(parsed(model))
    assert (config.fetching, config.max_audio_seconds) == (FetchLimits(), 7_200)
    typed = "--allowed-media-domains Files.example.com. cdn.example.com --audio-fetch-timeout 9"
    monkeypatch.setenv("VLLM_AUDIO_FETCH_TIMEOUT", "5")
    monkeypatch.setenv("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", "3")
    monkeypatch.setenv("VLLM_MAX_AUDIO_DECODE_DURATION_S", "600")
    config = engine_config(parsed([*model, *typed.split()]))
    assert config.max_audio_seconds == 600
    assert config.fetching == FetchLimits(
        max_bytes=3 * 2**20,
        whole_seconds=9,
        allowed_hosts=frozenset({"files.example.com", "cdn.example.com"}),
    )


def test_bounds_of_images_reach_the_engine(tmp_path: Path) -> None:
    """By the flag that vLLM has, in all of its forms, and by two of our own."""
    model = ["--model", str(tmp_path)]
    assert engine_config(parsed(model)).images == ImageLimits()
    for limits, count in (
        ('{"image": 4, "video": 0}', 4),
        ('{"image": {"count": 0, "width": 512}}', 0),
        ("image=3,video=2", 3),
        ('{"video": 1}', ImageLimits().max_per_prompt),
        ('{"image": 2, "audio": {"count": 16}}', 2),
    ):
        config = engine_config(parsed([*model, "--limit-mm-per-prompt", limits]))
        assert config.images == ImageLimits(max_per_prompt=count)
    config = engine_config(parsed([*model, "--limit-mm-per-prompt", "audio=3"]))
    assert config.images == ImageLimits(max_recordings=3)
    typed = '--max-image-mb 3 --max-image-pixels 1000 --mm-processor-kwargs {"max_pixels":9}'
    config = engine_config(parsed([*model, *typed.split()]))
    assert config.mm_processor_kwargs == {"max_pixels": 9}
    assert config.images == ImageLimits(max_bytes=3 * 2**20, max_pixels=1000)


@pytest.mark.parametrize(
    "typed", ['{"image": -1}', '{"audio": -1}', '{"image": "4"}', "{", "4", "image=x", ""]
)
def test_an_invalid_image_limit_is_refused(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error shows the valid form."""
    with pytest.raises(SystemExit):
        parsed([f"--limit-mm-per-prompt={typed}"])
    assert f"{typed!r} is not a valid limit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("--model m", ("m",)),
        ("--model m --any-model", ("m", "*")),
        ("--model m --served-model-name *", ("m", "*")),
        ("--model m --served-model-name a * b --any-model", ("a", "b", "*")),
        ("--any-model", (NAME, "*")),
    ],
)
def test_any_model_is_one_more_name_after_those_that_are_names(
    typed: str, names: tuple[str, ...]
) -> None:
    """The first name is used in rows whose line has no model, so it is never `*`."""
    assert served_names(parsed(typed.split())) == names


def test_the_stall_limit_is_one_for_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flag wins over the variable, and the default is the same for all."""
    monkeypatch.delenv("TIDEMILL_STALL_SECONDS", raising=False)
    for command in (["run"], ["serve"], ["worker"], ["estimate"]):
        parser = make_parser(command[0])
        assert stall_limit(parser.parse_args(command)) == STALL_SECONDS
        with monkeypatch.context() as patched:
            patched.setenv("TIDEMILL_STALL_SECONDS", "33")
            parser = make_parser(command[0])
        assert stall_limit(parser.parse_args(command)) == 33
        assert stall_limit(parser.parse_args([*command, "--stall-seconds", "2.5"])) == 2.5
    with pytest.raises(SystemExit):
        parsed(["--stall-seconds", "0"])
    assert "'0' is not a number > 0" in capsys.readouterr().err

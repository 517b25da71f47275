"""Engine options: the flags of every command that loads an engine, with vLLM's names."""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import dataclass, fields
from functools import partial
from ipaddress import ip_address
from typing import Any, Literal

from ..arguments.argument_types import (
    positive_int,
    positive_number,
    seed_number,
    size_in_bytes,
)

_DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float": "float32",
    "half": "float16",
}
_LISTS = {
    "served_model_names": "--served-model-name",
    "allowed_media_domains": "--allowed-media-domains",
    "lora_modules": "--lora-modules",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of model and engine. Sizes are bytes; None means the engine's default."""

    model: str | None = None
    weights_cache: str | None = None
    served_model_names: tuple[str, ...] = ()
    any_model: bool = False
    proof_rows: bool = False
    enable_prompt_tokens_details: bool = False
    max_logprobs: int = 20
    truncate_prompt_tokens: int | None = None
    no_speculative_decoding: bool = False
    chat_template: str | None = None
    runner: Literal["auto", "generate", "pooling"] = "auto"
    convert: Literal["auto", "none", "embed", "classify"] = "auto"
    hf_overrides: str | None = None
    pooler_config: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory: int | None = None
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    quantization: Literal["fp8", "int8", "compressed-tensors", "awq", "gptq", "mxfp4"] | None = None
    tensor_parallel_size: int | None = None
    seed: int = 0
    allowed_media_domains: tuple[str, ...] = ()
    max_audio_clip_filesize_mb: int | None = None
    max_audio_decode_duration_s: int | None = None
    audio_fetch_timeout: int | None = None
    lora_modules: tuple[str, ...] = ()
    max_loras: int | None = None
    max_lora_rank: int | None = None
    limit_mm_per_prompt: str | None = None
    mm_processor_kwargs: str | None = None
    max_image_mb: int | None = None
    max_image_pixels: int | None = None
    stall_seconds: float | None = None


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `EngineOptions` as argument groups."""
    add = parser.add_argument_group("model and engine").add_argument
    add(
        "--model",
        metavar="MODEL",
        help="a folder, a GGUF file, a hub id or s3://bucket/prefix (default: the demo model)",
    )
    add(
        "--weights-cache",
        metavar="FOLDER",
        help="where weights from S3 and dequantized GGUF files are kept (default: "
        "~/.cache/tidemill/weights)",
    )
    add(
        "--served-model-name",
        nargs="+",
        default=(),
        dest="served_model_names",
        metavar="NAME",
        help="what the lines call the model (default: what --model says)",
    )
    add(
        "--any-model",
        action="store_true",
        help="run lines that ask for any other model too; their rows show the name they ask for",
    )
    add(
        "--chat-template",
        metavar="FILE",
        help="a Jinja file, or the template itself, instead of the tokenizer's",
    )
    add(
        "--runner",
        choices=("auto", "generate", "pooling"),
        default="auto",
        help="whether the model writes text, or gives vectors or scores (default: by its files)",
    )
    add(
        "--convert",
        choices=("auto", "none", "embed", "classify"),
        default="auto",
        help="which of them it gives: embed is vectors, classify is scores (default: by its files)",
    )
    add(
        "--hf-overrides",
        type=_json_object,
        metavar="JSON",
        help="what of its config.json to read otherwise, such as a rope for longer contexts",
    )
    add(
        "--pooler-config",
        type=_json_object,
        metavar="JSON",
        help="pooling_type (CLS, LAST, MEAN) and use_activation, above what the model's files say",
    )
    add(
        "--tool-call-parser",
        metavar="NAME",
        help="how the model writes calls, by vLLM's name, or none (default: by its template)",
    )
    add(
        "--reasoning-parser",
        metavar="NAME",
        help="how the model writes thoughts, by vLLM's name, or none (default: by its template)",
    )
    add("--dtype", choices=tuple(_DTYPES), default="auto", help="of the weights (default: auto)")
    add(
        "--quantization",
        "-q",
        choices=("fp8", "int8", "compressed-tensors", "awq", "gptq", "mxfp4"),
        help="fp8, or int8 on a CPU, quantises weights as they are read (default: as in the files)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    add("--max-model-len", type=positive_int, metavar="N", help="tokens of prompt and output")
    add("--max-num-seqs", type=positive_int, metavar="N", help="sequences in one step")
    add("--max-num-batched-tokens", type=positive_int, metavar="N", help="tokens in one step")
    add(
        "--kv-cache-memory",
        type=size_in_bytes,
        metavar="SIZE",
        help="memory for the KV cache, such as 512M or 4G (default: what is free)",
    )
    add(
        "--kv-cache-dtype",
        choices=("auto", "fp8", "fp8_e4m3"),
        default="auto",
        help="fp8 keeps twice as many tokens, less exactly (default: as the weights are)",
    )
    add(
        "--tensor-parallel-size",
        "-tp",
        type=positive_int,
        metavar="N",
        help="GPUs that share the model (default: 1)",
    )
    add("--seed", type=seed_number, default=0, metavar="N", help="(default: 0)")
    add(
        "--proof-rows",
        action="store_true",
        help="say in each row whether its output is of the form that was asked for",
    )
    add(
        "--enable-prompt-tokens-details",
        action="store_true",
        help="say in the usage of each row how many tokens of its prompt were cached",
    )
    add(
        "--max-logprobs",
        type=partial(_count_or_all, least=0),
        default=20,
        metavar="N",
        help="alternatives that a request may ask for at each token, -1 for all (default: 20)",
    )
    add(
        "--truncate-prompt-tokens",
        type=partial(_count_or_all, least=1),
        metavar="N",
        help="cut prompts of requests that do not say so themselves to N tokens, -1 to as many as "
        "the model takes (default: a prompt that is too long is an error)",
    )
    add(
        "--no-speculative-decoding",
        action="store_true",
        help="draft no tokens from what is written already; rows are the same",
    )
    add(
        "--stall-seconds",
        type=positive_number,
        default=os.environ.get("TIDEMILL_STALL_SECONDS"),
        metavar="S",
        help="end an engine that has requests and makes no progress for S seconds (default: 600)",
    )
    _add_adapter_flags(parser)
    _add_media_flags(parser)


def _count_or_all(text: str, least: int) -> int:
    """Return a whole number from `least` on, or -1, which stands for all."""
    if text != "-1" and not (text.isdecimal() and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text!r} is neither -1 nor a whole number from {least}")
    return int(text)


def _add_adapter_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of LoRA adapters."""
    add = parser.add_argument_group("adapters, which lines choose by name").add_argument
    add(
        "--lora-modules",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="folders that PEFT wrote, hub ids or s3://bucket/prefix, or vLLM's JSON objects",
    )
    # vLLM's switch; here `--lora-modules` alone enables adapters.
    add("--enable-lora", action="store_true", help=argparse.SUPPRESS)
    add("--max-loras", type=positive_int, metavar="N", help="refuse more adapters than that")
    add("--max-lora-rank", type=positive_int, metavar="N", help="refuse adapters of a higher rank")


def _add_media_flags(parser: argparse.ArgumentParser) -> None:
    """Add the limits of audio and images; vLLM reads some of them from the environment."""
    add = parser.add_argument_group("recordings and images that lines name by url").add_argument
    add(
        "--allowed-media-domains",
        nargs="+",
        type=_host_name,
        default=(),
        metavar="HOST",
        help="the only hosts that they may lie on (default: any that is public)",
    )
    for name, unit, what in (
        ("max-audio-clip-filesize-mb", "MIB", "how large a recording may be (default: 25 MiB)"),
        ("max-audio-decode-duration-s", "S", "how long one may be, in seconds (default: 7200)"),
        ("audio-fetch-timeout", "S", "how long one try to fetch either may take (default: 60)"),
    ):
        add(
            f"--{name}",
            type=positive_int,
            default=os.environ.get(f"VLLM_{name.replace('-', '_').upper()}"),
            metavar=unit,
            help=what,
        )

    add(
        "--limit-mm-per-prompt",
        type=_limits,
        metavar="JSON",
        help="""how many images a request may have, such as '{"image": 4}' (default: 16)""",
    )
    add(
        "--mm-processor-kwargs",
        type=_json_object,
        metavar="JSON",
        help="min_pixels and max_pixels that images are brought to (default: by the model's files)",
    )
    for name, unit, what in (
        ("max-image-mb", "MIB", "how large an image may be (default: 20 MiB)"),
        ("max-image-pixels", "N", "how many pixels one may have (default: 50,000,000)"),
    ):
        add(f"--{name}", type=positive_int, metavar=unit, help=what)


def _limits(text: str) -> str:
    """Normalise vLLM's `--limit-mm-per-prompt` to JSON; only the image limit is used here."""
    try:
        said = json.loads(text) if text.lstrip().startswith("{") else _pairs(text)
        limit = said.get("image")
        count = limit.get("count") if isinstance(limit, dict) else limit
    except (ValueError, AttributeError, RecursionError):
        said, count = {}, -1
    if count is not None and (type(count) is not int or count < 0):
        raise argparse.ArgumentTypeError(f"{text!r} says no limit: write '{{\"image\": 4}}'")
    return json.dumps({} if count is None else {"image": count})


def _pairs(text: str) -> dict[str, int]:
    """Parse the form of older versions of vLLM: `image=4,video=0`."""
    pairs = (pair.split("=") for pair in text.split(","))
    return {name.strip(): int(count) for name, count in pairs}


def _host_name(text: str) -> str:
    """Argument type: a host name or address, unchanged."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", text):
        try:
            ip_address(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no host: write its whole name, such as files.example.com"
            ) from None
    return text


def _json_object(text: str) -> str:
    """Argument type: the text of a JSON object, unchanged."""
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return text


def stall_limit(options: EngineOptions) -> float:
    """Return the seconds without progress after which an engine is ended."""
    from tidemill.protocol.stall import STALL_SECONDS  # late, for `--help`

    return STALL_SECONDS if options.stall_seconds is None else options.stall_seconds


def engine_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `EngineOptions` from the parsed arguments."""
    given = {field.name: getattr(arguments, field.name) for field in fields(EngineOptions)}
    for name in _LISTS:
        given[name] = tuple(given[name])
    given["dtype"] = _DTYPES[given["dtype"]]
    return given


def engine_arguments(options: EngineOptions) -> list[str]:
    """Return the options as command-line flags, to start another process with."""
    arguments = []
    for field in fields(EngineOptions):
        value = getattr(options, field.name)
        if field.name in _LISTS:
            arguments += [_LISTS[field.name], *value] if value else []
        elif value is True:
            arguments.append(f"--{field.name.replace('_', '-')}")
        elif value is not None and value is not False:
            arguments.append(f"--{field.name.replace('_', '-')}={value}")
    return arguments


def engine_command(options: EngineOptions, *arguments: str) -> list[str]:
    """Return the command of an engine process of these options (`process.py`)."""
    from tidemill.engine.child_command import module_command  # late: `--help` loads no engine

    return module_command("tidemill.offline.engine.process", *arguments, *engine_arguments(options))

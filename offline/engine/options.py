"""Engine options: flags of every command that loads an engine, with vLLM's names."""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import dataclass, fields
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Literal

from ..arguments.argument_types import (
    positive_int,
    positive_number,
    seed_number,
    size_in_bytes,
)

if TYPE_CHECKING:
    from tidemill.protocol.reasoning_fields import ReasoningField

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
    "allowed_media_buckets": "--allowed-media-buckets",
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
    batch_invariant: bool = False
    chat_template: str | None = None
    runner: Literal["auto", "generate", "pooling"] = "auto"
    convert: Literal["auto", "none", "embed", "classify"] = "auto"
    hf_overrides: str | None = None
    pooler_config: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    reasoning_field: ReasoningField = "both"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory: int | None = None
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    quantization: (
        Literal[
            "fp8", "int8", "compressed-tensors", "awq", "gptq", "mxfp4", "modelopt", "auto-round"
        ]
        | None
    ) = None
    tensor_parallel_size: int | None = None
    seed: int = 0
    allowed_media_domains: tuple[str, ...] = ()
    allowed_media_buckets: tuple[str, ...] = ()
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
        help="load a folder, a GGUF file, a hub ID or s3://bucket/prefix (default: the demo model)",
    )
    add(
        "--weights-cache",
        metavar="FOLDER",
        help="store weights from S3 and dequantized GGUF files here (default: "
        "~/.cache/tidemill/weights)",
    )
    add(
        "--served-model-name",
        nargs="+",
        default=(),
        dest="served_model_names",
        metavar="NAME",
        help="accept these model names in requests (default: the value of --model)",
    )
    add(
        "--any-model",
        action="store_true",
        help="also accept any other model name in requests; rows contain the requested name",
    )
    add(
        "--chat-template",
        metavar="FILE",
        help="use this Jinja file or inline template instead of the tokenizer's",
    )
    add(
        "--runner",
        choices=("auto", "generate", "pooling"),
        default="auto",
        help="generate text, or compute vectors or scores (default: from the model's files)",
    )
    add(
        "--convert",
        choices=("auto", "none", "embed", "classify"),
        default="auto",
        help="compute vectors (embed) or scores (classify) (default: from the model's files)",
    )
    add(
        "--hf-overrides",
        type=_json_object,
        metavar="JSON",
        help="override fields of its config.json, such as rope_scaling for longer contexts",
    )
    add(
        "--pooler-config",
        type=_json_object,
        metavar="JSON",
        help="override pooling_type (CLS, LAST, MEAN, SPLADE), use_activation of the model's files",
    )
    add(
        "--tool-call-parser",
        metavar="NAME",
        help="parse tool calls with this parser of vLLM, or none (default: from the template)",
    )
    add(
        "--reasoning-parser",
        metavar="NAME",
        help="parse reasoning with this parser of vLLM, or none (default: from the template)",
    )
    add(
        "--reasoning-field",
        choices=("both", "reasoning", "reasoning_content"),
        default="both",
        help="return reasoning in this field of messages and deltas (default: both)",
    )
    add(
        "--dtype",
        choices=tuple(_DTYPES),
        default="auto",
        help="set the type of the weights (default: auto)",
    )
    add(
        "--quantization",
        "-q",
        choices=(
            "fp8",
            "int8",
            "compressed-tensors",
            "awq",
            "gptq",
            "mxfp4",
            "modelopt",
            "auto-round",
        ),
        help="quantise weights while loading: fp8, or int8 on a CPU (default: as in the files)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="run on this device")
    add(
        "--max-model-len",
        type=positive_int,
        metavar="N",
        help="limit the tokens of prompt and output",
    )
    add("--max-num-seqs", type=positive_int, metavar="N", help="limit the sequences per step")
    add(
        "--max-num-batched-tokens", type=positive_int, metavar="N", help="limit the tokens per step"
    )
    add(
        "--kv-cache-memory",
        type=size_in_bytes,
        metavar="SIZE",
        help="set the size of the KV cache, such as 512M or 4G (default: the free memory)",
    )
    add(
        "--kv-cache-dtype",
        choices=("auto", "fp8", "fp8_e4m3"),
        default="auto",
        help="set the type of the KV cache; fp8 holds twice the tokens, with lower precision "
        "(default: the type of the weights)",
    )
    add(
        "--tensor-parallel-size",
        "-tp",
        type=positive_int,
        metavar="N",
        help="share the model among N GPUs (default: 1)",
    )
    add("--seed", type=seed_number, default=0, metavar="N", help="set the random seed (default: 0)")
    add(
        "--proof-rows",
        action="store_true",
        help="record in each row whether its output conforms to the requested format",
    )
    add(
        "--enable-prompt-tokens-details",
        action="store_true",
        help="record the number of cached prompt tokens in the usage of each row",
    )
    add(
        "--max-logprobs",
        type=partial(_count_or_all, least=0),
        default=20,
        metavar="N",
        help="limit the logprobs that a request may request per token; -1: no limit (default: 20)",
    )
    add(
        "--truncate-prompt-tokens",
        type=partial(_count_or_all, least=1),
        metavar="N",
        help="truncate prompts of requests without this parameter to N tokens, -1: to the model's "
        "limit (default: reject prompts that are too long)",
    )
    add(
        "--no-speculative-decoding",
        action="store_true",
        help="disable drafting tokens from existing text, which does not change rows",
    )
    add(
        "--batch-invariant",
        action="store_true",
        help="compute each row to the same bits whatever runs next to it, or refuse the model",
    )
    add(
        "--stall-seconds",
        type=positive_number,
        default=os.environ.get("TIDEMILL_STALL_SECONDS"),
        metavar="S",
        help="stop an engine that has requests but makes no progress for S seconds (default: 600)",
    )
    _add_adapter_flags(parser)
    _add_media_flags(parser)


def _count_or_all(text: str, least: int) -> int:
    """Return -1, which means all, or a whole number of at least `least`."""
    if text != "-1" and not (text.isdecimal() and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text!r} is neither -1 nor a whole number ≥ {least}")
    return int(text)


def _add_adapter_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of LoRA adapters."""
    add = parser.add_argument_group("adapters, which requests select by name").add_argument
    add(
        "--lora-modules",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="load adapters from PEFT folders, hub IDs or s3://bucket/prefix (also vLLM's JSON)",
    )
    # vLLM's switch; here, `--lora-modules` alone enables adapters.
    add("--enable-lora", action="store_true", help=argparse.SUPPRESS)
    add("--max-loras", type=positive_int, metavar="N", help="reject more than N adapters")
    add(
        "--max-lora-rank",
        type=positive_int,
        metavar="N",
        help="reject adapters with a rank above N",
    )


def _add_media_flags(parser: argparse.ArgumentParser) -> None:
    """Add the limits of audio and images; vLLM reads some of them from the environment."""
    add = parser.add_argument_group("recordings and images at URLs in requests").add_argument
    add(
        "--allowed-media-domains",
        nargs="+",
        type=_host_name,
        default=(),
        metavar="HOST",
        help="download only from these hosts (default: any public host)",
    )
    add(
        "--allowed-media-buckets",
        nargs="+",
        type=_bucket_path,
        default=(),
        metavar="BUCKET",
        help="read s3:// URLs with your AWS credentials from BUCKET or BUCKET/PREFIX, * for any "
        "(default: * to run local or S3 input, else none)",
    )
    for name, unit, what in (
        ("max-audio-clip-filesize-mb", "MIB", "limit the size of a recording (default: 25 MiB)"),
        (
            "max-audio-decode-duration-s",
            "S",
            "limit the duration of a recording in seconds (default: 7200)",
        ),
        ("audio-fetch-timeout", "S", "limit the seconds of each download attempt (default: 60)"),
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
        help="""limit the images or recordings per request: '{"image": 4, "audio": 2}'
        (default: 16)""",
    )
    add(
        "--mm-processor-kwargs",
        type=_json_object,
        metavar="JSON",
        help="limit images by min_pixels and max_pixels, InternVL's min_patches and max_patches, "
        "or Gemma 4's max_soft_tokens (default: from the model's files)",
    )
    for name, unit, what in (
        ("max-image-mb", "MIB", "limit the size of an image (default: 20 MiB)"),
        ("max-image-pixels", "N", "limit the pixels of an image (default: 50,000,000)"),
    ):
        add(f"--{name}", type=positive_int, metavar=unit, help=what)


def _limits(text: str) -> str:
    """Convert vLLM's `--limit-mm-per-prompt` to JSON; those of images and audio are used here."""
    counts: dict[str, object] = {}
    try:
        limits = json.loads(text) if text.lstrip().startswith("{") else _pairs(text)
        for medium in ("image", "audio"):
            limit = limits.get(medium)
            counts[medium] = limit.get("count") if isinstance(limit, dict) else limit
    except (ValueError, AttributeError, RecursionError):
        counts["image"] = -1
    given = {medium: count for medium, count in counts.items() if count is not None}
    if any(type(count) is not int or count < 0 for count in given.values()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid limit: use '{{\"image\": 4}}'")
    return json.dumps(given)


def _pairs(text: str) -> dict[str, int]:
    """Parse the format of older vLLM versions: `image=4,video=0`."""
    pairs = (pair.split("=") for pair in text.split(","))
    return {name.strip(): int(count) for name, count in pairs}


def _host_name(text: str) -> str:
    """Return a host name or IP address unchanged; raises ArgumentTypeError."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", text):
        try:
            ip_address(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a host: use a full name, such as files.example.com"
            ) from None
    return text


def _bucket_path(text: str) -> str:
    """Return a bucket, perhaps with a prefix, without `s3://`; raises ArgumentTypeError."""
    path = text.removeprefix("s3://")
    if path != "*" and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]+(/.*)?", path):
        raise argparse.ArgumentTypeError(f"{text!r} is not BUCKET, BUCKET/PREFIX or *")
    return path


def _json_object(text: str) -> str:
    """Return the text of a JSON object unchanged; raises ArgumentTypeError."""
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return text


def stall_limit(options: EngineOptions) -> float:
    """Return the number of seconds without progress after which an engine is stopped."""
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
    """Return the options as command-line flags for another process."""
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
    """Return the command of an engine process with these options (`process.py`)."""
    from tidemill.engine.child_command import module_command  # late: `--help` loads no engine

    return module_command("tidemill.offline.engine.process", *arguments, *engine_arguments(options))

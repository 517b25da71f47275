"""The engine's settings, checked once when they are created."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from tidemill.net.fetch import ByteBudget, FetchLimits
from tidemill.protocol.contract import EngineError
from tidemill.protocol.reasoning_fields import ReasoningField

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]
AdmissionName = Literal["arrival", "prefix"]
RunnerName = Literal["auto", "generate", "pooling"]
ConvertName = Literal["auto", "none", "embed", "classify"]
CacheDtypeName = Literal["auto", "fp8", "fp8_e4m3"]
QuantizationName = Literal["fp8", "int8", "compressed-tensors", "awq", "gptq", "mxfp4"]


ReadObject = Callable[[str, int, ByteBudget], Awaitable[bytes]]
"""Returns the object of an `s3://` URL if it is not larger than a limit; raises `FetchFailed`."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits on the images of a request: bytes and pixels of one, and images of one prompt.

    `max_recordings` are those of one prompt of a model of recordings.
    """

    max_bytes: int = 20 * 2**20
    max_pixels: int = 50_000_000
    max_per_prompt: int = 16
    max_recordings: int = 16


MAX_LOGPROBS = 20
"""Alternatives for each token: OpenAI's limit, and vLLM's default."""

MAX_DECODING_BYTES = 512 * 2**20
"""Limit on all images, or all recordings, being decoded; a larger one is decoded alone."""

MAX_AUDIO_SECONDS = 7_200.0
"""Two hours are 460 MB of samples. 25 MB from a telephone codec can hold ten times as much."""

_NAMES = {
    "dtype": get_args(DtypeName),
    "device": get_args(DeviceName),
    "admission": get_args(AdmissionName),
    "runner": get_args(RunnerName),
    "convert": get_args(ConvertName),
    "kv_cache_dtype": get_args(CacheDtypeName),
    "quantization": (None, *get_args(QuantizationName)),
}
_LEAST: Mapping[str, int] = dict.fromkeys(
    (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory",
        "max_audio_seconds",
        "max_loras",
        "max_lora_rank",
        "tensor_parallel_size",
    ),
    1,
) | {"max_logprobs": -1, "truncate_prompt_tokens": -1}


class LoraModule(NamedTuple):
    """A LoRA adapter: its name in requests, and its folder or hub id."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine, which runs one model.

    `model` is a local folder or a hub id. `max_model_len` None uses the model's own context length.
    `max_num_batched_tokens` is the token budget of a step and `max_num_seqs` its limit on
    sequences; None derives them from the device and its memory. `kv_cache_memory` is in bytes; None
    uses the memory left after the weights. `kv_cache_dtype` "fp8" means fp8_e4m3 and stores keys
    and values in eight bits; "auto" uses the dtype of the weights. `quantization` "fp8", or "int8"
    on a CPU, quantizes weights while they are loaded. For a quantized checkpoint it may name the
    checkpoint's own method; None reads it from the checkpoint.

    `seed` is the default for requests without one. `steps_ahead` 1 prepares the next step during
    the current one; 0 runs them one after the other; None is 1 on a GPU, else 0. `admission` orders
    the waiting requests: by arrival, or, while no interactive request waits, by common prefix.

    `runner` selects generation or pooling, and `convert` selects vectors or scores. `hf_overrides`
    replaces fields of config.json, and `pooler_config` those of the pooling config, both with
    vLLM's names. `tool_call_parser` and `reasoning_parser` name the formats of tool calls and
    reasoning; None detects them from the chat template. `reasoning_field` names the fields of
    answers with reasoning. `fetching` limits downloads of media,
    `max_audio_seconds` the length of a recording, and `images` the images of a request.
    `read_object` reads media at `s3://` URLs, which are refused without it.
    `mm_processor_kwargs` sets the pixel limits that images are resized to.

    `lora_modules` are adapters of the model: at most `max_loras`, each with a rank of at most
    `max_lora_rank`. `tensor_parallel_size` ranks share the model, each on its own GPU. With
    `proof_rows` each constrained answer includes a verdict. With `enable_prompt_tokens_details` its
    usage includes the number of cached prompt tokens. A token may have `max_logprobs` alternatives;
    -1 allows the whole vocabulary. `truncate_prompt_tokens` is the default for requests without
    one; -1 truncates to the model's context. With `speculative_decoding` tokens are drafted where
    measurements show a gain. With `batch_invariant` all sums of a token are in the same order
    whatever else runs, or the model is refused.
    """

    model: str
    dtype: DtypeName = "auto"
    device: DeviceName = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory: int | None = None
    kv_cache_dtype: CacheDtypeName = "auto"
    quantization: QuantizationName | None = None
    seed: int = 0
    steps_ahead: int | None = None
    admission: AdmissionName = "arrival"
    deduplication: bool = True
    kv_forecast: bool = False
    runner: RunnerName = "auto"
    convert: ConvertName = "auto"
    hf_overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)
    pooler_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    reasoning_field: ReasoningField = "both"
    fetching: FetchLimits = field(default_factory=FetchLimits)
    max_audio_seconds: float = MAX_AUDIO_SECONDS
    lora_modules: tuple[LoraModule, ...] = ()
    max_loras: int | None = None
    max_lora_rank: int | None = None
    images: ImageLimits = field(default_factory=ImageLimits)
    tensor_parallel_size: int = 1
    proof_rows: bool = False
    enable_prompt_tokens_details: bool = False
    max_logprobs: int = MAX_LOGPROBS
    truncate_prompt_tokens: int | None = None
    speculative_decoding: bool = True
    batch_invariant: bool = False
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    read_object: ReadObject | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Raise `EngineError` naming the first invalid setting."""
        for name, names in _NAMES.items():
            value = getattr(self, name)
            if value not in names:
                raise EngineError(
                    f"{name} {value!r} is not supported: use {', '.join(filter(None, names))}"
                )
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise EngineError(f"{name} must be at least {least}, not {value}")
        if self.runner == "generate" and self.convert in ("embed", "classify"):
            raise EngineError(f"convert {self.convert!r} requires runner 'auto' or 'pooling'")
        adapters = [module.name for module in self.lora_modules]
        if duplicates := [name for name in adapters if adapters.count(name) > 1]:
            raise EngineError(f"adapter name {duplicates[0]!r} is used twice: use unique names")
        if self.max_loras is not None and len(adapters) > self.max_loras:
            raise EngineError(
                f"{len(adapters)} adapters exceed max_loras ({self.max_loras}): increase max_loras"
            )
        if self.steps_ahead not in (None, 0, 1):
            raise EngineError(f"steps_ahead must be 0 or 1, not {self.steps_ahead}")
        tokens, sequences = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and sequences is not None and tokens < sequences:
            raise EngineError(
                f"max_num_batched_tokens ({tokens}) must be at least max_num_seqs ({sequences}): "
                "each running sequence takes one token per step"
            )

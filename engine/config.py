"""The engine's settings, checked once when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from tidemill.net.fetch import FetchLimits
from tidemill.protocol.contract import EngineError

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]
AdmissionName = Literal["arrival", "prefix"]
RunnerName = Literal["auto", "generate", "pooling"]
ConvertName = Literal["auto", "none", "embed", "classify"]
CacheDtypeName = Literal["auto", "fp8", "fp8_e4m3"]
QuantizationName = Literal["fp8", "int8", "compressed-tensors", "awq", "gptq", "mxfp4"]


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits on the images of a request: bytes and pixels of one, and images of one prompt."""

    max_bytes: int = 20 * 2**20
    max_pixels: int = 50_000_000
    max_per_prompt: int = 16


MAX_LOGPROBS = 20
"""Alternatives of a token, as OpenAI has them, and vLLM by default."""

MAX_DECODING_BYTES = 512 * 2**20
"""Of all images, or all recordings, that are being decoded; a larger one is decoded alone."""

MAX_AUDIO_SECONDS = 7_200.0
"""Two hours are 460 MB of samples; 25 MB of a telephone's codec are ten times as long."""

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
    """An adapter of low rank: what requests call it, and its folder or hub id."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine, which runs one model.

    `model` is a local folder or a hub id. `max_model_len` None takes the model's own context.
    `max_num_batched_tokens` is the token budget of one step, `max_num_seqs` the sequences in it;
    None goes by the device and its memory. `kv_cache_memory` (bytes) None takes what the device has
    left after the weights; `kv_cache_dtype` "fp8", which is fp8_e4m3, keeps keys and values in
    eight bits, "auto" as the weights are. `quantization` "fp8" or, on a CPU, "int8" quantises
    weights as they are read; of weights that are quantised in their files it may say how, None
    takes them as they are.
    `seed` keys requests that name none. `steps_ahead` 1 prepares a step while another is computed,
    0 one after the other; None is 1 on a GPU, else 0.
    `admission` says who starts next: who came first, or, where nobody waits for one answer, those
    that begin alike together.
    `runner` says whether a model generates or gives vectors and scores, `convert` which of the two;
    `hf_overrides` stand in for what its config.json says, `pooler_config` for what is said of
    pooling, in vLLM's words. `tool_call_parser` and `reasoning_parser` name the forms that a model
    writes calls and thoughts in; None goes by its template. `fetching` bounds what lines name by
    url, `max_audio_seconds` how long a recording may be, `images` what images may be.
    `mm_processor_kwargs` bound the pixels that they are brought to.
    `lora_modules` are adapters of the model: `max_loras` of them at most, each of a rank of at most
    `max_lora_rank`. `tensor_parallel_size` ranks share the model, each on a GPU of its own. With
    `proof_rows` each answer that was held to a form comes with a judgement, with
    `enable_prompt_tokens_details` each with how many tokens of its prompt were cached. Each token
    may have `max_logprobs` alternatives, -1 for the whole vocabulary. Prompts of requests that name
    no `truncate_prompt_tokens` are cut to this one; -1 is as much as the model takes. With
    `speculative_decoding` tokens are drafted where that was measured to gain.
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
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Refuse settings that no engine could run with, naming the setting."""
        for name, names in _NAMES.items():
            value = getattr(self, name)
            if value not in names:
                raise EngineError(f"{name} {value!r} is none of {', '.join(filter(None, names))}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise EngineError(f"{name} must be at least {least}, not {value}")
        if self.runner == "generate" and self.convert in ("embed", "classify"):
            raise EngineError(f"convert {self.convert!r} is for models that do not generate")
        adapters = [module.name for module in self.lora_modules]
        if twice := [name for name in adapters if adapters.count(name) > 1]:
            raise EngineError(f"two adapters are called {twice[0]}")
        if self.max_loras is not None and len(adapters) > self.max_loras:
            raise EngineError(
                f"max_loras is {self.max_loras}, but there are {len(adapters)} adapters"
            )
        if self.steps_ahead not in (None, 0, 1):
            raise EngineError(f"steps_ahead must be 0 or 1, not {self.steps_ahead}")
        tokens, sequences = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and sequences is not None and tokens < sequences:
            raise EngineError(
                f"max_num_batched_tokens ({tokens}) must not be below max_num_seqs ({sequences}): "
                "each running sequence takes a token a step"
            )

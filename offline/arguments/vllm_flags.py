"""Flags of vLLM that our commands do not have: ignored when they change nothing here.

Collected from vLLM's engine arguments, batch runner and server. A flag that would change rows is
never ignored.
"""

from __future__ import annotations

from types import MappingProxyType

# vLLM's memory, compilation, scheduling and logging; and features whose requests are refused here
# one by one, with their own error.
_PASSED_OVER = frozenset(
    """
    aggregate-engine-logging allow-credentials allowed-headers allowed-local-media-path
    allowed-methods api-server-count async-scheduling attention-backend block-size
    calculate-kv-scales chat-template-content-format code-revision collect-detailed-traces
    compilation-config cpu-offload-gb cuda-graph-sizes cudagraph-capture-sizes cudagraph-metrics
    disable-access-log-for-endpoints disable-cascade-attn disable-chunked-mm-input
    disable-custom-all-reduce disable-fastapi-docs disable-frontend-multiprocessing
    disable-hybrid-kv-cache-manager disable-log-requests disable-log-stats
    disable-uvicorn-access-log distributed-executor-backend enable-auto-tool-choice
    enable-chunked-prefill enable-cumem-allocator enable-dbo enable-eplb enable-expert-parallel
    enable-flashinfer-autotune enable-layerwise-nvtx-tracing enable-log-deltas
    enable-log-outputs enable-log-requests enable-logging-iteration-details enable-mfu-metrics
    enable-mm-processor-stats enable-prefix-caching
    enable-request-id-headers enable-server-load-tracking enable-sleep-mode enable-ssl-refresh
    enforce-eager fail-on-environ-validation fully-sharded-loras gpu-memory-utilization
    guided-decoding-backend guided-decoding-disable-any-whitespace h11-max-header-count
    h11-max-incomplete-event-size kv-cache-metrics kv-cache-metrics-sample kv-offloading-backend
    kv-offloading-size language-model-only log-config-file log-error-stack
    long-prefill-token-threshold lora-extra-vocab-size max-cpu-loras max-cudagraph-capture-size
    max-log-len max-long-partial-prefills max-num-partial-prefills
    max-num-queued-reqs max-num-queued-tokens max-parallel-loading-workers
    max-seq-len-to-capture media-io-kwargs mm-encoder-only mm-encoder-tp-mode
    mm-processor-cache-gb mm-processor-cache-type mm-shm-cache-max-object-size-mb
    num-gpu-blocks-override num-lookahead-slots num-scheduler-steps optimization-level
    otlp-traces-endpoint performance-mode preemption-mode prefix-cache-retention-interval
    prefix-caching-hash-algo renderer-num-workers response-role safetensors-load-strategy
    scheduler-reserve-full-isl scheduling-policy show-hidden-metrics-for-version
    skip-mm-profiling speculative-config stream-interval structured-outputs-config swap-space
    tokenizer-pool-size trust-remote-code use-tqdm-on-load use-v2-block-manager
    uvicorn-log-level
    """.split()
)

# Ignored with a value that is the behaviour here anyway.
_NEUTRAL_VALUES = MappingProxyType(
    {
        "config-format": {"auto", "hf"},
        "data-parallel-size": {"1"},
        "generation-config": {"auto"},
        "load-format": {"auto", "gguf", "safetensors"},
        "logprobs-mode": {"raw_logprobs"},
        "lora-dtype": {"auto"},
        "model-impl": {"auto", "vllm", "transformers"},
        "pipeline-parallel-size": {"1"},
        "task": {"auto", "generate"},
        "tokenizer-mode": {"auto", "hf"},
    }
)

_NO_PIPELINE = "GPUs share every layer of a model here: --tensor-parallel-size says how many"
_IN_FOLDER = "what lies in the model's folder is used: change it there, and name it by --model"
_BY_OVERRIDES = """here it is --hf-overrides '{"rope_scaling": …}', as in vLLM today"""
_BY_RUNNER = "--runner pooling with --convert embed or classify says what a model gives"
_INSTEAD = MappingProxyType(
    {
        "config": "write the flags themselves",
        "config-format": _IN_FOLDER,
        # These have it, and none of this is asked there.
        "data-parallel-size": "`tidemill run`, `worker` and `serve` have it",
        "default-chat-template-kwargs": "write `chat_template_kwargs` into the lines",
        "disable-sliding-window": "--max-model-len bounds the context",
        "download-dir": "HF_HOME says where models from the hub are kept",
        "generation-config": "write the parameters into the lines",
        "hf-config-path": _IN_FOLDER,
        "hf-token": "HF_TOKEN in the environment holds it",
        "kv-cache-memory-bytes": "here it is --kv-cache-memory",
        "load-format": "only safetensors and GGUF files are read",
        "logits-processors": "parameters of the lines are all that changes logits",
        "logprobs-mode": "logprobs are those of the model, before temperature and penalties",
        "lora-dtype": "adapters have the type of the weights; leave it out",
        "model-impl": "the engine chooses",
        "override-generation-config": "write the parameters into the lines",
        "override-pooler-config": "here it is --pooler-config",
        "pipeline-parallel-size": _NO_PIPELINE,
        "middleware": "code of yours can stand before the server, as a proxy",
        "revision": "load the revision into a folder, and name that by --model",
        "rope-scaling": _BY_OVERRIDES,
        "rope-theta": _BY_OVERRIDES,
        "root-path": "a proxy in front can take a prefix away",
        "skip-tokenizer-init": "rows hold text, which needs the tokenizer",
        "ssl-ca-certs": "nobody is asked for a certificate; --api-key lets in who has one",
        "task": _BY_RUNNER,
        "tokenizer": _IN_FOLDER,
        "tokenizer-mode": _IN_FOLDER,
        "tokenizer-revision": "load the revision into a folder, and name that by --model",
    }
)

_SWITCHES = ("async-", "calculate-", "disable-", "enable-", "enforce-", "no-", "trust-", "use-")
_NO_SWITCHES = {"disable-access-log-for-endpoints"}
_OTHER_SWITCHES = frozenset(
    """
    aggregate-engine-logging allow-credentials cudagraph-metrics fail-on-environ-validation
    fully-sharded-loras guided-decoding-disable-any-whitespace kv-cache-metrics
    language-model-only log-error-stack mm-encoder-only scheduler-reserve-full-isl
    skip-mm-profiling
    """.split()
)
_SHORT = MappingProxyType(
    {
        "-pp": "pipeline-parallel-size",
        "-dp": "data-parallel-size",
        "-O": "optimization-level",
        "-cc": "compilation-config",
    }
)


def is_switch(flag: str) -> bool:
    """Say whether a flag is a switch of vLLM's, which takes no value."""
    name = _name_of(flag)
    return name in _OTHER_SWITCHES or (name.startswith(_SWITCHES) and name not in _NO_SWITCHES)


def is_ignored(flag: str, value: str | None) -> bool:
    """Say whether a flag is vLLM's and has no effect here."""
    name = _name_of(flag)
    if name in _NEUTRAL_VALUES:
        return value in _NEUTRAL_VALUES[name]
    return name in _PASSED_OVER or name.removeprefix("no-") in _PASSED_OVER


def replacement_for(flag: str) -> str | None:
    """Return advice for a flag of vLLM's that would change rows; None for other flags."""
    return _INSTEAD.get(_name_of(flag))


def _name_of(flag: str) -> str:
    if flag.startswith("-O") and flag[2:].isdigit():  # -O3
        flag = "-O"
    return _SHORT.get(flag) or flag.removeprefix("--").replace("_", "-")

"""vLLM flags that Tidemill's commands do not have; flags without effect here are ignored.

Collected from vLLM's engine arguments, batch runner and server. A flag that would change rows is
never ignored.
"""

from __future__ import annotations

from types import MappingProxyType

# Memory, compilation, scheduling and logging in vLLM; and features whose requests get their own
# errors here.
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

# Ignored with a value that equals the behaviour here.
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

_NO_PIPELINE = "use --tensor-parallel-size to share a model among GPUs"
_IN_FOLDER = "the files in the model's folder are used: change them there, and pass it as --model"
_BY_OVERRIDES = """use --hf-overrides '{"rope_scaling": …}', as in current vLLM"""
_BY_RUNNER = "use --runner pooling with --convert embed or --convert classify"
_INSTEAD = MappingProxyType(
    {
        "config": "pass the flags themselves",
        "config-format": _IN_FOLDER,
        # These commands have the flag, so that it is not unknown there.
        "data-parallel-size": "it is supported by `tidemill run`, `worker` and `serve`",
        "default-chat-template-kwargs": "set `chat_template_kwargs` in the requests",
        "disable-sliding-window": "use --max-model-len to limit the context",
        "download-dir": "set HF_HOME to choose the folder for models from the hub",
        "generation-config": "set the parameters in the requests",
        "hf-config-path": _IN_FOLDER,
        "hf-token": "set the environment variable HF_TOKEN",
        "kv-cache-memory-bytes": "use --kv-cache-memory",
        "load-format": "only safetensors and GGUF files are supported",
        "logits-processors": "set parameters in the requests, such as `logit_bias`",
        "logprobs-mode": "logprobs are always the model's, before temperature and penalties",
        "lora-dtype": "adapters always have the type of the weights: remove it",
        "model-impl": "the engine always chooses: remove it",
        "override-generation-config": "set the parameters in the requests",
        "override-pooler-config": "use --pooler-config",
        "pipeline-parallel-size": _NO_PIPELINE,
        "middleware": "put a proxy in front of the server",
        "revision": "download the revision to a folder, and pass that as --model",
        "rope-scaling": _BY_OVERRIDES,
        "rope-theta": _BY_OVERRIDES,
        "root-path": "remove the prefix with a proxy in front of the server",
        "skip-tokenizer-init": "rows contain text, which requires the tokenizer",
        "ssl-ca-certs": "client certificates are not supported: use --api-key",
        "task": _BY_RUNNER,
        "tokenizer": _IN_FOLDER,
        "tokenizer-mode": _IN_FOLDER,
        "tokenizer-revision": "download the revision to a folder, and pass that as --model",
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
    """Return whether a flag is a vLLM switch, which takes no value."""
    name = _name_of(flag)
    return name in _OTHER_SWITCHES or (name.startswith(_SWITCHES) and name not in _NO_SWITCHES)


def is_ignored(flag: str, value: str | None) -> bool:
    """Return whether a flag is vLLM's and has no effect here."""
    name = _name_of(flag)
    if name in _NEUTRAL_VALUES:
        return value in _NEUTRAL_VALUES[name]
    return name in _PASSED_OVER or name.removeprefix("no-") in _PASSED_OVER


def replacement_for(flag: str) -> str | None:
    """Return advice for a vLLM flag that would change rows; None for other flags."""
    return _INSTEAD.get(_name_of(flag))


def _name_of(flag: str) -> str:
    if flag.startswith("-O") and flag[2:].isdigit():  # -O3
        flag = "-O"
    return _SHORT.get(flag) or flag.removeprefix("--").replace("_", "-")

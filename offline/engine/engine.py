"""Engine loading: the engine's config from options, weights, and the load itself."""

from __future__ import annotations

import gc
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from ..console.errors import EngineFailed, Refused
from ..console.signals import interruptible
from ..console.spinner import spinner
from ..console.terminal import log
from ..extras import not_installed, require_extras
from .adapters import local_adapters, lora_modules
from .demo_model import demo_model
from .options import EngineOptions
from .weights import VARIABLE as WEIGHTS_CACHE
from .weights import local_model, log_progress, s3_addresses, throttled

if TYPE_CHECKING:
    from tidemill.engine.config import EngineConfig, ImageLimits, ReadObject
    from tidemill.net.fetch import FetchLimits
    from tidemill.protocol.contract import Online, Served

    from .watched_engine import Watch

_DAY_SECONDS = 24 * 3600
ServedT = TypeVar("ServedT", bound="Served")
ServedT_co = TypeVar("ServedT_co", bound="Served", covariant=True)


class Load(Protocol[ServedT_co]):
    """Loads an engine; raises EngineError with a message for the user."""

    def __call__(
        self,
        config: EngineConfig,
        *,
        served_names: tuple[str, ...],
        chat_template: str | None,
    ) -> ServedT_co:
        """Load the model and serve it under these names."""


def load_engine(
    config: EngineConfig,
    *,
    served_names: tuple[str, ...],
    chat_template: str | None,
    weights_cache: str | None = None,
    fetched: Callable[[], Mapping[str, str]] | None = None,
) -> Online:
    """Load the real engine; model libraries are imported only here.

    Weights from S3 are cached in `weights_cache`. If another process downloads them,
    `fetched` waits for it and returns the folder of each address.
    """
    from tidemill.engine.model.load_timing import downloading, timed
    from tidemill.engine.storage.hub import check_hub

    note = check_hub([config.model, *(module.path for module in config.lora_modules)])
    if note is not None:
        log(f"note: {note}")
    try:
        with _no_garbage_collection(), timed("imports"):
            from tidemill.engine.load import load_served, prepare
    except ModuleNotFoundError as exc:
        raise not_installed("the engine", [str(exc.name)], "engine") from exc
    _log_slow_compiles()
    with ExitStack() as held:
        if fetched is None:
            with downloading():
                here = held.enter_context(local_weights(config, weights_cache))
        else:
            prepare(config)
            with timed("waiting"):
                here = as_fetched(config, fetched())
        return load_served(here, served_names=served_names, chat_template=chat_template)


@contextmanager
def local_weights(config: EngineConfig, weights_cache: str | None) -> Iterator[EngineConfig]:
    """Yield the config with local folders of model and adapters, downloaded if needed."""
    watch = throttled(log_progress)
    with (
        local_model(config.model, weights_cache, watch) as model,
        local_adapters(config.lora_modules, weights_cache, watch) as adapters,
    ):
        yield replace(config, model=model, lora_modules=adapters)


@contextmanager
def held_weights(config: EngineConfig, weights_cache: str | None) -> Iterator[EngineConfig]:
    """Yield the config as `local_weights` does; a signal interrupts the download."""
    with ExitStack() as held:
        yield interruptible(lambda: held.enter_context(local_weights(config, weights_cache)))


def as_fetched(config: EngineConfig, folders: Mapping[str, str]) -> EngineConfig:
    """Return the config with the folders of downloaded weights in place of addresses."""
    modules = (
        module._replace(path=folders.get(module.path, module.path))
        for module in config.lora_modules
    )
    model = folders.get(config.model, config.model)
    return replace(config, model=model, lora_modules=tuple(modules))


def results_digests(
    config: EngineConfig,
    template: str | None,
    fetched: Callable[[], Mapping[str, str]] | None = None,
) -> Callable[[int], bytes | None]:
    """Return a function from the time of a request to the digest of all else that affects results.

    The digest is computed once a day, because templates may contain the date. `fetched` returns the
    folder of each address if another process downloads the weights.
    """
    from tidemill.engine.storage.model_digest import results_digest

    @cache
    def digest_of(day: int) -> bytes | None:
        here = config if fetched is None else as_fetched(config, fetched())
        return results_digest(here, template, day * _DAY_SECONDS)

    return lambda created: digest_of(created // _DAY_SECONDS)


@contextmanager
def loaded_engine(
    load: Load[ServedT],
    config: EngineConfig,
    names: tuple[str, ...],
    template: str | None,
    watch: Watch | None = None,
) -> Iterator[ServedT]:
    """Load the engine with a spinner, yield it, and close it; raises EngineFailed.

    Without a `watch`, it must run in other processes, which are already watched.
    """
    from tidemill.protocol.contract import EngineError

    from .guard import Guard
    from .watched_engine import LoadClock, WatchedEngine

    with ExitStack() as stack:
        guard = None
        if watch is not None and watch.has_guard:
            guard = stack.enter_context(Guard(watch.advice))
        clock = LoadClock(config.model, watch, guard)
        log(f"loading {config.model}")
        started = time.monotonic()
        try:
            with spinner(f"loading {config.model}"):
                served = interruptible(
                    lambda: load(config, served_names=names, chat_template=template),
                    clock.note_poll,
                )
        except EngineError as exc:
            raise EngineFailed(str(exc)) from exc
        if watch is not None:
            served = cast("ServedT", WatchedEngine(served, watch, guard))
        stack.enter_context(closing(served))
        log(f"model loaded in {time.monotonic() - started:.1f} s")
        for note in served.info().notes:
            log(f"note: {note}")
        yield served


def require_engine(what: str, model: str | None, *more: str) -> None:
    """Raise CliError if `more` extras, or those for running or downloading a model, are missing."""
    if s3_addresses(model, ()):
        what, more = f"{what} with {model}", ("cloud", *more)
    require_extras(what, "engine", *more)


class _StderrHandler(logging.Handler):
    """Log handler that prints messages on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message."""
        log(record.getMessage())


def _log_slow_compiles() -> None:
    """Print messages about slow kernel compilation, also after loading."""
    logger = logging.getLogger("tidemill.engine.kernels")
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())
        logger.setLevel(logging.INFO)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in the context, and freeze the objects created in it.

    Module objects live forever, and scanning torch's would take a fifth of the startup time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def engine_config(options: EngineOptions, *, media_seconds: float = 0) -> EngineConfig:
    """Return the engine's config from the options; raises Refused for invalid ones.

    Without `--model`, it is the demo model, which is logged. `media_seconds` is how long requests
    wait while S3 fails to return their media.
    """
    from tidemill.engine.config import EngineConfig
    from tidemill.protocol.contract import EngineError

    model = demo_model() if options.model is None else options.model
    check_model(model)
    if options.weights_cache is not None:  # the engine and its processes unpack GGUF files there
        os.environ[WEIGHTS_CACHE] = options.weights_cache
    names = (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory",
        "quantization",
        "tensor_parallel_size",
        "max_loras",
        "max_lora_rank",
    )
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.max_audio_decode_duration_s is not None:
        given["max_audio_seconds"] = options.max_audio_decode_duration_s
    try:
        return EngineConfig(
            model,
            dtype=options.dtype,
            kv_cache_dtype=options.kv_cache_dtype,
            device=options.device,
            seed=options.seed,
            runner=options.runner,
            convert=options.convert,
            hf_overrides=json.loads(options.hf_overrides or "{}"),
            pooler_config=json.loads(options.pooler_config or "{}"),
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
            reasoning_field=options.reasoning_field,
            admission="prefix",  # all commands run files
            kv_forecast=True,
            fetching=_fetch_limits(options),
            lora_modules=lora_modules(options, served_names(options)),
            images=_image_limits(options),
            proof_rows=options.proof_rows,
            enable_prompt_tokens_details=options.enable_prompt_tokens_details,
            max_logprobs=options.max_logprobs,
            truncate_prompt_tokens=options.truncate_prompt_tokens,
            speculative_decoding=not options.no_speculative_decoding,
            batch_invariant=options.batch_invariant,
            mm_processor_kwargs=json.loads(options.mm_processor_kwargs or "{}"),
            read_object=_read_object(options, media_seconds),
            **given,
        )
    except EngineError as exc:
        raise Refused(str(exc)) from exc


def _read_object(options: EngineOptions, patience_seconds: float) -> ReadObject | None:
    from .media_objects import ObjectReader

    allowed = options.allowed_media_buckets
    return ObjectReader(allowed, patience_seconds) if allowed else None


def _fetch_limits(options: EngineOptions) -> FetchLimits:
    from tidemill.net.fetch import FetchLimits

    given: dict[str, Any] = {}
    if options.allowed_media_domains:
        names = (name.lower().rstrip(".") for name in options.allowed_media_domains)
        given["allowed_hosts"] = frozenset(names)
    if options.max_audio_clip_filesize_mb is not None:
        given["max_bytes"] = options.max_audio_clip_filesize_mb * 2**20
    if options.audio_fetch_timeout is not None:
        given["whole_seconds"] = float(options.audio_fetch_timeout)
    return FetchLimits(**given)


def _image_limits(options: EngineOptions) -> ImageLimits:
    from tidemill.engine.config import ImageLimits

    counts = json.loads(options.limit_mm_per_prompt or "{}")
    given = {"max_per_prompt": counts.get("image"), "max_recordings": counts.get("audio")}
    given["max_pixels"] = options.max_image_pixels
    if options.max_image_mb is not None:
        given["max_bytes"] = options.max_image_mb * 2**20
    return ImageLimits(**{name: value for name, value in given.items() if value is not None})


def check_model(model: str, flag: str = "--model") -> None:
    """Raise Refused for an invalid value of a model's flag, before model libraries are imported."""
    if not model.strip():
        raise Refused(f"{flag} is empty: name a model")
    path = Path(model)
    is_gguf = model.lower().endswith(".gguf")
    if is_gguf and "://" not in model and not path.is_file():
        raise Refused(f"{flag} {model}: file not found")
    if path.is_file() and not is_gguf:
        raise Refused(f"{flag} {model} is a file: pass its folder instead")
    # Hub IDs are `name` or `owner/name`.
    is_path = model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1
    if is_path and "://" not in model and not path.exists():
        raise Refused(f"{flag} {model}: folder not found")


def served_names(options: EngineOptions) -> tuple[str, ...]:
    """Return the served model names; `ANY_MODEL` is last if every name is accepted."""
    from tidemill.protocol.names import ANY_MODEL, own_names

    given = options.served_model_names
    is_any = options.any_model or ANY_MODEL in given
    return (own_names(given) or (_own_name(options),)) + ((ANY_MODEL,) if is_any else ())


def _own_name(options: EngineOptions) -> str:
    if options.model is not None:
        return options.model
    from tidemill import demo

    return demo.NAME


def chat_template(options: EngineOptions) -> str | None:
    """Return the chat template, inline or read from its file; raises Refused."""
    given = options.chat_template
    if given is None or "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise Refused(f"the chat template {given} cannot be read: {exc}") from exc

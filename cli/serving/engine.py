"""How the engine of a command is set up and loaded."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from cli.errors import EngineFailed, Refused
from cli.extras import need_extras, not_installed
from cli.serving.adapters import local_adapters, lora_modules
from cli.serving.options import EngineOptions
from cli.serving.weights import addresses, every_few_seconds, local_model, say_progress
from cli.signals import interruptible
from cli.spinner import spinner
from cli.terminal import say

if TYPE_CHECKING:
    from engine.config import EngineConfig, ImageLimits
    from engine.contract import Online, Served
    from engine.hosts.fetching import FetchLimits

ServedT = TypeVar("ServedT", bound="Served")
ServedT_co = TypeVar("ServedT_co", bound="Served", covariant=True)


class Load(Protocol[ServedT_co]):
    """Makes an engine; raises EngineError with a message for the user when it cannot."""

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
    """Load the real engine; only here is a model library imported.

    Weights that are in S3 are kept in `weights_cache`; where another process fetches them,
    `fetched` waits for it and returns the folder of each address.
    """
    from engine.hub import check_hub
    from engine.timings import timed

    note = check_hub([config.model, *(module.path for module in config.lora_modules)])
    if note is not None:
        say(f"note: {note}")
    try:
        with _nothing_collected(), timed("imports"):
            from engine.load import load_served, prepare
    except ModuleNotFoundError as exc:
        raise not_installed("the engine", [str(exc.name)], "engine") from exc
    _say_what_takes_long()
    with ExitStack() as held:
        if fetched is None:
            here = held.enter_context(_all_here(config, weights_cache))
        else:
            prepare(config)
            with timed("waiting"):
                here = _as_fetched(config, fetched())
        return load_served(here, served_names=served_names, chat_template=chat_template)


@contextmanager
def _all_here(config: EngineConfig, weights_cache: str | None) -> Iterator[EngineConfig]:
    """Yield the same settings with model and adapters on this machine, fetched if need be."""
    watch = every_few_seconds(say_progress)
    with (
        local_model(config.model, weights_cache, watch) as model,
        local_adapters(config.lora_modules, weights_cache, watch) as adapters,
    ):
        yield replace(config, model=model, lora_modules=adapters)


def _as_fetched(config: EngineConfig, folders: Mapping[str, str]) -> EngineConfig:
    """Return the same settings with the folders of those weights that have an address."""
    modules = (
        module._replace(path=folders.get(module.path, module.path))
        for module in config.lora_modules
    )
    model = folders.get(config.model, config.model)
    return replace(config, model=model, lora_modules=tuple(modules))


@contextmanager
def loaded(
    load: Load[ServedT], config: EngineConfig, names: tuple[str, ...], template: str | None
) -> Iterator[ServedT]:
    """Yield the engine, loaded with a word about it, and close it; raises EngineFailed."""
    from engine.errors import EngineError

    say(f"loading {config.model}")
    started = time.monotonic()
    try:
        with spinner(f"loading {config.model}"):
            served = interruptible(lambda: load(config, served_names=names, chat_template=template))
    except EngineError as exc:
        raise EngineFailed(str(exc)) from exc
    with closing(served):
        say(f"model loaded in {time.monotonic() - started:.1f} s")
        for note in served.info().notes:
            say(f"note: {note}")
        yield served


def need_engine(what: str, model: str | None) -> None:
    """Raise CliError where the libraries that run a model, or fetch it, are not installed."""
    need_extras(what, "engine")
    if addresses(model, ()):
        need_extras(str(model), "cloud")


class _Saying(logging.Handler):
    """Says what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        """Say one message."""
        say(record.getMessage())


def _say_what_takes_long() -> None:
    """Say it when kernels are compiled, also after the load."""
    logger = logging.getLogger("engine.kernels")
    if not any(isinstance(handler, _Saying) for handler in logger.handlers):
        logger.addHandler(_Saying())
        logger.setLevel(logging.INFO)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """While entered, nothing is looked for garbage; what was made then never will be.

    What modules make stays, and torch makes so much that looking at it again and again is a fifth
    of a start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def engine_config(options: EngineOptions) -> EngineConfig:
    """Return the settings that the options ask for; raises Refused when no engine could have them.

    Without a model the demo model is taken, with a word that says so.
    """
    from engine.config import EngineConfig
    from engine.errors import EngineError

    model = options.model
    if model is None:
        import demo

        model = str(demo.MODEL_PATH)
        say(f"no --model given: running the embedded demo model, served as {demo.NAME}")
    check_model(model)
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
            admission="prefix",  # all commands run files
            fetching=_fetch_limits(options),
            lora_modules=lora_modules(options, served_names(options)),
            images=_image_limits(options),
            proof_rows=options.proof_rows,
            mm_processor_kwargs=json.loads(options.mm_processor_kwargs or "{}"),
            **given,
        )
    except EngineError as exc:
        raise Refused(str(exc)) from exc


def _fetch_limits(options: EngineOptions) -> FetchLimits:
    from engine.hosts.fetching import FetchLimits

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
    from engine.config import ImageLimits

    given = {"max_per_prompt": json.loads(options.limit_mm_per_prompt or "{}").get("image")}
    given["max_pixels"] = options.max_image_pixels
    if options.max_image_mb is not None:
        given["max_bytes"] = options.max_image_mb * 2**20
    return ImageLimits(**{name: value for name, value in given.items() if value is not None})


def check_model(model: str) -> None:
    """Raise Refused for what can be no model, before any library of models is loaded."""
    path = Path(model)
    holds_gguf = not (path / "config.json").exists() and any(path.glob("*.gguf"))
    if model.lower().endswith(".gguf") or holds_gguf:
        raise Refused(
            f"--model {model}: GGUF is not read; name the folder, or the hub id, of the model in "
            "transformers' format (config.json and *.safetensors)"
        )
    if path.is_file():
        raise Refused(f"--model {model} is a file: name the folder that it lies in")
    # Ids of the hub are `name` or `owner/name`.
    is_path = model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1
    if is_path and "://" not in model and not path.exists():
        raise Refused(f"--model {model}: there is no such folder")


def served_names(options: EngineOptions) -> tuple[str, ...]:
    """Return what lines may call the model; `ANY_MODEL` last, when every name will do."""
    from engine.protocol.names import ANY_MODEL, own_names

    given = options.served_model_names
    is_any = options.any_model or ANY_MODEL in given
    return (own_names(given) or (_own_name(options),)) + ((ANY_MODEL,) if is_any else ())


def _own_name(options: EngineOptions) -> str:
    if options.model is not None:
        return options.model
    import demo

    return demo.NAME


def chat_template(options: EngineOptions) -> str | None:
    """Return the template itself, read from its file unless it was typed; raises Refused."""
    given = options.chat_template
    if given is None or "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise Refused(f"the chat template {given} cannot be read: {exc}") from exc

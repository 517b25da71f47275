"""LoRA adapters: parses `--lora-modules` and downloads the adapters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from ..console.errors import Refused
from .options import EngineOptions
from .weights import local_model

if TYPE_CHECKING:
    from tidemill.engine.config import LoraModule
    from tidemill.handler.worker.weights.cache import DownloadProgress

_KEYS = {"name", "path", "base_model_name"}


def lora_modules(options: EngineOptions, names: Sequence[str]) -> tuple[LoraModule, ...]:
    """Return the adapters of the options; raises Refused. `names` are the served model names."""
    from tidemill.protocol.names import ANY_MODEL

    modules = tuple(_parsed(text, names) for text in options.lora_modules)
    given = [module.name for module in modules]
    for name in given:
        if given.count(name) > 1:
            raise Refused(
                f"--lora-modules has more than one adapter with the name {name}: rename one of them"
            )
        if name in names or name == ANY_MODEL:
            raise Refused(
                f"--lora-modules: the adapter {name} has the name of the model: rename it"
            )
    most = options.max_loras
    if most is not None and len(given) > most:
        raise Refused(f"--lora-modules has {len(given)} adapters, which exceeds --max-loras {most}")
    return modules


@contextmanager
def local_adapters(
    modules: Sequence[LoraModule], cache: str | None, watch: Callable[[DownloadProgress], None]
) -> Iterator[tuple[LoraModule, ...]]:
    """Yield adapters with local folders as paths; see `local_model`."""
    with ExitStack() as held:
        yield tuple(
            module._replace(path=held.enter_context(local_model(module.path, cache, watch)))
            for module in modules
        )


def _parsed(text: str, names: Sequence[str]) -> LoraModule:
    from tidemill.engine.config import LoraModule
    from tidemill.protocol.names import ANY_MODEL

    if not text.lstrip().startswith("{"):
        name, is_there, path = text.partition("=")
        if not is_there or not name or not path:
            raise Refused(f"--lora-modules {text!r}: use name=path")
        return LoraModule(name, path)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise Refused(f"--lora-modules {text!r} is not valid JSON: {exc}") from exc
    if unknown := sorted(fields.keys() - _KEYS):
        raise Refused(f"--lora-modules {text!r}: unknown key {unknown[0]}")
    name, path, base = (fields.get(key) for key in ("name", "path", "base_model_name"))
    for key, value in (("name", name), ("path", path)):
        if not isinstance(value, str) or not value:
            raise Refused(f"--lora-modules {text!r}: {key} is required")
    if "=" in name:
        raise Refused(f"--lora-modules {text!r}: a name must not contain =")
    if base is not None and base not in names and ANY_MODEL not in names:
        raise Refused(
            f"--lora-modules {text!r} is for {base!r}; this model's name is {', '.join(names)}"
        )
    return LoraModule(name, path)

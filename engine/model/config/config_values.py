"""Values of a config.json in the types that transformers and the engine expect.

Tools write whole numbers as 4096.0, a rope's base as a string, and dtypes by other names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .transformers_fields import ROPES

_DTYPES = {
    "bf16": "bfloat16",
    "float": "float32",
    "fp16": "float16",
    "fp32": "float32",
    "half": "float16",
}
_COUNT = re.compile(
    "^(n|num)_|_(dim|embeddings|experts|heads|layers|positions|rank|size|tok|window)$"
)


def normalise(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json whose dtypes, counts and ropes have the usual types, also of its text.

    A value that has no such meaning stays as it is.
    """
    fields = {key: _normalised(key, value) for key, value in said.items()}
    return {key: value for key, value in fields.items() if value != "auto" or not _is_dtype(key)}


def _normalised(key: str, value: Any) -> Any:
    if isinstance(value, Mapping) and (
        key in ("text_config", *ROPES) or key.endswith("_attention")
    ):
        return normalise(value)
    if isinstance(value, float) and value.is_integer() and _COUNT.search(key):
        return int(value)
    if isinstance(value, str) and _is_dtype(key):
        name = value.removeprefix("torch.")
        return _DTYPES.get(name, name)
    if isinstance(value, str) and key == "rope_theta":
        return _number(value)
    return value


def _is_dtype(key: str) -> bool:
    return key in ("dtype", "torch_dtype")


def _number(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value

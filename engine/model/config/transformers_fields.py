"""Fields that transformers' code of a model type may read, and defaults of its config class.

A field that this code never reads cannot change what a model computes. The table contains all
words in the code of a type's classes and in the code shared by all classes: a superset of the
fields that they read. `python -m bench.transformers_fields --write` generates it from the
installed transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("transformers_fields.json")
ROPES = ("rope_parameters", "rope_scaling")
# Fields of draft models (EAGLE, DFlash, Medusa), which have separate classes.
_OF_DRAFTS = re.compile("dflash|draft|eagle|hydra|medusa|mtp|speculat|target")

_CLASS = re.compile(
    "(.+?)(?:Text)?(LMHeadModel|DoubleHeadsModel|Model|For(CausalLM|ConditionalGeneration|MaskedLM"
    "|MultipleChoice|NextSentencePrediction|PreTraining|QuestionAnswering|SequenceClassification"
    "|TokenClassification))"
)


def may_read(model_type: str, field: str) -> bool:
    """Return whether transformers' code of a type may read a field; true for unlisted types."""
    words = _words(model_type)
    # The table has no names that begin with a capital.
    return not words or field in words or field[:1].isupper() or bool(_OF_DRAFTS.search(field))


def class_defaults(model_type: str) -> Mapping[str, Any]:
    """Return the defaults of some fields, by the names that most families use."""
    defaults: dict[str, Any] = _table()["defaults"].get(model_type, {})
    return defaults


def is_class_of(name: object, class_names: Iterable[str]) -> bool:
    """Return whether a name of `architectures` is a class for tasks of the same networks.

    Spellings differ by capitals and underscores: `LLaMAForCausalLM`, `Ernie4_5_ForCausalLM`.
    """
    network = _network(str(name))
    return bool(network) and network in set(map(_network, class_names))


def notes_on_ignored(where: str, class_name: str, fields: Sequence[str]) -> tuple[str, ...]:
    """Return a note on fields that are ignored, where there are any."""
    if not fields:
        return ()
    *others, last = fields
    names = f"{', '.join(others)} and {last}" if others else last
    return (f"{where}: ignored {names}, which transformers' {class_name} never reads",)


def _network(class_name: str) -> str:
    """Return the common part of the class names of one network; empty for other code."""
    match = _CLASS.fullmatch(class_name)
    return "" if match is None else match[1].replace("_", "").casefold()


@cache
def _words(model_type: str) -> frozenset[str]:
    table = _table()
    own = table["words"].get(model_type)
    return frozenset() if own is None else frozenset(f"{table['shared']} {own}".split())


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(FILE.read_bytes())
    return table

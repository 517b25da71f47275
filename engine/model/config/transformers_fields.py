"""Fields that transformers' code of a model type may read, and defaults of its config class.

A field that this code never reads cannot change what a model computes. The table holds all words of
the code of a type's classes and of the code that all classes share: a superset of the fields that
they read, however they read them. `python -m bench.transformers_fields --write` makes it from the
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
# Fields of drafts (EAGLE, DFlash, Medusa), whose classes have code of their own.
_OF_DRAFTS = re.compile("dflash|draft|eagle|hydra|medusa|mtp|speculat|target")

_CLASS = re.compile(
    "(.+?)(?:Text)?(LMHeadModel|DoubleHeadsModel|Model|For(CausalLM|ConditionalGeneration|MaskedLM"
    "|MultipleChoice|NextSentencePrediction|PreTraining|QuestionAnswering|SequenceClassification"
    "|TokenClassification))"
)


def may_read(model_type: str, field: str) -> bool:
    """Say whether transformers' code of a type may read a field; true for types in no table."""
    words = _words(model_type)
    # The table has no names that begin with a capital.
    return not words or field in words or field[:1].isupper() or bool(_OF_DRAFTS.search(field))


def class_defaults(model_type: str) -> Mapping[str, Any]:
    """Return what some fields are where a config leaves them out, by the names of most families."""
    defaults: dict[str, Any] = _table()["defaults"].get(model_type, {})
    return defaults


def is_class_of(name: object, class_names: Iterable[str]) -> bool:
    """Say whether a name of `architectures` is one of the classes for tasks of the same networks.

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
    """Return what the classes of one network have in common in their names; empty for others'."""
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

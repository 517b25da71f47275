"""The public JSON-Schema-Test-Suite against what is held to: which keywords, and how truly.

    python -m bench.schema_suite FOLDER [--draft draft2020-12]

FOLDER is a checkout of json-schema-org/JSON-Schema-Test-Suite, which the source distribution of the
`jsonschema` package brings along as `json/`. A schema is refused, or else every instance that the
suite calls invalid must be kept from coming. A valid one may be, too: properties come in the order
of their schema, and each number in one way of writing it.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from demo import MODEL_PATH
from engine.grammar.grammars import Grammars
from engine.protocol.constraints import Asked
from engine.protocol.errors import RequestError
from engine.protocol.schemas import SchemaRules, served_schema
from engine.scheduling.sequence import Constraint
from engine.text.tokenizer import Tokenizer
from engine.text.vocabulary import load_vocabulary


class Judge:
    """Holds texts to schemas in the vocabulary of the demo model."""

    def __init__(self) -> None:
        vocabulary = load_vocabulary(str(MODEL_PATH), MODEL_PATH)
        self._tokenizer = Tokenizer(vocabulary)
        self._size = vocabulary.highest_id + 1 + len(vocabulary.added)
        assert vocabulary.eos_id is not None
        self._end = vocabulary.eos_id
        self._grammars = Grammars(self._tokenizer, self._size, frozenset([self._end]))

    def constraint(self, schema: object) -> Constraint:
        """Return what holds an output to a schema; raises `RequestError` where nothing can."""
        served = served_schema(schema, "schema", SchemaRules())
        return self._grammars.constraint(Asked("json_schema", json.dumps(served), "schema"))

    def lets_through(self, constraint: Constraint, text: str) -> bool:
        """Say whether a text may be the whole output."""
        watch = constraint.begin()
        mask = np.empty(-(-self._size // 32), np.uint32)
        for token_id in [*self._tokenizer.encode(text, add_special_tokens=False), self._end]:
            watch.fill(mask)
            if not mask[token_id // 32] >> np.uint32(token_id % 32) & 1:
                return False
            watch.push(token_id)
        return True


def run(folder: Path, draft: str) -> None:
    """Print what became of each keyword's schemas and instances."""
    judge = Judge()
    told: dict[str, Counter[str]] = {}
    for path in sorted((folder / "tests" / draft).glob("*.json")):
        count = told.setdefault(path.stem, Counter())
        for group in json.loads(path.read_text(encoding="utf-8")):
            judge_group(judge, group, count)
    total: Counter[str] = sum(told.values(), Counter())
    columns = (
        "schemas",
        "refused",
        "invalid kept out",
        "invalid let in",
        "valid let in",
        "valid kept out",
    )
    print(f"| keyword | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for name, count in [*told.items(), ("all", total)]:
        print(f"| {name} | {' | '.join(str(count[column]) for column in columns)} |")


def judge_group(judge: Judge, group: dict[str, Any], count: Counter[str]) -> None:
    """Hold the instances of one schema to it."""
    count["schemas"] += 1
    try:
        constraint = judge.constraint(group["schema"])
    except RequestError:
        count["refused"] += 1
        return
    for test in group["tests"]:
        goes_through = judge.lets_through(constraint, json.dumps(test["data"], ensure_ascii=False))
        kind = "valid" if test["valid"] else "invalid"
        count[f"{kind} {'let in' if goes_through else 'kept out'}"] += 1
        if goes_through and not test["valid"]:
            print("LET IN:", json.dumps(group["schema"]), json.dumps(test["data"]))


def main() -> None:
    """Run the suite of one draft."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draft", default="draft2020-12")
    asked = parser.parse_args()
    run(asked.folder, asked.draft)


if __name__ == "__main__":
    main()

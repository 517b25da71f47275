"""`--lora-modules`: what is understood of it, and what is refused before anything is loaded."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from tidemill.engine.config import LoraModule
from tidemill.offline.console.errors import Refused
from tidemill.offline.engine.adapters import local_adapters
from tidemill.offline.engine.engine import engine_config
from tidemill.offline.engine.options import (
    EngineOptions,
    add_engine_flags,
    engine_fields,
)


def modules(*typed: str, **options: Any) -> tuple[LoraModule, ...]:
    """Return the requested adapters of a model `gpt2` that is served as `m`."""
    engine_options = EngineOptions(
        model="gpt2", served_model_names=("m",), lora_modules=typed, **options
    )
    return engine_config(engine_options).lora_modules


def test_a_name_and_a_path_are_written_plainly_or_in_vllms_json() -> None:
    """A path may hold an equals sign, and the model may be named for which it was trained."""
    assert modules(
        "a=./x",
        "b=owner/name=1",
        '{"name": "c", "path": "s3://bucket/c"}',
        '{"name": "d", "path": "x", "base_model_name": "m"}',
    ) == (("a", "./x"), ("b", "owner/name=1"), ("c", "s3://bucket/c"), ("d", "x"))


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["a"], "use name=path"),
        (["=x"], "use name=path"),
        (["a="], "use name=path"),
        (["{"], "is not valid JSON"),
        (['{"name": "a"}'], "path is required"),
        (['{"name": "", "path": "x"}'], "name is required"),
        (['{"name": 7, "path": "x"}'], "name is required"),
        (['{"name": "a=b", "path": "x"}'], "a name must not contain ="),
        (['{"name": "a", "path": "x", "rank": 4}'], "unknown key rank"),
        (
            ['{"name": "a", "path": "x", "base_model_name": "n"}'],
            "is for 'n'; this model's name is",
        ),
        (["a=x", "a=y"], "has more than one adapter with the name a"),
        (["m=x"], "the adapter m has the name of the model"),
        (["*=x"], r"the adapter \* has the name of the model"),
    ],
)
def test_what_names_no_adapter_is_refused(typed: list[str], words: str) -> None:
    """The error quotes the typed value."""
    with pytest.raises(Refused, match=words):
        modules(*typed)


def test_their_number_may_be_bounded() -> None:
    """vLLM's flag limits it; its other flag is accepted without a note."""
    assert len(modules("a=x", "b=y", max_loras=2)) == 2
    with pytest.raises(Refused, match="has 2 adapters, which exceeds --max-loras 1"):
        modules("a=x", "b=y", max_loras=1)
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    typed = ["--enable-lora", "--max-lora-rank", "64", "--lora-modules", "a=x", "b=y"]
    options = EngineOptions(**engine_fields(parser.parse_args(typed)))
    assert (options.lora_modules, options.max_lora_rank) == (("a=x", "b=y"), 64)


def test_local_adapters_are_not_copied() -> None:
    """Only adapters in S3 are downloaded."""
    engine_options = modules("a=./x", "b=owner/name")
    with local_adapters(engine_options, None, lambda _: None) as here:
        assert here == engine_options

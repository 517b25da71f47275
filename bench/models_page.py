"""Page of supported models: docs/reference/models.md, from the engine's own tables.

    python -m bench.models_page [--write docs/reference/models.md]

After adding a family, a parser or a reason to refuse, write the page again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill

from tidemill.engine.model.config.hf_config import TEXT_OF_KIND
from tidemill.engine.model.encoders.families import FAMILIES as ENCODERS
from tidemill.engine.model.encoders.pooling_config import ENCODER_TYPES
from tidemill.engine.model.families.left_out import LEFT_OUT
from tidemill.engine.model.families.refused_types import (
    ONLY_OWN_TYPES,
    REFUSED_TYPES,
    reason_refused,
)
from tidemill.engine.model.families.registry import FAMILIES
from tidemill.engine.model.speech.loading import TITLE
from tidemill.engine.model.speech.whisper_config import KIND
from tidemill.engine.model.vision.preprocessor_config import supported_types
from tidemill.engine.model.weights.quantised.quantization_config import supported_methods
from tidemill.engine.parsers.registry import REASONING_SIGNS, TOOL_CALL_SIGNS

PAGE = """# Models

`python -m bench.models_page --write docs/reference/models.md` generates this page from the engine's
tables.
`tidemill models PATH-OR-HUB-ID` shows how a model will run on this machine, how much memory it
needs and which files are missing, before anything is loaded ([below](#one-model)). The `model_type`
in `config.json` decides (in `text_config` for multimodal models). Every load checks that a model
computes the same as its class in transformers, and refuses it otherwise.

## By the engine's own decoder
All of these support CUDA graphs, chunked prefill, prefix caching, tensor parallelism, and the
quantised formats in which they are published:
{methods}
([which](running.md#models)). `--quantization fp8`, or `int8` on a CPU, quantises other models at
load. Images work with quantised weights, unless the vision encoder itself is quantised. Adapters of
experts are refused. If transformers' code never reads an unknown field of `config.json`, the field
is ignored with a note. Any other unknown field leaves the model to transformers' class, as do
`architectures` of another network, such as an EAGLE draft's. If that class cannot run here, the
model is refused: this applies to
{only_own}, and to `…ForConditionalGeneration` below.

`--tensor-parallel-size` must divide a model's query heads and the columns of its MLPs, experts and
shared experts. It must divide the key heads or be a multiple of them. In recurrent layers it must
divide the heads, and the groups of B and C if Mamba-2 has more than one. GPT-OSS as published
(`mxfp4`) shares a scale between 32 columns of an expert, so it supports only 2 GPUs. Gemma 4
26B-A4B and Falcon-H1 do not support tensor parallelism. `tidemill models` lists a model's sizes up
to 8.

| `model_type` | class in transformers | LoRA adapters | images |
|---|---|---|---|
{own}

The decoder does not support these models of the families above:

| `model_type` | models | field in `config.json` | instead |
|---|---|---|---|
{left_out}

## Vectors, scores and recordings
| `model_type` | class in transformers |
|---|---|
{encoders}

Decoders above that are also published as models for vectors or scores support those tasks as well
([which](parameters.md#which-models-give-vectors-or-scores)).

## By transformers' classes
These types of transformers {version} are tried: slower, on one GPU, without adapters or images.
Quantised weights are dequantised at load, with a note: they take as much memory as unquantised
ones. `--quantization fp8` and `int8` are refused. Layers whose attention does not work with pages
are refused by name at load.

{others}

## Refused
| reason | `model_type` |
|---|---|
{refused}

Other types, and classes in the model's folder (`auto_map`), are refused: a model's own code is
never run.

## Tool calls and reasoning
The content of the chat template determines the parser, whatever the family. The first matching row
applies. Flags select another parser ([formats](parameters.md#tools-and-thinking)).

| in the template | `--tool-call-parser` |
|---|---|
{tool_calls}

| in the template | `--reasoning-parser` |
|---|---|
{reasoning}

## One model
```
$ tidemill models demo/model
model            demo/model (qwen3)
runs             by the engine's own network (Qwen3ForCausalLM)
gives            text
context          2,048 tokens
weights          4.2 MB as bfloat16 on cpu
KV cache         1,280 bytes a token; 524,288 tokens fit here now
tensor parallel  2
adapters         LoRA
quantised as     {quantised}
images           no
tool calls       hermes
reasoning        none by its template
```
For a model with recurrent layers there is also a row `recurrent state`: the bytes per sequence, and
how many sequences fit. The command reads `config.json`, the tokenizer and the headers of the
weights. If the weights of a hub id are not downloaded yet, it fetches only the small files. For the
memory, `config.json` alone is enough: the other files then count as missing. The context is the one
that a run enforces; for vectors and scores it is at most the limit in `sentence_bert_config.json`
or the tokenizer. A row `note` lists ignored fields of `config.json`. The command takes the model
and engine flags of [`tidemill run`](running.md#flags), such as `--device`, `--quantization`,
`--max-model-len`, and `--tensor-parallel-size`, with which the memory is that of one rank. The
tokens that fit are computed from the memory that is free now, and limited to the tokens that can be
in use at once; a load on a GPU measures its largest step and may fit more. `--device cuda` plans
for a GPU (Ampere or later) on a machine without one, too; then only the tokens that fit are
unknown.

`--json` prints one object: `runs` is `native`, `transformers` or `refused`, and `why` is the
reason. For a model with missing files, the row `would run`, or `plan_runs` and `plan_why`, show how
it would run. The exit status is 1 for a model that would be refused, 2 for invalid arguments. Two
checks need a load and are skipped: whether weights are noise, and whether both networks compute the
same.
"""


def page() -> str:
    """Return the page."""
    import transformers

    return PAGE.format(
        methods=_listed(supported_methods()),
        quantised=", ".join(supported_methods()),
        own="\n".join(_own_rows()),
        encoders="\n".join(_encoder_rows()),
        version=".".join(transformers.__version__.split(".")[:2]),
        others=fill(_listed(tried_types()), 100, break_on_hyphens=False),
        refused="\n".join(f"| {why} | {_listed(kinds)} |" for why, kinds in REFUSED_TYPES.items()),
        only_own=" and ".join(_listed(ONLY_OWN_TYPES).rsplit(", ", 1)),
        left_out="\n".join(_left_out_rows()),
        tool_calls="\n".join(_sign_rows(TOOL_CALL_SIGNS)),
        reasoning="\n".join(_sign_rows(REASONING_SIGNS)),
    )


def tried_types() -> list[str]:
    """Return the types that transformers' classes run, unless their layers are refused at load."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    own = {*FAMILIES, *ENCODERS, *ENCODER_TYPES, *TEXT_OF_KIND, KIND}
    return sorted(
        kind
        for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if kind not in own and reason_refused(kind) is None
    )


def _own_rows() -> Iterable[str]:
    seeing = {TEXT_OF_KIND.get(kind, kind) for kind in supported_types()}
    seeing.add("ministral3")  # the text of newer models of `mistral3`
    for kind in sorted(FAMILIES):
        sees = kind in seeing or kind.removesuffix("_text") in seeing
        adapters = "yes" if FAMILIES[kind].takes_adapters else "no"
        images = "yes" if sees else "no"
        yield f"| `{kind}` | `{FAMILIES[kind].class_name}` | {adapters} | {images} |"


def _left_out_rows() -> Iterable[str]:
    for kind, (models, field, value) in sorted(LEFT_OUT.items()):
        instead = "refused" if kind in ONLY_OWN_TYPES else "by transformers' class"
        cell = f"`{field}: {json.dumps(value)}`"
        yield f"| `{kind}` | {models} | {cell} | {instead} |"


def _encoder_rows() -> Iterable[str]:
    for kind in sorted(ENCODERS):
        yield f"| `{kind}` | `{ENCODERS[kind].class_name}` |"
    yield f"| `{KIND}` (recordings) | `{TITLE}` |"


def _sign_rows(signs: Iterable[tuple[str, str]]) -> Iterable[str]:
    for sign, parser in signs:
        yield f"| `{sign.replace('|', chr(92) + '|')}` | `{parser}` |"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page, or write it; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path)
    options = parser.parse_args(arguments)
    if options.write is None:
        sys.stdout.write(page())
    else:
        options.write.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

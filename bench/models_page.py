"""Page of the models that are served: docs/reference/models.md, from the engine's own tables.

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

`python -m bench.models_page --write docs/reference/models.md` makes this page from the
engine's tables.
`tidemill models PATH-OR-HUB-ID` says of one model how it will run here, how much memory it takes
and what is missing, before anything is loaded ([below](#one-model)). What decides is `model_type`
in `config.json` (`text_config` in models of text and images). Every load proves that a model
computes the same as its class in transformers, or refuses it.

## By the engine's own decoder
All of these have CUDA graphs, chunked and shared prefixes, tensor parallelism, and the quantised
weights that they are published in:
{methods}
([which](running.md#models)). `--quantization fp8`, on a CPU `int8`, makes others so as they are
read. Images work with quantised weights, unless the vision encoder is quantised itself. Adapters of
experts are refused. A field of `config.json` that the engine does not know is ignored with a note
where the code of transformers' class never reads it. Any other leaves the model to that class, as
do `architectures` of another network, such as an EAGLE draft's. Such a model is refused where that
class cannot run here: those of
{only_own}, and `…ForConditionalGeneration` below.

`--tensor-parallel-size` must divide a model's query heads and the columns of its MLPs, experts and
shared experts; its key heads must be a multiple of it, or it of them. Of recurrent layers it must
divide the heads, and the groups of B and C where Mamba-2 has more than one. GPT-OSS as published
(`mxfp4`), where 32 columns of an expert share a scale, can be shared by 2 GPUs only, and Gemma 4
26B-A4B and Falcon-H1 by none. `tidemill models` lists the sizes for one model, up to 8.

| `model_type` | class in transformers | LoRA adapters | images |
|---|---|---|---|
{own}

It does not run these models of the families above:

| `model_type` | but not | whose `config.json` says | instead |
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
Quantised weights are dequantised at load, which a note says: they take as much memory as any.
`--quantization fp8` or `int8` is refused. So are, at load and by name, layers that attend in a way
that pages cannot hold.

{others}

## Refused
| because | `model_type` |
|---|---|
{refused}

Other types, and classes in the model's folder (`auto_map`), are refused: a model's own code is
never run.

## Tool calls and reasoning
The parser is chosen by what the chat template contains, whatever the family; the first row that is
found counts. Flags name another ([what each reads](parameters.md#tools-and-thinking)).

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
A model with recurrent layers also has a row `recurrent state`: bytes a sequence, and how many fit.
The command reads `config.json`, the tokenizer and the headers of the weights; of a hub id whose
weights are not here yet, it fetches the small files only. `config.json` alone is enough to tell the
memory: the other files then count as missing. The context is the one that a run enforces; for
vectors and scores that is at most what `sentence_bert_config.json` or the tokenizer says. A row
`note` names the fields of `config.json` that are ignored. The command takes the flags of the model
and the engine that [`tidemill run`](running.md#flags) takes, such as `--device`, `--quantization`,
`--max-model-len`, and `--tensor-parallel-size`, with which the memory is that of one rank. Tokens
that fit are counted by the memory that is free at the moment, and no more than can be in use at
once; a load on a GPU measures its largest step and may fit more. `--device cuda` plans for a GPU
(from Ampere on) on a machine without one, too: only the tokens that fit are not known then.

`--json` prints one object, in which `runs` is `native`, `transformers` or `refused`, and `why` says
the reason. What would run a model that lacks files is the row `would run`, and `plan_runs` and
`plan_why`. The exit status is 1 for a model that would be refused, 2 for wrong arguments. What only
a load can prove is not looked at: whether weights hold noise, and whether both networks compute the
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

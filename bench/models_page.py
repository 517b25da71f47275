"""Page of supported models: docs/reference/models.md, from the engine's own tables.

    python -m bench.models_page [--write docs/reference/models.md]

Write the page again after you add a family, a parser or a reason to refuse a model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill

from tidemill.engine.endpoints.decisions.liquid_labels import LIQUID
from tidemill.engine.model.config.hf_config import TEXT_OF_KIND
from tidemill.engine.model.encoders.decision_heads import CODES, JOINT, JULIA, LAYA
from tidemill.engine.model.encoders.families import FAMILIES as ENCODERS
from tidemill.engine.model.encoders.pooling_config import ENCODER_TYPES, TWO_TOWERS
from tidemill.engine.model.families.left_out import LEFT_OUT
from tidemill.engine.model.families.refused_types import (
    HEADS,
    ONLY_OWN_TYPES,
    REFUSED_TYPES,
    reason_refused,
)
from tidemill.engine.model.families.registry import FAMILIES
from tidemill.engine.model.hf.text_classes import HEADLESS
from tidemill.engine.model.speech.whisper_config import KIND
from tidemill.engine.model.vision import audio_encoder
from tidemill.engine.model.vision.preprocessor_config import supported_types
from tidemill.engine.model.weights.quantised.quantization_config import supported_methods
from tidemill.engine.parsers.registry import REASONING_SIGNS, TOOL_CALL_SIGNS

PAGE = """# Models

`python -m bench.models_page --write docs/reference/models.md` generates this page. The
`model_type` in `config.json` decides (in `text_config` for models of text and images).
`tidemill models PATH-OR-HUB-ID` shows how one model would run ([example](#one-model)).
Every load compares the model with its transformers class and rejects it if they differ.

## The engine's own decoder
These models support CUDA graphs, chunked prefill, prefix caching, tensor parallelism and these
quantized formats: {methods}
([details](model-loading.md#quantization)). Images and recordings need an unquantized encoder. An
unknown config field is ignored with a note if transformers never reads it;
otherwise the model runs on its transformers class. Above `index_topk` tokens, `deepseek_v32` and
`glm_moe_dsa` select tokens in torch, without CUDA graphs.

{only_own}

`--tensor-parallel-size` must divide the query heads and the MLP, expert and recurrent columns.
GPT-OSS in `mxfp4` supports 2; Gemma 4 26B-A4B and Falcon-H1 support none.

{with_adapters}

{without_adapters}

{with_images}

With [recordings in chats](parameters.md#recordings-in-chats): `{hearing}`.

Exceptions:

| `model_type` | model | `config.json` | instead |
|---|---|---|---|
{left_out}

## Vectors, scores, labels and recordings
{encoders}

Decoders published as embedding, reranking or classification models work too, token classifiers, and
transformers' classes of other encoders, such as DeBERTa
([how the kind is detected](parameters.md#which-models-give-vectors-or-scores)).

## Decisions
Every text generation model answers decisions by its next token. Decision models are read as
published:

| model | recognized by | read | limits |
|---|---|---|---|
| Decision 3.0 | `{codes}` | logits of answer codes | 255 options, 10 levels |
| Clef, Clef-Flash | `{joint}` | joint schema head, all questions together | 16,384 tokens |
| Laya | `{laya}` | head at option markers | its `max_len` and `head_max_len` |
| Julia | `{julia}` | head at option markers | 20 options |
| Liquid d1 | `{liquid}` | next token, own labels | 26 options, 10 levels |

They read text only, even with a vision tower (Clef, Liquid d1). Clef-Omni is not supported. Prompts
are fixed: `question_layout` has no effect, and `instructions` are rejected, except by Liquid d1.
For Clef, Laya and Julia, `--truncate-prompt-tokens -1` truncates inputs.

## Transformers' classes
These types of transformers {version} are tried: slower, on one GPU, without adapters or images, and
with quantized weights dequantized at load. `--quantization` and layers whose attention does not fit
a paged cache are rejected.

{others}

## Rejected
| reason | `model_type` |
|---|---|
{refused}

{heads}

## Tool calls and reasoning
The first mark found in the chat template selects the parser. Flags override it
([formats](parameters.md#tools-and-thinking)).

| in the template | `--tool-call-parser` |
|---|---|
{tool_calls}

| in the template | `--reasoning-parser` |
|---|---|
{reasoning}

## One model
```
tidemill models demo/model
```

Only `config.json`, the tokenizer and the headers of the weights are read. The command accepts the
[model flags](commands.md#model-and-engine); `--device cuda` plans for a GPU on a machine without
one. `--json` prints one object. The exit status of a rejected model is 1.
"""


def page() -> str:
    """Return the page."""
    import transformers

    kinds = sorted(FAMILIES)
    composed = [it for it in kinds if FAMILIES[it].class_name.endswith("ForConditionalGeneration")]
    return PAGE.format(
        methods=_listed(supported_methods()),
        with_adapters=_sentence(
            "With LoRA adapters", (kind for kind in kinds if FAMILIES[kind].takes_adapters)
        ),
        without_adapters=_sentence(
            "Without adapters", (kind for kind in kinds if not FAMILIES[kind].takes_adapters)
        ),
        with_images=_sentence("With images (in `internvl`, all)", filter(_takes_images, kinds)),
        hearing=audio_encoder.KIND,
        encoders=_sentence(
            f"For recordings `{KIND}`; for vectors of texts and images "
            f"{_listed(sorted(TWO_TOWERS))}; for vectors, scores and labels",
            sorted(ENCODERS),
        ),
        codes=CODES,
        joint=JOINT,
        laya=LAYA,
        julia=JULIA,
        liquid=LIQUID,
        version=".".join(transformers.__version__.split(".")[:2]),
        others=_sentence("Tried", tried_types()),
        heads=fill(
            "All other types are rejected, like models with their own code (`auto_map`) and, "
            f"without `--convert`, classes named {', '.join(f'`…{suffix}`' for suffix in HEADS)}.",
            100,
            break_on_hyphens=False,
        ),
        refused="\n".join(f"| {why} | {_listed(kinds)} |" for why, kinds in REFUSED_TYPES.items()),
        only_own=_sentence(
            "With an unknown field that transformers reads, these are rejected",
            sorted({*ONLY_OWN_TYPES, *composed}),
        ),
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
        for kind in {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *HEADLESS}
        if not {kind, f"{kind}_text"} & own and reason_refused(kind) is None
    )


def _takes_images(kind: str) -> bool:
    seeing = {TEXT_OF_KIND.get(kind, kind) for kind in supported_types() if kind != "internvl"}
    seeing.add("ministral3")  # the text of newer models of `mistral3`
    return kind in seeing or kind.removesuffix("_text") in seeing


def _left_out_rows() -> Iterable[str]:
    for kind, (models, field, value) in sorted(LEFT_OUT.items()):
        instead = "refused" if kind in ONLY_OWN_TYPES else "by transformers' class"
        setting = f"`{field}: {json.dumps(value)}`"
        yield f"| `{kind}` | {models} | {setting} | {instead} |"


def _sign_rows(signs: Iterable[tuple[str, str]]) -> Iterable[str]:
    for sign, parser in signs:
        yield f"| `{sign.replace('|', chr(92) + '|')}` | `{parser}` |"


def _sentence(title: str, names: Iterable[str]) -> str:
    return fill(f"{title}: {_listed(names)}.", 100, break_on_hyphens=False)


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

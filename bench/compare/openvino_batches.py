"""A batch file through OpenVINO GenAI's continuous batching, as in a user's script.

    python -m bench.compare.openvino_batches --model EXPORTED -i requests.jsonl -o rows.jsonl

Runs in a separate environment, which has `openvino-genai` and `optimum-intel[openvino]`; the
model is a folder that `optimum-cli export openvino --weight-format fp16` has written.
"""

from __future__ import annotations

import json
from typing import Any

from bench.compare.transformers_static import (
    DONE,
    READY,
    SAMPLING,
    parse_arguments,
    prompt_text,
    row_of,
)

CACHE_GIGABYTES = 4
MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 2048


def load(model: str, dtype: str) -> Any:
    """Return the pipeline of an exported model."""
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIGABYTES
    scheduler.max_num_seqs = MAX_NUM_SEQS
    scheduler.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
    scheduler.enable_prefix_caching = True
    precision = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    return genai.ContinuousBatchingPipeline(
        model, scheduler, "CPU", {"INFERENCE_PRECISION_HINT": precision}
    )


def generation_config(body: dict[str, Any]) -> Any:
    """Return the token limits of one request body."""
    import openvino_genai as genai

    sampling = {name: body[name] for name in SAMPLING if body.get(name)}
    config = genai.GenerationConfig()
    config.max_new_tokens = body["max_tokens"]
    config.ignore_eos = bool(body.get("ignore_eos"))
    config.do_sample = "temperature" in sampling
    for name, value in sampling.items():
        setattr(config, name, value)
    if schema := body.get("response_format", {}).get("json_schema", {}).get("schema"):
        config.structured_output_config = genai.StructuredOutputConfig(
            json_schema=json.dumps(schema)
        )
    return config


def main() -> None:
    """Run one file."""
    arguments = parse_arguments(__doc__.splitlines()[0])

    import numpy as np
    import openvino as ov
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    pipeline = load(arguments.model, arguments.dtype)
    print(READY, flush=True)
    text = arguments.input_file.read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    prompts = [
        tokenizer(prompt_text(tokenizer, line["body"]), add_special_tokens=False)["input_ids"]
        for line in lines
    ]
    results = pipeline.generate(
        [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts],
        [generation_config(line["body"]) for line in lines],
    )
    with arguments.output_file.open("w", encoding="utf-8") as sink:
        for line, prompt, result in zip(lines, prompts, results, strict=True):
            [answer] = result.m_generation_ids
            text = tokenizer.decode(answer, skip_special_tokens=True)
            sink.write(json.dumps(row_of(line, text, len(prompt), len(answer))) + "\n")
    print(DONE, flush=True)


if __name__ == "__main__":
    main()

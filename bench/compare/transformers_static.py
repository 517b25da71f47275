"""A batch file through transformers' `generate`, 64 lines at a time, as in a user's script.

    python -m bench.compare.transformers_static --model DIR -i requests.jsonl -o rows.jsonl

Each batch is padded on the left and runs until its longest line is done. It samples with the
parameters of its first line; the end token is forbidden until `max_tokens`, because the benchmark
files set `ignore_eos`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BATCH_LINES = 64
READY = "peer: model ready"
DONE = "peer: all rows done"
SAMPLING = ("temperature", "top_p", "repetition_penalty")


def prompt_text(tokenizer: Any, body: dict[str, Any]) -> str:
    """Return the model's input text for one request body."""
    if "messages" not in body:
        return str(body["prompt"])
    return str(
        tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
    )


def rows(model: Any, tokenizer: Any, lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Generate one static batch and yield a row for each of its lines."""
    texts = [prompt_text(tokenizer, line["body"]) for line in lines]
    inputs = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
    output_tokens = max(line["body"]["max_tokens"] for line in lines)
    sampling = {name: lines[0]["body"][name] for name in SAMPLING if lines[0]["body"].get(name)}
    ids = model.generate(
        **inputs.to(model.device),
        do_sample="temperature" in sampling,
        **sampling,
        min_new_tokens=output_tokens,
        max_new_tokens=output_tokens,
        pad_token_id=tokenizer.pad_token_id,
    )
    padded_tokens = inputs["input_ids"].shape[1]
    for line, mask, sequence in zip(lines, inputs["attention_mask"], ids, strict=True):
        answer = sequence[padded_tokens:][: line["body"]["max_tokens"]]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        yield row_of(line, text, int(mask.sum()), len(answer))


def row_of(
    line: dict[str, Any], text: str, prompt_tokens: int, completion_tokens: int
) -> dict[str, Any]:
    """Return the row of a line's answer."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    body = {"choices": [{"message": {"content": text}}], "usage": usage}
    response = {"status_code": 200, "body": body}
    return {"custom_id": line["custom_id"], "response": response, "error": None}


def parse_arguments(description: str) -> argparse.Namespace:
    """Parse the command line of a peer's script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True)
    parser.add_argument("-i", "--input-file", type=Path, required=True)
    parser.add_argument("-o", "--output-file", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    return parser.parse_args()


def main() -> None:
    """Run one file."""
    arguments = parse_arguments(__doc__.splitlines()[0])

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=getattr(torch, arguments.dtype)
    ).to(device)
    sys.stderr.write(READY + "\n")
    with (
        arguments.input_file.open(encoding="utf-8") as source,
        arguments.output_file.open("w", encoding="utf-8") as sink,
        torch.inference_mode(),
    ):
        requests = (json.loads(line) for line in source if line.strip())
        while batch := list(itertools.islice(requests, BATCH_LINES)):
            for row in rows(model, tokenizer, batch):
                sink.write(json.dumps(row) + "\n")
    sys.stderr.write(DONE + "\n")


if __name__ == "__main__":
    main()

"""A file of embedding lines through sentence-transformers, at its best batch size.

    python -m bench.compare.sentence_transformers_batches --model DIR -i in.jsonl -o out.jsonl

It sorts texts by length itself. The batch size is found on a sample before the mark, which does not
count; `--single` encodes one text after the other.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

BATCH_SIZES = (8, 16, 32, 64, 128)
SAMPLE = 192
READY = "peer: model ready"
DONE = "peer: all rows done"


def best_size(model: Any, texts: list[str]) -> int:
    """Return the fastest batch size for a sample of the texts."""
    sample = random.Random(0).sample(texts, min(SAMPLE, len(texts)))
    seconds = {}
    for size in BATCH_SIZES:
        started = time.perf_counter()
        model.encode(sample, batch_size=size)
        seconds[size] = time.perf_counter() - started
    return min(seconds, key=seconds.__getitem__)


def main() -> None:
    """Run one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("-i", "--input-file", type=Path, required=True)
    parser.add_argument("-o", "--output-file", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--single", action="store_true")
    arguments = parser.parse_args()

    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        arguments.model, device="cpu", model_kwargs={"dtype": arguments.dtype}
    )
    lines = arguments.input_file.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["body"]["input"] for line in lines]
    size = 1 if arguments.single else best_size(model, texts)
    sys.stderr.write(f"{READY}, batches of {size}\n")
    if arguments.single:
        vectors = [model.encode(text) for text in texts]
    else:
        vectors = list(model.encode(texts, batch_size=size))
    with arguments.output_file.open("w", encoding="utf-8") as sink:
        for vector in vectors:
            sink.write(json.dumps(vector.tolist()) + "\n")
    sys.stderr.write(DONE + "\n")


if __name__ == "__main__":
    main()

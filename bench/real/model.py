"""The model of the benchmarks on real work, as a folder that every program reads.

    python -m bench.real.model SmolLM2-135M-Instruct.Q4_1.gguf out/bench/real/smollm2

The folder is that of our own reader of GGUF: weights in bf16, config and tokenizer of transformers'
format. All programs compute with the same numbers.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from tidemill.engine.storage.gguf.unpacked import unpack_weights

_HIDDEN = shutil.ignore_patterns(".*")


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    unpacked, _ = unpack_weights(arguments.gguf)
    shutil.copytree(unpacked, arguments.folder, ignore=_HIDDEN, dirs_exist_ok=True)


if __name__ == "__main__":
    main()

"""`python -m tests.engine.kernels.cpu.runs FOLDER`: what runs compile that is not compiled before.

A line for each kernel and signature that was never met while all were compiled beforehand, in this
very process, so that it does not matter what is kept; models are made in the folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.engine.families import build
from tests.engine.model.encoders.small_encoders import save
from tidemill.cli.main import main as tidemill
from tidemill.demo import SPEECH_PATH
from tidemill.engine.config import EngineConfig
from tidemill.engine.kernels.cpu import int8
from tidemill.engine.kernels.cpu.compile_all import dtypes, jobs
from tidemill.engine.kernels.cpu.jit_cache import JitCache
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.loop.encoding import EncodingCore
from tidemill.engine.model import native
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.encoders import native as own_encoder
from tidemill.engine.model.encoders.families import architecture_of as encoder_of
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.hf.forward import ATTENTION
from tidemill.engine.model.hf.model import prepare
from tidemill.engine.model.network.kv_cache_size import KVCacheSize
from tidemill.engine.model.network.loaded_model import LoadedModel
from tidemill.engine.model.weights.checkpoint import find_checkpoint
from tidemill.engine.model.weights.quantised.quantization_config import read_quantization_config
from tidemill.engine.scheduling.encoding import EncodingRequest
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[4]
# Norms of heads; a cap on scores, a window, norms with an offset; sinks, biases and experts; one
# weight for queries, keys and values.
FAMILIES = ("Qwen3Config", "Gemma2Config", "GptOssConfig", "Phi3Config")
# Curves and biases; gates, windows and ropes.
ENCODERS = ("Bert", "ModernBert")
SAMPLINGS = (
    Sampling(temperature=0),
    Sampling(temperature=0, repetition_penalty=1.1, logit_bias={5: 2.0}, logprobs=2),
    Sampling(temperature=1, seed=1),
    Sampling(temperature=1, seed=2, top_k=5, top_p=0.9, min_p=0.01, logprobs=0),
    Sampling(temperature=1, seed=3, presence_penalty=0.5, frequency_penalty=0.5),
)
COMMON = [7] * 200  # enough blocks for decodes to meet together


def by_ours(folder: Path, dtype: torch.dtype, quantization: str | None = None) -> LoadedModel:
    """Return the model of a folder as our decoder runs it."""
    description = read_hf_config(str(folder))
    checkpoint = find_checkpoint(str(folder), read_quantization_config(description, quantization))
    return native.load(checkpoint, description, architecture_of(description), dtype, CPU)


def by_transformers(family: str, dtype: torch.dtype) -> LoadedModel:
    """Return the model of a family as transformers' layers run it."""
    network = build(family).to(dtype)
    network.config._attn_implementation = ATTENTION
    return prepare(network, EngineConfig(family), dtype, CPU)


def run(model: LoadedModel) -> None:
    """Run sequences that share a beginning, sampled in all ways, in mixed steps."""
    config = EngineConfig("tiny", max_num_seqs=8, max_num_batched_tokens=64)
    work = make_core(model, KVCacheSize(200, model.max_model_len), config)
    for number, sampling in enumerate(SAMPLINGS):
        for ids in ([*COMMON, 10 + number], [30 + number, 31]):
            work.add(SequenceRequest(ids, 6, sampling, prompt_logprobs=number % 2))
    while work.step() is not None:
        pass


def encode(folder: Path, dtype: torch.dtype) -> None:
    """Run sequences through an encoder, which is bidirectional."""
    config = json.loads((folder / "config.json").read_bytes())
    checkpoint = find_checkpoint(str(folder))
    model = own_encoder.load(checkpoint, encoder_of(str(folder), config), dtype, CPU)
    work = EncodingCore(model, 64, 8)
    for length in (1, 5, 90):
        work.add(EncodingRequest([3] * length))
    while work.step() is not None:
        pass


def record_uncompiled_kernels(found: list[str]) -> None:
    """Have all kernels record requests for code that they do not have."""
    load = JitCache.load_overload

    def noted(kept: JitCache, signature: Any, target: Any) -> Any:
        found.append(f"{kept.kernel} {signature}")
        return load(kept, signature, target)

    JitCache.load_overload = noted  # type: ignore[method-assign]


def main(folder: Path) -> int:
    """Compile everything beforehand, run, and print the kernels that were missing."""
    for job in jobs():
        job()
    found: list[str] = []
    record_uncompiled_kernels(found)
    demo = ["run", "-i", str(ROOT / "tests/demo/questions.jsonl"), "-o", str(folder / "rows.jsonl")]
    status = tidemill(demo)
    for family in FAMILIES:
        build(family).save_pretrained(folder / family)
        for dtype in dtypes():
            run(by_ours(folder / family, dtype))
            run(by_transformers(family, dtype))
    for family in FAMILIES if int8.supports(torch.bfloat16) else ():
        run(by_ours(folder / family, torch.bfloat16, "int8"))
    for encoder in ENCODERS:
        save(folder / encoder, encoder)
        for dtype in dtypes():
            encode(folder / encoder, dtype)
    recordings = ["run", "-i", str(ROOT / "tests/demo/audio.jsonl"), "--model", str(SPEECH_PATH)]
    for dtype in dtypes():
        name = str(dtype).removeprefix("torch.")
        options = ["--any-model", "--dtype", name, "-o", str(folder / f"{name}.jsonl")]
        status |= tidemill([*recordings, *options])
    sys.stdout.writelines(f"{one}\n" for one in found)
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""Greedy rows of a model of a billion weights, beside transformers' eager attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from bench.gpu.parts.task import Numbers, Place, Task
from bench.gpu.random_models import filled_from, loaded
from bench.gpu.shapes import CONFIGS, architecture
from tidemill.engine.config import EngineConfig
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.loop.cuda_graphs import Capture, Graph
from tidemill.engine.model.kv_cache_size import KVCacheSize
from tidemill.engine.model.loaded_model import LoadedModel
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest

GREEDY = Sampling(temperature=0)
# How far below the likeliest a token may be that rounding made the choice, in standard deviations
# of a place's logits: random weights leave next to nothing between the best two.
BOUND = 0.15


def tasks(place: Place) -> Iterator[Task]:
    """Yield the comparison of steps as they are run, and of steps that are no graphs."""
    yield Task("greedy rows", lambda: rows(place, None))
    yield Task("greedy rows, no graphs", lambda: rows(place, refuse))


def refuse(_compute: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
    """Capture nothing, so that all is launched plainly."""
    raise RuntimeError("no graphs were asked for")


def rows(place: Place, captures: Capture | None) -> Numbers:
    """Generate by our loop; ask transformers, token by token, what it would have said instead.

    transformers reads what ours generated, so that one near tie does not make all that follows
    another text.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    name = "tiny" if place.is_tiny else "llama-3-1b"
    count, prompt, output = (2, 9, 3) if place.is_tiny else (32, 300, 64)
    dtype = torch.float32 if place.is_tiny else torch.bfloat16
    model = architecture(name)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**CONFIGS[name])
    with torch.device(place.device):
        theirs = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager"
        ).eval()
    rng = np.random.default_rng(0)
    lengths = rng.integers(prompt // 2, prompt, count)
    prompts = [rng.integers(0, model.vocab_size, length).tolist() for length in lengths]
    weights = filled_from(model, theirs.state_dict(), dtype, place.device)
    network = loaded(model, weights, max_model_len=prompt + output)
    ours = generated(network, prompts, output, captures)
    same, gaps = 0, []
    with torch.inference_mode():
        for before, after in zip(prompts, ours, strict=True):
            ids = torch.tensor([before + after], device=place.device)
            logits = theirs(ids).logits[0, len(before) - 1 : -1].double()  # [output, V]
            said = logits.gather(1, ids[0, len(before) :, None]).squeeze(1)
            gap = (logits.amax(1) - said) / logits.std(1)
            gaps.append(float(gap.max()))
            same += int(bool((gap == 0).all()))
    return {
        "rows": count,
        "rows_alike": same,
        "largest_gap": max(gaps),
        "bound": BOUND,
        "holds": max(gaps) <= BOUND,
    }


def generated(
    model: LoadedModel, prompts: list[list[int]], output: int, captures: Capture | None
) -> list[list[int]]:
    """Return what our loop says to each prompt."""
    config = EngineConfig("random", max_num_seqs=64, max_num_batched_tokens=1024)
    total = sum(map(len, prompts)) + len(prompts) * (output + 64)
    room = KVCacheSize(total // model.backend.page_size + 1, model.max_model_len)
    core = make_core(model, room, config, captures)
    sequences = [core.add(SequenceRequest(prompt, output, GREEDY)) for prompt in prompts]
    while core.step() is not None:
        pass
    return [sequence.result().token_ids for sequence in sequences]

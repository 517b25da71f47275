"""Cost of LoRA adapters: tokens a second with none, one and four, beside a model without.

    python -m bench.kernels.adapters --model out/bench/46m [--rank 16] [--sequences 64] [--rounds 5]

Each case runs the same prompts to the same lengths, in turn, round after round, on pages of its own
each time, so that all rounds of a case have the same steps. A case takes the sum of what each of
its steps took at the quickest: what else a machine does falls on some rounds, hardly on all.
Adapters are random, of every product of a layer.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from safetensors.torch import save_file

from tidemill.engine.config import EngineConfig, LoraModule
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.loop.generation import GenerationCore
from tidemill.engine.model.adapters.loading import sites_of
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.network.kv_cache_size import compute_kv_cache_size
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest

NUM_ADAPTERS = 4
# Which adapters a case's sequences ask for, in turn.
CASES = {
    "4 loaded, none asked for": (0,),
    "1, by every row": (1,),
    "4, by a quarter of the rows each": (1, 2, 3, 4),
    "4 and the model, by a fifth each": (0, 1, 2, 3, 4),
}


@dataclass(frozen=True, slots=True)
class Load:
    """The load: number of prompts, tokens of each, and tokens generated for each."""

    num_sequences: int
    num_prompt: int
    num_output: int
    vocab_size: int

    def run(self, core: GenerationCore, adapters: tuple[int, ...], salt: str) -> list[float]:
        """Run it and return the seconds of each step."""
        rng = np.random.default_rng(0)
        for number in range(self.num_sequences):
            core.add(
                SequenceRequest(
                    rng.integers(0, self.vocab_size, self.num_prompt).tolist(),
                    self.num_output,
                    Sampling(temperature=0),
                    cache_salt=salt,
                    adapter=adapters[number % len(adapters)],
                )
            )
        times: list[float] = []
        while True:
            started = time.perf_counter()
            if core.step() is None:
                return times
            times.append(time.perf_counter() - started)


def make_adapter(model: Path, folder: Path, rank: int, seed: int) -> LoraModule:
    """Write a random adapter of every product of a model's layers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    sites = sites_of(architecture_of(read_hf_config(str(model))))
    for name, site in sites.items():
        for half, shape in (("A", (rank, site.width)), ("B", (site.height, rank))):
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = 0.02 * torch.randn(
                shape, generator=generator
            )
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in sites})
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return LoraModule(folder.name, str(folder))


def loaded(config: EngineConfig) -> GenerationCore:
    """Load a model and give it its steps."""
    model = load_model(config)
    return make_core(model, compute_kv_cache_size(model, config), config)


def measure(model: Path, rank: int, load: Load, rounds: int, dtype: str) -> dict[str, float]:
    """Return the seconds of each case; those of the plain model come first."""
    with TemporaryDirectory() as folder:
        adapters = tuple(
            make_adapter(model, Path(folder) / f"adapter-{number}", rank, number)
            for number in range(NUM_ADAPTERS)
        )
        settings = {"dtype": dtype, "max_model_len": 512, "kv_cache_memory": 2**30}
        plain = loaded(EngineConfig(str(model), **settings))  # type: ignore[arg-type]
        adapted = loaded(EngineConfig(str(model), lora_modules=adapters, **settings))  # type: ignore[arg-type]
        works = {"none": (plain, (0,))} | {name: (adapted, asked) for name, asked in CASES.items()}
        times: dict[str, list[list[float]]] = {name: [] for name in works}
        for number in range(rounds):
            for name, (core, asked) in works.items():
                times[name].append(load.run(core, asked, f"{name} {number}"))
    return {name: sum(map(min, zip(*own, strict=True))) for name, own in times.items()}


def main() -> None:
    """Measure one model and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=165)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    vocab_size = architecture_of(read_hf_config(str(given.model))).vocab_size
    load = Load(given.sequences, given.prompt, given.output, vocab_size)
    seconds = measure(given.model, given.rank, load, given.rounds, given.dtype)
    print(
        f"rank {given.rank}, {load.num_sequences} × ({load.num_prompt} in, {load.num_output} out)"
    )
    print("| adapters | tokens/s | share |\n|---|---:|---:|")
    for name, own in seconds.items():
        rate = load.num_sequences * load.num_output / own
        print(f"| {name} | {rate:,.0f} | {seconds['none'] / own:.3f} |")


if __name__ == "__main__":
    main()

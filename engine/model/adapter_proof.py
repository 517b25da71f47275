"""The proof that an adapter computes here what its model does with the adapter merged into it.

As the model's own proof: in fp32, beside rows of the model itself in the same steps, and roughly in
the dtype that is served. Of models that do not fit in fp32 the first layers are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from engine.errors import ModelRefused
from engine.model import own
from engine.model.adapters.description import CONFIG
from engine.model.adapters.loading import TENSORS, Adapter
from engine.model.architecture import Architecture
from engine.model.checkpoint import Checkpoint
from engine.model.description import Description
from engine.model.network import LoadedModel
from engine.model.own import Leads, Proof
from engine.model.proof import answers, distance_of
from engine.model.proved import proof_fact, prove_once
from engine.model.sanity import refuse_noise
from engine.remembered import Fact


def check_adapters(
    checkpoint: Checkpoint,
    description: Description,
    architecture: Architecture,
    loaded: LoadedModel,
    adapters: Sequence[Adapter],
    *,
    leader: Leads | None = None,
) -> None:
    """Refuse an adapter of a loaded model that computes something else, or no numbers."""
    proofs = _Proofs(checkpoint, description, architecture, loaded, adapters, leader)
    _, tokens = own.compared(architecture, loaded.device)
    for index, adapter in enumerate(adapters):
        refuse_noise(_called(adapter), answers(loaded, tokens, adapter=index + 1)[0])
    for index, adapter in enumerate(adapters):
        ranks = () if leader is None else (f"{leader.size} ranks",)
        proof = prove_once(
            _fact(checkpoint, description, loaded, adapter, *ranks), partial(proofs.of, index)
        )
        if not proof.holds:
            raise ModelRefused(
                f"{_called(adapter)}: it gives other logits here than merged into its model "
                f"(relative distance {proof.distance:.2g})."
            )


def _called(adapter: Adapter) -> str:
    return f"adapter {adapter.name} ({adapter.folder})"


@dataclass(frozen=True)
class _Proofs:
    """The proofs of all adapters, made at once, as each network in fp32 takes a while to load."""

    checkpoint: Checkpoint
    description: Description
    architecture: Architecture
    loaded: LoadedModel
    adapters: Sequence[Adapter]
    leader: Leads | None

    def of(self, index: int) -> Proof:
        """Return the proof of one."""
        return self.all[index]

    @cached_property
    def all(self) -> list[Proof]:
        """Return the proof of each."""
        with torch.inference_mode():
            return self._made()

    def _made(self) -> list[Proof]:
        from engine.model import fallback

        loaded, device = self.loaded, self.loaded.device
        num_layers, tokens = own.compared(self.architecture, device)
        exact = loaded
        if num_layers is not None or loaded.dtype != torch.float32:
            exact = own.load(
                self.checkpoint,
                self.description,
                self.architecture,
                torch.float32,
                device,
                num_layers=num_layers,
                adapters=self.adapters,
                leader=self.leader,
            )
        got = [answers(exact, tokens, adapter=i + 1) for i in range(len(self.adapters))]
        del exact
        name = self.checkpoint.name
        network = fallback.exact(self.checkpoint, self.description, device, num_layers)
        alone = fallback.run_eagerly(name, network, tokens, device)
        proofs = []
        for index, adapter in enumerate(self.adapters):
            with _merged(network, adapter):
                through = fallback.run_eagerly(name, network, tokens, device)
            expected = torch.stack([through, alone])  # [2, t, V]
            proofs.append(self._judged(index, got[index], expected, num_layers, tokens))
        return proofs

    def _judged(
        self, index: int, got: Tensor, expected: Tensor, num_layers: int | None, tokens: Tensor
    ) -> Proof:
        apart = own.distances(got, expected)
        blocks = self.architecture.blocks[:num_layers]
        holds = own.holds_for(apart, has_experts=any(block.experts for block in blocks))
        if not holds or num_layers is not None or self.loaded.dtype == torch.float32:
            return Proof(holds, float(apart.max()), num_layers)
        rounded = distance_of(answers(self.loaded, tokens, adapter=index + 1), expected)
        return Proof(rounded <= own.TOLERANCE_OF_DTYPE, rounded, None)


@contextmanager
def _merged(network: nn.Module, adapter: Adapter) -> Iterator[None]:
    """While entered, the weights of a network in fp32 have an adapter's added to them."""
    kept: list[tuple[Tensor, Tensor]] = []
    modules = dict(network.named_modules())
    for name, module in adapter.modules.items():
        if name in modules:  # else in a layer that is left out
            weight = modules[name].get_parameter("weight").data
            kept.append((weight, weight.clone()))
            weight += module.delta().to(weight.device)
    try:
        yield
    finally:
        for weight, before in kept:
            weight.copy_(before)


def _fact(
    checkpoint: Checkpoint,
    description: Description,
    loaded: LoadedModel,
    adapter: Adapter,
    *others: str,
) -> Fact:
    """Return the fact of how an adapter's proof goes, which follows from `others`, too."""
    status = (adapter.folder / TENSORS).stat()
    return proof_fact(
        checkpoint,
        description.whole,
        loaded.dtype,
        loaded.device,
        f"adapter {status.st_size} {status.st_mtime_ns}",
        (adapter.folder / CONFIG).read_text(encoding="utf-8", errors="replace"),
        *others,
    )

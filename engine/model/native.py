"""Native models: loading, and the parity check against transformers' classes.

The check compares functions: both networks compute in fp32 from the same stored weights, so that
only the order of sums differs. They run one after the other, and each layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.backends import choose_backend, has_quantised_linear, reference_kernels
from ..kernels.communicator import SINGLE_RANK, Communicator
from ..scheduling.images import PromptImage
from .adapters.loading import Adapter
from .config.architecture import Architecture
from .config.hf_config import HFConfig, UnsupportedConfig
from .families.registry import FAMILIES
from .network.decoder import Decoder
from .network.loaded_model import LoadedModel, VisionEncoder
from .parity.layerwise import LayerReader, layerwise_logits
from .parity.logits import (
    chunked_logits,
    is_rounding,
    logits_or_none,
    relative_distance,
)
from .parity.parity_inputs import ParityInput, parity_inputs
from .tensor_parallel import shard_architecture
from .vision.preprocessor_config import VisionConfig
from .weights.checkpoint import Checkpoint, some
from .weights.weights import read_weights

# Relative L2 distance of a token's logits in fp32: the order of sums gives about 1e-6, and a norm's
# weight that is rounded once too often 1e-3.
TOLERANCE = 1e-4
# Distance of the fp32 logits of a model that amplifies rounding from those in fp64, in distances of
# eager's. 13 correct networks with random weights had up to 4; wrong ones had 200 and more.
AMPLIFICATION = 6.0
# Distance of all logits in the served dtype: a larger one is caused by a kernel, not by rounding.
DTYPE_TOLERANCE = 0.3
# If two experts, or tokens to select, have the same score up to rounding, either may be chosen.
TIE_TOLERANCE = 0.1
QUANTILE_WITHOUT_TIES = 0.9
# Activations that are rounded to eight bits make many near ties: half of the tokens count.
QUANTILE_OF_EIGHT_BITS = 0.5


@dataclass(frozen=True, slots=True)
class ParityResult:
    """Result of a parity check: whether it passed, and the largest distance of logits.

    `num_layers` is None if the whole model was compared, else the number of its first layers.
    """

    holds: bool
    distance: float
    num_layers: int | None


class LeaderRank(Protocol):
    """The first of the ranks that share a model."""

    size: int

    def loaded(
        self,
        load: Callable[[Communicator], LoadedModel],
        dtype: torch.dtype,
        num_layers: int | None,
        *,
        has_adapters: bool,
    ) -> LoadedModel:
        """Have all ranks load their shares, this one's by `load`, and return the shared model."""


def load(
    checkpoint: Checkpoint,
    hf_config: HFConfig,
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    *,
    vision: VisionConfig | None = None,
    num_layers: int | None = None,
    adapters: Sequence[Adapter] = (),
    leader: LeaderRank | None = None,
) -> LoadedModel:
    """Return the model, or its first layers, with its adapters; `vision` are its image settings.

    A `leader` shares it with other ranks.
    """
    parts = (checkpoint, hf_config, architecture, dtype, device)
    shard = partial(load_shard, *parts, vision=vision, num_layers=num_layers, adapters=adapters)
    if leader is None:
        return shard(communicator=SINGLE_RANK)
    return leader.loaded(
        lambda communicator: shard(communicator=communicator),
        dtype,
        num_layers,
        has_adapters=bool(adapters),
    )


def load_shard(
    checkpoint: Checkpoint,
    hf_config: HFConfig,
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    *,
    vision: VisionConfig | None = None,
    num_layers: int | None = None,
    adapters: Sequence[Adapter] = (),
    communicator: Communicator,
) -> LoadedModel:
    """Return a rank's share of the model, or of its first layers, with its adapters.

    `vision` are its image settings.
    """
    zeros: list[str] = []
    weights = read_weights(
        checkpoint,
        architecture,
        dtype,
        device,
        is_multimodal=hf_config.is_multimodal,
        num_layers=num_layers,
        shard=communicator.shard,
        zeros=zeros,
    )
    first = replace(architecture, blocks=architecture.blocks[:num_layers])
    architecture = shard_architecture(first, communicator.shard)
    vision_encoder = None
    if vision is not None:
        from .vision.tower import load_tower

        vision_encoder = VisionEncoder(
            vision.image_spec, load_tower(checkpoint, hf_config, vision, dtype, device)
        )
    shapes = architecture.attention_shapes
    return LoadedModel(
        network=Decoder(
            architecture,
            weights,
            adapters=[one.placed(first, dtype, device, communicator.shard) for one in adapters],
            communicator=communicator,
        ),
        shapes=shapes,
        recurrent_shapes=architecture.recurrent_shapes,
        backend=choose_backend(shapes, dtype, device),
        dtype=dtype,
        device=device,
        vocab_size=architecture.vocab_size,
        max_model_len=architecture.max_positions,
        original_positions=architecture.original_positions,
        hidden_size=architecture.hidden_size,
        max_intermediate_size=architecture.max_intermediate_size,
        eos_token_ids=architecture.eos_token_ids,
        vision_encoder=vision_encoder,
        notes=_notes_of(zeros),
    )


def _notes_of(zeros: list[str]) -> tuple[str, ...]:
    """Return a note about matrices that contain only 0, such as those of layers just added."""
    if not zeros:
        return ()
    return (
        f"all numbers in {some(sorted(zeros))} are 0: copy the files again unless it is intended",
    )


@dataclass(frozen=True, slots=True)
class EagerLogits:
    """Logits `[t, V]` of transformers' class in fp32, and once more `rounded` to the served dtype.

    For quantised layers, `rounded` are the logits `[2, t, V]` of a reference that emulates them and
    may quantise activations, too. `windows` are those of its layers by their masks, where they are
    known.
    """

    logits: Tensor
    windows: Sequence[int | None] = ()
    rounded: Tensor | None = None


def has_quantised_activations(checkpoint: Checkpoint, loaded: LoadedModel) -> bool:
    """Return whether a model's activations may be quantised, too, which eager does not do."""
    how = checkpoint.quantization
    return how is not None and has_quantised_linear(loaded.dtype, loaded.device, how.product)


def inputs_of(
    hf_config: HFConfig,
    architecture: Architecture,
    device: torch.device,
    vision: VisionConfig | None,
    leader: LeaderRank | None,
) -> list[ParityInput]:
    """Return the inputs of a parity check; the first determines the layers that it covers."""
    is_layerwise = _is_text(hf_config, vision) and leader is None
    return parity_inputs(architecture, device, is_layerwise=is_layerwise)


def _is_text(hf_config: HFConfig, vision: VisionConfig | None) -> bool:
    """Return whether the model is compared with a text-only class of transformers."""
    return vision is None and FAMILIES[hf_config.model_type].has_text_class


@torch.inference_mode()
def check_parity(
    checkpoint: Checkpoint,
    hf_config: HFConfig,
    architecture: Architecture,
    loaded: LoadedModel,
    vision: VisionConfig | None = None,
    *,
    leader: LeaderRank | None = None,
) -> ParityResult:
    """Compare the logits of our decoder with those of transformers' class and its eager attention.

    The fp32 comparison, if need be with fp64, checks the function, the one in the `loaded` dtype
    its kernels. A model that would take minutes is compared by its first layers, with at least one
    of each kind. A multimodal model has an image among its tokens. It, and a model that ranks
    share, must fit in fp32, or only its first layers are compared. Text runs past long windows if
    the time for that is acceptable.
    Raises `ModelRefused` if transformers cannot run it.
    """
    first, *longer = inputs_of(hf_config, architecture, loaded.device, vision, leader)
    compare = partial(_compare, checkpoint, hf_config, architecture, loaded, leader=leader)
    results = [compare(parity_input=first, vision=vision)]
    results += [compare(parity_input=one) for one in longer if results[0].holds]
    furthest = max(results, key=lambda one: (not one.holds, one.distance))
    return replace(furthest, num_layers=first.num_layers)


def _compare(
    checkpoint: Checkpoint,
    hf_config: HFConfig,
    architecture: Architecture,
    loaded: LoadedModel,
    *,
    parity_input: ParityInput,
    vision: VisionConfig | None = None,
    leader: LeaderRank | None = None,
) -> ParityResult:
    """Compare the logits of one input."""
    from .vision import eager

    device, dtype = loaded.device, loaded.dtype
    num_layers, token_ids = parity_input
    prompt_images: tuple[PromptImage, ...] = ()
    if vision is not None:
        token_ids, prompt_image = eager.with_image(token_ids, vision.image_spec)
        prompt_images = (prompt_image,)

    parts = (checkpoint, hf_config, architecture)
    is_emulated = has_quantised_activations(checkpoint, loaded)
    rounded_to = None if is_emulated or dtype == torch.float32 else dtype
    reader = None
    if _is_text(hf_config, vision):
        reader = LayerReader.open(*parts, device, num_layers=num_layers, is_cut=leader is None)

    def logits_in(served: torch.dtype) -> Tensor:
        model = loaded if num_layers is None and served == dtype else None
        if reader is not None and leader is None:
            return _text_logits(reader, loaded, served, token_ids, is_loaded=model is not None)
        if model is None:
            first = partial(load, vision=vision, num_layers=num_layers, leader=leader)
            model = first(*parts, served, device)
        return chunked_logits(model, token_ids, prompt_images)

    got = logits_in(torch.float32)
    if reader is not None:
        expected = _eager_text_logits(reader, hf_config, token_ids, rounded_to)
    else:
        logits, rounded = eager.eager_logits(
            checkpoint,
            hf_config,
            token_ids,
            prompt_images,
            device,
            num_layers=num_layers,
            rounded_to=rounded_to,
        )
        expected = EagerLogits(logits, rounded=rounded)
    apart = token_distances(got, expected.logits)
    blocks = architecture.blocks[:num_layers]
    has_experts = any(block.experts or block.attention.num_selected for block in blocks)
    holds = is_within_tolerance(apart, has_experts=has_experts) or (
        reader is not None
        and not has_experts
        and _holds_in_fp64(reader, hf_config, token_ids, got, expected)
    )
    if holds:
        _check_windows(architecture, expected.windows)
    if not holds or dtype == torch.float32:
        return ParityResult(holds, float(apart.max()), num_layers)
    served = logits_in(dtype)
    if is_emulated:
        whole = reader or LayerReader.open(*parts, device, num_layers=num_layers, is_cut=False)
        with reference_kernels():
            emulated = layerwise_logits(whole, loaded, dtype, token_ids, prompt_images)
        expected = replace(expected, rounded=emulated)
    holds = is_rounded(served, expected, has_experts=has_experts, is_emulated=is_emulated)
    return ParityResult(holds, relative_distance(served, expected.logits), num_layers)


def _text_logits(
    reader: LayerReader,
    loaded: LoadedModel,
    dtype: torch.dtype,
    token_ids: Tensor,
    *,
    is_loaded: bool,
) -> Tensor:
    """Return the logits of tokens of a cut vocabulary: by the `loaded` model, or layer by layer."""
    if not is_loaded:
        return layerwise_logits(reader, loaded, dtype, token_ids)
    logits = chunked_logits(loaded, reader.vocabulary[token_ids])
    return logits[..., reader.vocabulary.to(logits.device)]


def _eager_text_logits(
    reader: LayerReader, hf_config: HFConfig, token_ids: Tensor, rounded_to: torch.dtype | None
) -> EagerLogits:
    """Run transformers' class on `token_ids [t]` in fp32 and rounded to a dtype, layer by layer."""
    from .config.masks import windows_by_masks
    from .hf import model as transformers_model
    from .hf.layers import load_layerwise

    name, device = reader.checkpoint.name, reader.device
    module = load_layerwise(reader, hf_config, torch.float32)
    windows = tuple(windows_by_masks(module, device).values())
    logits = transformers_model.eager_logits(name, module, token_ids, device)
    del module
    if rounded_to is None:
        return EagerLogits(logits, windows)
    return EagerLogits(logits, windows, _eager_in(rounded_to, reader, hf_config, token_ids))


def _holds_in_fp64(
    reader: LayerReader,
    hf_config: HFConfig,
    token_ids: Tensor,
    got: Tensor,
    expected: EagerLogits,
) -> bool:
    """Return whether our logits are about as near to transformers' in fp64 as eager's in fp32."""
    exact = _eager_in(torch.float64, reader, hf_config, token_ids)
    return exact is not None and is_exact_as_eager(got, expected.logits, exact)


def _eager_in(
    dtype: torch.dtype, reader: LayerReader, hf_config: HFConfig, token_ids: Tensor
) -> Tensor | None:
    """Run transformers' class with parameters in a dtype; None if it cannot run in it."""
    from .hf import model as transformers_model
    from .hf.layers import load_layerwise

    module = load_layerwise(reader, hf_config, dtype)
    name, device = reader.checkpoint.name, reader.device
    return logits_or_none(partial(transformers_model.eager_logits, name, module, token_ids, device))


def is_rounded(
    got: Tensor, expected: EagerLogits, *, has_experts: bool, is_emulated: bool = False
) -> bool:
    """Return whether logits `[2, t, V]` have only rounding errors, not much above those of eager.

    Where experts tie, rounding sends tokens to others: those do not count. It sends more of them if
    activations of eight bits are emulated.
    """
    if relative_distance(got, expected.logits) > DTYPE_TOLERANCE:
        return False
    if expected.rounded is None:
        return True
    with_ties = QUANTILE_OF_EIGHT_BITS if is_emulated else QUANTILE_WITHOUT_TIES
    quantile = with_ties if has_experts else 1.0
    ours, eagers = (
        float(token_distances(logits.float(), expected.logits).quantile(quantile))
        for logits in (got, expected.rounded)
    )
    return is_rounding(ours, eagers, got.dtype)


def _check_windows(architecture: Architecture, windows: Sequence[int | None]) -> None:
    """Refuse to understand a model whose first layers have other windows by transformers' masks.

    A window longer than the tokens of a check shows nowhere else. None means unknown.
    """
    most = architecture.max_positions
    for shape, window in zip(architecture.attention_shapes, windows, strict=False):
        ours = shape.window
        if window is not None and min(ours or most, most) != min(window or most, most):
            raise UnsupportedConfig(
                f"a layer has window {window} by transformers' masks, not {ours}"
            )


def is_within_tolerance(apart: Tensor, *, has_experts: bool) -> bool:
    """Return whether distances `[2·t]` are those of one function computed twice."""
    most = apart.quantile(QUANTILE_WITHOUT_TIES) if has_experts else apart.max()
    return bool(most <= TOLERANCE and apart.max() <= TIE_TOLERANCE)


def is_exact_as_eager(got: Tensor, eager: Tensor, exact: Tensor) -> bool:
    """Return whether logits in fp32 are about as near to those in fp64 as eager's in fp32 are.

    Some models, such as Qwen2.5, amplify the rounding of a few tokens. Which tokens these are
    depends on the order of sums, so the medians and the largest distances are compared; both have
    an upper limit.
    """
    apart, eagers = (token_distances(logits.double(), exact) for logits in (got, eager))

    def is_accepted(ours: Tensor, theirs: Tensor, most: float) -> bool:
        return float(ours) <= min(max(TOLERANCE, AMPLIFICATION * float(theirs)), most)

    return is_accepted(apart.median(), eagers.median(), 10 * TOLERANCE) and is_accepted(
        apart.max(), eagers.max(), 100 * TOLERANCE
    )


def token_distances(got: Tensor, expected: Tensor) -> Tensor:
    """Return the relative L2 distances of tokens' logits: `[2, t, V]`, `[…, t, V]` → `[2·t]`."""
    difference = torch.linalg.vector_norm(got - expected, dim=-1)  # [2, t]
    scale = torch.linalg.vector_norm(expected, dim=-1).clamp(min=1e-6)  # […, t]
    relative: Tensor = difference / scale
    return relative.flatten()

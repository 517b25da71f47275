"""Image encoder: the native encoder over the patches of images, packed one after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ...kernels.attention import AttentionBackend, AttentionBackendType, AttentionShape
from ...kernels.backends import choose_linear, torch_on_all_threads
from ...kernels.elementwise import activate
from ...kernels.pooling import Segments
from ...kernels.step import Step
from ...scheduling.images import ImageForm
from ..weights.weight_parts import Weight, whole
from .architecture import EncoderArchitecture
from .encoder import EncoderBlocks
from .pooler import Pooler, TokenSelection
from .shared_pages import SharedPages
from .two_towers import ImagePatches
from .weight_map import layer_weights, norm_weights

_PRE_NORM = "pre_layrnorm"  # as it is spelled in checkpoints


class ImageEncoder(EncoderBlocks):
    """The network of an image tower, over its weights by role, taken out of the dict.

    `shades [3, 256]` are the levels of each channel after normalisation.
    """

    def __init__(
        self,
        model: EncoderArchitecture,
        patches: ImagePatches,
        weights: dict[str, Tensor],
        shades: NDArray[np.float32],
    ) -> None:
        kernel = weights.pop("patch_embedding").flatten(1)  # [H, 3 · P · P]
        dtype, device = kernel.dtype, kernel.device
        super().__init__(model, weights, dtype, device)
        factory = choose_linear(self._ops, device)
        self._embed = factory.make(kernel, weights.pop("patch_embedding_bias", None))
        self._patches, self._dtype = patches, dtype
        self._places = weights.pop("position_embeddings")  # [tokens, H]
        self._class = weights.pop("class_embedding", None)
        self._pre_norm = self._norm(weights, _PRE_NORM) if patches.has_class_token else None
        self._first_norm = self._norm(weights, "embedding_norm")
        self._shades = torch.from_numpy(shades).to(device)

    def encode(self, pixels: Tensor, step: Step, attention: AttentionBackend) -> Tensor:
        """Run images `[B, S, S, 3]` of levels → `[N, H]` of the step's rows.

        Each image is a sequence of the step, of a token for each patch, row by row.
        """
        with torch_on_all_threads(pixels.device):
            x = self._embedded(pixels)  # [B · tokens, H]
        if (pre_norm := self._pre_norm) is not None:
            x = self._ops.layer_norm(x, pre_norm.weight, pre_norm.bias, self._eps)
        norm = self._first_norm
        first = self._ops.layer_norm(x, norm.weight, norm.bias, self._eps)
        return self.run(first, x, step, attention)

    def normalised(self, pixels: Tensor) -> Tensor:
        """Return images `[B, S, S, 3]` of levels as the tower was trained to read them, in fp32.

        They are `[B, 3, S, S]`, as of transformers' image processor.
        """
        levels = pixels.int()
        channels = [shades[levels[..., channel]] for channel, shades in enumerate(self._shades)]
        return torch.stack(channels, dim=1)

    def _embedded(self, pixels: Tensor) -> Tensor:
        """Return the embeddings of all patches, after the class token of their image."""
        patch, count = self._patches.patch, self._patches.side // self._patches.patch
        used = pixels[:, : count * patch, : count * patch]
        grid = self.normalised(used).to(self._dtype)
        grid = grid.view(len(pixels), 3, count, patch, count, patch).permute(0, 2, 4, 1, 3, 5)
        x = self._embed(grid.reshape(len(pixels) * count**2, -1))
        x = x.view(len(pixels), count**2, -1)
        if self._class is not None:
            x = torch.cat([self._class.expand(len(x), 1, -1), x], dim=1)
        return (x + self._places).flatten(0, 1)


class AttentionPooler:
    """SigLIP's pooling: attention of one learned query to all patches, and an MLP.

    The query's product with the keys' weights is computed once, so that patches need no keys and
    values.
    """

    wanted: ClassVar[TokenSelection] = "all"

    def __init__(self, model: EncoderArchitecture, weights: dict[str, Tensor]) -> None:
        own = {role.removeprefix("head."): weights.pop(role).float() for role in _head_roles()}
        heads, hidden = model.blocks[0].attention.num_query_heads, model.hidden_size
        query_weight, key_weight, value_weight = own["in_proj"].chunk(3)
        query_bias, _, value_bias = own["in_proj_bias"].chunk(3)  # that of keys changes nothing
        query = query_weight @ own["probe"].flatten() + query_bias
        query = query * (hidden // heads) ** -0.5
        keys = query[:, None] * key_weight  # [H, H], by heads
        self._keys = keys.view(heads, -1, hidden).sum(1).T.contiguous()  # [H, heads]
        self._values = value_weight.view(heads, -1, hidden)  # [heads, D, H]
        self._value_bias = value_bias
        self._activation = model.activation
        self._own, self._eps = own, model.layer_norm_eps

    def __call__(self, hidden: Tensor, segments: Segments) -> Tensor:
        """Return the vectors, fp32: `hidden [B · patches, H]` → `[B, H]`."""
        own = self._own
        with torch_on_all_threads(hidden.device):
            x = hidden.float().view(len(segments.skipped), -1, hidden.shape[1])
            shares = (x @ self._keys).softmax(dim=1)  # [B, patches, heads]
            mixed = shares.transpose(1, 2) @ x  # [B, heads, H]
            values = torch.einsum("bhi,hdi->bhd", mixed, self._values).flatten(1)
            x = functional.linear(values + self._value_bias, own["out_proj"], own["out_proj_bias"])
            normed = functional.layer_norm(
                x, x.shape[1:], own["layernorm"], own["layernorm_bias"], self._eps
            )
            inner = functional.linear(normed, own["fc1"], own["fc1_bias"])
            assert isinstance(self._activation, str)
            inner = activate(inner, self._activation)
            return x + functional.linear(inner, own["fc2"], own["fc2_bias"])


@dataclass(frozen=True, slots=True)
class ImageTower:
    """An image tower on its device: `form` is that of its images, `num_tokens` their length."""

    network: ImageEncoder
    pooler: Pooler | AttentionPooler
    shapes: tuple[AttentionShape, ...]
    backend: AttentionBackendType
    dtype: torch.dtype
    device: torch.device
    form: ImageForm
    num_tokens: int

    num_types: ClassVar[int] = 0
    recurrent_shapes: ClassVar[tuple[()]] = ()

    def attention(self, num_pages: int) -> AttentionBackend:
        """Allocate `num_pages` pages, which all layers use in turn."""
        backend = self.backend(self.shapes[:1], num_pages, self.dtype, self.device)
        return SharedPages(backend, [0] * len(self.shapes))


def image_weights(model: EncoderArchitecture, patches: ImagePatches) -> Iterator[Weight]:
    """Yield the weights of an image tower, and of SigLIP's pooling."""
    base, hidden = f"{model.names.base_model_prefix}.", model.hidden_size
    embeddings, patch = f"{base}embeddings.", patches.patch
    kernel = f"{embeddings}patch_embedding."
    yield whole("patch_embedding", f"{kernel}weight", hidden, 3, patch, patch)
    places = f"{base}{model.names.position_embeddings}.weight"
    yield whole("position_embeddings", places, patches.num_tokens, hidden)
    if patches.has_class_token:
        yield whole("class_embedding", f"{embeddings}class_embedding", hidden)
        yield from norm_weights(model, _PRE_NORM, f"{base}{_PRE_NORM}")
    else:
        yield whole("patch_embedding_bias", f"{kernel}bias", hidden)
        yield from _pooling_weights(model, f"{base}head.")
    yield from norm_weights(model, "embedding_norm", base + model.names.embedding_norm)
    yield from layer_weights(model)


def _pooling_weights(model: EncoderArchitecture, base: str) -> Iterator[Weight]:
    hidden, inner = model.hidden_size, model.intermediate_size
    yield whole("head.probe", f"{base}probe", 1, 1, hidden)
    yield whole("head.in_proj", f"{base}attention.in_proj_weight", 3 * hidden, hidden)
    yield whole("head.in_proj_bias", f"{base}attention.in_proj_bias", 3 * hidden)
    yield from norm_weights(model, "head.layernorm", f"{base}layernorm")
    shapes = {
        "out_proj": ("attention.out_proj", hidden, hidden),
        "fc1": ("mlp.fc1", inner, hidden),
        "fc2": ("mlp.fc2", hidden, inner),
    }
    for role, (name, outputs, inputs) in shapes.items():
        yield whole(f"head.{role}", f"{base}{name}.weight", outputs, inputs)
        yield whole(f"head.{role}_bias", f"{base}{name}.bias", outputs)


def _head_roles() -> Iterator[str]:
    yield "head.probe"
    for name in ("in_proj", "out_proj", "layernorm", "fc1", "fc2"):
        yield f"head.{name}"
        yield f"head.{name}_bias"

"""Dispatch: chooses a device's kernels for attention, linear layers, norms, experts, sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from tidemill.protocol.contract import EngineError

from . import elementwise, experts, pooling, sampling
from .attention import AttentionBackendType, AttentionShape
from .elementwise import Activation, ElementwiseOps, Gate
from .experts import ApplyExperts, ExpertOps, ExpertWeights
from .latent import LatentAttention
from .linear import Linear, LinearFactory, prepack
from .pooling import PoolingOps
from .quantised import Matrix, Quantised, rounded_to_fp8, rounded_to_int8
from .recurrence import RecurrentBackendType, RecurrentShape, ReferenceRecurrence
from .reference import ReferenceAttention
from .sampling import SamplingOps

# Device types with Triton kernels; tests that interpret or only compile them add others.
TRITON_TYPES = {"cuda"}
# Compute capability of Ampere, the oldest that they are compiled for.
MIN_CAPABILITY = (8, 0)
# Rows that an expert has on average where wide tiles of quantised experts are compared with torch.
ROWS_AN_EXPERT = 100
# Whether references are chosen, see `reference_kernels`; and fixed tiles, see `fixed_tiles`.
_IS_REFERENCE = ContextVar("is_reference", default=False)
_HAS_FIXED_TILES = ContextVar("has_fixed_tiles", default=False)


@contextmanager
def reference_kernels() -> Iterator[None]:
    """Choose only reference kernels within this context: emulate those of quantised layers.

    Weights are then dequantised, and activations are rounded as the device's kernels round them.
    """
    token = _IS_REFERENCE.set(True)
    try:
        yield
    finally:
        _IS_REFERENCE.reset(token)


@contextmanager
def fixed_tiles() -> Iterator[None]:
    """Make linear layers whose rows do not depend on other rows within this context, on a CPU."""
    token = _HAS_FIXED_TILES.set(True)
    try:
        yield
    finally:
        _HAS_FIXED_TILES.reset(token)


def is_batch_invariant(
    attention: AttentionBackendType, recurrence: RecurrentBackendType | None
) -> bool:
    """Return whether backends sum a token's context in the same order whatever else runs."""
    from .cpu.attention import CpuAttention
    from .cpu.recurrence import CpuRecurrence

    return attention is CpuAttention and recurrence in {None, CpuRecurrence}


def round_activations(x: Tensor, weight: Matrix) -> Tensor:
    """Return `x [T, I]` as the device's product with a weight reads it: quantised and dequantised.

    Some layers of such a weight read x unchanged, if a kernel does not support their sizes.
    """
    if isinstance(weight, Quantised) and weight.numbers.dtype == torch.int8:
        return rounded_to_int8(x, weight.rotation)
    if isinstance(weight, Quantised) and has_triton(weight.device):
        from .triton import fp8

        if fp8.has_fp8_matmul(weight.device) and fp8.supports_groups(weight):
            return rounded_to_fp8(x, weight.group)
    return x


def emulate_linear(weight: Quantised, bias: Tensor | None) -> Linear:
    """Return the layer of a quantised weight as the device computes it, but in torch."""
    return lambda x: functional.linear(round_activations(x, weight), weight.dequantised(), bias)


class _EmulatedExperts:
    """Emulated `ExpertOps`."""

    select_experts = staticmethod(experts.select_experts)
    apply_experts = staticmethod(
        partial(experts.apply_experts, round_activations=round_activations)
    )


def has_triton(device: torch.device) -> bool:
    """Return whether a device runs the Triton kernels; older GPUs run the torch reference."""
    if device.type == "cuda":
        return "cuda" in TRITON_TYPES and _capability(device.index) >= MIN_CAPABILITY
    return device.type in TRITON_TYPES


@cache
def _capability(index: int | None) -> tuple[int, int]:
    if not torch.cuda.is_available():
        return MIN_CAPABILITY  # a plan for another machine's GPU assumes that it has kernels
    return torch.cuda.get_device_capability(index)


def check_device(device: torch.device) -> None:
    """Raise `EngineError`, with a remedy, if a device's kernels cannot be launched."""
    if device.type != "cuda" or not has_triton(device):
        return
    if torch.version.hip is not None:
        raise EngineError("AMD GPUs are not supported: use --device cpu")
    try:
        from .triton.driver import launch_problem
    except ImportError as exc:
        raise EngineError(
            f"GPU kernels require triton, which cannot be imported ({exc}): install the version "
            "that this build of torch requires, or use --device cpu"
        ) from exc
    if (reason := launch_problem()) is not None:
        raise EngineError(f"GPU kernels cannot be launched: {reason}, or use --device cpu")


def choose_backend(
    shapes: Sequence[AttentionShape], dtype: torch.dtype, device: torch.device
) -> AttentionBackendType:
    """Return the device's attention backend if it supports all these layers, else the reference."""
    if shapes and all(shape.has_latent_values for shape in shapes):
        return _choose_latents(shapes, dtype, device)
    if _IS_REFERENCE.get():
        return ReferenceAttention
    if has_triton(device):
        from .triton.attention import TritonAttention

        if TritonAttention.supports(shapes, dtype):
            return TritonAttention
    elif device.type == "cpu":
        from .cpu.attention import CpuAttention

        if CpuAttention.supports(shapes, dtype, device):
            return CpuAttention
    return ReferenceAttention


def _choose_latents(
    shapes: Sequence[AttentionShape], dtype: torch.dtype, device: torch.device
) -> AttentionBackendType:
    is_sparse = any(shape.num_selected for shape in shapes)
    if has_triton(device) and not _IS_REFERENCE.get():
        from .triton.latent import TritonLatentAttention

        if TritonLatentAttention.supports(shapes, dtype):
            return _sparse_on_gpus() if is_sparse else TritonLatentAttention
    return _sparse() if is_sparse else LatentAttention


def _sparse() -> AttentionBackendType:
    from .sparse_latent import SparseLatentAttention

    return SparseLatentAttention


def _sparse_on_gpus() -> AttentionBackendType:
    from .triton.sparse_latent import TritonSparseLatentAttention

    return TritonSparseLatentAttention


def choose_recurrence(
    shapes: Sequence[RecurrentShape], dtype: torch.dtype, device: torch.device
) -> RecurrentBackendType:
    """Return the device's recurrent backend if it supports all these layers, else the reference."""
    if _IS_REFERENCE.get():
        return ReferenceRecurrence
    if has_triton(device):
        from .triton.recurrence import TritonRecurrence

        if TritonRecurrence.supports(shapes, dtype):
            return TritonRecurrence
    elif device.type == "cpu":
        from .cpu.recurrence import CpuRecurrence

        if CpuRecurrence.supports(dtype, device):
            return CpuRecurrence
    return ReferenceRecurrence


def choose_elementwise(dtype: torch.dtype, device: torch.device) -> ElementwiseOps:
    """Return the device's norms and gates if it has them for this dtype, else the reference."""
    if _IS_REFERENCE.get():
        return elementwise
    if has_triton(device):
        from .triton import elementwise as triton_ops
        from .triton.launch import DTYPES as TRITON_DTYPES

        if dtype in TRITON_DTYPES:
            return triton_ops
    elif device.type == "cpu":
        from .cpu import elementwise as cpu_ops
        from .cpu.scalars import DTYPES

        if dtype in DTYPES:
            return cpu_ops
    return elementwise


def choose_experts(dtype: torch.dtype, device: torch.device) -> ExpertOps:
    """Return the device's MoE kernels if it has them for this dtype, else the reference."""
    if _IS_REFERENCE.get():
        return _EmulatedExperts
    if has_triton(device):
        from .triton import experts as triton_ops
        from .triton.launch import DTYPES as TRITON_DTYPES

        if dtype in TRITON_DTYPES:
            return triton_ops
    return experts


def make_experts(
    weights: ExpertWeights,
    count: int,
    gate: Gate | Activation,
    ops: ElementwiseOps,
    factory: LinearFactory,
) -> ApplyExperts:
    """Return the device's function of tokens, their `count` experts each, and shares."""
    dtype, device = weights.down.dtype, weights.down.device
    if device.type == "cpu" and not has_triton(device):
        from .cpu.experts import PackedExperts

        return PackedExperts(factory, weights, gate).apply
    own = choose_experts(dtype, device)

    def through(kernels: ExpertOps, gates: ElementwiseOps, some: ExpertWeights) -> ApplyExperts:
        return lambda x, chosen, shares: kernels.apply_experts(x, chosen, shares, some, gate, gates)

    if isinstance(weights.gate_up, Quantised) and has_triton(device) and not _IS_REFERENCE.get():
        # All tokens choose the first experts, so that the others are not dequantised.
        kernel = _of_first_experts(through(own, ops, weights), count)
        plain = _of_first_experts(
            through(_EmulatedExperts, elementwise, weights.first(count)), count
        )
        many = ROWS_AN_EXPERT * weights.gate_up.shape[0] // count
        if not all(factory.agree(kernel, plain, weights.gate_up, rows) for rows in (1, many)):
            own = experts
    return through(own, ops, weights)


def _of_first_experts(apply: ApplyExperts, count: int) -> Linear:
    def summed(x: Tensor) -> Tensor:
        shares = torch.ones(len(x), count, device=x.device)
        return apply(x, shares.cumsum(1).int() - 1, shares)

    return summed


def choose_pooling(device: torch.device) -> PoolingOps:
    """Return the device's pooling kernels if it has them, else the reference."""
    if has_triton(device):
        from .triton import pooling as triton_ops

        return triton_ops
    return pooling


def choose_linear(ops: ElementwiseOps, device: torch.device) -> LinearFactory:
    """Return a device's factory of linear layers: its own kernel, else oneDNN, else torch."""
    if _IS_REFERENCE.get():
        return LinearFactory(ops, [], quantised=[emulate_linear])
    if has_triton(device):
        from .triton import linear as triton_ops

        ways = [triton_ops.prepare_scaled, triton_ops.prepare_fp8, triton_ops.prepare]
        return LinearFactory(ops, [], quantised=ways)
    if device.type == "cpu":
        from .cpu import int8
        from .cpu.adapters import prepare_adapted
        from .cpu.linear import prepare

        return LinearFactory(
            ops,
            [prepare, prepack],
            prepare_adapted,
            fused=[int8.prepare],
            has_fixed_tiles=_HAS_FIXED_TILES.get(),
        )
    return LinearFactory(ops, [])


def has_quantised_linear(dtype: torch.dtype, device: torch.device, method: str) -> bool:
    """Return whether the device's linear layers multiply weights quantised by a method.

    If they do not, weights are dequantised, as they are without a method.
    """
    if method == "int8":
        return has_int8_linear(dtype, device)
    return bool(method) and has_triton(device) and dtype in {torch.bfloat16, torch.float16}


def has_int8_linear(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a device has linear layers of int8 weights and activations."""
    if device.type != "cpu":
        return False
    from .cpu import int8

    return int8.supports(dtype)


def choose_sampling(dtype: torch.dtype, device: torch.device) -> SamplingOps:
    """Return the device's sampler if it has one for this dtype, else the reference."""
    if has_triton(device):
        from .triton import sampling as triton_ops

        return triton_ops
    if device.type == "cpu":
        from .cpu import sampling as cpu_ops
        from .cpu.scalars import DTYPES

        if dtype in DTYPES:
            return cpu_ops
    return sampling


@contextmanager
def torch_on_all_threads(device: torch.device) -> Iterator[None]:
    """Let torch use as many threads as the kernels' thread pool within this context."""
    if device.type != "cpu":
        yield
        return
    from .cpu.thread_pool import pool_size

    before = torch.get_num_threads()
    torch.set_num_threads(pool_size())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def limit_torch_threads(device: torch.device) -> None:
    """Limit torch to its caller's thread from now on, if kernels have a thread pool.

    torch's own threads spin for a while after each function, on the cores that the pool needs.
    """
    if device.type == "cpu":
        from .cpu.thread_pool import shared_pool

        shared_pool()  # starts as many threads as torch has so far
        torch.set_num_threads(1)

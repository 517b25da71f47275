"""Loading of models that compute vectors or scores, with checks against silently wrong results.

Our own encoder or decoder runs a model of a known family that passes the parity check;
transformers' classes run the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from tidemill.protocol.contract import EngineError

from ...config import EngineConfig
from ...errors import ModelRefused, first_line_of
from ...scheduling.encoding import EncodingOutput
from ...storage.hub import find_file
from ..config.architecture import Architecture
from ..config.device import choose_device, choose_dtype, context_length
from ..config.hf_config import CONFIG, QUANTISED, HFConfig, UnsupportedConfig, parse_hf_config
from ..config.transformers_fields import notes_on_ignored
from ..native import ParityResult
from ..parity.parity_inputs import fits, num_layers_with_all_kinds
from ..parity_cache import parity_fact, run_once
from ..weights.checkpoint import WHOLE, Checkpoint, check_inside, find_checkpoint, find_part
from ..weights.sanity import check_not_constant
from ..weights.weight_map import weights_of
from ..weights.weights import check_stored, fill_weights, find_stored
from . import causal, native
from .architecture import EncoderArchitecture, HeadLinear, HeadNorm, HeadPart
from .decision_heads import READOUT, CodeReadout, JointHead, MarkerHead
from .decision_networks import load_network
from .families import FAMILIES, architecture_of
from .loaded_encoder import LoadedEncoder
from .parity import check_parity, compute_outputs, parity_sequences
from .pooler import HeadFunction, Pooler, SparsePooler, parts_of, unit
from .pooling_config import MULTI_VECTOR_LINEAR, SPARSE_LINEAR, Classifier, PoolingConfig
from .sentence_transformers import Dense, LayerNorm, Module
from .weight_map import head_weights

# torch's own default.
NORM_EPS = 1e-5


def make_pooler(
    settings: EngineConfig, pooling_config: PoolingConfig, loaded: LoadedEncoder
) -> Pooler:
    """Return the modules after the network: those described, or the head that it came with."""
    if isinstance(head := pooling_config.head, CodeReadout):
        linear = HeadLinear("", head.hidden_size, len(head.codes), has_bias=False)
        part = _read_part(find_part(settings.model, READOUT), linear, loaded.device)
        return Pooler(("lasttoken",), (part,))
    if pooling_config.splade is not None:
        assert isinstance(loaded.pooler, SparsePooler), "a language head has one"
        return replace(loaded.pooler, splade=pooling_config.splade)
    pooling = pooling_config.pooling
    if pooling is None and pooling_config.multi_vector is None:
        return loaded.pooler
    parts: list[HeadFunction] = []
    width = loaded.hidden_size * (1 if pooling is None else len(pooling.modes))
    for module in pooling_config.modules:
        takes = module.in_features if isinstance(module, Dense) else width
        takes = module.width if isinstance(module, LayerNorm) else takes
        if takes != width:
            raise ModelRefused(
                f"{settings.model}: {module} takes {takes} inputs, but the module before it gives "
                f"{width}."
            )
        parts.append(_part(settings.model, module, loaded.device))
        width = module.out_features if isinstance(module, Dense) else width
    return Pooler(() if pooling is None else pooling.modes, tuple(parts))


def _m3_poolers(model: str, loaded: LoadedEncoder) -> dict[EncodingOutput, Pooler]:
    """Return the poolers of BGE-M3's heads: a weight and a vector of each token."""
    outputs: dict[str, EncodingOutput] = {
        SPARSE_LINEAR: "token_weights",
        MULTI_VECTOR_LINEAR: "token_vectors",
    }
    return {
        output: Pooler((), (_read_pickled(model, file, loaded),))
        for file, output in outputs.items()
    }


def _read_pickled(model: str, file: str, loaded: LoadedEncoder) -> HeadFunction:
    """Return a linear layer whose tensors are in a file of torch; no code in it is run."""
    path = find_file(model, file)
    assert path is not None, "the model was recognised by this file"
    check_inside(model, "model", path.parent, file)
    try:
        stored = torch.load(path, map_location=loaded.device, weights_only=True)
        weight, bias = stored["weight"], stored["bias"]
        widths = (1,) if file == SPARSE_LINEAR else range(1, loaded.hidden_size + 1)
        fits = weight.shape[1:] == (loaded.hidden_size,) and weight.shape[0] in widths
        fits = fits and bias.shape == weight.shape[:1]
    except Exception as exc:  # torch raises anything for a broken file
        raise ModelRefused(f"{model}: {file} cannot be read: {first_line_of(exc)}") from exc
    if not fits:
        raise ModelRefused(f"{model}: {file} belongs to another model: copy or fetch it again.")
    part = HeadLinear("", loaded.hidden_size, len(weight))
    return parts_of((part,), {"head.0": weight, "head.0_bias": bias})[0]


def _part(model: str, module: Module, device: torch.device) -> HeadFunction:
    head: HeadPart
    if isinstance(module, Dense):
        names = ("linear", module.in_features, module.out_features)
        head = HeadLinear(*names, module.activation, module.bias)
    elif isinstance(module, LayerNorm):
        head = HeadNorm("norm", module.width, NORM_EPS)
    else:
        return unit
    if isinstance(module, Dense) and not module.folder:
        return _read_part(find_checkpoint(model), head, device)
    path = find_file(model, f"{module.folder}/{WHOLE}") or find_file(
        model, f"{module.folder}/config.json"
    )
    assert path is not None, "a module's fields were read from this file"
    return _read_part(find_checkpoint(str(path.parent)), head, device)


def _read_part(checkpoint: Checkpoint, head: HeadPart, device: torch.device) -> HeadFunction:
    wanted = list(head_weights((head,)))
    stored = find_stored(checkpoint.files, wanted)
    check_stored(checkpoint, type(head).__name__, wanted, stored)
    weights = fill_weights(checkpoint.name, wanted, stored, torch.float32, device)
    return parts_of((head,), weights)[0]


class LoadEncoder(Protocol):
    """Load a network in a dtype on a device, or its first layers."""

    def __call__(
        self, dtype: torch.dtype, device: torch.device, *, num_layers: int | None = None
    ) -> LoadedEncoder:
        """Return it with the head that it came with."""


@dataclass(frozen=True, slots=True)
class _NativeEncoder:
    """Our network for a model: its loader and its number of positions.

    `count_layers` returns how many of its first layers can be checked, None for all. `notes` are
    sentences for the user.
    """

    load: LoadEncoder
    num_positions: int
    count_layers: Callable[[torch.device], int | None]
    notes: tuple[str, ...]


def load_encoder(settings: EngineConfig, pooling_config: PoolingConfig) -> LoadedEncoder:
    """Load and check the model; `ModelRefused` names the reason if it cannot be served."""
    try:
        return _loaded(settings, pooling_config)
    except EngineError:
        raise
    except Exception as exc:  # a broken folder may fail anywhere in transformers
        reason = first_line_of(exc).partition(" For details")[0]
        raise ModelRefused(f"{settings.model}: cannot be loaded: {reason}") from exc


def _loaded(settings: EngineConfig, pooling_config: PoolingConfig) -> LoadedEncoder:
    if pooling_config.has_two_towers:
        from .two_towers_loading import load_two_towers  # which reads images: others need it not

        return load_two_towers(settings, pooling_config)
    hf_config = parse_hf_config(settings.model, pooling_config.config)
    if hf_config.quantization_config:
        raise ModelRefused(f"{settings.model}: {QUANTISED}")
    try:
        loaded = _load_native(settings, pooling_config, hf_config)
    except UnsupportedConfig as exc:
        loaded = _load_transformers(settings, pooling_config, hf_config, str(exc))
    if isinstance(head := pooling_config.head, JointHead | MarkerHead):
        return replace(loaded, decision_network=load_network(settings.model, head, loaded))
    if pooling_config.has_m3_heads:
        loaded = replace(loaded, token_poolers=_m3_poolers(settings.model, loaded))
    return replace(loaded, pooler=make_pooler(settings, pooling_config, loaded))


def _load_native(
    settings: EngineConfig, pooling_config: PoolingConfig, hf_config: HFConfig
) -> LoadedEncoder:
    config, head = pooling_config.config, pooling_config.head
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, hf_config.dtype, device)
    checkpoint = find_checkpoint(settings.model)
    candidate = _candidate(checkpoint, pooling_config, hf_config)
    max_model_len = context_length(settings, candidate.num_positions)
    try:
        loaded = candidate.load(dtype, device)

        def check_now() -> ParityResult:
            from .eager import eager_outputs

            num_layers = candidate.count_layers(device)
            exactly = partial(candidate.load, torch.float32, device, num_layers=num_layers)
            answer = partial(
                eager_outputs,
                checkpoint,
                config,
                device=device,
                classifier=head if isinstance(head, Classifier) else None,
                num_layers=num_layers,
                served=dtype,
            )
            return check_parity(loaded, exactly, answer, num_layers)

        fact = parity_fact(checkpoint, config, dtype, device, repr(head))
        parity = run_once(fact, check_now)
    except (TypeError, ValueError, RuntimeError) as exc:
        raise UnsupportedConfig(f"it failed to run: {first_line_of(exc)}") from exc
    if not parity.holds:
        raise UnsupportedConfig(
            f"its vectors differ from transformers' (relative distance {parity.distance:.2g})"
        )
    shown = compute_outputs(loaded, parity_sequences(loaded))
    check_not_constant(settings.model, torch.cat([one.hidden for one in shown]).to(dtype))
    notes = [*candidate.notes]
    if parity.num_layers is not None:
        notes.append(
            f"the parity check against transformers covered the first {parity.num_layers} of "
            f"{len(loaded.shapes)} layers: all of them in fp32 do not fit into memory"
        )
    return replace(loaded, max_model_len=max_model_len, notes=tuple(notes))


def own_encoder(name: str, pooling_config: PoolingConfig) -> EncoderArchitecture:
    """Return the architecture of our encoder for a model, with its head if it has its own.

    Raises `UnsupportedConfig` if our encoder cannot run it.
    """
    head = pooling_config.head
    if not isinstance(head, Classifier):
        return architecture_of(name, pooling_config.config)
    architecture = architecture_of(
        name,
        pooling_config.config,
        head.num_labels,
        is_per_token=head.is_per_token,
        is_language=head.is_language,
    )
    if head.is_per_token and not head.is_language:
        family = architecture.class_name.removesuffix("Model")
        _check_class(name, pooling_config, f"{family}ForTokenClassification")
    return architecture


def _check_class(name: str, pooling_config: PoolingConfig, class_name: str | None) -> None:
    """Refuse a token classifier of another class than the one that would run it.

    `class_name` None means that transformers has none.
    """
    if class_name not in (None, pooling_config.architecture):
        raise ModelRefused(
            f"{name}: {CONFIG} names the class {pooling_config.architecture}, but "
            f"transformers' class is {class_name}: layers of the former would be left out."
        )


def own_decoder(hf_config: HFConfig, head: object) -> Architecture:
    """Return the architecture of our decoder for a model; `UnsupportedConfig` if it has none."""
    if isinstance(head, Classifier) and head.is_per_token:
        does = "compute sparse vectors" if head.is_language else "label tokens"
        raise UnsupportedConfig(f"the engine's decoder does not {does}")
    return causal.decoder_of(hf_config)


def _candidate(
    checkpoint: Checkpoint, pooling_config: PoolingConfig, hf_config: HFConfig
) -> _NativeEncoder:
    """Return the native network of the model's family; `UnsupportedConfig` if there is none."""
    head = pooling_config.head
    if hf_config.model_type in FAMILIES:
        encoder = own_encoder(checkpoint.name, pooling_config)

        def load(
            dtype: torch.dtype, device: torch.device, *, num_layers: int | None = None
        ) -> LoadedEncoder:
            assert num_layers is None
            return native.load(checkpoint, encoder, dtype, device)

        notes = notes_on_ignored(hf_config.where, encoder.class_name, encoder.ignored_fields)
        return _NativeEncoder(load, encoder.max_positions, lambda _: None, notes)
    decoder = own_decoder(hf_config, head)

    def count_layers(device: torch.device) -> int | None:
        return None if fits(weights_of(decoder), device) else num_layers_with_all_kinds(decoder)

    return _NativeEncoder(
        partial(causal.load, checkpoint, hf_config, decoder, head=head),
        decoder.original_positions or decoder.max_positions,
        count_layers,
        notes_on_ignored(hf_config.where, decoder.class_name, decoder.ignored_fields),
    )


def _load_transformers(
    settings: EngineConfig, pooling_config: PoolingConfig, hf_config: HFConfig, why: str
) -> LoadedEncoder:
    from . import transformers_model

    head = pooling_config.head
    classifier = head if isinstance(head, Classifier) else None
    if head is not None and classifier is None:
        raise ModelRefused(f"{settings.model}: the engine's decoder does not support it: {why}")
    if classifier is not None and classifier.is_language:
        raise ModelRefused(
            f"{settings.model}: sparse vectors are supported for models that the engine's own "
            f"encoder runs: {why}."
        )
    if classifier is not None and classifier.is_per_token:
        _check_class(
            settings.model, pooling_config, transformers_model.token_class(hf_config.model_type)
        )
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, hf_config.dtype, device)
    checkpoint = find_checkpoint(settings.model)
    loaded = transformers_model.load(
        checkpoint, pooling_config.config, dtype, device, classifier=classifier
    )
    note = (
        "transformers runs this model, with sequences of one length together and more slowly than "
        f"the engine's own networks would: {why}"
    )
    max_model_len = context_length(settings, loaded.max_model_len)
    return replace(loaded, max_model_len=max_model_len, notes=(note,))

"""Labels of a classifier, by its config.json: their names, and the activation of their logits."""

from __future__ import annotations

from .sentence_transformers import SavedFields

# transformers' default for a config without labels.
_DEFAULT_LABELS = 2
_ACTIVATIONS = {
    None: "Softmax",
    "single_label_classification": "Softmax",
    "multi_label_classification": "Sigmoid",
    "regression": "Identity",
}


def count_labels(config: SavedFields) -> int:
    """Return the number of labels of the network's own head."""
    labels = config.fields.get("id2label")
    if isinstance(labels, dict) and labels:
        return len(labels)
    return config.optional_count("num_labels") or _DEFAULT_LABELS


def read_labels(config: SavedFields, count: int) -> tuple[str, ...]:
    """Return the names of `count` labels, in the order of their logits, as transformers has them.

    Raises `ModelRefused` if `id2label` lacks one of them.
    """
    named = config.fields.get("id2label")
    if not isinstance(named, dict) or len(named) != count:
        return tuple(f"LABEL_{index}" for index in range(count))
    labels = [named.get(str(index)) for index in range(count)]
    if not all(isinstance(label, str) for label in labels):
        raise config.wrong("id2label")
    return tuple(map(str, labels))


def activation_of_labels(config: SavedFields) -> str:
    """Return the activation of several logits, a class of torch.nn, by `problem_type`."""
    problem = config.fields.get("problem_type")
    if problem is not None and problem not in _ACTIVATIONS:
        raise config.wrong("problem_type")
    return _ACTIVATIONS[problem]

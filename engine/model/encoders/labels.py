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
    """Return the number of labels of the network's own head, as transformers does."""
    labels = config.fields.get("id2label")
    num_names = len(labels) if isinstance(labels, dict) else 0
    return config.optional_count("num_labels") or num_names or _DEFAULT_LABELS


def read_labels(config: SavedFields, count: int) -> tuple[str, ...]:
    """Return the names of `count` labels, in the order of their logits, as transformers has them.

    Names are those of `id2label` if it has `count` of them. Raises `ModelRefused` if it lacks one
    of several.
    """
    named = config.fields.get("id2label")
    if not isinstance(named, dict) or len(named) != count:
        named = {}
    labels = [named.get(str(index)) for index in range(count)]
    if named and count > 1 and None in labels:
        raise config.wrong("id2label")
    return tuple(
        f"LABEL_{index}" if label is None else str(label) for index, label in enumerate(labels)
    )


def activation_of_labels(config: SavedFields) -> str:
    """Return the activation of several logits, a class of torch.nn, by `problem_type`."""
    problem = config.fields.get("problem_type")
    if not isinstance(problem, str | None) or problem not in _ACTIVATIONS:
        raise config.wrong("problem_type")
    return _ACTIVATIONS[problem]

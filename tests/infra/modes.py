"""The modes of a deployment: a table of keys and values, and configurations that pair them all.

Each value of a key meets each value of every other key in some configuration (pairwise testing), as
far as the two can be had together. A new key is a row of `KEYS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations
from typing import Any, Final

from infra.config import ConfigRefused, make_config
from tests.infra.compute.kinds import EXISTING, GROUPS_OF_OTHERS

_BIG = {
    "name": "big",
    "gpu": "h100",
    "gpus_per_worker": 8,
    "max_workers": 8,
    "weights": "s3://weights/big",
    "weights_key": "arn:aws:kms:eu-west-1:111122223333:key/abc",
    "adapters": [{"name": "sql", "weights": "s3://adapters/sql"}],
    "quantization": "fp8",
}
_SMALL = {"name": "small", "gpu": "t4", "aliases": ["*"], "memory_gib": 40}
_FAR = {"name": "far", "gpu": "l40s", "weights": "s3://far/m", "weights_region": "us-west-2"}
_GROUP = "arn:aws:resource-groups:us-east-1:111122223333:group/blocks"
_RESERVED = _BIG | {"capacity": "reserved", "reservation_group": _GROUP}
_IMAGE = "111122223333.dkr.ecr.us-east-1.amazonaws.com/tidemill"
_REVIEW = {
    "alarm_messages": "chat",
    "kms_key": "arn:aws:kms:us-east-1:111122223333:key/abc",
    "tracing": True,
    "permissions_boundary": "arn:aws:iam::111122223333:policy/boundary",
    "role_path": "/platform/",
    "tags": {"team": "ml"},
}
# A value is what a configuration says instead of infra/config.toml; the first is the default.
KEYS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "compute": {
        "managed": {"compute": "managed-instances"},
        "asg": {"compute": "asg"},
        "sagemaker": {"compute": "sagemaker"},
        "elsewhere": {"compute": "none"},
    },
    "network": {
        "public": {},
        "isolated": {"network": "isolated"},
        "internet": {
            "network": {
                "kind": "isolated",
                "internet": True,
                "zones": ["us-east-1a", "us-east-1b", "us-east-1c"],
                "endpoint_zones": 2,
                "cidr": "10.0.0.0/20",
            }
        },
        "existing": {"network": EXISTING | {"security_group_ids": GROUPS_OF_OTHERS}},
    },
    "models": {
        "demo": {},
        "two": {"models": [_BIG, _SMALL]},
        "far": {"models": [_FAR]},
        "reserved": {"models": [_RESERVED, _SMALL]},
    },
    "api": {
        "public": {},
        "private": {"api": "private", "vpc_endpoint_ids": ["vpce-0123456789abcdef0"]},
        "none": {"api": "none"},
        "domain": {
            "domain": {
                "name": "llm.example.com",
                "certificate": "arn:aws:acm:us-east-1:111122223333:certificate/abc",
            }
        },
    },
    "auth": {
        "keys": {},
        "iam": {"auth": "iam"},
        "oidc": {
            "oidc": {
                "issuer": "https://login.example.com",
                "audience": "tidemill",
                "tenant_claim": "department",
            }
        },
    },
    "spot": {"on demand": {}, "spot": {"spot": True}},
    "image": {"built": {}, "tag": {"image": f"{_IMAGE}:1"}},
    "review": {"nothing": {}, "review": _REVIEW},
    "drops": {
        "of one tenant": {},
        "of tenants": {
            "drop_tenants": True,
            "producers": [
                {"arn": "arn:aws:iam::444455556666:role/etl", "tenant": "search"},
                {"arn": "arn:aws:iam::777788889999:root"},
            ],
        },
    },
    "mail": {"none": {}, "mail": {"alarm_email": "ops@example.com"}},
    "retention": {
        "days": {},
        "kept": {"retention": {"output_days": 0, "input_days": 30, "erase_batches": True}},
    },
    "reuse": {
        "no": {},
        "reuse": {"reuse": True},
        "bounded": {"reuse": {"days": 30, "max_gib": 100, "sampled": True}},
    },
    "budget": {"no limit": {}, "budget": {"budget": {"gpu_hours_per_day": 40}}},
}
Choice = tuple[str, str]


def overrides_of(mode: Mapping[str, str]) -> dict[str, Any]:
    """Return what a mode changes in infra/config.toml; keys of one table are put together."""
    merged: dict[str, Any] = {}
    for key, value in mode.items():
        for name, overrides in KEYS[key][value].items():
            table = merged.get(name)
            is_table = isinstance(overrides, dict) and isinstance(table, dict)
            merged[name] = table | overrides if is_table else overrides
    return merged


@cache
def modes() -> Mapping[str, dict[str, Any]]:
    """Return the configurations by a name that lists their values."""
    return {name: overrides_of(mode) for name, mode in _chosen().items()}


@cache
def few_modes() -> frozenset[str]:
    """Return the names of configurations that have each value of each key between them."""
    uncovered = {choice for mode in _chosen().values() for choice in mode.items()}
    names = set()
    while uncovered:
        name, mode = max(_chosen().items(), key=lambda it: len(uncovered & it[1].items()))
        names.add(name)
        uncovered -= mode.items()
    return frozenset(names)


@cache
def _chosen() -> Mapping[str, Mapping[str, str]]:
    uncovered = {pair for pair in _pairs() if _is_possible(dict(pair))}
    chosen = [{key: next(iter(KEYS[key])) for key in KEYS}]
    uncovered -= _covered(chosen[0])
    while uncovered:
        chosen.append(_fill(dict(min(uncovered)), uncovered))
        uncovered -= _covered(chosen[-1])
    return {", ".join(_unusual(mode)) or "as it is": mode for mode in chosen}


def _pairs() -> Iterator[tuple[Choice, Choice]]:
    for one, other in combinations(sorted(KEYS), 2):
        yield from (((one, left), (other, right)) for left in KEYS[one] for right in KEYS[other])


def _covered(mode: Mapping[str, str]) -> set[tuple[Choice, Choice]]:
    return set(combinations(sorted(mode.items()), 2))


def _fill(mode: dict[str, str], uncovered: set[tuple[Choice, Choice]]) -> dict[str, str]:
    """Give a mode a value of each key: the possible one that covers most pairs."""
    for key in KEYS:
        if key not in mode:
            filled = (mode | {key: value} for value in KEYS[key])
            mode = max(filter(_is_possible, filled), key=lambda it: len(_covered(it) & uncovered))
    return mode


def _is_possible(mode: Mapping[str, str]) -> bool:
    """Say whether a configuration may say so, with the defaults for all else."""
    try:
        make_config({"models": [_SMALL]} | overrides_of(mode), "test")
    except ConfigRefused:
        return False
    return True


def _unusual(mode: Mapping[str, str]) -> Iterator[str]:
    return (mode[key] for key, values in KEYS.items() if mode[key] != next(iter(values)))

"""Configuration: each error is reported in one sentence, before anything is created."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.config import (
    DEFAULT_PATH,
    Config,
    ConfigRefused,
    make_config,
    read_config,
    with_aliases,
    with_name,
    with_zones,
)
from infra.config.read import _PATTERN_HINTS
from tests.infra.compute.kinds import EXISTING

ROOT = DEFAULT_PATH.parents[1]
MODEL: dict[str, Any] = {"name": "small", "gpu": "l4"}
ADAPTER: dict[str, Any] = {"name": "sql", "weights": "s3://tuned/sql"}
LOG_DAYS = "1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545 or 731"
GPU_NAMES = "t4, a10g, l4, l40s, a100, h100, h200"
A_MODEL_NAME = "a model's name, such as Qwen/Qwen3-0.6B"
AN_IMAGE = "an image in ECR: 111122223333.dkr.ecr.eu-west-1.amazonaws.com/tidemill:1"
OIDC = {"issuer": "https://login.example.com", "audience": "a", "tenant_claim": "team"}
ALONE = '[oidc] requires an API with auth = "keys"'
CERTIFICATE = "arn:aws:acm:eu-west-1:111122223333:certificate/abc"
A_PATH = "a path of roles between slashes: /platform/"
A_PRINCIPAL = "a role, a user or an account: arn:aws:iam::111122223333:role/producer"
A_NAME = "a name of at most 24 lower-case letters, digits and dashes between them"

# A table of the file with one error in it, and the message for it.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"nmae": "mill"}, "nmae is not a known key."),
    ({"name": 3}, "name must be a string in quotes."),
    ({"name": ""}, f'name is "", which does not look like {A_NAME}.'),
    ({"name": "Mill"}, f'name is "Mill", which does not look like {A_NAME}.'),
    ({"name": "mill-"}, f'name is "mill-", which does not look like {A_NAME}.'),
    ({"name": "mill\n"}, f'name is "mill\\n", which does not look like {A_NAME}.'),
    ({"name": "m" * 25}, f'name is "{"m" * 25}", which does not look like {A_NAME}.'),
    (
        {"name": "default"},
        'name is "default", which is an event bus and a cluster in every account.',
    ),
    *(
        (
            {"name": name},
            (
                f'name is "{name}": ECS reserves names of capacity providers that begin with aws, '
                "ecs or fargate."
            ),
        )
        for name in ("awsome", "ecs-batch", "fargate")
    ),
    ({"alarm_email": "ops"}, 'alarm_email is "ops", which does not look like an e-mail address.'),
    ({"alarm_email": ["ops@example.com"]}, "alarm_email must be a string in quotes."),
    (
        {"compute": "fargate"},
        "compute is 'fargate'; it can be 'managed-instances', 'asg', 'sagemaker' or 'none'.",
    ),
    *(
        ({"image": image}, f'image is "{image}", which does not look like {AN_IMAGE}.')
        for image in (
            "tidemill:1",
            "docker.io/tidemill:1",
            "111122223333.dkr.ecr.eu-west-1.amazonaws.com/tidemill",
            "111122223333.dkr.ecr.eu-west-1.amazonaws.com/tidemill@sha256:0",
        )
    ),
    ({"spot": "yes"}, "spot must be true or false."),
    ({"spot": 1}, "spot must be true or false."),
    (
        {"producers": [{"arn": "444455556666"}]},
        f'producers[1].arn is "444455556666", which does not look like {A_PRINCIPAL}.',
    ),
    (
        {"producers": [{"arn": "arn:aws:iam::444455556666:root", "tenant": "search"}]},
        "producers names the tenant search, but tenants have folders only with drop_tenants.",
    ),
    (
        {"producers": ["arn:aws:iam::444455556666:root"]},
        'producers[1] must be a table: { arn = "arn:aws:iam::111122223333:role/producer" }.',
    ),
    *(
        (
            {"currency": currency},
            (
                f'currency is "{currency}", which does not look like a currency\'s code, '
                "such as USD."
            ),
        )
        for currency in ("dollars", "")
    ),
    ({"lambda_concurrency": 0}, "lambda_concurrency is 0; it must be 1 or more."),
    ({"auth": "none"}, "auth is 'none'; it can be 'keys' or 'iam'."),
    ({"windows": "24h"}, "windows must be a table."),
    ({"windows": {"longest": "24h"}}, "windows.longest is not a known key."),
    ({"windows": {"default": 24}}, "windows.default must be a string in quotes."),
    (
        {"windows": {"default": "15d"}},
        'windows.default is "15d"; it can be from 30m to 14d, such as 24h.',
    ),
    ({"retention": {"output_days": -1}}, "retention.output_days is -1; it must be 0 or more."),
    (
        {"retention": {"output_days": 3651}},
        "retention.output_days is 3651; it must be 3650 or less.",
    ),
    ({"retention": {"output_days": 1.5}}, "retention.output_days must be a whole number."),
    ({"retention": {"work_days": 15}}, "retention.work_days is 15; it must be 16 or more."),
    ({"reuse": "yes"}, "reuse must be true, false or a table."),
    ({"reuse": {"days": 0}}, "reuse.days is 0; it must be 1 or more."),
    ({"retention": {"log_days": 31}}, f"retention.log_days is 31; it can be {LOG_DAYS}."),
    ({"retention": {"table_days": 1}}, "retention.table_days is 1; it must be 2 or more."),
    ({"limits": {"requests_per_day": -1}}, "limits.requests_per_day is -1; it must be 0 or more."),
    ({"limits": {"queued_lines": "many"}}, "limits.queued_lines must be a whole number."),
    # The short form of the table.
    (
        {"network": "private"},
        "network.kind is 'private'; it can be 'public', 'isolated' or 'existing'.",
    ),
    ({"network": 3}, "network must be a table."),
    # As they were once.
    ({"zones": ["eu-west-1a"]}, "zones has moved: set it in [network] zones."),
    (
        {"isolated": {"internet": True}},
        "isolated has moved: set it in [network] internet and endpoint_zones.",
    ),
    ({"network": {"internet": True}}, 'network supports internet only with kind = "isolated".'),
    ({"network": {"zones": "eu-west-1a"}}, "network.zones must be a list in square brackets."),
    (
        {"network": {"zones": ["eu-west-1"]}},
        'network.zones[1] is "eu-west-1", which does not look like a zone, such as eu-west-1a.',
    ),
    ({"network": {"zones": ["eu-west-1a"] * 2}}, "network.zones has the duplicate eu-west-1a."),
    (
        {"network": {"zones": [f"eu-west-1{letter}" for letter in "abcdefg"]}},
        "network.zones must have at most 6 entries.",
    ),
    (
        {"network": {"zones": ["eu-west-1a"]}, "compute": "sagemaker"},
        "zones must be empty with SageMaker's public network.",
    ),
    (
        {"network": "isolated", "models": [MODEL | {"weights_region": "eu-west-1"}]},
        (
            f"{MODEL['name']} has weights_region, but an isolated network reaches other regions "
            "only with network.internet."
        ),
    ),
    (
        {"network": {"kind": "isolated", "endpoint_zones": 3}},
        "network can have at most endpoint_zones = 2, unless it names more zones.",
    ),
    (
        {"network": {"cidr": "10.73.0.1/16"}},
        'network.cidr is "10.73.0.1/16"; it must be a block such as 10.73.0.0/16.',
    ),
    *(
        (
            {"network": {"cidr": cidr}},
            f'network.cidr is "{cidr}"; it must be a private range from /16 to /24.',
        )
        for cidr in ("8.8.8.0/24", "10.0.0.0/15", "10.0.0.0/25")
    ),
    (
        {"network": {"vpc_id": "vpc-0123456789abcdef0"}},
        'network supports vpc_id only with kind = "existing".',
    ),
    (
        {"network": EXISTING | {"subnet_ids": []}},
        'network requires vpc_id and subnet_ids with kind = "existing".',
    ),
    (
        {"network": EXISTING | {"cidr": "10.0.0.0/16"}},
        "network does not support cidr for an existing VPC.",
    ),
    (
        {"network": EXISTING | {"vpc_id": "mine"}},
        'network.vpc_id is "mine", which does not look like a VPC: vpc-0123456789abcdef0.',
    ),
    (
        {"network": EXISTING | {"subnet_ids": ["mine"]}},
        (
            'network.subnet_ids[1] is "mine", which does not look like a subnet: '
            "subnet-0123456789abcdef0."
        ),
    ),
    (
        {"network": EXISTING | {"security_group_ids": ["mine"]}},
        (
            'network.security_group_ids[1] is "mine", which does not look like a security group: '
            "sg-0123456789abcdef0."
        ),
    ),
    (
        {"permissions_boundary": "boundary"},
        (
            'permissions_boundary is "boundary", which does not look like a policy\'s ARN: '
            "arn:aws:iam::111122223333:policy/boundary."
        ),
    ),
    *(
        (
            {"role_path": path},
            f'role_path is "{path}", which does not look like {A_PATH}.',
        )
        for path in ("", "platform/", "/platform", "//")
    ),
    (
        {"kms_key": "alias/mine"},
        (
            'kms_key is "alias/mine", which does not look like a KMS key: '
            "arn:aws:kms:eu-west-1:111122223333:key/…."
        ),
    ),
    ({"api": "hidden"}, "api is 'hidden'; it can be 'public', 'private' or 'none'."),
    (
        {"api": "private"},
        (
            'api = "private" requires VPC endpoints for the service execute-api: '
            "list them in vpc_endpoint_ids."
        ),
    ),
    (
        {"vpc_endpoint_ids": ["vpce-0123456789abcdef0"]},
        'vpc_endpoint_ids requires api = "private".',
    ),
    (
        {"api": "private", "vpc_endpoint_ids": ["vpc-1"]},
        (
            'vpc_endpoint_ids[1] is "vpc-1", which does not look like a VPC endpoint, such '
            "as vpce-0123456789abcdef0."
        ),
    ),
    (
        {"api": "none", "domain": {"name": "llm.example.com", "certificate": CERTIFICATE}},
        '[domain] requires api = "public".',
    ),
    (
        {"domain": {"name": "LLM", "certificate": CERTIFICATE}},
        'domain.name is "LLM", which does not look like a name, such as llm.example.com.',
    ),
    ({"oidc": OIDC, "auth": "iam"}, f"{ALONE}."),
    ({"oidc": OIDC, "api": "none"}, f"{ALONE}."),
    (
        {"oidc": OIDC | {"issuer": "http://login.example.com"}},
        (
            'oidc.issuer is "http://login.example.com", which does not look like an issuer\'s URL: '
            "https://login.example.com."
        ),
    ),
    ({"domain": {"name": "llm.example.com"}}, "domain.certificate is required."),
    ({"alarm_messages": "json"}, "alarm_messages is 'json'; it can be 'text' or 'chat'."),
    ({"tags": "team"}, "tags must be a table."),
    ({"tags": {"team": 3}}, "tags.team must be a string in quotes."),
    ({"tags": {"aws:team": "ml"}}, 'tags has the key "aws:team", which is reserved.'),
    ({"tags": {"tidemill": "ml"}}, 'tags has the key "tidemill", which is reserved.'),
    ({"tags": {"TideMill": "ml"}}, 'tags has the key "TideMill", which is reserved.'),
    (
        {"tags": {"Team": "ml", "team": "ml"}},
        'tags has "Team" and "team", which IAM treats as the same key.',
    ),
    (
        {"tags": {"team": "m&l"}},
        (
            'tags has "team" with a character that not every service supports: use letters, '
            "digits, spaces and _ . : / = + - @."
        ),
    ),
    (
        {"tags": {"team": "m" * 257}},
        (
            'tags has "team" with a key or value that is too long: a key has 1 to 128 characters, '
            "a value at most 256."
        ),
    ),
    ({"tags": {str(it): "" for it in range(41)}}, "tags must have at most 40 tags."),
    (
        {"compute": "sagemaker", "models": [MODEL | {"capacity": "reserved"}]},
        'small has capacity = "reserved", which SageMaker does not support.',
    ),
    (
        {"compute": "asg", "models": [MODEL | {"machine_idle_minutes": 5}]},
        "small has machine_idle_minutes, which only managed-instances supports.",
    ),
    ({"models": []}, "models must have at least one entry."),
    ({"models": "small"}, "models must be a list in square brackets."),
    ({"models": ["small"]}, "models[1] must be a table."),
    ({"models": [MODEL, MODEL]}, "models has a duplicate name: small."),
    (
        {"models": [MODEL | {"aliases": ["gpt"]}, MODEL | {"name": "b", "aliases": ["gpt"]}]},
        "models has a duplicate alias: gpt.",
    ),
    (
        {"models": [MODEL | {"aliases": ["*"]}, MODEL | {"name": "b", "aliases": ["*"]}]},
        "models has a duplicate alias: *.",
    ),
    (
        {"models": [MODEL, MODEL | {"name": "b", "adapters": [ADAPTER | {"name": "small"}]}]},
        "models has the adapter small, which is also a model or an alias.",
    ),
    (
        {"models": [MODEL | {"adapters": [ADAPTER], "aliases": ["sql"]}]},
        "models has the adapter sql, which is also a model or an alias.",
    ),
    (
        {"models": [MODEL | {"adapters": [ADAPTER, ADAPTER]}]},
        "models has a duplicate adapter: sql.",
    ),
    (
        {"models": [MODEL, MODEL | {"name": "b", "aliases": ["small"]}]},
        "models has the alias small, which is also the name of a model.",
    ),
    (
        {"models": [MODEL | {"name": "Qwen/3"}, MODEL | {"name": "qwen.3"}]},
        "models has names that are the same in AWS: qwen-3.",
    ),
]
# The same for a key of the second model.
WRONG_MODELS: list[tuple[dict[str, Any], str]] = [
    ({"gpus": 2}, "models[2].gpus is not a known key."),
    ({"target_minutes": 0}, "models[2].target_minutes is 0; it must be 1 or more."),
    (
        {"target_minutes": 20161},
        "models[2].target_minutes is 20161; it must be 20160 or less.",
    ),
    ({"idle_minutes": 0}, "models[2].idle_minutes is 0; it must be 1 or more."),
    (
        {"name": "my model"},
        f'models[2].name is "my model", which does not look like {A_MODEL_NAME}.',
    ),
    (
        {"weights": "weights/small"},
        'models[2].weights is "weights/small", which does not look like s3://bucket/prefix.',
    ),
    (
        {"weights": "s3://bucket"},
        'models[2].weights is "s3://bucket", which does not look like s3://bucket/prefix.',
    ),
    (
        {"weights_region": "Frankfurt"},
        (
            'models[2].weights_region is "Frankfurt", which does not look like a region, such as '
            "eu-west-1."
        ),
    ),
    (
        {"weights_key": "alias/mine"},
        (
            'models[2].weights_key is "alias/mine", which does not look like a KMS key: '
            "arn:aws:kms:eu-west-1:111122223333:key/…."
        ),
    ),
    ({"gpu": "v100"}, f'models[2].gpu is "v100"; it can be {GPU_NAMES}.'),
    ({"gpus_per_worker": 0}, "models[2].gpus_per_worker is 0; it must be 1 or more."),
    ({"gpus_per_worker": 9}, "models[2].gpus_per_worker is 9; it must be 8 or less."),
    (
        {"gpus_per_worker": 3},
        "models[2] has gpus_per_worker = 3; machines with l4 have 1, 4, 8.",
    ),
    (
        {"gpus_per_worker": 4, "tensor_parallel_size": 3},
        ("models[2] has tensor_parallel_size = 3, which does not divide gpus_per_worker = 4."),
    ),
    (
        {"memory_gib": 3},
        "models[2].memory_gib is 3; it must be 4 or more.",
    ),
    ({"memory_gib": 400}, "models[2] has memory_gib = 400, more than its machines have."),
    (
        {"capacity": "block"},
        (
            "models[2].capacity is 'block'; it can be 'on-demand', 'spot', 'reserved' or "
            "'reserved-first'."
        ),
    ),
    (
        {"reservation_group": "arn:aws:resource-groups:eu-west-1:111122223333:group/mine"},
        'models[2] has a reservation_group, which requires capacity = "reserved".',
    ),
    (
        {"reservation_group": "mine"},
        (
            'models[2].reservation_group is "mine", which does not look like a group: '
            "arn:aws:resource-groups:eu-west-1:1111…:group/mine."
        ),
    ),
    ({"max_price_factor": 0.9}, "models[2].max_price_factor is 0.9; it must be 1 or more."),
    (
        {"machine_idle_minutes": 61},
        "models[2].machine_idle_minutes is 61; it must be 60 or less.",
    ),
    ({"min_workers": 2}, "models[2] has min_workers above max_workers = 1."),
    (
        {"min_workers_hours": "07:00-18:00"},
        "models[2] has min_workers_hours without min_workers.",
    ),
    (
        {"min_workers": 1, "min_workers_hours": "9 to 5"},
        (
            "models[2].min_workers_hours is \"9 to 5\": '9 to 5' is not a span such as Mon-Fri "
            "07:00-18:00."
        ),
    ),
    ({"max_workers": 0}, "models[2].max_workers is 0; it must be 1 or more."),
    ({"max_workers": "2"}, "models[2].max_workers must be a whole number."),
    (
        {"dtype": "int8"},
        "models[2].dtype is 'int8'; it can be 'auto', 'float32', 'bfloat16' or 'float16'.",
    ),
    ({"gpu_hour_price": -0.5}, "models[2].gpu_hour_price is -0.5; it must be 0 or more."),
    ({"gpu_hour_price": 1001}, "models[2].gpu_hour_price is 1001; it must be 1000 or less."),
    ({"gpu_hour_price": "0.80"}, "models[2].gpu_hour_price must be a number."),
    ({"gpu_hour_price": True}, "models[2].gpu_hour_price must be a number."),
    ({"gpu_hour_price": float("nan")}, "models[2].gpu_hour_price must be a number."),
    ({"aliases": "gpt"}, "models[2].aliases must be a list in square brackets."),
    (
        {"aliases": ["gpt*"]},
        'models[2].aliases[1] is "gpt*", which does not look like a model\'s name, or * for any.',
    ),
    (
        {"adapters": ["sql"]},
        (
            "models[2].adapters[1] must be a table: "
            '{ name = "sql", weights = "s3://bucket/prefix" }.'
        ),
    ),
    ({"adapters": [{"name": "sql"}]}, "models[2].adapters[1].weights is required."),
    (
        {"adapters": [{"name": "*", "weights": "s3://tuned/sql"}]},
        'models[2].adapters[1].name is "*", which does not look like a name, such as sql.',
    ),
    (
        {"adapters": [{"name": "sql", "weights": ""}]},
        'models[2].adapters[1].weights is "", which does not look like s3://bucket/prefix.',
    ),
    ({"args": "--quiet"}, "models[2].args must be a list in square brackets."),
    ({"args": [1]}, "models[2].args[1] must be a string in quotes."),
    (
        {"args": ["--nonsense"]},
        (
            "models[2].args is invalid: `tidemill worker` has no --nonsense: "
            "see `tidemill worker --help`."
        ),
    ),
    (
        {"args": ["--max-model-len", "abc"]},
        (
            "models[2].args is invalid: --max-model-len: 'abc' is not a whole number ≥ 1: "
            "see `tidemill worker --help`."
        ),
    ),
    (
        {"args": ["--lease-seconds", "x"]},
        (
            "models[2].args is invalid: --lease-seconds or TIDEMILL_LEASE_SECONDS: Input should "
            "be a valid number, unable to parse string as a number."
        ),
    ),
    (
        {"args": ["--max-model-len 8192"]},
        (
            'models[2].args has "--max-model-len 8192" as one string: write flag and value as '
            'two, "--max-model-len", "8192".'
        ),
    ),
]


def refusal(**differing: Any) -> str:
    """Return the error of a configuration that is valid except for these keys."""
    with pytest.raises(ConfigRefused) as refused:
        make_config({"models": [MODEL]} | differing, "mill.toml")
    return str(refused.value)


@pytest.mark.parametrize(("differing", "sentence"), WRONG, ids=[text for _, text in WRONG])
def test_a_wrong_value_is_reported_in_a_sentence(differing: dict[str, Any], sentence: str) -> None:
    """The file, the key and what it may be; one sentence for one mistake."""
    assert refusal(**differing) == f"mill.toml: {sentence}"


@pytest.mark.parametrize(
    ("differing", "sentence"), WRONG_MODELS, ids=[text for _, text in WRONG_MODELS]
)
def test_a_wrong_value_of_a_model_names_the_model(differing: dict[str, Any], sentence: str) -> None:
    """Models are counted from one, as people count."""
    second = MODEL | {"name": "large"} | differing
    assert refusal(models=[MODEL, second]) == f"mill.toml: {sentence}"


@pytest.mark.parametrize("key", ["name", "gpu"])
def test_a_model_has_a_name_and_a_gpu(key: str) -> None:
    """Keys without a default are required."""
    model = {name: value for name, value in MODEL.items() if name != key}
    assert refusal(models=[model]) == f"mill.toml: models[1].{key} is required."


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("spot", True),
        ("image", "111122223333.dkr.ecr.eu-west-1.amazonaws.com/tidemill:1"),
        ("network", "isolated"),
    ],
)
def test_workers_that_run_elsewhere_are_not_configured_here(key: str, value: Any) -> None:
    """Nothing would read them; their GPU is not requested either."""
    without = {"name": "small"}
    make_config({"compute": "none", "models": [without]}, "mill.toml")
    shown = "[network]" if key == "network" else key
    assert (
        refusal(compute="none", models=[without], **{key: value})
        == f'mill.toml: compute = "none" starts no workers, so {shown} must not be set.'
    )


def test_models_must_be_given() -> None:
    """A deployment without models is none."""
    with pytest.raises(ConfigRefused, match=r"^mill\.toml: models is required\.$"):
        make_config({}, "mill.toml")


def places_with_patterns(schema: dict[str, Any], part: dict[str, Any]) -> Iterator[str]:
    """Yield the place of each string with a pattern in a part of the configuration's schema."""
    if "$ref" in part:
        part = schema["$defs"][part["$ref"].rpartition("/")[2]]
    if "pattern" in part:
        yield ""
    for each in (*part.get("anyOf", ()), *filter(None, [part.get("items")])):
        yield from places_with_patterns(schema, each)
    for key, value in part.get("properties", {}).items():
        for place in places_with_patterns(schema, value):
            yield f"{key}.{place}".rstrip(".")


def test_every_pattern_has_a_hint() -> None:
    """A value of the wrong form is reported with the expected form."""
    schema = Config.model_json_schema()
    found = set(places_with_patterns(schema, schema))
    assert found >= {"name", "models.adapters.name", "domain.name", "network.zones"}
    assert found == set(_PATTERN_HINTS)


def test_valid_flags_of_a_worker_are_accepted() -> None:
    """They include flags of the engine, in both forms."""
    args = ["--max-model-len", "8192", "--kv-cache-dtype=fp8", "--hf-overrides", '{"a": 1}']
    config = make_config({"models": [MODEL | {"args": args}]}, "mill.toml")
    assert list(config.models[0].args) == args


def test_every_mistake_is_reported_at_once() -> None:
    """A file with three mistakes is mended in one go."""
    wrong = MODEL | {"gpu": "v100", "max_workers": 0}
    assert refusal(nmae="mill", models=[wrong]).splitlines() == [
        f'mill.toml: models[1].gpu is "v100"; it can be {GPU_NAMES}.',
        "mill.toml: models[1].max_workers is 0; it must be 1 or more.",
        "mill.toml: nmae is not a known key.",
    ]


def test_the_file_of_the_project_is_the_default() -> None:
    """All keys in infra/config.toml except the models have their default values."""
    config = read_config(DEFAULT_PATH)
    assert config == Config(models=config.models)
    (model,) = config.models
    assert model.name == "tidemill-demo"
    assert config.fleet_name(model) == "tidemill-tidemill-demo"
    assert config.fleets_path == "/tidemill/tidemill/fleets"


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("small", "small"),
        ("Qwen/Qwen3-0.6B", "qwen-qwen3-0-6b"),
        ("a--b..c/", "a-b-c"),
        ("a" * 39 + "/b", "a" * 39),
    ],
)
def test_a_model_has_a_name_for_aws(name: str, slug: str) -> None:
    """Small letters, digits and single dashes, 40 of them at most."""
    config = make_config({"models": [MODEL | {"name": name}]}, "mill.toml")
    assert config.models[0].slug == slug


def test_whole_numbers_are_prices_too() -> None:
    """A price of 4 is written as 4."""
    config = make_config({"models": [MODEL | {"gpu_hour_price": 4}]}, "mill.toml")
    assert config.models[0].gpu_hour_price == 4.0


def test_a_network_may_have_the_addresses_that_a_company_has_left() -> None:
    """Shared address space (RFC 6598) is allowed, too."""
    config = make_config({"models": [MODEL], "network": {"cidr": "100.64.16.0/20"}}, "mill.toml")
    assert config.network.cidr == "100.64.16.0/20"


def test_endpoints_may_stand_in_every_zone_that_is_named() -> None:
    """A network with its own zones may have any number of them."""
    zones = ["eu-west-1a", "eu-west-1b", "eu-west-1c"]
    network = {"kind": "isolated", "zones": zones, "endpoint_zones": 3}
    config = make_config({"models": [MODEL], "network": network}, "mill.toml")
    assert config.network.endpoint_zones == 3


@pytest.mark.parametrize(
    ("differing", "zones"),
    [
        ({}, ("eu-west-1a", "eu-west-1b", "eu-west-1c")),
        ({"network": "isolated"}, ("eu-west-1a", "eu-west-1b", "eu-west-1c")),
        ({"network": {"zones": ["eu-west-1b"]}}, ("eu-west-1b",)),
        ({"network": EXISTING}, ()),
        ({"compute": "sagemaker"}, ()),
    ],
)
def test_a_network_has_the_zones_of_its_region(
    differing: dict[str, Any], zones: tuple[str, ...]
) -> None:
    """The configuration may name others, or the network may exist already."""
    config = make_config({"models": [MODEL]} | differing, "mill.toml")
    named = with_zones(config, [f"eu-west-1{letter}" for letter in "abc"], "zones")
    assert named.network.zones == zones
    assert named.network.kind == config.network.kind
    assert with_zones(config, [], "zones") is config


def test_a_network_has_no_more_zones_than_room_for_subnets() -> None:
    """A region may have more, which is not a mistake of the user."""
    config = make_config({"models": [MODEL]}, "mill.toml")
    named = with_zones(config, [f"eu-west-1{letter}" for letter in "abcdefgh"], "zones")
    assert named.network.zones == tuple(f"eu-west-1{letter}" for letter in "abcdef")


@pytest.mark.parametrize(
    ("content", "start"),
    [
        (None, "cannot be read: No such file or directory."),
        (b"name = mill\n", "is not TOML: "),
        (b'name = "\xff"\n', "is not TOML: "),
    ],
)
def test_an_unreadable_file_is_reported(tmp_path: Path, content: bytes | None, start: str) -> None:
    """One sentence names the file, whatever is wrong with it as a whole."""
    path = tmp_path / "mill.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigRefused) as refused:
        read_config(path)
    assert str(refused.value).startswith(f"{path} {start}")
    assert str(refused.value).endswith(".")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param(
            None,
            "{path} cannot be read: No such file or directory.",
            marks=pytest.mark.long,
        ),
        ('compute = "lambda"', "{path}: compute is 'lambda'; it can be 'managed-instances', "),
    ],
)
def test_the_app_ends_with_the_sentence(tmp_path: Path, content: str | None, sentence: str) -> None:
    """`cdk` shows what is wrong and no traceback, and has nothing to deploy.

    Nor does the CDK's runtime warn about Node.js, whichever runs it from 20 on.
    """
    path = tmp_path / "mill.toml"
    if content is not None:
        models = '[[models]]\nname = "small"\ngpu = "l4"\n'
        path.write_text(f"{content}\n{models}", encoding="utf-8")
    environment = {
        "CDK_CONTEXT_JSON": f'{{"config": "{path}"}}',
        "CDK_OUTDIR": str(tmp_path / "out"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "infra.app"],
        cwd=ROOT,
        env={name: os.environ[name] for name in os.environ if not name.startswith("JSII_SILENCE")}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(sentence.format(path=path))
    assert len(done.stderr.splitlines()) == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_more_names_of_the_only_model_can_be_typed() -> None:
    """Its own name among them changes nothing; with two models it would be ambiguous."""
    config = make_config({"models": [MODEL | {"aliases": ["gpt"]}]}, "mill.toml")
    found = with_aliases(config, ("small", "*", "gpt"), "--served-model-name")
    assert found.models[0].aliases == ("gpt", "*")
    assert found.retention == config.retention
    assert with_aliases(config, (), "") is config
    two = make_config({"models": [MODEL, MODEL | {"name": "b"}]}, "mill.toml")
    with pytest.raises(
        ConfigRefused, match="--served-model-name: there are 2 models; set `aliases` in"
    ):
        with_aliases(two, ("gpt",), "--served-model-name")


def test_the_only_model_can_have_another_name() -> None:
    """One of several keeps its own, and a name that is none is refused."""
    config = make_config({"models": [MODEL | {"aliases": ["gpt"]}]}, "mill.toml")
    [model] = with_name(config, "llama-8b", "--model").models
    assert (model.name, model.aliases) == ("llama-8b", ("gpt",))
    assert with_name(config, "", "--model") is config
    two = make_config({"models": [MODEL, MODEL | {"name": "b"}]}, "mill.toml")
    assert with_name(two, "llama-8b", "--model") is two
    with pytest.raises(ConfigRefused, match="a model's name, such as"):
        with_name(config, "my model", "--served-model-name")

"""Quotas of an account: for GPUs, where a new account has 0, and Lambda's concurrency.

Other machines of the account count, too: less of a quota may be left than reported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from botocore.exceptions import ClientError

from infra.api.concurrency import MAX_RUNS, runs_of_queues
from infra.config import Config, Model
from infra.gpus import GPUS, num_vcpus
from infra.ops.preflight.account import NotReady
from infra.ops.preflight.concurrency import account_concurrency

# By the first letter of the types and whether they are Spot. P5 had a separate Spot quota in some
# accounts: the larger of the two counts.
EC2_CODES: Final[Mapping[tuple[str, bool], tuple[str, ...]]] = {
    ("g", False): ("L-DB2E81BA",),
    ("g", True): ("L-3819A6DF",),
    ("p", False): ("L-417A185B",),
    ("p", True): ("L-7212CCBC", "L-C4BD4855"),
}
_CONCURRENCY_CODE: Final = "L-B99A9384"
# The default of older accounts; a new account gets it on request.
_USUAL_CONCURRENCY: Final = 1000
_CONSOLES: Final = {"us-gov-": "amazonaws-us-gov.com", "cn-": "amazonaws.cn"}


@dataclass(frozen=True, slots=True)
class Demand:
    """Share of a quota that workers of some models need; `per_worker` is by the model's name.

    `value` is the account's quota, `link` the page on which to request an increase.
    """

    quota: str
    value: int
    unit: str
    per_worker: Mapping[str, int]
    max_workers: Mapping[str, int]
    link: str

    @property
    def total(self) -> int:
        """Return the demand of all workers together."""
        return sum(need * self.max_workers[name] for name, need in self.per_worker.items())

    @property
    def idle(self) -> list[str]:
        """Return the models of which not even one worker can start."""
        return [name for name, need in self.per_worker.items() if need > self.value]


def check_gpu_quotas(config: Config, quotas: Any) -> Iterator[str]:
    """Yield sentences on quotas with room for fewer workers than planned; NotReady for none.

    `quotas` is a boto3 client of Service Quotas.
    """
    find = _sagemaker_demands if config.compute == "sagemaker" else _ec2_demands
    refused = []
    for demand in find(config, quotas):
        if demand.idle:
            refused.append(_refusal(demand))
        elif demand.total > demand.value:
            yield _shortfall(demand)
    if refused:
        raise NotReady("\n".join(refused))


def check_concurrency(lambda_: Any) -> Iterator[str]:
    """Yield a warning if the account's Lambda concurrency is below the queues' maximum.

    It stops no deployment: messages wait, and come again.
    """
    limit = account_concurrency(lambda_)
    runs, wanted = sum(runs_of_queues(limit).values()), sum(MAX_RUNS.values())
    if runs < wanted:
        link = quota_link(lambda_.meta.region_name, "lambda", _CONCURRENCY_CODE)
        yield (
            f"The Lambda concurrency limit of this account is {limit}: the queues of this "
            f"deployment get {runs} instead of {wanted}, so files are read and finished more "
            "slowly, and API calls above the limit get a 503. Request "
            f"{_USUAL_CONCURRENCY}, and deploy again once it is granted: {link}"
        )


def quota_link(region: str, service: str, code: str) -> str:
    """Return the console page of a quota, on which an increase can be requested."""
    host = next(
        (host for start, host in _CONSOLES.items() if region.startswith(start)),
        "aws.amazon.com",
    )
    return f"https://{region}.console.{host}/servicequotas/home/services/{service}/quotas/{code}"


def _refusal(demand: Demand) -> str:
    return (
        f'The quota "{demand.quota}" is {demand.value} {demand.unit}, but one worker of '
        f"{', '.join(demand.idle)} needs {max(demand.per_worker[name] for name in demand.idle)}: "
        f"none would start. Request {demand.total}: {demand.link}"
    )


def _shortfall(demand: Demand) -> str:
    shares = " or ".join(
        f"{demand.value // need} of {name}" for name, need in demand.per_worker.items()
    )
    return (
        f'The quota "{demand.quota}" is {demand.value} {demand.unit}, but all workers need '
        f"{demand.total}: only {shares} can run. Request {demand.total}: {demand.link}"
    )


def _ec2_demands(config: Config, quotas: Any) -> Iterator[Demand]:
    """Yield a demand per family of machines, in vCPUs of the smallest suitable ones."""
    families: dict[tuple[str, bool], list[Model]] = {}
    for model in config.models:
        capacity = config.capacity_of(model)
        if capacity != "reserved":  # an existing reservation does not count against the quota
            letter = GPUS[model.gpu].families[0][0]
            families.setdefault((letter, capacity == "spot"), []).append(model)
    for family, models in families.items():
        known = [
            found
            for code in EC2_CODES[family]
            if (found := _quota("ec2", code, quotas)) is not None
        ]
        if known:
            quota = max(known, key=lambda each: each["Value"])
            smallest = {model.name: num_vcpus(model.machines[0]) for model in models}
            yield Demand(
                quota=quota["QuotaName"],
                value=int(quota["Value"]),
                unit="vCPUs",
                per_worker=smallest,
                max_workers={model.name: model.max_workers for model in models},
                link=_link(quota, quotas),
            )


def _sagemaker_demands(config: Config, quotas: Any) -> Iterator[Demand]:
    """Yield a demand per model, in machines of all types that its jobs may use."""
    known = _sagemaker_quotas(quotas)
    for model in config.models:
        is_spot = config.capacity_of(model) == "spot"
        usage = "for spot training job usage" if is_spot else "for training job usage"
        types = model.machines
        found = [known[name] for each in types if (name := f"ml.{each} {usage}") in known]
        if found:
            total = sum(int(quota["Value"]) for quota in found)
            yield Demand(
                quota=found[0]["QuotaName"],
                value=total,
                unit="machines",
                per_worker={model.name: 1},
                max_workers={model.name: model.max_workers},
                link=_link(found[0], quotas),
            )


def _link(quota: Mapping[str, Any], quotas: Any) -> str:
    return quota_link(quotas.meta.region_name, quota["ServiceCode"], quota["QuotaCode"])


def _quota(service: str, code: str, quotas: Any) -> dict[str, Any] | None:
    """Return a quota of the account, else AWS's default, or None."""
    for ask in (quotas.get_service_quota, quotas.get_aws_default_service_quota):
        try:
            found: dict[str, Any] = ask(ServiceCode=service, QuotaCode=code)["Quota"]
        except ClientError as exc:
            if exc.response["Error"]["Code"] != "NoSuchResourceException":
                raise
        else:
            return found
    return None


def _sagemaker_quotas(quotas: Any) -> dict[str, dict[str, Any]]:
    """Return the quotas of training jobs by name, the account's own before AWS's defaults."""
    return {
        quota["QuotaName"]: quota
        for operation in ("list_aws_default_service_quotas", "list_service_quotas")
        for page in quotas.get_paginator(operation).paginate(
            ServiceCode="sagemaker", PaginationConfig={"PageSize": 100}
        )
        for quota in page["Quotas"]
        if quota["QuotaName"].endswith("training job usage")
    }

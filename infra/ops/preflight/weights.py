"""Weights of models: their region, their KMS key, and whether they are uploaded yet."""

from __future__ import annotations

import sys

from infra.config import Config
from infra.ops.preflight.account import SHORT_TIMEOUTS, NotReady
from tidemill.handler.aws.sync import Aws, aws_client
from tidemill.handler.worker.weights.manifest import (
    Location,
    WeightsDenied,
    WeightsRefused,
    check_region,
    find_weights,
)


def check_weights(config: Config) -> None:
    """Raise NotReady for weights that workers would refuse or could not read; print missing files.

    Weights that the caller may not read are skipped, because workers have separate permissions.
    """
    aws = Aws(lambda service, config: aws_client(service, config=config.merge(SHORT_TIMEOUTS)))
    here = aws.clients["s3"].meta.region_name
    for model in config.models:
        for prefix in model.prefixes:
            location = Location.parse(prefix)
            try:
                aws.run(check_region(location, model.weights_region or here))
                _check_key(aws, location, model.weights_key)
            except WeightsDenied:
                continue
            except WeightsRefused as exc:
                raise NotReady(f"{model.name}: {exc}.") from exc


def _check_key(aws: Aws, location: Location, key: str) -> None:
    """Raise NotReady for weights under a KMS key other than the configured one."""
    try:
        found = aws.run(find_weights(location))
    except WeightsDenied:
        raise
    except WeightsRefused as exc:  # they may be uploaded later
        sys.stdout.write(f"not uploaded yet: {exc}; workers exit until it is\n")
        return
    largest = max(found.files, key=lambda file: file.num_bytes)
    largest_object = {"Bucket": location.bucket, "Key": location.prefix + largest.name}
    head = aws.clients["s3"].head_object(**largest_object)
    used = head.get("SSEKMSKeyId", "") if head.get("ServerSideEncryption", "") != "AES256" else ""
    if used and used != key:
        raise NotReady(
            f"{location} is encrypted with a KMS key that workers may not use: set its model's "
            f'weights_key = "{used}" (docs/reference/configuration.md).'
        )

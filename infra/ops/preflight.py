"""`python -m infra.ops.preflight`: says at once what would stop a deployment after minutes of work.

What it looks at: the configuration, the region and the credentials; with `--deploy` also whether an
image can be built here, whether the region has the machines, and where the weights are. It changes
nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from botocore.config import Config as ClientConfig
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 - theirs, which is no OSError
    HTTPClientError,
)

from infra.config import DEFAULT_PATH, Config, ConfigRefused, read_config
from infra.gpus import GPUS
from tidemill.handler.aws.sync import Aws, aws_client
from tidemill.handler.errors import AwsError
from tidemill.handler.worker.weights.manifest import (
    Location,
    WeightsDenied,
    WeightsRefused,
    check_region,
    find_weights,
)

_SHORT_TIMEOUTS = ClientConfig(connect_timeout=3, read_timeout=5, retries={"total_max_attempts": 2})
_BUILDER_SECONDS = 30
# Without one the CDK would go to us-east-1 and say so to nobody.
_NO_REGION = "No AWS region is set: export AWS_REGION=…, or set one in your AWS profile."


class NotReady(Exception):
    """Something that a deployment needs is missing; the message says what, and where it is from."""


def check_account(image: str = "") -> str:
    """Return where a deployment would go to and as whom; raises NotReady.

    An `image` that its workers are to have must be in the same region: they reach no other.
    """
    missing = []
    try:
        sts = aws_client("sts", config=_SHORT_TIMEOUTS)
        region = sts.meta.region_name
        if region == "aws-global":
            missing.append(_NO_REGION)
        elif image and f".dkr.ecr.{region}." not in image:
            missing.append(f"Workers in {region} cannot reach {image}: copy it to that region.")
        found = sts.get_caller_identity()
    except (ConnectionError, HTTPClientError) as exc:
        missing.append(f"AWS cannot be reached: {exc}")
    except (BotoCoreError, ClientError, ValueError) as exc:
        missing.append(
            f"AWS does not know you: {str(exc).rstrip('.')}. Credentials are those of the aws "
            "command line: `aws sts get-caller-identity` should answer."
        )
    if missing:
        raise NotReady("\n".join(missing))
    return f"AWS account {found['Account']}, {region}, as {found['Arn']}"


def check_builder(environment: Mapping[str, str]) -> None:
    """Raise NotReady unless what the CDK builds images with is here and answers."""
    command = environment.get("CDK_DOCKER") or "docker"
    path = shutil.which(command, path=environment.get("PATH", ""))
    if path is None:
        raise NotReady(
            f"The workers' image is built here, and there is no `{command}`: install Docker, or "
            "another builder of its kind and name it (export CDK_DOCKER=finch), or give an `image` "
            "that is built elsewhere (docs/deploy.md)."
        )
    try:
        said = subprocess.run(  # noqa: S603 - what the CDK is about to run
            [path, "info"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_BUILDER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NotReady(f"`{command} info` does not answer: {exc}. Is it started?") from exc
    if said.returncode:
        words = (said.stderr.strip() or said.stdout.strip()).splitlines()[-1:]
        raise NotReady(f"`{command} info` fails: {' '.join(words)} Is it started?")


def check_machines(config: Config) -> None:
    """Raise NotReady for a GPU that no machine of the region has; who may not ask is not told.

    What SageMaker has it tells nobody before a job is asked for.
    """
    if config.compute == "sagemaker":
        return
    ec2 = aws_client("ec2", config=_SHORT_TIMEOUTS)
    for gpu in dict.fromkeys(model.gpu for model in config.models):
        families = GPUS[gpu].families
        types = [*families, *chain(*GPUS[gpu].instances.values())]
        offered = ec2.describe_instance_type_offerings(
            Filters=[{"Name": "instance-type", "Values": types}]
        )
        if not offered["InstanceTypeOfferings"]:
            raise NotReady(
                f"No machine in {ec2.meta.region_name} has the GPU {gpu} ({', '.join(families)}): "
                "take another region, or another `gpu` (docs/deploy.md)."
            )


def check_weights(config: Config) -> None:
    """Raise NotReady for weights that workers would refuse or could not read; print what lacks.

    What whoever deploys may not look at is not told: workers have rights of their own.
    """
    aws = Aws(lambda service, config: aws_client(service, config=config.merge(_SHORT_TIMEOUTS)))
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
    """Raise NotReady for weights under another key of KMS than the configuration has."""
    try:
        found = aws.run(find_weights(location))
    except WeightsDenied:
        raise
    except WeightsRefused as exc:  # they may come yet
        sys.stdout.write(f"not there yet: {exc}; workers end until it is\n")
        return
    largest = max(found.files, key=lambda file: file.num_bytes)
    asked = {"Bucket": location.bucket, "Key": location.prefix + largest.name}
    said = aws.clients["s3"].head_object(**asked)
    used = said.get("SSEKMSKeyId", "") if said.get("ServerSideEncryption", "") != "AES256" else ""
    if used and used != key:
        raise NotReady(
            f"{location} is encrypted by a key of KMS, which workers may use where its model names "
            f'it: weights_key = "{used}" (docs/deploy.md).'
        )


def problems(path: Path, *, deploys: bool) -> Iterator[str]:
    """Yield sentences for each thing that is missing; print what a deployment would go to.

    Of a configuration that is wrong nothing else is looked at: it may be for another account.
    """
    try:
        config = read_config(path)
    except ConfigRefused as exc:
        yield str(exc)
        return
    try:
        sys.stdout.write(f"{check_account(config.image)}\n")
        if deploys:
            with suppress(BotoCoreError, ClientError):
                check_machines(config)
            with suppress(BotoCoreError, ClientError, AwsError):
                check_weights(config)
    except NotReady as exc:
        yield str(exc)
    if deploys and not config.image:
        try:
            check_builder(os.environ)
        except NotReady as exc:
            yield str(exc)


def main(arguments: Sequence[str] | None = None) -> int:
    """Look at what there is; 0 when nothing is missing."""
    parser = argparse.ArgumentParser(prog="python -m infra.ops.preflight", description=__doc__)
    parser.add_argument("--config", type=Path, default=DEFAULT_PATH)
    parser.add_argument("--deploy", action="store_true", help="look at all that is to be made")
    parsed = parser.parse_args(arguments)
    found = list(problems(parsed.config, deploys=parsed.deploy))
    sys.stderr.write("".join(f"{words}\n" for words in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""The Lambdas: one bundle, and for each a role with only the permissions of its handler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from aws_cdk import Duration, Size, Stack
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from infra.bundle import Bundle
from infra.data.stack import DataStack
from infra.monitoring import log_group
from infra.permissions import service_principal, use_key
from tidemill.handler.observability import NAMESPACE, Metric


class Function(Construct):
    """A Lambda whose handler is in `handler/lambdas/<module>.py`; logs go to its own group."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        module: str,
        bundle: Bundle,
        data: DataStack,
        environment: Mapping[str, str],
        statements: Iterable[iam.PolicyStatement],
        memory_mib: int,
        timeout: Duration,
        scratch: Size | None = None,
        layers: Sequence[lambda_.ILayerVersion] = (),
    ) -> None:
        super().__init__(scope, construct_id)
        self._module = module
        config, granted = data.config, list(statements)
        self.logs = log_group(self, "Logs", days=config.retention.log_days, key=data.key)
        self.role = iam.Role(self, "Role", assumed_by=service_principal(Stack.of(self), "lambda"))
        self.logs.grant_write(self.role)
        for statement in (*granted, *use_key(data, granted)):
            self.role.add_to_policy(statement)
        self.function = lambda_.Function(
            self,
            "Function",
            code=bundle.code,
            layers=list(layers),
            runtime=bundle.runtime,
            architecture=bundle.architecture,
            handler=f"tidemill.handler.lambdas.{module}.handler",
            role=self.role,
            log_group=self.logs,
            logging_format=lambda_.LoggingFormat.JSON,
            environment=environment,
            memory_size=memory_mib,
            timeout=timeout,
            ephemeral_storage_size=scratch,
            tracing=lambda_.Tracing.ACTIVE if config.tracing else None,
            description=f"{config.name}: {module}",
        )

    def metric(self, metric: Metric, period: Duration) -> cloudwatch.Metric:
        """Return the sum of a metric that the handler emits without a model dimension."""
        return cloudwatch.Metric(
            namespace=NAMESPACE,
            metric_name=metric.value,
            dimensions_map={"service": self._module},
            statistic="Sum",
            period=period,
        )

"""The API inside a VPC: a private REST API, because HTTP APIs cannot be private.

One Lambda serves every path, as in `infra.api.http_api`; `handler.lambdas.rest_event` converts the
gateway's events to those of an HTTP API. A REST API puts a stage before every path, so each first
part of the API's own paths is a stage, and clients use the usual paths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

from aws_cdk import Duration, Stack
from aws_cdk import aws_apigateway as apigateway
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from infra.api.http_api import BURST, REQUESTS_PER_SECOND, ApiMetric

STAGES: Final = ("v1", "dashboard", "health")
# Methods and paths within a stage that need no signature, as in `handler/api/open_paths.py`.
_PUBLIC: Final = tuple(
    path
    for verb in ("GET", "HEAD")
    for path in (f"dashboard/{verb}/", f"dashboard/{verb}/assets/*", f"health/{verb}/")
)
_METRICS: Final[Mapping[ApiMetric, str]] = {
    "latency": "Latency",
    "requests": "Count",
    "4xx": "4XXError",
    "5xx": "5XXError",
}
# The gateway's own error responses in OpenAI's format: its message is a JSON string.
_ERROR: Final = '{{"error":{{"message":{},"type":"{}","param":null,"code":{}}}}}'
_MESSAGE: Final = "$context.error.messageString"
_REFUSALS: Final[Mapping[str, Mapping[str, Any]]] = {
    "THROTTLED": {
        "status_code": "429",
        "response_templates": {
            "application/json": _ERROR.format(
                '"Too many requests at once."', "rate_limit_error", '"rate_limit_exceeded"'
            )
        },
        "response_parameters": {"gatewayresponse.header.Retry-After": "'1'"},
    },
    "DEFAULT_4XX": {
        "response_templates": {
            "application/json": _ERROR.format(_MESSAGE, "invalid_request_error", "null")
        },
    },
    "DEFAULT_5XX": {
        "response_templates": {"application/json": _ERROR.format(_MESSAGE, "server_error", "null")},
    },
}


class PrivateApi(Construct):
    """Routes everything from the endpoints to `api`, which checks keys.

    With `signed`, only IAM-signed requests pass. There is no access log: a REST API writes one with
    a role of the whole account. The function logs each request instead.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        api: lambda_.IFunction,
        name: str,
        signed: bool,
        endpoint_ids: Sequence[str],
        tracing: bool,
    ) -> None:
        super().__init__(scope, construct_id)
        self._name, self._endpoint_ids = name, endpoint_ids
        self.api = apigateway.CfnRestApi(
            self,
            "Api",
            name=name,
            # Otherwise a form's bytes would be read as text.
            binary_media_types=["*/*"],
            endpoint_configuration=apigateway.CfnRestApi.EndpointConfigurationProperty(
                types=["PRIVATE"], vpc_endpoint_ids=list(endpoint_ids)
            ),
            policy=_policy(endpoint_ids, signed=signed),
        )
        self._methods = self._add_methods(api, signed=signed)
        api.add_permission(
            "Invoke",
            principal=iam.ServicePrincipal("apigateway.amazonaws.com"),
            source_arn=Stack.of(self).format_arn(
                service="execute-api", resource=self.api.ref, resource_name="*"
            ),
        )
        deployment = self._add_deployment()
        for stage in STAGES:
            apigateway.CfnStage(
                self,
                stage.capitalize(),
                rest_api_id=self.api.ref,
                deployment_id=deployment.ref,
                stage_name=stage,
                tracing_enabled=tracing,
                method_settings=[
                    apigateway.CfnStage.MethodSettingProperty(
                        http_method="*",
                        resource_path="/*",
                        throttling_rate_limit=REQUESTS_PER_SECOND,
                        throttling_burst_limit=BURST,
                    )
                ],
            )

    def _add_methods(self, api: lambda_.IFunction, *, signed: bool) -> list[apigateway.CfnMethod]:
        """Add every path within a stage; pages never need a signature."""
        stack = Stack.of(self)
        integration = apigateway.CfnMethod.IntegrationProperty(
            type="AWS_PROXY",
            integration_http_method="POST",
            uri=f"arn:{stack.partition}:apigateway:{stack.region}:lambda:path/2015-03-31/functions/"
            f"{api.function_arn}/invocations",
        )
        root = self.api.attr_root_resource_id
        below = self._add_resource("Below", root, "{proxy+}")
        if signed:
            assets = self._add_resource("Assets", root, "assets")
            files = self._add_resource("Files", assets, "{proxy+}")
            wanted = [(of, verb, "NONE") for of in (root, files) for verb in ("GET", "HEAD")]
            wanted.append((below, "ANY", "AWS_IAM"))
        else:
            wanted = [(of, "ANY", "NONE") for of in (root, below)]
        return [
            apigateway.CfnMethod(
                self,
                f"Method{number}",
                rest_api_id=self.api.ref,
                resource_id=resource_id,
                http_method=verb,
                authorization_type=authorization,
                integration=integration,
            )
            for number, (resource_id, verb, authorization) in enumerate(wanted, start=1)
        ]

    def _add_resource(self, construct_id: str, parent_id: str, path_part: str) -> str:
        return apigateway.CfnResource(
            self,
            construct_id,
            rest_api_id=self.api.ref,
            parent_id=parent_id,
            path_part=path_part,
        ).ref

    def _add_deployment(self) -> apigateway.CfnDeployment:
        """Add the snapshot for the stages, and error responses in OpenAI's format."""
        refusals = [
            apigateway.CfnGatewayResponse(
                self,
                kind.title().replace("_", ""),
                rest_api_id=self.api.ref,
                response_type=kind,
                **answer,
            )
            for kind, answer in _REFUSALS.items()
        ]
        # A snapshot is immutable: a change of the API creates a new one.
        methods = [
            [it.resource_id, it.http_method, it.authorization_type, it.integration]
            for it in self._methods
        ]
        parts = [methods, self.api.policy, self.api.binary_media_types, _REFUSALS]
        described = json.dumps(Stack.of(self).resolve(parts), sort_keys=True)
        deployment = apigateway.CfnDeployment(
            self,
            f"Deployment{sha256(described.encode()).hexdigest()[:8]}",
            rest_api_id=self.api.ref,
        )
        deployment.node.add_dependency(*refusals, *self._methods)
        return deployment

    @property
    def url(self) -> str:
        """The address by the first endpoint: a public DNS name of a private address in its VPC."""
        stack = Stack.of(self)
        host = f"{self.api.ref}-{self._endpoint_ids[0]}.execute-api.{stack.region}"
        return f"https://{host}.{stack.url_suffix}"

    def metric(
        self, name: ApiMetric, *, period: Duration, statistic: str, label: str | None = None
    ) -> cloudwatch.Metric:
        """Return a metric of all requests."""
        return cloudwatch.Metric(
            namespace="AWS/ApiGateway",
            metric_name=_METRICS[name],
            dimensions_map={"ApiName": self._name},
            period=period,
            statistic=statistic,
            label=label,
        )


def _policy(endpoint_ids: Sequence[str], *, signed: bool) -> iam.PolicyDocument:
    """Return the policy of the API: it can be reached through the endpoints only.

    For signed requests it allows pages only: callers' own policies allow the rest.
    """
    paths = _PUBLIC if signed else ("*",)
    everybody = [iam.StarPrincipal()]
    return iam.PolicyDocument(
        statements=[
            iam.PolicyStatement(
                principals=everybody,
                actions=["execute-api:Invoke"],
                resources=[f"execute-api:/{path}" for path in paths],
            ),
            iam.PolicyStatement(
                effect=iam.Effect.DENY,
                principals=everybody,
                actions=["execute-api:Invoke"],
                resources=["execute-api:/*"],
                conditions={"StringNotEquals": {"aws:SourceVpce": list(endpoint_ids)}},
            ),
        ]
    )

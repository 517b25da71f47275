"""The API inside a VPC: a private REST API, as HTTP APIs have no such kind.

One Lambda is behind every path, as in `infra.api.http_api`; `handler.lambdas.rest_event` turns the
gateway's events into those of an HTTP API. A REST API has a stage before every path, so each first
part of the API's own paths is a stage, and clients see the paths that they know.
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
# By method and path behind a stage: what needs no signature, as in `handler/api/open_paths.py`.
_PUBLIC: Final = ("dashboard/GET/", "dashboard/GET/assets/*", "health/GET/")
_METRICS: Final[Mapping[ApiMetric, str]] = {
    "latency": "Latency",
    "requests": "Count",
    "4xx": "4XXError",
    "5xx": "5XXError",
}
_BUSY: Final = {
    "error": {
        "message": "Too many requests at once.",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }
}


class PrivateApi(Construct):
    """Routes everything that comes through the endpoints to `api`, which knows keys.

    `signed` lets in what is signed with IAM alone. There is no access log: a REST API writes one by
    a role that belongs to the account. The function logs each request instead.
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
        body = _body(Stack.of(self), api, signed=signed)
        self.api = apigateway.CfnRestApi(
            self,
            "Api",
            name=name,
            body=body,
            # Else a form's bytes would be read as text.
            binary_media_types=["*/*"],
            endpoint_configuration=apigateway.CfnRestApi.EndpointConfigurationProperty(
                types=["PRIVATE"], vpc_endpoint_ids=list(endpoint_ids)
            ),
            policy=_policy(endpoint_ids, signed=signed),
        )
        api.add_permission(
            "Invoke",
            principal=iam.ServicePrincipal("apigateway.amazonaws.com"),
            source_arn=Stack.of(self).format_arn(
                service="execute-api", resource=self.api.ref, resource_name="*"
            ),
        )
        # What is deployed stays as it is: a change of the API needs another deployment.
        described = json.dumps(Stack.of(self).resolve([body, self.api.policy]), sort_keys=True)
        deployment = apigateway.CfnDeployment(
            self,
            f"Deployment{sha256(described.encode()).hexdigest()[:8]}",
            rest_api_id=self.api.ref,
        )
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

    @property
    def url(self) -> str:
        """The address by the first endpoint: a public name of an address in its VPC."""
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


def _body(stack: Stack, api: lambda_.IFunction, *, signed: bool) -> dict[str, Any]:
    """Return the API as OpenAPI: every path leads to the function, refusals have OpenAI's form."""
    uri = (
        f"arn:{stack.partition}:apigateway:{stack.region}:lambda:path/2015-03-31/functions/"
        f"{api.function_arn}/invocations"
    )
    method: dict[str, Any] = {
        "responses": {"default": {"description": "What the function answers"}},
        "x-amazon-apigateway-integration": {"type": "aws_proxy", "httpMethod": "POST", "uri": uri},
    }
    proxy = {"in": "path", "name": "proxy", "required": True, "schema": {"type": "string"}}
    behind = method | {"parameters": [proxy]}
    key = "x-amazon-apigateway-any-method"
    if signed:
        auth = {"x-amazon-apigateway-auth": {"type": "AWS_IAM"}}
        paths: dict[str, Any] = {
            "/": {"get": method, "head": method},
            "/assets/{proxy+}": {"get": behind, "head": behind},
            "/{proxy+}": {key: behind | auth},
        }
    else:
        paths = {"/": {key: method}, "/{proxy+}": {key: behind}}
    busy = {
        "statusCode": 429,
        "responseTemplates": {"application/json": json.dumps(_BUSY)},
        "responseParameters": {"gatewayresponse.header.Retry-After": "'1'"},
    }
    return {
        "openapi": "3.0.1",
        "info": {"title": "Tidemill", "version": "1"},
        "paths": paths,
        "x-amazon-apigateway-gateway-responses": {"THROTTLED": busy},
    }


def _policy(endpoint_ids: Sequence[str], *, signed: bool) -> iam.PolicyDocument:
    """Return the policy of the API: nobody gets in but through the endpoints.

    To those who sign it allows nothing but pages: what they may call their own policies say.
    """
    paths = _PUBLIC if signed else ("*",)
    everybody = [iam.AnyPrincipal()]
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

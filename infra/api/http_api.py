"""The HTTP API: one Lambda behind every route, which itself authenticates keys."""

from __future__ import annotations

import json

from aws_cdk import aws_apigatewayv2 as gateway
from aws_cdk import aws_apigatewayv2_authorizers as authorizers
from aws_cdk import aws_apigatewayv2_integrations as integrations
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs
from constructs import Construct

# One person with a runaway loop must not use up the account's Lambdas.
# Of all tenants together, before anybody is asked who they are; each has limits of its own.
_REQUESTS_PER_SECOND, _BURST = 500, 1000
# Of each page that needs no key: a flood of one is stopped before it reaches the Lambda.
_PUBLIC_REQUESTS_PER_SECOND, _PUBLIC_BURST = 50, 100
# What needs no signature; handler/api/open_paths.py has the same list. None of it holds anything
# of a tenant.
_PUBLIC = ("/", "/health", "/openapi.json", "/dashboard", "/dashboard/assets/{proxy+}")
# What is logged of a request: never its headers or query, where keys and signatures may stand. The
# function's log has its tenant and the key's id under the same request's id.
_LOGGED = {
    "request_id": "$context.requestId",
    "method": "$context.httpMethod",
    "route": "$context.routeKey",
    "path": "$context.path",
    "status": "$context.status",
    "latency_ms": "$context.responseLatency",
    "error": "$context.error.message",
}


class HttpApi(Construct):
    """Routes everything to `api`, which knows keys; `signed` lets in what is signed with IAM alone.

    The gateway's own refusals have a form that no client of OpenAI's reads, and it cannot be
    changed: so the gateway refuses for keys nothing.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        api: lambda_.IFunction,
        signed: bool,
        access_logs: logs.ILogGroup,
    ) -> None:
        super().__init__(scope, construct_id)
        self.api = gateway.HttpApi(self, "Api", create_default_stage=False)
        self.stage = gateway.HttpStage(
            self,
            "Stage",
            http_api=self.api,
            stage_name="$default",
            auto_deploy=True,
            throttle=gateway.ThrottleSettings(rate_limit=_REQUESTS_PER_SECOND, burst_limit=_BURST),
        )
        stage = self.stage.node.default_child
        assert isinstance(stage, gateway.CfnStage)
        stage.access_log_settings = gateway.CfnStage.AccessLogSettingsProperty(
            destination_arn=access_logs.log_group_arn, format=json.dumps(_LOGGED)
        )
        integration = integrations.HttpLambdaIntegration("Lambda", api)
        methods = [gateway.HttpMethod.GET, gateway.HttpMethod.HEAD]
        for path in _PUBLIC:
            for route in self.api.add_routes(path=path, methods=methods, integration=integration):
                # It must be there before it can have settings.
                assert isinstance(route.node.default_child, gateway.CfnRoute)
                stage.add_dependency(route.node.default_child)
        stage.route_settings = {
            f"{method.value} {path}": {
                "ThrottlingRateLimit": _PUBLIC_REQUESTS_PER_SECOND,
                "ThrottlingBurstLimit": _PUBLIC_BURST,
            }
            for method in methods
            for path in _PUBLIC
        }
        self.api.add_routes(
            path="/{proxy+}",
            methods=[gateway.HttpMethod.ANY],
            integration=integration,
            authorizer=authorizers.HttpIamAuthorizer() if signed else None,
        )

    @property
    def url(self) -> str:
        """The address of the API, as `base_url` of the OpenAI SDK wants it but for `/v1`."""
        return self.api.api_endpoint

"""The HTTP API: one Lambda behind every route, and few of them that need no key."""

from __future__ import annotations

import json

from aws_cdk import Duration
from aws_cdk import aws_apigatewayv2 as gateway
from aws_cdk import aws_apigatewayv2_authorizers as authorizers
from aws_cdk import aws_apigatewayv2_integrations as integrations
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs
from constructs import Construct

# One person with a runaway loop must not use up the account's Lambdas.
_REQUESTS_PER_SECOND, _BURST = 100, 200
# What needs no key; handler/api/public.py has the same list. None of it holds anything of a tenant.
_PUBLIC = ("/", "/health", "/openapi.json", "/dashboard", "/dashboard/assets/{proxy+}")
_AUTHORIZER_CACHE = Duration.minutes(1)
# What is logged of a request: never its headers or query, where keys and signatures may stand.
_LOGGED = {
    "request_id": "$context.requestId",
    "method": "$context.httpMethod",
    "route": "$context.routeKey",
    "path": "$context.path",
    "status": "$context.status",
    "latency_ms": "$context.responseLatency",
    "tenant": "$context.authorizer.tenant",
    "key_id": "$context.authorizer.key_id",
    "error": "$context.error.message",
}


class HttpApi(Construct):
    """Routes everything to `api`; `authorizer` knows keys, without one requests are signed."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        api: lambda_.IFunction,
        authorizer: lambda_.IFunction | None,
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
        for path in _PUBLIC:
            self.api.add_routes(
                path=path, methods=[gateway.HttpMethod.GET], integration=integration
            )
        self.api.add_routes(
            path="/{proxy+}",
            methods=[gateway.HttpMethod.ANY],
            integration=integration,
            authorizer=_keys(authorizer) if authorizer else authorizers.HttpIamAuthorizer(),
        )

    @property
    def url(self) -> str:
        """The address of the API, as `base_url` of the OpenAI SDK wants it but for `/v1`."""
        return self.api.api_endpoint


def _keys(authorizer: lambda_.IFunction) -> gateway.IHttpRouteAuthorizer:
    return authorizers.HttpLambdaAuthorizer(
        "Keys",
        authorizer,
        identity_source=["$request.header.Authorization"],
        response_types=[authorizers.HttpLambdaResponseType.SIMPLE],
        # A revoked key is refused after this at the latest.
        results_cache_ttl=_AUTHORIZER_CACHE,
    )

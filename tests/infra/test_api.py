"""The Api stack: its functions, what calls them, and who is let in."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from infra import bundle
from infra.api.concurrency import MAX_RUNS, runs_of_queues
from infra.bundle import Bundle
from infra.config import make_config, with_concurrency
from infra.pip_target import Processor
from localstack.event_source_mapping import LocalLambdaContext
from tests.infra.compute.kinds import OIDC, SIGNED
from tests.infra.conftest import Synth
from tests.infra.reading import Deployment, Template
from tidemill.handler.api.open_paths import PUBLIC
from tidemill.handler.deployment import deployment as cached_deployment
from tidemill.handler.settings import Oidc, read_settings

FUNCTIONS = {
    "Control": "control",
    "Intake": "intake",
    "Reaper": "reaper",
    "DeadLetters": "dead_letters",
    "Api": "api",
}
PUBLIC_PATHS = {"/", "/health", "/openapi.json", "/dashboard", "/dashboard/assets/{proxy+}"}
PUBLIC_ROUTES = {f"{method} {path}" for method in ("GET", "HEAD") for path in PUBLIC_PATHS}
LAMBDA_MAX_SECONDS = 900
# An HTTP API answers for an integration that takes longer.
GATEWAY_SECONDS = 30


@pytest.fixture(scope="module")
def deployment(templates: dict[str, Template]) -> Deployment:
    """Return the deployment of infra/config.toml."""
    return Deployment(templates)


@pytest.fixture(scope="module")
def signed(synth: Synth) -> Deployment:
    """Return a deployment whose API takes requests that are signed with IAM."""
    return Deployment(synth(SIGNED))


@pytest.fixture(scope="module")
def functions(deployment: Deployment) -> dict[str, dict[str, Any]]:
    """Return the properties of the functions by their constructs' names."""
    found = deployment.properties("AWS::Lambda::Function")
    return {name.removesuffix("Function"): function for name, function in found.items()}


def only(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the one of what there is one of."""
    ((_, properties),) = found.items()
    return properties


# The functions


def test_there_are_no_functions_but_ours(functions: dict[str, dict[str, Any]]) -> None:
    """No construct has added a function."""
    assert set(functions) == set(FUNCTIONS)


@pytest.mark.parametrize(("name", "module"), FUNCTIONS.items())
def test_a_function_runs_a_handler_that_exists(
    functions: dict[str, dict[str, Any]], name: str, module: str
) -> None:
    """Lambda finds the function in the module, under the name of the service in logs."""
    function = functions[name]
    path, _, attribute = function["Handler"].rpartition(".")
    assert path == f"tidemill.handler.lambdas.{module}"
    assert callable(getattr(import_module(path), attribute))
    assert function["Environment"]["Variables"]["POWERTOOLS_SERVICE_NAME"] == module


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_runs_what_the_bundle_is_for(
    functions: dict[str, dict[str, Any]], name: str
) -> None:
    """All have the code, the Python and the processor of the one bundle."""
    function = functions[name]
    assert function["Runtime"] == "python3.13"
    assert function["Architectures"] == ["arm64"]
    assert function["Code"] == functions["Control"]["Code"]
    assert function["Role"] == f"{name}Role.Arn"


@pytest.mark.parametrize("machine", ["arm64", "x86_64"])
def test_functions_run_where_their_bundle_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: Processor
) -> None:
    """The functions have the processor and Python of the bundle, whichever Python builds it."""
    from aws_cdk import aws_lambda as lambda_

    for name in ("build", "build_tables_layer"):
        monkeypatch.setattr(bundle, name, lambda *_, **__: tmp_path)
    made = bundle.make_bundle(machine)
    assert made.architecture.name == machine
    assert made.runtime.name == "python3.13"
    assert made.runtime.family is lambda_.RuntimeFamily.PYTHON
    assert bundle.make_bundle(machine, python="3.12").runtime.name == "python3.12"


@pytest.mark.parametrize(
    ("name", "memory_mib", "seconds", "scratch_mib"),
    [
        ("Control", 1769, LAMBDA_MAX_SECONDS, None),
        ("Intake", 1769, LAMBDA_MAX_SECONDS, 4096),
        ("Reaper", 1769, LAMBDA_MAX_SECONDS, None),
        ("DeadLetters", 512, 60, None),
        ("Api", 512, GATEWAY_SECONDS - 1, None),
    ],
)
def test_a_function_has_room_and_time(
    functions: dict[str, dict[str, Any]],
    name: str,
    *,
    memory_mib: int,
    seconds: int,
    scratch_mib: int | None,
) -> None:
    """Intake has a whole vCPU and a disk for IDs; functions with waiting callers reply in time."""
    function = functions[name]
    assert function["MemorySize"] == memory_mib
    assert function["Timeout"] == seconds
    assert function.get("EphemeralStorage") == (scratch_mib and {"Size": scratch_mib})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_understands_its_environment(
    functions: dict[str, dict[str, Any]], name: str
) -> None:
    """The variables are settings that the handlers accept, and name the resources."""
    settings = read_settings(functions[name]["Environment"]["Variables"])
    assert settings.table == "BatchesTable"
    assert settings.bucket == "DropsBucket"
    assert settings.control_queue == "DoorbellsControl"
    assert settings.event_bus == "EventsBus"
    assert settings.work_queues == {"tidemill-demo": "DoorbellsWorktidemilldemo"}
    assert settings.fleets == "/tidemill/tidemill/fleets"
    assert settings.intake_queue == "DoorbellsIntake"
    assert settings.drops_queue == "DoorbellsDrops"
    assert not settings.drop_tenants
    assert settings.gpu_hour_prices == {"tidemill-demo": 0.8}
    assert settings.default_window == "24h"
    assert settings.keep_days == 90


def test_no_variable_goes_unread(functions: dict[str, dict[str, Any]]) -> None:
    """Every setting that a function is given is one that the handlers know."""
    for function in functions.values():
        variables = function["Environment"]["Variables"]
        known = {f"TIDEMILL_{name.upper()}" for name in type(read_settings(variables)).model_fields}
        assert set(variables) - known == {"POWERTOOLS_SERVICE_NAME"}


def test_models_that_no_environment_holds_are_refused(
    stub_bundle: Callable[[], Bundle],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error is one sentence, at synthesis: Lambda allows 4 KB, with each name three times."""
    from aws_cdk import App

    from infra import app as infra_app

    models = [
        {"name": f"Qwen/Qwen3-{number}B-Instruct", "gpu": "l4", "gpu_hour_price": 0.8}
        for number in range(10, 30)
    ]
    few = make_config({"models": models[:12]}, "")
    infra_app.add_stacks(App(outdir=str(tmp_path)), few, stub_bundle())
    path = tmp_path / "config.toml"
    path.write_text(f"models = [{', '.join(json.dumps(it).replace(':', '=') for it in models)}]")
    monkeypatch.setattr(infra_app, "make_bundle", lambda *_, **__: stub_bundle())
    monkeypatch.setattr(
        infra_app, "App", lambda: App(outdir=str(tmp_path), context={"config": str(path)})
    )
    assert infra_app.main() == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"{path}: 20 models are too many for one deployment: their settings")


def test_a_model_without_a_price_is_given_none(adjusted: Deployment) -> None:
    """Prices of zero are left out, as reports then leave out the cost."""
    variables = adjusted.properties("AWS::Lambda::Function")["ControlFunction"]["Environment"]
    assert read_settings(variables["Variables"]).gpu_hour_prices == {"Qwen/Qwen3-0.6B": 4.0}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_logs_are_lines_of_json_and_go(
    deployment: Deployment, functions: dict[str, dict[str, Any]], name: str
) -> None:
    """Each function logs to a separate group, for the configured number of days."""
    group = f"{name}Logs"
    assert functions[name]["LoggingConfig"] == {"LogFormat": "JSON", "LogGroup": group}
    assert deployment.properties("AWS::Logs::LogGroup")[group]["RetentionInDays"] == 30
    assert deployment.resources("AWS::Logs::LogGroup")[group]["DeletionPolicy"] == "Delete"


# What calls them


@pytest.mark.parametrize(
    ("name", "queue", "runs"),
    [
        ("Control", "DoorbellsControl", 50),
        ("Control", "DoorbellsDrops", 50),
        ("Intake", "DoorbellsIntake", 50),
        ("DeadLetters", "DoorbellsDeadLetters", 5),
    ],
)
def test_a_queue_calls_a_function_with_one_message(
    deployment: Deployment, name: str, queue: str, runs: int
) -> None:
    """A message at a time, which comes again alone when it was not dealt with."""
    (mapping,) = (
        found
        for found in deployment.properties("AWS::Lambda::EventSourceMapping").values()
        if found["EventSourceArn"] == f"{queue}.Arn"
    )
    assert mapping["FunctionName"] == f"{name}Function"
    assert mapping["BatchSize"] == 1
    assert mapping["FunctionResponseTypes"] == ["ReportBatchItemFailures"]
    assert mapping["ScalingConfig"] == {"MaximumConcurrency": runs}
    assert "MaximumBatchingWindowInSeconds" not in mapping


@pytest.mark.parametrize("limit", [10, 11, 50, 100, 193, 194, 1000])
def test_queues_leave_room_in_an_account_for_the_api_and_the_reaper(limit: int) -> None:
    """AWS takes 2 to 1,000 runs for a mapping, and throttles above the account's limit."""
    runs = runs_of_queues(limit)
    assert all(2 <= number <= 1000 for number in runs.values())
    assert sum(runs.values()) <= limit - 2
    assert (runs == MAX_RUNS) is (limit >= 194)


def test_mappings_follow_the_limit_of_the_account(adjusted: Deployment) -> None:
    """The limit comes from the configuration or, if that has none, from who calls the CDK."""
    unknown = make_config({"models": [{"name": "m", "gpu": "l4"}]}, "")
    config = with_concurrency(unknown, "10")
    assert config.lambda_concurrency == 10
    assert with_concurrency(config, "1000") == config
    assert with_concurrency(unknown, "") == unknown
    assert runs_of_queues(unknown.lambda_concurrency) == MAX_RUNS
    mappings = adjusted.properties("AWS::Lambda::EventSourceMapping").values()
    assert [each["ScalingConfig"]["MaximumConcurrency"] for each in mappings] == [2] * 4


def test_a_message_is_hidden_while_its_function_may_run(
    deployment: Deployment, functions: dict[str, dict[str, Any]]
) -> None:
    """Lambda takes no queue whose messages show again before the function's time is over."""
    mappings = deployment.properties("AWS::Lambda::EventSourceMapping")
    assert len(mappings) == 4
    for mapping in mappings.values():
        queue = mapping["EventSourceArn"].removesuffix(".Arn")
        visibility = deployment.properties("AWS::SQS::Queue")[queue]["VisibilityTimeout"]
        assert visibility > functions[mapping["FunctionName"].removesuffix("Function")]["Timeout"]


def test_the_reaper_is_called_every_minute(deployment: Deployment) -> None:
    """It also gets a daily event for a sweep. A failed call is reported, and not repeated later."""
    found = deployment.properties("AWS::Scheduler::Schedule").values()
    schedules = {schedule["ScheduleExpression"]: schedule for schedule in found}
    assert sorted(schedules) == ["rate(1 day)", "rate(1 minute)"]
    assert json.loads(schedules["rate(1 day)"]["Target"]["Input"]) == {"sweep": True}
    schedule = schedules["rate(1 minute)"]
    assert schedule["State"] == "ENABLED"
    assert schedule["FlexibleTimeWindow"] == {"Mode": "OFF"}
    assert schedule["Target"] == {
        "Arn": "ReaperFunction.Arn",
        "RoleArn": "ScheduleRole.Arn",
        "DeadLetterConfig": {"Arn": "DoorbellsUndeliverable.Arn"},
        "RetryPolicy": {"MaximumEventAgeInSeconds": 60, "MaximumRetryAttempts": 2},
    }


def test_no_run_of_the_reaper_is_made_up_for_later(deployment: Deployment) -> None:
    """By default Lambda retries an asynchronous run twice and holds it for six hours."""
    config = only(deployment.properties("AWS::Lambda::EventInvokeConfig"))
    assert config == {
        "FunctionName": "ReaperFunction",
        "Qualifier": "$LATEST",
        "MaximumEventAgeInSeconds": 60,
        "MaximumRetryAttempts": 0,
    }


# The HTTP API


def routes(deployment: Deployment) -> dict[str, dict[str, Any]]:
    """Return the routes of the API by method and path."""
    found = deployment.properties("AWS::ApiGatewayV2::Route").values()
    return {route["RouteKey"]: route for route in found}


def test_all_routes_lead_to_the_api(deployment: Deployment) -> None:
    """One function answers everything, in payload format 2.0."""
    integration = only(deployment.properties("AWS::ApiGatewayV2::Integration"))
    assert integration["IntegrationType"] == "AWS_PROXY"
    assert integration["IntegrationUri"] == "ApiFunction.Arn"
    assert integration["PayloadFormatVersion"] == "2.0"
    ((name, _),) = deployment.properties("AWS::ApiGatewayV2::Integration").items()
    assert set(routes(deployment)) == {*PUBLIC_ROUTES, "ANY /{proxy+}"}
    assert {route["Target"] for route in routes(deployment).values()} == {f"integrations/{name}"}


def test_the_api_looks_at_keys_and_the_gateway_at_signatures(
    deployment: Deployment, signed: Deployment
) -> None:
    """The gateway's own refusal of a key would be in a form that no client of OpenAI's reads."""
    public = dict.fromkeys(PUBLIC_ROUTES, "NONE")
    assert {key: route["AuthorizationType"] for key, route in routes(deployment).items()} == {
        **public,
        "ANY /{proxy+}": "NONE",
    }
    assert {key: route["AuthorizationType"] for key, route in routes(signed).items()} == {
        **public,
        "ANY /{proxy+}": "AWS_IAM",
    }


def test_the_gateway_lets_in_what_the_api_answers() -> None:
    """The paths that need no key are the same to both."""
    assert {path.removesuffix("{proxy+}") for path in PUBLIC_PATHS} == set(PUBLIC)


def test_only_an_api_that_takes_keys_reads_them(deployment: Deployment, signed: Deployment) -> None:
    """With IAM there is no permission to read them."""

    def reads_keys(found: Deployment) -> bool:
        return any("KEY#*" in grant.condition for grant in found.grants("ApiRole"))

    assert (reads_keys(deployment), reads_keys(signed)) == (True, False)


def test_the_api_alone_knows_whose_tokens_it_takes(adjusted: Deployment) -> None:
    """The configuration names the issuer; the gateway still passes every request on."""
    found = adjusted
    issuers = {
        name: read_settings(function["Environment"]["Variables"]).oidc
        for name, function in found.properties("AWS::Lambda::Function").items()
    }
    assert issuers.pop("ApiFunction") == Oidc(**OIDC)
    assert set(issuers.values()) == {None}
    assert routes(found)["ANY /{proxy+}"]["AuthorizationType"] == "NONE"


def test_one_caller_cannot_use_up_the_account(deployment: Deployment) -> None:
    """Requests beyond a rate are refused before they reach a function."""
    stage = only(deployment.properties("AWS::ApiGatewayV2::Stage"))
    assert stage["StageName"] == "$default"
    assert stage["AutoDeploy"] is True
    assert stage["DefaultRouteSettings"] == {
        "ThrottlingRateLimit": 500,
        "ThrottlingBurstLimit": 1000,
    }
    of_pages = {"ThrottlingRateLimit": 50, "ThrottlingBurstLimit": 100}
    assert stage["RouteSettings"] == dict.fromkeys(PUBLIC_ROUTES, of_pages)
    [whole] = deployment.resources("AWS::ApiGatewayV2::Stage").values()
    assert len(whole["DependsOn"]) == len(PUBLIC_ROUTES)


def test_a_budget_has_an_alarm(deployment: Deployment, adjusted: Deployment) -> None:
    """The Lambdas know the hours, the default for a tenant too; without one there is no alarm."""
    alarm = adjusted.properties("AWS::CloudWatch::Alarm")["ReaperBudgetSpent"]
    assert alarm["MetricName"] == "BudgetSpent"
    assert alarm["Dimensions"] == [{"Name": "service", "Value": "reaper"}]
    assert "ReaperBudgetSpent" not in deployment.properties("AWS::CloudWatch::Alarm")
    for function in adjusted.properties("AWS::Lambda::Function").values():
        settings = read_settings(function["Environment"]["Variables"])
        assert (settings.gpu_hours_per_day, settings.limits.gpu_hours_per_day) == (40, 9)


def test_requests_are_logged_without_what_is_secret(deployment: Deployment) -> None:
    """A line of JSON contains the caller, the route and the result; no header, query or body."""
    settings = only(deployment.properties("AWS::ApiGatewayV2::Stage"))["AccessLogSettings"]
    assert settings["DestinationArn"] == "AccessLogs.Arn"
    assert json.loads(settings["Format"]) == {
        "request_id": "$context.requestId",
        "method": "$context.httpMethod",
        "route": "$context.routeKey",
        "path": "$context.path",
        "status": "$context.status",
        "latency_ms": "$context.responseLatency",
        "error": "$context.error.message",
    }
    group = deployment.properties("AWS::Logs::LogGroup")["AccessLogs"]
    assert group["RetentionInDays"] == 30
    # What is delivered to other groups takes room in a policy of the account's.
    assert group["LogGroupName"].startswith("/aws/vendedlogs/")


# Alarms


@pytest.mark.parametrize("name", ["Control", "Reaper", "DeadLetters", "Api"])
def test_functions_that_fail_again_and_again_raise_an_alarm(
    deployment: Deployment, name: str
) -> None:
    """Three errors in a quarter of an hour raise it."""
    alarm = deployment.properties("AWS::CloudWatch::Alarm")[f"{name}Errors"]
    assert alarm["Dimensions"] == [{"Name": "FunctionName", "Value": f"{name}Function"}]
    assert (alarm["Namespace"], alarm["MetricName"]) == ("AWS/Lambda", "Errors")
    assert (alarm["Statistic"], alarm["Period"], alarm["EvaluationPeriods"]) == ("Sum", 900, 1)
    assert (alarm["ComparisonOperator"], alarm["Threshold"]) == ("GreaterThanThreshold", 2)


@pytest.mark.parametrize("name", ["Control", "DeadLetters"])
def test_messages_that_fail_again_and_again_raise_an_alarm(
    deployment: Deployment,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The alarm has the very metric that the function's handler emits, in its own environment."""
    function = deployment.properties("AWS::Lambda::Function")[f"{name}Function"]
    service = function["Environment"]["Variables"]["POWERTOOLS_SERVICE_NAME"]
    monkeypatch.setenv("POWERTOOLS_SERVICE_NAME", service)
    monkeypatch.delenv("TIDEMILL_TABLE", raising=False)  # so that every message fails
    record = {
        "messageId": "1",
        "receiptHandle": "r",
        "body": '{"kind": "advance", "batch_id": "b"}',
        "attributes": {"ApproximateReceiveCount": "1"},
        "eventSource": "aws:sqs",
    }
    handler = import_module(function["Handler"].removesuffix(".handler")).handler
    cached_deployment.cache_clear()
    assert handler({"Records": [record]}, LocalLambdaContext(service, 1))["batchItemFailures"]
    [line] = [json.loads(text) for text in capsys.readouterr().out.splitlines() if "_aws" in text]
    [emitted] = line["_aws"]["CloudWatchMetrics"]

    alarm = deployment.properties("AWS::CloudWatch::Alarm")[f"{name}FailedMessages"]
    assert alarm["Namespace"] == emitted["Namespace"]
    assert alarm["MetricName"] in {metric["Name"] for metric in emitted["Metrics"]}
    [dimensions] = emitted["Dimensions"]
    assert alarm["Dimensions"] == [{"Name": each, "Value": line[each]} for each in dimensions]
    assert (alarm["Statistic"], alarm["Period"], alarm["EvaluationPeriods"]) == ("Sum", 900, 1)
    assert (alarm["ComparisonOperator"], alarm["Threshold"]) == ("GreaterThanThreshold", 2)


def test_an_api_that_fails_raises_an_alarm(deployment: Deployment) -> None:
    """Responses with 5xx in three consecutive minutes count, from the function or the gateway."""
    alarm = deployment.properties("AWS::CloudWatch::Alarm")["ApiServerErrors"]
    assert alarm["Dimensions"] == [{"Name": "ApiId", "Value": "HttpApi"}]
    assert (alarm["Namespace"], alarm["MetricName"]) == ("AWS/ApiGateway", "5xx")
    assert (alarm["Statistic"], alarm["Period"], alarm["EvaluationPeriods"]) == ("Sum", 60, 3)
    assert (alarm["ComparisonOperator"], alarm["Threshold"]) == ("GreaterThanThreshold", 0)


def test_the_stack_says_its_address(deployment: Deployment) -> None:
    """The one output is what clients put before `/v1`."""
    assert deployment.outputs("Api") == {"ApiUrl": "HttpApi.ApiEndpoint"}

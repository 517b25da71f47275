"""The Api stack: the Lambdas on their queues and schedule, and the HTTP API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aws_cdk import CfnOutput, Duration, Size, Stack
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_lambda_event_sources as event_sources
from aws_cdk import aws_scheduler as scheduler
from aws_cdk import aws_scheduler_targets as scheduler_targets
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from infra import permissions
from infra.api.concurrency import runs_of_queues
from infra.api.environment import check_environment_size
from infra.api.functions import Function
from infra.api.http_api import HttpApi
from infra.api.private_api import PrivateApi
from infra.bundle import Bundle
from infra.data.stack import DataStack
from infra.monitoring import add_alarm, log_group
from tidemill.handler.aws.queues import LAMBDA_SECONDS
from tidemill.handler.observability import Metric

_INPUT, _WORK = "input/", "work/"
# Small parts of uploads, until they are joined.
_UPLOADS = "work/uploads/"
# Files uploaded through the API are next to the files that clients download.
_RESULTS = ("output/", "files/")
_DEAD_LETTER_SECONDS = 60
_REAPER_MINUTES = 1
_ERROR_MINUTES = 15
# Errors per period of _ERROR_MINUTES that later runs make up for.
_FEW_ERRORS = 2


class ApiStack(Stack):
    """Intake, finalize, reaper and API of one deployment, over its Data stack."""

    def __init__(
        self, scope: Construct, construct_id: str, *, data: DataStack, bundle: Bundle, **stack: Any
    ) -> None:
        super().__init__(scope, construct_id, **stack)
        self.data, self._bundle = data, bundle
        self._runs = runs_of_queues(data.config.lambda_concurrency)
        self.control = self._add_control()
        self.intake = self._add_intake()
        self.reaper = self._add_reaper()
        self.dead_letters = self._add_dead_letters()
        self.api = None if data.config.api == "none" else self._add_api()
        self.gateway = self._add_gateway(self.api) if self.api else None
        self._add_alarms()
        if self.gateway is None:
            CfnOutput(self, "NoApi", value='api = "none"')
        else:
            CfnOutput(self, "ApiUrl", value=self.gateway.url)

    def _add_control(self) -> Function:
        """Add the Lambda that reads short files, joins the rows of all files and delivers them."""
        data = self.data
        control = self._add_function(
            "Control",
            "control",
            # Memory determines CPU: at 1,769 MiB a Lambda has one whole vCPU.
            memory_mib=1769,
            timeout=Duration.seconds(LAMBDA_SECONDS),
            statements=[
                *self._finish_batch_statements(),
                permissions.read_fleets(data),
                permissions.send_to_intake(data),
                permissions.send_to_drops(data),
                permissions.read_tenants(data),
                permissions.table_items(data, "BatchGetItem", "PutItem", "Query"),
                permissions.find_objects(data),
                permissions.read_objects(data, _INPUT, _WORK, *_RESULTS),
                permissions.write_objects(data, _WORK),
                permissions.resume_uploads(data, _WORK, *_RESULTS),
                permissions.delete_objects(data, *_RESULTS),
                permissions.tag_objects(data, "files/"),
                # Erasure is the only permission that bypasses the bucket's versioning.
                *(
                    permissions.erase_objects(
                        data, _INPUT, _WORK, *_RESULTS, permissions.KEPT_RESULTS
                    )
                    if data.config.retention.erase_batches
                    else ()
                ),
            ],
        )
        self._add_event_source(control, data.queues.control, max_concurrency=self._runs["control"])
        self._add_event_source(control, data.queues.drops, max_concurrency=self._runs["drops"])
        return control

    def _add_intake(self) -> Function:
        """Add the Lambda that reads files, as many ranges concurrently as its maximum."""
        data = self.data
        intake = self._add_function(
            "Intake",
            "intake",
            memory_mib=1769,
            timeout=Duration.seconds(LAMBDA_SECONDS),
            # Custom IDs of a range are stored in files there.
            scratch=Size.gibibytes(4),
            layers=[self._add_tables_layer()],
            statements=[
                *self._finish_batch_statements(),
                permissions.read_fleets(data),
                permissions.send_to_intake(data),
                permissions.read_tenants(data),
                permissions.table_items(data, "PutItem", "Query"),
                permissions.find_objects(data),
                permissions.read_objects(data, _INPUT, _WORK, *_RESULTS),
                permissions.write_objects(data, _WORK),
                # It writes tables of rows, and merges the rows of retries.
                permissions.resume_uploads(data, _WORK, *_RESULTS),
                permissions.delete_objects(data, *_RESULTS),
                permissions.tag_objects(data, "files/"),
            ],
        )
        self._add_event_source(intake, data.queues.intake, max_concurrency=self._runs["intake"])
        return intake

    def _add_tables_layer(self) -> lambda_.LayerVersion:
        """Add the libraries that read and write tables, which no other Lambda loads."""
        return lambda_.LayerVersion(
            self,
            "Tables",
            code=self._bundle.tables,
            compatible_runtimes=[self._bundle.runtime],
            compatible_architectures=[self._bundle.architecture],
            description=f"{self.data.config.name}: tables",
        )

    def _add_reaper(self) -> Function:
        """Add the reaper, which repairs stuck batches, and the schedule that calls it."""
        reaper = self._add_function(
            "Reaper",
            "reaper",
            # A whole vCPU, like the control Lambda: it reads all open batches.
            memory_mib=1769,
            timeout=Duration.seconds(LAMBDA_SECONDS),
            statements=[
                *self._finish_batch_statements(),
                permissions.read_fleets(self.data),
                permissions.table_items(self.data, "BatchGetItem", "PutItem", "Query"),
                permissions.read_queue_depths(self.data),
                permissions.read_tenants(self.data),
                permissions.send_to_intake(self.data),
            ],
        )
        # The scheduler invokes asynchronously: Lambda itself would retry a failed run twice, and
        # queue a throttled one for hours, in addition to the next scheduled runs.
        reaper.function.configure_async_invoke(
            max_event_age=Duration.minutes(_REAPER_MINUTES), retry_attempts=0
        )
        undeliverable = self.data.queues.undeliverable
        # The construct would also grant the permission to invoke any version.
        role = self._schedule_role(reaper, undeliverable).without_policy_updates()
        for name, every, event, description in (
            ("Schedule", Duration.minutes(_REAPER_MINUTES), {}, "Checks every active batch"),
            ("Sweep", Duration.days(1), {"sweep": True}, "Looks for uploads without a batch"),
        ):
            scheduler.Schedule(
                self,
                name,
                schedule=scheduler.ScheduleExpression.rate(every),
                target=scheduler_targets.LambdaInvoke(
                    reaper.function,
                    role=role,
                    dead_letter_queue=undeliverable,
                    # The next run would find the same state.
                    max_event_age=every,
                    retry_attempts=2,
                    input=scheduler.ScheduleTargetInput.from_object(event) if event else None,
                ),
                description=description,
            )
        return reaper

    def _schedule_role(self, called: Function, undeliverable: sqs.Queue) -> iam.Role:
        role = iam.Role(
            self,
            "ScheduleRole",
            assumed_by=iam.ServicePrincipal(
                "scheduler.amazonaws.com",
                conditions={"StringEquals": {"aws:SourceAccount": self.account}},
            ),
        )
        granted = [
            permissions.allow(["lambda:InvokeFunction"], [called.function.function_arn]),
            permissions.allow(["sqs:SendMessage"], [undeliverable.queue_arn]),
        ]
        for statement in (*granted, *permissions.use_key(self.data, granted)):
            role.add_to_policy(statement)
        return role

    def _add_dead_letters(self) -> Function:
        dead_letters = self._add_function(
            "DeadLetters",
            "dead_letters",
            memory_mib=512,
            timeout=Duration.seconds(_DEAD_LETTER_SECONDS),
            statements=[
                *self._finish_batch_statements(),
                permissions.send_to_intake(self.data),
                permissions.send_to_drops(self.data),
            ],
        )
        self._add_event_source(
            dead_letters,
            self.data.queues.dead_letters,
            max_concurrency=self._runs["dead_letters"],
        )
        return dead_letters

    def _add_api(self) -> Function:
        """Add the Lambda that serves people and programs."""
        data = self.data
        return self._add_function(
            "Api",
            "api",
            memory_mib=512,
            timeout=Duration.seconds(29),
            environment={"TIDEMILL_OIDC": data.config.oidc.model_dump_json()}
            if data.config.oidc
            else {},
            statements=[
                *([permissions.read_api_keys(data)] if data.config.auth == "keys" else []),
                permissions.read_tenants(data),
                permissions.table_items(
                    data, "BatchGetItem", "GetItem", "PutItem", "UpdateItem", "DeleteItem", "Query"
                ),
                permissions.list_batches(data),
                permissions.send_to_control(data),
                permissions.publish_events(data),
                # Files are uploaded and downloaded; reports of batches cancelled before they ran
                # are written.
                permissions.find_objects(data),
                permissions.read_objects(data, _INPUT, _WORK, *_RESULTS),
                permissions.write_objects(data, *_RESULTS, _UPLOADS),
                permissions.delete_objects(data, *_RESULTS, _UPLOADS),
                permissions.resume_uploads(data, "files/"),
                permissions.tag_objects(data, "files/"),
            ],
        )

    def _add_gateway(self, api: Function) -> HttpApi | PrivateApi:
        """Add the gateway through which callers reach the Lambda."""
        data, config = self.data, self.data.config
        if config.api == "private":
            return PrivateApi(
                self,
                "Private",
                api=api.function,
                name=self.stack_name,
                signed=config.auth == "iam",
                endpoint_ids=config.vpc_endpoint_ids,
                tracing=config.tracing,
            )
        # Log groups with other names would each need a statement in the account's policy for logs,
        # whose size is limited.
        access_logs = log_group(
            self,
            "AccessLogs",
            days=config.retention.log_days,
            key=data.key,
            name=f"/aws/vendedlogs/{self.stack_name}",
        )
        gateway = HttpApi(
            self,
            "Http",
            api=api.function,
            signed=config.auth == "iam",
            access_logs=access_logs,
            domain=config.domain,
        )
        if gateway.domain_target:
            CfnOutput(self, "DomainTarget", value=gateway.domain_target)
        return gateway

    @property
    def launcher_roles(self) -> list[iam.IRole]:
        """The roles of the Lambdas that start workers."""
        return [function.role for function in (self.control, self.intake, self.reaper)]

    def _finish_batch_statements(self) -> list[iam.PolicyStatement]:
        """Return the statements of every handler that may finish a batch."""
        data = self.data
        return [
            permissions.table_items(data, "GetItem", "UpdateItem", "DeleteItem"),
            permissions.send_to_control(data),
            permissions.send_to_workers(data),
            permissions.publish_events(data),
            # For the report of an ended batch.
            permissions.write_objects(data, *_RESULTS),
        ]

    def _add_function(
        self,
        construct_id: str,
        module: str,
        *,
        memory_mib: int,
        timeout: Duration,
        statements: Iterable[iam.PolicyStatement],
        scratch: Size | None = None,
        layers: Sequence[lambda_.ILayerVersion] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Function:
        environment = {
            **self.data.settings(),
            "POWERTOOLS_SERVICE_NAME": module,
            **(environment or {}),
        }
        check_environment_size(self.data, environment, len(self.data.config.models))
        return Function(
            self,
            construct_id,
            module=module,
            bundle=self._bundle,
            data=self.data,
            environment=environment,
            statements=statements,
            memory_mib=memory_mib,
            timeout=timeout,
            scratch=scratch,
            layers=layers,
        )

    def _add_event_source(
        self, function: Function, queue: sqs.Queue, *, max_concurrency: int
    ) -> None:
        """Map the queue to the function, one message at a time: each may take minutes."""
        function.function.add_event_source(
            event_sources.SqsEventSource(
                queue,
                batch_size=1,
                max_concurrency=max_concurrency,
                report_batch_item_failures=True,
            )
        )

    def _add_alarms(self) -> None:
        topic = self.data.topic
        functions = [self.control, self.intake, self.reaper, self.dead_letters]
        for function in (*functions, *([self.api] if self.api else [])):
            add_alarm(
                function,
                "Errors",
                topic=topic,
                metric=function.function.metric_errors(
                    period=Duration.minutes(_ERROR_MINUTES), statistic="Sum"
                ),
                above=_FEW_ERRORS,
                periods=1,
                description=f"{function.node.id} fails repeatedly.",
            )
        # A failed message is a successful run, which `Errors` does not count.
        for function in (self.control, self.intake, self.dead_letters):
            add_alarm(
                function,
                "FailedMessages",
                topic=topic,
                metric=function.metric(Metric.MESSAGES_FAILED, Duration.minutes(_ERROR_MINUTES)),
                above=_FEW_ERRORS,
                periods=1,
                description=f"{function.node.id} cannot process messages, which are retried.",
            )
        if self.data.config.budget.gpu_hours_per_day:
            add_alarm(
                self.reaper,
                "BudgetSpent",
                topic=topic,
                metric=self.reaper.metric(Metric.BUDGET_SPENT, Duration.minutes(5)),
                above=0,
                periods=1,
                description="The day's GPU hours are used up: workers start again tomorrow.",
            )
        if self.gateway is None:
            return
        add_alarm(
            self,
            "ApiServerErrors",
            topic=topic,
            metric=self.gateway.metric("5xx", period=Duration.minutes(1), statistic="Sum"),
            above=0,
            periods=3,
            description="The API returns 5xx errors.",
        )

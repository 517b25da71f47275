"""The service of each model: what runs, as whom, with which rights."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from tests.container.dockerfile import copied_sources
from tests.infra.compute.kinds import ADJUSTED, BIG, REVISED, SMALL, Compute
from tests.infra.conftest import Synth
from tests.infra.reading import Grant, each
from tidemill.cli.commands.worker import WorkerOptions, options_from
from tidemill.cli.main import make_parser
from tidemill.engine_process import client
from tidemill.handler.aws.sync import Aws
from tidemill.handler.fleet.ecs import EcsConfig
from tidemill.handler.settings import read_settings
from tidemill.handler.worker import heartbeat, worker
from tidemill.handler.worker.context.config import WorkerConfig, read_config
from tidemill.offline.engine.weights import _aws_in

ROOT = Path(__file__).parents[3]
MODELS = {"orgbig": BIG, "small": SMALL}
BOTH = ("managed", "groups")
ACCOUNT = "eu-west-1:111122223333"
BUCKET, TABLE = "DropsBucket.Arn", "BatchesTable.Arn"
NO_KEYS = json.dumps({"ForAllValues:StringNotLike": {"dynamodb:LeadingKeys": ["KEY*", "TENANT#*"]}})


OF_BATCHES = json.dumps({"ForAllValues:StringLike": {"dynamodb:LeadingKeys": ["BATCH#*"]}})
ACTIVE = json.dumps({"ForAllValues:StringEquals": {"dynamodb:LeadingKeys": ["ACTIVE"]}})


@pytest.fixture(params=BOTH)
def made(request: pytest.FixtureRequest, compute: dict[str, Compute]) -> Compute:
    """Return two models on each sort of machines."""
    return compute[request.param]


# The fleet


def test_nothing_runs_by_itself(any_kind: Compute) -> None:
    """A deployment alone pays for no GPU, and waits for no worker."""
    assert not any_kind.of("AWS::ECS::Service")
    assert not any_kind.of("AWS::ApplicationAutoScaling::ScalableTarget")


def test_lambdas_read_how_a_models_workers_are_started(made: Compute) -> None:
    """It is in the parameter that they read, in the format that they parse."""
    paths = {
        function["Environment"]["Variables"]["TIDEMILL_FLEETS"]
        for function in made.properties("AWS::Lambda::Function").values()
    }
    parameters = made.of("AWS::SSM::Parameter").values()
    assert {parameter["Name"].rpartition("/")[0] for parameter in parameters} == paths
    assert paths == {"/tidemill/tidemill/fleets"}
    plans = made.plans()
    for slug, model in MODELS.items():
        plan = plans[model["name"]]
        assert (plan.launcher, plan.max_workers) == ("ecs", model.get("max_workers", 1))
        assert plan.target_seconds == 60 * model.get("target_minutes", 60)
        assert plan.release == plan.means["task_definition"] == f"Worker{slug}Task"


def test_workers_run_on_their_models_machines_only(made: Compute) -> None:
    """A GPU that was paid for one model does not serve another."""
    for slug, model in MODELS.items():
        means = EcsConfig.model_validate(made.plans()[model["name"]].means)
        assert means.capacity_provider == f"Worker{slug}Machines"
        assert means.cluster == "Cluster.Arn"


def test_workers_run_in_the_workers_network(any_kind: Compute) -> None:
    """They have separate interfaces, to which ECS gives no public address."""
    for plan in any_kind.plans().values():
        means = EcsConfig.model_validate(plan.means)
        assert len(means.subnets) == 2
        assert all("Workers" in subnet for subnet in means.subnets)
        assert means.security_groups == ("NetworkWorkers.GroupId",)
        assert not means.assign_public_ip


def test_last_words_are_read_where_they_are_written(any_kind: Compute) -> None:
    """The log's group and the prefix of its streams are those of the task."""
    for name, task in any_kind.of("AWS::ECS::TaskDefinition").items():
        options = task["ContainerDefinitions"][0]["LogConfiguration"]["Options"]
        [plan] = [
            plan for plan in any_kind.plans().values() if plan.means["task_definition"] == name
        ]
        assert plan.means["log_group"] == options["awslogs-group"]
        assert plan.means["log_prefix"] == options["awslogs-stream-prefix"]


def test_a_task_is_known_by_its_deployment_and_model(made: Compute) -> None:
    """Two deployments of an account have tasks of two families."""
    assert {slug: made.task(slug)["Family"] for slug in MODELS} == {
        "orgbig": "tidemill-org-big",
        "small": "tidemill-small",
    }


# Who starts workers


def test_who_starts_workers_may_start_these_and_no_others(made: Compute) -> None:
    """They may start this deployment's task families, in its cluster, with its models' roles."""
    in_cluster = json.dumps({"ArnEquals": {"ecs:cluster": "Cluster.Arn"}})
    passed = json.dumps({"StringEquals": {"iam:PassedToService": "ecs-tasks.amazonaws.com"}})
    running = f"arn:aws:ecs:{ACCOUNT}:task/Cluster/*"
    expected = {
        Grant("ecs:ListTasks", "*", in_cluster),
        Grant("ecs:DescribeTasks", running, in_cluster),
        Grant("ecs:StopTask", running, in_cluster),
        Grant(
            "ecs:TagResource",
            running,
            json.dumps({"StringEquals": {"ecs:CreateAction": "RunTask"}}),
        ),
    }
    for slug, family in (("orgbig", "tidemill-org-big"), ("small", "tidemill-small")):
        definitions = f"arn:aws:ecs:{ACCOUNT}:task-definition/{family}:*"
        logs = f"arn:aws:logs:{ACCOUNT}:log-group:Worker{slug}Logs:log-stream:*"
        expected |= {
            Grant("ecs:RunTask", definitions, in_cluster),
            Grant("iam:PassRole", f"Worker{slug}Role.Arn", passed),
            Grant("iam:PassRole", f"Worker{slug}ExecutionRole.Arn", passed),
            Grant("logs:GetLogEvents", logs),
        }
    policy = made.of("AWS::IAM::ManagedPolicy")["LaunchingPolicy"]
    starting = {"ControlRole", "IntakeRole", "ReaperRole"}
    assert {"ControlRole", "ReaperRole"} <= set(policy["Roles"]) <= starting
    assert made.granted(policy) == expected


# The task


def test_a_worker_has_the_gpus_that_the_configuration_says(made: Compute) -> None:
    """ECS reserves them for its container, and the engine uses all of them."""
    for slug, model in MODELS.items():
        count = str(model.get("gpus_per_worker", 1))
        container = made.container(slug)
        assert container["ResourceRequirements"] == [{"Type": "GPU", "Value": count}]
        words = container["Command"]
        shared = words[words.index("--tensor-parallel-size") + 1] if count != "1" else "1"
        assert shared == count
        assert ("--tensor-parallel-size" in words) == (count != "1")
        assert ("--quantization" in words) == ("quantization" in model)
        # The engine reads its container's limit, not its task's.
        assert str(container["Memory"]) == made.task(slug)["Memory"]
        # A group's containers get a memory file system, which Managed Instances refuse.
        memory = container["LinuxParameters"].get("SharedMemorySize")
        shares_volume = "/dev/shm" in writable(made, slug)  # noqa: S108 - of the container
        assert (memory is not None or shares_volume) == (count != "1")


# "Task definition differences for Amazon ECS Managed Instances" in AWS's developer guide lists them
# as not valid, as CloudFormation spells them: registration fails with a client exception.
REFUSED_BY_MANAGED_INSTANCES = frozenset(
    {
        "DisableNetworking",
        "DnsSearchDomains",
        "DnsServers",
        "DockerLabels",
        "DockerSecurityOptions",
        "DockerVolumeConfiguration",
        "EphemeralStorage",
        "ExtraHosts",
        "FSxWindowsFileServerVolumeConfiguration",
        "Hostname",
        "InferenceAccelerators",
        "IpcMode",
        "Links",
        "MaxSwap",
        "ProxyConfiguration",
        "SharedMemorySize",
        "SourcePath",
        "Swappiness",
        "Tmpfs",
    }
)


def test_managed_instances_accept_every_parameter_of_a_task(any_kind: Compute) -> None:
    """A task definition for Managed Instances contains no parameter that AWS lists as refused."""
    for task in any_kind.of("AWS::ECS::TaskDefinition").values():
        if task["RequiresCompatibilities"] == ["MANAGED_INSTANCES"]:
            assert not REFUSED_BY_MANAGED_INSTANCES & set(keys_of(task))


def keys_of(value: Any) -> Iterator[str]:
    """Yield the keys of all objects in a JSON value."""
    match value:
        case dict():
            for key, inner in value.items():
                yield key
                yield from keys_of(inner)
        case list():
            for inner in value:
                yield from keys_of(inner)


@pytest.mark.parametrize(
    ("kind", "machines"), [("managed", "MANAGED_INSTANCES"), ("groups", "EC2")]
)
def test_a_task_is_made_for_its_sort_of_machines(
    compute: dict[str, Compute], kind: str, machines: str
) -> None:
    """ECS checks a task's parameters for the sort that it names."""
    for task in compute[kind].of("AWS::ECS::TaskDefinition").values():
        assert task["RequiresCompatibilities"] == [machines]
        assert task["NetworkMode"] == "awsvpc"


def test_a_container_can_do_no_more_than_its_work(any_kind: Compute) -> None:
    """Nothing of the image can be changed, and no right of the kernel is left to its user."""
    for task in any_kind.of("AWS::ECS::TaskDefinition").values():
        [container] = task["ContainerDefinitions"]
        assert container["ReadonlyRootFilesystem"] is True
        assert container["LinuxParameters"]["Capabilities"] == {"Drop": ["ALL"]}
        assert not container.get("Privileged")
        assert not container["User"].startswith(("0", "root"))


@pytest.mark.parametrize("overrides", [ADJUSTED, REVISED], ids=["tag", "digest"])
def test_an_image_that_is_there_is_pulled_and_none_is_built(
    synth: Synth, overrides: dict[str, Any]
) -> None:
    """It is named by tag or digest; the role may pull only from its repository."""
    made = Compute(synth(overrides))
    assert made.container("small")["Image"] == overrides["image"]
    pulled = made.grants("WorkersmallExecutionRole")
    repository = "arn:aws:ecr:eu-west-1:444455556666:repository/team/tidemill"
    assert Grant("ecr:BatchGetImage", repository) in pulled
    assert {grant.resource for grant in pulled if grant.action.startswith("ecr:Batch")} == {
        repository
    }


def test_a_worker_has_two_minutes_to_stop(any_kind: Compute) -> None:
    """SIGTERM reaches it through an init process that reaps what its engine leaves behind."""
    for task in any_kind.of("AWS::ECS::TaskDefinition").values():
        [container] = task["ContainerDefinitions"]
        assert container["StopTimeout"] == 120
        assert container["LinuxParameters"]["InitProcessEnabled"] is True


def test_a_stop_is_over_before_ecs_kills(any_kind: Compute) -> None:
    """It ends within a minute by default, as the docs say; before SIGKILL at the latest."""

    def stop_seconds(grace_seconds: float, wait_seconds: float) -> float:
        handling = worker._HANDLING_SECONDS + grace_seconds + worker._HAND_OVER_SECONDS
        # A message that a receive call still returns is put back in the meantime.
        returned = max(handling + client._CLOSE_SECONDS, wait_seconds + worker._HANDLING_SECONDS)
        return returned + heartbeat._FINISH_SECONDS + worker._LAST_SECONDS

    usual = WorkerConfig(queue="q")
    assert stop_seconds(usual.grace_seconds, usual.wait_seconds) <= 60
    longest = read_config({}, {"queue": "q", "grace_seconds": 30, "wait_seconds": 20})
    for task in any_kind.of("AWS::ECS::TaskDefinition").values():
        [container] = task["ContainerDefinitions"]
        assert stop_seconds(longest.grace_seconds, longest.wait_seconds) <= container["StopTimeout"]


def test_no_task_is_kept_from_being_stopped(any_kind: Compute) -> None:
    """A stop costs seconds; a task under protection holds a deployment up until it expires."""
    actions = {
        action for _, statement in any_kind.statements() for action in each(statement["Action"])
    }
    assert not [action for action in actions if "Protection" in action]


def test_logs_are_kept_for_as_long_as_the_configuration_says(adjusted: Compute) -> None:
    """Each model has a separate group."""
    groups = adjusted.of("AWS::Logs::LogGroup")
    for slug in MODELS:
        logging = adjusted.container(slug)["LogConfiguration"]
        assert logging["LogDriver"] == "awslogs"
        assert groups[logging["Options"]["awslogs-group"]]["RetentionInDays"] == 7
    assert len(groups) == len(ADJUSTED["models"])


def test_a_worker_gets_its_model_by_flags_that_it_knows(made: Compute) -> None:
    """The command is one that `tidemill` takes, and means what the configuration says."""
    for slug, model in MODELS.items():
        options = options_of(made, slug)
        assert options.served_model_names == (model["name"],)
        assert options.model == model["weights"]
        assert options.device == "cuda"
        assert options.dtype == model.get("dtype", "auto")
        assert options.kv_cache_dtype == model.get("kv_cache_dtype", "auto")
        assert options.device == "cuda"
    assert options_of(made, "orgbig").max_num_seqs == 64


def test_a_worker_reaches_weights_elsewhere(
    adjusted: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the region, and with its variables uses IPv6 for it, as for its queue."""
    region = options_of(adjusted, "small").given["weights_region"]
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in adjusted.environment("small").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    far = _aws_in(str(region)).clients["s3"].meta.endpoint_url
    assert far == "https://s3.dualstack.us-west-2.amazonaws.com"
    assert Aws().clients["sqs"].meta.endpoint_url == "https://sqs.eu-west-1.api.aws"


def test_a_worker_knows_how_many_are_kept_ready(adjusted: Compute) -> None:
    """Its plan has the same number, with which the reaper starts them."""
    plan = adjusted.plans()["small"]
    given = options_of(adjusted, "small").given
    assert (plan.min_workers, plan.min_workers_hours) == (1, "Mon-Fri 07:00-18:00")
    assert (given["min_workers"], given["min_workers_hours"]) == ("1", "Mon-Fri 07:00-18:00")


def test_without_weights_a_worker_runs_the_demo_model(compute: dict[str, Compute]) -> None:
    """It is in the image; its name is the configuration's."""
    options = options_of(compute["as it is"], "tidemilldemo")
    assert (options.model, options.served_model_names) == (None, ("tidemill-demo",))


def test_a_worker_serves_the_adapters_of_its_model(adjusted: Compute) -> None:
    """Each has its prefix; a flag in `args` adds to them."""
    (slug,) = (slug for slug, model in MODELS.items() if model is SMALL)
    assert options_of(adjusted, slug).lora_modules == (
        "sql=s3://tuned/sql",
        "lab/tone=s3://tuned/lab/tone",
        "more=/models/more",
    )
    settings = read_settings(adjusted.environment(slug))
    assert settings.model_adapters == dict.fromkeys(("sql", "lab/tone"), SMALL["name"])


def test_a_worker_finds_its_deployment_in_its_environment(made: Compute) -> None:
    """Every name is there, and the queue of its model among them."""
    for slug, model in MODELS.items():
        environment = made.environment(slug)
        settings = read_settings(environment)
        assert settings.bucket == "DropsBucket"
        assert settings.table == "BatchesTable"
        assert settings.control_queue == "DoorbellsControl"
        assert settings.work_queues[model["name"]] == f"DoorbellsWork{slug}"
        assert read_config(environment, {"queue": "url"}).queue == "url"
        assert environment["AWS_DEFAULT_REGION"] == "eu-west-1"
        assert environment["POWERTOOLS_SERVICE_NAME"] == "worker"
        assert set(settings.work_queues) == {model["name"]}


# What the image and the task must agree on


def test_the_task_runs_the_image_as_it_is_meant_to_be(made: Compute) -> None:
    """The same user, the same health check, and a volume wherever the image writes."""
    words = instructions()
    image = dict(re.findall(r"(\w+)=(\S+)", words["ENV"]))
    for slug in MODELS:
        container = made.container(slug)
        assert container["User"] == words["USER"]
        check = json.loads(words["HEALTHCHECK"].partition(" CMD ")[2])
        assert container["HealthCheck"]["Command"] == ["CMD", *check]
        volumes = writable(made, slug) - {"/dev/shm"}  # noqa: S108 - of the container
        assert volumes == set(json.loads(words["VOLUME"]))
        variables = image | made.environment(slug)
        for name in ("HOME", "NUMBA_CACHE_DIR", "TIDEMILL_WEIGHTS_CACHE", "TIDEMILL_HEALTH_FILE"):
            path = PurePosixPath(variables[name])
            assert any(path.is_relative_to(volume) for volume in volumes), name


def test_every_volume_is_mounted_where_the_image_declares_one(made: Compute) -> None:
    """ECS gives a volume to root alone, unless the image declares a VOLUME at a path of it."""
    declared = set(json.loads(instructions()["VOLUME"]))
    for slug in MODELS:
        paths: dict[str, set[str]] = {}
        for mount in made.container(slug)["MountPoints"]:
            paths.setdefault(mount["SourceVolume"], set()).add(mount["ContainerPath"])
        assert all(declared & mounted for mounted in paths.values())


def test_volumes_are_the_tasks_own(any_kind: Compute) -> None:
    """Nothing of a machine, and nothing of another task, is to be seen in them."""
    for task in any_kind.of("AWS::ECS::TaskDefinition").values():
        assert all(set(volume) == {"Name"} for volume in task["Volumes"])


def test_the_image_is_built_from_what_it_needs(tmp_path: Path) -> None:
    """The build is for the machines' processors; no history, secrets or caches get into it.

    `cdk deploy` reads .dockerignore. The Dockerfile itself is included, which the CDK forgets
    unless it is in the root.
    """
    from aws_cdk import App, Stack

    from infra.image import WorkerImage

    app = App(outdir=str(tmp_path))
    WorkerImage(Stack(app, "Stack"), "Image", existing="")
    app.synth()
    [manifest] = tmp_path.glob("Stack.assets.json")
    [asset] = json.loads(manifest.read_text(encoding="utf-8"))["dockerImages"].values()
    assert asset["source"]["dockerFile"] == "container/Dockerfile"
    assert asset["source"]["platform"] == "linux/amd64"
    context = tmp_path / asset["source"]["directory"]
    assert {path.name for path in context.iterdir() if path.name != ".dockerignore"} == {
        *("LICENSE", "README.md", "constraints.txt", "pyproject.toml"),
        *("batch", "cli", "container", "dashboard", "demo"),
        *("engine", "engine_process", "handler", "net"),
        *("offline", "protocol", "sdk", "server", "tidemill"),
    }
    copied = copied_sources("build")
    files = {str(path.relative_to(context)) for path in context.rglob("*") if path.is_file()}
    assert {name.split("/")[0] for name in files} == {*copied, "container", ".dockerignore"}
    container = {"container/Dockerfile", "container/sbom.py"}
    assert {name for name in files if name.startswith("container/")} == container
    wanted = {
        str(path.relative_to(ROOT))
        for name in copied
        for path in ((ROOT / name).rglob("*") if (ROOT / name).is_dir() else [ROOT / name])
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files == {*wanted, *container, ".dockerignore"}


# Rights


@pytest.mark.parametrize("slug", MODELS)
def test_a_worker_may_do_its_models_work_and_nothing_else(made: Compute, slug: str) -> None:
    """Its queue, its weights, parts in flight, shards; neither results nor keys."""
    bucket, prefix = {
        "orgbig": ("arn:aws:s3:::weights-of-big", "models/big/"),
        "small": ("arn:aws:s3:::weights-of-small", "small/"),
    }[slug]
    queue = f"DoorbellsWork{slug}.Arn"
    assert made.task(slug)["TaskRoleArn"] == f"Worker{slug}Role.Arn"
    assert made.grants(f"Worker{slug}Role") == {
        Grant("sqs:ReceiveMessage", queue),
        Grant("sqs:DeleteMessage", queue),
        Grant("sqs:ChangeMessageVisibility", queue),
        Grant("sqs:SendMessage", queue),
        Grant("sqs:SendMessage", "DoorbellsControl.Arn"),
        Grant("dynamodb:GetItem", TABLE, NO_KEYS),
        Grant("dynamodb:UpdateItem", TABLE, NO_KEYS),
        Grant("dynamodb:PutItem", TABLE, OF_BATCHES),
        Grant("dynamodb:DeleteItem", TABLE, OF_BATCHES),
        Grant("dynamodb:Query", TABLE, OF_BATCHES),
        Grant("dynamodb:Query", TABLE, ACTIVE),
        Grant("s3:ListBucket", BUCKET),
        *(
            Grant(action, f"{BUCKET}/{folder}/*")
            for action in ("s3:GetObject", "s3:GetObjectVersion")
            for folder in ("input", "files", "media", "work")
        ),
        Grant("s3:PutObject", f"{BUCKET}/work/*"),
        Grant("s3:ListBucket", bucket, json.dumps({"StringLike": {"s3:prefix": [f"{prefix}*"]}})),
        Grant("s3:GetObject", f"{bucket}/{prefix}*"),
    }


def test_the_page_names_every_folder_that_a_worker_reaches(synth: Synth) -> None:
    """Tenants share workers, so the page says whose files these folders contain."""
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    paragraph = next(each for each in page.split("\n\n") if "a worker's role gives access" in each)
    found = Compute(synth({"reuse": True})).grants("WorkertidemilldemoRole")
    prefix = f"{BUCKET}/"
    folders = {
        grant.resource.removeprefix(prefix).partition("/")[0]
        for grant in found
        if grant.resource.startswith(prefix)
    }
    assert set(re.findall(r"`(\w+)/`", paragraph)) - {"output"} == folders
    assert "the inputs of every tenant" in " ".join(paragraph.split())


def test_no_worker_reaches_another_models_queue_or_weights(made: Compute) -> None:
    """Two models of one deployment may be of two parties."""
    for mine, other in (("orgbig", "small"), ("small", "orgbig")):
        reached = {grant.resource for grant in made.grants(f"Worker{mine}Role")}
        [weights] = {
            grant.resource
            for grant in made.grants(f"Worker{other}Role")
            if grant.resource.startswith("arn:aws:s3:::") and grant.action == "s3:GetObject"
        }
        assert weights not in reached
        assert f"DoorbellsWork{other}.Arn" not in reached


def test_without_weights_a_worker_reads_no_other_bucket(compute: dict[str, Compute]) -> None:
    """A model in the image gives no right to any."""
    reached = {grant.resource for grant in compute["as it is"].grants("WorkertidemilldemoRole")}
    assert not any(resource.startswith("arn:aws:s3:::") for resource in reached)


def test_only_tasks_of_this_account_take_a_workers_role(any_kind: Compute) -> None:
    """ECS must not be used as a confused deputy by other accounts."""
    found = [
        statement
        for name, role in any_kind.of("AWS::IAM::Role").items()
        if name.startswith("Worker")
        for statement in role["AssumeRolePolicyDocument"]["Statement"]
    ]
    assert len(found) == 2 * len(any_kind.plans())
    for statement in found:
        assert statement["Principal"] == {"Service": "ecs-tasks.amazonaws.com"}
        assert statement["Condition"] == {"StringEquals": {"aws:SourceAccount": "111122223333"}}


def test_ecs_may_fetch_the_image_and_write_the_log(made: Compute) -> None:
    """Starting a task needs no other permission."""
    images = (
        f"arn:aws:ecr:{ACCOUNT}:repository/cdk-hnb659fds-container-assets-111122223333-eu-west-1"
    )
    for slug in MODELS:
        logs = f"Worker{slug}Logs.Arn"
        assert made.task(slug)["ExecutionRoleArn"] == f"Worker{slug}ExecutionRole.Arn"
        assert made.grants(f"Worker{slug}ExecutionRole") == {
            # AWS has no resource for this one.
            Grant("ecr:GetAuthorizationToken", "*"),
            Grant("ecr:BatchCheckLayerAvailability", images),
            Grant("ecr:GetDownloadUrlForLayer", images),
            Grant("ecr:BatchGetImage", images),
            Grant("logs:CreateLogStream", logs),
            Grant("logs:PutLogEvents", logs),
        }


def options_of(made: Compute, slug: str) -> WorkerOptions:
    """Return what a model's worker understands of its command."""
    return options_from(make_parser("worker").parse_args(made.container(slug)["Command"]))


def writable(made: Compute, slug: str) -> set[str]:
    """Return where a model's worker can write."""
    return {
        mount["ContainerPath"]
        for mount in made.container(slug)["MountPoints"]
        if not mount["ReadOnly"]
    }


def instructions() -> dict[str, str]:
    """Return the words of each instruction of the Dockerfile's last stage, each on one line."""
    text = (ROOT / "container" / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("FROM "))
    return dict(line.split(maxsplit=1) for line in lines[last:] if line)

"""Workers as training jobs of SageMaker: what they are made of, and who may start them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infra.config import ConfigRefused
from tests.handler.fleet.services import check
from tests.infra.compute.kinds import (
    BIG,
    CHANGED_JOBS,
    EXISTING,
    GROUPS_OF_OTHERS,
    JOBS,
    SMALL,
    TWO,
    Compute,
)
from tests.infra.conftest import Synth
from tests.infra.reading import Grant
from tidemill.cli import scratch
from tidemill.cli.commands.worker import options_from
from tidemill.cli.main import make_parser
from tidemill.handler.aws.calls import Call
from tidemill.handler.fleet.sagemaker import SageMakerConfig, SageMakerLauncher, jobs_prefix
from tidemill.handler.settings import read_settings

ACCOUNT = "eu-west-1:111122223333"
MODELS = {"orgbig": BIG, "small": SMALL}
ARN = f"arn:aws:sagemaker:{ACCOUNT}:training-job/tidemill-*"


@pytest.fixture(params=JOBS)
def made(request: pytest.FixtureRequest, synth: Synth) -> Compute:
    """Return each kind of deployment in turn."""
    return Compute(synth(JOBS[request.param]))


@pytest.fixture
def jobs(synth: Synth) -> Compute:
    """Return a deployment as most are."""
    return Compute(synth(JOBS["jobs"]))


def means_of(made: Compute, model: dict[str, Any]) -> SageMakerConfig:
    """Return what the launcher reads of a model."""
    plan = made.plans()[model["name"]]
    assert plan.launcher == "sagemaker"
    return SageMakerConfig.model_validate(plan.means)


def releases_of(made: Compute) -> dict[str, str]:
    """Return the release of each model's workers."""
    return {model: plan.release for model, plan in made.plans().items()}


def environment_of(made: Compute, model: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a model's jobs."""
    return dict(means_of(made, model).environment)


def test_a_job_is_one_that_sagemaker_takes(made: Compute) -> None:
    """Its request is what the client's own description of the service allows."""
    for plan in made.plans().values():
        # A role's address is as long as AWS makes it; here it is its name.
        plan.means["role"] = "arn:aws:iam::111122223333:role/worker"
        plan.means["output_uri"] = plan.means["output_uri"].lower()
        plan.means["subnets"] = [name[:32] for name in plan.means.get("subnets", ())]
        plan.means["security_groups"] = [
            name.replace(".", "-")[:32] for name in plan.means.get("security_groups", ())
        ]
        request = next(SageMakerLauncher().start(plan, 1))
        assert isinstance(request, Call)
        check(request)


def test_a_job_runs_the_worker_of_its_model(made: Compute) -> None:
    """The command is one that `tidemill` takes, and means what the configuration says."""
    for model in MODELS.values():
        means = means_of(made, model)
        # Which becomes `tidemill` with these arguments: tests/cli/test_scratch.py.
        assert means.entrypoint == ("python", "-m", scratch.__name__)
        assert means.environment["NVIDIA_VISIBLE_DEVICES"] == "all"
        options = options_from(make_parser().parse_args(list(means.arguments)))
        assert options.served_model_names == (model["name"],)
        assert options.model == model["weights"]
        assert options.given["exit_when_idle_seconds"] == "300"
        settings = read_settings(means.environment)
        assert set(settings.work_queues) == {model["name"]}
        assert settings.control_queue == "DoorbellsControl"


def test_a_job_looks_for_its_disk_itself(jobs: Compute) -> None:
    """No folder is configured: neither /tmp nor the image's may have room for weights."""
    for value in environment_of(jobs, SMALL).values():
        assert not value.startswith("/")
    assert means_of(jobs, SMALL).output_uri == "s3://DropsBucket/work/sagemaker/small"


def test_a_job_has_the_tags_of_its_deployment(synth: Synth, jobs: Compute) -> None:
    """All other resources have them, too; other tags or a larger fleet replace no worker."""
    changes = {"models": [BIG, SMALL | {"max_workers": 9}], "tags": {"team": "ml"}}
    tagged = Compute(synth(JOBS["jobs"] | changes))
    assert means_of(tagged, SMALL).tags == {"tidemill": "tidemill", "team": "ml"}
    assert tagged.plans()["small"].max_workers == 9
    assert releases_of(tagged) == releases_of(jobs)


def test_jobs_go_into_an_existing_network(synth: Synth) -> None:
    """Their role has permissions for its subnets and groups."""
    made = Compute(synth(JOBS["jobs, Spot"]))
    means = means_of(made, SMALL)
    assert list(means.subnets) == EXISTING["subnet_ids"]
    assert list(means.security_groups) == GROUPS_OF_OTHERS
    found = made.grants("WorkersmallRole")
    joined = {it.resource for it in found if it.action == "ec2:CreateNetworkInterface"}
    # What another account shares has that account in its ARN; interfaces are the job's own.
    shared = "arn:aws:ec2:eu-west-1:*"
    assert joined == {
        f"arn:aws:ec2:{ACCOUNT}:network-interface/*",
        *(f"{shared}:subnet/{name}" for name in EXISTING["subnet_ids"]),
        *(f"{shared}:security-group/{name}" for name in GROUPS_OF_OTHERS),
    }
    vpc = {"ArnEquals": {"ec2:Vpc": f"{shared}:vpc/{EXISTING['vpc_id']}"}}
    [condition] = {it.condition for it in found if it.action == "ec2:DeleteNetworkInterface"}
    assert json.loads(condition) == vpc


def test_a_job_has_the_gpus_of_its_worker(jobs: Compute) -> None:
    """It runs on the cheapest machine with a quota."""
    assert means_of(jobs, BIG).instance_types == ("ml.g6.12xlarge", "ml.g6.24xlarge")
    assert means_of(jobs, SMALL).instance_types[0] == "ml.g4dn.xlarge"


@pytest.mark.parametrize(("kind", "is_spot"), [("jobs", False), ("jobs, Spot", True)])
def test_spot_is_the_configurations_word(synth: Synth, kind: str, *, is_spot: bool) -> None:
    """The switch reaches every job."""
    assert means_of(Compute(synth(JOBS[kind])), SMALL).spot is is_spot


def test_a_public_network_is_sagemakers_own(jobs: Compute) -> None:
    """Nothing of it is made, and nothing costs while nothing runs."""
    assert not jobs.of("AWS::EC2::VPC")
    assert not jobs.of("AWS::ECS::Cluster")
    assert means_of(jobs, SMALL).subnets == ()


def test_an_isolated_network_leads_to_what_a_worker_speaks_to(synth: Synth) -> None:
    """Images and logs are SageMaker's own affair, outside of it."""
    made = Compute(synth(JOBS["jobs, isolated"]))
    services = {
        endpoint["ServiceName"].rpartition("eu-west-1.")[2]
        for endpoint in made.of("AWS::EC2::VPCEndpoint").values()
    }
    assert services == {"s3", "dynamodb", "sqs"}
    means = means_of(made, SMALL)
    assert len(means.subnets) == 2
    assert means.security_groups == ("NetworkWorkers.GroupId",)


def test_a_change_of_what_jobs_are_is_another_release(synth: Synth, jobs: Compute) -> None:
    """Without a change there is no new release: nothing is replaced needlessly."""
    changed, before = releases_of(Compute(synth(CHANGED_JOBS))), releases_of(jobs)
    assert before.keys() == {BIG["name"], SMALL["name"]}
    assert [name for name in before if changed[name] == before[name]] == []


def test_ends_of_jobs_are_sent(made: Compute) -> None:
    """The rule covers all jobs; the handler recognises its own by their names."""
    rule = made.only("AWS::Events::Rule")
    assert rule["EventPattern"]["source"] == ["aws.sagemaker"]
    assert rule["EventPattern"]["detail-type"] == ["SageMaker Training Job State Change"]
    assert rule["EventPattern"]["detail"]["TrainingJobName"] == [{"prefix": "tidemill-"}]
    for plan in made.plans().values():
        assert jobs_prefix(plan).startswith("tidemill-")
    assert [target["Arn"] for target in rule["Targets"]] == ["DoorbellsControl.Arn"]


def test_who_starts_jobs_may_start_these_and_no_others(made: Compute) -> None:
    """Their names, and the roles of this deployment's models, restrict the permission."""
    passed = json.dumps({"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}})
    policy = made.of("AWS::IAM::ManagedPolicy")["LaunchingPolicy"]
    assert made.granted(policy) == {
        Grant("sagemaker:CreateTrainingJob", ARN),
        Grant("sagemaker:AddTags", ARN),
        Grant("sagemaker:StopTrainingJob", ARN),
        Grant("sagemaker:ListTrainingJobs", "*"),
        *(Grant("iam:PassRole", f"Worker{slug}Role.Arn", passed) for slug in MODELS),
    }


def test_a_job_may_do_what_a_task_may(synth: Synth) -> None:
    """In addition, SageMaker acts for it: it pulls the image, and ships logs and metrics."""
    tasks, made = Compute(synth(TWO)), Compute(synth(JOBS["jobs"]))
    group = f"arn:aws:logs:{ACCOUNT}:log-group:/aws/sagemaker/TrainingJobs"
    own = json.dumps({"StringEquals": {"cloudwatch:namespace": "/aws/sagemaker/TrainingJobs"}})
    for slug in MODELS:
        more = made.grants(f"Worker{slug}Role") - tasks.grants(f"Worker{slug}Role")
        pulling = {grant for grant in more if grant.action.startswith("ecr:")}
        assert pulling == {
            grant
            for grant in tasks.grants(f"Worker{slug}ExecutionRole")
            if grant.action.startswith("ecr:")
        }
        assert more - pulling == {
            Grant("logs:CreateLogGroup", group),
            Grant("logs:DescribeLogStreams", group),
            Grant("logs:CreateLogStream", f"{group}:log-stream:*"),
            Grant("logs:DescribeLogStreams", f"{group}:log-stream:*"),
            Grant("logs:PutLogEvents", f"{group}:log-stream:*"),
            Grant("cloudwatch:PutMetricData", "*", own),
        }
        assert tasks.grants(f"Worker{slug}Role") <= made.grants(f"Worker{slug}Role")


def test_only_jobs_of_an_isolated_network_may_join_one(synth: Synth) -> None:
    """It creates interfaces in its subnets, and changes none elsewhere."""
    made = Compute(synth(JOBS["jobs, isolated"]))
    found = {
        grant
        for grant in made.grants("WorkersmallRole")
        if grant.action.startswith("ec2:") and ":Describe" not in grant.action
    }
    interfaces = f"arn:aws:ec2:{ACCOUNT}:network-interface/*"
    vpc = f"arn:aws:ec2:{ACCOUNT}:vpc/NetworkVpc"
    changed = {grant for grant in found if grant.action != "ec2:CreateNetworkInterface"}
    assert changed
    assert {(grant.resource, grant.condition) for grant in changed} == {
        (interfaces, json.dumps({"ArnEquals": {"ec2:Vpc": vpc}}))
    }
    assert not [
        grant
        for grant in Compute(synth(JOBS["jobs"])).grants("WorkersmallRole")
        if grant.action.startswith("ec2:")
    ]


@pytest.mark.parametrize(
    ("differing", "error"),
    [
        (
            {"aliases": [f"alias-number-{number}" for number in range(40)]},
            "small has too many aliases or adapters for a SageMaker job",
        ),
        ({"args": ["--chat-template", "x" * 257]}, "exceeds the 256 characters"),
        ({"args": ["--max-num-seqs=8"] * 101}, "a SageMaker job is limited to 100"),
        ({"args": ["--chat-template=" + "x" * 80] * 40}, "AWS allows 4,096"),
    ],
)
def test_settings_that_no_job_can_hold_are_refused(
    synth: Synth, differing: dict[str, Any], error: str
) -> None:
    """The error is one sentence, at synthesis."""
    with pytest.raises(ConfigRefused, match=error):
        synth({"models": [SMALL | differing], "compute": "sagemaker"})


def test_tags_that_no_plan_holds_are_refused_by_name(synth: Synth) -> None:
    """A plan has those of its jobs, which no template has."""
    tags = {f"{number:0128}": "x" * 256 for number in range(20)}
    with pytest.raises(ConfigRefused, match="small has more args, aliases, adapters or tags than"):
        synth(JOBS["jobs"] | {"models": [SMALL], "tags": tags})

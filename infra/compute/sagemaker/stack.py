"""The Compute stack for SageMaker: the training job parameters of each model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aws_cdk import Stack
from constructs import Construct

from infra.api.stack import ApiStack
from infra.compute.network import WorkerNetwork
from infra.compute.sagemaker.jobs import WorkerJobs, run_jobs
from infra.compute.worker_events import WorkerEventRules
from infra.data.stack import DataStack
from infra.fleets import Fleet, FleetAlarms, LaunchPolicies, policy_chunks
from infra.image import WorkerImage
from infra.pip_target import ROOT


class SageMakerStack(Stack):
    """Workers as SageMaker training jobs: none, until a Lambda of the Api stack starts some.

    Their image is built from the folder `image`, unless the configuration names one. A public
    network is SageMaker's own; for an isolated one this stack creates the VPC and its endpoints.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        data: DataStack,
        api: ApiStack,
        image: Path = ROOT,
        **stack: Any,
    ) -> None:
        super().__init__(scope, construct_id, **stack)
        config = data.config
        network = WorkerNetwork(self, "Network", config=config) if config.has_network else None
        pulled = WorkerImage(self, "Image", existing=config.image, folder=image)
        jobs = []
        for model in config.models:
            job = WorkerJobs(
                self,
                f"Worker-{model.slug}",
                data=data,
                network=network,
                image=pulled,
                model=model,
            )
            Fleet(
                job,
                "Fleet",
                config=config,
                model=model,
                launcher="sagemaker",
                release=job.release,
                means=job.means,
            )
            FleetAlarms(job, "Alarms", data=data, model=model)
            jobs.append(job)
        LaunchPolicies(
            self,
            "Launching",
            roles=api.launcher_roles,
            policies=[run_jobs(self, some) for some in policy_chunks(jobs)],
        )
        WorkerEventRules(
            self,
            "Ends",
            data=data,
            source="aws.sagemaker",
            detail_of={
                "SageMaker Training Job State Change": {
                    "TrainingJobName": [{"prefix": "tidemill-"}],
                    "TrainingJobStatus": ["Completed", "Failed", "Stopped"],
                }
            },
        )

"""Engines under comparison: the command of each, and the marks in its output."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.compare import transformers_static
from bench.processes import Marks

OURS = "tidemill"
MAX_MODEL_LEN = 2048


@dataclass(frozen=True, slots=True)
class Job:
    """The job of every engine. `served_name` is the model's name in the file's lines."""

    model: str
    requests: Path
    served_name: str
    dtype: str
    num_requests: int


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine. `command` ends with `-o`, which its output file follows."""

    name: str
    command: list[str]
    marks: Marks
    environment: Mapping[str, str] = field(default_factory=dict)


def job_flags(job: Job, max_model_len: int) -> list[str]:
    """Return the flags of a job that vLLM's batch runner and ours have in common."""
    flags = ["--model", job.model, "--served-model-name", job.served_name, "--dtype", job.dtype]
    return [*flags, "--max-model-len", str(max_model_len), "-i", str(job.requests)]


def tidemill_command(name: str, job: Job, max_model_len: int = MAX_MODEL_LEN) -> list[str]:
    """Return our command for the file of a job."""
    command = [sys.executable, "-m", "tidemill.cli.main", name]
    return [*command, *job_flags(job, max_model_len)]


def tidemill(job: Job, max_model_len: int = MAX_MODEL_LEN) -> Peer:
    """Return ourselves, as a user runs it."""
    command = [*tidemill_command("run", job, max_model_len), "--force"]
    return Peer(OURS, command, Marks(ready="model loaded in", done=r"\d rows? in "))


def transformers(job: Job) -> Peer:
    """Return transformers' `generate` in static batches."""
    command = [sys.executable, "-m", "bench.compare.transformers_static", "--model", job.model]
    command += ["--dtype", job.dtype, "-i", str(job.requests)]
    marks = Marks(ready=transformers_static.READY, done=transformers_static.DONE)
    return Peer("transformers", command, marks)


def arrival_order(job: Job) -> Peer:
    """Return ourselves, in the order of the file."""
    ours = tidemill(job)
    return replace(ours, name="--no-plan", command=[*ours.command, "--no-plan"])


def openvino(job: Job, python: Path) -> Peer:
    """OpenVINO GenAI from a separate environment; the exported model is next to the original."""
    command = [str(python), "-m", "bench.compare.openvino_batches"]
    command += ["--model", f"{job.model}-openvino", "--dtype", job.dtype, "-i", str(job.requests)]
    marks = Marks(ready=transformers_static.READY, done=transformers_static.DONE)
    return Peer("OpenVINO", command, marks)


def vllm(job: Job, python: Path, max_model_len: int = MAX_MODEL_LEN) -> Peer:
    """Return vLLM's batch runner from an environment with its CPU build."""
    command = [str(python), "-m", "vllm.entrypoints.openai.run_batch"]
    command += [*job_flags(job, max_model_len), "--gpu-memory-utilization", "0.5"]
    marks = Marks(ready="Reading batch from", done="Writing outputs to")
    return Peer("vLLM", command, marks, vllm_environment())


def vllm_environment() -> dict[str, str]:
    """Return the environment of vLLM's CPU build: all cores, memory for its cache."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }

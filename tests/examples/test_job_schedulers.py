"""Examples for job schedulers start shards as our own parser takes them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tidemill.cli.main import parse
from tidemill.offline.files.shard import Shard

EXAMPLES = Path(__file__).parents[2] / "docs/examples"


@pytest.fixture
def tidemill(tmp_path: Path) -> str:
    """Return a PATH on which `tidemill` prints its arguments, and `hf` starts no job."""
    for name, script in {
        "tidemill": 'echo "$@"',
        "hf": f'exec {Path(sys.executable).parent}/hf "$1" "$2" --dry-run "${{@:3}}"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def test_a_task_of_a_slurm_array_runs_its_shard(tidemill: str) -> None:
    """The script uses the two variables that Slurm sets."""
    task = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"}
    script = [EXAMPLES / "shards.sbatch", "in.jsonl", "rows.jsonl"]
    stdout = subprocess.check_output(["bash", *script], env={"PATH": tidemill, **task}, text=True)
    parsed = parse(stdout.split())
    assert (parsed.files, parsed.output_file) == (["in.jsonl"], "rows.jsonl")
    assert (parsed.shard, parsed.resume) == (Shard(3, 8), True)


def test_a_node_of_skypilot_runs_its_shard(tidemill: str) -> None:
    """With the two variables that SkyPilot sets, of which the first counts from 0."""
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text(encoding="utf-8"))
    assert task["file_mounts"] == {"/data": {"source": "${BUCKET}", "mode": "MOUNT_CACHED"}}
    node = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "4", "MODEL": "org/model"}
    stdout = subprocess.check_output(
        ["bash", "-c", task["run"]], env={"PATH": tidemill, **node}, text=True
    )
    parsed = parse(stdout.split())
    assert (parsed.shard, parsed.resume, parsed.model) == (Shard(1, 4), True, "org/model")


def test_the_jobs_of_hugging_face_run_all_shards(tidemill: str) -> None:
    """The hub's command prints the jobs in its dry-run mode."""
    stdout = subprocess.check_output(
        ["bash", EXAMPLES / "hf-jobs.sh", "org", "files", "2"],
        env={"PATH": tidemill, "HF_TOKEN": "hf_none", "HF_HUB_OFFLINE": "1"},
        text=True,
    )
    commands = re.findall(r"exec tidemill (.*?)'\n", stdout, re.DOTALL)
    parsed = [parse(shlex.split(command)) for command in commands]
    assert [(each.shard, each.resume) for each in parsed] == [
        (Shard(1, 2), True),
        (Shard(2, 2), True),
    ]
    assert stdout.count("hf://buckets/org/files:/data") == 2


def test_the_batch_gateway_sends_a_model_where_a_server_listens() -> None:
    """The port is the server's."""
    path = EXAMPLES / "llm-d-batch-gateway.yaml"
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    [gateway] = values["processor"]["config"]["modelGateways"].values()
    assert gateway["url"].rpartition(":")[2] == str(parse(["serve"]).port)

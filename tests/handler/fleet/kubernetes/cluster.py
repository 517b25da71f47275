"""A Kubernetes API server with its Job controller, as far as launchers know them, over HTTP.

It validates names and labels, refuses as a quota or a webhook would, and makes the pods of Jobs. A
test is the kubelet: it runs pods and lets them end.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

NAMESPACE = "llm"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_JOBS = re.compile(r"/apis/batch/v1/namespaces/([^/]+)/jobs(?:/([^/]+))?")
_PODS = re.compile(r"/api/v1/namespaces/([^/]+)/pods")
Job = dict[str, Any]


class Refusal(Exception):
    """An error response of the API server."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": message,
        }


@dataclass
class Cluster:
    """One namespace. `quota` is its maximum of Jobs; `refusal`, if set, answers each create.

    `token`, if set, must come with every request; `num_lost` replies get lost after the work is
    done. `requests` are those received.
    """

    quota: int = 1000
    refusal: Refusal | None = None
    token: str | None = None
    num_lost: int = 0
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    jobs: dict[str, Job] = field(default_factory=dict)
    pods: dict[str, Job] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""
    lock: threading.RLock = field(default_factory=threading.RLock)

    # The API

    def answer(self, method: str, path: str, token: str | None, body: Any) -> dict[str, Any]:
        """Return the answer to a request; raises Refusal."""
        address = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(address.query).items()}
        with self.lock:
            self.requests.append((method, address.path))
            if self.token is not None and token != f"Bearer {self.token}":
                raise Refusal(401, "Unauthorized", "Unauthorized")
            if found := _PODS.fullmatch(address.path):
                return self._list(self.pods, found[1], query)
            found = _JOBS.fullmatch(address.path)
            if not found:
                raise Refusal(404, "NotFound", "the server could not find the requested resource")
            namespace, name = found.groups()
            if namespace != NAMESPACE:
                raise Refusal(404, "NotFound", f'namespaces "{namespace}" not found')
            match method, name:
                case "GET", None:
                    return self._list(self.jobs, namespace, query)
                case "POST", None:
                    return self._create(body)
                case "DELETE", str():
                    return self._delete(self._job(name), query["propagationPolicy"])
                case "PATCH", str():
                    return self._patch(self._job(name), body)
            raise Refusal(405, "MethodNotAllowed", method)

    def _job(self, name: str) -> Job:
        if name not in self.jobs:
            raise Refusal(404, "NotFound", f'jobs.batch "{name}" not found')
        return self.jobs[name]

    def _list(self, things: dict[str, Job], namespace: str, query: Mapping[str, str]) -> Job:
        assert namespace == NAMESPACE
        key, _, value = query["labelSelector"].partition("=")
        assert _LABEL.fullmatch(value), value
        found = [
            thing for thing in things.values() if thing["metadata"]["labels"].get(key) == value
        ]
        first, limit = int(query.get("continue", 0)), int(query["limit"])
        more = {"continue": str(first + limit)} if len(found) > first + limit else {}
        return {"kind": "List", "metadata": more, "items": found[first : first + limit]}

    def _create(self, job: Job) -> Job:
        name = job["metadata"]["name"]
        _validate(job)
        if self.refusal is not None:
            raise self.refusal
        if name in self.jobs:
            raise Refusal(409, "AlreadyExists", f'jobs.batch "{name}" already exists')
        if len(self.jobs) >= self.quota:
            used = f"used: count/jobs.batch={len(self.jobs)}, limited: {self.quota}"
            message = f'jobs.batch "{name}" is forbidden: exceeded quota: gpus, {used}'
            raise Refusal(403, "Forbidden", message)
        job["metadata"] |= {"creationTimestamp": self._time(), "uid": name}
        job["status"] = {}
        self.jobs[name] = job
        if not job["spec"].get("suspend"):
            self._add_pod(job)
        return job

    def _delete(self, job: Job, policy: str) -> Job:
        """Delete a Job: in the foreground it stays until its pods have ended."""
        pods = [pod for pod in self._pods_of(job) if pod["status"]["phase"] == "Running"]
        for pod in self._pods_of(job):
            pod["metadata"]["deletionTimestamp"] = self._time()
        if policy == "Foreground" and pods:
            job["metadata"].setdefault("deletionTimestamp", self._time())
        else:
            self._remove(job)
        return {"kind": "Status", "status": "Success"}

    @staticmethod
    def _patch(job: Job, patch: Any) -> Job:
        [(part, values)] = patch["metadata"].items()
        job["metadata"][part] |= values
        return job

    # The controller of Jobs

    def _add_pod(self, job: Job) -> None:
        template, name = job["spec"]["template"], job["metadata"]["name"]
        labels = template["metadata"]["labels"] | {"batch.kubernetes.io/job-name": name}
        pod = f"{name}-{len(self.pods):05}"
        self.pods[pod] = {
            "metadata": {"name": pod, "labels": labels, "creationTimestamp": self._time()},
            "spec": template["spec"],
            "status": {"phase": "Pending", "conditions": [], "containerStatuses": []},
        }

    def _pods_of(self, job: Job) -> list[Job]:
        name = job["metadata"]["name"]
        return [
            pod
            for pod in self.pods.values()
            if pod["metadata"]["labels"]["batch.kubernetes.io/job-name"] == name
        ]

    def _remove(self, job: Job) -> None:
        for pod in self._pods_of(job):
            del self.pods[pod["metadata"]["name"]]
        del self.jobs[job["metadata"]["name"]]

    def _fail(self, job: Job, pod: Job, exit_code: int) -> None:
        """Judge a pod that failed by the policy of its Job; the first rule that matches counts."""
        conditions = {it["type"] for it in pod["status"]["conditions"] if it["status"] == "True"}
        for number, rule in enumerate(job["spec"]["podFailurePolicy"]["rules"]):
            on_codes = rule.get("onExitCodes")
            if any(it["type"] in conditions for it in rule.get("onPodConditions", ())):
                assert rule["action"] == "Ignore"
                self._add_pod(job)
                return
            if on_codes and exit_code not in on_codes["values"]:
                assert (rule["action"], on_codes["operator"]) == ("FailJob", "NotIn")
                words = f"Container worker for pod {NAMESPACE}/{pod['metadata']['name']} failed "
                words += f"with exit code {exit_code} matching FailJob rule at index {number}"
                self._end(job, "Failed", "PodFailurePolicy", words)
                return
        assert job["spec"]["backoffLimit"] == 0
        self._end(job, "Failed", "BackoffLimitExceeded", "Job has reached the backoff limit")

    def _end(self, job: Job, kind: str, reason: str = "", message: str = "") -> None:
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        job["status"]["conditions"] = [condition | {"lastTransitionTime": self._time()}]

    # What a test does in the place of kubelets, Kueue and time

    def alive(self) -> list[Job]:
        """Return the Jobs that have not ended."""
        return [job for job in self.jobs.values() if "conditions" not in job["status"]]

    def run_pods(self) -> None:
        """Let all pods run that wait."""
        with self.lock:
            for pod in self.pods.values():
                if pod["status"]["phase"] == "Pending":
                    self.run_pod(pod)

    def run_pod(self, pod: Job) -> None:
        """Let a pod run."""
        pod["status"]["phase"] = "Running"
        self._set_state(pod, running={"startedAt": self._time()})

    def exit(self, job: Job, exit_code: int = 0, reason: str = "Error", log: str = "") -> None:
        """Let the running pod of a Job end."""
        self.exit_pod(self._pods_of(job)[-1], exit_code, reason, log)

    def exit_pod(self, pod: Job, exit_code: int, reason: str = "Error", log: str = "") -> None:
        """Let a running pod end."""
        job = self.jobs[pod["metadata"]["labels"]["batch.kubernetes.io/job-name"]]
        with self.lock:
            pod["status"]["phase"] = "Failed" if exit_code else "Succeeded"
            state = {"reason": reason if exit_code else "Completed", "message": log}
            ended = {"exitCode": exit_code, "finishedAt": self._time(), **state}
            self._set_state(pod, terminated=ended)
            if "deletionTimestamp" in job["metadata"]:
                self._remove(job)
            elif exit_code:
                self._fail(job, pod, exit_code)
            else:
                self._end(job, "Complete")

    def disrupt(self, job: Job) -> None:
        """Take a Job's pod away, as the end of a spot machine does."""
        self.mark_disrupted(self._pods_of(job)[-1])
        self.exit(job, 137)

    def mark_disrupted(self, pod: Job) -> None:
        """Mark a pod as disrupted, which is not its own failure."""
        self._set_condition(pod, "DisruptionTarget", "True", "DeletionByTaintManager")

    def leave_unscheduled(self, message: str) -> None:
        """Let the scheduler find no node for pods that wait."""
        with self.lock:
            for pod in self.pods.values():
                if pod["status"]["phase"] == "Pending":
                    self._set_condition(pod, "PodScheduled", "False", "Unschedulable", message)

    def break_image(self, reason: str, message: str) -> None:
        """Let no container start that waits."""
        with self.lock:
            for pod in self.pods.values():
                if pod["status"]["phase"] == "Pending":
                    self._set_state(pod, waiting={"reason": reason, "message": message})

    def admit(self) -> None:
        """Resume what is suspended, as Kueue does."""
        with self.lock:
            for job in self.jobs.values():
                if job["spec"].pop("suspend", False):
                    self._add_pod(job)

    def remove_ended(self) -> None:
        """Remove all Jobs that have ended, as their time to live does."""
        with self.lock:
            for job in [job for job in self.jobs.values() if "conditions" in job["status"]]:
                self._remove(job)

    @staticmethod
    def _set_state(pod: Job, **state: Any) -> None:
        pod["status"]["containerStatuses"] = [{"name": "worker", "state": state}]

    @staticmethod
    def _set_condition(pod: Job, kind: str, status: str, reason: str, message: str = "") -> None:
        condition = {"type": kind, "status": status, "reason": reason, "message": message}
        pod["status"]["conditions"].append(condition)

    def _time(self) -> str:
        return self.now().strftime("%Y-%m-%dT%H:%M:%SZ")


def _validate(job: Job) -> None:
    """Refuse what an API server would, of the things that a launcher composes."""
    name, spec = job["metadata"]["name"], job["spec"]
    labels = job["metadata"]["labels"] | spec["template"]["metadata"]["labels"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    is_valid = (
        _NAME.fullmatch(name)
        and len(name) + 6 <= 63  # of its pod
        and all(_LABEL.fullmatch(value) for value in labels.values())
        and pod["restartPolicy"] == "Never"
        and all(isinstance(each["value"], str) for each in container["env"])
        and container["image"].strip()
    )
    if not is_valid:
        raise Refusal(422, "Invalid", f'Job.batch "{name}" is invalid')


@contextmanager
def serving(cluster: Cluster) -> Iterator[Cluster]:
    """Serve a cluster on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # In one packet: a second one waits for the first one's acknowledgement.
        wbufsize = -1

        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            if self.command == "PATCH":
                assert self.headers["Content-Type"] == "application/merge-patch+json"
            try:
                answer = cluster.answer(
                    self.command, self.path, self.headers.get("Authorization"), body
                )
                code = 201 if self.command == "POST" else 200
            except Refusal as exc:
                answer, code = exc.status, exc.status["code"]
            if self.command == "POST" and cluster.num_lost:
                cluster.num_lost -= 1
                self.close_connection = True
                return
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = do_PATCH = _handle  # noqa: N815 - http.server's names

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    cluster.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield cluster
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""A kubelet that runs pods of a cluster as processes of this machine."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from localstack.processes import Processes
from tests.handler.fleet.kubernetes.cluster import Cluster, Job

_POLL_SECONDS = 0.1


class Kubelet:
    """Starts the container of each pod, sends SIGTERM to deleted ones, and reports their ends."""

    def __init__(self, cluster: Cluster, processes: Processes) -> None:
        self._cluster, self._processes = cluster, processes
        self._stopped: set[str] = set()
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Reconcile in a thread until the block is left."""
        stop = threading.Event()

        def run() -> None:
            while not stop.wait(_POLL_SECONDS):
                self.reconcile()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def reconcile(self) -> None:
        """Bring processes to the state of their pods, and pods to that of their processes."""
        with self._cluster.lock:
            for name, pod in list(self._cluster.pods.items()):
                if pod["status"]["phase"] == "Pending":
                    self._start(name, pod)
                    self._cluster.run_pod(pod)
                elif (process := self.running.get(name)) is not None:
                    self._look_after(name, pod, process)

    def _start(self, name: str, pod: Job) -> None:
        [container] = pod["spec"]["containers"]
        variables = {each["name"]: each["value"] for each in container["env"]}
        variables["TIDEMILL_WORKER"] = name
        command = (sys.executable, "-m", "tidemill", *container["args"])
        self.running[name] = self._processes.start(name, *command, **variables)

    def _look_after(self, name: str, pod: Job, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            is_deleted = "deletionTimestamp" in pod["metadata"]
            if is_deleted and name not in self._stopped:
                self._stopped.add(name)
                process.terminate()
            return
        del self.running[name]
        log = self._processes.read_log(name)
        status = process.returncode
        self._cluster.exit_pod(pod, status if status >= 0 else 128 - status, log=log[-2048:])

    def disrupt(self, name: str) -> None:
        """Take a pod away as its node does when it is drained: a condition, then SIGTERM."""
        with self._cluster.lock:
            self._cluster.mark_disrupted(self._cluster.pods[name])
            self.running[name].terminate()

    def kill(self, name: str) -> None:
        """Kill a pod's process."""
        self.running[name].kill()

"""Processes of `tidemill` that tests start: forked from one that has imported the libraries.

Imports take up to eight seconds of CPU time in each process. A server (`python -m tests.warm_start
FD`) imports once, and clones itself for each command. With CLONE_PARENT the new process is the
requester's child: waiting, signals and process groups are as usual. The server starts before the
processes of a distributed run, which it clones, too; otherwise after the first test that could have
used it.

A command is started as usual on other systems, with other settings of Python or of a library, and
if `TIDEMILL_COLD_STARTS` is set, as it is for `make test-all`, `make test-newest` and tests of time
limits: forked commands share a hash seed and all imports.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import io
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from runpy import run_module, run_path
from typing import Any, Final

from tidemill.engine.child_command import module_command

ROOT: Final = Path(__file__).parents[1]
SCRIPTS: Final = {
    str(ROOT / name)
    for name in (
        "tests/engine_process/scripted_engine.py",
        "tests/offline/scripted.py",
        "tests/server/local/serve_process.py",
    )
}
# A program of `python -c` that begins with this line is forked, too.
FORKED: Final = "# tests/warm_start.py\n"
COLD_VARIABLE: Final = "TIDEMILL_COLD_STARTS"
# Imports of commands and of test files. Not `tidemill.handler`, whose logger reads the environment.
PRELOADED: Final = (
    "aiobotocore.session",
    "av",
    "aws_lambda_powertools",
    "boto3",
    "httpx",
    "jinja2",
    "jupyter_client.blocking.client",
    "moto.server",
    "numba",
    "openai.types.chat",
    "openapi_spec_validator",
    "playwright.sync_api",
    "pyarrow.compute",
    "sentence_transformers.sentence_transformer.modules",
    "starlette.applications",
    "tokenizers",
    "torch",
    "transformers.models.bert.modeling_bert",
    "uvicorn",
    "httptools",
    "tidemill.cli.main",
    *(f"tidemill.engine.kernels.cpu.{name}" for name in ("adapters", "attention", "int8", "qkv")),
    "tidemill.engine.load",
    "tidemill.engine.loop.assembly",
    "tidemill.engine_process.child",
    "tidemill.engine_process.client",
    "tidemill.offline.engine.watched_engine",
    "tidemill.offline.run.job",
    "tidemill.server.app",
    "tidemill.server.local.setup",
)
# Read by Python or at an import: a process with other values is started as usual.
_READ_AT_IMPORT: Final = (
    *("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "TZ", "HOME", "XDG_"),
    *("CUDA_", "HF_", "KMP_", "MKL_", "NUMBA_", "OMP_", "TOKENIZERS_", "TORCH", "TRITON_"),
    "TIDEMILL_KERNELS",
)
_UNBUFFERED: Final = "PYTHONUNBUFFERED"
# The last three: scikit-learn and torch set them when a test first imports these.
_NOT_READ: Final = {
    _UNBUFFERED,
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"),
}
_CLONES: Final = {"x86_64": 56, "aarch64": 220}  # numbers of the system call
_CLONE_PARENT: Final = 0x8000
_MAX_BYTES: Final = 1 << 17
_MAX_FDS: Final = 64
_START_SECONDS: Final = 120.0
# The command of Jupyter's kernels.
_KERNEL: Final = "ipykernel_launcher"
# Words of commands that start other processes; each of them gets a server, as a child.
_HAVE_CHILDREN: Final = frozenset({"worker", "serve", "launcher", "-dp", "--data-parallel-size"})
# The command of xdist's processes, by execnet.
_TESTS: Final = "import sys;exec(eval(sys.stdin.readline()))"
_MODULE_COMMAND: Final = module_command("")[:-1]

Environment = dict[str, str]


class WarmStarts:
    """Starts processes for `subprocess` in this process, through a connection to a server."""

    def __init__(self, start: Callable[..., int], connection: socket.socket | None = None) -> None:
        self._start = start
        self._pid = os.getpid()
        self._server: subprocess.Popen[bytes] | None = None
        self._connection = connection
        self._is_ready = False
        self._is_wanted = False
        self.is_refused = False
        self._lock = threading.Lock()
        self._environment = read_at_import(dict(os.environ))
        self._ignored = _ignored_signals()
        atexit.register(self._close)

    def fork_exec(self, *arguments: Any) -> int:
        """Start a process like `_posixsubprocess.fork_exec`, whose arguments these are."""
        return self._start_warm(*arguments) or self._start(*arguments)

    def _start_warm(self, *arguments: Any) -> int | None:
        args, _, close_fds, kept, cwd, env = arguments[:6]
        stdin, _, _, stdout, _, stderr, _, errors = arguments[6:14]
        _, is_new_session, group, *ids, _ = arguments[14:]
        environment = dict(os.environ) if env is None else _decoded(env)
        place = os.getcwd() if cwd is None else os.fsdecode(cwd)  # noqa: PTH109 - as it is
        if (
            (target := _target([*map(os.fsdecode, args)])) is None
            or not close_fds
            or COLD_VARIABLE in environment
            or any(each is not None and each != -1 for each in ids)
            or not Path(place).is_dir()
            or read_at_import(environment) != self._environment
            or _ignored_signals() != self._ignored
        ):
            return None
        fds = {number: number for number in kept if number != errors}
        fds |= {at: at if fd == -1 else fd for at, fd in enumerate((stdin, stdout, stderr))}
        request = (target, [*fds], place, environment, bool(is_new_session), group)
        with self._lock:
            if not self._can_start():
                return None
            pid = self._ask(json.dumps(request).encode(), [*fds.values()])
        while pid and is_new_session and os.getpgid(pid) != pid:  # the last step of its preparation
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
            time.sleep(0.001)
        return pid

    def _can_start(self) -> bool:
        """Return whether the server is ready."""
        if os.getpid() != self._pid:
            return False
        self._is_wanted = True
        if not self._is_ready and self._connection is not None:
            with suppress(BlockingIOError):
                self._is_ready = bool(self._connection.recv(1, socket.MSG_DONTWAIT))
        return self._is_ready

    def start_wanted(self, *, is_wanted: bool = False) -> None:
        """Start the server if it is wanted, in the main thread: its processes may end with it."""
        if not (is_wanted or self._is_wanted) or self._connection is not None:
            return
        self._ignored = _ignored_signals()  # as `nohup` does; the server inherits it
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_start", str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # One thread: the clone runs no handlers of `pthread_atfork`.
                env=os.environ | {"JE_ARROW_MALLOC_CONF": "background_thread:false"},
            )

    def wait(self) -> None:
        """Start the server, and wait until it is ready."""
        self.start_wanted(is_wanted=True)
        if not self._is_ready and self._connection is not None:
            self._connection.settimeout(_START_SECONDS)
            with suppress(OSError):  # commands then start as usual
                self._is_ready = bool(self._connection.recv(1))
            self._connection.settimeout(None)

    def _ask(self, request: bytes, fds: Sequence[int]) -> int | None:
        """Return the ID of the process that the server has started, or None."""
        assert self._connection is not None
        if len(request) > _MAX_BYTES or len(fds) > _MAX_FDS:
            return None
        try:
            socket.send_fds(self._connection, [request], fds)
            answer = self._connection.recv(32)
        except OSError:  # a standard stream is closed, or the server has ended
            return None
        pid = int(answer or 0)
        self.is_refused |= pid < 0
        return pid if pid > 0 else None  # -1 is all processes for `os.kill`

    def _close(self) -> None:
        if self._connection is None or os.getpid() != self._pid:
            return
        self._connection.close()
        if self._server is not None:
            self._server.kill()  # the processes that it has started are not its children
            self._server.wait()


_KEPT_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _ignored_signals() -> list[bool]:
    return [signal.getsignal(number) is signal.SIG_IGN for number in _KEPT_SIGNALS]


def install(connection: socket.socket | None = None) -> WarmStarts | None:
    """Start commands of this process from a server, unless the system or a setting forbids it."""
    if sys.platform != "linux" or platform.machine() not in _CLONES or COLD_VARIABLE in os.environ:
        return None
    if (installed := installed_starts()) is not None:  # in a clone
        return installed
    starts = WarmStarts(subprocess._fork_exec, connection)  # type: ignore[attr-defined]
    subprocess._fork_exec = starts.fork_exec  # type: ignore[attr-defined]
    return starts


def installed_starts() -> WarmStarts | None:
    """Return the starts of this process, if they are installed."""
    owner = getattr(subprocess._fork_exec, "__self__", None)  # type: ignore[attr-defined]
    return owner if isinstance(owner, WarmStarts) else None


def _target(command: list[str]) -> tuple[str, list[str]] | None:
    """Return the module or script that a command runs, and its arguments, or None."""
    if command[0] != sys.executable:
        return None
    if command[1:] == ["-u", "-c", _TESTS]:
        return _TESTS, []
    if command[1:2] == ["-c"] and command[2].startswith(FORKED):
        return FORKED, command[2:]
    if command[1:3] in (["-m", "tidemill"], ["-m", _KERNEL]):
        return command[2], command[3:]
    if command[: len(_MODULE_COMMAND)] == _MODULE_COMMAND:
        module, *arguments = command[len(_MODULE_COMMAND) :]
        return module, arguments
    if command[1:2] and command[1] in SCRIPTS:
        return command[1], command[2:]
    return None


def read_at_import(environment: Mapping[str, str]) -> Environment:
    """Return the variables that Python or an import reads; a forked process may change others."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_IMPORT) and name not in _NOT_READ
    }


def _decoded(pairs: Sequence[bytes]) -> Environment:
    return dict(os.fsdecode(pair).split("=", 1) for pair in pairs)


# The server


def serve(connection: socket.socket) -> None:
    """Start processes until the other end is closed; run a command in each of them."""
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)
    _fill_numba()
    gc.collect()
    gc.freeze()
    connection.send(b"!")
    request, fds, own_server = _wait_for_command(connection)
    target, numbers, place, environment, is_new_session, group = request
    taken, own = dict(zip(numbers, fds, strict=True)), max(numbers) + 1
    if own_server is not None:
        taken[own] = own_server.detach()
    _take(taken)
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    if is_new_session:
        os.setsid()
    elif group is not None and group >= 0:
        os.setpgid(0, group)
    if own_server is not None:
        own_server = socket.socket(fileno=own)
        own_server.set_inheritable(False)
        install(own_server)
    _run(*target)


def _wait_for_command(connection: socket.socket) -> tuple[Any, list[int], socket.socket | None]:
    """Return in a new process: a request, its file descriptors, and a server if it needs one."""
    while True:
        data = b""
        fds: list[int] = []
        with suppress(ConnectionResetError):  # closed before it was used
            data, fds, _, _ = socket.recv_fds(connection, _MAX_BYTES, _MAX_FDS)
        if not data:
            os._exit(0)
        request = json.loads(data)
        pid = _clone()
        if pid:
            connection.send(b"%d" % pid)
        else:
            connection.close()
            target, arguments = request[0]
            if target not in {_TESTS, FORKED, _KERNEL} and _HAVE_CHILDREN.isdisjoint(arguments):
                return request, fds, None
            ours, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if os.fork():
                connection.close()
                return request, fds, ours
            ours.close()  # this process is the server of the new one
            connection.send(b"!")
        for fd in fds:
            os.close(fd)


def _fill_numba() -> None:
    """Fill numba's tables of operations, as the first kernel does: half a second of CPU time."""
    with suppress(ImportError):
        from numba.core.registry import cpu_target

        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()


def _clone() -> int:
    """Fork as `os.fork`, but let the new process be a child of this one's parent."""
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None)
    libc.syscall.restype = ctypes.c_long
    python.PyOS_BeforeFork()
    words = (_CLONES[platform.machine()], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    pid: int = libc.syscall(*map(ctypes.c_long, words))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


def _take(fds: dict[int, int]) -> None:
    """Give file descriptors their numbers, and close all others."""
    free = max(*fds, *fds.values()) + 1
    lifted = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, free) for number, fd in fds.items()}
    for number, fd in lifted.items():
        os.dup2(fd, number)
    for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - names alone
        if fd not in fds:
            with suppress(OSError):  # the listing's own
                os.close(fd)


def _run(target: str, arguments: list[str]) -> None:
    _open_streams(is_unbuffered=target == _TESTS or bool(os.environ.get(_UNBUFFERED)))
    is_script = target in SCRIPTS
    sys.argv = ["-c", *arguments[1:]] if target == FORKED else [target, *arguments]
    sys.path[0] = str(Path(target).parent) if is_script else os.getcwd()  # noqa: PTH109 - as Python
    if target == _TESTS:
        exec(target, vars(sys.modules["__main__"]))  # noqa: S102 - as `python -c`
    elif target == FORKED:
        exec(arguments[0], vars(sys.modules["__main__"]))  # noqa: S102 - as above
    elif is_script:
        run_path(target, run_name="__main__")
    else:
        run_module(target, run_name="__main__", alter_sys=True)


def _open_streams(*, is_unbuffered: bool) -> None:
    """Open the standard streams as Python does at its start."""
    sys.stdin = sys.__stdin__ = _text(0, sys.stdin)  # type: ignore[misc]
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = _text(number, getattr(sys, name), is_unbuffered=is_unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _text(number: int, like: Any, *, is_unbuffered: bool = False) -> io.TextIOWrapper:
    mode = "wb" if number else "rb"
    binary: Any = open(number, mode, 0 if is_unbuffered else -1, closefd=False)  # noqa: SIM115 - until the end
    return io.TextIOWrapper(
        binary,
        like.encoding,
        like.errors,
        newline=None if number else "\n",
        line_buffering=number == 2 or binary.isatty(),
        write_through=is_unbuffered,
    )


if __name__ == "__main__":
    # By its name, by which processes of tests import it.
    import_module("tests.warm_start").serve(socket.socket(fileno=int(sys.argv[1])))

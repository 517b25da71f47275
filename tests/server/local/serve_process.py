"""`tidemill serve` with a scripted engine: `python tests/server/local/serve_process.py serve …`.

A body's `wait` is the number of seconds before its answer, and its `status` that of an error. With
a `gate`, the answer waits until a file of this name exists.
`--file-bytes N` limits the size of every file, as on a full disk.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.engine_process.scripted_engine import pass_gate
from tests.server.local.rig import ScriptedEngine
from tidemill.cli.commands.serve import options_from, run_server
from tidemill.cli.main import exit_status_of, make_parser
from tidemill.engine.config import EngineConfig
from tidemill.protocol.contract import Reply, Usage


class Timed(ScriptedEngine):
    """Answers after the number of seconds in a body."""

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Wait, then repeat the prompt."""
        del url
        await asyncio.sleep(body.get("wait", 0))
        await pass_gate(body)
        if (status := body.get("status", 200)) != 200:
            error = {"message": "No.", "type": "t", "param": None, "code": "c"}
            return Reply(status, {"error": error}, Usage(1, 0, 0))
        prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        message = {"role": "assistant", "content": f"{prompt}!"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        shown = {"id": request_id, "created": created, "model": body["model"], "choices": [choice]}
        return Reply(200, shown, Usage(10, 4, 3))


def main() -> int:
    """Run the command line with the scripted engine."""
    own = argparse.ArgumentParser()
    own.add_argument("--file-bytes", type=int)
    script, arguments = own.parse_known_args()
    if script.file_bytes is not None:
        sys.dont_write_bytecode = True  # it would be cut off, too
        resource.setrlimit(resource.RLIMIT_FSIZE, (script.file_bytes, script.file_bytes))

    def load(config: EngineConfig, **_: object) -> Timed:
        del config
        return Timed(max_num_seqs=16)

    options = options_from(make_parser().parse_args(arguments))
    return exit_status_of(lambda: run_server(options, load=load))


if __name__ == "__main__":
    sys.exit(main())

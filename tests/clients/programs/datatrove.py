"""Documents answered by `InferenceRunner` with an `endpoint` server: chats, then completions.

Package: datatrove
Point: `InferenceConfig(server_type="endpoint", endpoint_url="http://HOST:8000", …)`
Note: it checks readiness without a key, so the server must run without `--api-key`
"""

import json
import os
from pathlib import Path

from datatrove.data import Document
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
from datatrove.pipeline.writers import JsonlWriter

URL = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")


async def chat(document, generate):
    """Send a chat with a document's question."""
    return await generate({"messages": [{"role": "user", "content": document.text}]})


async def complete(document, generate):
    """Continue a document."""
    return await generate({"prompt": document.text, "max_tokens": 8})


def run(folder, rollout, texts, **how):
    """Return the results of each document."""
    config = InferenceConfig(
        server_type="endpoint",
        model_name_or_path="tidemill-demo",
        endpoint_url=URL,
        default_generation_params={"temperature": 0},
        server_ready_delay_sec=0.2,
        **how,
    )
    runner = InferenceRunner(rollout, config, JsonlWriter(folder, compression=None))
    runner.run([Document(text, id=str(number)) for number, text in enumerate(texts)])
    lines = "".join(path.read_text() for path in sorted(Path(folder).glob("*.jsonl"))).splitlines()
    rows = sorted(map(json.loads, lines), key=lambda row: row["id"])
    return [[each["text"] for each in row["metadata"]["rollout_results"]] for row in rows]


print(
    json.dumps(
        {
            "chats": run(
                "chats", chat, ["What is 12 + 7?", "What is 13 + 7?"], rollouts_per_document=2
            ),
            "completions": run("texts", complete, ["The capital of France is"], use_chat=False),
        }
    )
)

"""A file uploaded by `OpenAIHook`, run by `OpenAITriggerBatchOperator`, its rows downloaded.

Point: `AIRFLOW_CONN_OPENAI_DEFAULT={"conn_type": "openai", "host": URL, "password": KEY}`
"""

import json
import os
from pathlib import Path

from airflow.providers.openai.hooks.openai import OpenAIHook
from airflow.providers.openai.operators.openai import (
    OpenAIEmbeddingOperator,
    OpenAITriggerBatchOperator,
)

os.environ["AIRFLOW_CONN_OPENAI_DEFAULT"] = json.dumps({
    "conn_type": "openai",
    "host": os.environ["OPENAI_BASE_URL"],
    "password": os.environ["OPENAI_API_KEY"],
})
os.environ["AIRFLOW_CONN_VECTORS"] = json.dumps({
    "conn_type": "openai",
    "host": os.environ["VECTORS_BASE_URL"],
    "password": os.environ["OPENAI_API_KEY"],
})
lines = [
    {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "tidemill-demo",
            "messages": [{"role": "user", "content": f"What is {number} + 7?"}],
            "temperature": 0,
        },
    }
    for number in (12, 13)
]
Path("in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
hook = OpenAIHook()
uploaded = hook.upload_file("in.jsonl", purpose="batch")
operator = OpenAITriggerBatchOperator(
    task_id="batch",
    file_id=uploaded.id,
    endpoint="/v1/chat/completions",
    wait_seconds=1,
    metadata={"dag": "sums"},
)
batch = hook.get_batch(operator.execute({}))
rows = [json.loads(line) for line in hook.conn.files.content(batch.output_file_id).text.splitlines()]
embedded = OpenAIEmbeddingOperator(
    task_id="vectors", conn_id="vectors", input_text=["The tide", "The mill"], model="vectors"
)
print(json.dumps({
    "status": batch.status,
    "metadata": batch.metadata,
    "answers": [row["response"]["body"]["choices"][0]["message"]["content"] for row in rows],
    "vectors": [len(vector) for vector in embedded.execute({})],
}))

"""A batch by `OpenAIHook` and `OpenAITriggerBatchOperator`.

Package: apache-airflow-providers-openai
Point: `AIRFLOW_CONN_OPENAI_DEFAULT={"conn_type": "openai", "host": URL, "password": KEY}`
"""

import json
import os
from pathlib import Path

from airflow.providers.openai.hooks.openai import OpenAIHook
from airflow.providers.openai.operators.openai import OpenAITriggerBatchOperator

os.environ["AIRFLOW_CONN_OPENAI_DEFAULT"] = json.dumps(
    {
        "conn_type": "openai",
        "host": os.environ["OPENAI_BASE_URL"],
        "password": os.environ["OPENAI_API_KEY"],
    }
)
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
sums = OpenAITriggerBatchOperator(
    task_id="sums",
    file_id=uploaded.id,
    endpoint="/v1/chat/completions",
    wait_seconds=1,
    metadata={"dag": "sums"},
)
batch = hook.get_batch(sums.execute({}))
content = hook.conn.files.content(batch.output_file_id)
rows = [json.loads(line) for line in content.text.splitlines()]
print(
    json.dumps(
        {
            "status": batch.status,
            "metadata": batch.metadata,
            "answers": [
                row["response"]["body"]["choices"][0]["message"]["content"] for row in rows
            ],
        }
    )
)

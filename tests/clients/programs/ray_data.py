"""Rows of a dataset by `HttpRequestProcessorConfig`.

Package: ray
Point: `HttpRequestProcessorConfig(url=URL + "/chat/completions", headers={"Authorization": …})`
"""

import json
import os

import ray
from ray.data.llm import HttpRequestProcessorConfig, build_processor

ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
config = HttpRequestProcessorConfig(
    url=f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
    headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    qps=50,
    concurrency=1,
)
processor = build_processor(
    config,
    preprocess=lambda row: {
        "payload": {
            "model": "tidemill-demo",
            "messages": [{"role": "user", "content": f"What is {row['id'] + 12} + 7?"}],
            "temperature": 0,
        },
        "id": row["id"],
    },
    postprocess=lambda row: {
        "id": row["id"],
        "sum": row["http_response"]["choices"][0]["message"]["content"],
    },
)
rows = sorted(processor(ray.data.range(8)).take_all(), key=lambda row: row["id"])
print(json.dumps({"sums": [row["sum"] for row in rows]}))

"""A benchmark of ten streamed chats.

Package: guidellm
Point: `guidellm run --backend kind=openai_http,target=http://127.0.0.1:8000,model=NAME …`
"""

import json
import os
import subprocess
import sys
from pathlib import Path

rows = [{"prompt": f"What is {number} + 7?"} for number in range(10)]
Path("prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
target = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
subprocess.run(
    [
        str(Path(sys.executable).with_name("guidellm")),
        "run",
        "--backend",
        f"kind=openai_http,target={target},model=tidemill-demo,api_key={os.environ['OPENAI_API_KEY']}",
        "--profile",
        "kind=concurrent,streams=4",
        "--constraint",
        "kind=max_requests,count=10",
        "--data",
        "kind=json_file,path=prompts.jsonl",
        "--output",
        "kind=json,path=report.json",
        "--disable-console",
    ],
    check=True,
)
[benchmark] = json.loads(Path("report.json").read_text(encoding="utf-8"))["benchmarks"]
done = benchmark["requests"]["successful"]
print(
    json.dumps(
        {
            "totals": benchmark["metrics"]["request_totals"],
            "written": all(request["output"] for request in done),
            "timed": all(request["info"]["timings"]["first_token_iteration"] for request in done),
            "counted": benchmark["metrics"]["output_token_count"]["successful"]["total_sum"] > 0,
        }
    )
)

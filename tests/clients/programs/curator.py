"""Rows of a dataset through the Batch API (`batch=True`).

Package: bespokelabs-curator
Point: `curator.LLM(NAME, backend="openai", batch=True, backend_params={"base_url": URL, …})`
"""

import json
import os

from bespokelabs import curator
from datasets import Dataset


class Sums(curator.LLM):
    """Adds seven."""

    def prompt(self, input):
        """Ask for a sum."""
        return f"What is {input['number']} + 7?"

    def parse(self, input, response):
        """Keep the number and its sum."""
        return {"number": input["number"], "sum": response}


sums = Sums(
    model_name="tidemill-demo",
    backend="openai",
    batch=True,
    backend_params={
        "base_url": os.environ["OPENAI_BASE_URL"],
        "api_key": os.environ["OPENAI_API_KEY"],
        "batch_check_interval": 1,
    },
    generation_params={"temperature": 0},
)
answered = sums(Dataset.from_list([{"number": number} for number in (12, 13, 14)]))
rows = sorted(answered.dataset.to_list(), key=lambda row: row["number"])
print(json.dumps({"sums": [row["sum"] for row in rows]}))

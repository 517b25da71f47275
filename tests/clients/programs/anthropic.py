"""Messages by `/v1/messages`: whole, streamed, stopped, as a JSON schema, counted, in batches.

Package: anthropic
Point: `anthropic.Anthropic(base_url="http://127.0.0.1:8000", api_key=KEY)`
"""

import json
import os
import time

import anthropic

client = anthropic.Anthropic(
    base_url=os.environ["OPENAI_BASE_URL"].removesuffix("/v1"),
    api_key=os.environ["OPENAI_API_KEY"],
    max_retries=0,
)
given = {
    "model": "tidemill-demo",
    "max_tokens": 20,
    "extra_body": {"temperature": 0},
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}
whole = client.messages.create(**given)
with client.messages.stream(**given) as stream:
    streamed = "".join(stream.text_stream)
    last = stream.get_final_message()
stopped = client.messages.create(**given, stop_sequences=["s"])
schema = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
lisbon = "Extract the city as JSON: Maria is 34 years old and lives in Lisbon."
home = client.messages.create(
    **{**given, "messages": [{"role": "user", "content": lisbon}]},
    output_config={"format": {"type": "json_schema", "schema": schema}},
)
counted = client.messages.count_tokens(model=given["model"], messages=given["messages"])
line = {name: value for name, value in given.items() if name != "extra_body"} | {"temperature": 0}
made = client.messages.batches.create(
    requests=[
        {"custom_id": "a", "params": line},
        {"custom_id": "b", "params": {**line, "model": "claude"}},
    ]
)
while client.messages.batches.retrieve(made.id).processing_status != "ended":
    time.sleep(0.1)
results = {row.custom_id: row.result for row in client.messages.batches.results(made.id)}
listed = [batch.id for batch in client.messages.batches.list(limit=1)]
deleted = client.messages.batches.delete(made.id).type
try:
    client.messages.create(**{**given, "model": "claude"})
except anthropic.NotFoundError as error:
    refused = error.body["error"]["type"]
print(
    json.dumps(
        {
            "whole": whole.content[0].text,
            "streamed": streamed,
            "ended": [whole.stop_reason, last.stop_reason, stopped.stop_sequence],
            "schema": json.loads(home.content[0].text),
            "counted": counted.input_tokens == whole.usage.input_tokens,
            "refused": refused,
            "batch": [results["a"].message.content[0].text, results["b"].error.error.type],
            "listed": listed == [made.id],
            "deleted": deleted,
        }
    )
)

"""Messages by `/v1/messages`: whole, streamed, stopped, as a JSON schema, and counted.

Package: anthropic
Point: `anthropic.Anthropic(base_url="http://127.0.0.1:8000", api_key=KEY)`
"""

import json
import os

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
        }
    )
)

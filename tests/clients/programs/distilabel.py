"""Outputs of `OpenAILLM(use_offline_batch_generation=True)`, and of the same model online.

Point: `OpenAILLM(model=NAME, base_url=URL, api_key=KEY)`
"""

import json

from distilabel.models.llms import OpenAILLM


def answers(**more):
    """Return what a model says to two questions."""
    llm = OpenAILLM(
        model="tidemill-demo", generation_kwargs={"temperature": 0, "max_new_tokens": 16}, **more
    )
    llm.load()
    asked = [[{"role": "user", "content": f"What is {number} + 7?"}] for number in (12, 13)]
    outputs = llm.generate_outputs(inputs=asked, temperature=0.0, max_new_tokens=16)
    llm.unload()
    return [output["generations"] for output in outputs]


print(json.dumps({
    "batch": answers(
        use_offline_batch_generation=True, offline_batch_generation_block_until_done=1
    ),
    "online": answers(),
}))

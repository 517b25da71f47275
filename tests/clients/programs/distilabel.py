"""`OpenAILLM` with `use_offline_batch_generation`.

Package: distilabel
Point: `OpenAILLM(model=NAME, base_url=URL, api_key=KEY, use_offline_batch_generation=True)`
"""

import json

from distilabel.models.llms import OpenAILLM

llm = OpenAILLM(
    model="tidemill-demo",
    use_offline_batch_generation=True,
    offline_batch_generation_block_until_done=1,
)
llm.load()
questions = [[{"role": "user", "content": f"What is {number} + 7?"}] for number in (12, 13)]
outputs = llm.generate_outputs(inputs=questions, temperature=0.0, max_new_tokens=16)
print(json.dumps({"answers": [output["generations"] for output in outputs]}))

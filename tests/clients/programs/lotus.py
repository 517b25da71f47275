"""Its semantic operators.

Package: lotus-ai
Point: `lotus.settings.configure(lm=LM("openai/NAME", api_base=URL, api_key=KEY))`
"""

import json
import os

import lotus
import pandas as pd
from lotus.models import LM

lotus.settings.configure(
    lm=LM(
        "openai/tidemill-demo",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        max_tokens=32,
        max_ctx_len=2048,
    )
)
frame = pd.DataFrame({"country": ["France", "Italy", "Spain"]})
mapped = frame.sem_map("What is the capital of {country}?")
kept = frame.sem_filter("{country} is in Europe")
print(
    json.dumps(
        {
            "rows": len(mapped),
            "answered": [isinstance(answer, str) and answer != "" for answer in mapped["_map"]],
            "kept": set(kept["country"]) <= set(frame["country"]),
        }
    )
)

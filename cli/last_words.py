"""What a command that ends badly leaves behind for whoever has started it.

SageMaker tells as the reason of a job's failure what stands in a file of this folder, which is
there in its containers alone; ECS's logs are read instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from cli.errors import CliError

FOLDER: Final = Path("/opt/ml/output")
_MAX_CHARS: Final = 1000


class _LastError(logging.Handler):
    """Keeps what was logged last as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.words = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        reason = getattr(record, "reason", None)
        self.words = f"{record.getMessage()}: {reason}" if reason else record.getMessage()


def leaving_last_words(command: Callable[[], int], folder: Path = FOLDER) -> int:
    """Return a command's exit status; if that is bad, leave its last complaint where one is read.

    What the command raises is raised on.
    """
    if not folder.is_dir():
        return command()
    from handler.log import logger

    last = _LastError()
    heard = logging.getLogger(logger.name)
    heard.addHandler(last)
    try:
        status = command()
    except CliError as exc:
        _leave(folder, str(exc))
        raise
    except Exception as exc:
        _leave(folder, repr(exc))
        raise
    finally:
        heard.removeHandler(last)
    if status != 0:
        _leave(folder, last.words or f"ended with status {status}")
    return status


def _leave(folder: Path, words: str) -> None:
    with suppress(OSError):  # the folder may be another user's: the end is the same without a word
        (folder / "failure").write_text(words[:_MAX_CHARS], encoding="utf-8")

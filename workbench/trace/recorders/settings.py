"""Settings of a recording, from environment variables: a scheduler class takes no options."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

_MAX_SETTING = 2**31 - 1

_MIN_KEY = 32


class RecordingSettings(msgspec.Struct, frozen=True):
    """Settings of a recording. ``from_environment`` names the variables.

    Attributes:
        folder: Folder of the files; made if it does not exist.
        token_ids: Whether to record prompt and output token ids. Without them a recording says nothing about the text.
            Only the user can read files with token ids.
        hashes: Whether to record keyed hashes of blocks, which say which prefixes are equal.
        max_file_mb: Size in MiB at which the next file begins.
        max_files: Maximum number of files of this recording, of which the oldest are deleted; 0 keeps all.
        gzip: Write .jsonl.gz instead of .jsonl.
        max_waiting: Maximum number of waiting requests named in a record, from the head of the queue.
    """

    folder: str = "workbench-traces"
    token_ids: bool = False
    hashes: bool = True
    max_file_mb: int = 256
    max_files: int = 8
    gzip: bool = True
    max_waiting: int = 512

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> RecordingSettings:
        """Read WORKBENCH_TRACE_DIR, _TOKENS, _HASHES, _MAX_MB, _MAX_FILES, _GZIP and _MAX_WAITING.

        Raises:
            ValueError: A variable has an invalid value; the message names it and the allowed values.
        """

        def number(name: str, default: int, low: int) -> int:
            text = environ.get(name, "")
            if not text:
                return default
            if not (text.isascii() and text.isdigit()) or not low <= int(text) <= _MAX_SETTING:
                raise ValueError(f"{name}={text!r} must be an integer from {low} to {_MAX_SETTING}")
            return int(text)

        def switch(name: str, default: bool) -> bool:
            text = environ.get(name, "")
            if text not in ("", "0", "1"):
                raise ValueError(f"{name}={text!r} must be 0 or 1")
            return text == "1" if text else default

        if 0 < len(environ.get("WORKBENCH_TRACE_KEY", "")) < _MIN_KEY:
            raise ValueError(f"WORKBENCH_TRACE_KEY must have {_MIN_KEY} characters or more: set a random one")
        default = cls()
        return cls(
            folder=os.path.abspath(environ.get("WORKBENCH_TRACE_DIR") or default.folder),
            token_ids=switch("WORKBENCH_TRACE_TOKENS", default.token_ids),
            hashes=switch("WORKBENCH_TRACE_HASHES", default.hashes),
            max_file_mb=number("WORKBENCH_TRACE_MAX_MB", default.max_file_mb, 1),
            max_files=number("WORKBENCH_TRACE_MAX_FILES", default.max_files, 0),
            gzip=switch("WORKBENCH_TRACE_GZIP", default.gzip),
            max_waiting=number("WORKBENCH_TRACE_MAX_WAITING", default.max_waiting, 0),
        )

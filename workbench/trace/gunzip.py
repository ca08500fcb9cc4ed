"""Decompression of traces in pieces, which refuses a small file that becomes a very large one."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

from workbench.trace.errors import TraceError

PIECE_BYTES = 2**20

MAX_RATIO = 150
"""Maximum ratio of a file's content to its size, beyond SUSPICIOUS_BYTES; traces compress 10 to 50 times."""

SUSPICIOUS_BYTES = 2**25


class Gunzip:
    """A gzip stream, or several in a row.

    Args:
        path: The file, for messages.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._stream = zlib.decompressobj(wbits=31)
        self._num_in = self._num_out = 0
        self._rest = b""
        self._is_between = True  # two streams, or at an end

    @property
    def is_cut_off(self) -> bool:
        """Whether the file ends, so far, in the middle of a stream."""
        return not self._is_between

    def pieces(self, block: bytes = b"") -> Iterator[bytes]:
        """The content of the next bytes of the file, and of earlier ones whose pieces were not all taken.

        Raises:
            TraceError: The stream is damaged, or its content is out of proportion to its size.
        """
        self._rest += block
        self._num_in += len(block)
        while self._rest:
            rest, self._rest = self._rest, b""
            try:
                piece = self._stream.decompress(rest, PIECE_BYTES)
            except zlib.error as problem:
                raise TraceError(f"{self._path} is a damaged gzip file: {problem}") from None
            self._rest = self._stream.unconsumed_tail
            self._is_between = self._stream.eof
            if self._stream.eof:
                self._rest = self._stream.unused_data
                self._stream = zlib.decompressobj(wbits=31)
            self._num_out += len(piece)
            if self._num_out > max(SUSPICIOUS_BYTES, MAX_RATIO * self._num_in):
                raise TraceError(
                    f"{self._path} becomes more than {MAX_RATIO} times as large when it is decompressed, as no trace "
                    "does: decompress it first if you trust it"
                )
            yield piece

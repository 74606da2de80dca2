"""Content-Encoding of request bodies: gzip and deflate, decoded as they arrive.

zstd is refused by name: this gateway's dependencies hold no decoder of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

from app.errors import ApiError, shorten

# zlib's `wbits`: a gzip header and trailer, or zlib's own (which is what HTTP calls deflate).
_GZIP, _ZLIB = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS
_WBITS = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": _ZLIB}
ACCEPTED = ("gzip", "deflate")
# Most bytes that are decoded at a time: a decompression bomb is noticed after so many.
PART_BYTES = 64 * 1024


class Decoder:
    """Decodes one body in parts of at most `PART_BYTES`, whatever the ratio of compression."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._zlib = zlib.decompressobj(_WBITS[encoding])

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Yield what the next `data` of the body decodes to. Raises ApiError 400."""
        while data:
            try:
                part = self._zlib.decompress(data, PART_BYTES)
            except zlib.error:
                raise self._invalid("cannot be decoded") from None
            if self._zlib.unused_data:
                raise self._invalid("continues after its end")
            data = self._zlib.unconsumed_tail
            if part:
                yield part

    def finish(self) -> None:
        """Check that the body was whole. Raises ApiError 400."""
        if not self._zlib.eof:
            raise self._invalid("ends too early")

    def _invalid(self, problem: str) -> ApiError:
        return ApiError(400, f"The body is not valid {self._encoding} data: it {problem}.")


def decoder_for(headers: Sequence[str]) -> Decoder | None:
    """The decoder that a request's Content-Encoding headers ask for; None if none is needed.

    Raises ApiError 415 for another encoding, or for more than one.
    """
    names = [name.strip().lower() for header in headers for name in header.split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if not names:
        return None
    if len(names) > 1 or names[0] not in _WBITS:
        encodings = shorten(", ".join(names))
        raise ApiError(
            415,
            f"Unsupported Content-Encoding '{encodings}': send the body as it is, or encoded once "
            f"with one of {', '.join(ACCEPTED)}.",
            headers={"Accept-Encoding": ", ".join(ACCEPTED)},
        )
    return Decoder(names[0])

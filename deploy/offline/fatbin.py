"""Prune a CUDA extension to the device code that one GPU architecture runs.

A CUDA shared library has its device code in the section `.nv_fatbin`: a container for each source
file, with an ELF image for each architecture and perhaps PTX. In every container the images of the
architecture are kept. A container that has none keeps its smallest entry, because the runtime
refuses an empty one; its kernels fail when they are launched. Freed bytes become zeros, so that
offsets stay valid and the file compresses to a fraction of its size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

SECTION = b".nv_fatbin"
CONTAINER_MAGIC = 0xBA55ED50
ELF_IMAGE = 2  # kind of an entry; PTX is 1
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of the header, bytes of the entries
_ENTRY = struct.Struct("<HHIQ")  # kind, version, bytes of the header, bytes of the image
_ARCHITECTURE = 28  # offset of the architecture's number in an entry's header
_ALIGNMENT = 8
_SECTION_HEADER = struct.Struct("<IIQQQQ")  # name, type, flags, address, offset, size


@dataclass(frozen=True, slots=True)
class Entry:
    """The device code of one container for one architecture, with its header."""

    kind: int
    architecture: int  # 90 for sm_90
    content: bytes


def prune(library: bytes, architecture: int) -> tuple[bytes, int, int]:
    """Prune an ELF64 shared library to `architecture`, such as 90 for sm_90.

    Returns it with the bytes of device code before and after. Raises ValueError if the library is
    no ELF64 file, has no device code, or none for the architecture.
    """
    image = bytearray(library)
    before = after = found = 0
    for start, end in _sections(library, SECTION):
        at = start
        while at + _CONTAINER.size <= end:
            magic, _, header, size = _CONTAINER.unpack_from(image, at)
            if magic != CONTAINER_MAGIC:
                at += _ALIGNMENT
                continue
            first, last = at + header, at + header + size
            entries = list(_entries(library, first, last))
            chosen = [e for e in entries if (e.kind, e.architecture) == (ELF_IMAGE, architecture)]
            found += len(chosen)
            kept = b"".join(e.content for e in chosen or [min(entries, key=_length)])
            image[first:last] = kept + bytes(size - len(kept))
            _CONTAINER.pack_into(image, at, *_CONTAINER.unpack_from(image, at)[:3], len(kept))
            before, after, at = before + size, after + len(kept), last
    if not found:
        raise ValueError(f"no device code for sm_{architecture}")
    return bytes(image), before, after


def _length(entry: Entry) -> int:
    return len(entry.content)


def _entries(library: bytes, start: int, end: int) -> Iterator[Entry]:
    while start < end:
        kind, _, header, size = _ENTRY.unpack_from(library, start)
        (architecture,) = struct.unpack_from("<I", library, start + _ARCHITECTURE)
        after = start + header + size
        yield Entry(kind, architecture, library[start:after])
        start = after


def _sections(library: bytes, name: bytes) -> Iterator[tuple[int, int]]:
    """First byte and end of each section of that name."""
    if library[:5] != b"\x7fELF\x02":
        raise ValueError("not an ELF64 file")
    (table,) = struct.unpack_from("<Q", library, 40)
    size, count, names_at = struct.unpack_from("<HHH", library, 58)
    headers = [_SECTION_HEADER.unpack_from(library, table + i * size) for i in range(count)]
    names = headers[names_at][4]
    for label, _, _, _, offset, length in headers:
        begin = names + label
        if library[begin : library.index(b"\0", begin)] == name:
            yield offset, offset + length

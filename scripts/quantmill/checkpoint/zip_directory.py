"""Find the members of an uncompressed zip from an untrusted source."""

import io
import os
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

from quantmill.checkpoint.tensor import CHUNK, read_into
from quantmill.common.program import UserError

try:  # four times as fast as zlib's
    from isal.isal_zlib import crc32 as crc32
except ImportError:  # an interpreter that the user names may lack it
    from zlib import crc32 as crc32

MAX_DIRECTORY = 4 * 2**20  # bytes; an entry takes about 100, and 1,000 in memory
LOCAL_HEADER = 30  # bytes, before a member's name and extra field


@dataclass(frozen=True)
class Member:
    """A member: its bytes start at byte `start` of the file; `crc` is the CRC32 that the zip records."""

    name: str
    start: int
    size: int
    crc: int


def read(path: Path) -> dict[str, Member]:
    """Return all members by name, in the order of their bytes. Raises `zipfile.BadZipFile` for what is not a zip, and
    `UserError` if members are compressed, encrypted, cut off, share a name or bytes, or contradict the directory."""
    with _Bounded(path, "rb") as file:
        try:
            archive = zipfile.ZipFile(file)
        except (NotImplementedError, ValueError, OSError, struct.error) as error:  # impossible numbers
            raise zipfile.BadZipFile(str(error)) from None
        infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
        members: dict[str, Member] = {}
        for info in infos:
            if info.filename in members:
                raise UserError(f"{path}: two members are called {info.filename:.80}; refused")
            members[info.filename] = _member(path, file, info)
    ends = [*(info.header_offset for info in infos), archive.start_dir][1:]
    for member, end in zip(members.values(), ends, strict=True):
        if member.start + member.size > end:
            raise UserError(f"{path}: member {member.name:.80} reaches into what follows it; refused")
    return members


class _Bounded(io.FileIO):
    """A file for zipfile with bounded reads: zipfile believes the directory's size that the zip states."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            size = max(0, os.fstat(self.fileno()).st_size - self.tell())
        if size > MAX_DIRECTORY:
            raise zipfile.BadZipFile("too large a directory")
        return super().read(size)


def _member(path: Path, file: io.FileIO, info: zipfile.ZipInfo) -> Member:
    """Find a member's bytes: after its local header, whose name and extra field have lengths of their own."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
        raise UserError(
            f"{path}: member {info.filename:.80} is compressed or encrypted, which torch never does; refused"
        )
    inside = 0 <= info.header_offset < os.fstat(file.fileno()).st_size
    file.seek(info.header_offset if inside else 0)
    header = file.read(LOCAL_HEADER)
    if not inside or len(header) < LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise UserError(f"{path}: member {info.filename:.80} is not where the zip's directory says; download it again")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    start = info.header_offset + LOCAL_HEADER + name_length + extra_length
    return Member(info.filename, start, info.file_size, info.CRC)


def check_crc(path: Path, member: Member) -> None:
    """Read a member. Raises `UserError` if its bytes do not have the CRC32 that the zip records."""
    crc, buffer = 0, memoryview(bytearray(min(CHUNK, member.size)))
    with path.open("rb", buffering=0) as file:
        file.seek(member.start)
        for begin in range(0, member.size, CHUNK):
            piece = buffer[: member.size - begin]
            read_into(file, piece)
            crc = crc32(piece, crc)
    if crc != member.crc:
        raise UserError(f"{path}: the bytes of {member.name:.80} are damaged (their CRC is wrong); download it again")

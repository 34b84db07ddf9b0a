"""Write an uncompressed zip front to back: sizes and CRCs are known before a member's bytes, so nothing is rewritten.

The format is PKWARE's APPNOTE.TXT 6.3.10, always with its ZIP64 fields (4.3.9.2, 4.3.14, 4.5.3): small files and files
over 4 GiB then take the same path.
"""

import io
import struct

from quantmill.checkpoint.copying import write_all

VERSION = 45  # the least that knows ZIP64
STORED = 0
DATE = 0x0021  # 1 January 1980, the earliest there is: the same tensors give the same file
IN_ZIP64 = 0xFFFFFFFF  # the field's value is in the ZIP64 extra field
ALIGNMENT = 64  # bytes, where torch.save puts storages since 2.1, so that they can be mapped into memory


class ZipWriter:
    """A zip whose members are written in the order of `begin`; `finish` writes the directory."""

    def __init__(self, file: io.FileIO) -> None:
        self.file = file
        self.directory: list[bytes] = []

    def begin(self, name: str, size: int, crc: int) -> None:
        """Write a member's header. The caller then writes exactly `size` bytes with that CRC32 to `file`. They start at
        a multiple of `ALIGNMENT`; the padding is an extra field of its own, as torch's is."""
        encoded, offset = name.encode(), self.file.tell()
        fields = struct.pack("<HHHHHIIIH", VERSION, 0, STORED, 0, DATE, crc, IN_ZIP64, IN_ZIP64, len(encoded))
        sizes = struct.pack("<HHQQ", 1, 16, size, size)
        header = 4 + len(fields) + 2 + len(encoded) + len(sizes) + 4  # until the padding's bytes
        padding = -(offset + header) % ALIGNMENT
        extra = sizes + b"FB" + struct.pack("<H", padding) + b"Z" * padding
        write_all(self.file, b"PK\x03\x04" + fields + struct.pack("<H", len(extra)) + encoded + extra)
        place = struct.pack("<HHQQQ", 1, 24, size, size, offset)
        rest = struct.pack("<HHHHII", len(place), 0, 0, 0, 0o644 << 16, IN_ZIP64)
        self.directory.append(b"PK\x01\x02" + struct.pack("<H", VERSION | 3 << 8) + fields + rest + encoded + place)

    def finish(self) -> None:
        """Write the directory and the records that locate it."""
        begin, count, entries = self.file.tell(), len(self.directory), b"".join(self.directory)
        numbers = struct.pack("<QHHIIQQQQ", 44, VERSION, VERSION, 0, 0, count, count, len(entries), begin)
        end = b"PK\x06\x06" + numbers
        locator = b"PK\x06\x07" + struct.pack("<IQI", 0, begin + len(entries), 1)
        last = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 0xFFFF, 0xFFFF, IN_ZIP64, IN_ZIP64, 0)
        write_all(self.file, entries + end + locator + last)

"""Finds what has changed in a file since `torch.save` wrote it, by the checksums that stand beside the content.

`torch.load` does not compare them: a tensor with other values than were saved would be loaded as if nothing were wrong.
"""

from __future__ import annotations

import zipfile
from typing import IO

BLOCK_BYTES = 1 << 20


def changed_record(file: IO[bytes]) -> str | None:
    """Name of a record of a zip archive whose content is not what its checksum says; None when all are right.

    Files that were written after `torch.serialization.set_crc32_options(False)` have no checksums to compare with.

    Args:
        file: an archive whose directory can be read.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = sorted(archive.infolist(), key=lambda record: record.file_size)
            if records and not _is_right(archive, records[0]):
                return None
            return next((record.filename for record in records if not _is_right(archive, record)), None)
    except zipfile.BadZipFile as error:
        return str(error)


def _is_right(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(record) as content:
            while content.read(BLOCK_BYTES):
                pass
    except zipfile.BadZipFile:
        return False
    return True

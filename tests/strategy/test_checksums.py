"""A file whose content has changed since it was written is told from one that has not."""

import io

import pytest
import torch

from lightning_seq1f1b.strategy.checkpoint_reading import read_checkpoint
from lightning_seq1f1b.strategy.checksums import changed_record

CONTENT = {"state_dict": {"weight": torch.arange(1000.0), "bias": torch.ones(3)}}


def saved() -> bytearray:
    file = io.BytesIO()
    torch.save(CONTENT, file)
    return bytearray(file.getvalue())


def flipped() -> bytearray:
    """One bit of the weight's last number is another one."""
    content = saved()
    place = content.rindex(torch.tensor(999.0).numpy().tobytes())
    content[place] ^= 1
    return content


def test_a_file_as_it_was_written_is_right():
    assert changed_record(io.BytesIO(saved())) is None


def test_one_changed_bit_is_found_where_torch_finds_nothing():
    assert torch.load(io.BytesIO(flipped()))["state_dict"]["weight"][-1] != 999
    assert "data/0" in changed_record(io.BytesIO(flipped()))


def test_files_without_checksums_are_not_refused():
    torch.serialization.set_crc32_options(False)
    try:
        content = saved()
    finally:
        torch.serialization.set_crc32_options(True)
    assert changed_record(io.BytesIO(content)) is None


def test_a_checkpoint_with_a_changed_bit_is_refused_by_name(tmp_path):
    file = tmp_path / "last.ckpt"
    file.write_bytes(saved())
    torch.testing.assert_close(read_checkpoint(file)["state_dict"], CONTENT["state_dict"])
    file.write_bytes(flipped())
    with pytest.raises(ValueError, match=r"last\.ckpt is damaged: .*data/0 has changed since it was written"):
        read_checkpoint(file)

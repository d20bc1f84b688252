"""What a device could reach, by its name; nothing is better than a wrong figure."""

from __future__ import annotations

import pytest
import torch

from lightning_seq1f1b.callbacks.peak_speed import peak_flops


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16-true", 312e12),
        ("NVIDIA A100-PCIE-40GB", "bf16-mixed", 312e12),
        ("NVIDIA H100 80GB HBM3", "16-mixed", 989e12),
        ("NVIDIA H100 PCIe", "bf16-mixed", None),
        ("NVIDIA H200 NVL", "bf16-mixed", None),
        ("NVIDIA H100 80GB HBM3", "32-true", None),
        ("NVIDIA L4", "bf16-mixed", None),
        ("NVIDIA L40S", "bf16-mixed", 362e12),
    ],
)
def test_by_name_and_precision(
    name: str, precision: str, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0), precision) == expected
    assert peak_flops(torch.device("cpu"), precision) is None

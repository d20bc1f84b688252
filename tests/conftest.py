"""One thread for every process: the suite runs several at once, and results must not depend on their number."""

import os

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_process_group_left():
    """Processes that later tests start would meet at this one's port; run Trainers in processes of their own."""
    yield
    assert not torch.distributed.is_initialized()
    assert "MASTER_PORT" not in os.environ

"""One thread for every process: the suite runs several at once, and results must not depend on their number."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)

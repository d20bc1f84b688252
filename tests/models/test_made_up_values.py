"""Code that looks at values runs on the meta device, and the shapes of what it computes fit."""

from __future__ import annotations

import torch

from lightning_seq1f1b.models.made_up_values import MadeUpValues

TENSOR = torch.ones(6, 3, device="meta")


def test_numbers_are_one_and_lists_are_zeros() -> None:
    with MadeUpValues():
        assert TENSOR.sum().item() == 1
        assert bool((TENSOR > 2).all())
        assert TENSOR[0].tolist() == [0.0, 0.0, 0.0]


def test_one_entry_is_not_zero() -> None:
    with MadeUpValues():
        assert TENSOR.nonzero().shape == (1, 2)
        assert TENSOR[TENSOR > 2].shape == (1,)
        assert TENSOR[TENSOR[:, 0] > 2].shape == (1, 3)
        assert [index.shape for index in torch.where(TENSOR > 2)] == [(1,), (1,)]


def test_pieces_of_made_up_sizes_are_the_whole() -> None:
    with MadeUpValues():
        sizes = torch.ones(4, device="meta").tolist()
        assert [len(piece) for piece in TENSOR.split([int(size) for size in sizes])] == [0, 0, 0, 6]


def test_real_tensors_keep_their_values() -> None:
    with MadeUpValues():
        assert torch.tensor([0.0, 5.0]).nonzero().tolist() == [[1]]

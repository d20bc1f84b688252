"""Tensors go into flat buckets and come back unchanged."""

import torch

from lightning_seq1f1b.runtime.flat_buckets import flat_buckets


def tensors():
    torch.manual_seed(0)
    wide, transposed = torch.randn(3, 4), torch.randn(5, 2).T
    return [torch.randn(4), wide, torch.arange(6.0, dtype=torch.float64), transposed, torch.randn(1), torch.randn(40)]


def test_every_tensor_is_in_one_bucket_of_its_dtype_and_none_is_too_large():
    given = tensors()
    buckets = list(flat_buckets(given, size=68))
    assert [len(bucket.tensors) for bucket in buckets] == [2, 2, 1, 1]
    assert sorted(id(tensor) for bucket in buckets for tensor in bucket.tensors) == sorted(map(id, given))
    for bucket in buckets:
        assert len({tensor.dtype for tensor in bucket.tensors}) == 1
        assert len(bucket.tensors) == 1 or sum(tensor.nbytes for tensor in bucket.tensors) <= 68


def test_values_come_back_through_a_message():
    sent, received = tensors(), [torch.zeros_like(tensor) for tensor in tensors()]
    for source, destination in zip(flat_buckets(sent, size=68), flat_buckets(received, size=68), strict=True):
        flat = destination.empty()
        flat.copy_(source.filled())
        destination.copy_out(flat)
    assert all(torch.equal(got, expected) for got, expected in zip(received, tensors(), strict=True))


def test_a_lone_tensor_is_not_copied():
    (bucket,) = flat_buckets([tensor := torch.zeros(2, 3)])
    bucket.filled().add_(1)
    assert torch.equal(tensor, torch.ones(2, 3))
    bucket.empty().add_(1)
    assert torch.equal(tensor, torch.full((2, 3), 2.0))

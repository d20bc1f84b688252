"""The KV buffer against attention over whole sequences, where autograd sees every key at once."""

import pytest
import torch
import torch.nn.functional as F

from lightning_seq1f1b.runtime.kv_buffer import KVBuffer

ROWS, HEADS, LENGTH, SIZE = 2, 3, 11, 4
CHUNKS = ((0, 4), (4, 5), (5, 11))


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS, HEADS, LENGTH, SIZE, generator=generator, dtype=dtype) for _ in range(3)]


def attend(query, key, value, window=None):
    tokens, prefix = query.shape[-2], key.shape[-2]
    q = torch.arange(tokens)[:, None] + prefix - tokens
    k = torch.arange(prefix)
    seen = k <= q if window is None else (k <= q) & (k > q - window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)


def chunked(query, key, value, window=None, repeat=1):
    """Forward all chunks, backward them last first; returns the outputs and the gradients of query, key, value."""
    buffer = KVBuffer(LENGTH)
    leaves, outputs = [], []
    for start, stop in CHUNKS:
        parts = [tensor[:, :, start:stop].clone().requires_grad_() for tensor in (query, key, value)]
        lowest = 0 if window is None else max(0, start - window + 1)
        for _ in range(repeat):
            keys, values = buffer.append(start, lowest, parts[1], parts[2])
        leaves.append(parts)
        outputs.append(attend(parts[0], keys, values, window))
    for output in reversed(outputs):
        output.square().sum().backward()
    gradients = [torch.cat([parts[slot].grad for parts in leaves], 2) for slot in range(3)]
    return torch.cat(outputs, 2).detach(), gradients, buffer


@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_chunks_equal_the_whole_sequence(window):
    leaves = [tensor.requires_grad_() for tensor in inputs()]
    expected = attend(*leaves, window)
    expected.square().sum().backward()
    output, gradients, _ = chunked(*inputs(), window)
    torch.testing.assert_close(output, expected.detach(), rtol=1e-12, atol=1e-13)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-11, atol=1e-13)


def test_writing_a_chunk_again_changes_nothing():
    _, once, _ = chunked(*inputs())
    _, twice, _ = chunked(*inputs(), repeat=2)
    for a, b in zip(once, twice, strict=True):
        assert torch.equal(a, b)


def test_low_precision_keeps_float32_accumulators():
    _, gradients, buffer = chunked(*inputs(torch.bfloat16))
    assert {tensor.dtype for tensor in buffer._gradients.values()} == {torch.float32}
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
    _, exact, _ = chunked(*[tensor.double() for tensor in inputs(torch.bfloat16)])
    for gradient, reference in zip(gradients, exact, strict=True):
        assert (gradient - reference).norm() / reference.norm() < 0.02


def test_reads_are_views_of_one_buffer_and_close_frees_it():
    _, key, value = inputs()
    buffer = KVBuffer(LENGTH)
    first = buffer.append(0, 0, key[:, :, :4], value[:, :, :4])
    second = buffer.append(4, 0, key[:, :, 4:], value[:, :, 4:])
    assert first[0].data_ptr() == second[0].data_ptr()
    assert torch.equal(second[0], key)
    assert buffer.nbytes() == 2 * key.nbytes
    buffer.close()
    assert buffer.nbytes() == 0


def test_key_and_value_sizes_may_differ():
    key, value = torch.randn(1, 2, 5, 6), torch.randn(1, 1, 5, 3)
    keys, values = KVBuffer(5).append(0, 0, key, value)
    assert torch.equal(keys, key)
    assert torch.equal(values, value)


def test_made_in_inference_mode_it_is_no_inference_tensor():
    with torch.inference_mode():
        keys, _ = KVBuffer(5).append(0, 0, torch.randn(1, 1, 5, 2), torch.randn(1, 1, 5, 2))
        assert torch.isfinite(keys).all()

"""The KV buffer against attention over whole sequences, where autograd sees every key at once."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from lightning_seq1f1b.ops.attention import chunk_attention
from lightning_seq1f1b.ops.visibility import Visibility
from lightning_seq1f1b.runtime.kv_buffer import KVBuffer, appended

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


def accumulating(query, key, value, window=None):
    """Attention that puts the gradients of keys and values into the buffer itself."""
    place = appended(key, value)
    assert place is not None
    return chunk_attention(query, key, value, visible=Visibility(window), accumulators=place)


def half_and_half(query, key, value, window=None):
    """Two readers of the same keys and values, one of each kind."""
    return attend(query, key, value, window) / 2 + accumulating(query, key, value, window) / 2


ATTENTIONS = [attend, accumulating, half_and_half]


def chunked(query, key, value, window=None, attention=attend, recompute=False):
    """Forward all chunks, backward them last first; returns the outputs and the gradients of query, key, value."""
    buffer = KVBuffer(LENGTH, window)
    leaves, outputs = [], []

    def run(start, lowest, query, key, value):
        keys, values = buffer.append(start, lowest, key, value)
        return attention(query, keys, values, window)

    for start, stop in CHUNKS:
        parts = [tensor[:, :, start:stop].clone().requires_grad_() for tensor in (query, key, value)]
        lowest = 0 if window is None else max(0, start - window + 1)
        leaves.append(parts)
        outputs.append(
            checkpoint(run, start, lowest, *parts, use_reentrant=False) if recompute else run(start, lowest, *parts)
        )
    for output in reversed(outputs):
        output.square().sum().backward()
    gradients = [torch.cat([parts[slot].grad for parts in leaves], 2) for slot in range(3)]
    return torch.cat(outputs, 2).detach(), gradients, buffer


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_chunks_equal_the_whole_sequence(window, attention):
    leaves = [tensor.requires_grad_() for tensor in inputs()]
    expected = attend(*leaves, window)
    expected.square().sum().backward()
    output, gradients, buffer = chunked(*inputs(), window, attention)
    torch.testing.assert_close(output, expected.detach(), rtol=1e-12, atol=1e-13)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-11, atol=1e-13)
    assert buffer.nbytes() == 0  # freed by the backward of chunk 0


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_recomputing_changes_nothing(attention):
    output, once, _ = chunked(*inputs(), attention=attention)
    again, recomputed, _ = chunked(*inputs(), attention=attention, recompute=True)
    for a, b in zip([output, *once], [again, *recomputed], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_low_precision_keeps_float32_accumulators(attention, monkeypatch):
    dtypes = set()
    accumulator = KVBuffer._accumulator

    def watched(self, slot):
        tensor = accumulator(self, slot)
        dtypes.add(tensor.dtype)
        return tensor

    monkeypatch.setattr(KVBuffer, "_accumulator", watched)
    _, gradients, _ = chunked(*inputs(torch.bfloat16), attention=attention)
    assert dtypes == {torch.float32}
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
    _, exact, _ = chunked(*[tensor.double() for tensor in inputs(torch.bfloat16)], attention=attention)
    for gradient, reference in zip(gradients, exact, strict=True):
        assert (gradient - reference).norm() / reference.norm() < 0.02


def test_only_what_one_append_returned_has_a_place():
    _, key, value = inputs()
    buffer = KVBuffer(LENGTH)
    keys, values = buffer.append(0, 0, key[:, :, :4].requires_grad_(), value[:, :, :4].requires_grad_())
    assert appended(keys, values).stop == 4
    others = buffer.append(4, 0, key[:, :, 4:5].requires_grad_(), value[:, :, 4:5].requires_grad_())
    for pair in [(values, keys), (keys, keys), (keys * 1, values), (keys[:, :1], values[:, :1]), (keys, others[1])]:
        assert appended(*pair) is None
    assert appended(key, value) is None


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((0, 4), (0, 4), r"once and in order: expected one that starts at token 4, not one of tokens \[0, 4\)"),
        ((0, 4), (5, 8), r"expected one that starts at token 4, not one of tokens \[5, 8\)"),
        ((0, 4), (4, 12), r"\[4, 12\).* does not fit a row of 11"),
    ],
    ids=["twice", "a gap", "too long"],
)
def test_chunks_out_of_order(first, second, message):
    key = torch.zeros(1, 1, 20, 2)
    buffer = KVBuffer(LENGTH)
    buffer.append(first[0], 0, *[key[:, :, slice(*first)]] * 2)
    with pytest.raises(ValueError, match=message):
        buffer.append(second[0], 0, *[key[:, :, slice(*second)]] * 2)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(1, 1, 2, 2).double(),
        torch.zeros(1, 2, 2, 2),
        torch.zeros(1, 1, 2, 3),
        torch.zeros(1, 1, 2, 2).to("meta"),
    ],
    ids=["dtype", "heads", "size", "device"],
)
def test_chunks_that_differ(other):
    buffer = KVBuffer(LENGTH)
    buffer.append(0, 0, torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2))
    with pytest.raises(ValueError, match=r"earlier chunks call for \[1, 1, 2, 2\] torch.float32 on cpu, not"):
        buffer.append(4, 0, other, other)


def chunk_outputs(buffer, attention, *chunks):
    """Attention of some chunks; sums that backward can start from."""
    sums = []
    for start, stop in chunks:
        query, key, value = (tensor[:, :, start:stop].requires_grad_() for tensor in inputs())
        sums.append(attention(query, *buffer.append(start, 0, key, value)).sum())
    return sums


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_backwards_out_of_order(attention):
    buffer = KVBuffer(LENGTH)
    first, second = chunk_outputs(buffer, attention, (0, 4), (4, 6))
    with pytest.raises(RuntimeError, match=r"last chunk first: expected the one that ends at token 6, not .*\[0, 4\)"):
        first.backward(retain_graph=True)
    second.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"expected the one that ends at token 4, not that of tokens \[4, 6\)"):
        second.backward()
    first.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"of the chunk of tokens \[0, 4\) came after its KV buffer was freed"):
        first.backward()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_freed_buffer(attention):
    buffer = KVBuffer(LENGTH)
    (only,) = chunk_outputs(buffer, attention, (0, 4))
    buffer.close()
    with pytest.raises(RuntimeError, match=r"of the chunk of tokens \[0, 4\) came after its KV buffer was freed"):
        only.backward()
    with pytest.raises(RuntimeError, match="was freed"):
        chunk_outputs(buffer, attention, (4, 6))


def test_a_look_at_the_query_alone_is_noticed():
    """It leaves gradients of keys in the accumulators; the next backward would add them once more."""
    query, key, value = (tensor[:, :, :4].requires_grad_() for tensor in inputs())
    loss = accumulating(query, *KVBuffer(LENGTH).append(0, 0, key, value)).sum()
    torch.autograd.grad(loss, query, retain_graph=True)
    with pytest.raises(RuntimeError, match="an earlier backward ran attention but stopped before the keys"):
        loss.backward()


def test_a_second_derivative_is_refused():
    _, key, value = (tensor[:, :, :4].requires_grad_() for tensor in inputs())
    keys, _ = KVBuffer(LENGTH).append(0, 0, key, value)
    with pytest.raises(RuntimeError, match="a KV buffer has no second derivative"):
        torch.autograd.grad(keys.sum(), key, create_graph=True)


def test_chunks_of_any_layout():
    _, key, value = inputs()
    buffer = KVBuffer(LENGTH)
    buffer.append(0, 0, key[:, :, :4].mT.contiguous().mT, value[:, :, :1].expand(-1, -1, 4, -1))
    keys, values = buffer.append(4, 0, key[:, :, 4:], value[:, :, 4:])
    assert torch.equal(keys, key)
    assert torch.equal(values[:, :, :4], value[:, :, :1].expand(-1, -1, 4, -1))


@pytest.mark.parametrize(
    "shapes",
    [[], [(4, 2)], [(1, 1, 1, 4, 2)], [(1, 1, 4, 2), (1, 1, 3, 2)]],
    ids=["nothing", "two axes", "five axes", "lengths that differ"],
)
def test_what_is_no_chunk(shapes):
    with pytest.raises(ValueError, match="three or four axes and equal tokens, not "):
        KVBuffer(LENGTH).append(0, 0, *map(torch.zeros, shapes))


def test_a_later_chunk_of_fewer_tensors_or_without_gradients():
    buffer, tensor = KVBuffer(LENGTH), torch.zeros(1, 1, 4, 2, requires_grad=True)
    buffer.append(0, 0, tensor, tensor)
    with pytest.raises(ValueError, match="earlier chunks call for 2 tensors, not 1"):
        buffer.append(4, 0, tensor)
    with pytest.raises(ValueError, match="all chunks want gradients or none does: earlier ones do, this one does not"):
        buffer.append(4, 0, tensor.detach(), tensor.detach())


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


@pytest.mark.parametrize("window", [1, 3, 6])
def test_without_gradients_a_window_is_all_that_is_held(window):
    query, key, value = inputs()
    expected = attend(query, key, value, window)
    buffer, outputs = KVBuffer(LENGTH, window), []
    with torch.no_grad():
        for start, stop in CHUNKS:
            lowest = max(0, start - window + 1)
            keys, values = buffer.append(start, lowest, key[:, :, start:stop], value[:, :, start:stop])
            assert torch.equal(keys, key[:, :, lowest:stop])
            outputs.append(attend(query[:, :, start:stop], keys, values, window))
            held = buffer.nbytes() / (key.nbytes + value.nbytes) * LENGTH
            assert held == stop - lowest <= window - 1 + stop - start
    torch.testing.assert_close(torch.cat(outputs, 2), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("window", [1, 3, 6])
def test_accumulators_hold_what_a_window_reaches(window, attention):
    buffer, outputs = KVBuffer(LENGTH, window), []
    for start, stop in CHUNKS:
        query, key, value = (tensor[:, :, start:stop].requires_grad_() for tensor in inputs())
        keys, values = buffer.append(start, max(0, start - window + 1), key, value)
        outputs.append(attention(query, keys, values, window))
    both = buffer.nbytes()
    for output, (start, _) in reversed(list(zip(outputs, CHUNKS, strict=True))):
        output.sum().backward()
        reached = start - max(0, start - window + 1)
        assert buffer.nbytes() == (both + both // LENGTH * reached if start else 0)


def test_key_and_value_sizes_may_differ():
    key, value = torch.randn(1, 2, 5, 6), torch.randn(1, 1, 5, 3)
    keys, values = KVBuffer(5).append(0, 0, key, value)
    assert torch.equal(keys, key)
    assert torch.equal(values, value)


def test_made_in_inference_mode_it_is_no_inference_tensor():
    with torch.inference_mode():
        keys, _ = KVBuffer(5).append(0, 0, torch.randn(1, 1, 5, 2), torch.randn(1, 1, 5, 2))
        assert torch.isfinite(keys).all()

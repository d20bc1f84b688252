"""Which masks transformers asks for are described, and which are filled."""

from __future__ import annotations

import inspect

import pytest
import torch
from support.tiny_models import tiny_config
from torch import nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from lightning_seq1f1b.models.attention import NAME, attend, describe_mask
from lightning_seq1f1b.models.chunk_cache import ChunkCache, ChunkedState, layer_kinds
from lightning_seq1f1b.ops.reference import reference_attention
from lightning_seq1f1b.ops.visibility import Visibility
from lightning_seq1f1b.schedule.spans import Span

SPAN = Span(14, 20)
CACHE_NAME = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def arguments(family: str, attention_mask: torch.Tensor | None = None) -> dict[str, object]:
    config = tiny_config(family)
    config._attn_implementation = NAME
    cache: ChunkCache = ChunkedState(layer_kinds(config), 30).chunk(1, SPAN)
    hidden = torch.zeros(2, SPAN.length, 32)
    return {"config": config, "inputs_embeds": hidden, "attention_mask": attention_mask, CACHE_NAME: cache}


def causal(keys: int, window: int | None = None) -> torch.Tensor:
    """True where one of the chunk's queries sees one of the last `keys` keys."""
    query = torch.arange(SPAN.start, SPAN.stop)[:, None]
    key = torch.arange(SPAN.stop - keys, SPAN.stop)
    return (key <= query) & (key > query - (window or SPAN.stop + 1))


def test_a_causal_mask_is_described() -> None:
    mask = create_causal_mask(**arguments("llama"))
    assert isinstance(mask, Visibility)
    assert mask.plain(SPAN.stop)


def test_a_sliding_window_is_described() -> None:
    mask = create_sliding_window_causal_mask(**arguments("mistral"))
    assert isinstance(mask, Visibility)
    assert (mask.window, mask.first_key, mask.key_mask) == (11, None, None)


def test_padding_is_described() -> None:
    padding = torch.ones(2, SPAN.stop, dtype=torch.int64)
    padding[1, :16] = 0
    mask = create_causal_mask(**arguments("llama", padding))
    assert isinstance(mask, Visibility)
    expected = causal(SPAN.stop) & padding.bool()[:, None, None, :]
    assert torch.equal(mask.dense(SPAN.length, SPAN.stop, torch.device("cpu")), expected)


def test_padding_in_a_window_is_described_for_the_keys_that_are_left() -> None:
    padding = torch.ones(2, SPAN.stop, dtype=torch.int64)
    padding[1, :7] = 0
    mask = create_sliding_window_causal_mask(**arguments("mistral", padding))
    lowest = SPAN.start - 10
    keys = SPAN.stop - lowest
    assert isinstance(mask, Visibility)
    expected = causal(keys, 11) & padding.bool()[:, None, None, lowest:]
    assert torch.equal(mask.dense(SPAN.length, keys, torch.device("cpu")), expected)


def test_any_other_mask_is_filled_in() -> None:
    mask = create_causal_mask(**arguments("llama"), and_mask_function=lambda row, head, query, key: key != 3)
    expected = causal(SPAN.stop)
    expected[:, 3] = False
    assert torch.equal(mask, expected.expand(2, 1, -1, -1))


def test_two_predicates_that_are_no_window_are_filled_in() -> None:
    def even(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key % 2 == 0

    from transformers.masking_utils import and_masks, causal_mask_function

    mask = describe_mask(1, 4, 4, mask_function=and_masks(even, causal_mask_function))
    assert isinstance(mask, torch.Tensor)
    assert mask[0, 0].tolist() == [[key <= query and key % 2 == 0 for key in range(4)] for query in range(4)]


def test_queries_that_do_not_end_with_the_keys_get_a_filled_mask() -> None:
    """So it is in a cache of fixed size, whose keys behind the queries are not there yet."""
    mask = describe_mask(1, q_length=2, kv_length=6, q_offset=1)
    assert isinstance(mask, torch.Tensor)
    assert mask[0, 0].int().tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]


class Layer(nn.Module):
    """What the attention function asks of a layer."""

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, {}),
        (Visibility(), {}),
        (Visibility(3), {"visible": Visibility(3)}),
        (torch.ones(2, 1, 4, 9).bool().tril(5), {"causal": False, "mask": torch.ones(4, 9).bool().tril(5)}),
        (torch.arange(36.0).view(1, 1, 4, 9) / 9, {"causal": False, "bias": torch.arange(36.0).view(1, 1, 4, 9) / 9}),
    ],
    ids=["none", "causal", "window", "boolean", "added"],
)
def test_the_attention_function_heeds_the_mask(mask: object, expected: dict[str, object]) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, tokens, 8).double() for heads, tokens in ((4, 4), (2, 9), (2, 9)))
    output, weights = attend(Layer(), query, key, value, mask, scaling=0.3)
    assert weights is None
    assert output.is_contiguous()
    wanted = reference_attention(query, key, value, scale=0.3, **expected).transpose(1, 2)
    torch.testing.assert_close(output, wanted, rtol=0, atol=1e-12)


def test_a_layer_that_is_not_causal_and_has_no_mask_sees_everything() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 5, 8).double() for _ in range(3))
    output, _ = attend(Layer(is_causal=False), query, key, value, None)
    wanted = reference_attention(query, key, value, scale=8**-0.5, causal=False).transpose(1, 2)
    torch.testing.assert_close(output, wanted, rtol=0, atol=1e-12)


def test_dropout_only_in_training() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 5, 8).double() for _ in range(3))
    kept, _ = attend(Layer().eval(), query, key, value, None, dropout=0.5)
    dropped, _ = attend(Layer().train(), query, key, value, None, dropout=0.5)
    wanted = reference_attention(query, key, value, scale=8**-0.5).transpose(1, 2)
    torch.testing.assert_close(kept, wanted, rtol=0, atol=1e-12)
    assert not torch.allclose(dropped, wanted)

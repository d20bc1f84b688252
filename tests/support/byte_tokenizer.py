"""A tokenizer with one token for each byte, so that token counts are byte counts and every text comes back whole."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)


def byte_tokenizer(*, with_bos: bool = False, with_pad: bool = True) -> PreTrainedTokenizerFast:
    """Make the tokenizer: ids 0, 1, 2 are padding, beginning and end of a sequence, the other 256 are bytes.

    Args:
        with_bos: whether it puts the beginning-of-sequence token in front by itself, as Llama's does.
        with_pad: whether it names a padding token.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>" if with_pad else None,
    )


def save_byte_tokenizer(directory: Path, *, with_bos: bool = False, with_pad: bool = True) -> str:
    """Save the tokenizer and return the directory's name."""
    byte_tokenizer(with_bos=with_bos, with_pad=with_pad).save_pretrained(directory)
    return str(directory)

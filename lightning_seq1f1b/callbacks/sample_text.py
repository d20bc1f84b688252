"""A callback that shows what the model writes, during training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_seq1f1b.models.find import find_causal_lm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SampleText(Callback):
    """Continues some prompts after a validation, prints the texts, and logs them where the logger takes text.

    It works on one device and on pipeline stages, which give the same texts. TensorBoard and Weights & Biases are
    known to take text. Training goes on as if nothing had been generated: random numbers are put back.

    Args:
        prompts: Texts to continue, all in one batch.
        every_n_validations: How often; the sanity check before training does not count.
        max_new_tokens: Tokens that are written at most.
        tokenizer: A local directory or a hub name with the model's tokenizer. By default that of the data module.
        seed: Seed of what is sampled, the same every time, so that texts are comparable.
        options: Further arguments of transformers' `generate`, such as `{do_sample: true, temperature: 0.7}`. Without
            any it goes by the model's own generation config, which is greedy for most.

    Raises:
        ValueError: There is no prompt, or a number is out of range.
    """

    def __init__(
        self,
        prompts: list[str],
        every_n_validations: int = 1,
        max_new_tokens: int = 64,
        tokenizer: str | None = None,
        seed: int = 0,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not prompts or not all(prompts):
            raise ValueError(f"SampleText needs prompts, none of them empty; got {prompts}")
        for name, number in (("every_n_validations", every_n_validations), ("max_new_tokens", max_new_tokens)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        self.prompts = prompts
        self.every_n_validations = every_n_validations
        self.max_new_tokens = max_new_tokens
        self.tokenizer_name = tokenizer
        self.seed = seed
        self.options = options or {}
        self.texts: list[str] = []
        """What the prompts were continued with the last time; on every rank."""
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._validations = 0

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Continue the prompts, on all ranks, and show the texts on rank 0."""
        if trainer.sanity_checking:
            return
        self._validations += 1
        if self._validations % self.every_n_validations:
            return
        self.texts = self._continued(trainer, pl_module)
        if trainer.is_global_zero:
            self._show(trainer)

    def _continued(self, trainer: L.Trainer, module: L.LightningModule) -> list[str]:
        tokenizer = self._find_tokenizer(trainer)
        prompts = [tokenizer(prompt)["input_ids"] for prompt in self.prompts]
        padding = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        input_ids, mask = _padded_at_left(prompts, padding, module.device)
        model: Any = find_causal_lm(module)[1]
        with isolate_rng():
            torch.manual_seed(self.seed)
            tokens = model.generate(
                input_ids=input_ids,
                attention_mask=mask,
                **{"max_new_tokens": self.max_new_tokens, "pad_token_id": padding, **self.options},
            )
        written = tokens[:, input_ids.shape[1] :].tolist()
        return [cast("str", tokenizer.decode(row, skip_special_tokens=True)) for row in written]

    def _find_tokenizer(self, trainer: L.Trainer) -> PreTrainedTokenizerBase:
        """The tokenizer that was named, else the data module's.

        Raises:
            ValueError: The data module has none.
        """
        if self._tokenizer is None and self.tokenizer_name is not None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_name)
        found = self._tokenizer or getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
        if found is None:
            raise ValueError(
                "SampleText finds no tokenizer: the Trainer has no data module with an attribute `tokenizer`. Give it "
                "SampleText(tokenizer=...)"
            )
        return cast("PreTrainedTokenizerBase", found)

    def _show(self, trainer: L.Trainer) -> None:
        # Several continuations of one prompt stand side by side.
        each = len(self.texts) // len(self.prompts)
        pairs = [(prompt, self.texts[i * each + j]) for i, prompt in enumerate(self.prompts) for j in range(each)]
        step = trainer.global_step
        for prompt, text in pairs:
            trainer.print(f"step {step} | {prompt}[{text}]")
        for logger in trainer.loggers:
            _log(logger, pairs, step)


def _padded_at_left(rows: Sequence[list[int]], padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token rows of unequal length as `input_ids` and `attention_mask`, [rows, length]."""
    if not all(rows):
        raise ValueError("a prompt of SampleText has no token")
    length = max(map(len, rows))
    input_ids = torch.tensor([[padding] * (length - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=device)
    return input_ids, mask


def _log(logger: Logger, pairs: Sequence[tuple[str, str]], step: int) -> None:
    recipient: Any = logger
    if hasattr(recipient, "log_text"):  # of Weights & Biases
        recipient.log_text("samples", columns=["step", "prompt", "text"], data=[[step, *p] for p in pairs], step=step)
    elif hasattr(getattr(recipient, "experiment", None), "add_text"):  # of TensorBoard
        markdown = "\n\n".join(f"**{prompt}** {text}" for prompt, text in pairs)
        recipient.experiment.add_text("samples", markdown, step)

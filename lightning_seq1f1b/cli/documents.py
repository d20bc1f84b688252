"""The ready data module: documents from files, long ones cut into rows, short ones packed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from torch.utils.data import DataLoader, Sampler, SequentialSampler
from tqdm import tqdm

from lightning_seq1f1b.cli.packing import packed
from lightning_seq1f1b.cli.reading import Document, Fields, find_files, read_documents, refuse
from lightning_seq1f1b.cli.rows import Row, TokenizedDocument, cut, pad_packed_rows, pad_rows, tokenize
from lightning_seq1f1b.cli.shuffling import EpochShuffle, LengthGroups
from lightning_seq1f1b.strategy.loop_place import coming_epoch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARACTERS_AT_ONCE = 1_000_000
"""How much text goes to the tokenizer in one call: enough to keep its threads busy, little beside the token rows."""


class LongDocuments(L.LightningDataModule):
    """Documents from text, JSONL and parquet files as batches of `input_ids`, `attention_mask` and `labels`.

    A text file is one document. A row of a JSONL or parquet file is one: its field `text`, or the pair `prompt` and
    `answer`, of which only the answer is supervised. Rows have at most `sequence_length` tokens and are padded at the
    right. Tokens are kept in memory, so files are read once. The order of rows depends on `seed` and the epoch alone:
    with any number of stages and replicas, whose batches together are one batch of one device.

    Args:
        files: Paths or globs of the training files ('**' goes into folders).
        tokenizer: A local directory or a hub name with the model's tokenizer.
        sequence_length: Tokens of a row.
        batch_size: Rows of a batch.
        documents: What becomes of a document longer than a row: "cut" makes as many rows as it needs, in which every
            token but the document's first is predicted once; "truncate" keeps its first row; "pack" cuts too, and puts
            short documents and the ends of long ones together into rows, in which they do not see each other. Batches
            then have `position_ids`, which restart in every document, instead of a mask.
        validation: Validation documents: a share of the training documents, set apart, or files like `files`.
        test: Test documents, in the same way.
        padding: Tokens of the rows of a batch: "length" is `sequence_length`, "longest" those of its longest row.
        shuffle: Whether training rows come in a new order every epoch.
        group_by_length: Whether training batches are made of rows of similar lengths; with `shuffle`.
        seed: Seed of that order and of the choice of documents set apart.
        append_eos: Whether every document ends with the tokenizer's end-of-sequence token.
        text_field: Name of the field with a document's text.
        prompt_field: Name of the field with a prompt.
        answer_field: Name of the field with the answer to a prompt.
        bad_rows: What becomes of a JSONL or parquet row that cannot be read, and of a text file that is no text:
            "error" ends, "skip" leaves it out and says how many there were.
        num_workers: Processes that make batches beside the training process; 0 makes them in it.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        files: list[str] | str,
        tokenizer: str,
        sequence_length: int = 2048,
        batch_size: int = 1,
        documents: Literal["cut", "truncate", "pack"] = "cut",
        validation: float | list[str] | str = 0.0,
        test: float | list[str] | str = 0.0,
        padding: Literal["length", "longest"] = "length",
        shuffle: bool = True,
        group_by_length: bool = False,
        seed: int = 0,
        append_eos: bool = True,
        text_field: str = "text",
        prompt_field: str = "prompt",
        answer_field: str = "answer",
        bad_rows: Literal["error", "skip"] = "error",
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if sequence_length < 2:
            raise ValueError(f"sequence_length must be at least 2, a token and its target; got {sequence_length}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if num_workers < 0:
            raise ValueError(f"num_workers must not be negative, got {num_workers}")
        for argument, given, known in (
            ("documents", documents, ("cut", "truncate", "pack")),
            ("padding", padding, ("length", "longest")),
            ("bad_rows", bad_rows, ("error", "skip")),
        ):
            if given not in known:
                raise ValueError(f"{argument} must be one of {', '.join(known)}, not {given!r}")
        if group_by_length and not shuffle:
            raise ValueError("group_by_length makes an order of its own: leave shuffle=True, or group_by_length out")
        shares = {"validation": validation, "test": test}
        for name, share in shares.items():
            if isinstance(share, (int, float)) and not 0 <= share < 1:
                raise ValueError(f"{name} as a share of the documents must be in [0, 1), got {share}")
        # Not logged beside the module's own: both have a `seed`.
        self.save_hyperparameters(logger=False)
        self.files = files
        self.tokenizer_name = tokenizer
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.documents = documents
        self.validation = validation
        self.test = test
        self.padding = padding
        self.shuffle = shuffle
        self.group_by_length = group_by_length
        self.seed = seed
        self.append_eos = append_eos
        self.fields = Fields(text_field, prompt_field, answer_field)
        self.bad_rows = bad_rows
        self.num_workers = num_workers
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.train_rows: list[Row] = []
        self.validation_rows: list[Row] = []
        self.test_rows: list[Row] = []

    @property
    def num_tokens(self) -> int | None:
        """Size of the tokenizer's vocabulary; None before `setup`."""
        return None if self.tokenizer is None else len(self.tokenizer)

    def setup(self, stage: str) -> None:
        """Read and tokenize all files, once; later calls find the rows made.

        Raises:
            ValueError: Files are missing or cannot be read as documents, or they leave no row to train on.
        """
        if self.tokenizer is not None:
            return
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_name)
        documents = self._rows_by_document(self.files, tokenizer)
        set_apart = {}
        order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(self.seed)).tolist()
        for name, source in (("validation", self.validation), ("test", self.test)):
            if isinstance(source, (int, float)):
                count = math.ceil(source * len(documents))
                chosen, order = order[:count], order[count:]
                set_apart[name] = [documents[index] for index in sorted(chosen)]
            else:
                set_apart[name] = self._rows_by_document(source, tokenizer)
        if not order:
            raise ValueError(
                f"validation={self.validation} and test={self.test} leave none of the {len(documents)} document(s) to "
                "train on: lower the shares, or name files for validation and test"
            )
        self.train_rows = self._rows([documents[index] for index in sorted(order)])
        self.validation_rows = self._rows(set_apart["validation"])
        self.test_rows = self._rows(set_apart["test"])
        self.tokenizer = tokenizer
        filled = sum(len(row.ids) for row in self.train_rows) / (len(self.train_rows) * self.sequence_length)
        rank_zero_info(
            f"Documents: {len(order)} to train on, in {len(self.train_rows)} rows of up to {self.sequence_length} "
            f"tokens ({filled:.0%} filled); {len(self.validation_rows)} rows for validation, {len(self.test_rows)} for "
            "test."
        )

    def _rows(self, documents: Sequence[Sequence[Row]]) -> list[Row]:
        rows = [row for rows in documents for row in rows]
        return packed(rows, self.sequence_length) if self.documents == "pack" else rows

    def _rows_by_document(self, patterns: list[str] | str, tokenizer: PreTrainedTokenizerBase) -> list[list[Row]]:
        """Rows of every document that has any."""
        files = find_files([patterns] if isinstance(patterns, str) else patterns)
        rows_by_document = []
        num_documents = 0
        bad: list[ValueError] = []
        heed = bad.append if self.bad_rows == "skip" else refuse
        for texts in _batches_of_text(files, self.fields, heed):
            for document in tokenize(texts, tokenizer, append_eos=self.append_eos):
                num_documents += 1
                if self.documents == "truncate":
                    document = TokenizedDocument(document.ids[: self.sequence_length], document.num_prompt)
                rows = list(cut(document, self.sequence_length))
                if rows:
                    rows_by_document.append(rows)
        if bad:
            rank_zero_warn(f"{len(bad)} bad row(s) of {patterns!r} are left out; the first: {bad[0]}")
        if not rows_by_document:
            raise ValueError(
                f"{len(files)} file(s) matched {patterns!r}, but none of their {num_documents} document(s) has a token "
                "to predict: they are empty, or the prompts alone fill sequence_length"
            )
        if len(rows_by_document) < num_documents:
            rank_zero_info(
                f"{num_documents - len(rows_by_document)} of {num_documents} documents have no token to predict and "
                "are left out."
            )
        return rows_by_document

    def train_dataloader(self) -> DataLoader[Any]:
        """Batches of training rows."""
        replicas = self._replicas()
        sampler: Sampler[int] = SequentialSampler(self.train_rows)
        if self.group_by_length:
            lengths = [len(row.ids) for row in self.train_rows]
            sampler = LengthGroups(lengths, self.batch_size * replicas["num_replicas"], self.seed, self._epoch)
        elif self.shuffle:
            sampler = EpochShuffle(len(self.train_rows), self.seed, self._epoch)
        if replicas["num_replicas"] > 1:
            # Lightning would shuffle what it deals out to replicas.
            sampler = DistributedSamplerWrapper(sampler, **replicas, shuffle=False)
        return self._dataloader(self.train_rows, sampler)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Batches of validation rows; an empty list, which the Trainer takes for "none", without `validation`."""
        return self._dataloader(self.validation_rows) if self.validation_rows else self._none("validate", "validation")

    def test_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Batches of test rows."""
        return self._dataloader(self.test_rows) if self.test_rows else self._none("test", "test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """Batches of all rows of `files` but those set apart, in order."""
        return self._dataloader(self.train_rows)

    def _epoch(self) -> int:
        return coming_epoch(self.trainer)

    def _replicas(self) -> dict[str, Any]:
        """How many processes, or pipelines of them, rows are dealt out to; and which of them this is."""
        dealt = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return {"num_replicas": 1, "rank": 0} if dealt is None else dealt

    def _none(self, command: str, argument: str) -> list[Any]:
        if self.trainer is not None and self.trainer.state.fn == command:
            raise ValueError(f"there are no documents to {command} on: set data.{argument} to a share or to files")
        return []

    def _dataloader(self, rows: Sequence[Row], sampler: Sampler[int] | None = None) -> DataLoader[Any]:
        assert self.tokenizer is not None, "setup() makes the rows"
        candidates = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        pad_id = next(token for token in candidates if token is not None)
        pad = pad_packed_rows if self.documents == "pack" else pad_rows
        length = self.sequence_length if self.padding == "length" else None
        return DataLoader(
            rows,  # type: ignore[arg-type]
            batch_size=self.batch_size,
            sampler=sampler,
            collate_fn=partial(pad, length=length, pad_id=pad_id),
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


def _batches_of_text(
    files: Sequence[Path], fields: Fields, bad: Callable[[ValueError], None]
) -> Iterator[list[Document]]:
    """The documents of all files, in batches for the tokenizer, with a progress bar on the main rank."""
    sizes = [path.stat().st_size for path in files]
    bar = tqdm(
        total=sum(sizes),
        desc="Tokenizing",
        unit="B",
        unit_scale=True,
        delay=1,
        disable=getattr(rank_zero_only, "rank", 0) != 0,
    )
    with bar:
        batch: list[Document] = []
        characters = 0
        for path, size in zip(files, sizes, strict=True):
            for document in read_documents(path, fields, bad):
                batch.append(document)
                characters += len(document.text)
                if characters >= CHARACTERS_AT_ONCE:
                    yield batch
                    batch, characters = [], 0
            bar.update(size)
        if batch:
            yield batch

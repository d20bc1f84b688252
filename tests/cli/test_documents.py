"""The data module: splits, order, batches, and refusals of data that cannot be trained on."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from support.byte_tokenizer import VOCAB_SIZE, save_byte_tokenizer

from lightning_seq1f1b import LongDocuments
from lightning_seq1f1b.cli.shuffling import LengthGroups
from lightning_seq1f1b.runtime.documents import document_starts

LENGTH = 8


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return save_byte_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
def files(tmp_path: Path) -> str:
    """Ten documents of one row each, the letter of their number repeated."""
    for index in range(10):
        (tmp_path / f"{index}.txt").write_text(chr(ord("a") + index) * 6)
    return str(tmp_path / "*.txt")


def letters(data: LongDocuments, batches) -> list[str]:
    return [text[0] for batch in batches for text in data.tokenizer.batch_decode(batch["input_ids"])]


def test_shares_are_set_apart_and_no_document_is_in_two_splits(files, tokenizer):
    data = LongDocuments(files, tokenizer, sequence_length=LENGTH, validation=0.15, test=0.3)
    data.setup("fit")
    splits = [
        letters(data, loader) for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
    ]
    assert [len(split) for split in splits] == [5, 2, 3]
    assert sorted("".join(map("".join, splits))) == list("abcdefghij")


def test_the_seed_chooses_what_is_set_apart(files, tokenizer):
    chosen = set()
    for seed in range(4):
        data = LongDocuments(files, tokenizer, sequence_length=LENGTH, validation=0.3, seed=seed)
        data.setup("fit")
        chosen.add("".join(letters(data, data.val_dataloader())))
    assert len(chosen) > 1


def test_validation_and_test_can_be_files(files, tokenizer, tmp_path):
    other = tmp_path / "other.md"
    other.write_text("zzzzzz")
    data = LongDocuments(files, tokenizer, sequence_length=LENGTH, validation=[str(other)], test=str(other))
    data.setup("fit")
    assert len(data.train_dataloader()) == 10
    assert letters(data, data.val_dataloader()) == letters(data, data.test_dataloader()) == ["z"]


def test_without_shares_there_is_no_validation(files, tokenizer):
    data = LongDocuments(files, tokenizer, sequence_length=LENGTH)
    data.setup("fit")
    assert data.val_dataloader() == []
    assert data.test_dataloader() == []


@pytest.mark.parametrize("command", ["validate", "test"])
def test_a_command_without_its_documents_is_refused(files, tokenizer, command):
    data = LongDocuments(files, tokenizer, sequence_length=LENGTH)
    data.trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    data.trainer.state.fn = command
    data.setup(command)
    name = {"validate": "validation", "test": "test"}[command]
    with pytest.raises(ValueError, match=rf"no documents to {command} on: set data\.{name}"):
        (data.val_dataloader if command == "validate" else data.test_dataloader)()


def test_the_order_changes_with_the_epoch_and_not_with_the_random_state(files, tokenizer):
    orders = []
    for state in (0, 1):
        torch.manual_seed(state)
        data = LongDocuments(files, tokenizer, sequence_length=LENGTH, batch_size=3)
        data.trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
        data.setup("fit")
        for epoch in range(2):
            data.trainer.fit_loop.epoch_progress.current.completed = epoch
            data.trainer.fit_loop.epoch_progress.current.processed = epoch
            orders.append("".join(letters(data, data.train_dataloader())))
    assert orders[:2] == orders[2:]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list("abcdefghij")


def test_without_shuffling_rows_come_in_the_order_of_the_files(files, tokenizer):
    data = LongDocuments(files, tokenizer, sequence_length=LENGTH, batch_size=4, shuffle=False)
    data.setup("fit")
    assert letters(data, data.train_dataloader()) == letters(data, data.predict_dataloader()) == list("abcdefghij")
    assert [len(batch["labels"]) for batch in data.train_dataloader()] == [4, 4, 2]


def test_a_long_document_is_cut_or_truncated(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("x" * 30)
    counts = {}
    for documents in ("cut", "truncate"):
        data = LongDocuments(str(tmp_path / "a.txt"), tokenizer, sequence_length=LENGTH, documents=documents)
        data.setup("fit")
        counts[documents] = len(data.train_rows)
        assert {batch["input_ids"].shape for batch in data.train_dataloader()} == {(1, LENGTH)}
    assert counts == {"cut": 5, "truncate": 1}  # 30 tokens and an end: 30 targets, 7 in a row


def test_a_tokenizer_without_padding_pads_with_the_end_token(tmp_path):
    tokenizer = save_byte_tokenizer(tmp_path / "tokenizer", with_pad=False)
    (tmp_path / "a.txt").write_text("abc")
    data = LongDocuments(str(tmp_path / "a.txt"), tokenizer, sequence_length=LENGTH)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert batch["input_ids"][0, 3:].tolist() == [2] * 5
    assert batch["labels"][0, 3:].tolist() == [2] + [-100] * 4  # the document's own end is a target, padding is not


def test_worker_processes_give_the_same_batches(files, tokenizer):
    batches = []
    for num_workers in (0, 1):
        data = LongDocuments(files, tokenizer, sequence_length=LENGTH, batch_size=3, num_workers=num_workers)
        data.setup("fit")
        batches.append(letters(data, data.train_dataloader()))
    assert batches[0] == batches[1]


def test_files_are_read_once(files, tokenizer, tmp_path):
    data = LongDocuments(files, tokenizer, sequence_length=LENGTH)
    data.setup("fit")
    rows = data.train_rows
    for path in tmp_path.glob("*.txt"):
        path.unlink()
    data.setup("test")
    assert data.train_rows is rows
    assert data.num_tokens == VOCAB_SIZE


def test_documents_of_many_sizes_reach_the_tokenizer_in_batches(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_seq1f1b.cli.documents.CHARACTERS_AT_ONCE", 10)
    texts = ["x" * size for size in (1, 40, 3, 9, 9, 2)]
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.txt").write_text(text)
    data = LongDocuments(str(tmp_path / "*.txt"), tokenizer, sequence_length=64, append_eos=False, shuffle=False)
    data.setup("fit")
    assert [len(row.ids) for row in data.train_rows] == [40, 3, 9, 9, 2]  # one token alone has nothing to predict


@pytest.mark.parametrize("text", ["", '{"prompt": "0123456789", "answer": "a"}\n'])
def test_documents_without_a_token_to_predict_are_refused(tokenizer, tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    data = LongDocuments(str(path), tokenizer, sequence_length=LENGTH, documents="truncate")
    with pytest.raises(ValueError, match=r"none of their [01] document\(s\) has a token to predict"):
        data.setup("fit")


def test_shares_that_leave_nothing_to_train_on_are_refused(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("abcdef")
    data = LongDocuments(str(tmp_path / "a.txt"), tokenizer, sequence_length=LENGTH, validation=0.1)
    with pytest.raises(ValueError, match=r"leave none of the 1 document\(s\) to train on"):
        data.setup("fit")


def test_documents_can_be_packed(tokenizer, tmp_path):
    for index, size in enumerate((3, 6, 2, 4, 17)):
        (tmp_path / f"{index}.txt").write_text(chr(ord("a") + index) * size)
    data = LongDocuments(
        str(tmp_path / "*.txt"), tokenizer, sequence_length=LENGTH, batch_size=9, documents="pack", append_eos=False
    )
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert batch.keys() == {"input_ids", "position_ids", "labels"}
    assert batch["input_ids"].shape == (5, LENGTH)  # 3 + 6 + 2 + 4 tokens, and 17 in pieces of 8, 8 and 3
    starts = document_starts(batch["position_ids"])
    assert (batch["labels"][starts] == -100).all()
    inside = ~starts[:, 1:]
    assert (batch["input_ids"][:, 1:] == batch["input_ids"][:, :-1])[inside].all(), "one letter in a document"
    supervised = batch["labels"][:, 1:] != -100
    assert int(supervised.sum()) == 2 + 5 + 1 + 3 + 16


def test_rows_can_be_padded_to_the_longest_of_their_batch_only(tokenizer, tmp_path):
    for index, size in enumerate((3, 6, 2, 4)):
        (tmp_path / f"{index}.txt").write_text("x" * size)
    data = LongDocuments(
        str(tmp_path / "*.txt"),
        tokenizer,
        sequence_length=64,
        batch_size=2,
        append_eos=False,
        padding="longest",
        group_by_length=True,
    )
    data.setup("fit")
    assert sorted(batch["input_ids"].shape[1] for batch in data.train_dataloader()) == [3, 6]
    assert isinstance(data.train_dataloader().sampler, LengthGroups)


def test_bad_rows_are_left_out_with_one_word(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc"}\n{"text": "cut o\n{"txt": "abc"}\n{"text": "abcd"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not valid JSON"):
        LongDocuments(str(path), tokenizer, sequence_length=LENGTH).setup("fit")
    data = LongDocuments(str(path), tokenizer, sequence_length=LENGTH, bad_rows="skip")
    with pytest.warns(UserWarning, match=r"2 bad row\(s\) of .* are left out; the first: .*:2: not valid JSON") as said:
        data.setup("fit")
    assert len([warning for warning in said if "bad row" in str(warning.message)]) == 1
    assert len(data.train_rows) == 2


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"sequence_length": 1}, "sequence_length must be at least 2"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"documents": "fold"}, "documents must be one of cut, truncate, pack, not 'fold'"),
        ({"padding": "none"}, "padding must be one of length, longest"),
        ({"bad_rows": "hide"}, "bad_rows must be one of error, skip"),
        ({"group_by_length": True, "shuffle": False}, "leave shuffle=True"),
        ({"num_workers": -1}, "num_workers must not be negative"),
        ({"validation": 1.0}, r"validation as a share of the documents must be in \[0, 1\)"),
        ({"test": -0.1}, r"test as a share of the documents must be in \[0, 1\)"),
    ],
)
def test_numbers_out_of_range_are_refused(argument, message):
    with pytest.raises(ValueError, match=message):
        LongDocuments("a.txt", "tokenizer", **argument)


@pytest.mark.behaviour(15)
@pytest.mark.parametrize(
    "order", [{}, {"shuffle": False}, {"group_by_length": True}], ids=["shuffled", "plain", "grouped"]
)
def test_batches_of_the_replicas_are_together_those_of_one_device(tokenizer, tmp_path, order):
    for number in range(1, 13):
        (tmp_path / f"{number:02}.txt").write_text(chr(ord("a") + number) * number)

    def batches(replica, num_replicas):
        data = LongDocuments(str(tmp_path / "*.txt"), tokenizer, 32, batch_size=4 // num_replicas, seed=2, **order)
        strategy = DDPStrategy()
        data.trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", strategy=strategy)
        place = {"num_replicas": num_replicas, "rank": replica}
        with mock.patch.object(DDPStrategy, "distributed_sampler_kwargs", new=place):
            assert data.trainer.distributed_sampler_kwargs == place
            data.setup("fit")
            return [letters(data, [batch]) for batch in data.train_dataloader()]

    one = [sorted(batch) for batch in batches(0, 1)]
    assert len(one) == 3
    together = [sorted(first + second) for first, second in zip(batches(0, 2), batches(1, 2), strict=True)]
    assert together == one

"""A sharded checkpoint is written by all ranks without a gather, and holds what one file would have held."""

from __future__ import annotations

import functools
import gc
import os
import pickle
import re
import shutil
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from support.fitting import ONE_DEVICE, Where, everywhere, stages
from support.pretrained import Pretrained, rows
from support.processes import run_processes
from support.resuming import END, Counter, Resumable, assert_same_content, batches, fit, load, make_trainer
from support.tiny_models import tiny_model

from lightning_seq1f1b.cli.consolidate import consolidate
from lightning_seq1f1b.strategy import checkpoint_files, checkpoints, sharded_writing
from lightning_seq1f1b.strategy.sharded_reading import ShardedCheckpoint

EPOCHS = 3
AFTER_EPOCH, WITHIN_EPOCH = "epoch=1.ckpt", "step=4.ckpt"
SHARDED = stages(state_dict_type="sharded")
SHAPES = {
    "2 x 2 stages": stages(4, num_stages=2),
    "2 x 2 stages, shared out": stages(4, num_stages=2, shard_optimizer=True),
    "2 stages, 2 virtual": stages(2, virtual_stages=2, schedule="interleaved_seq1f1b"),
}
RANK_0, RANK_1 = "__0_0.distcp", "__1_0.distcp"


class Exotic(Resumable):
    """Puts into the checkpoint what torch reads only when told to trust the file."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["exotic"] = Fraction(1, 3)


class Extra(Resumable):
    """Has a parameter of the user's own beside the model."""

    def configure_model(self) -> None:
        super().configure_model()
        self.extra = torch.nn.Parameter(torch.ones(3))


class Wider(Extra):
    """And another model."""

    def configure_model(self) -> None:
        self.overrides = {**self.overrides, "intermediate_size": 24}
        super().configure_model()


def error(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The kind and message of the exception that a call raises; empty without one."""
    try:
        function(*args, **kwargs)
    except Exception as exception:
        return f"{type(exception).__name__}: {exception}"
    return ""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def one_file(directory: Path) -> Path:
    """The same checkpoint as one file."""
    file = directory.with_name(f"{directory.name}.whole")
    if not file.exists():
        consolidate(directory, file)
    return file


# ---- cases, run on two stages --------------------------------------------------------------------------------------


def write(root: Path, where: Where) -> list[int]:
    """Train for two of the three epochs; the number of keys in every checkpoint that the user's hook saw."""
    module = Resumable()
    with mock.patch.object(checkpoints, "gather_to_first", None):  # what brings tensors to rank 0 in the full format
        fit(where, root / "two", EPOCHS - 1, module=module)
    return module.saved_keys


def resume(root: Path, source: str, name: str, where: Where) -> None:
    """Go on from a checkpoint."""
    fit(where, root / name, EPOCHS, ckpt_path=root / source)


def resume_last(root: Path, where: Where) -> Any:
    """What a new program with the same folder does by itself; the checkpoint it took."""
    trainer = make_trainer(where, root / "two", [Counter()], max_epochs=EPOCHS)
    trainer.fit(Resumable(), batches(), ckpt_path="last")
    trainer.save_checkpoint(root / "two" / END)
    return trainer.ckpt_path


def keep(root: Path, kind: str, save_last: Any, where: Where) -> dict[str, Any]:
    """What ModelCheckpoint leaves behind of the best and the last one, and the losses when they are loaded."""
    folder, where = root / f"kept {kind} {save_last}", stages(state_dict_type=kind)
    saver = ModelCheckpoint(folder, "{step}", monitor="val_loss", mode="min", save_last=save_last, save_top_k=1)
    trainer = make_trainer(where, None, [saver], max_epochs=EPOCHS)
    module = Resumable()
    trainer.fit(module, batches(), batches())
    end = float(trainer.callback_metrics["val_loss"])
    (best,) = trainer.test(module, batches(), ckpt_path="best", verbose=False)
    (last,) = trainer.validate(module, batches(), ckpt_path=folder / "last.ckpt", verbose=False)
    losses = {"best": (float(saver.best_model_score), best["test_loss"]), "last": (end, last["val_loss"])}
    return {"names": names(folder), "losses": losses}


def trust(root: Path, where: Where) -> tuple[str, int]:
    """Resume a checkpoint with an exotic object in it, by default and when it is trusted."""
    trainer = make_trainer(where, max_steps=2)
    trainer.fit(Exotic(), batches())
    trainer.save_checkpoint(root / "exotic")
    refused = error(make_trainer(where, max_steps=3).fit, Exotic(), batches(), ckpt_path=root / "exotic")
    trusting = make_trainer(where, max_steps=3)
    trusting.fit(Exotic(), batches(), ckpt_path=root / "exotic", weights_only=False)
    return refused, trusting.global_step


def no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def full_disk(root: Path, where: Where) -> tuple[str, list[str], bool]:
    """The second rank cannot write: what the two say, what is left, and whether the one before is untouched."""
    path = root / "full disk" / "last.ckpt"
    trainer = make_trainer(where, max_steps=1)
    trainer.fit(Resumable(), batches())
    trainer.save_checkpoint(path)
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    writes = no_space if trainer.global_rank == 1 else sharded_writing._Writer.write_data
    with mock.patch.object(sharded_writing._Writer, "write_data", writes):
        said = error(trainer.save_checkpoint, path)
    trainer.strategy.barrier()
    return said, names(path.parent), before == {file.name: file.stat().st_mtime_ns for file in path.iterdir()}


class SavesFirst(Callback):
    """Saves after the first step, and opens a gate when training has ended; notes whether it was written by then."""

    def __init__(self, path: Path) -> None:
        self.path, self.gate, self.early = path, threading.Event(), True

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, *_: Any) -> None:
        self.early = self.path.exists()
        self.gate.set()


def later(root: Path, kind: str, where: Where) -> bool:
    """Save once by a thread that is held up until training has ended, and once at once."""
    where = stages(state_dict_type=kind)
    saves = SavesFirst(root / f"later {kind}")
    write_parts = {"full": "whole_file", "sharded": "write_shards"}[kind]
    writing = getattr(checkpoint_files, write_parts)

    def held_up(*args: Any) -> Any:
        assert saves.gate.wait(60)
        return writing(*args)

    torch.manual_seed(0)
    with mock.patch.object(checkpoint_files, write_parts, held_up):
        make_trainer(where, None, [saves], max_steps=3, plugins=[AsyncCheckpointIO()]).fit(Resumable(), batches())
    torch.manual_seed(0)
    make_trainer(where, None, [SavesFirst(root / f"now {kind}")], max_steps=3).fit(Resumable(), batches())
    return saves.early


def later_failure(root: Path, kind: str, fails_at: int, where: Where) -> tuple[str, int, list[str]]:
    """A thread of one rank cannot write; the error, the steps made by then, and what is left."""
    rank = {"full": 0, "sharded": 1}[kind]
    folder = root / f"failure {kind} {fails_at}"
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=1)
    where = stages(state_dict_type=kind)
    trainer = make_trainer(where, None, [saver], max_steps=3, plugins=[AsyncCheckpointIO()])
    place: Any = (sharded_writing._Writer, "write_data") if rank else (checkpoint_files, "whole_file")
    writing, count = getattr(*place), iter(range(1, 9))

    def fails(*args: Any) -> Any:
        if next(count) == fails_at and trainer.global_rank == rank:
            no_space()
        return writing(*args)

    with mock.patch.object(*place, fails):
        said = error(trainer.fit, Resumable(), batches())
    return said, trainer.global_step, names(folder) if folder.exists() else []


def refused_plugins(where: Where) -> list[str]:
    plugins = (TorchCheckpointIO(), AsyncCheckpointIO(TorchCheckpointIO()))
    return [error(make_trainer(where, plugins=[plugin]).fit, Resumable(), batches()) for plugin in plugins]


SPOILT: dict[str, Callable[[Path], Any]] = {
    f"is not whole: its file {RANK_1} is missing": lambda path: (path / RANK_1).unlink(),
    f"{RANK_0} is cut off: it has 100 bytes of": lambda path: os.truncate(path / RANK_0, 100),
    ".metadata is damaged": lambda path: os.truncate(path / ".metadata", 100),
    "has changed since it was written": lambda path: (path / RANK_0).write_bytes(bytes(1 << 20)),
    "meta.pt is empty": lambda path: os.truncate(path / "meta.pt", 0),
    "is no sharded checkpoint: it has no meta.pt": lambda path: (path / "meta.pt").unlink(),
    "was written by another strategy": lambda path: torch.save({"epoch": 1}, path / "meta.pt"),
}
"""Ways to spoil a checkpoint, by what is said of it."""


def spoil(root: Path, where: Where) -> dict[str, str]:
    """What is said of checkpoints that are spoilt, or not there, or of another model."""
    trainer = make_trainer(where, max_steps=1)
    trainer.fit(Resumable(), batches())
    trainer.save_checkpoint(root / "good")
    trainer.strategy.barrier()
    if trainer.global_rank == 0:
        for text, change in SPOILT.items():
            shutil.copytree(root / "good", root / "spoilt" / text)
            change(root / "spoilt" / text)
    trainer.strategy.barrier()
    said = {}
    for text in (*SPOILT, "Checkpoint file not found"):
        trainer = make_trainer(where, max_steps=4)
        said[text] = error(trainer.fit, Resumable(), batches(), ckpt_path=root / "spoilt" / text)
    trainer = make_trainer(where, max_steps=4)
    said["does not fit"] = error(trainer.fit, Wider(), batches(), ckpt_path=root / "good")
    extra = Extra()
    said["strict"] = error(trainer.validate, extra, batches(), ckpt_path=root / "good", verbose=False)
    extra.strict_loading = False
    said["lenient"] = error(trainer.validate, extra, batches(), ckpt_path=root / "good", verbose=False)
    return said


def both_formats(root: Path, name: str, where: Where) -> None:
    """Save one state in both formats, and what is loaded from the sharded one in the full format."""
    torch.manual_seed(0)
    trainer = make_trainer(where, max_steps=2)
    trainer.fit(Resumable(), batches())
    for kind in ("full", "sharded"):
        trainer.strategy.state_dict_type = kind
        trainer.save_checkpoint(root / name / kind)
        trainer.save_checkpoint(root / name / f"{kind} weights", weights_only=True)
    trainer = make_trainer(where, max_steps=2)  # loads everything, and takes no step
    trainer.fit(Resumable(), batches(), ckpt_path=root / name / "sharded")
    trainer.save_checkpoint(root / name / "again")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All cases; gives the folder of all files, and what each case returned by name and rank."""
    root = tmp_path_factory.mktemp("sharded")
    fit(ONE_DEVICE, root / "whole", EPOCHS)
    case = functools.partial
    cases = {
        "write": case(write, root),
        "last": case(resume_last, root),
        "from one": case(resume, root, f"whole/{AFTER_EPOCH}", "one-to-two"),
        "within": case(resume, root, f"two/{WITHIN_EPOCH}", "two-within"),
        "keep": case(keep, root, "sharded", True),
        "keep link": case(keep, root, "sharded", "link"),
        "keep link full": case(keep, root, "full", "link"),
        "trust": case(trust, root),
        "full disk": case(full_disk, root),
        "later full": case(later, root, "full"),
        "later sharded": case(later, root, "sharded"),
        **{
            f"failure {kind} {fails_at}": case(later_failure, root, kind, fails_at)
            for kind in ("full", "sharded")
            for fails_at in (1, 3)
        },
        "plugins": refused_plugins,
        "spoil": case(spoil, root),
    }
    by_case = everywhere(tuple(cases.values()), SHARDED)
    return root, {name: by_case[each] for name, each in cases.items()}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """A state in both formats, of all shapes; gives the folder."""
    root = tmp_path_factory.mktemp("shapes")
    for name, where in SHAPES.items():
        everywhere((functools.partial(both_formats, root, name),), where)
    return root


# ---- what is in it -------------------------------------------------------------------------------------------------


@pytest.mark.behaviour(28)
@pytest.mark.behaviour(34)
@pytest.mark.parametrize("name", [AFTER_EPOCH, "step=2.ckpt", WITHIN_EPOCH])
def test_a_directory_of_two_stages_holds_what_the_file_of_one_device_holds(runs, name):
    """Hyper-parameters, callbacks, loops, schedulers and the user's own entries included."""
    root, _ = runs
    assert_same_content(one_file(root / "two" / name), root / "whole" / name)


@pytest.mark.behaviour(33)
def test_every_rank_writes_its_own_tensors_and_shared_ones_are_written_once(runs):
    root, _ = runs
    path = root / "two" / AFTER_EPOCH
    assert names(path) == [".metadata", RANK_0, RANK_1, "meta.pt"]
    whole = sum(tensor.nbytes for tensor in set(load(root / "whole" / AFTER_EPOCH)["state_dict"].values()))
    opened = ShardedCheckpoint(path)
    held = {RANK_0: 0, RANK_1: 0}
    for index, place in opened._metadata.storage_data.items():
        stored = opened._metadata.state_dict_metadata[index.fqn]
        held[place.relative_path] += stored.size.numel() * stored.properties.dtype.itemsize
    tied = load(root / "whole" / AFTER_EPOCH)["state_dict"]["model.lm_head.weight"].nbytes
    assert sum(held.values()) == pytest.approx(3 * (whole - tied), rel=0.01)  # weights, and two moments
    assert max(held.values()) < 0.7 * sum(held.values())


@pytest.mark.behaviour(36)
def test_the_users_hook_sees_the_ranks_own_keys(runs):
    root, results = runs
    whole = load(root / "whole" / AFTER_EPOCH)["state_dict"]
    for first, last in zip(*results["write"], strict=True):
        assert first + last == len(whole) + 1  # both have the tied head


@pytest.mark.parametrize("shape", SHAPES)
def test_both_formats_hold_the_same_bits(shapes, shape):
    folder = shapes / shape
    for name in ("", " weights"):
        assert_same_content(one_file(folder / f"sharded{name}"), folder / f"full{name}", tolerance=0)
    without = ["loops", "callbacks", "the user's own"]  # they count what a run has done
    assert_same_content(folder / "again", folder / "full", tolerance=0, without=without)


def test_copies_on_replicas_are_written_once(shapes):
    """The files of two replicas are no larger than those of one, and each writes a part."""
    sizes = {}
    for shape, where in SHAPES.items():
        files = sorted((shapes / shape / "sharded").glob("*.distcp"))
        assert len(files) == where.devices
        sizes[shape] = sum(file.stat().st_size for file in files)
    assert max(sizes.values()) < 1.02 * min(sizes.values())


@pytest.mark.behaviour(28)
def test_one_file_of_it_loads_on_one_device(runs):
    root, _ = runs
    module = Resumable.load_from_checkpoint(one_file(root / "two" / AFTER_EPOCH), map_location="cpu")
    tokens = batches().dataset[0]["input_ids"][None]
    assert module.model(input_ids=tokens).logits.shape[:2] == tokens.shape


# ---- going on ------------------------------------------------------------------------------------------------------


@pytest.mark.behaviour(29)
def test_resumes_a_file_of_one_device(runs):
    root, _ = runs
    assert_same_content(one_file(root / "one-to-two" / END), root / "whole" / END)


@pytest.mark.behaviour(30)
def test_resumes_the_last_one_and_within_an_epoch(runs):
    root, results = runs
    assert results["last"] == [str(root / "two" / "last.ckpt")] * 2
    for name in ("two", "two-within"):
        assert_same_content(one_file(root / name / END), root / "whole" / END)


@pytest.mark.behaviour(29)
def test_resumes_on_one_device(runs):
    """With one stage; Lightning's own strategies need it as one file."""
    root, _ = runs
    everywhere((functools.partial(resume, root, f"two/{AFTER_EPOCH}", "two-to-one"),), stages(1))
    assert_same_content(root / "two-to-one" / END, root / "whole" / END)


@pytest.mark.behaviour(31)
def test_weights_only_is_honoured(runs):
    _, results = runs
    for refused, steps in results["trust"]:
        assert refused.startswith("UnpicklingError")
        assert "meta.pt holds fractions.Fraction" in refused
        assert steps == 3


@pytest.mark.behaviour(33)
@pytest.mark.behaviour(35)
@pytest.mark.parametrize("case", ["keep", "keep link", "keep link full"])
def test_the_best_and_the_last_are_kept_and_loaded(runs, case):
    root, results = runs
    for result in results[case]:
        assert result["names"] == ["last.ckpt", "step=9.ckpt"]
        for expected, got in result["losses"].values():
            assert got == pytest.approx(expected, abs=1e-6)
    for kind in ("full", "sharded"):
        assert (root / f"kept {kind} link" / "last.ckpt").is_symlink()


# ---- what cannot be written or read --------------------------------------------------------------------------------


@pytest.mark.behaviour(33)
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_training_goes_on_while_a_thread_writes_what_was(runs, kind):
    root, results = runs
    assert results[f"later {kind}"] == [False, False]
    got, expected = (root / f"{when} {kind}" for when in ("later", "now"))
    if kind == "sharded":
        got, expected = one_file(got), one_file(expected)
    got, expected = load(got), load(expected)
    for key, value in expected["state_dict"].items():
        assert torch.equal(got["state_dict"][key], value)
    for number, entries in expected["optimizer_states"][0]["state"].items():
        for key, value in entries.items():
            assert torch.equal(got["optimizer_states"][0]["state"][number][key], value)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_thread_that_cannot_write_ends_the_run_with_the_reason(runs, kind):
    _, results = runs
    for said, steps, left in results[f"failure {kind} 1"]:
        assert said.startswith("OSError")
        assert "No space left on device" in said
        assert steps in (2, 3)  # the thread may be slower than a step
        assert "step=1.ckpt" not in left
    for said, steps, left in results[f"failure {kind} 3"]:
        assert said.startswith("OSError")
        assert "No space left on device" in said
        assert steps == 3
        assert left == ["step=2.ckpt"]  # it stays, because nothing took its place


def test_a_rank_that_cannot_write_is_told_on_all_and_the_old_one_stays(runs):
    root, results = runs
    (other, *_), (own, *_) = results["full disk"]
    path = root / "full disk" / "last.ckpt"
    assert own == f"OSError: [Errno 28] the checkpoint {path} cannot be written: No space left on device"
    assert other.startswith(f"OSError: saving {path} failed on rank 1: OSError: [Errno 28]")
    for _, left, untouched in results["full disk"]:
        assert left == ["last.ckpt"]
        assert untouched


def test_other_plugins_cannot_write_it(runs):
    _, results = runs
    for refused in results["plugins"]:
        for text in refused:
            assert "is written by torch.distributed.checkpoint, not by TorchCheckpointIO" in text


@pytest.mark.parametrize("reason", [*SPOILT, "Checkpoint file not found"])
def test_what_is_spoilt_is_refused_on_all_ranks_before_training(runs, reason):
    root, results = runs
    for said in results["spoil"]:
        assert reason in said[reason].replace(str(root / "spoilt" / reason), "")
        assert str(root / "spoilt" / reason) in said[reason]


@pytest.mark.behaviour(32)
def test_another_models_is_refused_with_all_that_is_wrong(runs):
    _, results = runs
    for said in results["spoil"]:
        text = said["does not fit"]
        assert text.startswith("RuntimeError: the checkpoint does not fit Wider")
        assert "missing key: extra" in text
        for layer in range(4):
            assert f"size mismatch for model.model.layers.{layer}.mlp.up_proj.weight" in text
        assert said["strict"].endswith("does not fit Extra:\n  missing key: extra")
        assert said["lenient"] == ""


class Touches:
    """What a pickle of it does when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_code_in_torchs_metadata_is_not_run(runs, tmp_path):
    """As torch's own reader would run it."""
    root, _ = runs
    path = shutil.copytree(root / "two" / AFTER_EPOCH, tmp_path / "a")
    (path / ".metadata").write_bytes(pickle.dumps(Touches(tmp_path / "touched")))
    with pytest.raises(ValueError, match=r"it holds pathlib\.\w*Path\.touch|it holds builtins.getattr"):
        ShardedCheckpoint(path)
    assert not (tmp_path / "touched").exists()


def test_a_file_outside_the_directory_is_not_read(runs, tmp_path):
    root, _ = runs
    path = shutil.copytree(root / "two" / AFTER_EPOCH, tmp_path / "a")
    content = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(content.replace(RANK_0.encode(), b"/../__0.cptx"))
    with pytest.raises(ValueError, match="names a file outside of it"):
        ShardedCheckpoint(path)


# ---- memory --------------------------------------------------------------------------------------------------------


def memory(field: str) -> int:
    """Bytes, of this process."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


class Large(Pretrained):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def peaks(rank: int, root: Path) -> tuple[int, int, int]:
    """Bytes of this rank's weights, and the highest memory above that before: in saving, and in resuming."""

    def start() -> int:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # forgets the highest value so far
        return memory("VmRSS")

    def trained(steps: int, **options: Any) -> Any:
        trainer = make_trainer(SHARDED, max_steps=steps)
        trainer.fit(Large(root / "big"), rows(), **options)
        return trainer

    trainer = trained(1)
    weights = sum(parameter.nbytes for parameter in trainer.lightning_module.parameters())
    trainer.save_checkpoint(root / "first")  # what is imported and allocated once
    before = start()
    trainer.save_checkpoint(root / "saved")
    saving = memory("VmHWM") - before
    del trainer
    trained(1, ckpt_path=root / "first")
    before = start()
    trained(1, ckpt_path=root / "saved")
    return weights, saving, memory("VmHWM") - before


@pytest.mark.behaviour(33)
def test_a_rank_needs_memory_for_its_share(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 1024}
    tiny_model("llama", torch.float32, num_hidden_layers=12, **sizes).save_pretrained(tmp_path / "big")
    for weights, saving, resuming in run_processes(peaks, 2, tmp_path):
        assert weights > 20e6
        assert saving < 0.2 * weights + 4e6
        assert resuming < 2.3 * weights + 8e6  # weights and momentum; the whole would be four times

"""A checkpoint is the file that one device writes, whoever writes it, and anyone can go on from it."""

import functools
import io
from fractions import Fraction

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from support.fitting import ONE_DEVICE, TWO_STAGES, everywhere, stages
from support.resuming import END, Counter, Resumable, assert_same_content, batches, fit, load, make_trainer, shared

from lightning_seq1f1b.strategy.data_state import ENTRY

EPOCHS = 3
AFTER_EPOCH, WITHIN_EPOCH = "epoch=1.ckpt", "step=4.ckpt"
FIRST_KEY, LAST_KEY = "model.model.layers.0.mlp.up_proj.weight", "model.model.layers.3.mlp.up_proj.weight"


class Exotic(Resumable):
    """Puts into the checkpoint what torch reads only when told to trust the file."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["exotic"] = Fraction(1, 3)


def error(function, *args, **kwargs):
    """The kind and message of the exception that a call raises; None without one."""
    try:
        function(*args, **kwargs)
    except Exception as exception:
        return f"{type(exception).__name__}: {exception}"
    return None


def size(path):
    """Bytes of a checkpoint file, without what only runs on stages note of their data."""
    content = load(path)
    content.pop(ENTRY, None)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.tell()


# ---- cases, run on one device and on stages ------------------------------------------------------------------------


def write(root, name, tied, named, where):
    """Train for two of the three epochs; the number of keys in every checkpoint that the user's hook saw."""
    module = Resumable(tied=tied, named=named)
    fit(where, root / name, EPOCHS - 1, module=module)
    return module.saved_keys


def resume(root, source, name, where):
    """Go on from a file."""
    fit(where, root / name, EPOCHS, ckpt_path=root / source)


def resume_last(root, name, where):
    """What a new program with the same folder does by itself; the file it took."""
    trainer = make_trainer(where, root / name, [Counter()], max_epochs=EPOCHS)
    trainer.fit(Resumable(), batches(), ckpt_path="last")
    trainer.save_checkpoint(root / name / END)
    return trainer.ckpt_path


def write_variants(root, name, where):
    """One step, saved without the optimizer, and saved by a thread of its own."""
    saver = ModelCheckpoint(root / name, "weights", save_weights_only=True, every_n_train_steps=1)
    make_trainer(where, None, [saver], max_steps=1).fit(Resumable(), batches())
    saver = ModelCheckpoint(root / name, "later", every_n_train_steps=1)
    make_trainer(where, None, [saver], max_steps=1, plugins=[AsyncCheckpointIO()]).fit(Resumable(), batches())


def fit_test_fit(root, name, where):
    """One Trainer fits, tests the best checkpoint (which is not the last one), and fits on."""
    torch.manual_seed(0)
    saver = ModelCheckpoint(root / name, "{epoch}", monitor="val_loss", mode="max")
    trainer = make_trainer(where, None, [saver], max_epochs=2)
    module = Resumable()
    trainer.fit(module, batches(), batches())
    best = saver.best_model_path
    tested = trainer.test(dataloaders=batches(), ckpt_path="best", verbose=False)
    trainer.fit_loop.max_epochs = EPOCHS
    trainer.fit(module, batches(), batches())
    trainer.save_checkpoint(root / name / END)
    return tested, best


def trust(root, name, where):
    """Resume a file with an exotic object in it, by default and when the file is trusted."""
    path = root / name / "exotic.ckpt"
    trainer = make_trainer(where, max_steps=2)
    trainer.fit(Exotic(), batches())
    trainer.save_checkpoint(path)
    refused = error(make_trainer(where, max_steps=3).fit, Exotic(), batches(), ckpt_path=path)
    trusting = make_trainer(where, max_steps=3)
    trusting.fit(Exotic(), batches(), ckpt_path=path, weights_only=False)
    return refused, trusting.global_step


def load_misfit(root, name, where):
    """Load a file with two keys missing and one too many: before the model is cut, after it, and leniently."""
    path = root / "misfit.ckpt"
    first = error(make_trainer(where, max_steps=4).fit, Resumable(), batches(), ckpt_path=path)
    trainer, module = make_trainer(where, max_steps=1), Resumable()
    trainer.fit(module, batches())
    later = error(trainer.validate, module, batches(), ckpt_path=path, verbose=False)
    lenient = Resumable()
    lenient.strict_loading = False
    trainer = make_trainer(where, max_epochs=EPOCHS)
    trainer.fit(lenient, batches(), ckpt_path=path)
    trainer.save_checkpoint(root / name / END)
    return first, later


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All cases at all places; gives the folder of all files, and what each case returned by name and rank."""
    root = tmp_path_factory.mktemp("checkpoints")
    fit(ONE_DEVICE, root / "whole", EPOCHS)
    misfit = load(root / "whole" / AFTER_EPOCH)
    for key in (FIRST_KEY, LAST_KEY):
        del misfit["state_dict"][key]
    misfit["state_dict"]["model.surplus"] = torch.zeros(1)
    torch.save(misfit, root / "misfit.ckpt")

    def cases(place):
        return {
            "untied": functools.partial(write, root, f"untied-{place}", False, True),
            "variants": functools.partial(write_variants, root, f"variants-{place}"),
            "again": functools.partial(fit_test_fit, root, f"again-{place}"),
            "trust": functools.partial(trust, root, f"trust-{place}"),
            "misfit": functools.partial(load_misfit, root, f"misfit-{place}"),
        }

    two = {
        "write": functools.partial(write, root, "two", True, False),
        "resume": functools.partial(resume, root, f"whole/{AFTER_EPOCH}", "one-to-two"),
        "resume within": functools.partial(resume, root, f"whole/{WITHIN_EPOCH}", "one-to-two-within"),
        "last": functools.partial(resume_last, root, "two"),
        **cases("two"),
    }
    results = _run(two, TWO_STAGES)
    results.update({f"one {name}": result for name, result in _run(cases("one"), ONE_DEVICE).items()})
    for devices, place in ((1, ONE_DEVICE), (3, stages(3)), (4, stages(4))):
        onward = {
            "resume": functools.partial(resume, root, f"two/{AFTER_EPOCH}", f"two-to-{devices}"),
            "within": functools.partial(resume, root, f"two/{WITHIN_EPOCH}", f"two-to-{devices}-within"),
        }
        _run(onward, place)
    return root, results


def _run(cases, where):
    by_case = everywhere(tuple(cases.values()), where)
    return {name: by_case[case] for name, case in cases.items()}


# ---- the file ------------------------------------------------------------------------------------------------------


@pytest.mark.behaviour(28)
@pytest.mark.parametrize("name", ["epoch=0.ckpt", AFTER_EPOCH, "step=2.ckpt", WITHIN_EPOCH, "step=6.ckpt"])
def test_file_of_two_stages_is_the_file_of_one_device(runs, name):
    root, _ = runs
    assert_same_content(root / "two" / name, root / "whole" / name)


@pytest.mark.behaviour(28)
def test_tied_weights_are_saved_once_and_untied_ones_twice(runs):
    root, _ = runs
    state = load(root / "two" / AFTER_EPOCH)["state_dict"]
    assert shared(state) == [{"model.lm_head.weight", "model.model.embed_tokens.weight"}]
    assert not shared(load(root / "untied-two" / END)["state_dict"])
    whole, two = (size(root / place / AFTER_EPOCH) for place in ("whole", "two"))
    assert abs(whole - two) < 4096  # names of folders differ


@pytest.mark.behaviour(28)
def test_file_loads_on_one_device(runs):
    root, _ = runs
    module = Resumable.load_from_checkpoint(root / "two" / AFTER_EPOCH, map_location="cpu")
    expected = load(root / "whole" / AFTER_EPOCH)["state_dict"]
    assert list(module.state_dict()) == list(expected)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
    tokens = batches().dataset[0]["input_ids"][None]
    assert module.model(input_ids=tokens).logits.shape[:2] == tokens.shape


@pytest.mark.behaviour(34)
def test_hyper_parameters_and_callback_state_survive(runs):
    root, _ = runs
    assert dict(Resumable.load_from_checkpoint(root / "untied-two" / END).hparams) == {
        "tied": False,
        "named": True,
        "learning_rate": 1e-2,
    }
    assert load(root / "two-to-1" / END)["callbacks"]["Counter"] == {"batches": 9}
    assert load(root / "one-to-two" / END)["callbacks"]["Counter"] == {"batches": 9}


@pytest.mark.behaviour(34)
def test_names_given_to_the_optimizer_are_saved(runs):
    root, _ = runs
    assert_same_content(root / "untied-two" / END, root / "untied-one" / END)
    groups = load(root / "untied-two" / END)["optimizer_states"][0]["param_groups"]
    names = [name for group in groups for name in group["param_names"]]
    assert sorted(names) == sorted(load(root / "untied-two" / END)["state_dict"])


@pytest.mark.behaviour(36)
def test_user_hook_runs_on_all_ranks_and_writes_on_rank_0(runs):
    root, results = runs
    first, other = results["write"]
    keys = len(load(root / "two" / AFTER_EPOCH)["state_dict"])
    assert set(first) == {keys}
    assert other == [0] * len(first)
    assert load(root / "two" / WITHIN_EPOCH)["the user's own"] == {"steps": 4}


@pytest.mark.behaviour(33)
def test_saved_without_the_optimizer_and_by_a_thread(runs):
    root, _ = runs
    for name in ("weights.ckpt", "later.ckpt"):
        assert_same_content(root / "variants-two" / name, root / "variants-one" / name)
    assert "optimizer_states" not in load(root / "variants-two" / "weights.ckpt")


# ---- going on ------------------------------------------------------------------------------------------------------


@pytest.mark.behaviour(29)
@pytest.mark.parametrize("name", ["one-to-two", "two-to-1", "two-to-3", "two-to-4"])
def test_resume_with_another_number_of_stages_equals_an_uninterrupted_run(runs, name):
    root, _ = runs
    assert_same_content(root / name / END, root / "whole" / END)


@pytest.mark.behaviour(30)
@pytest.mark.parametrize("name", ["one-to-two-within", "two-to-1-within", "two-to-3-within", "two-to-4-within"])
def test_resume_within_an_epoch_equals_an_uninterrupted_run(runs, name):
    root, _ = runs
    assert_same_content(root / name / END, root / "whole" / END)


@pytest.mark.behaviour(30)
def test_resume_from_last_takes_one_file_on_all_ranks(runs):
    root, results = runs
    assert results["last"] == [str(root / "two" / "last.ckpt")] * 2
    assert_same_content(root / "two" / END, root / "whole" / END)


@pytest.mark.behaviour(31)
def test_weights_only_is_honoured(runs):
    _, results = runs
    for refused, steps in (*results["trust"], *results["one trust"]):
        assert "UnpicklingError" in refused
        assert "fractions.Fraction" in refused
        assert steps == 3


@pytest.mark.behaviour(32)
def test_strict_loading_lists_all_keys_on_all_ranks(runs):
    _, results = runs
    for first, later in (*results["misfit"], *results["one misfit"]):
        for text in (first, later):
            assert "RuntimeError" in text
            assert all(key in text for key in (FIRST_KEY, LAST_KEY, "model.surplus"))


@pytest.mark.behaviour(32)
def test_lenient_loading_takes_what_fits(runs):
    root, _ = runs
    assert_same_content(root / "misfit-two" / END, root / "misfit-one" / END)


@pytest.mark.behaviour(35)
def test_fit_then_test_the_best_then_fit_on(runs):
    root, results = runs
    ((expected, best),) = results["one again"]
    for tested, path in results["again"]:
        assert path == best.replace("again-one", "again-two")
        torch.testing.assert_close(tested, expected, rtol=0, atol=1e-6)
    assert best.endswith("epoch=0.ckpt")
    # The best score is a float32 on one device: transformers rounds the loss of a double-precision model.
    assert_same_content(root / "again-two" / END, root / "again-one" / END, without=["callbacks"])

"""The strategy's name works once the package is imported, in any order, and importing it is cheap."""

import subprocess
import sys

import lightning as L
import pytest
from lightning.pytorch.strategies import StrategyRegistry

from lightning_seq1f1b import Seq1F1BStrategy
from lightning_seq1f1b.registration import NAMES, REFUSED, register_when_lightning_loads

MAKE_TRAINER = """
import sys
trainer = L.Trainer(strategy="SEQ1F1B", accelerator="cpu", devices=2, logger=False)
print(type(trainer.strategy).__module__, type(trainer.strategy).__name__)
print([finder for finder in sys.meta_path if type(finder).__module__.startswith("lightning_seq1f1b")])
"""


def python(program, *options):
    """Run a program in a fresh interpreter."""
    return subprocess.run([sys.executable, *options, "-c", program], capture_output=True, text=True, timeout=120)


@pytest.mark.behaviour(40)
def test_importing_the_package_imports_neither_torch_nor_lightning():
    program = """
import importlib, sys
import lightning_seq1f1b
assert "Seq1F1BStrategy" in dir(lightning_seq1f1b) and lightning_seq1f1b.__version__
before = list(sys.meta_path)
importlib.reload(lightning_seq1f1b)
assert sys.meta_path == before, "one hook serves all imports"
print(sorted(name for name in ("torch", "lightning", "transformers", "numpy") if name in sys.modules))
"""
    finished = python(program)
    assert finished.stdout.strip() == "[]", finished.stderr


@pytest.mark.behaviour(40)
@pytest.mark.parametrize("first", ["lightning_seq1f1b, lightning as L", "lightning as L, lightning_seq1f1b"])
def test_name_works_in_both_orders_of_import(first):
    finished = python(f"import {first}{MAKE_TRAINER}")
    assert finished.stdout.splitlines() == ["lightning_seq1f1b.strategy.seq1f1b Seq1F1BStrategy", "[]"], finished.stderr


@pytest.mark.behaviour(40)
def test_without_the_import_the_error_is_lightnings_own():
    finished = python(f"import lightning as L{MAKE_TRAINER}")
    assert finished.returncode == 1
    assert "You selected an invalid strategy name: `strategy='seq1f1b'`" in finished.stderr.splitlines()[-1]
    assert "lightning_seq1f1b" not in finished.stderr


@pytest.mark.parametrize("name", NAMES)
def test_registered_names_make_the_strategy_with_its_defaults(name):
    strategy = StrategyRegistry.get(name)
    assert isinstance(strategy, Seq1F1BStrategy)
    assert vars(strategy).keys() == vars(Seq1F1BStrategy()).keys()
    assert (strategy.num_chunks, strategy.schedule) == ("auto", "seq1f1b")


@pytest.mark.behaviour(45)
@pytest.mark.parametrize("name", REFUSED)
def test_spawn_fork_and_notebooks_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"there is no strategy '{name}'.*start that, by python or torchrun"):
        L.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False)


@pytest.mark.behaviour(40)
def test_the_trainer_of_the_other_namespace_names_the_right_one():
    program = """
import pytorch_lightning
from lightning_seq1f1b import Seq1F1BStrategy
pytorch_lightning.Trainer(strategy=Seq1F1BStrategy(), accelerator="cpu", devices=2, logger=False)
"""
    finished = python(program)
    assert finished.returncode == 1
    assert "strategy=<Seq1F1BStrategy for lightning.pytorch.Trainer (import lightning as L)>" in finished.stderr


def test_registering_again_changes_nothing():
    before = dict(StrategyRegistry)
    register_when_lightning_loads()
    assert dict(StrategyRegistry).keys() == before.keys()
    trainer = L.Trainer(strategy="seq1f1b", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert isinstance(trainer.strategy, Seq1F1BStrategy)


def test_unknown_attribute_of_the_package_is_an_attribute_error():
    import lightning_seq1f1b

    with pytest.raises(AttributeError, match="module 'lightning_seq1f1b' has no attribute 'Seq1F1B'"):
        _ = lightning_seq1f1b.Seq1F1B

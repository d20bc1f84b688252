"""The schedule package stands on the standard library alone."""

import subprocess
import sys

from lightning_seq1f1b import schedule

IMPORT_ALL_BUT_THE_REST_OF_THE_WORLD = """
import importlib, pkgutil, sys

class OnlyStandardLibrary:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top != "lightning_seq1f1b":
            raise ImportError(f"{name} is neither ours nor of the standard library")

sys.meta_path.insert(0, OnlyStandardLibrary())
import lightning_seq1f1b.schedule as package
names = [module.name for module in pkgutil.iter_modules(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
from lightning_seq1f1b.schedule.plan import make_plan
make_plan("seq1f1b", 4, 4, 4)
others = [name for name in sys.modules if name.startswith("lightning_seq1f1b.") and ".schedule" not in name]
print(*sorted(names), "|", *sorted(others))
"""


def test_every_module_imports_without_torch_lightning_and_numpy() -> None:
    # -S leaves out site-packages and what its .pth files import before the blocker stands.
    run = subprocess.run(
        [sys.executable, "-S", "-c", IMPORT_ALL_BUT_THE_REST_OF_THE_WORLD],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(next(iter(schedule.__path__)).rsplit("/", 2)[0])},
    )
    assert run.returncode == 0, run.stderr
    modules, _, others = run.stdout.partition("|")
    assert {"lightning_seq1f1b.schedule.plan", "lightning_seq1f1b.schedule.simulate"} <= set(modules.split())
    assert others.split() == ["lightning_seq1f1b.registration"]

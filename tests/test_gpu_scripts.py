"""The script that checks training on a GPU runs, as far as it can without one."""

import json
import sys

from support.commands import ROOT, run_command


def test_training_check_runs_on_a_cpu(tmp_path):
    script, found = ROOT / "tests" / "gpu" / "check_training.py", tmp_path / "training.json"
    options = ("--device", "cpu", "--seq-len", "64", "--precisions", "32-true", "--json", found)
    finished = run_command([sys.executable, script, *options], tmp_path, PYTHONPATH=str(ROOT))
    assert finished.status == 0, finished.output
    (result,) = json.loads(found.read_text())
    assert result["right"]
    assert 0 <= result["loss"] < 1e-5
    assert result["weights"] < 1e-5

"""`lightning-seq1f1b schedule`: what it prints, what it refuses, and that it starts without torch."""

import json
import subprocess
import sys

import pytest

from lightning_seq1f1b.cli.schedule import main


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_simulate_gives_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--schedule seq1f1b --stages 3 --microbatches 2 --chunks 4 --forward 1 --input-grad 1.5 --weight-grad 0.5"
    assert json.loads(output(capsys, "simulate", *options.split(), "--json")) == {
        "schedule": "seq1f1b",
        "stages": 3,
        "microbatches": 2,
        "chunks": 4,
        "virtual_stages": 1,
        "forward": 1.0,
        "input_grad": 1.5,
        "weight_grad": 0.5,
        "valid": True,
        "makespan": 7.5,
        "bubble": 1.5,
        "work": [6.0, 6.0, 6.0],
        "peak_units": [6, 5, 4],
    }


def test_times_are_taken_as_typed(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--stages 2 --microbatches 2 --chunks 1 --forward 0.1 --input-grad 0.1 --weight-grad 0.1 --json"
    assert json.loads(output(capsys, "simulate", *options.split()))["bubble"] == 0.3


def test_every_number_has_a_default(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = json.loads(output(capsys, "simulate", "--json"))
    assert (numbers["schedule"], numbers["stages"], numbers["microbatches"], numbers["chunks"]) == ("seq1f1b", 4, 4, 4)
    assert (numbers["makespan"], numbers["bubble"], numbers["peak_units"]) == (14.25, 2.25, [7, 6, 5, 4])


def test_simulate_gives_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "simulate", "--schedule=1f1b", "--chunks=1").splitlines() == [
        "1f1b: 4 stages, 4 microbatches, 1 chunk",
        "makespan    21",
        "bubble      9 (42.9% of the makespan)",
        "peak units  4 3 2 1 (rank 0 first)",
        "work        12 12 12 12",
    ]


def test_draw_shows_the_plan_over_time(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "draw", "--stages", "2", "--microbatches", "2", "--chunks", "2")
    assert "rank 0  a0a1b0....A1==b1A0==..B1==B0==\nrank 1  ..a0a1A1==b0A0==b1B1==B0==....\n" in text
    assert "a0 forward" in text
    assert "bubble      1.5 (20.0% of the makespan)" in text
    assert "peak units  3 2 (rank 0 first)" in text


def test_draw_fits_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    drawn = [line for line in output(capsys, "draw").splitlines() if line.startswith("rank")]
    assert len(drawn) == 8
    assert max(map(len, drawn)) <= 70


def test_draw_gives_the_timeline_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = json.loads(output(capsys, "draw", "--stages=1", "--microbatches=1", "--chunks=1", "--json"))
    assert numbers["timeline"] == [
        {"rank": 0, "action": "0F0.0", "start": 0.0, "end": 1.0},
        {"rank": 0, "action": "0B0.0", "start": 1.0, "end": 3.0},
    ]
    assert numbers["peak_units"] == [1]


@pytest.mark.parametrize(("schedule", "actions"), [("seq1f1b", 320), ("gpipe", 320), ("forward", 160)])
def test_verify_counts_what_it_checked(schedule: str, actions: int, capsys: pytest.CaptureFixture[str]) -> None:
    """16 units: a compute action on each of 4 stages, a send and a receive at each of 3 borders; twice if it trains."""
    numbers = json.loads(output(capsys, "verify", "--schedule", schedule, "--json"))
    assert numbers["valid"] is True
    assert sum(numbers["actions"]) == actions
    assert f"valid, {actions} actions on 4 ranks" in output(capsys, "verify", "--schedule", schedule)


def test_times_of_zero_are_a_bubble_of_zero(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "simulate", "--forward=0", "--input-grad=0", "--weight-grad=0")
    assert "bubble      0 (0.0% of the makespan)" in text


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("simulate --schedule seq1f", "unknown schedule 'seq1f', .* did you mean 'seq1f1b'?"),
        ("simulate --stages 0", "--stages must be at least 1, not 0"),
        ("verify --microbatches -1", "--microbatches must be at least 1, not -1"),
        ("draw --chunks 0", "--chunks must be at least 1, not 0"),
        ("draw --schedule 1f1b", "--chunks is 4; set --chunks=1, or use --schedule='seq1f1b'"),
        ("simulate --virtual-stages 2", "--virtual-stages must be 1, not 2: seq1f1b, .* place one stage on a rank"),
        ("simulate --forward -1", "forward is a time and must be finite and not negative; it is -1"),
        ("simulate --stages two", '"stages".*Got value: two'),
        ("simulate --forward soon", '"forward".*Got value: soon'),
        ("simulate --forward nan", '"forward".*Got value: nan'),
        ("simulate --depth 3", "unrecognized arguments: --depth 3"),
        ("draw --forward 0 --input-grad 0 --weight-grad 0", "nothing to draw"),
        ("paint", "invalid choice: 'paint' (choose from 'draw', 'simulate', 'verify')"),
        ("", "{draw,simulate,verify}"),
    ],
)
def test_bad_input_ends_with_one_sentence(argv: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert all(part in captured.err for part in sentence.split(".*"))


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["draw", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "--schedule NAME the order of the work: seq1f1b, 1f1b, gpipe, forward",
        "--stages P stages the model is cut into",
        "--microbatches M microbatches of a step",
        "--chunks K chunks that each microbatch is cut into",
        "--virtual-stages V stages on each rank",
        "--forward F time of the forward of one whole microbatch on one rank's layers",
        "--input-grad B time of the part of the backward",
        "--weight-grad W time of the part of the backward",
        "--json print one JSON object",
    ):
        assert words in text


def test_command_starts_without_torch_and_lightning() -> None:
    program = """
import sys
for name in ("torch", "lightning", "numpy", "transformers"):
    sys.modules[name] = None
from lightning_seq1f1b.cli.main import main
sys.exit(main(["schedule", "simulate", "--json"]))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["valid"] is True

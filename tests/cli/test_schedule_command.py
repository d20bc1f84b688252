"""`lightning-seq1f1b schedule`: what it prints, what it refuses, and that it starts without torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_seq1f1b.cli.schedule import main
from lightning_seq1f1b.schedule.actions import Action, Kind
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.policies import POLICIES
from lightning_seq1f1b.schedule.simulate import Costs, simulate
from lightning_seq1f1b.schedule.timeline import Event
from lightning_seq1f1b.schedule.timeline_file import load, save


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
        "memory_knob": 1,
        "activation_cap": None,
        "splits_backward": False,
        "forward": 1.0,
        "input_grad": 1.5,
        "weight_grad": 0.5,
        "links": 0.0,
        "valid": True,
        "makespan": 7.5,
        "bubble": 1.5,
        "work": [6.0, 6.0, 6.0],
        "peak_units": [6, 5, 4],
    }


def test_the_flagship_gives_json(capsys: pytest.CaptureFixture[str]) -> None:
    """At (p, m, k) = (2, 2, 4), in half-units: memory for one half-chunk more than the floor of 8, a bubble of 1."""
    options = "--schedule interleaved_seq1f1b_zb --stages 2 --microbatches 2 --chunks 4 --virtual-stages 2"
    times = "--forward 8 --input-grad 8 --weight-grad 8"
    numbers = json.loads(output(capsys, "simulate", *options.split(), *times.split(), "--json"))
    assert (numbers["bubble"], numbers["activation_cap"], max(numbers["peak_units"])) == (1.0, 9, 9)
    assert (numbers["virtual_stages"], numbers["memory_knob"], numbers["splits_backward"]) == (2, 1, True)


def test_a_larger_memory_knob_takes_memory_and_time_off(capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--schedule interleaved_seq1f1b_zb --stages 4 --microbatches 3 --virtual-stages 2 --weight-grad 0.5 --json"
    )
    one, two = (json.loads(output(capsys, "simulate", *options.split(), "--memory-knob", knob)) for knob in ("1", "2"))
    assert two["memory_knob"] == 2
    assert two["activation_cap"] == max(two["peak_units"]) > max(one["peak_units"])
    assert two["bubble"] < one["bubble"]


def test_a_cap_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--schedule seq1f1b_zb --stages 4 --microbatches 3 --chunks 4 --activation-cap 6 --json"
    numbers = json.loads(output(capsys, "simulate", *options.split()))
    assert numbers["activation_cap"] == 6
    assert max(numbers["peak_units"]) <= 6


def test_links_take_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    """One microbatch passes two borders there and two back."""
    options = "simulate --stages 3 --microbatches 1 --chunks 1 --json --links"
    near, far = (json.loads(output(capsys, *options.split(), latency)) for latency in ("0", "0.25"))
    assert (near["links"], far["links"]) == (0.0, 0.25)
    assert far["makespan"] == near["makespan"] + 4 * 0.25


def test_chunk_weights_share_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    options = "draw --stages 1 --microbatches 1 --chunks 2 --chunk-weights 3,1 --json"
    timeline = json.loads(output(capsys, *options.split()))["timeline"]
    assert [event["end"] for event in timeline] == [0.75, 1.0, 1.5, 3.0]


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
        "work        12 on each rank",
    ]


def test_numbers_of_many_ranks_are_summarised_in_text_only(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("simulate", "--stages=64", "--chunks=8")
    assert "peak units  32 32 32 32 ... 11 10 9 8 (rank 0 first, at most 32)\n" in output(capsys, *options)
    assert json.loads(output(capsys, *options, "--json"))["peak_units"] == [32] * 40 + list(range(31, 7, -1))


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
        ("draw --chunks 2,0", "--chunks must be at least 1, not 0"),
        ("draw --chunks 2,x", "--chunks is a whole number, or with commas one for each microbatch, .*not '2,x'"),
        ("draw --chunks 2,1 --microbatches 3", "--chunks=[2, 1] is of 2 microbatches, but --microbatches is 3"),
        ("draw --schedule 1f1b", "--chunks is 4; set --chunks=1, or use --schedule='seq1f1b'"),
        ("simulate --virtual-stages 2", "but --virtual-stages is 2; set --virtual-stages=1, .*interleaved_seq1f1b"),
        ("simulate --virtual-stages 0", "--virtual-stages must be at least 1, not 0"),
        ("simulate --memory-knob 0", "--memory-knob must be at least 1, not 0"),
        ("simulate --schedule seq1f1b_zb --activation-cap 3", "--activation-cap=3 is below 4.*--activation-cap=4"),
        ("simulate --links -1", "--links is a time and must be finite and not negative; it is -1"),
        ("simulate --links inf", "--links must be a finite number, not inf"),
        ("simulate --chunk-weights 1,2", "--chunk-weights must be 4 positive numbers, not 1,2"),
        ("simulate --chunk-weights 1,2,3,-4", "--chunk-weights must be 4 positive numbers, not 1,2,3,-4"),
        ("simulate --chunk-weights 1,b", "--chunk-weights is numbers with commas between them.*'1,b'"),
        ("verify --stages 64 --microbatches 256 --chunks 64", "is 1048576; at most 1000000"),
        ("draw --measured /absent.json", "the timeline '/absent.json' cannot be read"),
        ("draw --csv /absent/plan.csv --chunks 1", "'/absent/plan.csv' cannot be written: No such file"),
        ("draw --csv plan.csv", "it has no place for a chunk.*set --chunks=1"),
        ("draw --svg picture.png", "--svg writes a file that ends with .svg, not 'picture.png'"),
        ("simulate --svg picture.svg", "unrecognized arguments: --svg"),
        ("simulate --forward -1", "error: --forward is a time and must be finite and not negative; it is -1"),
        ("simulate --forward 1e308", "the times are too large to add up"),
        ("simulate --stages two", "--stages must be a whole number, not two"),
        ("simulate --stages 2.5", "--stages must be a whole number, not 2.5"),
        ("simulate --stages nan", "--stages must be a whole number, not nan"),
        ("simulate --forward soon", "--forward must be a finite number, not soon"),
        ("simulate --forward nan", "--forward must be a finite number, not nan"),
        ("simulate --memory_knob 2", "unrecognized arguments: --memory_knob 2"),
        ("simulate --schedule=", "unknown schedule ''"),
        ("simulate --schedule Seq1F1B", "unknown schedule 'Seq1F1B', .* did you mean 'seq1f1b'?"),
        ("simulate --schedule forward --activation-cap 4", "--activation-cap has no effect on schedule 'forward'"),
        ("draw --trace -", "--trace takes the name of a file, not '-'"),
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
    assert not Path("-").exists()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert all(part in captured.err for part in sentence.split(".*"))


def test_microbatches_may_have_different_chunks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    step = tmp_path / "step.json"
    numbers = json.loads(output(capsys, "draw", "--stages=3", "--chunks=4,2,1", "--json"))
    assert (numbers["microbatches"], numbers["chunks"], numbers["peak_units"]) == (3, [4, 2, 1], [6, 5, 4])
    assert numbers["bubble"] == 2 * 3 / 4
    output(capsys, "draw", "--stages=3", "--chunks=4,2,1", "--timeline", str(step))
    again = json.loads(output(capsys, "draw", "--measured", str(step), "--json"))
    assert again["chunks"] == [4, 2, 1]
    assert (again["makespan"], again["measured"]["warnings"]) == (numbers["makespan"], [])


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["draw", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "usage: lightning-seq1f1b schedule draw [-h] [--schedule NAME]",
        "--schedule NAME the order of the work, one of those below (default: seq1f1b)",
        *(f"{name} {policy.summary}" for name, policy in POLICIES.items()),
        "--stages P stages the model is cut into",
        "--microbatches M microbatches of a step",
        "--chunks K chunks that each microbatch is cut into",
        "--virtual-stages V stages on each rank",
        "--memory-knob J extra warm-up forwards",
        "--activation-cap N most units",
        "--links LATENCY time of a transfer between ranks",
        "--chunk-weights A,B,... how the chunks share those times",
        "--measured FILE draw the measured timeline",
        *(f"--{name} FILE" for name in ("svg", "png", "trace", "csv", "csv-comms", "timeline")),
        "--forward F time of the forward of one whole microbatch on one rank's layers",
        "--input-grad B time of the part of the backward",
        "--weight-grad W time of the part of the backward",
        "--json print one JSON object",
    ):
        assert words in text


def test_draw_writes_the_files_it_is_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = "draw --schedule interleaved_1f1b --stages 2 --microbatches 2 --chunks 1 --virtual-stages 2"
    files = {
        option: tmp_path / f"step.{suffix}"
        for option, suffix in (
            ("svg", "svg"),
            ("png", "png"),
            ("trace", "trace.json"),
            ("csv", "csv"),
            ("csv-comms", "comms.csv"),
            ("timeline", "json"),
        )
    }
    text = output(capsys, *plan.split(), *(f"--{option}={path}" for option, path in files.items()))
    assert "interleaved_1f1b: 2 ranks of 2 stages, 2 microbatches, 1 chunk" in text
    assert text.splitlines()[-1] == f"written     {', '.join(map(str, files.values()))}"
    assert b"<svg" in files["svg"].read_bytes()
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert sum(event["ph"] == "X" for event in json.loads(files["trace"].read_text())["traceEvents"]) == 2 * 4 * 2
    assert [line.count(",") for line in files["csv"].read_text().splitlines()] == [7, 7]
    assert "SEND_F" in files["csv-comms"].read_text()
    assert len(load(files["timeline"]).events) == 16


def slower(events: tuple[Event, ...], by: float) -> list[Event]:
    """The same timeline on another clock, at another speed."""
    return [Event(event.rank, event.action, 50 + by * event.start, 50 + by * event.end) for event in events]


def saved_step(path: Path, schedule: str = "seq1f1b_zb") -> Path:
    plan = make_plan(schedule, 2, 2, 3)
    save(path, slower(simulate(plan, Costs(3.0, 4.0, 2.0, 3)).timeline, 0.5), schedule=schedule)
    return path


def test_a_measured_step_stands_above_the_simulated_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its times are taken for the simulation, so here the two agree."""
    measured = str(saved_step(tmp_path / "step.json"))
    numbers = json.loads(output(capsys, "draw", "--measured", measured, "--json"))
    assert (numbers["schedule"], numbers["stages"], numbers["microbatches"], numbers["chunks"]) == (
        "seq1f1b_zb",
        2,
        2,
        3,
    )
    assert numbers["time_unit"] == "s"
    assert numbers["makespan"] == pytest.approx(numbers["measured"]["makespan"])
    assert numbers["bubble"] == pytest.approx(numbers["measured"]["bubble"])

    text = output(capsys, "draw", "--measured", measured)
    # A step that took very different times is drawn in parts, each below a line that says where it begins.
    blocks = re.sub(r"from time \S+\n", "", text).split("\n\n")
    assert [block.split("\n")[0] for block in blocks[1:3]] == ["measured", "simulated"]
    assert blocks[1].split("\n")[1:] == blocks[2].split("\n")[1:]
    assert "s measured, " in text


def test_a_measured_step_may_stand_above_another_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    measured = saved_step(tmp_path / "step.json", "seq1f1b")
    times = "--forward 1.5 --input-grad 2 --weight-grad 1"
    options = f"--schedule interleaved_seq1f1b_zb --virtual-stages 2 {times}".split()
    numbers = json.loads(output(capsys, "draw", "--measured", str(measured), *options, "--json"))
    assert (numbers["schedule"], numbers["measured"]["schedule"]) == ("interleaved_seq1f1b_zb", "seq1f1b")
    assert numbers["work"] == [9.0, 9.0]

    picture = tmp_path / "both.svg"
    output(capsys, "draw", "--measured", str(measured), *options, f"--svg={picture}")
    assert "measured: seq1f1b, p = 2, v = 1" in picture.read_text()
    assert "simulated: interleaved_seq1f1b_zb, p = 2, v = 2" in picture.read_text()


def test_what_draw_prints_as_json_is_a_timeline_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "step.json").write_text(output(capsys, "draw", "--stages", "2", "--json"))
    assert "measured" in output(capsys, "draw", "--measured", str(tmp_path / "step.json"))


def saved_with_knob(path: Path, **settings: int) -> list[str]:
    """A step with a memory knob of 2 and a cap of 8 units, which 1 would not take, and the options that draw it."""
    plan = make_plan("seq1f1b", 3, 3, 4, memory_knob=2)
    save(path, simulate(plan, Costs(1.0, 1.0, 1.0, 4)).timeline, schedule="seq1f1b", **settings)
    return ["draw", "--measured", str(path)]


def test_the_settings_of_a_measured_step_are_taken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    draw = saved_with_knob(tmp_path / "step.json", memory_knob=2, activation_cap=8)
    numbers = json.loads(output(capsys, *draw, "--json"))
    assert (numbers["memory_knob"], numbers["activation_cap"], numbers["peak_units"]) == (2, 8, [8, 6, 4])
    assert numbers["measured"]["peak_units"] == [8, 6, 4]
    assert numbers["measured"]["warnings"] == []
    text = output(capsys, *draw)
    assert "peak units  8 6 4 (rank 0 first) measured,\n            8 6 4 (rank 0 first) simulated\n" in text
    assert "warning" not in text


@pytest.mark.parametrize(("num_chunks", "knob", "unevenness"), [(4, 1, 0), (3, 2, 1)])
def test_a_measured_step_is_simulated_as_it_is_run(
    num_chunks: int, knob: int, unevenness: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With a plan that knows nothing of its times, and weight gradients as soon as a rank would wait."""

    def costs(action: Action) -> float:
        whole = {Kind.F: 3.0, Kind.I: 5.0, Kind.W: 2.0}[action.kind]
        return whole * (1 + unevenness * ((2 * action.stage + action.unit.chunk) % 3))

    plan = make_plan("seq1f1b_zb", 3, 3, num_chunks, memory_knob=knob)
    run = simulate(plan, costs, early_weight_grads=True)
    settings = {"memory_knob": knob, "activation_cap": plan.activation_cap}
    save(tmp_path / "step.json", run.timeline, schedule="seq1f1b_zb", **settings)
    numbers = json.loads(output(capsys, "draw", "--measured", str(tmp_path / "step.json"), "--json"))
    assert numbers["makespan"] == pytest.approx(float(run.makespan))
    assert numbers["measured"]["warnings"] == []


def test_an_evaluation_has_no_memory_knob(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = simulate(make_plan("forward", 2, 2, 2), Costs(1.0, 1.0, 1.0, 2))
    save(tmp_path / "step.json", run.timeline, schedule="forward", memory_knob=2)
    numbers = json.loads(output(capsys, "draw", "--measured", str(tmp_path / "step.json"), "--json"))
    assert (numbers["schedule"], numbers["memory_knob"], numbers["measured"]["peak_units"]) == ("forward", None, [1, 1])


def test_settings_that_are_given_come_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    draw = saved_with_knob(tmp_path / "step.json", memory_knob=2, activation_cap=8)
    numbers = json.loads(output(capsys, *draw, "--memory-knob=1", "--json"))
    assert (numbers["memory_knob"], numbers["activation_cap"], numbers["peak_units"]) == (1, None, [6, 5, 4])


def test_a_step_of_other_settings_is_not_shown_silently(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = output(capsys, *saved_with_knob(tmp_path / "step.json"))
    assert (
        "warning     the measured step ran in another order than the simulated one; its plan had another --memory-knob"
        in text
    )


def test_a_measured_peak_above_the_cap_is_not_shown_silently(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = output(capsys, *saved_with_knob(tmp_path / "step.json", memory_knob=2, activation_cap=7))
    assert "warning     a rank of the measured step held 8 units; the cap of its plan is 7" in text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--schedule seq1f1b_zb", "were not split.*set --forward, --input-grad, --weight-grad in s"),
        ("--chunks 4", "those of 2 stages and 3 chunks, not of 2 and 4; set --forward"),
        ("--forward 2", "set --input-grad, --weight-grad too, or none of the times"),
        ("--stages 3", "--stages must be 2, as in .*step.json', not 3"),
    ],
)
def test_measured_times_that_do_not_fit_are_refused(
    options: str, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    measured = saved_step(tmp_path / "step.json", "seq1f1b")
    assert main(["draw", "--measured", str(measured), *options.split()]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in sentence.split(".*"))


def test_a_file_that_names_no_schedule_needs_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    save(path, load(saved_step(path)).events)
    assert main(["draw", "--measured", str(path)]) == 2
    assert "does not name its schedule; set --schedule" in capsys.readouterr().err


def test_a_figure_without_matplotlib_says_what_to_install(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "lightning_seq1f1b.cli.timeline_figure", raising=False)
    assert main(["draw", f"--svg={tmp_path / 'step.svg'}"]) == 2
    assert "pip install 'lightning-seq1f1b[pictures]'" in capsys.readouterr().err


def test_command_starts_without_torch_and_lightning() -> None:
    program = """
import sys
for name in ("torch", "lightning", "numpy", "transformers", "matplotlib"):
    sys.modules[name] = None
from lightning_seq1f1b.cli.main import main
sys.exit(main(["schedule", "simulate", "--json"]))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["valid"] is True

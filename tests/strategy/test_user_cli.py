"""The strategy in a user's own LightningCLI program: by class path, by name, overridden, printed, misspelt."""

import inspect

import pytest
import yaml
from support.fitting import difference
from support.processes import run_processes
from support.user_cli import all_fitted, fitted, program

from lightning_seq1f1b import Seq1F1BStrategy

FULL_PATH, SHORT_PATH = "lightning_seq1f1b.Seq1F1BStrategy", "Seq1F1BStrategy"


def config(path, class_path=FULL_PATH, **init_args):
    """A YAML file that names the strategy's class."""
    strategy = {"class_path": class_path, "init_args": init_args}
    path.write_text(yaml.safe_dump({"trainer": {"devices": 2, "strategy": strategy}}))
    return str(path)


def made(*arguments):
    """The strategy of the Trainer that the program makes."""
    return program(arguments, run=False).trainer.strategy


def printed(capsys, *arguments):
    """What the program prints before it ends by itself."""
    with pytest.raises(SystemExit) as ended:
        program(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


OPTIMIZER = ["--optimizer=AdamW", "--optimizer.lr=0.01", "--optimizer.eps=0.001", "--optimizer.weight_decay=0.3"]
SCHEDULER = ["--lr_scheduler=ExponentialLR", "--lr_scheduler.gamma=0.5"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of several runs; their weights on two stages and on one device, by the name of the run."""
    folder = tmp_path_factory.mktemp("cli")
    long, short = config(folder / "a.yaml", num_chunks=3), config(folder / "b.yaml", SHORT_PATH, partition="even")
    runs = {
        folder / "class path": ["--config", long],
        folder / "short class path": ["--config", short, "--trainer.strategy.num_chunks=2"],
        folder / "name": ["--trainer.strategy=seq1f1b"],
        folder / "optimizer": ["--config", long, *OPTIMIZER, *SCHEDULER],
    }
    first, _ = run_processes(all_fitted, 2, runs)
    own = fitted([*OPTIMIZER, *SCHEDULER], 1, folder / "own")
    of_module = fitted([], 1, folder / "of module")
    expected = {run.name: own if run.name == "optimizer" else of_module for run in runs}
    return folder, {run.name: weights for run, weights in first.items()}, expected


@pytest.mark.behaviour(41)
@pytest.mark.parametrize("way", ["class path", "short class path", "name"])
def test_every_way_to_name_the_strategy_trains_like_one_device(trained, way):
    _, got, expected = trained
    assert difference(got[way], expected[way]) < 5e-6


@pytest.mark.behaviour(41)
def test_optimizer_made_by_the_command_line_trains_like_one_device(trained):
    _, got, expected = trained
    assert difference(got["optimizer"], expected["optimizer"]) < 5e-6
    assert difference(expected["optimizer"], expected["name"]) > 1e-4  # it is another optimizer than the module's


@pytest.mark.behaviour(41)
def test_saved_config_is_complete_and_reads_again(trained, capsys):
    folder, _, _ = trained
    saved = yaml.safe_load((folder / "class path" / "config.yaml").read_text())
    assert saved["trainer"]["strategy"]["class_path"].endswith(".Seq1F1BStrategy")
    assert saved["trainer"]["strategy"]["init_args"]["num_chunks"] == 3
    assert saved["trainer"]["strategy"]["init_args"]["schedule"] == "seq1f1b"
    again = printed(capsys, "fit", "--config", str(folder / "class path" / "config.yaml"), "--print_config")
    assert yaml.safe_load(again)["trainer"] == saved["trainer"]


@pytest.mark.behaviour(41)
@pytest.mark.parametrize("class_path", [FULL_PATH, SHORT_PATH])
def test_command_line_overrides_the_file(tmp_path, class_path):
    path = config(tmp_path / "c.yaml", class_path, num_chunks=3, schedule="gpipe")
    strategy = made("--config", path, "--trainer.strategy.num_chunks=8")
    assert isinstance(strategy, Seq1F1BStrategy)
    assert (strategy.num_chunks, strategy.schedule) == (8, "gpipe")


@pytest.mark.behaviour(41)
@pytest.mark.parametrize("name", [FULL_PATH, SHORT_PATH, "SEQ1F1B", "seq1f1b"])
def test_command_line_alone_names_the_strategy(name):
    strategy = made(f"--trainer.strategy={name}", "--trainer.devices=2")
    assert isinstance(strategy, Seq1F1BStrategy)
    assert strategy.num_chunks == "auto"


@pytest.mark.behaviour(41)
def test_command_line_takes_every_argument():
    strategy = made(
        f"--trainer.strategy={SHORT_PATH}",
        "--trainer.strategy.num_stages=2",
        "--trainer.strategy.num_microbatches=4",
        "--trainer.strategy.partition=[5, 6]",
        "--trainer.strategy.broadcast_batch=true",
        "--trainer.strategy.timeout=0:01:00",
        "--trainer.devices=2",
    )
    assert (strategy.topology.num_stages, strategy.num_microbatches, strategy.partition) == (2, 4, [5, 6])
    assert strategy.broadcast_batch
    assert strategy._timeout.total_seconds() == 60


@pytest.mark.behaviour(41)
def test_command_line_takes_virtual_stages_and_their_schedule():
    strategy = made(
        f"--trainer.strategy={SHORT_PATH}",
        "--trainer.strategy.schedule=interleaved_seq1f1b_zb",
        "--trainer.strategy.virtual_stages=2",
        "--trainer.strategy.memory_knob=1",
        "--trainer.strategy.activation_cap=9",
        "--trainer.devices=2",
    )
    assert (strategy.schedule, strategy.virtual_stages) == ("interleaved_seq1f1b_zb", 2)
    assert (strategy.memory_knob, strategy.activation_cap) == (1, 9)


@pytest.mark.behaviour(41)
@pytest.mark.parametrize("given", [0.5, 1.0, "even", [5, 6]], ids=str)
def test_a_partition_is_a_name_a_number_or_lengths(tmp_path, given):
    by_argument = made(f"--trainer.strategy={SHORT_PATH}", f"--trainer.strategy.partition={given}")
    by_file = made("--config", config(tmp_path / "g.yaml", partition=given))
    assert by_argument.partition == by_file.partition == given
    assert type(by_argument.partition) is type(by_file.partition) is type(given)


@pytest.mark.behaviour(41)
def test_printed_config_shows_all_arguments_and_reads_again(tmp_path, capsys):
    path = config(tmp_path / "d.yaml", SHORT_PATH, num_chunks=3)
    first = printed(capsys, "fit", "--config", path, "--print_config")
    (tmp_path / "e.yaml").write_text(first)
    assert printed(capsys, "fit", "--config", str(tmp_path / "e.yaml"), "--print_config") == first
    assert yaml.safe_load(first)["trainer"]["strategy"]["init_args"] == {
        "num_stages": None,
        "num_microbatches": "auto",
        "num_chunks": 3,
        "schedule": "seq1f1b",
        "virtual_stages": "auto",
        "memory_knob": None,
        "activation_cap": None,
        "partition": "balanced",
        "layers": None,
        "profile": None,
        "broadcast_batch": False,
        "evaluation_logits": False,
        "state_dict_type": "full",
        "shard_optimizer": False,
        "trace": False,
        "check_finite": False,
        "process_group_backend": None,
        "timeout": "0:30:00",
    }


@pytest.mark.behaviour(41)
@pytest.mark.parametrize("name", [FULL_PATH, SHORT_PATH])
def test_help_explains_every_argument(capsys, name):
    text = " ".join(printed(capsys, "fit", f"--trainer.strategy.help={name}").split())
    for argument in inspect.signature(Seq1F1BStrategy).parameters:
        assert f"--trainer.strategy.{argument} " in text
    assert "pipeline ranks of one replica" in text
    assert "More chunks shrink the bubble" in text


@pytest.mark.behaviour(41)
def test_help_of_the_command_lists_the_class(capsys):
    text = "".join(printed(capsys, "fit", "--help").split())
    assert "lightning_seq1f1b.Seq1F1BStrategy" in text or "lightning_seq1f1b.strategy.seq1f1b.Seq1F1BStrategy" in text


@pytest.mark.behaviour(41)
@pytest.mark.parametrize(
    ("init_args", "text"),
    [
        ({"num_chunk": 3}, "num_chunk"),
        ({"num_chunks": "several"}, "num_chunks"),
        ({"timeout": "later"}, "timeout"),
    ],
)
def test_misspelt_arguments_are_named(tmp_path, capsys, init_args, text):
    with pytest.raises(SystemExit) as ended:
        made("--config", config(tmp_path / "f.yaml", **init_args))
    assert ended.value.code == 2
    assert text in capsys.readouterr().err

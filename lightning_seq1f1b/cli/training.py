"""The training commands: LightningCLI with this package's strategy, module and data module as defaults.

The Trainer's own defaults hold but for two: the strategy, which takes every device as a stage, and clipping of the
gradients to norm 1. `seed_everything` is 0. The whole configuration of a run is saved as `run.yaml` beside its logs.
"""

from __future__ import annotations

from typing import Any, NoReturn

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_seq1f1b.callbacks.pipeline_monitor import PipelineMonitor
from lightning_seq1f1b.callbacks.sample_text import SampleText

PROGRAM = "lightning-seq1f1b"
CALLBACKS = (PipelineMonitor, SampleText)
"""Those that a YAML file may name without the package's name, as Lightning's own: they are imported by then."""
TRAINER_DEFAULTS = {"strategy": {"class_path": "lightning_seq1f1b.Seq1F1BStrategy"}, "gradient_clip_val": 1.0}
CLASS_DEFAULTS = {
    "model": {"class_path": "lightning_seq1f1b.CausalLM"},
    "data": {"class_path": "lightning_seq1f1b.LongDocuments"},
}
ADVICE = {
    "option 'optimizer'": "The optimizer belongs to the module: set model.optimizer to a class path and its arguments.",
    "option 'lr_scheduler'": "The schedule belongs to the module: set model.warmup_steps and model.decay.",
    "import path string: seq1f1b": "The name 'seq1f1b' takes no arguments: with arguments, leave the name out or give "
    "class_path: lightning_seq1f1b.Seq1F1BStrategy.",
}


class CommandParser(LightningArgumentParser):
    """Adds advice to the errors that a reader of Lightning's documentation is likely to meet."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the message with what to do about it, and exit with status 2."""
        advice = [text for part, text in ADVICE.items() if part in message]
        super().error("\n".join([message, *advice]), ex)


class TrainingCLI(LightningCLI):
    """`fit`, `validate`, `test` and `predict`. Any module and data module can take the place of the ready ones."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Make the ready module and data module what a YAML file without `class_path` describes."""
        parser.set_defaults(CLASS_DEFAULTS)

    def instantiate_classes(self) -> None:
        """Make the objects; an argument that they refuse ends like one that the parser refuses, with status 2."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            self.parser.error(str(error), error)


def run(arguments: list[str] | None) -> None:
    """Parse a training command and run it. Bad arguments end the process here, before any other is started.

    Args:
        arguments: the command and its options; those of the process when None.

    Raises:
        SystemExit: with status 2, when the options or the YAML file are not understood.
    """
    usage = {
        command: {"usage": f"{PROGRAM} {command} [--config FILE] [--print_config] [--help] [--KEY.KEY VALUE ...]"}
        for command in LightningCLI.subcommands()
    }
    parser_kwargs: dict[str, Any] = {"prog": PROGRAM, **usage}
    TrainingCLI(
        # No class for the data: then it may be null, for a module with loaders of its own.
        model_class=L.LightningModule,
        subclass_mode_model=True,
        seed_everything_default=0,
        trainer_defaults=TRAINER_DEFAULTS,
        # Not "config.yaml", which a run without a logger would look for, and overwrite, in the working directory.
        save_config_kwargs={"config_filename": "run.yaml", "overwrite": True},
        parser_kwargs=parser_kwargs,
        parser_class=CommandParser,
        # An optimizer made here would hold every layer's parameters, before the model is cut into stages.
        auto_configure_optimizers=False,
        args=arguments,
    )

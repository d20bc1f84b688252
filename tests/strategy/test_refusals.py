"""What cannot work, or would be silently different, is refused by name, on all ranks, before any message moves."""

import functools
from dataclasses import dataclass
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import FSDPPrecision, MixedPrecision
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from support.fitting import everywhere, fit, rows, stages
from support.training import QUIET, FineTune
from transformers import BertConfig, BertForSequenceClassification, BertModel, T5Config, T5ForConditionalGeneration

from lightning_seq1f1b import Seq1F1BStrategy
from lightning_seq1f1b.strategy.supported import check_trainer

SMALL_BERT = BertConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, intermediate_size=8)


@dataclass(frozen=True)
class Refusal:
    """The error that a fit ended with, and how many activations and gradients had left this rank before."""

    kind: str
    text: str
    sent: int


class Holds(FineTune):
    """A module that makes another model than a causal language model."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def configure_model(self):
        self.model = self.make()


class WithoutLabels(FineTune):
    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch["input_ids"]).loss


class OwnRows(FineTune):
    """Every rank loads rows of its own."""

    def train_dataloader(self):
        return rows(seed=dist.get_rank())


class QuasiNewton(FineTune):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class ForeignParameter(FineTune):
    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), torch.nn.Parameter(torch.zeros(1))], lr=0.1)


class TwoModels(FineTune):
    def configure_model(self):
        super().configure_model()
        self.reference = self.model.__class__(self.model.config)


CASES = {}


def refuses(text, kind="ValueError", behaviour=None):
    """Add a case: a function of the options of a fit, and the error that they must give."""

    def add(options):
        marks = () if behaviour is None else (pytest.mark.behaviour(behaviour),)
        case = functools.partial(refused, options)
        CASES[options.__name__] = pytest.param(case, kind, text, id=options.__name__, marks=marks)
        return options

    return add


def refused(options, where):
    """Fit with a case's `module`, `strategy` arguments, `loader` and options of the Trainer."""
    options = dict(options())
    place = stages(where.devices, **options.pop("strategy", {}))
    module, loader = options.pop("module", FineTune()), options.pop("loader", rows())
    with (
        mock.patch.object(dist, "isend", wraps=dist.isend) as send,
        pytest.raises((ValueError, RuntimeError)) as caught,
    ):
        fit(place, module, loader, **options)
    return Refusal(caught.type.__name__, str(caught.value), send.call_count)


# ---- batches -------------------------------------------------------------------------------------------------------


@refuses("a batch without labels")
def no_labels():
    return {"module": WithoutLabels()}


@refuses("the pipeline ranks of one replica hold different batches: 'input_ids' is rank 0:", "BatchMismatchError")
def different_batches():
    return {"module": OwnRows(), "loader": None}


@refuses("[10, 10, 10] add up to 30 tokens, but the rows have 29; change the list, or use partition='balanced'")
def lengths_that_do_not_add_up():
    return {"strategy": {"partition": [10, 10, 10], "num_chunks": "auto"}}


# ---- models --------------------------------------------------------------------------------------------------------


@refuses("set num_stages between 1 and 1", behaviour=39)
def more_stages_than_layers():
    return {"module": FineTune(num_hidden_layers=1)}


@refuses("4 layers cannot fill 6 stages (2 ranks x 3) with at least one layer each; set virtual_stages between 1 and 2")
def more_virtual_stages_than_fit():
    return {"strategy": {"schedule": "interleaved_seq1f1b", "virtual_stages": 3}}


@refuses("activation_cap=2 is below 3, the units that a rank must hold before the first backward")
def cap_below_the_floor():
    return {"strategy": {"activation_cap": 2}}


@refuses("BertForSequenceClassification has no output embeddings, so it is no causal language model")
def classifier():
    return {"module": Holds(functools.partial(BertForSequenceClassification, SMALL_BERT))}


@refuses("BertModel has no output embeddings")
def headless_model():
    return {"module": Holds(functools.partial(BertModel, SMALL_BERT))}


@refuses("T5ForConditionalGeneration is an encoder-decoder model")
def encoder_decoder():
    config = T5Config(num_layers=2, d_model=8, d_kv=4, d_ff=8, num_heads=2)
    return {"module": Holds(functools.partial(T5ForConditionalGeneration, config))}


@refuses("no Hugging Face causal language model found in Holds")
def plain_module():
    return {"module": Holds(functools.partial(torch.nn.Linear, 2, 2))}


@refuses("TwoModels holds 2 models of transformers: model (LlamaForCausalLM), reference (LlamaForCausalLM)")
def two_models():
    return {"module": TwoModels()}


# ---- features ------------------------------------------------------------------------------------------------------


@refuses("does not support the callback StochasticWeightAveraging", behaviour=45)
def stochastic_weight_averaging():
    return {"callbacks": [StochasticWeightAveraging(swa_lrs=1e-2)]}


@refuses("does not support the callback EMAWeightAveraging", behaviour=45)
def exponential_moving_average():
    return {"callbacks": [EMAWeightAveraging()]}


@refuses("does not support the callback WeightAveraging", behaviour=45)
def weight_averaging():
    return {"callbacks": [WeightAveraging()]}


@refuses("does not support sync_batchnorm=True", behaviour=45)
def batch_norm_over_ranks():
    return {"sync_batchnorm": True}


@refuses("does not support LBFGS", behaviour=45)
def quasi_newton():
    return {"module": QuasiNewton()}


class Eighth(MixedPrecision):
    def __init__(self):
        super().__init__("bf16-mixed", "cpu")
        self.precision = "8-mixed"


@refuses("does not support precision='8-mixed'; choose one of 32-true", behaviour=45)
def unknown_precision():
    return {"plugins": [Eighth()]}


@refuses("does not support the precision plugin FSDPPrecision; choose one of 32-true", behaviour=45)
def anothers_precision():
    return {"plugins": [FSDPPrecision("32-true")]}


@refuses("Using a compiled model is incompatible with the current strategy: `Seq1F1BStrategy`", "RuntimeError", 45)
def compiled_module():
    return {"module": torch.compile(FineTune())}


@refuses("SGD holds a parameter that is not the module's: make optimizers in configure_optimizers")
def parameter_of_nobody():
    return {"module": ForeignParameter()}


@pytest.mark.parametrize(("case", "kind", "text"), list(CASES.values()))
def test_refused_on_all_ranks_before_any_message(case, kind, text):
    every = tuple(case.values[0] for case in CASES.values())
    first, *others = everywhere(every, stages(2))[case]
    assert text in first.text
    assert first.kind == kind
    for refusal in (first, *others):
        assert (refusal.kind, refusal.text, refusal.sent) == (kind, first.text, 0)


@pytest.mark.behaviour(45)
def test_processes_started_by_spawn_or_fork_are_refused():
    strategy = Seq1F1BStrategy()
    trainer = L.Trainer(**QUIET, devices=1, strategy=strategy)
    strategy._launcher = _MultiProcessingLauncher(strategy)
    with pytest.raises(ValueError, match="does not support processes started by spawn or fork"):
        check_trainer(trainer, None)


# ---- arguments of the strategy, refused when it is made ------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_stages": 0}, "num_stages must be at least 1, or None for all devices, not 0"),
        ({"num_stages": -2}, "num_stages must be at least 1"),
        ({"num_chunks": 0}, 'num_chunks must be a positive integer or "auto", not 0'),
        ({"num_chunks": 2.5}, "num_chunks must be a positive integer"),
        ({"num_chunks": "many"}, "num_chunks must be a positive integer"),
        ({"num_microbatches": -1}, "num_microbatches must be a positive integer"),
        ({"num_microbatches": True}, "num_microbatches must be a positive integer"),
        ({"schedule": "seq1f1"}, "did you mean 'seq1f1b'"),
        ({"schedule": "forward"}, "schedule"),
        ({"partition": "ballanced"}, "did you mean 'balanced'"),
        ({"partition": []}, "partition must list the chunks' lengths, at least one token each"),
        ({"partition": [3, 0]}, "at least one token each"),
        ({"partition": 3}, "partition must be a number from 0 (even) to 1 (balanced), 'even' or 'balanced', or list"),
        ({"partition": -0.5}, "partition must be a number from 0 (even) to 1 (balanced)"),
        ({"partition": True}, "partition must be a number from 0 (even) to 1 (balanced)"),
        ({"partition": None}, "partition must be a number from 0 (even) to 1 (balanced)"),
        ({"partition": [True, 3]}, "at least one token each"),
        ({"num_stages": "2"}, "num_stages must be at least 1"),
        ({"num_stages": 2.0}, "num_stages must be at least 1"),
        ({"partition": [3, 4], "num_chunks": 3}, "partition lists 2 chunks, but num_chunks=3"),
        ({"schedule": "1f1b", "num_chunks": 4}, "moves whole sequences, but num_chunks is 4; set num_chunks=1, or use"),
        ({"schedule": "1f1b", "partition": [3, 4]}, "moves whole sequences"),
        ({"schedule": "zb1p", "num_chunks": 2}, "or use schedule='seq1f1b_zb'"),
        ({"schedule": "interleved_seq1f1b"}, "did you mean 'interleaved_seq1f1b'"),
        ({"virtual_stages": 2}, "virtual_stages is 2; set virtual_stages=1, or use schedule='interleaved_seq1f1b'"),
        ({"schedule": "zb1p", "virtual_stages": 2}, "virtual_stages is 2; set virtual_stages=1, or use schedule="),
        ({"virtual_stages": 0}, 'virtual_stages must be a positive integer or "auto", not 0'),
        ({"virtual_stages": None}, 'virtual_stages must be a positive integer or "auto", not None'),
        ({"layers": [2, 0]}, "layers must list how many layers each stage has, at least one, not [2, 0]"),
        ({"layers": []}, "layers must list how many layers each stage has"),
        ({"profile": "file.json"}, "profile='file.json' is for schedule='auto', but the schedule is 'seq1f1b'"),
        ({"schedule": "auto", "activation_cap": 9}, "leave it out with schedule='auto'"),
        ({"schedule": "auto", "num_chunks": 0}, "num_chunks must be a positive integer"),
        ({"memory_knob": 0}, "memory_knob must be a positive integer, or None"),
        ({"memory_knob": 1.5}, "memory_knob must be a positive integer, or None"),
        ({"schedule": "gpipe", "memory_knob": 2}, "memory_knob has no effect on schedule 'gpipe'"),
        ({"activation_cap": -1}, "activation_cap must be a positive integer, or None"),
    ],
)
def test_arguments_are_checked_when_the_strategy_is_made(arguments, text):
    with pytest.raises(ValueError) as caught:
        Seq1F1BStrategy(**arguments)
    assert text.lower() in str(caught.value).lower()

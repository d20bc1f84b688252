"""Modules at the edge of the promise: they equal one device, or are refused with a sentence that helps."""

from __future__ import annotations

import functools

import lightning as L
import pytest
import torch
from support.processes import run_processes
from support.training import QUIET, FineTune, Rows, Scenario, assert_same, train
from torch import nn
from torch.utils.data import DataLoader

from lightning_seq1f1b import Seq1F1BStrategy

STRATEGY = {"num_chunks": 3}
VIRTUAL = {**STRATEGY, "schedule": "interleaved_seq1f1b_zb", "virtual_stages": 2}
PLACES = {"2 stages": (2, STRATEGY), "3 stages": (3, STRATEGY), "2 x 2 stages": (2, VIRTUAL)}


class Steering(FineTune):
    """A vector of the user's own, added by hooks to the hidden states before two layers of different stages."""

    def configure_model(self) -> None:
        super().configure_model()
        self.vector = nn.Parameter(torch.zeros(32))
        for index in (0, 2):
            self.model.model.layers[index].register_forward_pre_hook(self.steer, with_kwargs=True)

    def steer(self, layer, args, kwargs):
        if args:
            return (args[0] + self.vector, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + self.vector}


class LateHooks(FineTune):
    """Hooks on every layer's output, registered after the strategy has cut the model."""

    def on_fit_start(self) -> None:
        for layer in self.model.model.layers:
            layer.register_forward_hook(lambda module, args, output: output * 1.1)


class MaskedGradients(FineTune):
    """A hook on every weight that drops half of its gradient."""

    def on_fit_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient * (torch.arange(gradient.shape[-1]) % 2))


class HookedModules(FineTune):
    """Hooks on linear layers that change what goes forward and backward through them."""

    def configure_model(self) -> None:
        super().configure_model()
        for layer in self.model.model.layers:
            layer.mlp.up_proj.register_forward_hook(lambda module, args, output: output * 0.9)
            layer.mlp.down_proj.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 1.1,))
            layer.mlp.down_proj.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.9,))


class Recomputing(FineTune):
    """Keeps no activations of its layers."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.gradient_checkpointing_enable()


class LeftPadded(FineTune):
    """Pads every row at the left; OPT derives positions from the mask."""

    def training_step(self, batch, batch_idx):
        mask = torch.ones_like(batch["input_ids"])
        mask[:, :17] = 0
        labels = batch["labels"].clone()
        labels[:, :18] = -100
        loss = self.model(input_ids=batch["input_ids"], labels=labels, attention_mask=mask).loss
        self.log("train_loss", loss)
        return loss


CASES = {
    "steering": (Steering, {}),
    "late_hooks": (LateHooks, {}),
    "masked_gradients": (MaskedGradients, {"tie_word_embeddings": True}),
    "hooked_modules": (HookedModules, {}),
    "recomputing": (Recomputing, {}),
    "left_padded_opt": (LeftPadded, {"family": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "left_padded_llama": (LeftPadded, {}),
    "tied": (FineTune, {"tie_word_embeddings": True}),
}


def outcome(case, devices, strategy):
    cls, overrides = CASES[case]
    scenario = Scenario(
        module=overrides, strategy=strategy, trainer={"gradient_clip_val": 0.5, "max_epochs": 1}, module_class=cls
    )
    return train(scenario, devices)


def outcomes(rank, devices, strategy):
    return {case: outcome(case, devices, strategy) for case in CASES}


@pytest.fixture(scope="module")
def staged():
    return {place: run_processes(outcomes, devices, devices, given) for place, (devices, given) in PLACES.items()}


@functools.cache
def one_device(case):
    return outcome(case, None, {})


@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("case", list(CASES))
def test_equals_one_device(staged, case, place):
    assert_same([by_case[case] for by_case in staged[place]], one_device(case), 5e-6)


class OwnLoss(FineTune):
    def configure_model(self) -> None:
        super().configure_model()
        self.model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.mean()


class Penalty(FineTune):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + sum(p.square().sum() for p in self.parameters())


class StepsInBackward(FineTune):
    def on_fit_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: None)


class CallsTheTrunk(FineTune):
    def training_step(self, batch, batch_idx):
        return self.model.model(batch["input_ids"]).last_hidden_state.mean()


class SavesItself(FineTune):
    def on_train_batch_start(self, batch, batch_idx):
        self.model.save_pretrained("nowhere")


class OneItemTensor(FineTune):
    def training_step(self, batch, batch_idx):
        return self.model(**batch, num_items_in_batch=torch.tensor([3, 4])).loss


class EvaluatesOnOneRank(FineTune):
    def training_step(self, batch, batch_idx):
        with torch.set_grad_enabled(self.global_rank == 0):
            return self.model(**batch).loss


class GrowsGroups(FineTune):
    def on_train_batch_start(self, batch, batch_idx):
        self.trainer.optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})

    def on_train_batch_end(self, *args):
        self.trainer.save_checkpoint("nowhere.ckpt")


REFUSED = {
    OwnLoss: "does not add up over chunks",
    Penalty: "loss differs between the stages",
    StepsInBackward: "register_post_accumulate_grad_hook",
    CallsTheTrunk: r"call self.model\(\*\*batch\), not one of its parts",
    SavesItself: "would write this stage's part only: call trainer.strategy.save_pretrained",
    OneItemTensor: "num_items_in_batch is one number",
    EvaluatesOnOneRank: "'gradients enabled' is rank 0",
    GrowsGroups: "groups added while training cannot be saved",
}


def refusals(rank, strategy):
    messages = {}
    for cls in REFUSED:
        trainer = L.Trainer(**QUIET, devices=2, max_steps=1, strategy=Seq1F1BStrategy(**strategy))
        try:
            trainer.fit(cls(), DataLoader(Rows(2), batch_size=2))
        except Exception as error:
            messages[cls.__name__] = str(error)
    return messages


@pytest.fixture(scope="module")
def refused():
    return {place: run_processes(refusals, 2, PLACES[place][1]) for place in ("2 stages", "2 x 2 stages")}


@pytest.mark.parametrize("place", ["2 stages", "2 x 2 stages"])
@pytest.mark.parametrize("cls", list(REFUSED))
def test_is_refused_on_every_rank_with_the_reason(refused, cls, place):
    for messages in refused[place]:
        with pytest.raises(RuntimeError, match=REFUSED[cls]):
            raise RuntimeError(messages[cls.__name__])

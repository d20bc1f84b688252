"""Two replicas of a pipeline behave as two devices under data parallelism; stages never count."""

import os
import tempfile
from itertools import chain
from pathlib import Path
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from peft import LoraConfig, get_peft_model
from support.fitting import (
    DATA_PARALLEL,
    SHORT,
    TWO_BY_TWO,
    Where,
    difference,
    everywhere,
    fit,
    fitted_weights,
    rows,
    weights,
)
from support.numbered_rows import AugmentedRows, NumberedRows, SeenRows
from support.training import FineTune, Rows
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

TOLERANCE = 5e-6


class Scheduled(FineTune):
    """Plain gradient descent, whose steps show the gradients' size, and a learning rate that changes every step."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class StepRecorder(Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, *args):
        self.steps.append((trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]))


def trained(where, **options):
    recorder = StepRecorder()
    module = Scheduled(tie_word_embeddings=True)
    trainer = fit(
        where, module, rows(11, 2), callbacks=[recorder], max_epochs=None, max_steps=4, accumulate_grad_batches=2,
        **options,
    )  # fmt: skip
    return recorder.steps, weights(trainer)


def clipped(where):
    return trained(where, gradient_clip_val=0.2)


def unclipped(where):
    return trained(where)


class ByHand(FineTune):
    """Accumulates by hand, and has a learned factor beside the language model."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.factor = nn.Parameter(torch.tensor(1.5))

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.model(**batch).loss * self.factor)
        if batch_idx % 2:
            self.clip_gradients(self.optimizers(), gradient_clip_val=0.2)
            self.optimizers().step()
            self.optimizers().zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def by_hand(where):
    return fitted_weights(where, ByHand())


class OwnScore(FineTune):
    """Logs a score that differs between replicas: the number of a row it has seen."""

    def training_step(self, batch, batch_idx):
        self.log("score", float(batch["input_ids"][0, 0] + self.current_epoch), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def stopped(where):
    """The first replica has row 0, the second row 1, so that the second goes over the threshold first."""
    stop = EarlyStopping("score", mode="min", patience=99, divergence_threshold=5.5, check_on_train_epoch_end=True)
    loader = DataLoader(NumberedRows(2), batch_size=1)
    trainer = fit(where, OwnScore(), loader, callbacks=[stop], max_epochs=6)
    return trainer.current_epoch, trainer.global_step


class Logging(FineTune):
    """Logs one value in every way that reduces over processes."""

    def __init__(self):
        super().__init__()
        self.count, self.average = SumMetric(), MeanMetric()
        self.gathered = None

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        count = float(len(batch["input_ids"]))
        self.log("mean", loss, sync_dist=True)
        self.log("mean_of_epoch", loss, sync_dist=True, on_step=False, on_epoch=True)
        self.log("sum", count, sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("largest", loss, sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)
        self.log("own", loss)
        self.count.update(count)
        self.average.update(loss.detach(), count)
        self.log("metric_sum", self.count, on_step=False, on_epoch=True)
        self.log("metric_mean", self.average, on_step=False, on_epoch=True)
        self.gathered = self.all_gather({"loss": loss.detach(), "rows": batch["input_ids"][:1, 0]})
        return loss


def logged(where):
    module = Logging()
    trainer = fit(where, module, rows(10, 2), max_epochs=1)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, module.gathered


class WithLoaders(FineTune):
    """Has loaders of its own, which it can be asked for again; writes down the sum of each batch's tokens."""

    def __init__(self, num_workers=0):
        super().__init__()
        self.num_workers, self.asked, self.sums = num_workers, 0, []

    def training_step(self, batch, batch_idx):
        self.sums.append(int(batch["input_ids"].sum()))
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        self.asked += 1
        dataset = AugmentedRows(18) if self.num_workers else NumberedRows(18)
        return DataLoader(dataset, batch_size=2, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self):
        return DataLoader(NumberedRows(7), batch_size=2)


def data(where, num_workers=0, **options):
    recorder, module = SeenRows(), WithLoaders(num_workers)
    trainer = fit(where, module, None, callbacks=[recorder], **options)
    return recorder.train, recorder.val, len(trainer.train_dataloader), module.asked, module.sums


def all_data(where):
    return data(where)


def limited(where):
    return data(where, limit_train_batches=3, limit_val_batches=1)


def overfitted(where):
    return data(where, overfit_batches=2)


def reloaded(where):
    return data(where, reload_dataloaders_every_n_epochs=1)


def augmented_by_workers(where):
    """Data parallel resets the seed when it connects, so the seed is the one every fit starts with."""
    with mock.patch.dict(os.environ):
        L.seed_everything(0, workers=True)
        return data(where, num_workers=1)


class PlainBatchSampler:
    """Lists batches, but is no BatchSampler that Lightning could make anew."""

    def __iter__(self):
        return iter([[0, 1], [2, 3]])

    def __len__(self):
        return 2


def batch_sampler_refused(where):
    with pytest.raises(TypeError) as caught:
        fit(where, FineTune(), DataLoader(NumberedRows(4), batch_sampler=PlainBatchSampler()))
    return str(caught.value)


# ---- optimizer state shared over the replicas ------------------------------------------------------------------------


def with_strategy(where, **arguments):
    """The same place with other arguments of our strategy; data parallel has none of them."""
    return where if isinstance(where.strategy, str) else Where(where.devices, (*where.strategy, *arguments.items()))


def sharing(where, **arguments):
    return with_strategy(where, shard_optimizer=True, **arguments)


def state_of(trainer):
    """Names of parameters that have optimizer state on this rank, and its bytes; tied ones by the embeddings' name."""
    optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in trainer.optimizers]
    held = {}
    for name, parameter in trainer.lightning_module.named_parameters():
        states = [optimizer.state[parameter] for optimizer in optimizers if parameter in optimizer.state]
        if states:
            name = (
                name.replace("model.lm_head", "model.model.embed_tokens")
                if getattr(trainer.lightning_module, "tied", False)
                else name
            )
            held[name] = sum(value.numel() * value.element_size() for state in states for value in state.values())
    return held


class Grouped(FineTune):
    """Tied embeddings, weight decay on matrices only, and a schedule that moves the learning rate and beta1."""

    tied = True

    def __init__(self):
        super().__init__(tie_word_embeddings=True)

    def configure_optimizers(self):
        groups = [[], []]
        for parameter in self.parameters():
            groups[parameter.ndim < 2].append(parameter)
        decay = [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(decay, lr=1e-2, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=6)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def grouped(where):
    trainer = fit(where, Grouped(), rows(11, 2), accumulate_grad_batches=2, gradient_clip_val=0.2)
    options = [{key: group[key] for key in ("lr", "betas")} for group in trainer.optimizers[0].param_groups]
    return options, state_of(trainer), weights(trainer)


def grouped_shared(where):
    return grouped(sharing(where))


class PartlyFrozen(FineTune):
    """Frozen embeddings, a factor beside the language model, and a learning rate that follows the loss."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def configure_model(self):
        super().configure_model()
        self.model.get_input_embeddings().requires_grad_(False)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss * self.factor
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer := super().configure_optimizers(), factor=0.5, patience=0, threshold=0.5
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}


def by_value_shared(where):
    module = PartlyFrozen()
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "max_epochs": 3}
    trainer = fit(sharing(where), module, rows(7, 2), **options)
    return trainer.optimizers[0].param_groups[0]["lr"], state_of(trainer), weights(trainer)


class Adapted(FineTune):
    """In double precision: the gradients of adapters are large, and Adam with them makes much of rounding."""

    def __init__(self):
        super().__init__(dtype=torch.float64)

    def configure_model(self):
        if not hasattr(self, "model"):
            super().configure_model()
            torch.manual_seed(1)
            config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
            self.model = get_peft_model(self.model, config).double()


def adapted_shared(where):
    trainer = fit(sharing(where), Adapted(), rows(6, 2))
    return state_of(trainer), weights(trainer)


class TwoByHand(FineTune):
    """Two optimizers of different kinds, one of which steps every other batch only."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.manual_backward(self.model(**batch).loss)
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            self.clip_gradients(second, gradient_clip_val=0.2)
            second.step()
            second.zero_grad()

    def configure_optimizers(self):
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.parameters() if parameter.ndim < 2]
        return torch.optim.AdamW(matrices, lr=1e-2, eps=1e-3), torch.optim.SGD(vectors, lr=0.1, momentum=0.9)


def two_by_hand_shared(where):
    trainer = fit(sharing(where), TwoByHand(), rows(11, 2))
    return state_of(trainer), weights(trainer)


def in_turn_shared(where):
    """Ragged rows by virtual stages whose weight gradients are computed apart."""
    loader = DataLoader(Rows(10, padded=True, length=SHORT), batch_size=3)
    where = sharing(where, schedule="interleaved_seq1f1b_zb", virtual_stages=2)
    return weights(fit(where, Grouped(), loader))


def resumed_shared(where):
    """Trained for an epoch, saved, and trained for another one by a new Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = fit(sharing(where), Grouped(), rows(8, 2), max_epochs=1)
        path = trainer.strategy.broadcast(f"{folder}/saved.ckpt")
        trainer.save_checkpoint(path)
        saved = torch.load(path, weights_only=True)["optimizer_states"][0]
        trainer = fit(sharing(where), Grouped(), rows(8, 2), ckpt_path=path)
        trainer.strategy.barrier()
    return saved, state_of(trainer), weights(trainer)


# ---- replicas that see different things ------------------------------------------------------------------------------


class CountingTokens(FineTune):
    """Says what the loss is divided by, so that also one device's is 0 for a batch without labels."""

    def training_step(self, batch, batch_idx):
        items = (batch["labels"][:, 1:] != -100).sum().clamp(min=1)
        return self.model(**batch, num_items_in_batch=items).loss


def nothing_to_learn(where):
    """The second replica's first batch has no label."""
    dataset = Rows(8, length=SHORT)
    dataset.labels[[1, 3]] = -100
    return weights(fit(where, CountingTokens(), DataLoader(dataset, batch_size=2), max_epochs=1))


class SometimesUsed(FineTune):
    """Uses a parameter for rows that start with some tokens only, and another one never."""

    def __init__(self):
        super().__init__()
        self.factor, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(1.0))
        self.used = []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.used.append(int(batch["input_ids"][0, 0]) % 2 == 0)
        return loss * self.factor if self.used[-1] else loss


def sometimes_used(where):
    if where == DATA_PARALLEL:
        where = Where(2, "ddp_find_unused_parameters_true")
    module = SometimesUsed()
    trainer = fit(sharing(where), module, DataLoader(NumberedRows(8), batch_size=1), max_epochs=1)
    return module.used, module.unused in trainer.optimizers[0].state, weights(trainer)


def decided(where):
    """Every rank asks for a folder of its own; checkpoints and the log are in rank 0's."""
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(monitor="val_loss", filename="{epoch}-{val_loss:.3f}", save_top_k=2)
        stop = EarlyStopping("val_loss", patience=1, min_delta=0.3)
        options = {"logger": CSVLogger(folder), "enable_checkpointing": True, "default_root_dir": folder}
        callbacks = [best, stop]
        trainer = fit(where, FineTune(), rows(7, 2), rows(5, 2, seed=2), callbacks=callbacks, max_epochs=6, **options)
        files = sorted(path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file())
        logged = [path.read_text().splitlines()[0] for path in Path(folder).rglob("metrics.csv")]
        kept = {Path(path).name: float(score) for path, score in best.best_k_models.items()}
    return trainer.current_epoch, best.best_model_path, kept, files, logged


CASES = (
    clipped,
    unclipped,
    by_hand,
    stopped,
    logged,
    all_data,
    limited,
    overfitted,
    reloaded,
    augmented_by_workers,
    batch_sampler_refused,
    grouped,
    grouped_shared,
    by_value_shared,
    adapted_shared,
    two_by_hand_shared,
    in_turn_shared,
    resumed_shared,
    nothing_to_learn,
    sometimes_used,
    decided,
)


def ours(case):
    """The results of four processes, by replica and stage."""
    by_rank = everywhere(CASES, TWO_BY_TWO)[case]
    return by_rank[:2], by_rank[2:]


def truth(case):
    """The results of two devices."""
    return everywhere(CASES, DATA_PARALLEL)[case]


@pytest.mark.behaviour(3)
@pytest.mark.behaviour(4)
@pytest.mark.behaviour(6)
@pytest.mark.parametrize("case", [clipped, unclipped])
def test_steps_and_norm_equal_data_parallel_with_tied_weights(case):
    expected_steps, expected_weights = truth(case)[0]
    assert expected_steps[-1][0] == 4
    for replica in ours(case):
        for steps, _ in replica:
            assert steps == expected_steps
    assert difference(ours(case)[0][0][1], expected_weights) <= TOLERANCE


@pytest.mark.behaviour(3)
def test_manual_optimization_equals_data_parallel():
    assert difference(ours(by_hand)[0][0], truth(by_hand)[0]) <= TOLERANCE


@pytest.mark.behaviour(21)
def test_one_replica_stops_all():
    expected = truth(stopped)
    assert expected == [(3, 3)] * 2
    for replica in ours(stopped):
        assert replica == expected


def test_clipping_was_put_to_the_test():
    assert difference(truth(clipped)[0][1], truth(unclipped)[0][1]) > 100 * TOLERANCE


@pytest.mark.behaviour(15)
def test_replicas_see_disjoint_data():
    first, second = ([stage[0] for stage in replica] for replica in ours(all_data))
    assert first[0] == first[1]
    assert second[0] == second[1]
    for one, other in zip(first[0], second[0], strict=True):
        assert sorted(chain(*one, *other)) == list(range(18))
    for replica in ours(all_data):
        for _, _, length, *_ in replica:
            assert length == 5


@pytest.mark.behaviour(15)
@pytest.mark.behaviour(16)
@pytest.mark.parametrize("case", [all_data, limited, overfitted, reloaded, augmented_by_workers])
def test_loaders_behave_as_under_data_parallel(case):
    for replica, expected in zip(ours(case), truth(case), strict=True):
        for result in replica:
            assert result == expected


@pytest.mark.behaviour(16)
def test_a_batch_sampler_that_cannot_be_split_has_the_usual_message():
    (usual, _), (first, second) = truth(batch_sampler_refused), ours(batch_sampler_refused)
    for message in (*first, *second):
        assert usual in message


@pytest.mark.behaviour(19)
@pytest.mark.behaviour(23)
def test_logged_values_are_reduced_over_replicas_only():
    assert truth(logged)[0][0]["sum"] == truth(logged)[0][0]["metric_sum"] == 10
    for replica, (expected, _) in zip(ours(logged), truth(logged), strict=True):
        for metrics, _ in replica:
            assert metrics == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.behaviour(24)
def test_all_gather_has_one_row_for_each_replica():
    expected = truth(logged)[0][1]
    assert expected["loss"].shape == (2,)
    for replica in ours(logged):
        for _, gathered in replica:
            torch.testing.assert_close(gathered["loss"], expected["loss"], rtol=0, atol=TOLERANCE)
            assert torch.equal(gathered["rows"], expected["rows"])


# ---- optimizer state shared over the replicas ------------------------------------------------------------------------


@pytest.mark.behaviour(1)
@pytest.mark.behaviour(2)
@pytest.mark.behaviour(4)
@pytest.mark.parametrize("case", [grouped, grouped_shared])
def test_training_equals_data_parallel(case):
    expected_options, _, expected = truth(case)[0]
    assert expected_options[0]["betas"] != (0.9, 0.999)
    for replica in ours(case):
        for options, _, _ in replica:
            assert options == expected_options
    assert difference(ours(case)[0][0][2], expected) <= TOLERANCE


def test_shared_state_changes_nothing():
    assert difference(ours(grouped_shared)[0][0][2], ours(grouped)[0][0][2]) == 0


def assert_shared_out(case, place):
    """Every parameter that is trained has its whole state on one replica of its stage."""
    whole = truth(case)[0][place]
    held = [[result[place] for result in replica] for replica in ours(case)]
    for stage in range(2):
        first, second = held[0][stage], held[1][stage]
        assert not first.keys() & second.keys()
        for name, size in (first | second).items():
            assert size == whole[name]
    assert {name for replica in held for names in replica for name in names} == set(whole)


def test_optimizer_memory_halves():
    assert_shared_out(grouped_shared, 1)
    for replica, shared in zip(ours(grouped), ours(grouped_shared), strict=True):
        for (_, whole, _), (_, share, _) in zip(replica, shared, strict=True):
            assert sum(share.values()) / sum(whole.values()) == pytest.approx(0.5, abs=0.1)


@pytest.mark.behaviour(2)
@pytest.mark.behaviour(22)
def test_shared_state_with_frozen_and_foreign_parameters_equals_data_parallel():
    expected_rate, whole, expected = truth(by_value_shared)[0]
    assert expected_rate < 1e-2
    assert "factor" in whole
    assert "model.model.embed_tokens.weight" not in whole
    for replica in ours(by_value_shared):
        for rate, share, _ in replica:
            assert rate == expected_rate
            assert "model.model.embed_tokens.weight" not in share
    assert difference(ours(by_value_shared)[0][0][2], expected) <= TOLERANCE


@pytest.mark.parametrize("case", [adapted_shared, two_by_hand_shared])
def test_shared_state_of_adapters_and_of_two_optimizers_equals_data_parallel(case):
    assert_shared_out(case, 0)
    assert difference(ours(case)[0][0][1], truth(case)[0][1]) <= TOLERANCE


def test_shared_state_with_virtual_stages_and_ragged_rows_equals_data_parallel():
    assert difference(ours(in_turn_shared)[0][0], truth(in_turn_shared)[0]) <= TOLERANCE


@pytest.mark.behaviour(29)
def test_shared_state_is_saved_whole_and_resumes():
    saved, _, expected = truth(resumed_shared)[0]
    for replica in ours(resumed_shared):
        for got, _, _ in replica:
            assert got["param_groups"] == saved["param_groups"]
            assert list(got["state"]) == list(saved["state"])
            for number, entries in saved["state"].items():
                for key, value in entries.items():
                    torch.testing.assert_close(got["state"][number][key], value, rtol=0, atol=TOLERANCE)
    assert_shared_out(resumed_shared, 1)
    assert difference(ours(resumed_shared)[0][0][2], expected) <= TOLERANCE


# ---- replicas that see different things ------------------------------------------------------------------------------


def test_a_replica_without_a_label_counts_as_zero():
    assert difference(ours(nothing_to_learn)[0][0], truth(nothing_to_learn)[0]) <= TOLERANCE


def test_a_parameter_that_one_replica_uses_equals_data_parallel():
    (used, _, expected), (used_by_second, _, _) = truth(sometimes_used)
    assert used != used_by_second
    for replica, expected_used in zip(ours(sometimes_used), (used, used_by_second), strict=True):
        for here, unused_has_state, _ in replica:
            assert here == expected_used
            assert not unused_has_state
    assert difference(ours(sometimes_used)[0][0][2], expected) <= TOLERANCE


@pytest.mark.behaviour(18)
@pytest.mark.behaviour(20)
@pytest.mark.behaviour(21)
def test_decisions_and_files_are_those_of_data_parallel():
    expected_epoch, path, expected_kept, expected_files, expected_log = truth(decided)[0]
    assert 1 < expected_epoch < 6
    results = [result for replica in ours(decided) for result in replica]
    for epoch, best, kept, _, _ in results:
        assert epoch == expected_epoch
        assert best == results[0][1]
        assert Path(best).name == Path(path).name
        assert kept == pytest.approx(expected_kept, abs=TOLERANCE)
    assert results[0][3] == expected_files
    assert results[0][4] == expected_log
    assert [files for _, _, _, files, _ in results[1:]] == [[]] * 3

"""Two replicas of a pipeline behave as two devices under data parallelism; stages never count."""

import os
from itertools import chain
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from support.fitting import DATA_PARALLEL, TWO_BY_TWO, difference, everywhere, fit, fitted_weights, rows, weights
from support.numbered_rows import AugmentedRows, NumberedRows, SeenRows
from support.training import FineTune
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

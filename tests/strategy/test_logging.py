"""What is logged reaches the bar, the logger and the callback metrics of all ranks as on one device."""

import pytest
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from support.fitting import ONE_DEVICE, TWO_STAGES, everywhere, fit, rows
from support.training import FineTune, Recorder

TOLERANCE = 5e-6


class Bar(ProgressBar):
    """Keeps what it would show."""

    def __init__(self):
        super().__init__()
        self.shown, self.enabled = [], True

    def disable(self):
        self.enabled = False

    def on_train_batch_end(self, trainer, pl_module, *args):
        if self.enabled:
            self.shown.append(self.get_metrics(trainer, pl_module))


class MemoryLogger(Logger):
    """Keeps what it is given, on rank 0 as loggers do."""

    name, version = "memory", 0

    def __init__(self):
        super().__init__()
        self.logged = []

    @rank_zero_only
    def log_hyperparams(self, params, *args, **kwargs):
        pass

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.logged.append((step, metrics))


def without_version(shown):
    return [{name: float(value) for name, value in metrics.items() if name != "v_num"} for metrics in shown]


def logged(where):
    bar, logger, recorder = Bar(), MemoryLogger(), Recorder()
    fit(
        where,
        FineTune(),
        rows(),
        rows(5, seed=2),
        callbacks=[bar, recorder],
        logger=logger,
        log_every_n_steps=1,
        enable_progress_bar=True,
    )
    return without_version(bar.shown), logger.logged, recorder.losses


def all_stages_of_use(where):
    module = FineTune()
    trainer = fit(where, module, rows(), rows(5, seed=2))
    results = {"fit": {name: float(value) for name, value in trainer.callback_metrics.items()}}
    for function in (trainer.validate, trainer.test):
        (returned,) = function(module, rows(5, seed=2), verbose=False)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        results[function.__name__] = {**metrics, **{f"returned_{name}": value for name, value in returned.items()}}
    predicted = trainer.predict(module, rows(5, seed=2))
    results["predict"] = dict(enumerate(map(float, predicted)))
    return results


CASES = (logged, all_stages_of_use)


def assert_close(got, expected):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, abs=TOLERANCE)


@pytest.mark.behaviour(18)
def test_bar_and_logger_show_the_real_loss_on_rank_0():
    first, second = everywhere(CASES, TWO_STAGES)[logged]
    expected_bar, expected_log, expected_losses = everywhere(CASES, ONE_DEVICE)[logged][0]
    bar, log, losses = first
    assert [shown["train_loss_step"] for shown in bar] == losses == pytest.approx(expected_losses, abs=TOLERANCE)
    assert_close(bar, expected_bar)
    assert [step for step, _ in log] == [step for step, _ in expected_log]
    assert_close([metrics for _, metrics in log], [metrics for _, metrics in expected_log])
    assert second[:2] == ([], [])


@pytest.mark.behaviour(19)
@pytest.mark.parametrize("use", ["fit", "validate", "test", "predict"])
def test_metrics_are_equal_on_all_ranks(use):
    expected = everywhere(CASES, ONE_DEVICE)[all_stages_of_use][0][use]
    first, second = everywhere(CASES, TWO_STAGES)[all_stages_of_use]
    assert expected
    assert first[use] == second[use] == pytest.approx(expected, abs=TOLERANCE)

"""Which batches a model with the routers' auxiliary loss can be trained on; exactness is in test_schedule_family."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lightning_seq1f1b.strategy.router_sharing import check_one_microbatch


def cut(routers: object) -> SimpleNamespace:
    """As much of a cut module as is asked for."""
    return SimpleNamespace(stages={0: SimpleNamespace(routers=routers)})


@pytest.mark.parametrize("num_microbatches", [None, 2])
def test_several_microbatches_are_refused(num_microbatches: int | None) -> None:
    with pytest.raises(ValueError, match=r"batch of 3 rows would be cut into microbatches. Set num_microbatches=1"):
        check_one_microbatch(cut(object()), 3, num_microbatches)


def test_one_microbatch_and_models_without_that_loss_are_not() -> None:
    check_one_microbatch(cut(object()), 3, 1)
    check_one_microbatch(cut(object()), 1, None)
    check_one_microbatch(cut(None), 3, None)

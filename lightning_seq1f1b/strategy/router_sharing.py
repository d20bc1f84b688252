"""The routers' auxiliary loss of a mixture of experts, as far as it concerns all ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from lightning_seq1f1b.runtime.row_groups import split_rows
from lightning_seq1f1b.strategy.cut_module import CutModule


def share_router_sums(cut: CutModule, group: dist.ProcessGroup) -> None:
    """Let the routers on this rank add up what they have seen with those on the other ranks of the pipeline.

    They do it between the last forward of a batch and its first backward, when a rank waits in any case.
    """

    def share(sums: Tensor) -> Callable[[], None]:
        work = dist.all_reduce(sums, group=group, async_op=True)
        assert work is not None

        def wait() -> None:
            work.wait()

        return wait

    for stage in cut.stages.values():
        if stage.routers is not None:
            stage.routers.share = share


def check_one_microbatch(cut: CutModule, rows: int, num_microbatches: int | None) -> None:
    """Refuse a batch of several microbatches for a model with an auxiliary loss over the whole batch.

    Args:
        cut: of the model.
        rows: of the batch.
        num_microbatches: most pieces of a batch; None for one a row.

    Raises:
        ValueError: the backward of the first microbatch would begin before the routers have seen the last.
    """
    if any(stage.routers is not None for stage in cut.stages.values()) and len(split_rows(rows, num_microbatches)) > 1:
        raise ValueError(
            "config.output_router_logits=True adds the routers' auxiliary loss, a product over all tokens of a batch, "
            f"and this batch of {rows} rows would be cut into microbatches. Set num_microbatches=1 (more chunks keep "
            "the stages busy; accumulate_grad_batches makes the optimizer's batch larger), or turn that loss off"
        )

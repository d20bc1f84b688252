"""What to say when a device has run out of memory."""

from __future__ import annotations

import torch


def advise(exception: BaseException, stage: int, device: torch.device) -> None:
    """Complete an out-of-memory error with what a pipeline can do about it; leave any other exception alone.

    Args:
        exception: what was raised.
        stage: where.
        device: of this process.
    """
    if not isinstance(exception, torch.OutOfMemoryError):
        return
    held = ""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        sizes = ", ".join(f"{size / 2**30:.1f} GiB {what}" for size, what in ((allocated, "now"), (peak, "at most")))
        held = f" Tensors take {sizes}; {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free."
    exception.add_note(
        f"stage {stage} has no memory left on {device}.{held} It helps to cut rows into more chunks (num_chunks), to "
        "hold fewer of them at once (activation_cap), to recompute activations in the backward "
        "(model.gradient_checkpointing_enable()), to give this stage fewer layers (layers) or to use more stages; "
        "schedule='auto' chooses what fits"
    )

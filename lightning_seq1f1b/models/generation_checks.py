"""What `generate` of a cut model cannot do is refused before anything runs, on every rank, with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SPECULATION = "tokens that are guessed ahead would have to be taken back out of the caches of all stages"
_REFUSED = {
    "assistant_model": _SPECULATION,
    "prompt_lookup_num_tokens": _SPECULATION,
    "assistant_early_exit": _SPECULATION,
    "speculation_type": _SPECULATION,
    "token_healing": "it generates within generate",
    "custom_generate": "only transformers' own loop is known to run alike on all ranks",
    "compile_config": "a forward that sends and receives cannot be compiled",
    "max_time": "every rank would stop by its own clock, and stages would wait for each other; set max_new_tokens",
    "guidance_scale": "it runs the model once more for every token, with a cache of its own",
    "output_attentions": "they exist on one stage only",
    "output_hidden_states": "they exist on one stage only",
    "inputs_embeds": "the first stage embeds tokens itself; give input_ids",
    "past_key_values": "it makes its cache itself, a part on every stage, and frees it at the end",
    "cache": "it makes its cache itself, a part on every stage, and frees it at the end",
    "synced_gpus": "its stages are in step in any case",
}
_GROWING = ("dynamic", "hybrid")
"""Values of `cache_implementation` with which transformers itself takes a cache that grows."""


def setting(model: PreTrainedModel, arguments: Mapping[str, Any], name: str) -> Any:
    """A setting of generation as transformers finds it: an argument, else by `generation_config`, else the model's."""
    sources = (arguments.get("generation_config"), model.generation_config)
    values = (arguments.get(name), *(getattr(source, name, None) for source in sources))
    return next((value for value in values if value is not None), None)


def check_arguments(model: PreTrainedModel, arguments: Mapping[str, Any], device: torch.device) -> None:
    """Check what `generate` was called with.

    Args:
        model: the cut model.
        arguments: all arguments of the call, by name.
        device: where the stages compute.

    Raises:
        ValueError: an argument or setting asks for what a pipeline cannot do.
        RuntimeError: the model is not on its device.
    """
    name = type(model).__name__
    for refused, reason in _REFUSED.items():
        value = setting(model, arguments, refused)
        if value is not None and value is not False and not (refused == "guidance_scale" and value == 1):
            raise ValueError(
                f"generate of a {name} that is cut into pipeline stages does not support {refused}: {reason}"
            )
    kind = setting(model, arguments, "cache_implementation")
    if kind is not None and kind not in _GROWING:
        raise ValueError(
            f"generate of a {name} that is cut into pipeline stages does not support cache_implementation={kind!r}: "
            "the cache of every stage grows with the text; leave it out"
        )
    if model.device.type != device.type:
        raise RuntimeError(
            f"generate needs the {name} on {device}, where its stages are connected, but it is on {model.device}: the "
            f"Trainer moves it to the CPU at its end. Call self.model.to({str(device)!r}) first, on all ranks"
        )

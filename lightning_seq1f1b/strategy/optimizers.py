"""Optimizers over the whole model's parameters, of which each rank keeps its own.

The user's `configure_optimizers` sees every parameter of the whole model, the foreign ones on the meta device. So the
parameter groups have one structure on all ranks: learning-rate schedulers line up, a stage with nothing to train gets
an optimizer with empty groups, and an optimizer state is numbered as on one device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class WholeGroup:
    """A parameter group as it was over the whole model.

    Attributes:
        names: the module's names of its parameters, in order.
        given_names: `param_names` of the group, for an optimizer made from `named_parameters()`; else None.
    """

    names: list[str]
    given_names: list[str] | None


def keep_local(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], local: Mapping[str, nn.Parameter]
) -> list[WholeGroup]:
    """Replace an optimizer's parameter groups by their local part, in place.

    Args:
        optimizer: made over the whole model.
        names: name of every parameter of the whole model, as it is and as it was before it was cut.
        local: this rank's parameters by name.

    Returns:
        The groups as they were.

    Raises:
        ValueError: when the optimizer holds a parameter that is not the module's.
    """
    whole = []
    for group in optimizer.param_groups:
        if any(parameter not in names for parameter in group["params"]):
            raise ValueError(
                f"{type(optimizer).__name__} holds a parameter that is not the module's: make optimizers in "
                "configure_optimizers, from self.parameters()"
            )
        held = [names[parameter] for parameter in group["params"]]
        whole.append(WholeGroup(held, group.get("param_names")))
        for parameter, name in zip(group["params"], held, strict=True):
            if local.get(name) is not parameter:
                optimizer.state.pop(parameter, None)
        group["params"] = [local[name] for name in held if name in local]
        if "param_names" in group:
            given = zip(held, group["param_names"], strict=True)
            group["param_names"] = [given_name for name, given_name in given if name in local]
    return whole


def check_groups(optimizer: Optimizer, whole: Sequence[WholeGroup]) -> None:
    """Raise ValueError when groups were added since `keep_local`: other ranks know nothing of them."""
    if len(optimizer.param_groups) != len(whole):
        raise ValueError(
            f"{type(optimizer).__name__} has {len(optimizer.param_groups)} parameter groups, but was made with "
            f"{len(whole)}: groups added while training cannot be saved; make all of them in configure_optimizers"
        )


def named_groups(optimizer: Optimizer, whole: Sequence[WholeGroup]) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer's state dict, over the whole model, by name instead of number."""
    groups = []
    for group, before in zip(optimizer.state_dict()["param_groups"], whole, strict=True):
        given = {} if before.given_names is None else {"param_names": before.given_names}
        groups.append({**group, "params": [*before.names], **given})
    return groups


def whole_state(
    optimizer: Optimizer, whole: Sequence[WholeGroup], state_by_name: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """An optimizer's state as one device would save it.

    Args:
        optimizer: this rank's; its groups give the hyper-parameters.
        whole: from `keep_local`.
        state_by_name: every rank's entries, by parameter name.

    Returns:
        `state` and `param_groups`, numbered over the whole model.
    """
    return numbered_state(named_groups(optimizer, whole), state_by_name)


def numbered_state(groups: Sequence[Mapping[str, Any]], state_by_name: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The same, of groups that name their parameters, as `named_groups` gives them."""
    numbers: dict[str, int] = {}
    for group in groups:
        for name in group["params"]:
            numbers.setdefault(name, len(numbers))
    numbered = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    state = {numbers[name]: state_by_name[name] for name in numbers if name in state_by_name}
    return {"state": state, "param_groups": numbered}


def local_state(
    saved: Mapping[str, Any], whole: Sequence[WholeGroup], local: Collection[str], owned: Collection[str] | None = None
) -> dict[str, Any]:
    """The rank's part of a state that one device, or another number of stages, has saved.

    Args:
        saved: `state` and `param_groups` over the whole model.
        whole: of the optimizer to restore, from `keep_local`.
        local: names of this rank's parameters.
        owned: names of those among them whose state this rank holds; all by default.

    Raises:
        ValueError: when the saved groups do not have the optimizer's sizes.
    """
    saved_sizes = [len(group["params"]) for group in saved["param_groups"]]
    sizes = [len(before.names) for before in whole]
    if saved_sizes != sizes:
        raise ValueError(
            f"the checkpoint's optimizer has parameter groups of {saved_sizes} parameters, this one of {sizes}: resume "
            "with the configure_optimizers that made the checkpoint"
        )
    groups, state, number = [], {}, 0
    for group, before in zip(saved["param_groups"], whole, strict=True):
        kept = [place for place, name in enumerate(before.names) if name in local]
        numbers = list(range(number, number + len(kept)))
        number += len(kept)
        for new, place in zip(numbers, kept, strict=True):
            number_saved, name = group["params"][place], before.names[place]
            if number_saved in saved["state"] and (owned is None or name in owned):
                state[new] = saved["state"][number_saved]
        group = {**group, "params": numbers}
        if group.get("param_names") is not None:
            group["param_names"] = [group["param_names"][place] for place in kept]
        groups.append(group)
    return {"state": state, "param_groups": groups}


def copy_state(optimizer: Optimizer) -> None:
    """Give the optimizer tensors of its own on the CPU, where those it has loaded are a file's, mapped into memory."""
    for entries in optimizer.state.values():
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.device.type == "cpu":
                entries[key] = value.clone()

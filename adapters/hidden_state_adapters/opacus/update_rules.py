"""Update rules of torch: plain SGD, which bounds are about, or any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from hidden_state_accountants import UnsupportedRunError

NEUTRAL = {"momentum": 0, "nesterov": False, "maximize": False}
"""Options of SGD that make it another rule, with the values at which they do not."""


class UnsupportedUpdateError(UnsupportedRunError):
    """The wrapped optimizer moves in a way that no last-iterate theorem covers.

    Args:
        what: Sentence on what was expected and what was got.
        why: Reason why it matters, and what to do.
    """

    def __init__(self, what: str, why: str):
        super().__init__(f"{what}: {why}")
        self.what = what


def sgd_options(optimizer: Optimizer) -> dict[str, float]:
    """Returns "lr" and "weight_decay" of a plain SGD optimizer, which all its groups share.

    Args:
        optimizer: Optimizer inside a DPOptimizer.

    Raises:
        UnsupportedUpdateError: It is not exactly torch.optim.SGD, uses momentum, nesterov or
            maximize, its groups differ in an option, or it has step hooks (its own or global).
    """
    if type(optimizer) is not SGD:
        raise UnsupportedUpdateError(
            f"Expected torch.optim.SGD, got {type(optimizer).__name__}",
            "no last-iterate theorem here covers another update rule. Use plain SGD, or account "
            "every step with a stock PrivacyEngine.",
        )
    first, *others = optimizer.param_groups
    for index, group in enumerate(others, 1):
        for name in sorted((set(first) | set(group)) - {"params"}):
            if group.get(name) != first.get(name):
                raise UnsupportedUpdateError(
                    f"Expected equal options in all parameter groups, got {name} = "
                    f"{first.get(name)!r} in group 0 and {group.get(name)!r} in group {index}",
                    "the theorems contract all parameters alike. Use one group.",
                )
    for name, neutral in NEUTRAL.items():
        value = first.get(name, neutral)
        if value != neutral:
            remedy = f"Use torch.optim.SGD(params, lr, weight_decay=...) without {name}"
            if name == "momentum":
                remedy += (
                    ", and OneCycleLR or CyclicLR with cycle_momentum=False (they set it otherwise)"
                )
            raise UnsupportedUpdateError(
                f"Expected {name} = {neutral}, got {value!r}",
                f"no last-iterate theorem here covers it. {remedy}.",
            )
    refuse_step_hooks(optimizer)
    return {"lr": float(first["lr"]), "weight_decay": float(first["weight_decay"])}


def update_of(optimizer: DPOptimizer, batch_size: float) -> dict[str, float]:
    """Returns the `learning_rate` and `weight_decay` of a step of plain SGD, as events have them.

    Args:
        optimizer: Optimizer of Opacus, which divides by expected_batch_size or not at all.
        batch_size: Number of records that an event divides by.

    Raises:
        UnsupportedUpdateError: The wrapped optimizer moves in another way.
    """
    options = sgd_options(optimizer.original_optimizer)
    divisor = optimizer.expected_batch_size if optimizer.loss_reduction == "mean" else 1
    scale = batch_size / float(divisor)  # type: ignore[arg-type]
    rate, decay = options["lr"] * scale, options["weight_decay"] / scale
    if not 0 <= rate * decay < 1:
        raise UnsupportedUpdateError(
            f"Expected learning_rate * weight_decay < 1, got {rate * decay:g}",
            "the decay would turn the parameters around. Lower one of them.",
        )
    return {"learning_rate": rate, "weight_decay": decay}


def rule_of(optimizer: Optimizer) -> str:
    """Returns the name of an optimizer, with what makes it another one than plain SGD."""
    name = type(optimizer).__name__
    if type(optimizer) is not SGD:
        return name
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    if any(group != groups[0] for group in groups[1:]):
        return f"{name} with parameter groups that differ"
    others = [f"{k} = {groups[0][k]}" for k, v in NEUTRAL.items() if groups[0].get(k, v) != v]
    if not (others or 0 <= groups[0]["lr"] * groups[0]["weight_decay"] < 1):
        others = ["learning_rate * weight_decay >= 1"]
    return name + (f" with {', '.join(others)}" if others else "")


def refuse_step_hooks(optimizer: Optimizer) -> None:
    """Raises UnsupportedRunError if hooks of the optimizer, or of all, can change the update."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if getattr(optimizer, name, None):
            raise UnsupportedUpdateError(
                f"Expected an {type(optimizer).__name__} optimizer without step hooks, got one "
                "registered with register_step_pre_hook or register_step_post_hook",
                "it can change the update unseen. Remove it.",
            )
    for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
        for hook in hooks.values():
            # torch's profiler counts steps with one, and stock engines look who takes them.
            known = "torch.", "hidden_state_adapters."
            if not getattr(hook, "__module__", "").startswith(known):
                raise UnsupportedUpdateError(
                    f"Expected no step hooks for all optimizers, got {hook!r} from "
                    "register_optimizer_step_pre_hook or register_optimizer_step_post_hook",
                    "it can change the update unseen. Remove it.",
                )


def move_by_any_rule(base: Optimizer) -> None:
    """Lets the wrapped optimizer move what is trained; old gradients of the rest go."""
    for group in base.param_groups:
        for param in group["params"]:
            if not param.requires_grad:
                param.grad = None
    base.step()


def move_by_sgd(
    base: Any,
    iterate: Sequence[torch.Tensor],
    params: Sequence[nn.Parameter],
    rate: float,
    decay: float = 0.0,
) -> None:
    """Makes a step of plain SGD; gradients are switched off where it is called.

    Args:
        base: Wrapped torch.optim.SGD.
        iterate: Tensors that are moved.
        params: Parameters with the noisy gradient of each of them.
        rate: Learning rate of these gradients.
        decay: Product of learning rate and weight decay.
    """
    for own, param in zip(iterate, params, strict=True):
        if decay:
            own.mul_(1 - decay)
        own.add_(param.grad, alpha=-rate)  # type: ignore[arg-type]
    base._opt_called = True  # what torch's schedulers look for before they warn


def _holds_tensors(part: Mapping[str, Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in part.values())


def _is_fresh(part: Mapping[str, Any]) -> bool:
    """Tells whether the state of a parameter is from before the first step, as Adagrad's may be."""
    if "step" in part:
        return float(part["step"]) == 0
    return not _holds_tensors(part)


def refuse_moments(optimizer: Optimizer) -> None:
    """Raises UnsupportedRunError if an optimizer took steps that nobody accounts."""
    if not all(map(_is_fresh, optimizer.state.values())):
        raise UnsupportedRunError(
            f"Expected a {type(optimizer).__name__} that took no step, got one with a state "
            "(momentum, moments): it may hold gradients without noise. Construct a new one; "
            "engine.load_checkpoint restores the state of a run."
        )


def refuse_loaded_moments(state_dict: Mapping[str, Any]) -> None:
    """Raises UnsupportedRunError for moments that are not part of an engine's checkpoint."""
    if any(map(_holds_tensors, state_dict["state"].values())):
        raise UnsupportedRunError(
            "Expected engine.load_checkpoint, got load_state_dict with momentum or moments: "
            "from elsewhere they may hold gradients without noise, which the steps would show."
        )

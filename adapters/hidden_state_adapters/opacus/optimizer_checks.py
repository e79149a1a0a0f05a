"""What the wrapped optimizer and its gradients must look like; used by both ways to account."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.flat_clip import OPACUS_CLIP_OFFSET, gradient_norms
from hidden_state_adapters.opacus.precision_checks import check_arithmetic

# Rounding in float32 of a norm that is exactly at its bound.
_SLACK = 1e-6

_FORBIDDEN = {"momentum": 0, "dampening": 0, "nesterov": False, "maximize": False}


def sgd_options(optimizer: Optimizer) -> dict[str, Any]:
    """The options that all parameter groups of a plain SGD optimizer share.

    Args:
        optimizer: The optimizer inside a DPOptimizer.

    Returns:
        The options of the groups; "lr" and "weight_decay" as floats.

    Raises:
        UnsupportedRunError: It is not exactly torch.optim.SGD, uses momentum, dampening, nesterov
            or maximize, its groups differ in an option, or it has step hooks (its own or global).
    """
    if type(optimizer) is not SGD:
        raise UnsupportedRunError(
            f"Expected torch.optim.SGD, got {type(optimizer).__name__}: no last-iterate theorem "
            "here covers another update rule (it keeps a state that depends on all earlier "
            "gradients). Use plain SGD, or account every step with a stock PrivacyEngine."
        )
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    for group in groups:
        for name in ("lr", "weight_decay"):
            group[name] = float(group[name])
    for index, group in enumerate(groups[1:], 1):
        for name in sorted(set(groups[0]) | set(group)):
            if group.get(name) != groups[0].get(name):
                raise UnsupportedRunError(
                    f"Expected equal options in all parameter groups, got {name} = "
                    f"{groups[0].get(name)!r} in group 0 and {group.get(name)!r} in group {index}: "
                    "the theorems contract all parameters alike. Use one group."
                )
    for name, neutral in _FORBIDDEN.items():
        value = groups[0].get(name, neutral)
        if value != neutral:
            raise UnsupportedRunError(
                f"Expected {name} = {neutral}, got {value!r}: no last-iterate theorem here covers "
                f"it. Use torch.optim.SGD(params, lr, weight_decay=...) without {name}."
            )
    refuse_step_hooks(optimizer)
    return groups[0]


def refuse_step_hooks(optimizer: Optimizer) -> None:
    """Raises UnsupportedRunError if hooks of the optimizer, or of all, can change the update."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if getattr(optimizer, name, None):
            raise UnsupportedRunError(
                f"Expected an {type(optimizer).__name__} optimizer without step hooks, got one "
                "registered with register_step_pre_hook or register_step_post_hook: it can change "
                "the update unseen. Remove it."
            )
    hooks = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    foreign = [h for h in hooks if not getattr(h, "__module__", "").startswith("torch.")]
    if foreign:  # torch's profiler counts steps with one
        raise UnsupportedRunError(
            f"Expected no step hooks for all optimizers, got {foreign[0]!r} from "
            "register_optimizer_step_pre_hook or register_optimizer_step_post_hook: it can change "
            "the update unseen. Remove it."
        )


def check_precision(name: str, tensor: torch.Tensor) -> None:
    """Raises UnsupportedRunError unless `tensor` is float32 or float64."""
    if tensor.dtype not in (torch.float32, torch.float64):
        raise UnsupportedRunError(
            f"Expected {name} in float32 or float64, got {tensor.dtype}: coarse rounding makes the "
            "update expand small distances. Train in float32, without autocast."
        )


def gradient_rows(params: list[nn.Parameter]) -> int:
    """The number of per-example gradients of the batch that `params` hold.

    Raises:
        UnsupportedRunError: There are none, several batches were accumulated, the parameters
            disagree, or torch is set to sum them in less than float32.
    """
    check_arithmetic(params)
    rows = set()
    for param in params:
        sample = getattr(param, "grad_sample", None)
        if isinstance(sample, list):
            if len(sample) != 1:
                raise UnsupportedRunError(
                    f"got the gradients of {len(sample)} batches, expected 1. Call "
                    "optimizer.zero_grad() after every step and backward() once per batch: "
                    "gradient accumulation is not accounted."
                )
            sample = sample[0]
        if sample is None:
            raise UnsupportedRunError(
                "got no per-example gradients for a trainable parameter. Call the private model in "
                "train() mode and backward() before step(), and let every parameter take part."
            )
        check_precision("per-example gradients", sample)
        rows.add(len(sample))
    if len(rows) != 1:
        raise UnsupportedRunError(
            f"got {sorted(rows)} rows of per-example gradients in different parameters, expected "
            "the same number in all."
        )
    return rows.pop()


def largest_gradient_norm(params: list[nn.Parameter]) -> torch.Tensor:
    """The largest norm, over the examples, of the gradient for all `params` together (0-dim)."""
    return gradient_norms(params).max()


def check_gradient_norm(largest: float, lipschitz: float, step: int) -> None:
    """Raises UnsupportedRunError if a gradient is longer than the declared bound (or NaN)."""
    if not largest <= lipschitz * (1 + _SLACK) + torch.finfo(torch.float32).eps * lipschitz:
        raise UnsupportedRunError(
            f"step {step} has a per-example gradient of norm {largest:.8g}, expected at most the "
            f"declared lipschitz = {lipschitz:.8g}. The loss is not the declared one (sum instead "
            "of mean? class weights? a scaled loss?) or the features are longer than declared. The "
            "step was not taken. Correct loss_geometry, criterion or feature_norm."
        )


def check_feature_norm(largest: float, feature_norm: float, step: int) -> None:
    """Raises UnsupportedRunError if features are longer than declared (or NaN)."""
    if not largest <= feature_norm * (1 + _SLACK):
        raise UnsupportedRunError(
            f"step {step} used features of norm {largest:.8g}, expected at most feature_norm = "
            f"{feature_norm:.8g}. The step was not taken. Scale every record down to the declared "
            "norm, after all augmentation."
        )


def check_clip_margin(clip_norm: float, lipschitz: float | None) -> None:
    """Refuses a clip norm so close above `lipschitz` that Opacus' clip still acts.

    Opacus multiplies with min(1, C / (norm + 1e-6)), so gradients that are as long as the bound are
    left alone only if C exceeds it by that much.
    """
    if lipschitz is None or clip_norm < lipschitz:
        return
    needed = lipschitz * (1 + 2 * _SLACK) + OPACUS_CLIP_OFFSET
    if clip_norm < needed:
        raise UnsupportedRunError(
            f"Expected max_grad_norm >= {needed:.9g} or below lipschitz = {lipschitz:.9g}, got "
            f"{clip_norm:.9g}: Opacus clips with min(1, C / (norm + 1e-6)), which still shortens "
            "gradients that are as long as the bound. Raise max_grad_norm a little: "
            f"{needed * (1 + 1e-5):.6g} will do."
        )


def joint_norm(params: list[nn.Parameter]) -> torch.Tensor:
    """The L2 norm of all parameters as one vector, computed in float64 (0-dim)."""
    parts = [torch.linalg.vector_norm(p.detach(), dtype=torch.float64) for p in params]
    return torch.stack([part.to(parts[0].device) for part in parts]).norm()


@torch.no_grad()
def project_on_ball(params: list[nn.Parameter], radius: float) -> None:
    """Projects the JOINT vector of all parameters on the L2 ball around 0, in place.

    The radius is lowered by two units of rounding, so that the result lies inside the ball.
    """
    eps = max(torch.finfo(param.dtype).eps for param in params)
    factor = (radius * (1 - 2 * eps) / joint_norm(params)).clamp(max=1.0)
    for param in params:
        param.mul_(factor.to(device=param.device, dtype=param.dtype))

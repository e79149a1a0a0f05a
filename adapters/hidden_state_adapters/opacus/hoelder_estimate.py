"""How smooth a loss looks at sampled parameters: an estimate that certifies nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from opacus.grad_sample import AbstractGradSampleModule
from torch import nn
from torch.func import functional_call, grad, vmap

from hidden_state_accountants import validate

_Parameters = dict[str, torch.Tensor]


@attrs.frozen
class HoelderEstimate:
    """Estimated constants L with |grad f(x) - grad f(y)| <= L |x - y|**exponent. PROVES NOTHING.

    Every constant is the largest ratio that was seen, so the true one is at least as large, and may
    be larger without bound. An epsilon computed with it may be too small, by any amount. It is for
    exploring which exponent a model is worth proving something about.

    It is not a `LossGeometry`, it is refused where one is expected, and on purpose there is no
    method that makes one. It is a function of the records without noise: show it to nobody who may
    not see the records, and choose nothing by it that is released (that would be a leak which no
    epsilon here counts).

    Attributes:
        exponents: In (0, 1].
        constants: For each exponent the largest ratio.
        num_records: Records whose gradients were compared.
        num_pairs: Pairs of parameters that were compared.
        radius: Of the balls that they are from.
    """

    exponents: tuple[float, ...]
    constants: tuple[float, ...]
    num_records: int
    num_pairs: int
    radius: float

    def __str__(self) -> str:
        rows = [
            f"  exponent {exponent:<5g} constant at least {constant:.6g}"
            for exponent, constant in zip(self.exponents, self.constants, strict=True)
        ]
        head = (
            f"Hoelder constants of the gradient, ESTIMATED from {self.num_pairs} pairs of "
            f"parameters within {self.radius:g} and {self.num_records} records.\n"
            "This certifies nothing (the true constants are larger) and is private."
        )
        return "\n".join([head, *rows])


def estimate_hoelder(
    module: nn.Module,
    criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    exponents: Sequence[float] = (1.0, 0.9, 0.75, 0.5),
    radius: float = 1.0,
    num_points: int = 100,
    centers: Sequence[Mapping[str, torch.Tensor]] | None = None,
    generator: torch.Generator | None = None,
    chunk_size: int | None = 64,
) -> HoelderEstimate:
    """Samples how Hoelder continuous per-record gradients are. An estimate, NOT a bound.

    Around every center draws points uniformly from a ball of trainable parameters, and takes

        max |grad f_i(x) - grad f_i(y)| / |x - y|**exponent

    over all records i, with (x, y) a center and a point, or two points that were drawn one after
    the other. Clipping does not make the ratio larger (it is a projection). Computed in float64 on
    a copy of the module in eval() mode.

    Source: Chien & Li 2024, arXiv 2410.01068, appendix A.13, which takes the parameters along a
    training run as centers, radius 1, 100 points, and the maximum over 20 such runs.

    Formal guarantees: none. The result is not differentially private either. See `HoelderEstimate`.

    Args:
        module: The model; Opacus' wrapper is taken off.
        criterion: Called with the model's output for one record (as a batch of one) and its target.
        inputs: Records, shape (n, ...). PRIVATE, if these are the records that are trained on.
        targets: Shape (n, ...).
        exponents: In (0, 1]; 1 asks for the smoothness.
        radius: Of the balls.
        num_points: Points drawn around each center.
        centers: State dictionaries of the module, of a training run for instance; the current
            parameters by default.
        generator: For the points.
        chunk_size: Records whose gradients are held at once; None for all.

    Raises:
        TypeError, ValueError: An argument has an impossible value.
    """
    exponents = tuple(validate.real("exponents", e, above=0, maximum=1) for e in exponents)
    if not exponents:
        raise ValueError("Expected at least one exponent, got none.")
    radius = validate.real("radius", radius, above=0)
    num_points = validate.integer("num_points", num_points, minimum=1)
    if len(inputs) != len(targets) or not len(inputs):
        raise ValueError(
            f"Expected as many targets as inputs, and at least one, got {len(inputs)} inputs and "
            f"{len(targets)} targets."
        )
    inner = module._module if isinstance(module, AbstractGradSampleModule) else module
    inner = copy.deepcopy(inner).double().eval()
    for part in inner.modules():  # Opacus' backward hooks do not work under vmap
        part._backward_hooks.clear()
        part._backward_pre_hooks.clear()
    gradients = _gradients_of(inner, criterion, _double(inputs), _double(targets), chunk_size)
    if centers is None:
        centers = [inner.state_dict()]
    pairs, largest = 0, torch.zeros(len(exponents), dtype=torch.float64)
    for center in centers:
        start = _trainable(inner, center)
        before, slope_at_start = start, gradients(start)
        slope_before = slope_at_start
        for number in range(num_points):
            point = _in_ball(start, radius, generator)
            slope = gradients(point)
            compared = [(start, slope_at_start), (before, slope_before)][: 1 + (number > 0)]
            for other, slope_at_other in compared:
                distance = _distance(point, other)
                change = (slope - slope_at_other).norm(dim=1).max().cpu()
                ratios = torch.stack([change / distance**e for e in exponents])
                largest = torch.maximum(largest, ratios)
                pairs += 1
            before, slope_before = point, slope
    if not bool(torch.isfinite(largest).all()):
        raise ValueError(
            "Expected finite gradients, got others: at a sampled point the loss overflows or has "
            "no gradient. Lower radius."
        )
    return HoelderEstimate(
        exponents=exponents,
        constants=tuple(largest.tolist()),
        num_records=len(inputs),
        num_pairs=pairs,
        radius=radius,
    )


def _double(values: torch.Tensor) -> torch.Tensor:
    return values.detach().double() if values.is_floating_point() else values.detach()


def _trainable(module: nn.Module, state: Mapping[str, torch.Tensor]) -> _Parameters:
    state = {name.removeprefix("_module."): value for name, value in state.items()}
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    missing = [name for name in names if name not in state]
    if missing or not names:
        raise ValueError(
            f"Expected centers with the trainable parameters {names}, got none for {missing}. Pass "
            "state dictionaries of the module."
        )
    own = dict(module.named_parameters())
    return {
        name: state[name].detach().to(device=own[name].device, dtype=torch.float64).clone()
        for name in names
    }


def _gradients_of(
    module: nn.Module, criterion: Any, inputs: Any, targets: Any, chunk_size: int | None
) -> Callable[[_Parameters], torch.Tensor]:
    """Parameters -> gradients, shape (records, trainable parameters)."""

    def loss(parameters: _Parameters, record: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output = functional_call(module, parameters, (record.unsqueeze(0),))
        return criterion(output, target.unsqueeze(0)).sum()

    per_record = vmap(grad(loss), in_dims=(None, 0, 0), chunk_size=chunk_size)

    def gradients(parameters: _Parameters) -> torch.Tensor:
        parts = per_record(parameters, inputs, targets)
        flat: torch.Tensor = torch.cat([part.flatten(1) for part in parts.values()], dim=1)
        return flat.detach()

    return gradients


def _in_ball(center: _Parameters, radius: float, generator: torch.Generator | None) -> _Parameters:
    """A uniform point of the ball around `center`."""
    device = None if generator is None else generator.device
    direction = {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype, device=device).to(p.device)
        for name, p in center.items()
    }
    dimension = sum(p.numel() for p in center.values())
    uniform = float(torch.rand((), generator=generator, dtype=torch.float64, device=device))
    length = radius * uniform ** (1 / dimension) / _norm(direction)
    return {name: p + length * direction[name] for name, p in center.items()}


def _norm(parameters: _Parameters) -> float:
    return float(torch.stack([p.norm().cpu() for p in parameters.values()]).norm())


def _distance(first: _Parameters, second: _Parameters) -> float:
    return _norm({name: p - second[name] for name, p in first.items()})

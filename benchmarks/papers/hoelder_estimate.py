"""How Hoelder continuous per-record gradients look at sampled parameters. CERTIFIES NOTHING."""

from __future__ import annotations

import torch
from torch.func import functional_call, grad, vmap


def estimate_hoelder(
    module, criterion, inputs, targets, *, exponents, num_points, centers, generator
) -> dict[float, float]:
    """The largest |grad f_i(x) - grad f_i(y)| / |x - y|**exponent that was met, by exponent.

    Around every center draws points uniformly from the unit ball of parameters; (x, y) are a center
    and a point, or two points that were drawn one after the other; the maximum is over all records
    i. The true constants are at least as large, and the result is a function of the records without
    noise. In float64.

    Source: Chien & Li 2024, arXiv 2410.01068, appendix A.13.

    Args:
        module: torch.nn.Module whose parameters are all trained.
        criterion: Called with the output for one record (as a batch of one) and its target.
        inputs: Shape (n, ...).
        targets: Shape (n, ...).
        exponents: In (0, 1].
        num_points: Points around each center.
        centers: State dictionaries of the module.
        generator: For the points.
    """
    inner, inputs = module.double().eval(), inputs.double()

    def loss(parameters, record, target):
        output = functional_call(inner, parameters, (record.unsqueeze(0),))
        return criterion(output, target.unsqueeze(0)).sum()

    per_record = vmap(grad(loss), in_dims=(None, 0, 0))

    def gradients(parameters):
        parts = per_record(parameters, inputs, targets)
        return torch.cat([part.flatten(1) for part in parts.values()], dim=1).detach()

    largest = dict.fromkeys(exponents, 0.0)
    for center in centers:
        start = {name: value.double() for name, value in center.items()}
        before = first = start, gradients(start)
        for _ in range(num_points):
            point = _in_ball(start, generator)
            now = point, gradients(point)
            for other, slope in (first, before):
                distance = _norm({name: p - other[name] for name, p in point.items()})
                change = float((now[1] - slope).norm(dim=1).max()) if distance else 0.0
                for exponent in exponents:
                    ratio = change / distance**exponent if distance else 0.0
                    largest[exponent] = max(largest[exponent], ratio)
            before = now
    return largest


def _in_ball(center, generator):
    """A uniform point of the unit ball around `center`."""
    direction = {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in center.items()
    }
    uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
    length = uniform ** (1 / sum(p.numel() for p in center.values())) / _norm(direction)
    return {name: p + length * direction[name] for name, p in center.items()}


def _norm(parameters) -> float:
    return float(torch.stack([p.norm() for p in parameters.values()]).norm())

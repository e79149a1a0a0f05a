"""Wrappers of a model and a criterion that `make_private` returns in the place of Opacus' own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from opacus.grad_sample import (
    AbstractGradSampleModule,
    GradSampleHooks,
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
)
from opacus.grad_sample.utils import prepare_module
from opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.gradients import NO_GRADIENTS
from hidden_state_adapters.opacus.loader import tensors_of


class _Followed(GradSampleHooks):
    """Opacus' hooks, where every backward pass meets the activations of its own forward pass.

    Opacus takes the latest activations that it has, whatever the gradient is of. Here a hook at the
    output of a training pass remembers them. A pass in eval() mode has none, and layers that work
    in place may follow, of which torch takes no hook of a module.

    Attributes:
        cleared: Function that is told that the gradients of the parameters were cleared.
        outputs: Nodes of the graph that are outputs of layers, where ghost clipping looks, with the
            nodes that are their inputs.
    """

    cleared: Callable[[], None] | None = None
    outputs: dict[Any, list[Any]]
    _clips_sums = False  # into .grad, where a pass that is not trained would leave something

    def add_hooks(self, **options: Any) -> None:
        """Hangs Opacus' hooks on the layers, but for those at the backward pass of a module."""
        super().add_hooks(**options)
        handles = self.autograd_grad_sample_hooks
        for handle in handles[1::2]:
            handle.remove()
        del handles[1::2]

    def capture_activations_hook(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Keeps what went in; its gradients are computed when those of `output` are there."""
        before = len(getattr(module, "activations", ()))
        try:
            super().capture_activations_hook(module, inputs, output)
        except AttributeError as error:
            if all(hasattr(p, "_forward_counter") for p in module.parameters() if p.requires_grad):
                raise
            raise UnsupportedRunError(
                f"Expected the weights of {self._name(module)} that make_private got, got others "
                "(functional_call, a swapped parameter): Opacus would compute no gradients of "
                "them. Call the model itself, with its own weights."
            ) from error
        first = output[0] if isinstance(output, tuple | list) else output
        if not (isinstance(first, torch.Tensor) and first.requires_grad):
            return
        if self._clips_sums:
            into = [x.grad_fn for x in tensors_of(inputs)]
            self.outputs.update((x.grad_fn, into) for x in tensors_of([output]))
        kept: Any = getattr(module, "activations", ())
        if len(kept) > before:
            first.register_hook(functools.partial(self._take_gradient, module, [kept[-1]]))
        elif self._clips_sums and self.hooks_enabled:
            first.register_hook(functools.partial(self._refuse_gradient, module))

    def _take_gradient(self, module: Any, waiting: list[Any], gradient: torch.Tensor) -> None:
        if not self.hooks_enabled:
            return
        if torch.is_grad_enabled() or not waiting:
            raise UnsupportedRunError(
                f"Expected one backward pass through every training pass, got a second one (or "
                f"create_graph=True, a gradient penalty) at {self._name(module)}. Add up the "
                "losses and call backward() once: (first + second).backward()."
            )
        own = waiting.pop()
        others = [kept for kept in module.activations if kept is not own]
        module.activations = [*others, own]  # Opacus takes the last one
        options = {"loss_reduction": self.loss_reduction, "batch_first": self.batch_first}
        self.capture_backprops_hook(module, None, (gradient,), **options)

    def _refuse_gradient(self, module: nn.Module, gradient: torch.Tensor) -> None:
        raise UnsupportedRunError(
            f"Expected no backward pass through {self._name(module)} in eval() mode with "
            'grad_sample_mode="ghost", got one: its gradient would join the clipped sum. Call '
            "model.train() before a training pass. For other passes (the generator of a GAN) use "
            'grad_sample_mode="hooks".'
        )

    def _name(self, module: nn.Module) -> str:
        names = (name for name, part in self._module.named_modules() if part is module)
        return f"{type(module).__name__} {next(names, '')!r}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy trains nothing: its parameters have ordinary gradients."""
        self.__dict__.update(state, hooks_enabled=False, cleared=None)


class PrivateHooks(_Followed):
    """Hooks of a model that is not wrapped."""


class PrivateModule(_Followed, GradSampleModule):
    """A model of which Opacus keeps the gradient of every record."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients as Opacus does; those of the parameters become None."""
        super().zero_grad(set_to_none=True)
        if self.cleared is not None:
            self.cleared()


class GhostModule(_Followed, GradSampleModuleFastGradientClipping):
    """A model whose gradients are clipped in a second backward pass."""

    _clips_sums = True

    def __init__(self, *args: Any, **kwargs: Any):
        self.__dict__["outputs"] = {}
        super().__init__(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "outputs": {}, "_sums": []}

    def check_reached(self, losses: torch.Tensor) -> None:
        """Raises UnsupportedRunError if losses reach a parameter beside its layer's outputs."""
        trained = {id(param) for param in self.parameters() if param.requires_grad}
        waiting, seen = [losses.grad_fn], {None}
        while waiting:
            node: Any = waiting.pop()
            if node in seen:
                continue
            if id(getattr(node, "variable", None)) in trained:
                raise UnsupportedRunError(
                    "Expected a loss of the outputs of the model, got something beside them that "
                    "reaches its parameters (a penalty, another use of the weights, an output that "
                    "is changed in place): it is inside no clip. A penalty is the optimizer's "
                    "weight_decay; use inplace=False in activations."
                )
            seen.add(node)
            into = self.outputs.get(node)
            waiting += [own for own, _ in node.next_functions] if into is None else into
        self.outputs.clear()

    def note_sums(self) -> None:
        """Notes the clipped sums that the second pass left."""
        self.__dict__["_sums"] = self._sums_now()

    def check_sums(self) -> None:
        """Raises UnsupportedRunError if they were changed after the backward pass."""
        pairs = zip(self.__dict__.pop("_sums", ()), self._sums_now(), strict=False)
        has_hooks = any(
            param._backward_hooks or param._post_accumulate_grad_hooks
            for param in self.parameters()
        )
        if has_hooks or any(one is not now or was != count for (one, was), (now, count) in pairs):
            raise UnsupportedRunError(
                "expected the clipped sums of the backward pass in .grad, got others, or hooks on "
                "parameters: what changes them (clip_grad_norm_, a scale, another loss) acts "
                "before the noise. Leave the gradients alone until optimizer.step()."
            )

    def _sums_now(self) -> list[Any]:
        grads = [param.grad for param in self.parameters() if param.requires_grad]
        return [(grad, None if grad is None else grad._version) for grad in grads]

    def get_norm_sample(self) -> torch.Tensor:
        """Returns the norms of the gradients, if every parameter has one of this pass."""
        params: list[Any] = self.trainable_parameters
        if any(p._forward_counter or not hasattr(p, "_norm_sample") for p in params):
            raise UnsupportedRunError(f"The backward pass {NO_GRADIENTS}")
        return super().get_norm_sample()


def private_module(module: Any, *, grad_sample_mode: str, wrap_model: bool, **options: Any) -> Any:
    """Makes the model private, as Opacus' `prepare_module` does, or again where it was before."""
    module = without_hooks(module)
    if grad_sample_mode == "ghost":
        return GhostModule(module, **options)
    del options["max_grad_norm"]
    if grad_sample_mode == "ew":
        return prepare_module(module, "ew", wrap_model, **options)
    made = PrivateModule if wrap_model else PrivateHooks
    return made(module, force_functorch=grad_sample_mode == "functorch", **options)


def without_hooks(module: Any) -> Any:
    """Takes off Opacus' wrapper, and the hooks of a model that was private, or is a copy of one."""
    inner = module._module if isinstance(module, AbstractGradSampleModule) else module
    for handle in vars(inner).pop("autograd_grad_sample_hooks", ()):
        handle.remove()
    if inner is not module:
        module.remove_hooks()
    return inner


class HeadModule(AbstractGradSampleModule):
    """A linear head, whose gradients need no hooks and are not kept in its parameters."""

    @classmethod
    def of(cls, module: Any, **options: Any) -> nn.Module:
        """Returns `module` with this wrapper in the place of another one."""
        module = without_hooks(module)
        if isinstance(module, DistributedDataParallel):
            # It waits for gradients of parameters, which a head does not get.
            module.require_backward_grad_sync = False
        return cls(module, **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients as Opacus does; those of the parameters become None."""
        super().zero_grad(set_to_none=True)

    def remove_hooks(self) -> None:
        """There are none."""


class _RowTensor(DPTensorFastGradientClipping):
    """Losses of records that a loop may scale and add up."""

    def backward(self) -> None:
        """Makes both passes, if the parameters are reached through the layers alone."""
        self.module.check_reached(self.loss_per_sample)
        super().backward()
        self.module.note_sums()


def _of_rows(made: DPTensorFastGradientClipping) -> _RowTensor:
    return _RowTensor(made.module, made.optimizer, made.loss_per_sample, made.loss_reduction)


for _name in ("__truediv__", "__mul__", "__add__", "__sub__", "__rsub__", "__neg__"):
    _own = getattr(DPTensorFastGradientClipping, _name)
    setattr(_RowTensor, _name, lambda *args, _own=_own: _of_rows(_own(*args)))


class RowLosses(DPLossFastGradientClipping):
    """The criterion of ghost clipping, which multiplies the losses of records with clip factors.

    Losses of shape (records, 1) would be broadcast to all pairs of records, and nothing be clipped.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> DPTensorFastGradientClipping:
        """Returns one loss for each record; `backward()` makes both passes."""
        made = super().__call__(*args, **kwargs)
        shape = tuple(made.loss_per_sample.shape)
        if len(shape) != 1:
            raise UnsupportedRunError(
                f"Expected one loss for each record, shape (records,), got {shape[1:]} for each: "
                "the clip factors of all records would multiply each of them. Flatten outputs and "
                "targets (outputs.squeeze(1))."
            )
        return _of_rows(made)

"""What passes through the model in training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from opacus.utils.module_utils import trainable_modules
from torch import nn
from torch.utils._pytree import tree_leaves

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.data.loader import tensors_of
from hidden_state_adapters.opacus.gradients.figures import Figure, any_of, differ
from hidden_state_adapters.opacus.guards import precision
from hidden_state_adapters.opacus.guards.base import Guard, Piece
from hidden_state_adapters.opacus.guards.frozen import FrozenPart
from hidden_state_adapters.opacus.guards.head import HeadWatch
from hidden_state_adapters.opacus.guards.packed import refuse_packed_sequences
from hidden_state_adapters.opacus.guards.parameters import ParameterGuard
from hidden_state_adapters.opacus.guards.parts import ModelParts


class ForwardGuard(Guard):
    """Checks the training passes of a module.

    A pass is one call of the module, or a call of one of its trainable layers by itself. Every pass
    uses the parameters that the last step left, no batch statistics, and in the trainable layers
    the arithmetic of float32 (a frozen backbone may round as it likes: it is a fixed map).

    Args:
        module: The module itself, not Opacus' wrapper.
        head: Measures the features of a linear layer, or None.
        parameters: The watch of the module's parameters.
        frozen: What is kept in eval() mode, or None for nothing.
        checks_convolutions: Whether convolutions and recurrent layers have to be exact, too.

    Attributes:
        inputs: The tensors that the last training pass was called with.
    """

    def __init__(
        self,
        module: nn.Module,
        head: HeadWatch | None = None,
        parameters: ParameterGuard | None = None,
        frozen: FrozenPart | None = None,
        *,
        checks_convolutions: bool = False,
    ):
        self._parameters = parameters
        self._parts = ModelParts(module) if parameters is None else parameters.parts
        self._frozen = FrozenPart(nn.Identity()) if frozen is None else frozen
        self.passes = 0
        self._head = head
        self._has_other_parameters: Figure = False
        self._owners = [part for _, part in trainable_modules(module)]
        self._trainable = [p for p in module.parameters() if p.requires_grad]
        self._names = {part: _trainable_names(part) for part in self._owners}
        self._checks_convolutions = checks_convolutions
        self._has_frozen_backbone = any(not p.requires_grad for p in module.parameters())
        self._is_inside = False
        self.inputs: tuple[torch.Tensor, ...] = ()
        self._handles = [
            module.register_forward_pre_hook(self._count, with_kwargs=True),
            module.register_forward_hook(self._leave, always_call=True),
            *refuse_packed_sequences(module),
        ]
        for part in self._owners:
            if part is not module:
                self._handles.append(part.register_forward_pre_hook(self._count_layer))

    def _is_training(self) -> bool:
        return torch.is_grad_enabled() and any(part.training for part in self._owners)

    @property
    def is_in_training_pass(self) -> bool:
        """Whether what is computed now may belong to the next step."""
        return self.passes > 0 and self._is_training()

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self._is_training():
            return
        self.inputs = tuple(tensors_of((args, kwargs)))
        self._begin()
        self._check_unfrozen(module)
        precision.check_arithmetic(self._trainable)
        if self._checks_convolutions:
            precision.check_convolutions(self._trainable)
        self._is_inside = True

    def _begin(self) -> None:
        """Looks at the model at the start of a pass."""
        self._frozen.hold()
        self._parts.refresh()
        self._frozen.check_batch_norm(self._parts.modules)
        self.passes += 1
        if self._parameters is not None:
            self._has_other_parameters = any_of(
                [self._has_other_parameters, self._parameters.changed()]
            )

    def _check_unfrozen(self, layer: nn.Module) -> None:
        names = self._names.get(layer)
        now = _trainable_names(layer)
        if names not in (None, now) and not set(now) <= set(
            names
        ):  # Opacus' hook on the layer would fail
            raise UnsupportedRunError(
                f"{type(layer).__name__} trains {now}, expected {names} as at the start: the set "
                "of trainable parameters is fixed for a run. Freeze the others again, or start "
                "another run for another set."
            )

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._is_inside = False

    def _count_layer(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._is_training():
            return
        self._check_unfrozen(module)
        precision.check_arithmetic(module.parameters(recurse=False))
        if not self._is_inside:
            self._begin()  # the loop calls a layer by itself

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What is taken on trust about the part of the model that is not trained."""
        if self._has_frozen_backbone:
            yield Assumption.declared(
                "the frozen part of the model is public: it was not fitted to the private records, "
                "and it maps every record by itself"
            )

        if self._frozen:
            yield Assumption.checked("the frozen part of the model in eval() mode")

    def before(self, piece: Piece) -> None:
        """Raises UnsupportedRunError unless the gradients are of one training pass."""
        if self.passes != 1:
            raise UnsupportedRunError(
                f"step {piece.step} follows {self.passes} training passes through the model or a "
                "layer of it, expected 1: every record passes once, in its own row. (A look at the "
                "outputs without torch.no_grad(), gradient accumulation, two losses with a pass "
                "each, a layer that is called by itself, or again by activation checkpointing?) "
                "Evaluate in eval() mode or under torch.no_grad(), step once per pass, and save "
                "memory with BatchMemoryManager instead of checkpointing. Twins, real and made-up "
                "records: make one module private whose forward() calls the network for each, and "
                "call it once."
            )

    def figures(self, piece: Piece) -> Mapping[str, Figure]:
        """Whether a pass used other parameters."""
        return {"perturbed": self._has_other_parameters}

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if one did."""
        if values["perturbed"]:
            raise UnsupportedRunError(
                f"step {piece.step} has gradients at other parameters than the last step left: "
                "they were changed for the training pass and restored. The theorems need the "
                "gradient at the iterate. Leave the parameters alone between the steps."
            )

    def used(self, piece: Piece) -> None:
        """Starts counting for the next piece."""
        self._reset()

    def resume(self, steps: int) -> None:
        """Starts counting anew."""
        self._reset()

    @property
    def largest_feature_norm(self) -> torch.Tensor | None:
        """Of the records since the last reset; None without a measurement."""
        return None if self._head is None else self._head.largest_feature_norm

    @property
    def features(self) -> Sequence[torch.Tensor]:
        """What went into the linear head since the last reset."""
        return () if self._head is None else self._head.features

    def _reset(self) -> None:
        self.passes, self.inputs = 0, ()
        if self._head is not None:
            self._head.reset()
        self._has_other_parameters = False

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        if self._head is not None:
            self._head.remove()

    def __reduce__(self) -> Any:
        return _idle_watch, ()  # a copy of the module trains nothing here


def _trainable_names(layer: nn.Module) -> list[str]:
    parameters = layer._parameters.items()
    # "ew" puts tensors in their place that know no attributes.
    return [name for name, p in parameters if type(p) is nn.Parameter and p.requires_grad]


def _idle_watch() -> ForwardGuard:
    watch = ForwardGuard(nn.Identity())
    watch.close()
    return watch


class SameInputsGuard(Guard):
    """Notices that the blocks of a step are updated on different inputs.

    Args:
        module: The module itself, not Opacus' wrapper.
        forward: The guard of its training passes, already attached.
    """

    def __init__(self, module: nn.Module, forward: ForwardGuard):
        self._forward = forward
        self._first: list[tuple[torch.Tensor, int]] | None = None
        self._differs: Figure = False
        self._handle = module.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self._forward.is_in_training_pass:
            return
        tensors = [x for x in tree_leaves((args, dict(kwargs))) if isinstance(x, torch.Tensor)]
        if self._first is None:
            self._first = [(x, x._version) for x in tensors]
        elif len(tensors) != len(self._first):
            self._differs = True
        else:
            pairs = zip(tensors, self._first, strict=True)
            other = [_is_other(x, old, version) for x, (old, version) in pairs]
            self._differs = any_of([self._differs, *other])

    def before(self, piece: Piece) -> None:
        """Raises UnsupportedRunError if a block was updated on other inputs."""
        if self._differs is True:
            self._refuse(piece)

    def figures(self, piece: Piece) -> Mapping[str, Figure]:
        """As `before`, of inputs on a device."""
        return {"other_inputs": self._differs}

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if a block was updated on other inputs."""
        if values["other_inputs"]:
            self._refuse(piece)

    def _refuse(self, piece: Piece) -> None:
        raise UnsupportedRunError(
            f"step {piece.step} follows training passes on different inputs, expected the same "
            "batch for every block. Draw batch and augmentation outside of the closure."
        )

    def after(self, step: int) -> None:
        """The next step has another batch."""
        self._first, self._differs = None, False

    def resume(self, steps: int) -> None:
        """The next step has another batch."""
        self.after(steps)

    def close(self) -> None:
        """Removes the hook."""
        self._handle.remove()

    def __reduce__(self) -> Any:
        return _idle_inputs_watch, ()  # a copy of the module trains nothing here


def _idle_inputs_watch() -> SameInputsGuard:
    module = nn.Identity()
    return SameInputsGuard(module, ForwardGuard(module))


def _is_other(tensor: torch.Tensor, old: torch.Tensor, version: int) -> Figure:
    if old._version != version:
        return True
    if tensor is old:
        return False
    kinds = [(x.dtype, x.shape, x.device) for x in (tensor, old)]
    return kinds[0] != kinds[1] or differ(tensor.detach(), old.detach())

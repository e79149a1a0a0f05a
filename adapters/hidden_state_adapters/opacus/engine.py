"""Opacus' PrivacyEngine for runs of which only the last iterate is released."""

from __future__ import annotations

import logging
from typing import Any

import dp_accounting
import torch
from dp_accounting import NeighboringRelation
from opacus import PrivacyEngine
from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hidden_state_accountants import (
    Assumption,
    BatchOrder,
    LastIterateDpEvent,
    LossGeometry,
    RunRecorder,
    UnsupportedRunError,
)
from hidden_state_adapters.opacus import arguments, report
from hidden_state_adapters.opacus import optimizer_checks as checks
from hidden_state_adapters.opacus.accountant import MECHANISM, HiddenStateAccountant
from hidden_state_adapters.opacus.cursor import BatchCursor
from hidden_state_adapters.opacus.loaders import fixed_order, private_loader
from hidden_state_adapters.opacus.module_watch import (
    CriterionWatch,
    ForwardWatch,
    ParameterWatch,
    check_batch_norm,
    check_parameters,
)
from hidden_state_adapters.opacus.optimizer import HiddenStateOptimizer, NoiseWatch, RunContext

_logger = logging.getLogger("hidden_state_accountants")


class HiddenStatePrivacyEngine(PrivacyEngine):
    """Trains with fixed batches and accounts the last iterate.

    Every `make_private` starts a run and ends the one before it (whose last iterate counts as
    released). Runs compose.

    Formal guarantees:
      - Relation: `neighboring_relation`, in both directions.
      - Released: the model after the last step of every run, and after every `release()`.
      - Assumptions: `assumptions` lists each as checked at every step, declared by the user, or
        public. What the training loop does differently raises UnsupportedRunError.

    Args:
        neighboring_relation: REPLACE_SPECIAL (a record is replaced by one with zero gradient) or
            REPLACE_ONE. Not ADD_OR_REMOVE_ONE: see `arguments.refuse_add_or_remove`.
        secure_mode: As for Opacus; needs torchcsprng.
        accountant: "hidden_state"; there for the signature of PrivacyEngine.
    """

    def __init__(
        self,
        *,
        neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_SPECIAL,
        secure_mode: bool = False,
        accountant: str = MECHANISM,
    ):
        if accountant != MECHANISM:
            raise ValueError(
                f"Expected accountant = {MECHANISM!r}, got {accountant!r}. For another accountant "
                "use opacus.PrivacyEngine."
            )
        super().__init__(accountant=MECHANISM, secure_mode=secure_mode)
        self.accountant = HiddenStateAccountant(neighboring_relation)
        self._context: RunContext | None = None  # while make_private runs
        self._order: tuple[Any, int] = ((), 0)
        self._noise = NoiseWatch()
        self._optimizer: HiddenStateOptimizer | None = None
        self._modules: tuple[Any, ...] = ()

    # make_private and the seams that it goes through in Opacus

    def make_private(  # type: ignore[override]
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader,
        noise_multiplier: float,
        max_grad_norm: float,
        batch_order: BatchOrder | str = BatchOrder.CYCLIC,
        criterion: Any = None,
        loss_geometry: LossGeometry | str | None = None,
        feature_norm: float | None = None,
        projection_radius: float | None = None,
        poisson_sampling: bool | None = None,
        max_batch_size: int | None = None,
        optimizer_class: type | None = None,
        **opacus_kwargs: Any,
    ) -> tuple[Any, HiddenStateOptimizer, DataLoader]:
        """Wraps model, optimizer and loader, and starts a run.

        Args:
            module: float32 or float64 parameters; batch normalisation in eval() mode only, and no
                buffers that change.
            optimizer: A plain torch.optim.SGD over all trainable parameters. Its weight_decay acts
                outside the clip, so it is decoupled decay. Learning rate and decay may change
                between steps, equally in all groups, on a schedule that is fixed in advance.
            data_loader: Not shuffled. "cyclic" uses its batch_size and its order (public); the
                batch size must divide the data set, or drop_last=True drops the rest. "full" puts
                all records into one batch.
            noise_multiplier: Standard deviation of the noise on the sum of gradients over
                max_grad_norm.
            max_grad_norm: Clip norm of the gradient of one record for all parameters together.
            batch_order: "cyclic" or "full".
            criterion: The loss of the training loop; needed for loss_geometry="auto". The loop has
                to call this very object, once per batch on the whole output of the model.
            loss_geometry: A LossGeometry, "auto" (one nn.Linear and a known criterion) or None,
                which leaves composition only.
            feature_norm: Bound on the norm of every record at the linear layer; checked at every
                step.
            projection_radius: Projects all parameters together on the ball of this radius around 0
                after every step (the event's domain_diameter is twice that).
            poisson_sampling: None or False.
            max_batch_size: None.
            optimizer_class: None.
            **opacus_kwargs: batch_first, loss_reduction, noise_generator, wrap_model,
                grad_sample_mode ("hooks" or "functorch"), clipping ("flat").

        Returns:
            The private model, optimizer and loader. Use these three and no others.

        Raises:
            UnsupportedRunError: No theorem covers the run, or it could not be checked; or the model
                of the run before is not the iterate that was accounted (start again from another
                module object, not from one that was changed by hand).
            TypeError, ValueError: An argument has an impossible value.
        """
        if self._optimizer is not None and self._optimizer.context.recorder.num_steps:
            self._optimizer.check_iterate()  # it counts as released now
        relation = self.accountant.neighboring_relation
        arguments.refuse_add_or_remove(relation)
        order = arguments.supported_order(
            batch_order, poisson_sampling, max_batch_size, optimizer_class
        )
        arguments.check_opacus_arguments(opacus_kwargs)
        arguments.refuse_per_layer_clipping(max_grad_norm)
        if isinstance(optimizer, DPOptimizer):
            optimizer = optimizer.original_optimizer
        inner = module._module if isinstance(module, AbstractGradSampleModule) else module
        arguments.refuse_distributed(module)
        options = checks.sgd_options(optimizer)
        check_parameters(inner, optimizer)
        check_batch_norm(inner)
        reduction = opacus_kwargs.get("loss_reduction", "mean")
        loss, head = arguments.resolve_loss(
            inner, criterion, loss_geometry, feature_norm, reduction
        )
        self._order = fixed_order(data_loader, order)
        size, batch_size = len(self._order[0]), self._order[1]
        diameter = arguments.domain_diameter(inner, projection_radius)
        recorder = RunRecorder(
            batch_order=order,
            batch_size=batch_size,
            dataset_size=size,
            loss=loss,
            domain_diameter=diameter,
        )
        scale = 1 if reduction == "mean" else batch_size
        first = LastIterateDpEvent(
            noise_multiplier=noise_multiplier,
            learning_rate=options["lr"] * scale,
            weight_decay=options["weight_decay"] / scale,
            clip_norm=max_grad_norm,
            batch_size=batch_size,
            dataset_size=size,
            num_steps=1,
            batch_order=order,
            loss=loss,
            domain_diameter=diameter,
        )
        lipschitz = None if loss is None else loss.lipschitz
        checks.check_clip_margin(float(max_grad_norm), lipschitz)
        parameters = ParameterWatch(inner, optimizer)
        forward = ForwardWatch(inner, head, parameters)
        self._context = RunContext(
            recorder=recorder,
            cursor=BatchCursor(
                1 if order is BatchOrder.FULL else size // batch_size,
                data_loader.num_workers * (data_loader.prefetch_factor or 0),
            ),
            batch_size=batch_size,
            parameters=parameters,
            forward=forward,
            noise=self._noise,
            criterion=CriterionWatch(criterion, forward) if loss_geometry == "auto" else None,
            lipschitz=lipschitz,
            feature_norm=feature_norm,
            projection_radius=projection_radius,
        )
        try:
            result = super().make_private(
                module=module,
                optimizer=optimizer,
                data_loader=data_loader,
                noise_multiplier=float(noise_multiplier),
                max_grad_norm=float(max_grad_norm),
                poisson_sampling=False,
                **opacus_kwargs,
            )
        except BaseException:
            self._context.remove_hooks()
            raise
        finally:
            self._context = None
        if self._optimizer is not None:
            self._optimizer.close(
                "This run ended when make_private was called again: its last iterate counts as "
                "released then, and later steps would not be accounted. Use the optimizer that the "
                "last make_private returned."
            )
        self._optimizer = result[1]
        self._modules = (module, inner, result[0])
        self.accountant.add_run(recorder, self._optimizer.check_iterate)
        line = report.no_contraction_line(first, relation)
        if line:
            _logger.warning(line)
        return result

    def _prepare_data_loader(self, data_loader: DataLoader, **kwargs: Any) -> DataLoader:
        # A fixed order draws nothing at random: secure_mode has nothing to secure here.
        assert self._context is not None
        self.dataset: Any = data_loader.dataset
        return private_loader(data_loader, *self._order, self._context.cursor)

    def _prepare_optimizer(  # type: ignore[override]
        self,
        *,
        optimizer: Optimizer,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: int,
        loss_reduction: str = "mean",
        noise_generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> HiddenStateOptimizer:
        assert self._context is not None
        return HiddenStateOptimizer(
            optimizer,
            context=self._context,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=self._context.batch_size,
            loss_reduction=loss_reduction,
            generator=self.secure_rng if self.secure_mode else noise_generator,
            secure_mode=self.secure_mode,
        )

    def make_private_with_epsilon(self, **kwargs: Any) -> Any:
        """Not supported yet.

        Raises:
            UnsupportedRunError: Always: Opacus' calibration assumes Poisson sampling.
        """
        raise UnsupportedRunError(
            "make_private_with_epsilon is not supported yet: Opacus' calibration assumes Poisson "
            "sampling. Find the noise with dp_accounting.calibrate_dp_mechanism and "
            "hidden_state_accountants.LastIterateAccountant, and call make_private."
        )

    # What was spent

    def get_epsilon(self, delta: float) -> float:
        """The epsilon of all runs at `delta`, if the current iterate is the last one.

        Raises:
            UnsupportedRunError: The model is not the iterate that was accounted.
        """
        return self.accountant.get_epsilon(delta)

    @property
    def privacy_event(self) -> dp_accounting.DpEvent:
        """The event that happened: a LastIterateDpEvent, or their composition for several runs.

        Raises:
            ValueError: No step was taken.
        """
        events = [recorder.event() for recorder in self._recorded()]
        return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)

    def _recorded(self) -> list[RunRecorder]:
        recorded = [r for r in self.accountant.recorders if r.num_steps]
        if not recorded:
            raise ValueError("Expected at least one step, got none yet.")
        return recorded

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """Everything that has to be true, each checked at every step, declared or public."""
        context = None if self._optimizer is None else self._optimizer.context
        return report.run_assumptions(self.accountant.guarantee, context)

    def release(self) -> None:
        """Marks the current iterate as released; call it for every model that anybody sees.

        Raises:
            UnsupportedRunError: There is no run, or the model is not the iterate that was
                accounted.
        """
        if self._optimizer is None:
            raise UnsupportedRunError("Expected a run, got none. Call make_private first.")
        self._optimizer.check_iterate()
        self._optimizer.context.recorder.release()

    def report(self, delta: float) -> str:
        """A dozen lines to paste: epsilon, theorem, run, assumptions.

        Raises:
            ValueError: No step was taken.
            UnsupportedRunError: The model is not the iterate that was accounted.
        """
        events = [recorder.event() for recorder in self._recorded()]
        composed = dp_accounting.ComposedDpEvent(
            [event.as_composition(self.accountant.neighboring_relation) for event in events]
        )
        return report.text_report(
            event=events[-1],
            guarantee=self.accountant.guarantee,
            assumptions=self.assumptions,
            delta=delta,
            epsilon=self.get_epsilon(delta),
            epsilon_released=report.standard_epsilon(composed, delta),
            projection_radius=(
                None if self._optimizer is None else self._optimizer.context.projection_radius
            ),
            num_runs=len(events),
        )

    def load_checkpoint(self, *, module: Any, **kwargs: Any) -> dict[str, Any]:
        """Opacus' load_checkpoint; the run then goes on at the batch where it was saved.

        Call `make_private` with the same arguments first, on a fresh engine.

        Raises:
            ValueError: The checkpoint is of another run, or steps were already taken here.
            UnsupportedRunError: `module` is not that of the current run.
        """
        if self._optimizer is not None and not any(module is own for own in self._modules):
            raise UnsupportedRunError(
                "Expected the module of the current run, got another one. Load into the model that "
                "make_private returned."
            )
        if len(self.accountant):
            raise ValueError(
                f"Expected to load into a run without steps, got one with {len(self.accountant)}: "
                "spent budget is never forgotten. Call make_private on a fresh engine, then load."
            )
        checkpoint = super().load_checkpoint(module=module, **kwargs)
        if self._optimizer is not None:
            self._optimizer.resume()
        return checkpoint

"""Opacus' PrivacyEngine for runs of which only the last iterate is released."""

from __future__ import annotations

import logging
import math
import secrets
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import hidden_state_accountants as hsa
from hidden_state_accountants import (
    BatchOrder,
    LastIterateAccountant,
    LastIterateDpEvent,
    LossGeometry,
)
from hidden_state_accountants.runs.contraction import no_contraction_line
from hidden_state_adapters.opacus import checkpoints
from hidden_state_adapters.opacus.accounted_engine import RunOptimizer
from hidden_state_adapters.opacus.branches import note_branch
from hidden_state_adapters.opacus.checkpointed_engine import CheckpointedEngine
from hidden_state_adapters.opacus.declared_run import DeclaredRun, declare_run
from hidden_state_adapters.opacus.ghost_engine import GhostEngine
from hidden_state_adapters.opacus.loaders import private_loader
from hidden_state_adapters.opacus.run_context import RunContext
from hidden_state_adapters.opacus.trained_parameters import (
    check_not_trained_elsewhere,
    note_run,
)

_logger = logging.getLogger("hidden_state_accountants")


class HiddenStatePrivacyEngine(GhostEngine, CheckpointedEngine):
    """Trains in any batch order and accounts the last iterate.

    Every `make_private` starts a run and ends the one before it (whose last iterate counts as
    released). Runs compose.

    Formal guarantees:
      - Relation: `neighboring_relation`, in both directions.
      - Released: the model after the last step of every run, after every `release()`, and every
        checkpoint that was not saved with stays_private=True.
      - Not covered: anything computed from a model and the private records (training loss, accuracy
        on the training data). See `evaluate_on_private_data`.
      - Assumptions: `assumptions` lists each as checked at every step, declared by the user, or
        public. What the training loop does differently raises UnsupportedRunError.

    Args:
        neighboring_relation: REPLACE_SPECIAL (a record is replaced by one with zero gradient),
            REPLACE_ONE, or for Poisson batches ADD_OR_REMOVE_ONE.
        secure_mode: As for Opacus; needs torchcsprng. Secret orders come from the operating
            system's random source either way.
        accountant: "hidden_state"; there for the signature of PrivacyEngine.
    """

    # While make_private runs.
    _declared: DeclaredRun | None = None
    _context: RunContext | None = None

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
        order_seed: int | None = None,
        order_is_secret: bool = False,
        optimizer_class: type | None = None,
        error_max_grad_norm: float | None = None,
        automatic: bool = False,
        gradient_bound: float = math.inf,
        learning_rate_schedule: Any = None,
        num_steps: int | None = None,
        **opacus_kwargs: Any,
    ) -> tuple[Any, RunOptimizer, DataLoader]:
        """Wraps model, optimizer and loader, and starts a run.

        Args:
            module: float32 or float64 parameters; batch normalisation in eval() mode only, and no
                buffers that change.
            optimizer: A plain torch.optim.SGD over all trainable parameters. Its weight_decay acts
                outside the clip, so it is decoupled decay. Learning rate and decay may change
                between steps, equally in all groups, on a schedule that is fixed in advance. (Of a
                DiceSGD run: any SGD, or for DiceAdamOptimizer Adam or AdamW, without a state.)
            data_loader: Gives the data set, the batch size b and the workers. "cyclic" also takes
                its order, which must not be shuffled and is public. For "cyclic", "shuffled_once"
                and "reshuffled" b must divide the data set, or drop_last=True drops the rest of
                the data set (always the same records).
            noise_multiplier: Standard deviation of the noise on the sum of gradients over
                max_grad_norm.
            max_grad_norm: Clip norm of the gradient of one record for all parameters together.
            batch_order: "cyclic"; "full" (all records in every batch); "shuffled_once" (one
                random order for all epochs), "reshuffled" (a new one in every epoch),
                "without_replacement" (b random records in every step) or "poisson" (every record
                by itself with probability b/n in every step; the divisor is b). The last four are
                drawn here and have to stay secret.
            criterion: The loss of the training loop; needed for loss_geometry="auto". The loop has
                to call this very object, once per batch on the whole output of the model.
            loss_geometry: A LossGeometry, "auto" (a linear head, everything else frozen, and a
                known criterion) or None, which leaves composition only.
            feature_norm: Bound on the norm of every record at the linear layer; checked at every
                step.
            projection_radius: Projects all parameters together on the ball of this radius around 0
                after every step (the event's domain_diameter is twice that).
            poisson_sampling: None, or what batch_order says.
            max_batch_size: Cap on "poisson" batches: a uniform subset of this size stays. The
                chance that the cap acts is added to delta.
            order_seed: Fixes a random order, which is then known to whoever knows the seed:
                "shuffled_once" is accounted as cyclic, the others are refused.
            order_is_secret: With order_seed: the seed is random and nobody else will ever know it.
            optimizer_class: None for plain SGD, of which only the last iterate is released;
                DiceSGDOptimizer or DiceAdamOptimizer, of which every iterate is and the error
                stays hidden (docs/dice_sgd.md). They refuse loss_geometry, feature_norm,
                projection_radius, max_batch_size and learning_rate_schedule.
            error_max_grad_norm: DiceSGD only; C2 in units of the MEAN update; None is C1.
            automatic: DiceSGD only; normalises instead of clipping.
            gradient_bound: DiceSGD only; a bound on the norm of every per-example gradient before
                clipping, for all records that could have been in the data; checked at every step.
            learning_rate_schedule: The learning rates that the loop is going to use: a number, one
                number per logical step (not per epoch) or a hidden_state_accountants.Schedule. A
                step with another learning rate is refused. None: that a schedule does not depend on
                the records is your word.
            num_steps: The logical steps that the loop is going to take; more are refused. None:
                that their number does not depend on the records is your word.
            **opacus_kwargs: batch_first, loss_reduction, noise_generator, wrap_model,
                grad_sample_mode ("hooks", "functorch", "ew" or "ghost"), clipping ("flat").

        Returns:
            The private model, optimizer and loader. Use these three and no others. With
            grad_sample_mode="ghost", as in Opacus, the criterion comes before the loader; here it
            is the one that was passed.

        Raises:
            UnsupportedRunError: No theorem covers the run, or it could not be checked; or the model
                of the run before is not the iterate that was accounted (start again from another
                module object, not from one that was changed by hand).
            TypeError, ValueError: An argument has an impossible value.
        """
        declared = declare_run(
            self.accountant.neighboring_relation,
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            max_grad_norm=max_grad_norm,
            batch_order=batch_order,
            criterion=criterion,
            loss_geometry=loss_geometry,
            feature_norm=feature_norm,
            projection_radius=projection_radius,
            poisson_sampling=poisson_sampling,
            max_batch_size=max_batch_size,
            order_seed=order_seed,
            order_is_secret=order_is_secret,
            optimizer_class=optimizer_class,
            error_max_grad_norm=error_max_grad_norm,
            automatic=automatic,
            gradient_bound=gradient_bound,
            learning_rate_schedule=learning_rate_schedule,
            num_steps=num_steps,
            **opacus_kwargs,
        )
        return self._start(declared, noise_multiplier)

    def make_private_with_epsilon(  # type: ignore[override]
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        **arguments: Any,
    ) -> tuple[Any, RunOptimizer, DataLoader]:
        """`make_private` with the smallest noise that meets a target after `epochs` epochs.

        The target is for everything on this engine: what earlier runs spent is composed. It is met
        for the decay that the optimizer has now, for learning_rate_schedule or else the learning
        rate that it has now, without releases in between; another schedule or a release changes
        epsilon, and `get_epsilon` tells.

        Args:
            target_epsilon: Met from below.
            target_delta: In (0, 1).
            epochs: Passes over the private loader that will be trained. Must agree with num_steps
                and learning_rate_schedule.
            **arguments: Of `make_private`, without noise_multiplier.

        Returns:
            As `make_private`; `optimizer.noise_multiplier` is what was found.

        Raises:
            ValueError: No noise meets the target; the text says why. Otherwise as `make_private`.
        """
        if "noise_multiplier" in arguments:
            raise TypeError("Expected no noise_multiplier: make_private_with_epsilon finds it.")
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise ValueError(f"Expected epochs to be an integer >= 1, got {epochs!r}.")
        relation = self.accountant.neighboring_relation
        declared = declare_run(relation, **arguments)
        steps, total = epochs * declared.plan.num_batches, declared.schedule.num_steps
        if total is not None and total != steps:
            raise ValueError(
                f"Expected num_steps = {steps} ({epochs} epochs of {declared.plan.num_batches} "
                f"batches), got {total} declared steps. Make epochs and num_steps (or the length "
                "of learning_rate_schedule) agree."
            )
        spent = [r.event() for r in self.accountant.recorders if r.num_steps]

        def accountant() -> LastIterateAccountant:
            accountant = LastIterateAccountant(relation)
            for event in spent:
                accountant.compose(event)
            return accountant

        before = accountant().get_epsilon(target_delta)
        if before > target_epsilon:
            raise ValueError(
                f"Expected target_epsilon >= {before:.6g} at delta = {target_delta:g}, got "
                f"{target_epsilon!r}: that is what the runs before spent, and no noise undoes it. "
                "Raise the target, or start on a fresh engine with other records."
            )
        noise = hsa.calibrate_noise(
            target_epsilon,
            target_delta,
            lambda noise_multiplier: declared.event(noise_multiplier, steps),
            neighboring_relation=relation,
            make_accountant=accountant,
            tolerance=1e-4,
        )
        return self._start(declared, noise)

    def _start(
        self, declared: DeclaredRun, noise_multiplier: float
    ) -> tuple[Any, RunOptimizer, DataLoader]:
        first = declared.event(noise_multiplier, 1)  # checks the values
        check_not_trained_elsewhere(declared.inner.parameters(), self._token)
        was_refused = False
        if self._optimizer is not None:
            if self._optimizer.context.recorder.num_steps:
                self._optimizer.check_iterate()  # it counts as released now
            was_refused = self._optimizer.was_refused
        self._declared = declared
        self._context = context = declared.start(self._noise, first)
        try:
            result = super().make_private(
                module=declared.module,
                optimizer=declared.optimizer,
                criterion=declared.criterion,
                data_loader=declared.data_loader,
                noise_multiplier=float(noise_multiplier),
                max_grad_norm=float(declared.max_grad_norm),
                poisson_sampling=False,  # the loader is ours
                **declared.opacus_kwargs,
            )
        except BaseException:
            context.remove_hooks()
            raise
        finally:
            self._declared = self._context = None
        if self._optimizer is not None:
            self._optimizer.close(
                "This run ended when make_private was called again: its last iterate counts as "
                "released then, and later steps would not be accounted. Use the optimizer that the "
                "last make_private returned."
            )
        self._optimizer = result[1]
        self._modules = (declared.module, declared.inner, result[0])
        self.accountant.add_run(context.recorder, self._optimizer.check_iterate, declared.schedule)
        note_run(context.parameters.params, self._token, context.recorder)
        if was_refused:
            self.accountant.assume(
                "that the first step of an earlier attempt was refused does not depend on the "
                "records"
            )
        self._run_id = secrets.token_hex(16)
        relation = self.accountant.neighboring_relation
        self._fields = checkpoints.fields_of(declared, noise_multiplier, relation)
        note_branch(self._run_id, context.recorder)
        if isinstance(first, LastIterateDpEvent):
            line = no_contraction_line(first, relation)
            if line:
                _logger.warning(line)
        return result

    def _prepare_data_loader(
        self, data_loader: DataLoader, *, batch_first: bool = True, **kwargs: Any
    ) -> DataLoader:
        assert self._context is not None
        self.dataset: Any = data_loader.dataset
        context = self._context
        return private_loader(data_loader, context.plan, context.cursor, batch_first=batch_first)

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
    ) -> RunOptimizer:
        assert self._declared is not None
        assert self._context is not None
        return self._declared.make_optimizer(
            optimizer,
            self._context,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=self._context.batch_size,
            loss_reduction=loss_reduction,
            generator=self.secure_rng if self.secure_mode else noise_generator,
            secure_mode=self.secure_mode,
        )

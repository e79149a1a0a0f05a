"""Opacus' PrivacyEngine for runs of which only the last iterate is released."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import dp_accounting
import torch
from dp_accounting import NeighboringRelation
from opacus import PrivacyEngine
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import hidden_state_accountants as hsa
from hidden_state_accountants import Assumption, UnsupportedRunError, validate
from hidden_state_accountants.advice import report_lines
from hidden_state_accountants.best_bound import check_covered
from hidden_state_accountants.guarantee import (
    Guarantee,
    Topic,
    merge_assumptions,
    replace_assumptions,
)
from hidden_state_accountants.runs.statement import privacy_statement
from hidden_state_adapters.calibration import calibrate_noise_after
from hidden_state_adapters.opacus.accountant import MECHANISM, HiddenStateAccountant
from hidden_state_adapters.opacus.composed import ComposedOptimizer
from hidden_state_adapters.opacus.declared import DeclaredRun, RunArguments, is_shared
from hidden_state_adapters.opacus.loader import private_loader
from hidden_state_adapters.opacus.noise import GIVEN_NOISE
from hidden_state_adapters.opacus.private_step import PrivateOptimizer
from hidden_state_adapters.opacus.processes import ProcessGroup
from hidden_state_adapters.opacus.registry import AccountedRun, check_later_steps, note_branch
from hidden_state_adapters.opacus.run import (
    SECTION,
    TrainingRun,
    fields_after_loading,
    fields_in_common,
)
from hidden_state_adapters.opacus.sampled import LOSS_OF_RECORDS, SampledRun
from hidden_state_adapters.opacus.sgd import HiddenStateOptimizer
from hidden_state_adapters.opacus.wrappers import HeadModule, RowLosses, private_module
from hidden_state_adapters.public_numbers import warn_of_delta, warn_of_equal, warn_of_longest

_NEVER_BELOW = ("prv", "rdp")  # accountants of Opacus whose epsilon is never the smaller one
_logger = logging.getLogger("hidden_state_accountants")

_NOT_SEEN = "every per-example gradient is that of the loss at one record of the delivered batch"
_AGAIN = (
    "This run ended when make_private was called again: its last iterate counts as released then, "
    "and later steps would not be accounted. Use the optimizer that the last make_private returned."
)


class HiddenStatePrivacyEngine(PrivacyEngine):
    """Trains in any batch order and accounts the last iterate.

    Every `make_private` starts a run and ends the one before it (whose last iterate counts as
    released). Runs compose, those of other engines on the same layers among them: layers take
    their runs along where they are copied or pickled.

    Formal guarantees:
      - Relation: `neighboring_relation`, in both directions.
      - Released: the model after the last step of every run, after every `release()`, and every
        checkpoint that was not saved with stays_private=True.
      - Not covered: anything computed from a model and the private records (training loss, accuracy
        on the training data). See `evaluate_on_private_data`.
      - Assumptions: `assumptions` lists each as checked by the software, declared by the user, or
        public. What the training loop does differently raises UnsupportedRunError.

    Args:
        neighboring_relation: REPLACE_SPECIAL (a record is replaced by one with zero gradient),
            REPLACE_ONE, or ADD_OR_REMOVE_ONE for Poisson batches with a constant rate and divisor
            (`Batches`), by composition.
        secure_mode: Opacus' secure mode, which needs torchcsprng.
        accountant: "hidden_state"; "prv" and "rdp" of a stock script are taken for it: epsilon is
            at most theirs.
    """

    def __init__(
        self,
        *,
        neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
        secure_mode: bool = False,
        accountant: str = MECHANISM,
    ):
        if accountant not in (MECHANISM, *_NEVER_BELOW):
            raise ValueError(
                f"Expected accountant = {MECHANISM!r} (or 'prv' or 'rdp', whose epsilon is never "
                f"the smaller one), got {accountant!r}. Use opacus.PrivacyEngine for another one."
            )
        self._run: TrainingRun | None = None
        self._group: ProcessGroup | None = None
        super().__init__(accountant=MECHANISM, secure_mode=secure_mode)
        self.accountant = HiddenStateAccountant(neighboring_relation)

    @property
    def accountant(self) -> HiddenStateAccountant:
        """The accountant of the runs of this engine; fixed once there is a run."""
        return self._accountant

    @accountant.setter
    def accountant(self, accountant: HiddenStateAccountant) -> None:
        if self._run is not None:
            raise UnsupportedRunError(
                f"Expected engine.accountant to stay what it is, got another "
                f"{type(accountant).__name__}: it would lack the steps of this engine. Make "
                "another engine."
            )
        if not isinstance(accountant, HiddenStateAccountant):
            raise UnsupportedRunError(
                f"Expected a HiddenStateAccountant, got {type(accountant).__name__}, which knows "
                "no run of this engine. Use opacus.PrivacyEngine for another accountant."
            )
        self._accountant = accountant

    # 1. make_private, and the seams that it goes through in Opacus

    def make_private(  # type: ignore[override]
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader,
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float] | str,
        **options: Any,
    ) -> tuple[Any, PrivateOptimizer, DataLoader]:
        """Wraps model, optimizer and loader, and starts a run.

        Args:
            module: Model without buffers that change. Its frozen part is kept in eval() mode, by
                composition batch normalisation only.
            optimizer: Any optimizer over all trainable parameters, by composition; plain
                torch.optim.SGD with equal groups for a hidden state. Its weight_decay is decoupled.
            data_loader: Data set, batch size and workers, and the public order of "cyclic".
            noise_multiplier: Standard deviation of the noise on the sum of gradients over
                max_grad_norm.
            max_grad_norm: Clip norm of the gradient of one record; "auto" is just above the longest
                gradient of a known loss; with clipping="per_layer" a list.
            **options: The following, and for Opacus batch_first, loss_reduction, noise_generator,
                wrap_model, poisson_sampling, grad_sample_mode ("hooks", "functorch", "ew" or
                "ghost"), clipping ("flat" or "per_layer").

                batch_order: A `BatchOrder` in lower case, "poisson" by default, or `Batches` for a
                seed, a cap, or a constant rate and divisor. Secret orders are drawn here.

                criterion, feature_norm: A known loss of one linear head whose features have at most
                this norm, everything before it frozen: the engine computes the steps itself.
                criterion alone: a loss by composition, refused if it mixes records of the first
                batch.

                loss_geometry: A LossGeometry that you proved, of another loss.

                targets: Function that the loop applies to the last tensor of every batch for a
                known loss. It must not depend on the model.

                loop_maps_records: True declares that the loop changes every record by itself before
                the model, and that row i of several passes is made of record i alone, or of none.
                False compares what goes into the model with the batch in every step.

                schedule: Learning rates of the loop: a number, one number per logical step, or a
                hidden_state_accountants.Schedule. A step with another one is refused.

                num_steps: Logical steps of the loop; more are refused.

                after: Maps that follow every step: a Regulariser, whose proximal map acts,
                `BallProjection`, `BoxProjection`, `ParameterBallsProjection`, a function of your
                own, or a list of a prox and a projection.

                mechanism: DiceSGD(...), of which every iterate is released and the error stays
                hidden, or BlockCoordinate(...), whose blocks `optimizer.step(closure)` moves in
                turn.

                distributed: True if the processes of torch.distributed train one model together;
                None reads it off Opacus' DPDDP or torch's DistributedDataParallel.

        Returns:
            The private model, optimizer and loader. Use these three and no others. With
            grad_sample_mode="ghost", as in Opacus, the criterion comes before the loader.

        Raises:
            UnsupportedRunError: No theorem covers the run, or it could not be checked; or the model
                of the run before is not the iterate that was accounted, or that run has no event.
            TypeError, ValueError: An argument has an impossible value.
        """
        arguments = RunArguments.of(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            max_grad_norm=max_grad_norm,
            **options,
        )
        return self._start(arguments, noise_multiplier)

    def make_private_with_epsilon(  # type: ignore[override]
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        epsilon_tolerance: float = 0.01,
        **arguments: Any,
    ) -> tuple[Any, PrivateOptimizer, DataLoader]:
        """`make_private` with the smallest noise that meets a target after `epochs` epochs.

        The target is for everything on this engine, with the decay that the optimizer has now and
        `schedule`, or else the rate that it has now: a step with another rate is refused where
        epsilon depends on it. Another decay or a release changes epsilon.

        Args:
            target_epsilon: Epsilon that is met from below.
            target_delta: Delta of the target, in (0, 1).
            epochs: Passes over the private loader that will be trained.
            epsilon_tolerance: Argument of Opacus, without effect.
            **arguments: Arguments of `make_private`, without noise_multiplier.

        Returns:
            As `make_private`; `optimizer.noise_multiplier` is what was found.

        Raises:
            ValueError: No noise meets the target. Otherwise as `make_private`.
            UnsupportedRunError: A scheduler moves the learning rate, which epsilon depends on, and
                no schedule was passed. Otherwise as `make_private`.
        """
        validate.integer("epochs", epochs, minimum=1)
        target = target_epsilon, target_delta, epochs
        return self._start(RunArguments.of(**arguments), target=target)

    def _start(
        self,
        arguments: RunArguments,
        noise_multiplier: float = 0.0,
        target: tuple[float, float, int] | None = None,
    ) -> tuple[Any, PrivateOptimizer, DataLoader]:
        """Starts a run with this noise or for a target: in all processes, or in none."""
        arguments, relation = _with_optimizer_class(arguments), self.accountant.neighboring_relation
        group: ProcessGroup | None = None
        agreed: Any = lambda prepare, _=None: prepare()  # noqa: E731
        if is_shared(arguments):
            self._group = group = self._group or ProcessGroup()
            group.start_run(self._hear)
            agreed = group.agreed

        def prepare() -> tuple[DeclaredRun, float, list[AccountedRun]]:
            declared, noise = DeclaredRun.of(arguments, relation, group), noise_multiplier
            earlier = self.accountant.earlier_runs(declared.inner)
            if target is not None:
                if "schedule" not in declared.mechanism.refused:
                    schedule = declared.schedule.at_rate_of(declared.optimizer)
                    declared = attrs.evolve(declared, schedule=schedule)
                noise = self._calibrate(declared, earlier, *target)
            planned = declared.schedule.num_steps or 1
            check_covered(declared.mechanism.event(declared, noise, planned), relation)
            if self._run is not None:
                self._run.check_ended()
            return declared, float(noise), earlier

        declared, noise, earlier = agreed(prepare, lambda found: fields_in_common(*found))
        run = TrainingRun(declared, noise)
        try:
            made = agreed(lambda: self._make(run, noise))
        except BaseException:
            run.close("This run was never started.")
            raise
        self._take_over(run, earlier)
        return made  # type: ignore[no-any-return]

    def _calibrate(
        self,
        declared: DeclaredRun,
        earlier: Sequence[AccountedRun],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
    ) -> float:
        """Returns the noise that meets a target after all runs before."""
        steps, total = epochs * declared.plan.num_batches, declared.schedule.num_steps
        if total not in (None, steps):
            raise ValueError(
                f"Expected num_steps = {steps} ({epochs} epochs of {declared.plan.num_batches} "
                f"batches), got {total} declared steps. Make epochs and num_steps (or the length "
                "of schedule) agree."
            )
        warn_of_delta(target_delta, declared.plan.dataset_size)
        before = [*self.accountant.recorders, *(run.recorder for run in earlier)]
        return calibrate_noise_after(
            [recorder.event() for recorder in before if recorder.num_steps],
            target_epsilon,
            target_delta,
            lambda noise: declared.mechanism.event(declared, noise, steps),
            self.accountant.neighboring_relation,
            "start on a fresh engine with other records",
        )

    def _make(self, run: TrainingRun, noise_multiplier: float) -> tuple[Any, ...]:
        """Returns what `make_private` does."""
        declared, arguments = run.declared, run.declared.arguments
        module = self._private_module(run)
        run.modules = (arguments.module, declared.inner, module)
        optimizer = arguments.optimizer_class(
            declared.optimizer,
            run=run,
            noise_multiplier=noise_multiplier,
            max_grad_norm=arguments.clip_norm,
            expected_batch_size=declared.plan.batch_size,
            loss_reduction=arguments.loss_reduction,
            generator=self.secure_rng if self.secure_mode else arguments.noise_generator,
            secure_mode=self.secure_mode,
        )
        loader = private_loader(
            arguments.data_loader, declared.plan, run.cursor, batch_first=arguments.batch_first
        )
        if loader.rows is not None:
            norm = arguments.feature_norm
            if norm is not None and declared.head is declared.inner:
                warn_of_longest(loader.rows.norms(), norm)
            if loader.rows.are_equal():
                warn_of_equal()
        if not arguments.is_ghost:
            return module, optimizer, loader
        criterion = arguments.criterion
        if not isinstance(module, HeadModule):  # there one backward pass is enough
            criterion = RowLosses(module, optimizer, criterion, arguments.loss_reduction)
        return module, optimizer, criterion, loader

    def _private_module(self, run: TrainingRun) -> Any:
        """Returns the model in Opacus' wrapper; that of a head needs no hooks."""
        arguments, passes = run.declared.arguments, run.passes
        module: Any = arguments.module
        module = module._module if isinstance(module, HeadModule) else module
        options = {name: getattr(arguments, name) for name in ("batch_first", "loss_reduction")}
        self.validate(module=module, optimizer=None, data_loader=None)
        if not isinstance(passes, SampledRun):
            return HeadModule.of(module, **options)
        made = private_module(
            module,
            max_grad_norm=arguments.clip_norm,
            grad_sample_mode=arguments.grad_sample_mode or "hooks",
            wrap_model=arguments.wrap_model,
            **options,
        )
        passes.follow(made)
        return made

    def _take_over(self, run: TrainingRun, earlier: Sequence[AccountedRun]) -> None:
        """Accounts a run that started, after those behind its weights; the one before ends."""
        before, self._run = self._run, run
        if before is not None:
            before.close(_AGAIN)
        arguments, accounted = run.declared.arguments, run.accounted
        self.accountant.add_run(run, earlier)
        note_branch(accounted.id, run.record)
        if run.optimizer.is_composed and arguments.criterion is None:
            _logger.warning(
                "criterion= was not passed to make_private, so that you declare: %s. Pass it to "
                "have it looked at.",
                LOSS_OF_RECORDS,
            )
        if earlier:
            text = f"the initial weights come from {len(earlier)} private run(s) of other engines"
            _logger.warning("%s: epsilon is that of all of them together", text)
            accounted.assume(Assumption.checked(f"{text}, which are composed"))
        if arguments.noise_generator is not None:
            accounted.assume(GIVEN_NOISE)
        if before is not None and before.accounted.failure:
            self.accountant.assume(
                "that the first step of an earlier attempt was refused does not depend on the "
                "records"
            )

    # 2. Questions about privacy

    @property
    def privacy_event(self) -> dp_accounting.DpEvent:
        """The event that happened; those of several runs compose.

        Raises:
            ValueError: No step was taken.
            UnsupportedRunError: There is no epsilon; see `get_epsilon`.
        """
        events = self._events()
        return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)

    def _events(self) -> list[dp_accounting.DpEvent]:
        self.accountant.check_not_refused()
        if self._run is not None:
            self._run.check_not_refused()
        events = [run.event() for run in self.accountant.recorders if run.num_steps]
        if not events:
            raise ValueError("Expected at least one step, got none yet.")
        return events

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """Everything that has to be true, each checked by the software, declared or public."""
        return self.guarantee.assumptions

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of all runs, with everything that the engine checked.

        Raises:
            UnsupportedRunError: There is no epsilon; see `get_epsilon`.
        """
        guarantee, run = self.accountant.guarantee, self._run
        own = [Assumption.public("batch size, hyper-parameters", Topic.HYPER_PARAMETERS)]
        if run is None or run.declared.head is None:
            own.insert(0, Assumption.declared(_NOT_SEEN))
        own += [] if run is None else run.assumptions
        listed = merge_assumptions([replace_assumptions(guarantee.assumptions, *own)])
        return attrs.evolve(guarantee, assumptions=listed)

    def report(self, delta: float) -> str:
        """Returns a dozen lines: epsilon, theorem, releases that it covers, run, assumptions.

        Raises:
            ValueError: No step was taken.
            UnsupportedRunError: There is no epsilon; see `get_epsilon`.
        """
        events, guarantee = self._events(), self.guarantee
        self.accountant.warn_of_delta(delta)
        notes = {"update_rule": "any"}  # a checkpoint alone does not say
        if self._run is not None:
            optimizer = self._run.optimizer
            notes = {"update_rule": optimizer.update_rule, "update": optimizer.why_composition}
        lines = [privacy_statement(events, guarantee, delta, **notes)]
        if len(events) == 1:
            lines += report_lines(events[0], guarantee.neighboring_relation, delta)
        return "\n".join(lines)

    def compare(self, delta: float = 1e-5) -> hsa.Comparison:
        """Compares all bounds, and dp-accounting's own accountants, on what happened.

        Args:
            delta: Probability at which epsilon is read, in [0, 1].

        Returns:
            A table with the rows of each run; `print` it.

        Raises:
            ValueError, UnsupportedRunError: As `report`.
        """
        events, relation = self._events(), self.guarantee.neighboring_relation
        return hsa.compare(events, delta, relation)

    def would_gain(self, delta: float = 1e-5, *, epochs: int | None = None) -> hsa.Gain:
        """Tells what hiding the iterates of the current run gains, before it is trained.

        Args:
            delta: Probability at which epsilon is read, in (0, 1).
            epochs: Length of the run; None for `num_steps`, `schedule`, or else the steps so far.

        Returns:
            The epsilons of all iterates and of the last one, the noise at equal epsilon, and the
            change that helps most; `print` it.

        Raises:
            TypeError: The run has a mechanism of which every step counts.
            UnsupportedRunError: There is no run.
            ValueError: Nothing says how long it is.
        """
        run = self._current()
        declared, optimizer = run.declared, run.optimizer
        steps = (epochs or 0) * declared.plan.num_batches or declared.schedule.num_steps
        if steps:
            event = declared.mechanism.event(declared, float(optimizer.noise_multiplier), steps)
        elif run.num_steps:
            event = run.record.event()
        else:
            raise ValueError("Expected epochs, got None: nothing says how long the run is.")
        gain = hsa.would_gain(event, delta, self.accountant.neighboring_relation)
        return attrs.evolve(gain, reason=optimizer.why_composition or gain.reason)

    # 3. What was released or looked at

    def release(self) -> None:
        """Marks the current iterate as released; call it for every model that anybody sees.

        A number that is computed from the iterate and PUBLIC data (accuracy on a public test set)
        is covered by it, too.

        Raises:
            UnsupportedRunError: There is no run, or the model is not the iterate that was
                accounted.
        """
        run = self._current()
        run.check_iterate()
        self._tell("release", str(run.num_steps))

    @contextlib.contextmanager
    def evaluate_on_private_data(self, *, stays_private: bool = False) -> Iterator[None]:
        """Looks at the private records in the middle of training; eval() and no_grad() inside.

        What is computed from an iterate AND the private records (training loss, accuracy on the
        training data) is a further query, which no theorem here covers.

        Args:
            stays_private: True declares that nobody but you sees the number and that it influences
                nothing: not the number of steps, a schedule, which model is released or whether.
                False: from then on no epsilon is given for this engine.

        Raises:
            UnsupportedRunError: There is no run.
        """
        run = self._current()
        if stays_private:
            self._tell(
                "assume",
                "what was computed from private records in evaluate_on_private_data is shown to "
                "nobody and influences nothing",
            )
        else:
            self._tell(
                "refuse",
                f"Something computed from the model and the private records was looked at after "
                f"step {run.num_steps}, and no theorem here covers it. Evaluate on public data "
                "(engine.release()), or declare stays_private=True if nobody sees it.",
            )
        modules = [module for module in run.modules if isinstance(module, nn.Module)]
        modes = [(part, part.training) for module in modules for part in module.modules()]
        try:
            for part, _ in modes:
                part.training = False
            with torch.no_grad():
                yield
        finally:
            for part, mode in modes:
                part.training = mode

    def _current(self) -> TrainingRun:
        if self._run is None:
            raise UnsupportedRunError("Expected a run, got none. Call make_private first.")
        return self._run

    def _tell(self, kind: str, text: str) -> None:
        """Notes something here, and at the next step in the other processes."""
        group = self._current().declared.group
        self._hear(kind, text)
        if group is not None:
            group.tell(kind, text)

    def _hear(self, kind: str, text: str) -> None:
        """Applies an event that this or another process was told since the step before."""
        if kind == "release":
            self._current().record.release()
        elif kind == "assume":
            self.accountant.assume(text)
        else:
            self.accountant.refuse(text)

    # 4. Checkpoints that hold what a run needs to go on, and are compared before they are loaded

    def save_checkpoint(
        self,
        *,
        path: Any,
        module: Any = None,
        optimizer: Any = None,
        stays_private: bool = False,
        include_private_state: bool = False,
        lr_scheduler: Any = None,
        checkpoint_dict: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Saves what the run needs to go on, as Opacus does; loads with weights_only=True.

        Of several processes the first one writes the file; it may be called there only.

        Args:
            path: File to write.
            module: Private model (the default).
            optimizer: Private optimizer (the default).
            stays_private: False counts the checkpoint as a release of the current iterate. True
                says that nobody else ever sees the file, which becomes a listed assumption.
            include_private_state: True stores the secret order of the records, without which
                "shuffled_once" never and "reshuffled" not within an epoch can go on, and the error
                of DiceSGD. Needs stays_private=True.
            lr_scheduler: Learning-rate scheduler to store.
            checkpoint_dict: Entries of your own; not changed.
            **kwargs: noise_scheduler, grad_clip_scheduler, module_state_dict_kwargs,
                torch_save_kwargs: as for Opacus.

        Raises:
            UnsupportedRunError: The model is not the iterate that was accounted.
            ValueError: The secret order or the error would be released.
        """
        if include_private_state and not stays_private:
            raise ValueError(
                "Expected stays_private = True with include_private_state = True, got False: "
                "nobody may know the order of the records, nor the error of DiceSGD."
            )
        own, run = dict(checkpoint_dict or {}), self._run
        if run is not None:
            self._check_module(module)
            if stays_private:
                run.check_iterate()
                text = "checkpoints that were saved with stays_private=True are shown to nobody"
                self._tell("assume", text)
            else:
                self.release()
            module, optimizer = module or run.modules[-1], optimizer or run.optimizer
            own[SECTION] = run.state_dict(include_private=include_private_state)
        if lr_scheduler is not None:
            own["lr_scheduler_state_dict"] = lr_scheduler.state_dict()
        if run is None or run.declared.group is None or run.declared.group.rank == 0:
            super().save_checkpoint(
                path=path, module=module, optimizer=optimizer, checkpoint_dict=own, **kwargs
            )

    def load_checkpoint(
        self,
        *,
        path: Any,
        module: Any = None,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        lr_scheduler: Any = None,
        discard_later_steps: bool = False,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Goes on with the run of a checkpoint, at the batch where it was saved.

        Call `make_private` with the same arguments first, on a fresh engine, in all processes.
        Everything is compared before anything is loaded. The noise is drawn anew. That the run goes
        on in one place only is a listed assumption.

        Args:
            path: File to read, with weights_only=True.
            module: Private model (the default).
            optimizer: Private optimizer (the default).
            noise_scheduler: Opacus' scheduler to restore.
            grad_clip_scheduler: Opacus' scheduler to restore.
            lr_scheduler: Learning-rate scheduler to restore.
            discard_later_steps: True declares that nothing computed by steps after the checkpoint
                was shown to anybody, where this process took such steps and released none of them.
            module_load_dict_kwargs: Options of module.load_state_dict.
            torch_load_kwargs: Options of torch.load.

        Returns:
            The checkpoint, with your own entries.

        Raises:
            ValueError: The checkpoint is of another run, or steps were already taken here.
            UnsupportedRunError: `module` is not that of the current run, or the secret order that
                the run needs was not stored.
        """
        run, group = self._run, None if self._run is None else self._run.declared.group
        self._check_module(module)
        if run is not None:
            module, optimizer = module or run.modules[-1], optimizer or run.optimizer
        stateful = {
            "optimizer": optimizer,
            "noise_scheduler": noise_scheduler,
            "grad_clip_scheduler": grad_clip_scheduler,
            "lr_scheduler": lr_scheduler,
        }

        def load() -> dict[str, Any]:
            options = {"weights_only": True, **(torch_load_kwargs or {})}
            checkpoint: dict[str, Any] = torch.load(path, **options)
            self.accountant.check_empty()
            if run is not None:
                run.check_state(checkpoint, discard_later_steps)
            elif SECTION in checkpoint:
                check_later_steps(checkpoint[SECTION], discard_later_steps)
            if run is not None:
                run.load_private_state(checkpoint[SECTION])
            self.accountant.load_state_dict(checkpoint["privacy_accountant_state_dict"])
            module.load_state_dict(
                checkpoint["module_state_dict"], **(module_load_dict_kwargs or {})
            )
            for name, target in stateful.items():
                if target is not None and f"{name}_state_dict" in checkpoint:
                    target.load_state_dict(checkpoint[f"{name}_state_dict"])
            if run is not None:
                run.resume(checkpoint[SECTION])
                self.accountant.assume(
                    "nothing computed by steps that were taken after a checkpoint and given up "
                    "when it was loaded was shown to anybody"
                )
                self.accountant.assume("the run goes on from a checkpoint in one place only")
            return checkpoint

        if run is None or group is None:
            return load()
        try:
            return group.agreed(load, lambda _: fields_after_loading(run))
        except BaseException as error:
            run.close(f"The processes did not load one checkpoint: {error}")
            raise

    def _check_module(self, module: Any) -> None:
        run = self._run
        if run is None or module is None or any(module is own for own in run.modules):
            return
        raise UnsupportedRunError(
            "Expected the module of the current run, got another one. Use the model that "
            "make_private returned."
        )


def _with_optimizer_class(arguments: RunArguments) -> RunArguments:
    """Returns the arguments with the private optimizer and options of the mechanism."""
    mechanism, made = arguments.mechanism, arguments.optimizer_class
    if mechanism is not None:
        if not hasattr(type(mechanism), "optimizer_class"):
            raise TypeError(
                "Expected mechanism to be DiceSGD(...), BlockCoordinate(...) or None, got "
                f"{mechanism!r}."
            )
        optimizer = arguments.optimizer
        made = mechanism.optimizer_class(getattr(optimizer, "original_optimizer", optimizer))
    elif made is None:
        is_hidden = arguments.asks_for_hidden_iterates
        made = HiddenStateOptimizer if is_hidden else ComposedOptimizer
    is_private = isinstance(made, type) and issubclass(made, PrivateOptimizer)
    if not is_private or "checked" not in vars(made):  # a subclass may do anything
        raise UnsupportedRunError(
            "Expected mechanism = None, DiceSGD(...) or BlockCoordinate(...), or one of their "
            f"optimizers as optimizer_class, got {made!r}: the engine checks their steps only."
        )
    if mechanism is None and made.options is not None:
        mechanism = made.options()
    return attrs.evolve(arguments, mechanism=mechanism, optimizer_class=made)

"""Checkpoints that hold what a run needs to go on, and are compared before they are loaded."""

from __future__ import annotations

from typing import Any

import torch

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus import checkpoints
from hidden_state_adapters.opacus.accounted_engine import AccountedEngine
from hidden_state_adapters.opacus.branches import check_later_steps, note_branch

_PRIVATE_CHECKPOINTS = "checkpoints that were saved with stays_private=True are shown to nobody"


class CheckpointedEngine(AccountedEngine):
    """The part of `HiddenStatePrivacyEngine` that saves and loads runs; see there."""

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
        """Opacus' save_checkpoint with what the run needs to go on; loads with weights_only=True.

        Args:
            path: Where to.
            module: The private model (the default).
            optimizer: The private optimizer (the default).
            stays_private: False counts the checkpoint as a release of the current iterate. True
                says that nobody else ever sees the file, which becomes a listed assumption.
            include_private_state: Also stores the secret order of the records, without which
                "shuffled_once" never and "reshuffled" not in the middle of an epoch can go on; the
                error of a DiceSGD run, which cannot go on without it; and hashes by which noise
                that is used again is noticed where the run goes on. Needs stays_private=True:
                whoever reads the file knows which steps used a record, and the error is data of
                the records without noise.
            lr_scheduler: A learning-rate scheduler to store.
            checkpoint_dict: Your own entries; not changed.
            **kwargs: noise_scheduler, grad_clip_scheduler, module_state_dict_kwargs,
                torch_save_kwargs: as for Opacus.

        Raises:
            UnsupportedRunError: The model is not the iterate that was accounted.
            ValueError: The secret order or the error would be released; or include_private_state
                in the middle of a batch of a DiceSGD run.
        """
        if include_private_state and not stays_private:
            raise ValueError(
                "Expected stays_private = True with include_private_state = True, got False: the "
                "guarantee rests on nobody knowing the order of the records, nor the error of "
                "DiceSGD."
            )
        if self._optimizer is not None:
            self._check_module(module)
            if stays_private:
                self._optimizer.check_iterate()
                self.accountant.assume(_PRIVATE_CHECKPOINTS)
            else:
                self.release()
            module, optimizer = module or self._modules[-1], optimizer or self._optimizer
            checkpoint_dict = {
                **(checkpoint_dict or {}),
                checkpoints.SECTION: checkpoints.run_state(
                    self._optimizer, self._run_id, self._fields, include_private_state
                ),
            }
        if lr_scheduler is not None:
            checkpoint_dict = {
                **(checkpoint_dict or {}), "lr_scheduler_state_dict": lr_scheduler.state_dict(),
            }  # fmt: skip
        super().save_checkpoint(
            path=path,
            module=module,
            optimizer=optimizer,
            checkpoint_dict=checkpoint_dict,
            **kwargs,
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

        Call `make_private` with the same arguments first, on a fresh engine. Everything is compared
        before anything is loaded. The noise is drawn anew: its generator is never stored. An engine
        of this process that had the run takes no more steps.

        Args:
            path: Where from. Read with weights_only=True.
            module: The private model (the default).
            optimizer: The private optimizer (the default).
            noise_scheduler: Opacus' scheduler to restore.
            grad_clip_scheduler: Opacus' scheduler to restore.
            lr_scheduler: A learning-rate scheduler to restore.
            discard_later_steps: Says that nothing computed by steps after the checkpoint was shown
                to anybody. Needed where this process took such steps; never enough where it
                released one of them. Steps of other processes cannot be seen: a listed assumption.
            module_load_dict_kwargs: As for Opacus.
            torch_load_kwargs: As for Opacus.

        Returns:
            The checkpoint, with your own entries.

        Raises:
            ValueError: The checkpoint is of another run, or steps were already taken here.
            UnsupportedRunError: `module` is not that of the current run, or the secret order that
                the run needs was not stored.
        """
        self._check_module(module)
        if len(self.accountant):
            raise ValueError(
                f"Expected to load into a run without steps, got one with {len(self.accountant)}: "
                "spent budget is never forgotten. Call make_private on a fresh engine, then load."
            )
        options = {"weights_only": True, **(torch_load_kwargs or {})}
        checkpoint: dict[str, Any] = torch.load(path, **options)
        state = None
        if self._optimizer is not None:
            state = checkpoints.check_state(
                checkpoint, self._optimizer, self._fields, discard_later_steps
            )
            checkpoints.load_private_state(self._optimizer, state)
            module, optimizer = module or self._modules[-1], optimizer or self._optimizer
        elif checkpoints.SECTION in checkpoint:
            check_later_steps(checkpoint[checkpoints.SECTION], discard_later_steps)
        self.accountant.load_state_dict(checkpoint["privacy_accountant_state_dict"])
        module.load_state_dict(checkpoint["module_state_dict"], **(module_load_dict_kwargs or {}))
        for target, key in (
            (optimizer, "optimizer_state_dict"),
            (noise_scheduler, "noise_scheduler_state_dict"),
            (grad_clip_scheduler, "grad_clip_scheduler_state_dict"),
            (lr_scheduler, "lr_scheduler_state_dict"),
        ):
            if target is not None and key in checkpoint:
                target.load_state_dict(checkpoint[key])
        if self._optimizer is not None and state is not None:
            self._optimizer.noise_multiplier = state["noise_multiplier"]
            self._optimizer.max_grad_norm = state["max_grad_norm"]
            self._optimizer.resume()
            self._run_id = state["run_id"]
            note_branch(self._run_id, self._optimizer.context.recorder)
            self.accountant.assume(
                "nothing computed by steps that were taken after a checkpoint and given up when it "
                "was loaded was shown to anybody"
            )
            self.accountant.assume("the run goes on from a checkpoint in one place only")
        return checkpoint

    def _check_module(self, module: Any) -> None:
        if self._optimizer is None or module is None:
            return
        if not any(module is own for own in self._modules):
            raise UnsupportedRunError(
                "Expected the module of the current run, got another one. Use the model that "
                "make_private returned."
            )

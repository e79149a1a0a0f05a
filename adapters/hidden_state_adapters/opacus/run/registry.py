"""Which weights the private runs of this process left, and how far each run went."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import attrs
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hidden_state_accountants import UnsupportedRunError


class Steps(Protocol):
    """A run, as far as it counts its steps and says which of its iterates are covered."""

    @property
    def num_steps(self) -> int:
        """The number of steps recorded."""
        ...

    @property
    def release_steps(self) -> tuple[int, ...]:
        """Those after which the iterate was released."""
        ...


@attrs.frozen
class _Trainer:
    """A run that trains a parameter: its engine, by a token that refers to nothing, and record."""

    engine: object
    run: Steps
    hides_iterates: bool

    def covers(self, step: int) -> bool:
        """Whether its epsilon is one for the weights that a step left, too."""
        run = self.run
        return not self.hides_iterates or step == run.num_steps or step in run.release_steps


_branches: dict[str, list[Steps]] = {}
"""The records of this process, by run: a run that was resumed has several."""
_trained: Any = WeakIdKeyDictionary()
"""Parameter -> its trainers."""
_left: dict[bytes, tuple[_Trainer, int]] = {}
"""Digest of weights -> who left them, in which step; as far as there may be copies."""
_initial: set[bytes] = set()
"""Digests of weights that runs began with: a model may be set back to them."""


def note_branch(run_id: str, run: Steps) -> None:
    """Remembers that `run` records (a branch of) a run."""
    runs = _branches.setdefault(run_id, [])
    if run not in runs:
        runs.append(run)


def check_later_steps(state: Mapping[str, Any], discard_later_steps: bool) -> None:
    """Raises ValueError if this process took steps after the state that would be forgotten."""
    steps, branches = state["num_steps"], _branches.get(state["run_id"], [])
    released = [r for branch in branches for r in branch.release_steps if r > steps]
    furthest = max((branch.num_steps for branch in branches), default=0)
    if released:
        raise ValueError(
            f"Expected the newest released state of the run, got that of step {steps}: the iterate "
            f"after step {max(released)} was released and would be forgotten. Load the checkpoint "
            "of that step or a later one."
        )
    if furthest > steps and not discard_later_steps:
        raise ValueError(
            f"Expected the newest state of the run, got that of step {steps}: {furthest} steps "
            "were taken. If nothing computed by the later ones was ever shown to anybody, nor made "
            "you go back, say discard_later_steps=True; it becomes a listed assumption."
        )


def note_trained(
    module: nn.Module | None,
    params: Iterable[nn.Parameter],
    engine: object,
    run: Steps,
    *,
    hides_iterates: bool,
) -> None:
    """Remembers that a run of `engine` trains `params`, and which copies are made of them.

    Args:
        module: Holds them; None if it is not known.
        params: What the run trains.
        engine: A token that refers to nothing.
        run: Counts its steps.
        hides_iterates: Whether its epsilon may be none of the iterates before the last.
    """
    for param in params:
        digest = _digest(param)
        if digest is not None and param not in _trained and digest not in _left:
            _initial.add(digest)
        _trained.setdefault(param, []).append(_Trainer(engine, run, hides_iterates))
    for part in () if module is None else module.modules():
        is_trained = any(param in _trained for param in part.parameters(recurse=False))
        if is_trained and _note_copied not in part._state_dict_hooks.values():
            part.register_state_dict_post_hook(_note_copied)


def _note_copied(part: nn.Module, state_dict: Any, prefix: str, metadata: Any) -> None:
    for param in part.parameters(recurse=False):
        _note_left(param)


def _note_left(param: nn.Parameter) -> None:
    """Remembers the weights that `param` has, if a run left them."""
    trainers = [trainer for trainer in _trained.get(param, ()) if trainer.run.num_steps]
    digest = _digest(param) if trainers else None
    if digest is not None and digest not in _initial:
        _left.setdefault(digest, (trainers[-1], trainers[-1].run.num_steps))


def _digest(param: nn.Parameter) -> bytes | None:
    """Of the weights in float32; None where others have the same by chance, as zeros and ones."""
    if not param.is_floating_point() or param.is_meta:
        return None
    values = param.detach().to("cpu", torch.float32).contiguous()
    if not values.numel() or bool((values == values.flatten()[0]).all()):
        return None
    known = f"{tuple(values.shape)}".encode() + values.numpy().tobytes()
    return hashlib.blake2b(known, digest_size=16).digest()


def check_not_trained_elsewhere(
    params: Iterable[nn.Parameter], engine: object, *, copies: bool = True
) -> None:
    """Raises UnsupportedRunError for weights that the epsilon of `engine` does not cover.

    These are weights that another engine of this process left, or that a step in the middle of a
    run of this one left: the initial model, or its frozen part, would carry what those steps
    learned from the records. It happens when a notebook's cell is run again, and when a run starts
    from the weights of another one. Weights are known by their values, wherever they were copied
    to with `state_dict`; those of a parameter that is still there also without it.

    Args:
        params: All parameters of the model, trained or frozen.
        engine: As for `note_trained`.
        copies: Whether equal weights count, too: not where a checkpoint was loaded with its record.
    """
    params = list(params)
    for param in params:
        for trainer in _trained.get(param, ()):
            if trainer.engine is not engine and trainer.run.num_steps:
                raise _of_another_engine(trainer.run.num_steps)
    shapes = {param.shape for param in params if copies}
    for trained in list(_trained):
        if trained.shape in shapes:
            _note_left(trained)
    for param in params if copies and _left else ():
        trainer, step = _left.get(_digest(param) or b"", (None, 0))
        own = [known for known in _trained.get(param, ()) if known.engine is engine]
        if trainer is None or (trainer.engine is not engine and any(k.run.num_steps for k in own)):
            continue  # or they came with a checkpoint, and this engine goes on with the run
        if trainer.engine is not engine:
            raise _of_another_engine(step)
        if not trainer.covers(step):
            raise UnsupportedRunError(
                f"Expected the newest weights of an earlier run, got those that its step {step} "
                f"left: it went on to step {trainer.run.num_steps}, and the weights in between "
                "count as hidden. Start from the newest ones, or call release() before the run "
                "goes on."
            )


def _of_another_engine(num_steps: int) -> UnsupportedRunError:
    return UnsupportedRunError(
        f"Expected a model that no other engine has trained, got one with {num_steps} steps of "
        "another engine (its parameters, or equal weights), whose epsilon this engine does not "
        "know. Call make_private on that engine (its runs compose), or start from weights that no "
        "private run left. To go on with a run, call make_private on a model as it was at the "
        "beginning, then load_checkpoint. If the records are others, start from the weights in "
        "another process: you then declare that they do not depend on the records of this engine."
    )

"""A run that goes on elsewhere: what its record writes down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.runs.base import run_of
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.declared import Declared
from hidden_state_adapters.tf_privacy.lineage import PastRun, digest
from hidden_state_adapters.tf_privacy.refusals import refusal

_SCHEMA = 1


@attrs.frozen(kw_only=True)
class RunState:
    """Where a run stands.

    It holds nothing that was measured on the examples, but for `private`, which is there on request
    only; the digests are of weights that count as released, or that stay private.

    Attributes:
        run_id: Names the run, wherever it goes on.
        optimizer: The `Mechanism.kind` of what makes its steps.
        relation: Name of the relation.
        batch_size: b, in records.
        examples: Of an epoch, likewise.
        declared: By the user, about the examples.
        texts: What else is the user's word about the steps so far.
        num_steps: Taken.
        iterations: Keras' count.
        run: The `Run.state_dict` of the steps.
        earlier: The runs that the initial weights come from.
        weights: Digests of the trained variables.
        fixed: Digests of the others.
        blocks: Indices of the trained variables in every block; empty without blocks.
        private: Hidden state of the optimizer; None if it was not asked for.
    """

    run_id: str
    optimizer: str
    relation: str
    batch_size: int
    examples: int
    declared: Declared
    texts: tuple[str, ...]
    num_steps: int
    iterations: int
    run: Mapping[str, Any]
    earlier: tuple[PastRun, ...]
    weights: tuple[str, ...]
    fixed: tuple[str, ...]
    blocks: tuple[tuple[int, ...], ...]
    private: Mapping[str, Any] | None

    @property
    def named_relation(self) -> NeighboringRelation:
        """The relation."""
        return NeighboringRelation[self.relation]

    def check_fits(self, model: Any, optimizer: Any, batch_size: int, examples: int) -> None:
        """Checks that the run can go on with these.

        Args:
            model: It is built.
            optimizer: The mechanism.
            batch_size: Of its batches.
            examples: Of an epoch.

        Raises:
            UnsupportedRunError: The text says what is another one.
        """
        pairs = {
            "optimizer": (self.optimizer, optimizer.kind, "Compile with what it was made with"),
            "batches (batch_size, examples)": (
                (self.batch_size, self.examples),
                (batch_size, examples),
                "Use the arguments of before",
            ),
        }
        for name, (expected, found, remedy) in pairs.items():
            if expected != found:
                raise refusal(
                    f"The state is of another run: expected {name} = {expected}, got {found}. "
                    f"{remedy}."
                )
        if optimizer.hidden_state and self.private is None:
            raise refusal(
                f"Expected a state with {optimizer.hidden_state}, got one without it: with another "
                "one it would not be the run that is accounted. Save it with "
                "include_private_state=True, stays_private=True."
            )
        of_state = {
            "weights that the last recorded step left": (self.weights, keras_api.trained(model)),
            "variables that are not trained as they were": (
                self.fixed,
                keras_api.fixed(model),
            ),
        }
        for name, (digests, variables) in of_state.items():
            if tuple(map(digest, variables)) != digests:
                raise refusal(
                    f"Expected the {name}, got others. Load the model that was saved together with "
                    "the state."
                )

    def to_plain(self) -> dict[str, Any]:
        """Numbers, strings, lists and dictionaries, for JSON."""
        plain = {field.name: _plain(getattr(self, field.name)) for field in attrs.fields(RunState)}
        return {"schema": _SCHEMA, **plain, "declared": self.declared.to_plain()}

    @classmethod
    def of_plain(cls, plain: Any) -> RunState:
        """Inverse of `to_plain`.

        Raises:
            TypeError, ValueError: It is no such state, or damaged.
        """
        if not isinstance(plain, Mapping):
            raise TypeError(f"Expected the dictionary that state() returned, got {plain!r:.80}.")
        names = {field.name for field in attrs.fields(cls)}
        if plain.get("schema") != _SCHEMA or set(plain) - {"schema"} != names:
            raise ValueError(
                f"Expected the state of a run with schema {_SCHEMA}, got schema "
                f"{plain.get('schema')!r} with the keys {sorted(plain)}."
            )
        try:
            state = cls(
                run_id=str(plain["run_id"]),
                optimizer=str(plain["optimizer"]),
                relation=str(plain["relation"]),
                batch_size=validate.integer("batch_size", plain["batch_size"], minimum=1),
                examples=validate.integer("examples", plain["examples"], minimum=1),
                declared=Declared.of_plain(plain["declared"]),
                texts=tuple(map(str, plain["texts"])),
                num_steps=validate.integer("num_steps", plain["num_steps"], minimum=1),
                iterations=validate.integer("iterations", plain["iterations"], minimum=0),
                run=dict(plain["run"]),
                earlier=tuple(map(PastRun.of_plain, plain["earlier"])),
                weights=tuple(map(str, plain["weights"])),
                fixed=tuple(map(str, plain["fixed"])),
                blocks=tuple(tuple(map(int, block)) for block in plain["blocks"]),
                private=plain["private"],
            )
            steps = run_of(state.run).num_steps
            run_of(state.run).check_relation(state.named_relation)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"The state is damaged: {error}") from error
        if steps != state.num_steps:
            raise ValueError(
                f"The state is damaged: {state.num_steps} steps, but {steps} are recorded."
            )
        return state


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if attrs.has(type(value)):
        return {
            field.name: _plain(getattr(value, field.name)) for field in attrs.fields(type(value))
        }
    return value

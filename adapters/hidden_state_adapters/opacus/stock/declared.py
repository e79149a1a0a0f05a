"""What a user says of a run of a stock engine, and how it is compared with its loader."""

from __future__ import annotations

from typing import Any

import attrs

from hidden_state_accountants import BatchOrder, LossGeometry, UnsupportedRunError, validate
from hidden_state_accountants.events.batch_order import parse_batch_order
from hidden_state_adapters.opacus.data.reading import LoaderReading

# What an order that was read may be called besides: other names of the same batches, and one
# order that differs from a fixed one only in that nobody knows it.
_ALSO = {
    BatchOrder.FULL: set(BatchOrder) - {BatchOrder.POISSON},
    BatchOrder.CYCLIC: {BatchOrder.SHUFFLED_ONCE},
}


def _loss_geometry(value: Any) -> LossGeometry | str | None:
    if value is None or value == "auto" or isinstance(value, LossGeometry):
        return value  # type: ignore[no-any-return]
    raise TypeError(f'Expected loss_geometry to be a LossGeometry, "auto" or None, got {value!r}.')


def _is_a_size(instance: Any, attribute: Any, value: Any) -> None:
    if value is not None:
        validate.integer(attribute.name, value, minimum=1)


def _is_a_radius(instance: Any, attribute: Any, value: Any) -> None:
    if value is not None:
        validate.real(attribute.name, value, above=0)


@attrs.frozen(kw_only=True, eq=False)
class StockDeclaration:
    """The arguments of `declare_run`; its docstring explains every one.

    The numbers and the order are compared with what is read, and decide nothing.
    """

    criterion: Any = None
    feature_norm: float | None = None
    loss_geometry: LossGeometry | str | None = attrs.field(default=None, converter=_loss_geometry)
    projection_radius: float | None = attrs.field(default=None, validator=_is_a_radius)
    data_loader: Any = None
    module: Any = None
    batch_order: BatchOrder | None = attrs.field(
        default=None, converter=attrs.converters.optional(parse_batch_order)
    )
    dataset_size: int | None = attrs.field(default=None, validator=_is_a_size)
    batch_size: int | None = attrs.field(default=None, validator=_is_a_size)

    def __attrs_post_init__(self) -> None:
        if isinstance(self.loss_geometry, LossGeometry) and self.criterion is not None:
            raise ValueError(
                f"Expected a criterion or a LossGeometry, got {self.criterion!r} and "
                f"{self.loss_geometry!r}: one of them says what the loss is. Leave one out."
            )
        if self.loss_geometry == "auto" and self.criterion is None:
            raise ValueError(
                'Expected a criterion with loss_geometry="auto", got none: the constants are '
                "those of the loss that the loop computes. Pass criterion= and feature_norm=."
            )
        if self.feature_norm is not None and self.criterion is None:
            raise ValueError(
                f"Expected a criterion with feature_norm = {self.feature_norm!r}, got none: the "
                "norm says something about a known loss of a linear head. Pass criterion=."
            )

    @property
    def given_loss(self) -> LossGeometry | None:
        """The geometry, if it does not have to be derived from the criterion."""
        return self.loss_geometry if isinstance(self.loss_geometry, LossGeometry) else None

    def compared_with(self, reading: LoaderReading) -> dict[str, Any]:
        """The arguments of the `RunRecorder` of what the loader deals.

        Raises:
            UnsupportedRunError: Something else was declared.
        """
        order = self._compare_order(reading)
        if self.dataset_size not in (None, reading.dataset_size):
            raise _differs("dataset_size", reading, reading.dataset_size, self.dataset_size)
        sizes = {reading.batch_size}
        if reading.sampling_rate is not None and self.batch_size is not None:
            # Opacus rounds: any batch size of a loader with as many batches.
            n, given = reading.dataset_size, self.batch_size
            rounds = round(1 / reading.sampler.sample_rate) in (-(-n // given), n // given)
            sizes |= {given} if rounds else set()
        if self.batch_size is not None and self.batch_size not in sizes:
            raise _differs("batch_size", reading, reading.batch_size, self.batch_size)
        return {**reading.fields, "batch_order": order}

    def _compare_order(self, reading: LoaderReading) -> BatchOrder:
        given, read = self.batch_order, reading.order
        if given not in {None, read, *_ALSO.get(read, ())}:
            assert given is not None
            raise _differs("batch_order", reading, f'"{read.value}"', f'"{given.value}"')
        return BatchOrder.SHUFFLED_ONCE if _is_secret(given, read) else read


def _is_secret(given: BatchOrder | None, read: BatchOrder) -> bool:
    return given is BatchOrder.SHUFFLED_ONCE and read is BatchOrder.CYCLIC


def _differs(name: str, reading: LoaderReading, read: Any, given: Any) -> UnsupportedRunError:
    return UnsupportedRunError(
        f"Expected {name} = {read}, which is what the loader deals ({reading.description}), got "
        f"{given} in declare_run. Leave {name} out, it is read from the loader that make_private "
        "returned; for other batches use another loader, or poisson_sampling= of make_private."
    )

"""The values that methods get and return."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from typing import Any, Iterator, Union

USD = Union[int, float, Decimal]

# The largest amount, in millionths, that the broker's ledger has room for.
_MOST = 2**63 - 1


class _Record(Mapping):
    """A JSON object with its names as attributes and as keys.

    A name that is not there is None as an attribute and a KeyError as a key.
    """

    def __init__(self, *args: Any, **values: Any) -> None:
        object.__setattr__(self, "_values", dict(*args, **values))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._values.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is not to be changed")

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._values!r})"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _Record):
            return self._values == other._values
        return self._values == other

    __hash__ = None  # type: ignore[assignment]


class Profile(_Record):
    """The profile that a sandbox is made of, by the names of the broker's JSON: id, title,
    extension, image, command, limits, network, ttl_ns and so on."""


class MeterQuote(_Record):
    """What a sandbox costs for a duration.

    MeterQuote(0.12) is an amount in USD. By name: amount, setup and per_hour in USD, detail for
    people. A method may return a number of USD in its place.
    """

    def __init__(self, *args: Any, **values: Any) -> None:
        if len(args) == 1 and isinstance(args[0], (int, float, Decimal)):
            args, values = (), {"amount": args[0], **values}
        super().__init__(*args, **values)

    def __float__(self) -> float:
        return float(self._values.get("amount") or 0)


def micros(amount: Any, what: str) -> int:
    """Return an amount of USD in millionths, rounded half to even.

    A float counts as the shortest decimal that it is written with: 0.1 is a tenth. Raises
    ValueError for what is no amount: NaN, infinite, negative, or too large.
    """
    if isinstance(amount, bool) or not isinstance(amount, (int, float, Decimal, str)):
        raise ValueError(f"{what} is {type(amount).__name__}, and no amount in USD")
    if isinstance(amount, float) and not math.isfinite(amount):
        raise ValueError(f"{what} is {amount}, and no amount in USD")
    try:
        exact = Decimal(repr(amount) if isinstance(amount, float) else amount)
    except InvalidOperation:
        raise ValueError(f"{what} is no amount in USD") from None
    if not exact.is_finite() or exact < 0:
        raise ValueError(f"{what} is {exact}, and no amount in USD")
    if exact > Decimal(_MOST) / 1_000_000:
        raise ValueError(f"{what} is more than the ledger has room for")
    return int((exact * 1_000_000).to_integral_value(rounding=ROUND_HALF_EVEN))

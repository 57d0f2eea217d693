"""A guarantee as a dict for strict JSON, and back."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dpjax.accounting import losses, stopping

if TYPE_CHECKING:
    from dpjax.accounting.guarantee import Guarantee

__all__: list[str] = []

_LATER: dict[str, Any] = {
    "nodes": None,
    "other_loss": None,
    "norm": "l2",
    "gradient_gap": None,
    "smoothness": None,
    "dropouts": 0,
    "colluders": 0,
    "sealed": False,
    "sum_rounding": 0.0,
    "secrets": None,
    "over_rounds": None,
    "phases": [],
    "lost_noise": None,
    "unused": 0,
    "phase": 0,
    "custom": [],
}
"""Fields that records leave out where they are this, as those of before had none."""


def to_dict(of: "Guarantee") -> dict[str, Any]:
    """The record as a dict for strict JSON: infinities are the string "inf".

    Args:
        of: The record.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(entry) for entry in value]
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return "inf" if value == math.inf else value

    record = {key: plain(value) for key, value in dataclasses.asdict(of).items()}
    record["phases"] = [to_dict(one) for one in of.phases]
    if of.other_loss is not None:
        record["other_loss"] = {"kind": of.other_loss.kind} | record["other_loss"]
    return {k: value for k, value in record.items() if k not in _LATER or value != _LATER[k]}


def fields(cls: type, record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record, to be checked again by its constructor.

    Args:
        cls: The class of the record.
        record: What `to_dict` returned, perhaps through JSON.

    Raises:
        ValueError: For missing or unknown fields.
    """
    known = dataclasses.fields(cls)
    names = {field.name for field in known}
    required = {field.name for field in known if field.default is dataclasses.MISSING}
    wrong = sorted(set(record) - names) + sorted(required - set(record))
    if wrong:
        raise ValueError(
            f"record has unknown or missing fields: {', '.join(wrong)}; read it with the "
            "version that wrote it"
        )

    def rich(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: rich(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return tuple(rich(entry) for entry in value)
        return math.inf if value == "inf" else value

    values = {key: rich(value) for key, value in record.items()}
    if isinstance(values.get("curve"), dict):
        values["curve"] = stopping.Curve(**values["curve"])
    if isinstance(values.get("other_loss"), dict):
        values["other_loss"] = losses.from_dict(values["other_loss"])
    if "phases" in values:
        values["phases"] = tuple(cls(**fields(cls, one)) for one in values["phases"])
    return values

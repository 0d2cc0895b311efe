"""What the devices of a run hold: their samples and labels, counted in the data that the run names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from folb import data
from folb.data.federation import Federation
from folb.errors import InputError
from folb.experiments.settings import read, settings
from folb.store.directory import RunDirectory

CELLS = 2_000_000  # the most counts in a report, of devices by labels


def holdings(stored: Sequence[RunDirectory]) -> list[dict[str, Any]]:
    """For each run directory the devices' samples and labels, or in words why they are missing."""
    known: dict[str, dict[str, Any]] = {}
    rows = []
    for one in stored:
        if not one.experiment["records"]:
            rows.append({"missing": "the run did not record its devices"})
            continue
        name, devices = one.experiment["dataset"], one.environment["devices"]
        given = one.experiment.get("set", {}).get(name, {})
        key = json.dumps([name, given, devices], default=str)
        if key not in known:
            known[key] = _counted(name, given if isinstance(given, dict) else {}, devices)
        rows.append(known[key])
    return rows


def _counted(name: str, given: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """For each device, how many samples it has to train on, to test on, and of each label."""
    try:
        federation = loaded(name, given)
    except (InputError, TypeError, ValueError, MemoryError) as error:  # settings from a file are not checked
        return {"missing": str(error) or type(error).__name__}
    if devices != federation.N:
        return {"missing": f"the data now have {federation.N:,} devices, and the run had another number"}
    if federation.N * federation.classes > CELLS:
        return {"missing": f"they would take too much room: {federation.N:,} devices, {federation.classes:,} labels"}
    return {
        "train": federation.train.size.tolist(),
        "test": federation.test.size.tolist(),
        **({} if federation.regression else {"labels": federation.labels().tolist()}),
    }


def loaded(name: str, given: Mapping[str, Any]) -> Federation:
    """A dataset with settings from a file, or as text."""
    known = settings(data.constructor(name))
    return data.load(name, **{k: read(k, known[k].type, v) if k in known else v for k, v in given.items()})

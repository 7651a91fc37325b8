"""Clusters described in TOML or JSON, or measured by `zerokit doctor --json`. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerokit.documents import parse_json, parse_toml, read_text
from zerokit.errors import UsageError
from zerokit.planning.hardware import (
    GIGA,
    TERA,
    Cluster,
    Device,
    Link,
    Reading,
    Sharing,
    Way,
    device_named,
    network,
)


def read_cluster(path: Path, *, device: Device | None = None) -> Cluster:
    """A cluster from a TOML or JSON file, or from the output of `zerokit doctor --json`.

    Args:
        path: a file with `device` (a name, or a table), `gpus_per_node`, and the tables `inner` (`gb_per_s` of a rank)
            and `outer` (`gbit_per_s` of a node), both with an optional `latency_us`; `host` (`gb_per_s` of a rank, each
            way while both are in use) and `disk` (`read_gb_per_s` and `write_gb_per_s` of a node), both with an
            optional `room_gb` of a node.
        device: takes the place of the file's.

    Raises `UsageError` that names the first thing that is wrong or missing.
    """
    try:
        text = read_text(path)
        value = parse_json(text) if text.lstrip().startswith("{") else parse_toml(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a cluster file: {error}") from error
    try:
        return _from_doctor(value["facts"], device) if "facts" in value else _from_table(value, device)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path} is not what `zerokit doctor --json` of this version prints: run it anew"
        ) from error


_MOST, _MOST_RANKS = 1e18, 1 << 20
"""Limits of a figure in a file, and of the ranks of a node: whatever is computed from them stays finite."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MOST


def _measured(table: Mapping[str, Any], key: str, *, zero: bool = True) -> float:
    """A figure of the doctor's; raises `ValueError` for what cannot be one, or 0 where there is no `zero`."""
    value = table[key]
    if not _is_number(value) or not (value or zero):
        raise ValueError(f"{key} is {value!r:.60}")
    return float(value)


def _speed(table: Mapping[str, Any], key: str) -> float:
    return _measured(table, key, zero=False) * GIGA


def _figures(given: Any, name: str, keys: Mapping[str, bool]) -> dict[str, float]:
    """The numbers of the table `name`; `keys` are those it may have, and whether it must."""
    table = given if isinstance(given, dict) else {}
    if unknown := [key for key in table if key not in keys]:
        raise UsageError(f"{unknown[0]!r:.60} in [{name}] is unknown: expected {', '.join(keys)}")
    found: dict[str, Any] = {key: table.get(key) for key, needed in keys.items() if needed or key in table}
    for key, value in found.items():
        if not _is_number(value) or value == 0:
            raise UsageError(
                f"[{name}] needs {key}, a number above 0 and below {_MOST:g}, and has {value!r:.60}"
            )
    return found


def _from_table(value: Mapping[str, Any], device: Device | None) -> Cluster:
    known = ("device", "gpus_per_node", "inner", "outer", "host", "disk")
    if unknown := [name for name in value if name not in known]:
        raise UsageError(f"{unknown[0]!r:.60} is unknown: expected {', '.join(known)}")
    if device is None:
        given = value.get("device")
        if given is None:
            raise UsageError('no device: write device = "h100-80", or give --device')
        device = device_named(given) if isinstance(given, str) else _described(given)
    count = value.get("gpus_per_node")
    if type(count) is not int or not 1 <= count <= _MOST_RANKS:
        raise UsageError(f"gpus_per_node is {count!r:.60}: expected the devices of a node, such as 8")
    links = {"inner": device.inner, "outer": None}
    for name, key in (("inner", "gb_per_s"), ("outer", "gbit_per_s")):
        if name in value:
            figures = _figures(value[name], name, {key: True, "latency_us": False})
            if name == "outer":
                link = network(figures[key])
            else:
                link = replace(device.inner or Link(0.0, 1.0), bytes_per_s=figures[key] * GIGA)
            latency_s = figures["latency_us"] * 1e-6 if "latency_us" in figures else link.latency_s
            links[name] = replace(link, latency_s=latency_s)
    ways = {home: _way(value[home], home) if home in value else None for home in ("host", "disk")}
    return Cluster(device, count, links["inner"], links["outer"], None, ways["host"], ways["disk"])


def _way(given: Any, home: str) -> Way:
    keys = ("gb_per_s",) if home == "host" else ("read_gb_per_s", "write_gb_per_s")
    figures = _figures(given, home, {**dict.fromkeys(keys, True), "room_gb": False})
    come, leave = (figures[key] * GIGA for key in (keys[0], keys[-1]))
    room = int(figures["room_gb"] * GIGA) if "room_gb" in figures else None
    return Way(come, leave, home == "disk", room)


def _described(given: Any) -> Device:
    """A device by its figures: `name`, `tflops` by dtype, `memory_gb`, `memory_gb_per_s`."""
    peaks = given.get("tflops") if isinstance(given, dict) else None
    if not isinstance(peaks, dict) or not peaks:
        raise UsageError("[device] needs its dense peaks, such as tflops = { bf16 = 989, fp32 = 67 }")
    flops = _figures(peaks, "device.tflops", dict.fromkeys(("bf16", "fp16", "fp32"), False))
    rest = {key: value for key, value in given.items() if key not in ("name", "tflops")}
    sizes = _figures(rest, "device", dict.fromkeys(("memory_gb", "memory_gb_per_s"), True))
    return Device(
        str(given.get("name", "device")),
        {dtype: peak * TERA for dtype, peak in flops.items()},
        int(sizes["memory_gb"] * GIGA),
        sizes["memory_gb_per_s"] * GIGA,
    )


def _from_doctor(facts: Any, device: Device | None) -> Cluster:
    group = (facts.get("group") if isinstance(facts, dict) else None) or {}
    axes = {axis["axis"]: axis for axis in group.get("axes", ())}
    ways = {"host": _measured_copies(group.get("copies")), "disk": _measured_disk(facts.get("ranks") or ())}
    if device is not None and device.flops and len(facts.get("ranks") or ()) == 1:
        return Cluster(device, 1, host=ways["host"], disk=ways["disk"])
    if not axes:
        raise UsageError(
            "the doctor measured no link: run `zerokit doctor --json` with two ranks or more, such as "
            "--nproc-per-node 2"
        )
    ranks = axes["inner"]["ranks"] if "inner" in axes else 1
    if type(ranks) is not int or not 1 <= ranks <= _MOST_RANKS:
        raise ValueError(f"ranks is {ranks!r:.60}")
    if device is not None and device.flops:
        if group.get("paces") is not None:
            raise UsageError(
                f"the doctor's ranks computed on hosts, and {device.name} is planned: run it on those devices, or "
                "describe their links in a TOML file"
            )
        links = {
            name: Link(
                _measured(axis, "latency_s"), _speed(axis, "gb_per_s") * (ranks if name == "outer" else 1)
            )
            for name, axis in axes.items()  # all exchanged at once
        }
        return Cluster(
            device, ranks, links.get("inner"), links.get("outer"), None, ways["host"], ways["disk"]
        )
    paces = group.get("paces")
    if paces is None:
        raise UsageError("the doctor did not see how fast ranks compute together: run it anew on these hosts")
    alone, together = paces["alone"], paces["together"]
    sharing = Sharing(
        int(_measured(paces, "threads")),
        _speed(alone, "gflops"),
        max(1.0, _measured(together, "block_ms") / _measured(alone, "block_ms", zero=False)),
        max(1.0, _speed(alone, "gb_per_s") / _speed(together, "gb_per_s")),
        _measured(together, "page_s"),
    )
    links = {name: _host_link(axis, ranks if name == "outer" else 1) for name, axis in axes.items()}
    return Cluster(
        device or Device("cpu"),
        ranks,
        links.get("inner"),
        links.get("outer"),
        sharing,
        ways["host"],
        ways["disk"],
    )


def _measured_copies(copies: Mapping[str, Any] | None) -> Way | None:
    if copies is None:
        return None
    both = _speed(copies, "both_gb_per_s")
    return Way(both, both)


def _measured_disk(ranks: Sequence[Mapping[str, Any]]) -> Way | None:
    """The slowest disk of all nodes: one rank of each has measured it."""
    seen = [rank["directory"] for rank in ranks if rank["directory"].get("rates") is not None]
    if not seen:
        return None
    come, leave = (
        min(_measured(one["rates"], f"{name}_bytes_per_s", zero=False) for one in seen)
        for name in ("read", "write")
    )
    return Way(come, leave, in_turn=True, room_bytes=min(int(_measured(one, "free_bytes")) for one in seen))


def _host_link(axis: Mapping[str, Any], at_once: int) -> Link:
    """An axis of hosts, along which so many ranks of a node exchanged at once."""
    speed, units = _speed(axis, "gb_per_s") * at_once, axis.get("units")
    if units is None:
        share = min(0.9, _measured(axis, "slowdown"))
        return Link(_measured(axis, "latency_s"), speed, share=share, relays=False)
    gather, fresh, reduce = (_speed(units, f"{name}_gb_per_s") for name in ("gather", "fresh", "reduce"))
    return Link(_measured(units, "latency_s"), gather, relays=False, reading=Reading(gather, fresh, reduce))

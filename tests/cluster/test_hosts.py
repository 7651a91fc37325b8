"""Lists of hosts are read as Slurm and DeepSpeed write them, others are refused by name; addresses of this machine."""

from __future__ import annotations

import random
import socket
import sys
from pathlib import Path

import psutil
import pytest

from zerokit.cluster.hosts import HostSlots, equal_slots, expand_hostlist, read_hostfile
from zerokit.errors import UsageError
from zerokit.network import address_towards, free_port, interface_of


def test_single_names_and_several_brackets() -> None:
    assert expand_hostlist("gpu[01-03,7],login") == ["gpu01", "gpu02", "gpu03", "gpu7", "login"]
    assert expand_hostlist("r[1-2]n[8-9]") == ["r1n8", "r1n9", "r2n8", "r2n9"]
    assert expand_hostlist("[1-2]") == ["1", "2"]
    assert expand_hostlist("b-[9-11].cluster") == ["b-9.cluster", "b-10.cluster", "b-11.cluster"]
    assert expand_hostlist("") == []


NO_LISTS = "a[1-2|a1-2]|a]1[|a[[1-2]]|a[]|a[2-1]|a[x-y]|a[1-]|a[1,,2]|a b"


def test_what_is_no_list_of_nodes_is_refused() -> None:
    for text in NO_LISTS.split("|"):
        with pytest.raises(UsageError, match="not a list of nodes in Slurm's form"):
            expand_hostlist(text)


def hostfile(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


def test_a_hostfile_has_slots_comments_and_empty_lines(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "\ufeff# ours\nworker-1 slots=4\n\nuser@worker-2   slots=4 # the new one\n")
    hosts = read_hostfile(path)
    assert hosts == [HostSlots("worker-1", 4), HostSlots("user@worker-2", 4)]
    assert equal_slots(hosts) == 4
    assert equal_slots(read_hostfile(hostfile(tmp_path, "a\nb\n"))) is None
    with pytest.raises(UsageError, match="slots differ: a 2, b open; give --nproc-per-node"):
        equal_slots([HostSlots("a", 2), HostSlots("b", None)])
    path.write_bytes(b"\xff\xfe")
    for unreadable in (path, tmp_path / "missing"):
        with pytest.raises(UsageError, match=f"hostfile {unreadable} cannot be read"):
            read_hostfile(unreadable)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a slots=0\n", "line 1 of .*expected: HOST slots=N"),
        ("a\nb slots = 4\n", "line 2 of .*expected: HOST slots=N"),
        ("a max_slots=4\n", "expected: HOST slots=N"),
        ("-oProxyCommand=sh\n", "expected: HOST slots=N"),
        ("a\nb\na\n", "line 3 of .* names a twice"),
        ("# nothing\n", "names no host"),
    ],
)
def test_a_bad_hostfile_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_hostfile(hostfile(tmp_path, text))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are not asked")
def test_an_interface_is_found_by_the_address_that_leads_there() -> None:
    for name in [
        "localhost",
        *(one.address for one in psutil.net_if_addrs()["lo"] if one.family != psutil.AF_LINK),
    ]:
        assert interface_of(address_towards(name)) == "lo"
    assert interface_of("192.0.2.1") is None  # TEST-NET-1: nobody has it


def test_a_free_port_is_none_that_the_system_gives_away() -> None:
    """Between the search and the server's start, outgoing connections take ports of the system's range."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = map(int, given.read_text().split()) if given.exists() else (49_152, 65_535)
    ports = []
    for _ in range(20):
        random.seed(0)  # as programs do on every rank
        ports.append(free_port())
        with socket.socket() as server:
            server.bind(("127.0.0.1", ports[-1]))
    assert not [port for port in ports if first <= port <= last]
    assert len(set(ports)) > 10

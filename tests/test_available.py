"""Memory and processor time within control groups: generated trees of both versions, and a real group."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.control_groups import memory_group
from zerokit.available import available_bytes, cpu_quotas, memory_pools, part_of, sharers

MIB = 1 << 20
NEVER = str((1 << 63) - 4096)
"""Version 1's limit where there is none."""
FREE = 4000
"""The machine's, in MiB."""


@dataclass
class Tree:
    """Files of a machine below a folder."""

    root: Path
    boot: str = "b0"
    groups: list[str] = field(default_factory=list)
    mounts: list[str] = field(default_factory=list)

    def mount(self, kind: str, at: str, options: str = "rw", *, shows: str = "/", own: str = "/") -> None:
        controllers = options.partition(",")[2] if kind == "cgroup" else ""
        self.groups.append(f"{len(self.groups) + 1 if controllers else 0}:{controllers}:{own}")
        shows, escaped = (text.replace(" ", r"\040") for text in (shows, at))
        self.mounts.append(f"9 8 0:30 {shows} {escaped} rw,nosuid shared:3 - {kind} {kind} {options}")
        (self.root / at[1:]).mkdir(parents=True, exist_ok=True)

    def write(self, folder: str, files: Mapping[str, object]) -> None:
        place = self.root / folder[1:]
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / name).write_text(f"{text}\n")

    def v2(
        self, folder: str, limit: object, used: int, cached: int = 0, shmem: int = 0, **more: object
    ) -> None:
        """A group of version 2; sizes in MiB."""
        limits = {"memory.max": limit, "memory.high": "max"} | {
            f"memory.{name}": size for name, size in more.items()
        }
        sizes = {name: size * MIB if isinstance(size, int) else size for name, size in limits.items()}
        stat = f"anon 5\nfile {(cached + shmem) * MIB}\nkernel 7\nshmem {shmem * MIB}"
        self.write(folder, sizes | {"memory.current": used * MIB, "memory.stat": stat})

    def v1(
        self, folder: str, limit: object, used: int, cached: int = 0, shmem: int = 0, above: str = NEVER
    ) -> None:
        stat = (
            f"cache 1\nshmem 0\nhierarchical_memory_limit {above}\ntotal_cache {(cached + shmem) * MIB}\n"
            f"total_shmem {shmem * MIB}\ntotal_inactive_file {MIB}"
        )
        size = limit * MIB if isinstance(limit, int) else limit
        self.write(
            folder, {"memory.limit_in_bytes": size, "memory.usage_in_bytes": used * MIB, "memory.stat": stat}
        )

    def finish(self) -> Path:
        self.write("/proc/self", {"cgroup": "\n".join(self.groups), "mountinfo": "\n".join(self.mounts)})
        self.write("/proc/sys/kernel/random", {"boot_id": self.boot})
        self.write("/proc", {"meminfo": f"MemTotal: {2 * FREE * 1024} kB\nMemAvailable:   {FREE * 1024} kB"})
        return self.root


TOP = "/sys/fs/cgroup"


def slurm_step(tree: Tree) -> int:
    own = "/system.slice/slurmstepd.scope/job_7/step_0/user/task_0"
    tree.mount("cgroup2", TOP, own=own)
    tree.v2(TOP + own, "max", 200)
    tree.v2(f"{TOP}/system.slice/slurmstepd.scope/job_7/step_0", 900, 700, cached=100)
    tree.v2(f"{TOP}/system.slice/slurmstepd.scope/job_7", 1000, 700)
    tree.v2(f"{TOP}/system.slice", "max", 5000)
    return 300  # the step's and the job's are equal


def outer_limit_is_tighter(tree: Tree) -> int:
    tree.mount("cgroup2", TOP, own="/a.slice/b.service")
    tree.v2(TOP + "/a.slice/b.service", 2000, 100)
    tree.v2(TOP + "/a.slice", 1000, 990, cached=60, shmem=300)
    return 70


def throttled_by_high(tree: Tree) -> int:
    tree.mount("cgroup2", TOP, own="/a.slice")
    tree.v2(TOP + "/a.slice", 2000, 100, high=600)
    return 500


def docker_with_its_own_namespace(tree: Tree) -> int:
    tree.mount("cgroup2", TOP)
    tree.v2(TOP, 512, 100, cached=50)
    return 462


def docker_without_a_namespace_v2(tree: Tree) -> int:
    tree.mount("cgroup2", TOP, shows="/docker/abc", own="/docker/abc")
    tree.v2(TOP, 512, 100)
    return 412


def docker_v1(tree: Tree) -> int:
    tree.mount("cgroup", TOP + "/cpu", "rw,cpu,cpuacct", shows="/docker/abc", own="/docker/abc")
    tree.mount("cgroup", TOP + "/memory", "rw,memory", shows="/docker/abc", own="/docker/abc")
    tree.v1(TOP + "/memory", 512, 100, cached=30, shmem=20)
    return 442


def kubernetes_v1_with_a_limit_of_the_pod_alone(tree: Tree) -> int:
    """The pod's group is not seen: the kernel tells its limit, but not what others in it have taken."""
    path = "/kubepods/burstable/pod1/c1"
    tree.mount("cgroup", TOP + "/memory", "rw,memory", shows=path, own=path)
    tree.v1(TOP + "/memory", NEVER, 100, above=str(700 * MIB))
    return 600


def kubernetes_v1_from_the_host(tree: Tree) -> int:
    tree.mount("cgroup", TOP + "/memory", "rw,memory", own="/kubepods/burstable/pod1/c1")
    tree.v1(TOP + "/memory", NEVER, 3000)
    tree.v1(TOP + "/memory/kubepods", NEVER, 2500)
    tree.v1(TOP + "/memory/kubepods/burstable", NEVER, 2500)
    tree.v1(TOP + "/memory/kubepods/burstable/pod1", 800, 500, above=str(800 * MIB))
    tree.v1(TOP + "/memory/kubepods/burstable/pod1/c1", 700, 100, above=str(700 * MIB))
    return 300


def hybrid(tree: Tree) -> int:
    """Version 2 without controllers, and memory in version 1; another controller's name contains its name."""
    tree.mount("cgroup2", TOP + "/unified", own="/user.slice")
    tree.mount("cgroup", TOP + "/systemd", "rw,xattr,name=systemd", own="/user.slice")
    tree.mount("cgroup", TOP + "/x", "rw,memory_other", own="/small")
    tree.mount("cgroup", TOP + "/memory", "rw,memory", own="/user.slice")
    tree.write(TOP + "/unified/user.slice", {"cgroup.procs": 1})
    tree.v1(TOP + "/x/small", 2, 1)
    tree.v1(TOP + "/memory/user.slice", 1500, 200)
    return 1300


def process_outside_of_the_namespace(tree: Tree) -> int:
    tree.mount("cgroup2", TOP, own="/../other")
    tree.v2(TOP, 900, 100)
    tree.v2("/sys/fs/other", 5, 1)  # where `..` would lead
    return 800


def mount_from_outside_of_the_namespace(tree: Tree) -> int:
    tree.mount("cgroup2", TOP, shows="/../..", own="/")
    tree.v2(TOP, 900, 200)
    return 700


def mount_of_another_part(tree: Tree) -> int:
    tree.mount("cgroup2", TOP, shows="/docker/abc", own="/docker/abcdef")
    tree.v2(TOP, 900, 300)
    tree.v2(TOP + "/def", 3, 1)
    return 600


def names_with_spaces_and_colons(tree: Tree) -> int:
    tree.mount("cgroup2", "/mnt/all groups", own="/a b.slice/c:d.scope")
    tree.v2("/mnt/all groups/a b.slice/c:d.scope", 400, 100)
    return 300


def group_that_was_removed(tree: Tree) -> int:
    tree.mount("cgroup2", TOP, own="/a.slice/b.scope (deleted)")
    tree.v2(TOP + "/a.slice", 600, 100)
    return 500


def over_its_limit(tree: Tree) -> int:
    tree.mount("cgroup2", TOP)
    tree.v2(TOP, 100, 150)
    return 0


def unlimited(tree: Tree) -> int:
    tree.mount("cgroup2", TOP, own="/a")
    tree.mount("cgroup", TOP + "/memory", "rw,memory", own="/a")
    tree.v2(TOP + "/a", "max", 9000)
    tree.v1(TOP + "/memory/a", NEVER, 9000)
    return FREE


def larger_than_the_machine(tree: Tree) -> int:
    tree.mount("cgroup2", TOP)
    tree.v2(TOP, 100_000, 1)
    return FREE


def nonsense(tree: Tree) -> int:
    tree.mounts += ["", "not a mount", "9 8 0:1 / /a rw - "]
    tree.mount("cgroup2", TOP, own="/a")
    tree.write(
        TOP + "/a", {"memory.max": "12 apples", "memory.current": "-1", "memory.stat": "file\nshmem x"}
    )
    return FREE


def older_kernel(tree: Tree) -> int:
    tree.mount("cgroup", TOP + "/memory", "rw,memory")
    stat = {"memory.stat": f"cache 1\ntotal_cache {90 * MIB}\ntotal_inactive_file {40 * MIB}"}
    sizes = {"memory.limit_in_bytes": 300 * MIB, "memory.usage_in_bytes": 100 * MIB}
    tree.write(TOP + "/memory", {**stat, **sizes})
    return 240


def unreadable_statistics(tree: Tree) -> int:
    tree.mount("cgroup2", TOP)
    tree.v2(TOP, 300, 100, cached=50)
    (tree.root / "sys/fs/cgroup/memory.stat").unlink()
    return 200


CASES = [
    slurm_step,
    outer_limit_is_tighter,
    throttled_by_high,
    docker_with_its_own_namespace,
    docker_without_a_namespace_v2,
    docker_v1,
    kubernetes_v1_with_a_limit_of_the_pod_alone,
    kubernetes_v1_from_the_host,
    hybrid,
    process_outside_of_the_namespace,
    mount_from_outside_of_the_namespace,
    mount_of_another_part,
    names_with_spaces_and_colons,
    group_that_was_removed,
    over_its_limit,
    unlimited,
    larger_than_the_machine,
    nonsense,
    older_kernel,
    unreadable_statistics,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_tightest_of_all_groups_counts(case, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tree = Tree(tmp_path)
    expected = case(tree)
    assert available_bytes(tree.finish()) == expected * MIB


def test_without_anything_that_says_so_memory_is_unlimited(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == sys.maxsize
    assert cpu_quotas(tmp_path) == {}


@pytest.mark.parametrize("seed", range(20))
def test_generated_groups(seed: int, tmp_path: Path) -> None:
    """Any depth below any top of either version: the least of what the levels leave."""
    choice = random.Random(seed)
    tree, version = Tree(tmp_path), choice.choice((1, 2))
    path = [f"g{level}" for level in range(choice.randint(0, 5))]
    shown = choice.randint(0, len(path))
    top = "/sys/fs/cgroup/any"
    options = "rw,memory" if version == 1 else "rw"
    tree.mount(
        "cgroup" if version == 1 else "cgroup2",
        top,
        options,
        shows="/" + "/".join(path[:shown]),
        own="/" + "/".join(path),
    )
    left = [FREE]
    for level in range(shown, len(path) + 1):
        limit, used, cached = choice.randint(500, 3000), choice.randint(100, 400), choice.randint(0, 50)
        folder = "/".join([top, *path[shown:level]])
        if choice.random() < 0.3:
            tree.v1(folder, NEVER, used) if version == 1 else tree.v2(folder, "max", used)
            continue
        (tree.v1 if version == 1 else tree.v2)(folder, limit, used, cached, choice.randint(0, 30))
        left.append(limit - used + cached)
    assert available_bytes(tree.finish()) == min(left) * MIB


def test_quotas_of_both_versions(tmp_path: Path) -> None:
    new, old = Tree(tmp_path / "new"), Tree(tmp_path / "old")
    new.mount("cgroup2", TOP, own="/a/b")
    new.write(TOP + "/a/b", {"cpu.max": "150000 100000"})
    new.write(TOP + "/a", {"cpu.max": "max 100000"})
    assert list(cpu_quotas(new.finish()).values()) == [1.5]
    old.mount("cgroup", TOP + "/cpu,cpuacct", "rw,cpu,cpuacct", own="/a/b")
    for folder, quota in (("/a/b", 50_000), ("/a", 200_000), ("", -1)):
        old.write(f"{TOP}/cpu,cpuacct{folder}", {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": 100_000})
    assert sorted(cpu_quotas(old.finish()).values()) == [0.5, 2.0]


def _parts(pools: Sequence[Mapping[str, float]]) -> list[float]:
    sharing = sharers(pools)
    return [part_of(mine, sharing) for mine in pools]


def test_what_processes_share_is_divided_among_them() -> None:
    four, two = [{"big": 80.0}] * 4, [{"other": 80.0}] * 2
    assert _parts(four + two) == [20.0] * 4 + [40.0] * 2
    # Two of a machine in groups of their own, one in none: it cannot have what the others may take.
    assert _parts([{"m": 30.0, "a": 5.0}, {"m": 30.0, "b": 20.0}, {"m": 30.0}]) == [5.0, 10.0, 10.0]
    # A job's group with a group for each task.
    assert _parts([{"m": 90.0, "job": 40.0, "t": 30.0}, {"m": 90.0, "job": 40.0}]) == [20.0, 20.0]
    assert _parts([{}, {}]) == [float("inf")] * 2
    assert part_of({"new": 8.0}, {}) == 8.0


def test_the_same_group_has_one_name_in_all_containers(tmp_path: Path) -> None:
    """Seen from the host by its path, and from within as the top of a mount."""
    host = Tree(tmp_path)
    host.mount("cgroup2", TOP, own="/a/b")
    host.v2(TOP + "/a/b", 700, 100)
    outside = memory_pools(host.finish())
    inside = Tree(tmp_path)
    inside.mount("cgroup2", TOP + "/a/b")
    assert memory_pools(inside.finish()) == outside
    assert len(outside) == 2
    clone = Tree(tmp_path, boot="b1")
    clone.mount("cgroup2", TOP + "/a/b")
    assert not set(memory_pools(clone.finish())) & set(outside)


IN_A_GROUP = """
import sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
sys.path.insert(0, sys.argv[2])
from zerokit.available import available_bytes
before = available_bytes()
taken = b"1" * (100 << 20)
print(before, available_bytes())
"""


def test_a_real_group_inside_another(tmp_path: Path) -> None:
    """Limits of 300 MiB for both groups and of 500 MiB for the inner; else the files of the same groups."""
    with memory_group(300 * MIB) as outer, memory_group(500 * MIB, outer) as inner:
        if inner is None or outer is None:
            tree = Tree(tmp_path)
            tree.mount("cgroup2", TOP, own="/o/i")
            tree.v2(TOP + "/o", 300, 20)
            tree.v2(TOP + "/o/i", 500, 20)
            assert available_bytes(tree.finish()) == 280 * MIB
            return
        here = str(Path(__file__).parents[1])
        command = [sys.executable, "-c", IN_A_GROUP, str(inner), here]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        before, after = map(int, answer.stdout.split())
        assert 240 * MIB < before <= 300 * MIB
        assert 90 * MIB < before - after < 110 * MIB

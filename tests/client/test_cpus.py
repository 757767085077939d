"""What a process may use, read from trees of files as machines and containers have them."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from pagecast._cpus import Cpus, cpu_quota, numa_nodes, parse_cpu_list, read_cpus

Tree = Callable[[Mapping[str, str]], Path]
V2 = "sys/fs/cgroup"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Writes files below a root; returns the root."""

    def write(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/unified/cpu.max": "50000 100000\n"}, 0.5),
        # The parent grants less than the process's own group, and the group above that has no limit.
        (
            {
                "proc/self/cgroup": "0::/a/b/c\n",
                f"{V2}/a/cpu.max": "max 100000\n",
                f"{V2}/a/b/cpu.max": "200000 100000\n",
                f"{V2}/a/b/c/cpu.max": "800000 100000\n",
                f"{V2}/other/cpu.max": "1000 100000\n",
            },
            2.0,
        ),
        # Made outside of the container, or above the namespace: what is mounted counts.
        ({"proc/self/cgroup": "0::/docker/0123\n", f"{V2}/cpu.max": "300000 100000\n"}, 3.0),
        ({"proc/self/cgroup": "0::/../../x\n", f"{V2}/cpu.max": "300000 100000\n"}, 3.0),
        # Version 1, by either name of its mount.
        (
            {
                "proc/self/cgroup": "5:memory:/m\n4:cpu,cpuacct:/a\n1:name=systemd:/a\n0::/\n",
                f"{V2}/cpu,cpuacct/a/cpu.cfs_quota_us": "250000\n",
                f"{V2}/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
                f"{V2}/memory/m/cpu.cfs_quota_us": "1\n",
            },
            2.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpuacct,cpu:/a/b\n",
                f"{V2}/cpu/a/b/cpu.cfs_quota_us": "-1\n",
                f"{V2}/cpu/a/b/cpu.cfs_period_us": "100000\n",
                f"{V2}/cpu/a/cpu.cfs_quota_us": "70000\n",
                f"{V2}/cpu/a/cpu.cfs_period_us": "100000\n",
            },
            0.7,
        ),
        ({"proc/self/cgroup": "4:cpuset:/a\n", f"{V2}/cpuset/a/cpu.cfs_quota_us": "1\n"}, None),
        # What is no quota limits nothing.
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "\n"}, None),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "many 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "100000 0\n"}, None),
        ({"proc/self/cgroup": "nothing that is known\n\n", f"{V2}/cpu.max": "1000 100000\n"}, None),
    ],
)
def test_quotas(tree: Tree, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(tree(files)) == quota


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3\n", (0, 1, 2, 3)), ("8\n", (8,)), ("0-1,4,6-7", (0, 1, 4, 6, 7)), ("\n", ())],
)
def test_lists_of_cpus(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1-2-3"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpu_list(text)


def node(number: int, cpus: str) -> dict[str, str]:
    return {f"sys/devices/system/node/node{number}/cpulist": cpus}


def test_nodes(tree: Tree) -> None:
    assert numa_nodes(tree({}), {3, 1}) == ((1, 3),)
    root = tree(
        node(0, "0-3,16-19\n") | node(10, "8-11\n") | node(2, "4-7\n") | node(3, "\n") | node(4, "x\n")
        | {"sys/devices/system/node/possible": "0-10\n", "sys/devices/system/node/nodes/cpulist": "0\n"}
    )  # fmt: skip
    assert numa_nodes(root, range(20)) == (
        (0, 1, 2, 3, 16, 17, 18, 19), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15),
    )  # fmt: skip
    # Nodes without a CPU of the mask are none.
    assert numa_nodes(root, {2, 9, 17}) == ((2, 17), (9,))


def test_threads_follow_mask_and_quota(tree: Tree) -> None:
    root = tree({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "150000 100000\n"} | node(0, "0-7"))
    assert read_cpus(root, {5, 2, 3}) == Cpus((2, 3, 5), 1.5, ((2, 3, 5),))
    assert read_cpus(root, {5, 2, 3}).num_threads == 2
    assert read_cpus(root, {5}).num_threads == 1
    assert Cpus((0, 1), None, ((0, 1),)).num_threads == 2
    assert Cpus((0, 1), 0.01, ((0, 1),)).num_threads == 1
    with pytest.raises(ValueError, match="allowed"):
        read_cpus(root, set())


def test_this_machine() -> None:
    mask = os.sched_getaffinity(0)
    cpus = read_cpus(Path("/"), mask)
    assert set(cpus.allowed) == mask == {cpu for node in cpus.nodes for cpu in node}
    assert 1 <= cpus.num_threads <= len(mask)

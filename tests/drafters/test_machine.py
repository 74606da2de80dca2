"""What is left of a container's memory, as cgroups of both versions say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafters.machine import core_limit, cpu_name, headroom, inactive_page_cache

GIB = 2**30
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
V1_CPU = "sys/fs/cgroup/cpu,cpuacct"
NO_LIMIT = {"v1": "9223372036854771712", "v2": "max"}


def machine(root: Path, version: str, path: str, mounted: str = "/") -> Path:
    """The files of /proc for a process in the cgroup `path`, where `mounted` is what is seen."""
    (root / "proc/self").mkdir(parents=True)
    if version == "v1":
        groups = f"9:name=systemd:{path}\n4:cpu,cpuacct:{path}\n3:memory:{path}\n0::/\n"
        mounts = (
            f"30 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
            f"32 30 0:29 {mounted} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
            f"35 30 0:32 {mounted} /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory\n"
        )
    else:
        groups = f"0::{path}\n"
        mounts = f"31 23 0:28 {mounted} /sys/fs/cgroup ro shared:4 - cgroup2 cgroup rw,nsdelegate\n"
    (root / "proc/self/cgroup").write_bytes(groups.encode("utf-8", "surrogateescape"))
    (root / "proc/self/mountinfo").write_text(mounts)
    return root


def group(
    root: Path, version: str, path: str, limit: float | None, usage: float, inactive: float = 0
) -> None:
    """Write a cgroup's files; sizes in GiB, a `limit` of None is none."""
    folder = root / (V1 if version == "v1" else V2) / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    text = NO_LIMIT[version] if limit is None else str(int(limit * GIB))
    stat = f"cache 1\ninactive_file {int(inactive * GIB)}\n"
    if version == "v1":
        (folder / "memory.limit_in_bytes").write_text(text + "\n")
        (folder / "memory.usage_in_bytes").write_text(f"{int(usage * GIB)}\n")
        # Without the prefix it is of this cgroup alone, without those below it.
        stat = f"inactive_file 0\ntotal_inactive_file {int(inactive * GIB)}\n"
    else:
        (folder / "memory.max").write_text(text + "\n")
        (folder / "memory.current").write_text(f"{int(usage * GIB)}\n")
    (folder / "memory.stat").write_text(stat)


def cores(root: Path, version: str, path: str, limit: float | None) -> None:
    """Write a cgroup's limit of processor time, in cores; None is none."""
    folder = root / (V1_CPU if version == "v1" else V2) / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    if version == "v1":
        quota = -1 if limit is None else int(limit * 100_000)
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
    else:
        quota_text = "max" if limit is None else str(int(limit * 50_000))
        (folder / "cpu.max").write_text(f"{quota_text} 50000\n")


versions = pytest.mark.parametrize("version", ["v1", "v2"])


@versions
def test_a_container_has_its_limit_less_what_it_uses(version: str, tmp_path: Path) -> None:
    root = machine(tmp_path, version, "/")
    group(root, version, "/", 8, 3)
    assert headroom(root) == 5 * GIB
    group(root, version, "/", 8, 9)
    assert headroom(root) == 0


@versions
def test_page_cache_of_a_download_is_free(version: str, tmp_path: Path) -> None:
    """Catches: 7 of 8 GiB in use by files, which the kernel drops for any allocation."""
    root = machine(tmp_path, version, "/")
    group(root, version, "/", 8, 7, inactive=6)
    assert headroom(root) == 7 * GIB
    assert inactive_page_cache(root) == 6 * GIB


@versions
def test_every_limit_above_counts(version: str, tmp_path: Path) -> None:
    root = machine(tmp_path, version, "/pods/pod1/main")
    group(root, version, "/", None, 60)
    group(root, version, "/pods", 64, 50)
    group(root, version, "/pods/pod1", 8, 5)
    group(root, version, "/pods/pod1/main", None, 2)
    assert headroom(root) == 3 * GIB
    group(root, version, "/pods", 64, 63)
    assert headroom(root) == 1 * GIB
    group(root, version, "/pods/pod1/main", 2.5, 2)
    assert headroom(root) == GIB // 2


@versions
def test_without_a_limit_there_is_none(version: str, tmp_path: Path) -> None:
    root = machine(tmp_path, version, "/user/shell")
    group(root, version, "/", None, 60)
    group(root, version, "/user", None, 3)
    assert headroom(root) is None


@versions
def test_a_container_that_sees_its_own_cgroup_at_the_top(version: str, tmp_path: Path) -> None:
    """As Docker mounts it: /proc names the cgroup as the host does, or from outside of it."""
    for number, path in enumerate(("/docker/abc", "/docker/abc/child", "/../other")):
        root = machine(tmp_path / str(number), version, path, mounted="/docker/abc")
        group(root, version, "/", 4, 1)
        assert headroom(root) == 3 * GIB


@versions
def test_paths_of_other_bytes_are_read(version: str, tmp_path: Path) -> None:
    """Catches: a start that ends for a mount point, of whichever file system, that is not UTF-8."""
    root = machine(tmp_path, version, "/p\udcff")
    mounts = root / "proc/self/mountinfo"
    mounts.write_bytes(b"29 23 8:1 / /mnt/caf\xe9 rw - ext4 /dev/sdb rw\n" + mounts.read_bytes())
    group(root, version, "/", None, 60)
    group(root, version, "/p\udcff", 8, 3)
    assert headroom(root) == 5 * GIB


def test_a_machine_without_cgroups_has_no_limit(tmp_path: Path) -> None:
    assert headroom(tmp_path) is None
    assert inactive_page_cache(tmp_path) == 0
    root = machine(tmp_path, "v2", "/")  # the root cgroup of version 2 has none of the files
    assert headroom(root) is None
    assert inactive_page_cache(root) == 0


@versions
def test_a_service_has_the_cores_of_its_group_and_of_those_above(
    version: str, tmp_path: Path
) -> None:
    """The fault: `CPUQuota=` of systemd and limits of version 1 were not seen, and the model had a
    thread for each of the machine's cores."""
    root = machine(tmp_path, version, "/system.slice/aerie.service")
    assert core_limit(root) is None
    cores(root, version, "/system.slice/aerie.service", None)
    assert core_limit(root) is None
    cores(root, version, "/system.slice/aerie.service", 4)
    assert core_limit(root) == 4.0
    cores(root, version, "/system.slice", 2.5)
    assert core_limit(root) == 2.5


def test_without_a_file_system_of_cgroups_there_is_no_limit_of_cores(tmp_path: Path) -> None:
    assert core_limit(tmp_path) is None


def test_the_processor_has_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    text = "processor\t: 0\nmodel name\t: AMD EPYC 9B45\nmodel name\t: AMD EPYC 9B45\n"
    (tmp_path / "proc/cpuinfo").write_text(text)
    assert cpu_name(tmp_path) == "AMD EPYC 9B45"

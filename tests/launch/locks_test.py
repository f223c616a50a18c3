"""Locks: each package has a version that we accept, and its hashes."""

import pathlib
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[2]
LOCKS = sorted((ROOT / "third_party" / "locks").glob("*.txt"))
# name==version and then the SHA-256 of each accepted archive.
PIN = re.compile(
  r"([A-Za-z0-9][\w.-]*)==(\S+)((?: +--hash=sha256:[0-9a-f]{64})+)"
)


def project():
  return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def required(*extras):
  lines = (ROOT / "requirements.txt").read_text().splitlines()
  plain = [x for line in lines if (x := line.partition("#")[0].strip())]
  of_extra = project()["optional-dependencies"]
  return [
    Requirement(x) for x in [*plain, *(y for e in extras for y in of_extra[e])]
  ]


def unmet(versions, requirements, python):
  return [str(r) for r in requirements
    if (r.marker is None or r.marker.evaluate({"python_version": python}))
    and not ((version := versions.get(canonicalize_name(r.name)))
      and r.specifier.contains(version, prereleases=True))]  # fmt: skip


def test_there_is_a_lock_for_each_python_and_image():
  classes = project()["classifiers"]
  releases = re.findall(r"Python :: 3\.(\d+)", "\n".join(classes))
  names = {f"cpu-py3{release}" for release in releases}
  assert len(releases) == 3
  assert {p.stem for p in LOCKS} == names | {"cuda12-py311", "tpu-py312"}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_a_lock_has_hashes_and_meets_the_requirements(lock):
  lines = lock.read_text().replace("\\\n", " ").splitlines()
  found = [PIN.fullmatch(x.strip()) for x in lines if x and x[0] != "#"]
  pins = [x.groups() for x in found if x]
  assert len(pins) == len(found) > 50  # pip would refuse one without a hash
  versions = {canonicalize_name(name): version for name, version, _ in pins}
  assert len(versions) == len(pins)
  hashes = {name: digests.split() for name, _, digests in pins}
  assert all(len({*each}) == len(each) for each in hashes.values())
  assert len(hashes["numpy"]) > 20  # wheels of other platforms are accepted too
  kind, _, python = lock.stem.partition("-py3")
  extras = [kind, "parquet", "if", "wandb", "serve"] if kind != "cpu" else []
  assert unmet(versions, required("gym", *extras), f"3.{python}") == []


def test_a_lock_that_is_too_old_is_seen():
  old = {"numpy": "1.26.0", "jax": "9.9"}
  of = ("numpy>=2", "JAX[tpu]>=1", "flax", "x>1; python_version < '3.12'")
  assert unmet(old, map(Requirement, of), "3.12") == ["numpy>=2", "flax"]

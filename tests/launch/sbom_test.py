"""Locks with hashes, and the bill of materials that is made of one."""

import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launch import sbom

ROOT = pathlib.Path(__file__).parents[2]
LOCKS = sorted((ROOT / "third_party" / "locks").glob("*.txt"))


def project():
  return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def required(*extras):
  """The requirements of the package with some of its extras."""
  lines = (ROOT / "requirements.txt").read_text().splitlines()
  plain = [x for line in lines if (x := line.partition("#")[0].strip())]
  of_extra = project()["optional-dependencies"]
  return [
    Requirement(x) for x in [*plain, *(y for e in extras for y in of_extra[e])]
  ]


def unmet(pins, requirements, python):
  """Requirements without a pinned version that satisfies them."""
  versions = {canonicalize_name(p.name): p.version for p in pins}
  return [
    str(r)
    for r in requirements
    if (r.marker is None or r.marker.evaluate({"python_version": python}))
    and not (
      (version := versions.get(canonicalize_name(r.name)))
      and r.specifier.contains(version, prereleases=True)
    )
  ]


def test_there_is_a_lock_for_each_python_and_image():
  classes = project()["classifiers"]
  releases = re.findall(r"Python :: 3\.(\d+)", "\n".join(classes))
  names = {f"cpu-py3{release}" for release in releases}
  assert len(releases) == 3
  assert {p.stem for p in LOCKS} == names | {"cuda12-py312", "tpu-py312"}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_a_lock_has_hashes_and_meets_the_requirements(lock):
  pins = sbom.read(lock)  # raises for one without
  assert len({canonicalize_name(p.name) for p in pins}) == len(pins) > 50
  assert all(len({*p.hashes}) == len(p.hashes) for p in pins)
  kind, _, python = lock.stem.partition("-py3")
  extras = ["gym"] if kind == "cpu" else ["gym", kind]
  assert unmet(pins, required(*extras), f"3.{python}") == []
  # Wheels of other platforms are accepted too: numpy has dozens.
  assert len(next(p for p in pins if p.name == "numpy").hashes) > 20


def test_a_lock_that_is_too_old_is_seen():
  digest = ["0" * 64]
  old = [sbom.Pin("Numpy", "1.26.0", digest), sbom.Pin("jax", "9.9", digest)]
  of = ("numpy>=2", "JAX[tpu]>=1", "flax", "x>1; python_version < '3.12'")
  lacks = unmet(old, map(Requirement, of), "3.12")
  assert lacks == ["numpy>=2", "flax"]


@pytest.mark.parametrize(
  "line",
  [
    "numpy==2.0",
    "numpy>=2.0 --hash=sha256:" + "0" * 64,
    "numpy==2.0 --hash=md5:" + "0" * 32,
    "numpy==2.0 --hash=sha256:" + "0" * 63,
    f"numpy==2.0 --hash=sha256:{'0' * 64} --hash=sha512:{'0' * 128}",
    "--index-url=somewhere",
  ],
)
def test_a_line_without_a_hash_is_refused(tmp_path, line):
  lock = tmp_path / "lock.txt"
  good = f"# a comment\njax==0.1 \\\n    --hash=sha256:{'a' * 64}\n"
  lock.write_text(good)
  assert sbom.read(lock) == [("jax", "0.1", ["a" * 64])]
  lock.write_text(good + line + "\n")
  with pytest.raises(ValueError, match=r"must be name==version"):
    sbom.read(lock)


def test_the_bill_is_that_of_the_lock():
  lock = ROOT / "third_party" / "locks" / "cpu-py312.txt"
  run = subprocess.run(
    [sys.executable, "-m", "launch.sbom", lock],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  bom = json.loads(run.stdout)
  assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
  assert bom["metadata"]["component"]["version"] == project()["version"]
  pins, components = sbom.read(lock), bom["components"]
  listed = [
    (x["name"], x["version"], [h["content"] for h in x["hashes"]])
    for x in components
  ]
  assert listed == [tuple(pin) for pin in pins]
  by_name = {x["name"]: x for x in components}
  assert by_name["ml-collections"]["purl"] == "pkg:pypi/ml-collections@1.1.0"
  assert {h["alg"] for x in components for h in x["hashes"]} == {"SHA-256"}
  refs = [x["bom-ref"] for x in components]
  assert len({*refs}) == len(refs)
  # Of the schema: one expression, or any number of names.
  for licenses in (x["licenses"] for x in components if "licenses" in x):
    kinds = [*map(tuple, licenses)]
    assert kinds == [("expression",)] or {*kinds} == {("license",)}


def test_licences_are_those_of_this_version():
  version = importlib.metadata.version("absl-py")
  licensed = lambda v: sbom._component(sbom.Pin("absl-py", v, ["0" * 64]))
  assert licensed("0.0.1").keys() == licensed(version).keys() - {"licenses"}
  (given,) = licensed(version)["licenses"]
  assert "Apache" in str(given)


def test_errors_are_one_line():
  for given in ([], ["nowhere.txt"]):
    run = subprocess.run(
      [sys.executable, "-m", "launch.sbom", *given],
      cwd=ROOT,
      capture_output=True,
      text=True,
    )
    assert run.returncode == 1 and run.stderr.startswith("error: ")
    assert run.stderr.count("\n") == 1

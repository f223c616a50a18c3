"""Prints the bill of materials of a lock: CycloneDX 1.6, JSON.

  python -m launch.sbom third_party/locks/cpu-py312.txt > sbom.json

It lists what `pip install --require-hashes -r` of that file may install: name,
version, package URL and the SHA-256 of every archive that pip accepts. A lock
has no licences; they come from the metadata of installed packages, so run it
where the lock is installed. A package that is not installed in this version
gets none. The same lock and environment give the same bytes: there is neither
a date nor a random serial number.
"""

import importlib.metadata
import json
import pathlib
import re
import sys
import tomllib
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
# name==version \ and then --hash=sha256:... \ on lines of their own.
_PIN = re.compile(r"([A-Za-z0-9][\w.-]*)==([^\s\\;]+)((?:\s+--hash=\S+)+)")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_LONGEST = 80  # characters of a licence; longer ones are its whole text


class Pin(NamedTuple):
  """One package of a lock."""

  name: str
  version: str
  hashes: list[str]  # SHA-256 of each accepted archive, as hexadecimal digits


def read(lock: pathlib.Path) -> list[Pin]:
  """The packages of a lock, in its order.

  Raises:
    ValueError: A package has no version or no SHA-256, which
      `pip install --require-hashes` would refuse too.
  """
  text = lock.read_text().replace("\\\n", " ")
  lines = (line.strip() for line in text.splitlines())
  return [_pin(line) for line in lines if line and not line.startswith("#")]


def _pin(line: str) -> Pin:
  found = _PIN.fullmatch(line)
  hashes = [_HASH.fullmatch(x) for x in re.findall(r"--hash=(\S+)", line)]
  if found is None or None in hashes:
    raise ValueError(
      f"{line[:80]!r} must be name==version with --hash=sha256:... each; write "
      "the lock again, see third_party/README.md"
    )
  return Pin(found[1], found[2], [x[1] for x in hashes if x])


def bill(pins: list[Pin]) -> dict[str, Any]:
  """The bill of materials of these packages."""
  about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  own = {
    "type": "application",
    "name": about["name"],
    "version": about["version"],
    "licenses": [{"expression": about["license"]}],
  }
  return {
    "bomFormat": "CycloneDX",
    "specVersion": "1.6",
    "version": 1,
    "metadata": {"component": own},
    "components": [_component(pin) for pin in pins],
  }


def _component(pin: Pin) -> dict[str, Any]:
  name = re.sub(r"[-_.]+", "-", pin.name).lower()
  url = f"pkg:pypi/{name}@{pin.version}"
  out = {
    "type": "library",
    "bom-ref": url,
    "name": pin.name,
    "version": pin.version,
    "purl": url,
    "hashes": [{"alg": "SHA-256", "content": one} for one in pin.hashes],
  }
  licenses = _licenses(pin)
  return out | ({"licenses": licenses} if licenses else {})


def _licenses(pin: Pin) -> list[dict[str, Any]]:
  """What the installed package says; [] if another version is installed."""
  try:
    about = importlib.metadata.metadata(pin.name)
  except importlib.metadata.PackageNotFoundError:
    return []
  if about["Version"] != pin.version:
    return []
  every = lambda field: about.get_all(field) or []
  if expressions := every("License-Expression"):
    return [{"expression": expressions[0]}]
  classes = [
    text.rpartition(" :: ")[2]
    for text in every("Classifier")
    if text.startswith("License ::")
  ]
  given = [text.strip() for text in classes or every("License")]
  short = [x for x in given if 0 < len(x) <= _LONGEST and "\n" not in x]
  return [{"license": {"name": text}} for text in short if text != "UNKNOWN"]


def main(argv: list[str]) -> None:
  if len(argv) != 1:
    sys.exit("error: give one lock, such as third_party/locks/cpu-py312.txt")
  try:
    print(json.dumps(bill(read(pathlib.Path(argv[0]))), indent=2))
  except (OSError, ValueError) as e:
    sys.exit(f"error: {argv[0]}: {e}")


if __name__ == "__main__":
  main(sys.argv[1:])

"""Damaged bytes of the files of a run."""

import pathlib
import random
from collections.abc import Callable

# From the bytes of a file to others; None: the file is missing.
WAYS: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
  "flip": lambda data, rng: _flipped(data, rng),
  "half": lambda data, rng: data[: len(data) // 2],
  "empty": lambda data, rng: b"",
  "missing": lambda data, rng: None,
  "garbage": lambda data, rng: rng.randbytes(max(len(data), 16)),
}


def _flipped(data: bytes, rng: random.Random) -> bytes:
  """One bit is the other one."""
  if not data:
    return b"\1"
  at = rng.randrange(len(data))
  return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def files(workdir: pathlib.Path) -> list[pathlib.Path]:
  """The files of a run but its lock, relative to its folder, sorted."""
  every = [p.relative_to(workdir) for p in workdir.rglob("*") if p.is_file()]
  return sorted(p for p in every if p.name != ".lock")


def damage(path: pathlib.Path, way: str, seed: str) -> Callable[[], None]:
  """Damages a file; returns what restores it."""
  data = path.read_bytes()
  new = WAYS[way](data, random.Random(seed))
  if new is None:
    path.unlink()
  else:
    path.write_bytes(new)

  def restore() -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)

  return restore

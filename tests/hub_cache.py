"""A cache of the hub, and no network, for tests; no test file."""

import pathlib
import shutil

from huggingface_hub import constants


def made(folder: pathlib.Path, monkeypatch, *, of: str = "models--maker--model",
  **revisions: pathlib.Path) -> list[pathlib.Path]:  # fmt: skip
  """The snapshots of maker/model, one for each revision: copies."""
  cache = folder / "cache" / of
  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  out = []
  for i, (revision, directory) in enumerate(revisions.items()):
    commit = f"{i:040x}"
    ref = cache / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit)
    out.append(cache / "snapshots" / commit)
    shutil.copytree(directory, out[-1])
  return out

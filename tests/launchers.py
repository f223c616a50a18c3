"""Scripts of launch/, and programs that play other machines for them."""

import contextlib
import json
import os
import pathlib
import random
import socket
import subprocess
import sys

LAUNCH = pathlib.Path(__file__).parents[1] / "launch"
SECONDS = 30  # after which a script hangs


def free_port() -> int:
  """Below 32768, from where on the system takes ports for others."""
  while True:
    port = random.randrange(20000, 30000)
    with socket.socket() as s, contextlib.suppress(OSError):
      s.bind(("127.0.0.1", port))
      return port


def program(path: pathlib.Path, text: str) -> pathlib.Path:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f"#!{sys.executable} -IS\n{text}")
  path.chmod(0o755)
  return path


def start(script: str, *flags: str, path=None, **env: str) -> subprocess.Popen:
  """A script of launch/, with a folder put in front of PATH."""
  if path is not None:
    env["PATH"] = f"{path}:{os.environ['PATH']}"
  return subprocess.Popen(
    ["bash", LAUNCH / script, *flags], env=os.environ | env,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
  try:
    out, err = process.communicate(timeout=SECONDS)
  finally:
    process.kill()
  return process.returncode, out, err


def ran(*command, **how) -> subprocess.CompletedProcess:
  """A command that has ended: its status, and what it wrote."""
  how = dict(cwd=LAUNCH.parent, timeout=280) | how
  return subprocess.run(command, capture_output=True, text=True, **how)


def lines(path: pathlib.Path) -> list:
  text = path.read_text() if path.exists() else ""
  return [json.loads(line) for line in text.splitlines()]

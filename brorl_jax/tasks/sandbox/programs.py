"""A zygote for programs, and the jail around it.

With bubblewrap there are new namespaces, with /usr and nothing else to read, no
/proc, no devices but two, and no network; without, the walls that each job
raises are all there is. As root we start it as nobody.
"""

from __future__ import annotations

import inspect
import json
import os
from typing import Any

from brorl_jax.tasks.sandbox import (
  calls,
  checking,
  inside,
  plain,
  process,
  running,
  walls,
)

NOBODY = 65534  # who runs the jail where we are root

_START_S = 20.0  # it takes 0.1 s, on a crowded machine more
_MODULES = (calls, walls, plain, running, checking, inside)

# The jail has no file of this package, and need not: it is told the sources.
_BOOT = """
import sys
sys.path[:] = [p for p in sys.path if p]
import json, types
with open(int(sys.argv[1]), "rb") as file:
  boot = json.loads(file.read())
for name, source in boot["modules"].items():
  parent = ""
  for part in name.split("."):
    full = parent + "." + part if parent else part
    if full not in sys.modules:
      module = types.ModuleType(full)
      module.__path__ = []
      sys.modules[full] = module
      if parent:
        setattr(sys.modules[parent], part, module)
    parent = full
  exec(compile(source, name, "exec"), vars(sys.modules[name]))
sys.modules[boot["main"]].main(int(sys.argv[2]), **boot["options"])
"""
_READABLE = (
  "/usr/lib",
  "/usr/lib64",
  "/usr/local/lib",
  "/usr/share/zoneinfo",
  "/lib",
  "/lib64",
)


def start(interpreter: str, bubblewrap: str | None) -> process.Process:
  """A zygote for programs.

  Args:
    interpreter: Path of the Python that runs the programs, which whoever runs
      the jail can read: nobody if we are root, else we.
    bubblewrap: Path of bwrap, or None for the inner walls alone.

  Raises:
    Failed: If it does not start.
  """
  boot = process.memory(
    _boot(namespaces=bubblewrap is not None, path=interpreter)
  )
  info, errors = process.memory(b""), process.memory(b"")
  command = [*_bubblewrap(bubblewrap, interpreter, info), interpreter]
  command += ["-s", "-S", "-c", _BOOT, str(boot)]
  options: dict[str, Any] = {}
  if os.geteuid() == 0:
    options = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
  try:
    found = process.start(
      command,
      pass_fds=(boot, info),
      stderr=errors,
      env=process.ENVIRONMENT,
      patience_s=_START_S,
      **options,
    )
    if bubblewrap:
      # In its namespaces it has another.
      found.pid = json.loads(os.pread(info, 1 << 12, 0))["child-pid"]
    return found
  except process.Failed as error:
    said = os.pread(errors, 1 << 12, 0).decode("utf-8", "replace").split("\n")
    last = [line for line in said if line.strip()][-1:]
    raise process.Failed(
      f"the jail does not start: {' '.join(last) or error}"
    ) from None
  finally:
    for fd in (boot, info, errors):
      os.close(fd)


def _boot(*, namespaces: bool, path: str) -> bytes:
  options = {"namespaces": namespaces, "readable": [*_READABLE, *_own(path)]}
  sources = {module.__name__: inspect.getsource(module) for module in _MODULES}
  boot = {"modules": sources, "main": inside.__name__, "options": options}
  return json.dumps(boot).encode()


def _own(interpreter: str) -> list[str]:
  """/usr/local/lib and the file itself, of /usr/local/bin/python3.11."""
  file = os.path.realpath(interpreter)
  return [os.path.join(os.path.dirname(os.path.dirname(file)), "lib"), file]


def _bubblewrap(path: str | None, interpreter: str, info: int) -> list[str]:
  """The command that puts namespaces around what follows it."""
  if path is None:
    return []
  command = [path, "--unshare-all", "--die-with-parent", "--new-session"]
  command += ["--as-pid-1", "--info-fd", str(info), "--hostname", "box"]
  # The zygote mounts /tmp, with a limit of files that bwrap cannot give, and
  # drops this then.
  command += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
  command += ["--ro-bind", "/usr", "/usr"]
  for name in ("bin", "lib", "lib64"):
    if os.path.islink(f"/{name}"):
      command += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
    elif os.path.isdir(f"/{name}"):
      command += ["--ro-bind", f"/{name}", f"/{name}"]
  for own in _own(interpreter):
    if not own.startswith("/usr/"):
      command += ["--ro-bind", own, own]
  # No --proc and no --dev: its /dev/shm would be one more place to write.
  command += ["--dir", "/tmp", "--dir", "/dev"]
  for device in ("/dev/null", "/dev/urandom"):
    command += ["--dev-bind", device, device]
  return [*command, "--remount-ro", "/", "--chdir", "/", "--"]

"""Starts a zygote for programs inside its jail.

With bubblewrap the zygote has new namespaces: only /usr to read, no /proc, two
devices and no network. Without it, only the restrictions that each job puts on
itself apply. If we are root, the zygote runs as the user nobody.
"""

from __future__ import annotations

import inspect
import json
import os
from typing import Any

from brorl_jax.tasks.sandbox import (
  check_runner,
  codec,
  jail_main,
  process,
  program_runner,
  seccomp_landlock,
  syscalls,
)

NOBODY = 65534  # user of the jail if we are root

_START_S = 20.0  # it takes 0.1 s, more on a busy machine
_MODULES = (
  syscalls,
  seccomp_landlock,
  codec,
  program_runner,
  check_runner,
  jail_main,
)

# The jail cannot read this package; it receives the sources of these modules.
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
  """Starts a zygote for programs.

  Args:
    interpreter: Path of the Python that runs the programs. The user of the jail
      (nobody if we are root) must be able to read it.
    bubblewrap: Path of bwrap, or None for process restrictions alone.

  Raises:
    Failed: The zygote did not start.
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
    zygote = process.start(
      command,
      pass_fds=(boot, info),
      stderr=errors,
      env=process.ENVIRONMENT,
      patience_s=_START_S,
      **options,
    )
    if bubblewrap:
      # Its pid inside the namespace is another one.
      zygote.pid = json.loads(os.pread(info, 1 << 12, 0))["child-pid"]
    return zygote
  except process.Failed as error:
    lines = os.pread(errors, 1 << 12, 0).decode("utf-8", "replace").split("\n")
    last = [line for line in lines if line.strip()][-1:]
    raise process.Failed(
      f"the jail did not start: {' '.join(last) or error}"
    ) from None
  finally:
    for fd in (boot, info, errors):
      os.close(fd)


def _boot(*, namespaces: bool, path: str) -> bytes:
  options = {"namespaces": namespaces, "readable": [*_READABLE, *_own(path)]}
  sources = {module.__name__: inspect.getsource(module) for module in _MODULES}
  boot = {"modules": sources, "main": jail_main.__name__, "options": options}
  return json.dumps(boot).encode()


def _own(interpreter: str) -> list[str]:
  """For /usr/local/bin/python3.11: /usr/local/lib and the file itself."""
  file = os.path.realpath(interpreter)
  return [os.path.join(os.path.dirname(os.path.dirname(file)), "lib"), file]


def _bubblewrap(path: str | None, interpreter: str, info: int) -> list[str]:
  """The command that starts what follows it in new namespaces."""
  if path is None:
    return []
  command = [path, "--unshare-all", "--die-with-parent", "--new-session"]
  command += ["--as-pid-1", "--info-fd", str(info), "--hostname", "box"]
  # The zygote mounts /tmp with a limit on files, which bwrap cannot set. Then
  # it drops this capability.
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
  # No --proc and no --dev: /dev/shm would be writable.
  command += ["--dir", "/tmp", "--dir", "/dev"]
  for device in ("/dev/null", "/dev/urandom"):
    command += ["--dev-bind", device, device]
  return [*command, "--remount-ro", "/", "--chdir", "/", "--"]

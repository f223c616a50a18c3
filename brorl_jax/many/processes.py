"""The processes of one run, on one host or many.

Each samples prompts on its own devices; updates run on the devices of all.
"""

import atexit
import contextlib
import ctypes
import itertools
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

from brorl_jax.errors import UserError, first_line

T = TypeVar("T")

# Of one message of each process. Its shape is that of a program: a power of two
# of at least 1 KiB and at most 64 MiB. A device holds those of all processes,
# at most 256 MiB, too little for a term of a plan: 4 MiB of each of 64.
_LEAST, _MOST, _TOGETHER = 2**10, 2**26, 2**28
_HALF = 2**30  # a size is sent as two numbers of 32 bits
# A process that dies would leave the others waiting in a collective. So each
# counts, at this interval in the key-value store of jax.distributed, and ends
# when another has been silent; jax would end it later, with pages of text.
_COUNT_S, _SILENT_S, _JAX_SILENT_S = 2, 30, 300
# Until all processes have started.
_CONNECT_S = 300
# Status of a process that ends because another did: the same command resumes.
LOST = 70
# Status of a run that SIGTERM or SIGHUP ended: the same command resumes.
STOPPED = 75
_WORD_S = 5  # for the last word of a process
_LARGE = 2**21  # KiB; trimming costs short steps of small ones a fifth
_RESUMES = "this one ends; the same command resumes"
_ALIVE, _ERROR = "brorl/alive", "brorl/error"  # keys of the store
# This process ends by itself: the others may not end it with another line.
_ending = threading.Event()
_left = threading.Event()
# Two threads that need the same program would both compile it.
launching = threading.Lock()
_words: list[Callable[[str, int], None]] = []


def cores() -> Collection[int]:
  """The cores that this process may use; macOS cannot tell which."""
  usable = getattr(os, "sched_getaffinity", None)
  return usable(0) if usable else range(os.cpu_count() or 1)


def trim(least: int = _LARGE) -> None:
  """Gives back what a process of so many KiB freed: 2.7 of 5.3 GB in steps."""
  most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  if most > least and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
    libc.malloc_trim(0)


def start(
  coordinator: str | None, count: int | None, index: int | None
) -> None:
  """Connects this process with the others of its run, before any use of jax.

  `coordinator` is HOST:PORT of process 0, which need not listen yet. All three
  are None where the cluster knows them: Slurm, JobSet, the hosts of a TPU.
  Raises UserError if the others cannot be reached.
  """
  host, _, port = (coordinator or "HOST:1").rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
    must = "HOST:PORT, such as 10.0.0.1:1234"
    raise UserError(f"--coordinator={coordinator} is not {must}")
  if count is not None and index is not None and not 0 <= index < count:
    known = f"0 to {count - 1}, of --processes={count}"
    raise UserError(f"--process_id={index} is not one of {known}")
  # SIGTERM is for the training loop, which ends after a step in all processes.
  jax.config.update("jax_enable_preemption_service", False)
  try:
    jax.distributed.initialize(
      coordinator,
      count,
      index,
      # With the three, jax need not look for a cluster, which may be another.
      cluster_detection_method=None if coordinator is None else "deactivate",
      initialization_timeout=_CONNECT_S,
      heartbeat_timeout_seconds=_JAX_SILENT_S,
    )
  except (RuntimeError, ValueError) as e:
    where = f"coordinator {coordinator}"
    if coordinator is None:
      where = "--distributed: Slurm, JobSet or TPU hosts must tell who they are"
    why = f"do not connect: {first_line(e)}"
    raise UserError(f"the processes of this run ({where}) {why}") from None
  if not leads():  # one of them speaks
    sys.stdout = open(os.devnull, "w")
  here, every = jax.local_device_count(), jax.device_count()
  print(f"{jax.process_count()} processes, {every} devices, {here} here")
  if not alone():
    watch = threading.Thread(target=_watch, daemon=True)
    watch.start()
    # Before jax's own end, after which the thread would ask what is gone.
    atexit.register(_leave, watch)
    sys.excepthook = lost
    ctypes.CDLL(None).signal(signal.SIGABRT, _aborted)


def fail(line: str, status: int) -> NoReturn:
  """Ends this process, and the others with the same line.

  Without the barrier at the end of a process, to which the others do not come.
  """
  if _store() is not None and not alone():
    _ending.set()
    _say(f"{_ERROR}/{jax.process_index()}", f"{status} {line}")
    _linger()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


def lost(kind: type[BaseException], error: BaseException, trace: Any) -> None:
  """A `sys.excepthook`: of an error that the death of another may cause."""
  settle()
  sys.__excepthook__(kind, error, trace)
  fail(f"{kind.__name__}: {str(error).partition(chr(10))[0]}", 1)


def settle() -> None:
  """Returns if no other process is gone; takes 36 s where there are others.

  A collective that fails says only that a connection was closed. The thread
  that watches knows whose, and ends this process with that line.
  """
  if not alone():
    time.sleep(_SILENT_S + 3 * _COUNT_S)


def _store() -> Any:
  """The key-value store of jax.distributed, which process 0 keeps."""
  return distributed.global_state.client


def _say(key: str, value: str) -> None:
  if (store := _store()) is not None:  # None: this process has left
    # Process 0, which keeps the store, may have died.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      store.key_value_set(key, value, allow_overwrite=True)


def _linger() -> None:
  """Lets the others read why process 0 ends: the store ends with it."""
  if leads():
    time.sleep(3 * _COUNT_S)


def _leave(watch: threading.Thread) -> None:
  """At the end of a run: waits for the others, while this one still counts."""
  try:
    jax.distributed.shutdown()
  finally:
    _left.set()
    watch.join()


def _watch() -> None:
  """Ends this process when another does not count, or the store is silent."""
  me, before = jax.process_index(), time.monotonic()
  last = {i: ("", before) for i in range(jax.process_count())}
  counting = threading.Thread(target=_count, args=(last,), daemon=True)
  counting.start()
  while not _left.wait(_COUNT_S):
    now = time.monotonic()
    if now - before > 5 * _COUNT_S:  # this process itself was stopped
      last.update({i: (value, now) for i, (value, _) in last.items()})
    before = now
    # Process 0 keeps the store: if it hangs or is gone, nobody is heard.
    silent = [i for i, (_, at) in last.items() if now - at > _SILENT_S]
    if (silent and me not in silent) or silent == [*range(len(last))]:
      _linger()
      host = last[silent[0]][0].partition(" ")[2]
      said = f"has said nothing for {_SILENT_S} s"
      _end(f"{_named(silent[0], host)} {said}; {_RESUMES}", LOST)
  counting.join()


def _count(last: dict[int, tuple[str, float]]) -> None:
  """Counts, and notes when others did; ends this process if one has failed."""
  me, store, host = jax.process_index(), _store(), socket.gethostname()
  for number in itertools.count():
    _say(f"{_ALIVE}/{me}", f"{number} {host}")
    found, failed = [], []
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      found = store.key_value_dir_get(_ALIVE)
      failed = store.key_value_dir_get(_ERROR)
    for key, text in failed:
      status, line = text.split(" ", 1)
      if (index := _index(key)) != me and not _ending.is_set():
        _end(f"process {index} stopped: {line}", int(status))
    for key, value in found:
      if last[_index(key)][0] != value:
        last[_index(key)] = value, time.monotonic()
    if _left.wait(_COUNT_S):
      return


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _aborted(number: int) -> None:
  """Called where this process aborts; jax does once process 0 is gone.

  Its client calls nothing of Python (0.10 and 0.12) that could say so.
  """
  host, port = _coordinator()
  try:
    socket.create_connection((host, int(port)), timeout=5).close()
  except OSError:
    _end(f"{_named(0, '')} has ended; {_RESUMES}", LOST)
  signal.signal(number, signal.SIG_DFL)  # another reason
  os.abort()


def _named(index: int, host: str) -> str:
  """A process, and where it is; process 0 keeps the store, so is known."""
  host = host if index else _coordinator()[0]
  return f"process {index} of {distributed.global_state.num_processes} ({host})"


def _coordinator() -> tuple[str, str]:
  where = distributed.global_state.coordinator_address or ""
  host, _, port = where.rpartition(":")
  return host, port


def _index(key: str) -> int:
  return int(key.rpartition("/")[2])


def _end(line: str, status: int) -> NoReturn:
  sys.stdout.flush()
  with contextlib.suppress(OSError):  # nobody reads it
    os.write(2, f"error: {line}\n".encode())
  leave_word(line, status)
  os._exit(status)


@contextlib.contextmanager
def last_word(say: Callable[[str, int], None]) -> Iterator[None]:
  """Has `say(reason, exit status)` called where another process, or Ctrl-C,
  ends this one; in a thread that is left after 5 s.
  """
  _words.append(say)
  try:
    yield
  finally:
    _words.clear()


def leave_word(reason: str, status: int) -> None:
  """Calls what `last_word` was given, once."""
  if _words:
    say, said = _words.pop(), (reason, status)
    word = threading.Thread(target=say, args=said, daemon=True)
    word.start()
    word.join(_WORD_S)


def alone() -> bool:
  """Whether this process is the only one."""
  return jax.process_count() == 1


def leads() -> bool:
  """Whether this is process 0, which writes the files that people read."""
  return jax.process_index() == 0


def gather(value: T) -> list[T]:
  """The values of all processes, by their numbers.

  Sent by the devices, as bytes. All must call this and `first` in one order.
  """
  if alone():
    return [value]
  data = np.frombuffer(pickle.dumps(value), np.uint8)
  # In two numbers: the groups of a step may take more than 2 GiB.
  high, low = _all(np.array(divmod(len(data), _HALF), np.int32)).T
  sizes = [int(h) * _HALF + int(w) for h, w in zip(high, low, strict=True)]
  most = max(sizes)
  size = _message(most, len(sizes))
  every = [np.zeros(n, np.uint8) for n in sizes]
  for begin in range(0, most, size):
    part = np.zeros(size, np.uint8)
    mine = data[begin : begin + size]
    part[: len(mine)] = mine
    for whole, row in zip(every, _all(part), strict=True):
      left = whole[begin : begin + size]
      left[:] = row[: len(left)]
  return [pickle.loads(whole.data) for whole in every]


def _message(most: int, count: int) -> int:
  """Bytes of one message of each of `count` processes; one has most to send."""
  room = 1 << (_TOGETHER // count).bit_length() - 1
  return max(min(1 << (most - 1).bit_length(), _MOST, room), _LEAST)


def first(value: T) -> T:
  """The value of process 0, in every process."""
  return gather(value)[0]


class Board:
  """Short notes of all processes, in the key-value store of jax.distributed.

  No process waits: what it reads may be old, but a note never changes.
  """

  def __init__(self, name: str):
    """The name is the same in all processes, and of this board alone."""
    self._name = f"brorl/{name}"

  def claim(self, key: int) -> bool:
    """Whether this process, as the first and only one, now owns the key."""
    try:
      _store().key_value_set(f"{self._name}/claims/{key}", "")
    except jax.errors.JaxRuntimeError as e:
      if "ALREADY_EXISTS" not in str(e):
        raise
      return False
    return True

  def write(self, key: int, note: str) -> None:
    """Tells the others."""
    _store().key_value_set(f"{self._name}/notes/{key}", note)

  def read(self) -> dict[int, str]:
    """The notes of all."""
    notes = _store().key_value_dir_get(f"{self._name}/notes/")
    return {_index(key): note for key, note in notes}

  def clear(self) -> None:
    """Removes all; called when no process needs them any more."""
    if leads():
      _store().key_value_delete(f"{self._name}/")


def require_same(what: Mapping[str, Any]) -> None:
  """Raises UserError in every process if one would compute something else."""
  every = gather(dict(what))
  for index, other in enumerate(every):
    for name in sorted(every[0].keys() | other.keys()):
      mine, its = every[0].get(name), other.get(name)
      if mine != its:
        both = f"{name} = {its!r}, but process 0 has {mine!r}"
        raise UserError(f"process {index} has {both}; start all with the same")


def _all(array: np.ndarray) -> np.ndarray:
  return np.asarray(multihost_utils.process_allgather(array))

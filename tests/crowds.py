"""Processes of a run as threads, for tests of how they draw together."""

import collections
import threading
from concurrent import futures

from brorl_jax.many import processes
from brorl_jax.rollout import dynamic_sampling


class Board:
  """`processes.Board` of a draw, for threads; knows who claimed what."""

  def __init__(self):
    self.claims, self.notes, self._lock = {}, {}, threading.Lock()
    self.cleared = 0

  def claim(self, key):
    with self._lock:
      me = threading.get_ident()
      return self.claims.setdefault(key, me) == me

  def write(self, key, note):
    assert self.notes.setdefault(key, note) is note, "written twice"

  def read(self):
    return dict(self.notes)

  def clear(self):
    self.cleared += 1


class Crowd:
  """Processes as threads: who asks is the thread."""

  def __init__(self, count, monkeypatch):
    self._here = threading.local()
    self._barrier = threading.Barrier(count, timeout=30)
    self._values = [None] * count
    self._count = count
    monkeypatch.setattr(processes, "alone", lambda: count == 1)
    monkeypatch.setattr(processes, "gather", self._gather)
    self.boards = collections.defaultdict(Board)
    monkeypatch.setattr(processes, "Board", lambda name: self.boards[name])
    # A count of each process: they draw in the same order.
    self._draws = collections.Counter()
    monkeypatch.setattr(dynamic_sampling, "_DRAWS", self)

  def _gather(self, value):
    self._values[self._here.index] = value
    self._barrier.wait()
    every = list(self._values)
    self._barrier.wait()
    return every

  def __next__(self):
    self._draws[self._here.index] += 1
    return self._draws[self._here.index]

  def run(self, function):
    def one(index):
      self._here.index = index
      return function(index)

    with futures.ThreadPoolExecutor(self._count) as pool:
      return [*pool.map(one, range(self._count))]

"""Functions that a user brings in a file or a package, rewards above all.

README.md has the forms of a reward, which the names of its parameters tell,
what it may return, and when a response becomes invalid. `responses` are all
responses to one prompt, duplicates included, in the order of the rollouts;
`example` and `step` are optional.

The functions run in several worker processes, without a sandbox: they may use
the network, files and other processes. Each process imports the file once, so
module state is per process, and sees only the CPU through jax. They should
depend on their arguments alone, because a resumed run calls them again.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import math
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from json import dumps, loads  # which a user's file may replace in json
from socket import socket
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, get_args

from brorl_jax.verdicts import base, pool
from brorl_jax.verdicts.base import Domain, Example, Status, Verdict
from brorl_jax.verdicts.pool import TimedVerdict
from brorl_jax.verdicts.sandbox import process, seccomp_landlock
from brorl_jax.verdicts.sandbox.process import Deadline, Failed
from brorl_jax.verdicts.strict_json import alike, show

SKIPPED = "no reward: the function returned None"
# Of a fail whose answer is what an environment replies. It stays the verdict if
# the episode has no room for that.
REPLY = "no end: the environment replied, and the response has no room left"
FROM_PYTHON = "python:"  # begins the name of a function that is no file's
MAX_ANSWER = 1_000  # characters of a response that serve as its answer
_WHAT = "config.reward.verifier"
_PLACES = "'file.py:function' or 'package.module:function'"
_ELSEWHERE = {"rloo": "leave_one_out", "dr_grpo": "centered", "ppo_clip": "ppo"}
_PARAMETERS = "use (response, example, step), with responses or messages first"

# A step may sum the squares of 10^9 tokens' rewards in float32, up to 3.4e38.
_MOST_REWARD = 1e12
_IN_A_ROW = 8  # give up after this many calls without an answer
# Seconds of work that a process is given at once: a question and its answer
# take .3 ms, which is most of what a quick function needs.
_AT_ONCE_S = 0.02
# Calls of an `async` function that wait at a time, unless the function has an
# attribute `concurrency`, and how often one is tried again (`retries`), after
# a pause. One that does not let the others go on is late after the spare time.
_TOGETHER, _RETRIES, _PAUSE_S, _SPARE_S = 32, 2, 0.5, 5.0
_LOAD_S = 600.0  # a module may load a model
_MAX_REPLY = 1 << 30  # bytes
_ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",  # the trainer owns the devices
  "PYTHONDONTWRITEBYTECODE": "1",  # run the file that the digest is of
  "PYTHONHASHSEED": "0",  # the same response gets the same reward
}


# Functions by name.


class Named(NamedTuple):
  value: Any  # the value in the table, or the function
  # Hash of the file that defines it, 32 hexadecimal digits; "" for a table
  # entry, which the version of the package determines.
  digest: str


def find(name: str, table: Mapping[str, Any], *, what: str) -> Named:
  """The function that a config names.

      find("ppo", LOSSES, what="config.loss.kind")
      find("mine.py:loss", LOSSES, what="config.loss.kind")

  `name` is a key of the table, "package.module:function" or "file.py:function".
  A file runs once and may import modules of its folder. Raises ValueError, in
  one line that names `what`, if it cannot be resolved.
  """
  if name in table:
    return Named(table[name], "")
  where = f"{what} = {name!r}"
  place, colon, function = name.rpartition(":")
  if not colon:
    own = f"{', '.join(table)}, or your own as {_PLACES}" if table else _PLACES
    raise ValueError(f"{where}: unknown; use {own}{_near(name, table)}")
  try:
    file = pathlib.Path(place).expanduser().absolute()
    module = _run(file) if place.endswith(".py") else _package(place)
  except ValueError as e:
    raise ValueError(f"{where}: {e}") from None
  value = getattr(module, function, None)
  if not callable(value):
    near = _near(function, [k for k, v in vars(module).items() if callable(v)])
    raise ValueError(f"{where}: {place} has no function {function!r}{near}")
  return Named(value, _digest(pathlib.Path(module.__file__ or "").read_bytes))


def _digest(read: Callable[[], bytes]) -> str:
  """32 digits of a hash of what is read; "" where that fails."""
  try:
    return hashlib.sha256(read()).hexdigest()[:32]
  except (OSError, TypeError):
    return ""


def _near(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
  close = [*alike(name, known), _ELSEWHERE.get(name)][0]
  return f"; did you mean {close}?" if close in known else ""


def _package(name: str) -> ModuleType:
  try:
    return importlib.import_module(name)
  except Exception as e:  # a module is code and may raise anything
    raise ValueError(f"{name} cannot be imported: {_message(e)}") from None


@functools.cache
def _run(path: pathlib.Path) -> ModuleType:
  """Runs a file as a module; a ValueError names the line that failed."""
  if not path.is_file():
    near = _near(path.name, [p.name for p in path.parent.glob("*.py")])
    raise ValueError(f"file {path} does not exist{near}")
  name = f"_brorl_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
  spec = importlib.util.spec_from_file_location(name, path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module  # dataclasses and pickle look up their module
  if str(path.parent) not in sys.path:
    sys.path.append(str(path.parent))  # last, so that it hides no other module
  try:
    spec.loader.exec_module(module)
  except BaseException as e:  # SystemExit too
    del sys.modules[name]
    if isinstance(e, KeyboardInterrupt):
      raise
    line = "".join(f"line {n}: " for n in _lines(e, str(path))[-1:])
    raise ValueError(f"{path} failed: {line}{_message(e)}") from None
  return module


def _lines(error: BaseException, file: str) -> list[int | None]:
  frames = traceback.extract_tb(error.__traceback__)
  return [frame.lineno for frame in frames if frame.filename == file]


def _message(error: BaseException) -> str:
  text = " ".join(str(error).split())
  if isinstance(error, _Returned):
    return text
  return f"{type(error).__name__}: {text}" if text else type(error).__name__


# A reward function: its signature, and its results as verdicts.


class Function(NamedTuple):
  name: str  # the name as given, such as "mine.py:score"
  call: Any  # None where another process calls it
  whole: bool  # whether it takes all responses to a prompt at once
  takes: frozenset[str]  # which of "example" and "step" it takes
  digest: str  # see Named
  # Of an `async` function, how many calls wait at a time, and how often one
  # that raises or is late is tried; otherwise 0 and 1.
  together: int = 0
  tries: int = 1
  # Whether it takes the messages of an episode, and may return the next one.
  episode: bool = False

  def share(self, workers: int) -> int:
    """Calls that wait at a time in one of the workers."""
    return max(self.together // workers, 1)

  def seconds(self, responses: int, timeout_s: float, workers: int) -> float:
    """What a question with that many responses may take."""
    turns = 1 if self.whole else -(-responses // self.share(workers))
    each = (timeout_s + _PAUSE_S) * self.tries
    return each * turns + _SPARE_S if self.together else timeout_s


Given = Mapping[str, Callable] | None  # functions of this process, by name
_How = tuple[float, int]  # what a call may take, and the number of workers


class Asked(NamedTuple):
  """A question: responses to one prompt, and the example as JSON."""

  which: int  # of the functions
  responses: list[str]
  example: str
  step: int | None


def load(name: str, given: Given = None) -> Function:
  """Imports a reward function, or takes it from those that are given by name;
  ValueError if its signature is another.
  """
  where = f"{_WHAT} = {name!r}"
  if given and name in given:
    call = given[name]
    digest = _digest(lambda: inspect.getsource(call).encode())
  elif name.startswith(FROM_PYTHON):
    raise ValueError(f"{where} was reward= of brorl_jax.train; call that again")
  else:
    call, digest = find(name, {}, what=_WHAT)
  try:
    parameters = inspect.signature(call).parameters
  except (TypeError, ValueError):  # some functions in C
    parameters = {}
  first = next(iter(parameters), "")
  if first not in ("response", "responses", "messages"):
    raise ValueError(f"{where} takes ({', '.join(parameters)}); {_PARAMETERS}")
  for other in [*parameters.values()][1:]:
    optional = other.default is not other.empty
    if other.name not in ("example", "step") and not optional:
      raise ValueError(f"{where} has parameter {other}; {_PARAMETERS}")
  takes = frozenset(parameters) & {"example", "step"}
  out = Function(name, call, first == "responses", takes, digest)
  out = out._replace(episode=first == "messages")
  if not inspect.iscoroutinefunction(call):
    return out
  found = list[int]()
  how = ("concurrency", _TOGETHER, 1), ("retries", _RETRIES, 0)
  for field, usual, least in how:
    found.append(value := getattr(call, field, usual))
    if not isinstance(value, int) or value < least:
      raise ValueError(f"{where}: {field} = {value!r}; use {least} or more")
  return out._replace(together=found[0], tries=found[1] + 1)


def answers(
  function: Function, asked: Asked, timeout_s: float, workers: int
) -> list[Verdict]:
  """The verdicts on responses to one prompt; never raises. The calls of an
  `async` function wait together, `timeout_s` each.
  """
  some = asked.responses
  calls = [some] if function.whole else [[one] for one in some]
  calls = [asked._replace(responses=call) for call in calls]
  if not function.together:
    return [one for call in calls for one in verdicts(function, call)]

  async def answer(call: Asked, gate: asyncio.Semaphore) -> list[Verdict]:
    found = list[Verdict]()
    for again in reversed(range(function.tries)):
      async with gate:
        made: Any = function.call(**_arguments(function, call))
        try:
          value = await asyncio.wait_for(made, timeout_s)
          return _read(function, value, call)
        except TimeoutError:
          late = f"{function.name}: late: no answer in {timeout_s:g} s"
          found = [_invalid(late)] * len(call.responses)
        except BaseException as error:
          found = [_failed(function, error)] * len(call.responses)
          if isinstance(error, _Returned):  # it would return that again
            return found
      if again:
        await asyncio.sleep(_PAUSE_S)
    return found

  async def every() -> list[list[Verdict]]:
    gate = asyncio.Semaphore(function.share(workers))
    return await asyncio.gather(*(answer(call, gate) for call in calls))

  return [*itertools.chain(*asyncio.run(every()))]


def _arguments(function: Function, asked: Asked) -> dict[str, Any]:
  # From a JSON text, so that a call cannot change the next one's example.
  # Passed by name, so that the order of parameters is free.
  given, responses = loads(asked.example), asked.responses
  known = {"example": given, "step": asked.step}
  known = {k: v for k, v in known.items() if k in function.takes}
  if function.episode:
    each = zip(itertools.cycle(("assistant", "user")), loads(responses[0]))
    turns = [{"role": role, "content": text} for role, text in each]
    return {"messages": [*map(dict, given["messages"]), *turns], **known}
  if function.whole:
    return {"responses": [*responses], **known}
  return {"response": responses[0], **known}


def verdicts(function: Function, asked: Asked) -> list[Verdict]:
  """The verdicts of one call on one response, or on all; never raises."""
  try:
    value = function.call(**_arguments(function, asked))
    return _read(function, value, asked)
  except BaseException as error:  # user code may raise SystemExit too
    return [_failed(function, error)] * len(asked.responses)


def _failed(function: Function, error: BaseException) -> Verdict:
  return _invalid(failure(function.name, function.call, error))


def _read(function: Function, value: Any, asked: Asked) -> list[Verdict]:
  """The verdicts that a function returned; raises if they are not as many."""
  values = _values(value, len(asked.responses)) if function.whole else [value]
  found = []
  for value, response in zip(values, asked.responses, strict=True):
    try:
      if function.episode:
        *_, response = loads(response)
        if isinstance(value, str):
          text = value.encode("utf-8", "replace").decode()
          found.append(Verdict("fail", 0.0, REPLY, text))
          continue
      found.append(_verdict(value, response))
    except BaseException as error:  # float() of a user's object may raise
      found.append(_failed(function, error))
  return found


def _invalid(why: str) -> Verdict:
  line = " ".join(why.split())[:400]
  return Verdict("invalid", 0.0, f"reward failed: {line}", "")


def failure(name: str, call: Any, error: BaseException) -> str:
  """A function's error, its name, and its last line that ran, or its first."""
  inner = inspect.unwrap(call)
  code = getattr(inner, "__code__", None)
  code = code or getattr(type(inner).__call__, "__code__", None)
  if code is not None:
    lines = _lines(error, code.co_filename) or [code.co_firstlineno]
    name += f", line {lines[-1]}"
  return f"{name}: {_message(error)}"


class _Returned(Exception):
  """A function returned an unusable value."""


def _values(value: Any, n: int) -> list[Any]:
  try:
    if isinstance(value, str | bytes | dict | Verdict):
      raise TypeError
    values = [*value]
  except TypeError:
    raise _Returned(f"returned {show(value)}; return a list of {n}") from None
  if (m := len(values)) != n:
    raise _Returned(f"returned {m} values for {n} responses; return one each")
  return values


def _verdict(value: Any, response: str) -> Verdict:
  if value is None:  # says nothing of this response
    return Verdict("invalid", 0.0, SKIPPED, "")
  if not isinstance(value, Verdict):
    score = _number(value)
    status, reason = ("pass", "") if score >= 1.0 else ("fail", "below 1")
    return Verdict(status, score, reason, response[:MAX_ANSWER])
  if value.status not in get_args(Status):
    must = f"use one of {', '.join(get_args(Status))}"
    status = f"status {show(value.status)}"
    raise _Returned(f"returned a Verdict with {status}; {must}")
  for field in ("reason", "answer"):
    if not isinstance(it := getattr(value, field), str):
      raise _Returned(f"returned a Verdict with {field} {show(it)}; use a text")
  reason, answer = " ".join(value.reason.split()), value.answer or response
  score = _number(value.score)
  return Verdict(value.status, score, reason, answer[:MAX_ANSWER])


def _number(value: Any) -> float:
  """A float from a bool, int, float, or a scalar of numpy or torch."""
  try:
    if isinstance(value, str | bytes | bytearray) or getattr(value, "ndim", 0):
      raise TypeError  # float() accepts these
    number = float(value)
  except Exception:
    must = "return a number or a Verdict"
    raise _Returned(f"returned {show(value)}; {must}") from None
  if not abs(number) <= _MOST_REWARD:  # also NaN
    must = f"return a finite number of at most {_MOST_REWARD:g}"
    raise _Returned(f"returned {number}; {must}")
  return number


# The processes that call reward functions, and the sum of several.


def _verify(response: str, entry: Mapping[str, Any], jail: Any) -> Verdict:
  raise RuntimeError("Rewards.score calls the functions of a user")


# The domain of every data line if the user brings the reward.
DOMAIN = Domain(name=base.OWN, verify=_verify, fields={}, check_reference=dict)


class Group(NamedTuple):
  """Responses to one prompt, in the order of the rollouts."""

  responses: Sequence[str]
  example: Example


class Rewards(contextlib.AbstractContextManager["Rewards"]):
  """Reward functions and the processes that call them.

      with Rewards(["mine.py:score"], timeout_s=60.0) as rewards:
        [[scored, ...]] = rewards.score([Group(responses, example)], step=3)

  Several threads may call `score` at once. `whole` says which of the functions
  take all responses to a prompt, `episodes` whether it takes messages. Its
  responses are JSON lists of texts, the policy's and replies in turn.
  """

  def __init__(
    self,
    names: Sequence[str],
    *,
    timeout_s: float = 60.0,
    workers: int | None = None,
    given: Given = None,
  ):
    """Imports the functions in one process; others start when needed. With any
    `given` function all are called in threads of this process.

    `timeout_s` is for one call; `workers` defaults to `pool.size()`. Raises
    ValueError if a function cannot be imported or has another signature.
    """
    workers = workers or pool.size()
    self._idle = queue.LifoQueue[FunctionWorker | ThreadWorker]()
    self.digests: dict[str, str] = {}  # of the functions' files, by name
    how, each = (timeout_s, workers), range(workers)
    if given:
      functions = [load(name, given) for name in names]
      self.digests |= {f.name: f.digest for f in functions}
      self._workers = [ThreadWorker(functions, how) for _ in each]
    else:
      self._workers = [FunctionWorker(names, how, self.digests) for _ in each]
    for each in self._workers:
      self._idle.put(each)
    self._replaced = collections.Counter[str]()  # by reason
    self._in_a_row = 0
    self._each_s = [_AT_ONCE_S] * len(names)  # for one response
    try:
      self._functions = self._workers[-1].load()
    except Failed as error:
      self._workers[-1].close()
      raise ValueError(str(error)) from None
    self.whole = [function.whole for function in self._functions]
    self.episodes = any(function.episode for function in self._functions)
    if self.episodes and len(names) > 1:
      self._workers[-1].close()
      must = "use it alone, since it ends the episodes"
      raise ValueError(f"{_WHAT} = {names}: one takes messages; {must}")
    self._threads = futures.ThreadPoolExecutor(workers, "reward")

  def __exit__(self, *_: object) -> None:
    self.close()

  def score(
    self, groups: Sequence[Group], *, step: int | None
  ) -> list[list[TimedVerdict]]:
    """Waits for the verdicts on all responses of each group."""
    every = range(len(self.whole))
    pending = [[self._submit(i, g, step) for i in every] for g in groups]
    found = ([wait() for wait in waits] for waits in pending)
    return [_joined(zip(*each, strict=True)) for each in found]

  def replaced(self) -> collections.Counter[str]:
    """Processes that were late or ended since the last call, by reason."""
    replaced, self._replaced = self._replaced, collections.Counter()
    return replaced

  def close(self) -> None:
    """Ends the processes; responses in progress become invalid."""
    for each in self._workers:
      each.stop()
    self._threads.shutdown()
    for each in self._workers:
      each.close()

  def _submit(
    self, which: int, group: Group, step: int | None
  ) -> Callable[[], list[TimedVerdict]]:
    (texts, given), known = group, {"id": group.example.id}
    known |= {"source": given.task, "prompt": given.question}
    known |= {"messages": [*map(dict, given.messages)], **given.columns}
    example = dumps(known)
    call = lambda x: self._call(Asked(which, [*x], example, step))
    submit = functools.partial(self._threads.submit, call)
    if self.whole[which]:
      return submit(texts).result
    # Equal responses are scored once.
    distinct = [*dict.fromkeys(texts)]
    size = max(int(_AT_ONCE_S / self._each_s[which]), 1)
    if self._functions[which].together:
      size = max(len(distinct), 1)
    starts = range(0, len(distinct), size)
    calls = [submit(distinct[i : i + size]) for i in starts]

    def wait() -> list[TimedVerdict]:
      found = [one for call in calls for one in call.result()]
      of = dict(zip(distinct, found, strict=True))
      return [of[text] for text in texts]

    return wait

  def _call(self, asked: Asked) -> list[TimedVerdict]:
    worker, begin = self._idle.get(), time.monotonic()
    which, responses, *_ = asked
    alone = self.whole[which] or len(responses) == 1
    try:
      if self._in_a_row >= _IN_A_ROW:
        raise Failed(f"no answer {_IN_A_ROW} times in a row; not called again")
      found = worker.ask(asked)
      self._in_a_row = 0
    except Failed as error:
      worker.close()
      found = []
      if alone:
        found = [_invalid(str(error))] * len(responses)
        self._replaced[str(error)] += 1
        self._in_a_row += 1
    finally:
      self._idle.put(worker)
    if not found:  # which of them was it?
      return [self._call(asked._replace(responses=[r]))[0] for r in responses]
    each = self._each_s[which] = (time.monotonic() - begin) / len(found)
    return [TimedVerdict(verdict, each) for verdict in found]


def _joined(scored: Iterable[tuple[TimedVerdict, ...]]) -> list[TimedVerdict]:
  """`_combined` of each response: once of equal ones, with equal verdicts."""
  rows = [*scored]
  found = {(*map(id, row),): row for row in rows}
  made = {at: _combined(row) for at, row in found.items()}
  return [made[(*map(id, row),)] for row in rows]


def _combined(scored: Sequence[TimedVerdict]) -> TimedVerdict:
  """The sum of several functions' verdicts on a response."""
  verdicts_ = [each.verdict for each in scored]
  # A function that says None takes no part, unless all do.
  verdicts_ = [v for v in verdicts_ if v.reason != SKIPPED] or verdicts_[:1]
  seconds = sum(each.seconds for each in scored)
  for verdict in verdicts_:
    if verdict.status == "invalid":
      return TimedVerdict(verdict, seconds)
  score = math.fsum(verdict.score for verdict in verdicts_)
  return TimedVerdict(dataclasses.replace(verdicts_[0], score=score), seconds)


class ThreadWorker(NamedTuple):
  """Calls functions of this process. One that is late goes on in its thread."""

  functions: list[Function]
  how: _How

  def load(self) -> list[Function]:
    """The functions."""
    return self.functions

  def ask(self, asked: Asked) -> list[Verdict]:
    """The verdicts on the responses of one call; raises Failed."""
    function, found = self.functions[asked.which], queue.SimpleQueue()
    call = lambda: found.put(answers(function, asked, *self.how))
    threading.Thread(target=call, daemon=True).start()
    most = function.seconds(len(asked.responses), *self.how)
    try:
      return found.get(timeout=most)
    except queue.Empty:
      late = f"{function.name}: late: no answer in {most:g} s"
      raise Failed(late) from None

  def stop(self) -> None:
    """Has no process to end."""

  close = stop


class FunctionWorker(process.Worker):
  """A process that calls a user's functions; one thread asks at a time."""

  def __init__(self, names: Sequence[str], how: _How, digests: dict[str, str]):
    """`digests` are the hashes that the first of all processes loaded."""
    super().__init__(reply_bytes=_MAX_REPLY)
    self._names, self._how, self._digests = names, how, digests
    self._functions = list[Function]()

  def load(self) -> list[Function]:
    """Starts the process; its functions, without `call`; raises Failed."""
    with self._question(f"{_WHAT} = {[*self._names]}"):
      error, digests, forms = self._begin(_LOAD_S)
      digests = {**digests}
      bare = lambda name, whole, *more: Function(
        name, None, whole, frozenset(), digests[name], *more
      )
      self._functions = [*itertools.starmap(bare, forms)]
    if error:
      raise Failed(error)
    for name, digest in digests.items():
      if self._digests.setdefault(name, digest) != digest:
        raise Failed(f"the file of {name} changed during the run")
    return self._functions

  def ask(self, asked: Asked) -> list[Verdict]:
    """The verdicts on the responses of one call; raises Failed."""
    if not self._running():
      self.load()
    question = dumps([asked, *self._how]).encode()
    function = self._functions[asked.which]
    most = function.seconds(len(asked.responses), *self._how)
    with self._question(function.name):
      found = self._answer(question, Deadline(most), most)
      return [Verdict(*one) for one in _values(found, len(asked.responses))]

  def _start(self, life: socket, link: socket) -> subprocess.Popen:
    env = {**os.environ, **_ENVIRONMENT}
    how = {"flag": "-u", "stdout": 2}  # prints go to standard error
    return process.python(__name__, [life, link], *self._names, **how, env=env)


def main(descriptors: Sequence[int], *names: str) -> NoReturn:
  """Becomes a guard whose worker calls the functions of these names."""
  life, link = descriptors
  process.guard(life, link, functools.partial(_work, names=names))


def _work(link: int, names: Sequence[str]) -> None:
  # A function may kill its parent. If that is the guard, nobody ends the rest.
  if child := os.fork():
    os.close(link)
    os.waitpid(child, 0)
    return
  if sys.platform == "linux":
    seccomp_landlock.die_with_parent()
  process.outlast_terminal()
  functions, fault = list[Function](), ""
  try:
    functions = [load(name) for name in names]
  except BaseException as error:  # a module may raise SystemExit
    text = " ".join(str(error).split())
    field = "" if isinstance(error, ValueError) else f"{_WHAT}: "
    fault = f"{field}{text or type(error).__name__}"
  digests = {f.name: f.digest for f in functions}
  forms = [(f.name, f.whole, f.together, f.tries, f.episode) for f in functions]
  hello = fault, digests, forms

  def answer(question: Any) -> list[Any]:
    asked, *how = Asked(*question[0]), *question[1:]
    found = answers(functions[asked.which], asked, *how)
    return [*map(dataclasses.astuple, found)]

  process.serve(link, hello, answer, reply_bytes=_MAX_REPLY)

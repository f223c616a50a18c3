"""--mode=serve: a policy behind OpenAI's HTTP interface.

  POST /v1/chat/completions, /v1/completions   text in, text out
  POST /generate                               token ids in, token ids out
  GET  /v1/models, /v1/models/NAME, /health

One thread reads requests and writes replies, another one those with large
bodies: each has its own tokenizer. Prompts wait in `Line`, whose thread alone
uses the device: it samples those that are alike together. The event loop only
passes things on. With a seed the responses are those of
`TextPolicy.each(first=seed)`. The log-probabilities of a prompt, with echo, are
at temperature 1.
"""

import asyncio
import bisect
import concurrent.futures as futures
import copy
import dataclasses
import hmac
import http
import itertools
import json
import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax

from brorl_jax.errors import UserError, as_user_error, first_line
from brorl_jax.main import sample
from brorl_jax.main.sample import Drawn, TextPolicy
from brorl_jax.rollout import sampler
from brorl_jax.rollout.draw import SamplingParams

try:
  import uvicorn
  from starlette.applications import Starlette
  from starlette.exceptions import HTTPException
  from starlette.requests import ClientDisconnect, Request
  from starlette.responses import Response
  from starlette.routing import Route
  from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError:
  raise UserError("it needs: pip install 'brorl_jax[serve]'") from None

KEY = "BRORL_API_KEY"  # in the environment: what clients must send
MAX_BODY = 4 << 20  # bytes; a conversation of 32k tokens has some 130 kB
LARGE = 1 << 16  # bytes; a tokenizer may take 5 s for a million characters
WAITING = 1024  # prompts that may wait, as when many begin at once
CONNECTIONS = 2048  # beyond 3/4 the oldest that send nothing give way
RETRY_S = "30"  # clients try some times more; compiling takes minutes
MOST_N = 1024
MOST_TOKENS = 1 << 24  # of all responses to a request: 1 GB as lists
READ_S = 30.0  # for a head, for a body, and for a client that does not read
GATHER_S = 0.01  # in which others may come; a call takes more
PROGRAMS = 64  # compiled ones that are kept: clients may ask for any number

_CHAT, _TEXT, _TOKENS = "/v1/chat/completions", "/v1/completions", "/generate"
_ALL = "model n max_tokens temperature top_p top_k min_p seed user"
_TALK = "stop logprobs stream stream_options"
_ALSO = {_CHAT: f"messages max_completion_tokens {_TALK}"}
_ALSO |= {_TEXT: f"prompt echo {_TALK}", _TOKENS: "prompt_token_ids"}
# Their types, and least and most of numbers. A logprobs of 0 or 1 is of the
# tokens themselves: likelier ones are not known.
_TYPES: dict[str, tuple[Any, ...]] = {
  "model": (str,), "messages": (list,), "prompt": (str, list), "user": (str,),
  "prompt_token_ids": (list,), "n": (int, 1, MOST_N), "stop": (str, list),
  "max_tokens": (int, 0, 2**30), "max_completion_tokens": (int, 1, 2**30),
  "temperature": (int, float, 0, 1e6), "top_p": (int, float, 0, 1),
  "top_k": (int, -1, 2**30), "min_p": (int, float, 0, 1),
  "seed": (int, -(2**63), 2**63 - 1), "logprobs": (bool, int, 0, 1),
  "stream": (bool,), "stream_options": (dict,), "echo": (bool,),
}  # fmt: skip
# Others, with the value that asks for nothing.
_PLAIN = {
  "echo": False, "suffix": "", "best_of": 1, "logit_bias": {}, "tools": [],
  "presence_penalty": 0, "frequency_penalty": 0, "tool_choice": "none",
  "top_logprobs": 0, "stream": False, "response_format": {"type": "text"},
}  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant")


class Refusal(HTTPException):
  """A reply that is an error."""

  def __init__(self, status: int, message: str, param: str | None = None):
    more = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": RETRY_S}}
    super().__init__(status, message, more.get(status))
    self.param = param


def _reply(content: Any, status: int = 200, headers: Any = None) -> Response:
  text = json.dumps(content, allow_nan=False)  # ASCII: surrogates are escaped
  return Response(text, status, headers, "application/json")


# What prompts share that are sampled together: sampling parameters, powers of
# two that are no less than their tokens, n and limit, and whether seeds decide
# and prompts are read.
Kind = tuple[SamplingParams, int, int, int, bool, bool]


class Asked(NamedTuple):
  """A prompt of a request, and its responses once there are any."""

  ids: list[int]
  index: int  # in the keys of its responses
  limit: int
  kind: Kind
  answer: "Future[tuple[list[Drawn], list[Any]]]"


class Line:
  """The prompts that wait, oldest first, and the thread that samples them."""

  def __init__(self, policy: TextPolicy):
    self._policy, self._waiting = policy, list[Asked]()
    self._changed = threading.Condition()
    self._programs = set[tuple[Kind, int]]()
    threading.Thread(target=self._work, daemon=True).start()

  def put(self, asked: list[Asked]) -> None:
    """Raises Refusal if there is no room; who has gone takes none."""
    with self._changed:
      self._waiting = [x for x in self._waiting if not x.answer.cancelled()]
      if len(self._waiting) + len(asked) > WAITING:
        raise Refusal(429, f"{len(self._waiting)} prompts wait; try again")
      self._waiting += asked
      self._changed.notify()

  def _next(self) -> list[Asked]:
    """The oldest and others of its kind, a power of two; more of them wait, as
    each number is compiled.
    """
    with self._changed:
      self._changed.wait_for(lambda: self._waiting)
    for _ in range(8):  # until no more come
      count = len(self._waiting)
      time.sleep(GATHER_S)
      if len(self._waiting) == count:
        break
    with self._changed:
      live = [x for x in self._waiting if not x.answer.cancelled()]
      taken = [x for x in live if x.kind == live[0].kind]
      most = max(sample.TOGETHER // live[0].kind[2], 1) if live else 1
      taken = taken[: sample.power_of_two(min(len(taken) or 1, most))]
      gone = {*map(id, taken)}
      self._waiting = [x for x in live if id(x) not in gone]
      return [x for x in taken if x.answer.set_running_or_notify_cancel()]

  def _work(self) -> None:
    while True:
      batch = self._next()
      try:
        self._sample(batch) if batch else None
      except Exception as e:  # the next ones may do better
        status = 400 if isinstance(e, ValueError) else 503
        why = Refusal(status, f"this cannot be sampled: {first_line(e)}")
        for one in [one for one in batch if not one.answer.done()]:
          one.answer.set_exception(why)

  def _sample(self, batch: list[Asked]) -> None:
    sampling, _, n, limit, seeded, echo = batch[0].kind
    self._programs.add((batch[0].kind, len(batch)))
    if len(self._programs) > PROGRAMS:
      self._programs.clear()
      jax.clear_caches()
    key = jax.random.key(0 if seeded else secrets.randbits(31))
    if not seeded:
      key = jax.random.fold_in(key, secrets.randbits(31))
    ids, index = [x.ids for x in batch], [x.index for x in batch]
    drawn = self._policy.drawn(ids, index, key, n, limit, sampling)
    for one, responses in zip(batch, drawn, strict=True):
      read = [None, *self._policy.likeliest(one.ids)] if echo else []
      one.answer.set_result((responses, read))


def _fields(raw: bytes, path: str) -> dict[str, Any]:
  """Fields that are given, checked; raises Refusal with the first bad one."""
  try:
    body = json.loads(raw.decode(), parse_constant=int)  # no NaN
    found = {k: v for k, v in body.items() if v is not None}
  except (AttributeError, ValueError, RecursionError) as e:
    raise Refusal(400, f"the body is no JSON object: {first_line(e)}") from None
  plain = _PLAIN | {"best_of": found.get("n", 1)}
  for name, value in found.items():
    if name not in f"{_ALL} {_ALSO[path]}".split():
      if name not in plain or value != plain[name]:
        raise Refusal(400, f"{name!r:.99} or its value is not served", name)
      continue
    kinds = [x for x in _TYPES[name] if isinstance(x, type)]
    ends = _TYPES[name][len(kinds) :]
    if type(value) not in kinds:  # True is no integer
      names = " or ".join(kind.__name__ for kind in kinds)
      raise Refusal(400, f"{name} must be {names}", name)
    if ends and not ends[0] <= value <= ends[1]:
      raise Refusal(400, f"{name} must be {ends[0]} to {ends[1]}", name)
  return found


class Text:
  """Requests -> `Asked`, responses -> replies; in one thread."""

  def __init__(self, policy: TextPolicy, name: str):
    self.policy, self.tokenizer, self.name = policy, policy.tokenizer, name

  def check_name(self, model: str) -> None:
    if model != self.name:
      raise Refusal(404, f"there is no model {model!r:.99}", "model")

  def read(self, raw: bytes, path: str) -> tuple[dict[str, Any], list[Asked]]:
    """The fields and prompts; raises Refusal for what cannot be served."""
    get = (fields := _fields(raw, path)).get
    self.check_name(get("model", self.name))
    stop = get("stop", [])
    fields["stop"] = stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > 16 or not all(isinstance(s, str) and s for s in stop):
      raise Refusal(400, "stop must be at most 16 texts, none empty", "stop")
    numbers = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
    how = {name: float(get(name, usual)) for name, usual in numbers.items()}
    n, seed, echo = get("n", 1), get("seed"), get("echo", False)
    limit = get("max_tokens", 16 if "prompt" in fields else None)
    limit = get("max_completion_tokens", limit)
    if limit == 0 and not echo:
      raise Refusal(400, "max_tokens must be at least 1", "max_tokens")
    first = secrets.randbits(31) if seed is None else seed
    above = lambda n: 1 << (max(n, 1) - 1).bit_length()  # next power of two
    asked, tokens = list[Asked](), 0
    try:
      sampling = SamplingParams(top_k=max(get("top_k", 0), 0), **how)
      for p, ids in enumerate(self._ids(fields)):
        room = self.policy.policy.max_positions - len(ids)
        usual = max(min(self.policy.max_new_tokens, room), 1)
        if (most := usual if limit is None else limit) > room:
          why = f"{len(ids)} tokens and max_tokens = {most} are too many by "
          raise Refusal(400, f"{why}{most - room}", "max_tokens")
        sizes = sampler.prompt_width(len(ids)), above(n), above(most)
        kind = sampling, *sizes, seed is not None, echo
        asked.append(Asked(ids, (first + p) % 2**31, most, kind, Future()))
        tokens += sizes[1] * sizes[2]
        if tokens > MOST_TOKENS or p >= WAITING:
          raise Refusal(400, f"{tokens} tokens of {p + 1} prompts: too many")
    except ValueError as e:  # of UTF-8 too
      raise Refusal(400, first_line(e)) from None
    return {**fields, "path": path}, asked

  def _ids(self, fields: dict[str, Any]) -> Iterator[list[int]]:
    """Token ids of each prompt; raises ValueError if one is none."""
    own, size = fields.get("prompt_token_ids"), self.policy.policy.vocab
    given = [own] if own else fields.get("prompt", [])
    messages = [_message(m) for m in fields.get("messages", [])]
    if isinstance(given, str) or any(type(i) is int for i in given):
      given = [given]
    good = lambda i: type(i) is int and 0 <= i < size
    for ids in given or [messages]:
      texts = [m["content"] for m in messages]
      text = ids if isinstance(ids, str) else "".join(texts)
      text.encode()  # raises for a lone surrogate
      # No token in use has more characters than Qwen's 128 blanks.
      if len(text) > 128 * self.policy.policy.max_positions:
        raise ValueError(f"{len(text)} characters are too many")
      if isinstance(ids, str):
        ids = self.tokenizer.encode(text)
      elif messages:
        ids = self.tokenizer.render(messages)
      if not ids:
        raise ValueError("a prompt is missing or empty")
      if not isinstance(ids, list) or not all(map(good, ids)):
        raise ValueError(f"a prompt is text or token ids from 0 to {size - 1}")
      yield ids

  def write(self, fields: Any, asked: list[Asked], drawn: Any) -> Response:
    get, choices, count, chat = fields.get, [], 0, fields["path"] == _CHAT
    for prompt, (responses, read) in zip(asked, drawn, strict=True):
      for one in responses[: get("n", 1)]:
        choice, tokens = self._choice(fields, one, prompt, read)
        choices.append({"index": len(choices), **choice})
        count += tokens
    size = sum(len(prompt.ids) for prompt in asked)
    usage = {"prompt_tokens": size, "completion_tokens": count}
    usage["total_tokens"] = size + count
    kind = "chat.completion" if chat else "text_completion"
    head = {"id": f"brorl-{secrets.token_hex(12)}", "object": kind}
    head |= {"created": int(time.time()), "model": self.name}
    if not get("stream"):
      return _reply({**head, "choices": choices, "usage": usage})
    if chat:
      head["object"] = "chat.completion.chunk"
      choices = [{"delta": one.pop("message"), **one} for one in choices]
    parts = [{**head, "choices": [choice]} for choice in choices]
    if get("stream_options", {}).get("include_usage") is True:
      parts.append({**head, "choices": [], "usage": usage})
    lines = [*(json.dumps(part, allow_nan=False) for part in parts), "[DONE]"]
    events = "".join(f"data: {line}\n\n" for line in lines)
    return Response(events, media_type="text/event-stream")

  def _choice(
    self, fields: Any, one: Drawn, prompt: Asked, read: list[Any]
  ) -> tuple[Any, int]:
    """A response as the request wants it, and its number of tokens."""
    (every, logp, truncated), path, limit = one, fields["path"], prompt.limit
    tokens, whole = every[:limit], not truncated and len(every) <= limit
    opened = self.tokenizer.opened  # by the template of a conversation

    def until(count: int) -> tuple[str, bool]:
      (text,) = self.tokenizer.decode([tokens[:count]])
      text, begin = text.removeprefix(opened), opened if path == _CHAT else ""
      at = [i for s in fields["stop"] if (i := text.find(s)) >= 0]
      return begin + text[: min(at, default=None)], bool(at)

    text, stopped = until(len(tokens)) if path != _TOKENS else ("", False)
    if stopped:  # by fewer tokens, or by these
      counts = range(1, len(tokens))
      least = bisect.bisect_left(counts, True, key=lambda k: until(k)[1])
      tokens = tokens[: least + 1]
      text, _ = until(len(tokens))
    count, logp = len(tokens), logp[: len(tokens)]
    end = {"finish_reason": "stop" if stopped or whole else "length"}
    if path == _TOKENS:
      return {"token_ids": tokens, "logprobs": logp, **end}, count
    asks, detail, likely = fields.get("logprobs"), None, None
    if read:
      text = "".join(self.tokenizer.pieces(prompt.ids)) + text
      tokens, logp = prompt.ids + tokens, [x and x[0] for x in read] + logp
      piece = lambda i: self.tokenizer.pieces([i])[0]
      likely = [x and {piece(x[1]): x[2]} for x in read] + [None] * count
    if asks is not None and asks is not False:
      pieces = self.tokenizer.pieces(tokens)
      detail = {
        "tokens": pieces, "token_logprobs": logp, "top_logprobs": likely,
        "text_offset": [0, *itertools.accumulate(map(len, pieces))][:-1],
      } if path == _TEXT else {"refusal": None, "content": [
        {"token": piece, "logprob": x, "bytes": None, "top_logprobs": []}
        for piece, x in zip(pieces, logp, strict=True)
      ]}  # fmt: skip
    said: dict[str, Any] = {"text": text}
    if path == _CHAT:
      said = {"message": {"role": "assistant", "content": text}}
    return {**said, "logprobs": detail, **end}, count


def _message(message: Any) -> dict[str, str]:
  """Its role and text, which may come in parts."""
  message = message if isinstance(message, dict) else {}
  role, text = message.get("role"), message.get("content")
  parts = text if isinstance(text, list) else [{"type": "text", "text": text}]
  parts = [part if isinstance(part, dict) else {} for part in parts]
  texts = [part.get("text") for part in parts if part.get("type") == "text"]
  good = [text for text in texts if isinstance(text, str)]
  if len(good) < len(parts) or role not in _ROLES:
    raise ValueError(f"each has a text as content, a role of {_ROLES}")
  role = "system" if role == "developer" else role
  return {"role": role, "content": "".join(good)}


class Server:
  """The paths, for Starlette."""

  def __init__(self, policy: TextPolicy, name: str, key: str = ""):
    self.line, self.text = Line(policy), Text(policy, name)
    own = dataclasses.replace(policy, tokenizer=copy.deepcopy(policy.tokenizer))
    rooms = self.text, Text(own, name)  # of small and of large bodies
    self._rooms = [(text, futures.ThreadPoolExecutor(1)) for text in rooms]
    self._key = f"Bearer {key}".encode() if key else b""

  def app(self) -> Starlette:
    gets = {"/v1/models": self._models, "/v1/models/{name:path}": self._models}
    gets["/health"] = self._health
    routes = [Route(x, to, methods=["GET"]) for x, to in gets.items()]
    routes += [Route(x, self._post, methods=["POST"]) for x in _ALSO]
    kinds = HTTPException, ClientDisconnect, Exception
    handlers: Any = dict.fromkeys(kinds, self._failed)
    return Starlette(routes=routes, exception_handlers=handlers)

  async def _failed(self, request: Request, error: Any) -> Response:
    """In OpenAI's form."""
    if not isinstance(error, HTTPException):  # or who asked has gone
      error = Refusal(500, "the server failed; its log says where")
    status, param = error.status_code, getattr(error, "param", None)
    kind = ("invalid_request", "server")[status >= 500] + "_error"
    code = http.HTTPStatus(status).name.lower()
    said = dict(message=error.detail, param=param, type=kind, code=code)
    return _reply({"error": said}, status, error.headers)

  async def _health(self, request: Request) -> Response:
    return _reply({"status": "ok"})

  async def _models(self, request: Request) -> Response:
    self._check_key(request)
    model = {"id": self.text.name, "object": "model", "created": 0}
    model["max_model_len"] = self.text.policy.policy.max_positions
    model["owned_by"] = "brorl_jax"
    self.text.check_name(request.path_params.get("name", self.text.name))
    one = "name" in request.path_params
    return _reply(model if one else {"object": "list", "data": [model]})

  def _check_key(self, request: Request) -> None:
    sent = request.headers.get("authorization", "").encode("latin-1")
    if self._key and not hmac.compare_digest(sent, self._key):
      raise Refusal(401, "the key is missing or wrong: Authorization: Bearer")

  async def _post(self, request: Request) -> Response:
    self._check_key(request)
    raw = await self._body(request)
    do = asyncio.get_running_loop().run_in_executor
    text, pool = self._rooms[len(raw) > LARGE]
    read = await do(pool, text.read, raw, request.scope["path"])
    drawn = await self._drawn(request, read[1])
    return await do(pool, text.write, *read, drawn)

  async def _body(self, request: Request) -> bytes:
    # A page in a browser cannot send this type to another origin unasked.
    kind = request.headers.get("content-type", "").partition(";")[0]
    if kind.strip().lower() != "application/json":
      raise Refusal(415, "the Content-Type must be application/json")
    data = bytearray()
    try:
      async with asyncio.timeout(READ_S):
        async for part in request.stream():
          data += part
          if len(data) > MAX_BODY:
            raise Refusal(413, f"a body has at most {MAX_BODY} bytes")
    except TimeoutError:
      raise Refusal(408, f"the body took more than {READ_S:g} s") from None
    return bytes(data)

  async def _drawn(self, request: Request, asked: list[Asked]) -> Any:
    """Of each prompt; the place of a client that has gone becomes free."""
    self.line.put(asked)
    answers = asyncio.gather(*(asyncio.wrap_future(x.answer) for x in asked))
    answers.add_done_callback(lambda x: x.cancelled() or x.exception())  # seen
    gone = asyncio.ensure_future(request.receive())
    try:
      await asyncio.wait({answers, gone}, return_when="FIRST_COMPLETED")
      if not answers.done():
        raise ClientDisconnect
      return answers.result()
    finally:
      gone.cancel()
      answers.cancel()


_COMES = "IDLE", "SEND_BODY"  # states in which a request has not come


class Connection(H11Protocol):
  """Ends if a head or a client that reads makes no progress; of too many the
  oldest end whose requests have not come.
  """

  def connection_made(self, transport: Any) -> None:
    super().connection_made(transport)
    transport.max_size = 1 << 14  # bytes at a time: 30 ms as chunks of one byte
    self._since = self.loop.time()
    self._watch(None)
    if len(self.connections) <= CONNECTIONS * 3 // 4:
      return
    others: Any = self.connections - {self}
    late = [x for x in others if str(x.conn.their_state) in _COMES]
    for one in sorted(late, key=lambda x: x._since)[: CONNECTIONS // 8]:
      self.connections.discard(one)
      one.transport.abort()

  def _watch(self, before: Any) -> None:
    unread = self.transport.get_write_buffer_size()
    head = str(self.conn.their_state) == "IDLE"  # for 15 s after a request
    now = self.cycle, head, unread
    if now == before and (head or unread):
      self.transport.abort()
    elif self in self.connections:
      self.loop.call_later(READ_S, self._watch, now)


def server(app: Any) -> uvicorn.Server:
  """Of this app, with bounds for what clients may do."""
  return uvicorn.Server(uvicorn.Config(
    app, http=Connection, loop="asyncio", ws="none", lifespan="off",
    log_level="error", access_log=False, proxy_headers=False,
    server_header=False, limit_concurrency=CONNECTIONS, timeout_keep_alive=15,
    timeout_graceful_shutdown=10,
  ))  # fmt: skip


@as_user_error(ValueError)
def run(where: str, *, host: str, port: int) -> None:
  """Serves the policy of a folder until a signal ends it."""
  key = os.environ.get(KEY, "").strip()
  if not 0 <= port < 2**16:
    raise ValueError(f"--port={port} must be 0 to {2**16 - 1}")
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  try:
    listening = socket.create_server((host, port), family=family)
  except OSError as e:
    raise ValueError(f"--host={host} --port={port}: {e.strerror}") from None
  with listening:
    address, port, *_ = listening.getsockname()
    if not key and address not in ("127.0.0.1", "::1"):
      must = f"set {KEY} in the environment, the key that clients must send"
      raise ValueError(f"--host={host} can be reached by others: {must}")
    name = where or "embedded"
    app = Server(sample.load(where), name, key).app()
    shown = f"[{address}]" if ":" in address else address
    print(f"{name}: http://{shown}:{port}/v1", flush=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = max(soft, min(2 * CONNECTIONS, hard))  # often 1024
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    server(app).run(sockets=[listening])

"""--mode=serve, by OpenAI's own client, by hand, and by those who mean harm."""

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from messages import mentions
from starlette.testclient import TestClient

import brorl_jax as bj
from brorl_jax.errors import UserError
from brorl_jax.main import sample, serve
from brorl_jax.main.sample import TextPolicy

ROOT = pathlib.Path(__file__).parents[2]
SAID = "12 + 34 = 46\n"
ASK = {"messages": [{"role": "user", "content": "3 + 4 ="}]}
CHAT, TEXT, TOKENS = "/v1/chat/completions", "/v1/completions", "/generate"


@dataclasses.dataclass(frozen=True, eq=False)
class Scripted(TextPolicy):
  """Says the same at once, or once it may; response 1 is cut at the limit."""

  may: threading.Event = dataclasses.field(default_factory=threading.Event)
  calls: list = dataclasses.field(default_factory=list)

  def drawn(self, ids, index, key, n, limit, sampling):
    self.calls.append((len(ids), n, limit, [*index], key))
    assert self.may.wait(20)
    if sampling.temperature == 0.125:
      raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")
    if sampling.temperature == 0.25:
      raise ValueError("rollouts need 9 GiB")
    tokens = [*self.tokenizer.encode(SAID), *self.tokenizer.stop_ids[:1]]
    long = (tokens[:-1] * limit)[:limit]
    for _ in ids:
      yield [(long, [-0.5] * limit, True) if i == 1 or len(tokens) > limit
        or sampling.top_k == 1 else (tokens, [-0.25] * len(tokens), False)
        for i in range(n)]  # fmt: skip


@pytest.fixture(scope="module")
def policy():
  return bj.load()


@pytest.fixture
def scripted(policy):
  one = Scripted(policy.policy, policy.params, policy.tokenizer)
  one.may.set()
  yield one
  one.may.set()


@pytest.fixture
def served(scripted):
  app = serve.Server(scripted, "m").app()
  with TestClient(app, raise_server_exceptions=False) as client:
    yield client


@contextlib.contextmanager
def online(policy, key=""):
  """A real server on a free port, which has to end well."""
  ours = serve.Server(policy, "m", key)
  server = serve.server(ours.app())
  with socket.create_server(("127.0.0.1", 0)) as listening:
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
      yield listening.getsockname()[1], ours
    finally:
      server.should_exit = True
      thread.join(20)
      assert not thread.is_alive()


def client_of(port, key="none"):
  base = f"http://127.0.0.1:{port}/v1"
  return openai.OpenAI(base_url=base, api_key=key, max_retries=0, timeout=30)


def refusal(reply, status, *says):
  assert reply.status_code == status, reply.text
  error = reply.json()["error"]
  assert {*error} == {"message", "type", "param", "code"}
  assert mentions(error["message"], " ... ".join(says)), error
  return error


# ---------------------------------------------------------------- what it says


@pytest.mark.ci
def test_a_seed_gives_what_the_policy_samples(policy):
  """In one batch with others, and n that is no power of two."""
  app = serve.Server(policy, "m").app()
  asked = ASK | {"n": 3, "seed": 7, "max_tokens": 5, "logprobs": True}
  want = policy.sample([ASK["messages"]], 3, first=7, max_new_tokens=8)[0]
  with TestClient(app) as client:
    found = client.post(CHAT, json=asked).json()["choices"]
    assert client.post(CHAT, json=asked).json()["choices"] == found
    ids = policy.tokenizer.render(ASK["messages"])
    body = {"prompt_token_ids": ids, "n": 3, "max_tokens": 8}
    same = client.post(TOKENS, json=body | {"seed": 7}).json()["choices"]
    fresh = [client.post(TOKENS, json=body).json()["choices"] for _ in "12345"]
  for one, choice, drawn in zip(want, found, same, strict=True):
    assert drawn["token_ids"] == one.tokens
    assert sum(drawn["logprobs"]) == pytest.approx(one.logp, abs=1e-4)
    ends = "length" if one.truncated else "stop"
    assert drawn["finish_reason"] == ends
    short = one.tokens[:5]
    pieces = [x["token"] for x in choice["logprobs"]["content"]]
    assert pieces == policy.tokenizer.pieces(short)
    assert [choice["message"]["content"]] == policy.tokenizer.decode([short])
  assert len({json.dumps(x) for x in fresh}) > 1  # each has its own key


def test_a_conversation_is_answered(served, scripted):
  parts = [{"type": "text", "text": "3 + "}, {"type": "text", "text": "4 ="}]
  reply = served.post(CHAT, json={
    "messages": [{"role": "user", "content": parts, "name": "x"}],
    "model": "m", "n": 3, "max_completion_tokens": 100, "top_k": -1,
    "tools": None, "presence_penalty": 0.0, "user": "me",
  }).json()  # fmt: skip
  (call,) = scripted.calls
  assert call[:3] == (1, 4, 128)
  assert reply["object"] == "chat.completion" and reply["model"] == "m"
  message = {"role": "assistant", "content": SAID}
  first, long, _ = reply["choices"]
  assert first == {
    "index": 0, "message": message, "logprobs": None, "finish_reason": "stop",
  }  # fmt: skip
  assert long["finish_reason"] == "length"
  tokens = len(scripted.tokenizer.encode(SAID)) + 1
  read = len(scripted.tokenizer.render(ASK["messages"]))
  assert reply["usage"] == {"prompt_tokens": read, "completion_tokens": 100
    + 2 * tokens, "total_tokens": 100 + 2 * tokens + read}  # fmt: skip


def test_prompts_are_completed(served, scripted):
  body = {"prompt": ["1 +", "2 +"], "n": 2, "best_of": 2, "logprobs": 0}
  reply = served.post(TEXT, json=body | {"seed": -1, "stop": None}).json()
  assert reply["object"] == "text_completion"
  assert [c["index"] for c in reply["choices"]] == [0, 1, 2, 3]
  assert scripted.calls[0][:4] == (2, 2, 16, [2**31 - 1, 0])
  detail = reply["choices"][0]["logprobs"]
  assert "".join(detail["tokens"]).startswith(SAID)
  assert detail["token_logprobs"] == [-0.25] * len(detail["tokens"])
  for at, piece in zip(detail["text_offset"], detail["tokens"], strict=True):
    assert "".join(detail["tokens"])[at:].startswith(piece)
  ids = scripted.tokenizer.encode("1 +")
  for prompt in ("1 +", ids, [ids], ["1 +"]):
    one = served.post(TEXT, json={"prompt": prompt}).json()
    assert one["choices"][0]["text"] == SAID
    assert one["choices"][0]["logprobs"] is None
    assert one["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("stop, text", [
  ("=", "12 + 34 "), (["46", " 3"], "12 +"), (["34 = 4", "4"], "12 + 3"),
  ("1", ""), ("77", SAID), ([], SAID), (SAID, ""),
])  # fmt: skip
def test_a_text_stops_before_a_stop(served, scripted, stop, text):
  body = ASK | {"stop": stop, "logprobs": True, "max_tokens": 64}
  reply = served.post(CHAT, json=body).json()
  (choice,) = reply["choices"]
  assert choice["message"]["content"] == text
  assert choice["finish_reason"] == "stop"
  content = choice["logprobs"]["content"]
  said = "".join(x["token"] for x in content)
  assert said.startswith(text) and reply["usage"]["completion_tokens"] == len(
    content
  )
  if text != SAID:  # the tokens end with what stopped it
    stops = [stop] if isinstance(stop, str) else stop
    assert any(s in said for s in stops)
    assert not any(s in said[: -len(content[-1]["token"])] for s in stops)


def test_tokens_in_and_tokens_out(served, scripted):
  body = {"prompt_token_ids": [5, 6, 7], "n": 2, "max_tokens": 20}
  reply = served.post(TOKENS, json=body).json()
  tokens = scripted.tokenizer.encode(SAID)
  first, second = reply["choices"]
  assert first["token_ids"][:-1] == tokens
  assert first["token_ids"][-1] in scripted.tokenizer.stop_ids
  assert first["logprobs"] == [-0.25] * (len(tokens) + 1)
  assert (first["finish_reason"], second["finish_reason"]) == ("stop", "length")
  assert len(second["token_ids"]) == 20 == len(second["logprobs"])
  assert reply["usage"]["prompt_tokens"] == 3


def test_a_prompt_is_read(policy):
  """As lm-eval asks: log-probabilities of logits, and the likeliest tokens."""
  ids = policy.tokenizer.encode("12 + 3 = 15")
  read = jnp.array([ids])
  logits = policy.policy.logits(policy.params, read, jnp.ones_like(read, bool))
  want = np.asarray(jax.nn.log_softmax(logits[0, :-1]))
  body = {"prompt": [ids], "echo": True, "logprobs": 1, "temperature": 0}
  with TestClient(serve.Server(policy, "m").app()) as client:
    for more in (0, 1):
      reply = client.post(TEXT, json=body | {"max_tokens": more}).json()
      (choice,), count = reply["choices"], len(ids)
      assert choice["text"].startswith("12 + 3 = 15")
      found = choice["logprobs"]
      assert {len(x) for x in found.values()} == {count + more}
      assert reply["usage"]["completion_tokens"] == more
      first, *tops = found["top_logprobs"][:count]
      assert first is None is found["token_logprobs"][0]
      names, most = zip(
        *(pair for x in tops for pair in x.items()), strict=True
      )
      own = want[range(count - 1), ids[1:]], want.max(axis=1)
      got = found["token_logprobs"][1:count], most
      np.testing.assert_allclose(got, own, atol=1e-4)
      best = want.argmax(axis=1).tolist()
      assert [*names] == policy.tokenizer.pieces(best)


def test_openai_s_client(scripted):
  with online(scripted, "sesame") as (port, _), client_of(port, "sesame") as c:
    assert [m.id for m in c.models.list()] == ["m"]
    assert c.models.retrieve("m").id == "m"
    ask = {"model": "m", **ASK}
    reply = c.chat.completions.create(**ask, n=2, logprobs=True, max_tokens=40)
    assert reply.choices[0].message.content == SAID
    assert reply.choices[0].logprobs.content[0].logprob == -0.25
    more = {"top_k": 5, "min_p": 0.1}
    chunks = [*c.chat.completions.create(
      **ask, n=2, stream=True, extra_body=more, max_tokens=40,
      stream_options={"include_usage": True}, seed=1, top_p=0.9,
    )]  # fmt: skip
    texts, ends = {0: "", 1: ""}, []
    for chunk in chunks[:-1]:
      (choice,) = chunk.choices
      texts[choice.index] += choice.delta.content or ""
      ends += [choice.finish_reason] if choice.finish_reason else []
    assert texts[0] == SAID and ends == ["stop", "length"]
    assert chunks[-1].usage.completion_tokens > 40 and not chunks[-1].choices
    parts = [*c.completions.create(model="m", prompt="1 +", stream=True)]
    assert [p.choices[0].text for p in parts] == [SAID]
    assert c.completions.create(model="m", prompt="1").choices[0].text == SAID
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
      c.chat.completions.create(model="other", messages=ASK["messages"])
    with pytest.raises(openai.BadRequestError, match="n must be 1 to"):
      c.chat.completions.create(**ask, n=-1)
    with client_of(port, "simsalabim") as other:
      with pytest.raises(openai.AuthenticationError, match="key"):
        other.models.list()


# --------------------------------------------------------------- what harms it

DEEP = b'{"n": ' + b"[" * 200_000
user = lambda text: {"messages": [{"role": "user", "content": text}]}
HOSTILE = {
  "no JSON": (CHAT, b"{", 400, "no JSON object"),
  "nothing": (CHAT, b"", 400, "no JSON object"),
  "a list": (CHAT, b"[]", 400, "no JSON object"),
  "deep": (CHAT, DEEP, 400, "no JSON object"),
  "NaN": (CHAT, b'{"temperature": NaN}', 400, "NaN"),
  "infinite": (CHAT, b'{"temperature": 1e999}', 400, "temperature"),
  "digits": (CHAT, b'{"seed": ' + b"9" * 5000 + b"}", 400, "JSON"),
  "no UTF-8": (CHAT, b'{"model": "\xff"}', 400, "no JSON object"),
  "UTF-16": (CHAT, json.dumps(ASK).encode("utf-16"), 400, "no JSON object"),
  "huge": (CHAT, b" " * (4 << 20) + b"{}", 413, "bytes"),
  "surrogate": (CHAT, user("\ud800"), 400, "surrogates"),
  "surrogate of a model": (CHAT, ASK | {"model": "\udfff"}, 404, "no model"),
  "long": (TEXT, {"prompt": "1" * 70_000}, 400, "too many by"),
  "no messages": (CHAT, {}, 400, "prompt"),
  "empty messages": (CHAT, {"messages": []}, 400, "prompt"),
  "a message that is none": (CHAT, {"messages": [3]}, 400, "content"),
  "no text": (CHAT, user(None), 400, "content"),
  "an image": (CHAT, user([{"type": "image_url"}]), 400, "content"),
  "a role": (
    CHAT, {"messages": [{"role": "root", "content": "x"}]}, 400, "role",
  ),
  "a role that is a list": (
    CHAT, {"messages": [{"role": [], "content": "x"}]}, 400, "role",
  ),
  "both": (CHAT, ASK | {"prompt": "x"}, 400, "'prompt'"),
  "negative n": (CHAT, ASK | {"n": -1}, 400, "n must be 1 to 1024"),
  "large n": (CHAT, ASK | {"n": 10**30}, 400, "n must be 1 to 1024"),
  "n is true": (CHAT, ASK | {"n": True}, 400, "n must be int"),
  "n is a text": (CHAT, ASK | {"n": "2"}, 400, "n must be int"),
  "cold": (CHAT, ASK | {"temperature": -1}, 400, "temperature"),
  "nearly greedy": (CHAT, ASK | {"temperature": 1e-9}, 400, "temperature"),
  "no mass": (CHAT, ASK | {"top_p": 0}, 400, "top_p"),
  "top_k": (CHAT, ASK | {"top_k": 1.5}, 400, "top_k"),
  "min_p": (CHAT, ASK | {"min_p": 2}, 400, "min_p"),
  "limit": (CHAT, ASK | {"max_tokens": 40_000}, 400, "too many by"),
  "no limit": (CHAT, ASK | {"max_tokens": 0}, 400, "max_tokens"),
  "tokens": (CHAT, ASK | {"n": 1024, "max_tokens": 32_000}, 400, "too many"),
  "seed": (CHAT, ASK | {"seed": 2**64}, 400, "seed"),
  "stop": (CHAT, ASK | {"stop": [""]}, 400, "stop"),
  "stops": (CHAT, ASK | {"stop": ["a"] * 17}, 400, "stop"),
  "stream": (CHAT, ASK | {"stream": "yes"}, 400, "stream must be bool"),
  "likelier ones": (TEXT, {"prompt": "1", "logprobs": 5}, 400, "logprobs"),
  "echo": (CHAT, ASK | {"echo": True}, 400, "'echo'"),
  "best": (TEXT, {"prompt": "1", "best_of": 2}, 400, "'best_of'"),
  "penalty": (CHAT, ASK | {"presence_penalty": 1}, 400, "'presence_penalty'"),
  "tools": (CHAT, ASK | {"tools": [{}]}, 400, "'tools'"),
  "a name": (CHAT, ASK | {"x" * 9999: 1}, 400, "not served"),
  "no prompts": (TEXT, {"prompt": []}, 400, "prompt"),
  "an empty prompt": (TEXT, {"prompt": ["1", ""]}, 400, "prompt"),
  "prompts": (TEXT, {"prompt": ["1"] * 1025}, 400, "too many"),
  "a mixed prompt": (TEXT, {"prompt": ["1", 2]}, 400, "prompt"),
  "a dict": (TEXT, {"prompt": [{"a": 1}]}, 400, "prompt"),
  "a token": (TOKENS, {"prompt_token_ids": [512]}, 400, "0 to 511"),
  "a negative token": (TOKENS, {"prompt_token_ids": [-1]}, 400, "0 to 511"),
  "a true token": (TOKENS, {"prompt_token_ids": [1, True]}, 400, "0 to 511"),
  "text": (TOKENS, {"prompt_token_ids": "12"}, 400, "list"),
  "a text": (TOKENS, {"prompt_token_ids": ["12"]}, 400, "0 to 511"),
  "lists": (TOKENS, {"prompt_token_ids": [[1], [2]]}, 400, "0 to 511"),
  "stream of tokens": (
    TOKENS, {"prompt_token_ids": [1], "stream": True}, 400, "'stream'",
  ),
  "no memory": (CHAT, ASK | {"temperature": 0.125}, 503, "out of memory"),
  "no room": (CHAT, ASK | {"temperature": 0.25}, 400, "9 GiB"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_is_named_and_others_go_on(served, name):
  path, body, status, says = HOSTILE[name]
  body = body if isinstance(body, bytes) else json.dumps(body).encode()
  how = {"content-type": "application/json"}
  refusal(served.post(path, content=body, headers=how), status, says)
  reply = served.post(CHAT, json=ASK).json()
  assert reply["choices"][0]["message"]["content"] == SAID


def test_other_methods_types_and_names(served):
  assert (
    refusal(served.get(CHAT), 405, "Method")["code"] == "method_not_allowed"
  )
  assert served.get(CHAT).headers["allow"] == "POST"
  refusal(served.delete("/v1/models"), 405, "Method")
  for path in ("/", "/v1", "/v1/models/x", "/v1/models/..%2f..%2fetc%2fpasswd"):
    assert refusal(served.get(path), 404)["code"] == "not_found"
  text = json.dumps(ASK)
  for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
    how = {"content-type": kind}
    refusal(served.post(CHAT, content=text, headers=how), 415, "json")
  how = {"content-type": "Application/JSON; charset=utf-8"}
  assert served.post(CHAT, content=text, headers=how).status_code == 200
  assert served.get("/v1/models/m").json()["id"] == "m"
  assert served.get("/health").json() == {"status": "ok"}


def test_a_key_is_needed(scripted):
  app = serve.Server(scripted, "m", "schlüssel").app()
  with TestClient(app) as client:
    assert client.get("/health").status_code == 200
    good = "Bearer schlüssel".encode()
    for key in (b"", b"Bearer ", b"Bearer schl", b"\xff", good.lower()):
      how = {b"authorization": key}
      reply = client.post(CHAT, json=ASK, headers=how)
      assert refusal(reply, 401, "key")["code"] == "unauthorized"
      assert reply.headers["www-authenticate"] == "Bearer"
      refusal(client.get("/v1/models", headers=how), 401, "key")
    for path in ("/v1/models", "/v1/models/m"):
      assert client.get(path, headers={b"authorization": good}).is_success
    reply = client.post(CHAT, json=ASK, headers={b"authorization": good})
    assert reply.status_code == 200


def test_a_fault_of_ours_is_an_error_of_that_request(served, monkeypatch):
  fails = lambda *_: 1 / 0
  with monkeypatch.context() as m:
    m.setattr(serve.Text, "write", fails)
    assert refusal(served.post(CHAT, json=ASK), 500, "log")["type"] == (
      "server_error"
    )
  assert served.post(CHAT, json=ASK).status_code == 200


def send(port, data):
  s = socket.create_connection(("127.0.0.1", port), timeout=20)
  s.sendall(data)
  return s


def post(body, more="", path=CHAT):
  head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
  return (
    f"{head}\r\n{more or f'Content-Length: {len(body)}'}\r\n\r\n{body}".encode()
  )


def status(s):
  """Of the reply; None if there is none before the connection ends."""
  try:
    words = s.recv(65536).split()
  except ConnectionError:
    return None
  return int(words[1]) if words else None


def test_clients_that_mean_harm(scripted, monkeypatch):
  """Of a real server: each ends by itself, and others are served meanwhile."""
  monkeypatch.setattr(serve, "READ_S", 0.5)
  monkeypatch.setattr(serve, "MAX_BODY", 50_000)
  chunk = "8000\r\n" + "a" * 0x8000 + "\r\n"
  chunked = post("", "Transfer-Encoding: chunked")
  with online(scripted) as (port, _), client_of(port) as c:
    good = lambda: c.chat.completions.create(model="m", **ASK).choices[0]
    assert good().message.content == SAID
    connections = {
      "nothing": (b"", None), "half a head": (b"POST /v1/ch", None),
      "a slow body": (post("{}", "Content-Length: 99"), 408),
      "slow chunks": (chunked + b"1\r\n{", 408),
      "large chunks": (chunked + 2 * chunk.encode(), 413),
      "a false length": (post("{}", "Content-Length: -1"), 400),
      "two lengths": (
        post("{}", "Content-Length: 2\r\nContent-Length: 9"), 400),
      "a false chunk": (chunked + b"zz\r\n", None),
      "a path": (b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", 404),
      "another": (b"GET /v1/models/%00%ff/.. HTTP/1.0\r\n\r\n", 404),
      "no HTTP": (b"\x16\x03\x01\x02\x00\n\n\r\n\r\n", 400),
      "a large head": (b"GET / HTTP/1.1\r\nx: " + b"y" * 99_999, 400),
      "many headers": (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000, 400),
      "tiny chunks": (chunked + 20_000 * b"1\r\n \r\n", 408),
      "length and chunks": (
        post("2\r\n{}\r\n0\r\n\r\n", "Content-Length: 2\r\n"
          "Transfer-Encoding: chunked"), 400),
      "two requests": (2 * post(json.dumps(ASK)), 200),
    }  # fmt: skip
    opened = {k: send(port, data) for k, (data, _) in connections.items()}
    idle = [send(port, b"") for _ in range(100)]
    assert good().message.content == SAID
    found = {name: status(s) for name, s in opened.items()}
    want = {name: answer for name, (_, answer) in connections.items()}
    want["a false chunk"] = found["a false chunk"]  # 400, or an end
    assert found == want
    assert {s.recv(9) for s in idle} == {b""}  # closed by the server
    for s in (*idle, *opened.values()):
      s.close()
    assert good().message.content == SAID


def test_the_oldest_that_send_nothing_give_way(scripted, monkeypatch):
  monkeypatch.setattr(serve, "CONNECTIONS", 20)
  body = post("{}", "Content-Length: 99")
  with online(scripted) as (port, _), client_of(port) as c:
    many = [send(port, [b"", b"POST", body][i % 3]) for i in range(60)]
    assert c.completions.create(model="m", prompt="1").choices[0].text == SAID
    assert {status(s) for s in many[:40]} == {None}
    for s in many:
      s.close()


def test_a_large_body_makes_no_small_one_wait(scripted, monkeypatch):
  real, may = serve.Text.read, threading.Event()
  slow = lambda *a: (len(a[1]) < 9999 or may.wait(20)) and real(*a)
  monkeypatch.setattr(serve.Text, "read", slow)
  monkeypatch.setattr(serve, "LARGE", 9999)
  with online(scripted) as (port, _), client_of(port) as c:
    s = send(port, post(json.dumps(ASK | {"user": "x" * 9999})))
    assert c.completions.create(model="m", prompt="1").choices[0].text == SAID
    may.set()
    assert status(s) == 200
    s.close()


def test_who_does_not_read_is_left(scripted, monkeypatch):
  """After a while: what the kernel does not take is not sent."""
  monkeypatch.setattr(serve, "READ_S", 0.5)
  body = {"prompt_token_ids": [1], "n": 256}
  with online(scripted) as (port, _), client_of(port) as c:
    how = {"max_tokens": 8000, "top_k": 1}
    s = send(port, post(json.dumps(body | how), path=TOKENS))
    begin = s.recv(999)
    size = int(re.findall(rb"content-length: (\d+)", begin)[0])
    assert size > 1e7
    time.sleep(1.5)
    assert c.models.list().data
    got = 0
    with contextlib.suppress(ConnectionError):
      while part := len(s.recv(1 << 20)):
        got += part
    assert 0 < got < size
    s.close()


def until(true):
  end = time.monotonic() + 20
  while not true():
    assert time.monotonic() < end
    time.sleep(0.01)


def test_who_goes_frees_the_place(scripted, monkeypatch, caplog):
  monkeypatch.setattr(serve, "WAITING", 2)
  scripted.may.clear()
  body = post(json.dumps(ASK | {"max_tokens": 8}))
  with online(scripted) as (port, ours), client_of(port) as c:
    first = send(port, body)
    until(lambda: len(scripted.calls) == 1)  # it is being sampled
    two = [send(port, body) for _ in "12"]
    waits = lambda: [x.answer.cancelled() for x in ours.line._waiting]
    until(lambda: waits() == [False, False])
    with pytest.raises(openai.RateLimitError, match="2 prompts wait") as e:
      c.chat.completions.create(model="m", **ASK)
    assert e.value.response.headers["retry-after"] == "30"
    two[0].close()
    until(lambda: sum(waits()) == 1)
    third = send(port, body)
    until(lambda: waits() == [False, False])
    first.close()  # its rollouts are made, for nobody
    scripted.may.set()
    assert [status(s) for s in (two[1], third)] == [200, 200]
    assert [call[0] for call in scripted.calls] == [1, 2]
    two[1].close(), third.close()
  gc.collect()
  assert not caplog.records  # who goes writes nothing into the log


def test_many_may_begin_at_once(scripted):
  """An evaluation of hundreds, while the first program is compiled."""
  scripted.may.clear()
  body = post(json.dumps(ASK | {"max_tokens": 8}))
  with online(scripted) as (port, ours):
    every = [send(port, body) for _ in range(600)]
    first = lambda: sum(call[0] for call in scripted.calls)
    until(lambda: first() + len(ours.line._waiting) == 600)
    scripted.may.set()
    assert {status(s) for s in every} == {200}
    for s in every:
      s.close()


def test_what_waits_is_sampled_together(scripted, monkeypatch):
  """Alike and a power of two; a seed has the same key in any batch."""
  monkeypatch.setattr(sample, "TOGETHER", 16)
  monkeypatch.setattr(serve, "PROGRAMS", 2)
  cleared = []
  monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(1))
  line, text = serve.Line(scripted), serve.Text(scripted, "m")
  asks = lambda **how: text.read(json.dumps(ASK | how).encode(), CHAT)[1]
  scripted.may.clear()
  line.put(wait := asks())
  until(lambda: scripted.calls)
  many = [*wait]
  for i in range(7):
    many += asks(n=3, seed=i)  # 4 of 4 at a time
    many += asks(n=4, max_tokens=[200, 256][i % 2], seed=-i)
  many += asks(temperature=0.125) + asks(n=2, max_tokens=3)
  line.put(many[1:])
  scripted.may.set()
  done = [x.answer.exception(20) or x.answer.result() for x in many]
  assert [x[:3] for x in scripted.calls] == [
    (1, 1, 256), *[(4, 4, 256)] * 3, (2, 4, 256), (1, 1, 256), (1, 2, 4)
  ]  # fmt: skip
  assert [type(x) for x in done].count(serve.Refusal) == 1
  keys = [jax.random.key_data(x[4]).tolist() for x in scripted.calls]
  assert keys[1:5] == [jax.random.key_data(jax.random.key(0)).tolist()] * 4
  assert len({*map(str, keys)}) == 4 and len(cleared) == 1
  assert scripted.calls[1][3] == [0, 0, 1, 2**31 - 1]


def test_nothing_is_lost_of_many(scripted):
  """64 clients at the same time, of whom each asks four times."""

  async def all_of(port):
    base = f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="x") as c:

      async def one(i):
        for _ in range(4):
          reply = await c.chat.completions.create(model="m", n=1 + i % 3, **ASK)
          assert len(reply.choices) == 1 + i % 3

      await asyncio.gather(*map(one, range(64)))

  with online(scripted) as (port, _):
    asyncio.run(all_of(port))
  assert sum(call[0] for call in scripted.calls) == 256
  assert len(scripted.calls) < 200


# ----------------------------------------------------------------- the command


def refused(**how):
  with pytest.raises(UserError) as e:
    serve.run("", **({"host": "127.0.0.1", "port": 0} | how))
  return str(e.value)


def test_it_is_not_open_to_others_without_a_key(monkeypatch):
  monkeypatch.setattr(sample, "load", None)  # is not reached
  for host in ("0.0.0.0", "", "::"):
    for key in ("", "  "):
      monkeypatch.setenv(serve.KEY, key)
      assert mentions(refused(host=host), "--host ... BRORL_API_KEY")
  assert mentions(refused(host="999.1.1.1"), "--host=999.1.1.1 --port=0:")
  assert mentions(refused(port=99_999), "--port=99999")
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    assert mentions(refused(port=port), f"--port={port} ... in use")


@pytest.mark.parametrize("where, host, says", [
  ("", "127.0.0.1", "embedded: http://127.0.0.1:"),
  ("runs/a", "::1", "runs/a: http://[::1]:"),
  ("who/model", "localhost", "who/model: http://127.0.0.1:"),
])  # fmt: skip
def test_the_name_of_the_model(
  scripted, monkeypatch, capsys, where, host, says
):
  monkeypatch.setattr(sample, "load", lambda given: scripted)
  monkeypatch.setattr(serve.uvicorn.Server, "run", lambda *_, **__: None)
  serve.run(where, host=host, port=0)
  assert capsys.readouterr().out.startswith(says)


def test_a_missing_library_is_one_line(failed, monkeypatch):
  monkeypatch.delitem(sys.modules, "brorl_jax.main.serve", raising=False)
  from brorl_jax import main

  monkeypatch.delattr(main, "serve", raising=False)
  monkeypatch.setitem(sys.modules, "uvicorn", None)
  assert mentions(failed("--mode=serve"), "pip install 'brorl_jax[serve]'")


@pytest.mark.ci
def test_the_command_serves_until_a_signal():
  command = [sys.executable, "-m", "brorl_jax.main", "--mode=serve", "--port=0"]
  how = {"stderr": subprocess.PIPE,
    "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}  # fmt: skip
  env = os.environ | {serve.KEY: "k"}
  with subprocess.Popen(command, env=env, **how) as child:
    try:
      line = child.stdout.readline()
      port = int(line.removesuffix("/v1\n").rpartition(":")[2])
      with client_of(port, "k") as c:
        reply = c.completions.create(model="embedded", prompt="3 + 4 =", n=2)
        assert len(reply.choices) == 2
      child.send_signal(2)
      assert child.wait(20) == 130
      assert child.stderr.read() == "interrupted\n"
    finally:
      child.kill()

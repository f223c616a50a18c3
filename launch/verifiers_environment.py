"""Trains in an environment of the package verifiers, NAME.

    pip install '.[verifiers]'  # and the environment
    python -m launch.verifiers_environment NAME > train.jsonl
    brorl --config=n512:tiny --workdir=runs/NAME \\
      --config.data.files=train.jsonl \\
      --config.reward.verifier=launch/verifiers_environment.py:step

After NAME may come its arguments as JSON, and then `eval` for the data set of
its evaluation. `step` runs the environment's own rollout from the beginning,
with a client that repeats what the policy said: set-up, replies, what ends it
and the rubric are its own. So it has to reply the same each time, in one text
of a user. Tools and rewards of a whole group are refused.
"""

import functools
import json
import sys
from typing import Any

import verifiers as vf  # pyright: ignore[reportMissingImports]
from verifiers import clients, types  # pyright: ignore[reportMissingImports]

environment = functools.cache(
  lambda name, arguments: vf.load_environment(name, **json.loads(arguments))
)


class Reply(Exception):
  """What the environment says before a turn that the policy has not taken."""


class Said(clients.OpenAIChatCompletionsClient):
  """Says the policy's turns of a conversation again."""

  def __init__(self, messages: list[dict[str, str]]):
    super().__init__(None)
    self._messages = messages

  async def get_response(
    self, prompt: Any, model: str, sampling_args: Any, tools=None, **_: Any
  ) -> Any:
    if tools:
      raise ValueError("the environment has tools; they are not posed")
    asked = [{"role": m.role, "content": m.content} for m in prompt]
    known = self._messages[: len(asked)]
    if asked[: len(known)] != known:
      raise ValueError("the environment now says what it did not say before")
    if len(asked) < len(self._messages):
      content = self._messages[len(asked)]["content"]
      end = {"finish_reason": "stop", "is_truncated": False}
      message = types.ResponseMessage(content=content, **end)
      return types.Response(id="", created=0, model=model, message=message)
    match asked[len(known) :]:
      case [{"role": "user", "content": str(text)}]:
        raise Reply(text)
    raise ValueError("the environment replies by more than a user's text")


async def step(messages: Any, example: Any) -> Any:
  env = environment(example["environment"], example["arguments"])
  row = {**example["row"], "prompt": example["messages"]}
  try:
    done = await env.run_rollout(row, Said(messages), "policy", {})
  except Reply as reply:
    return str(reply)
  if done["error"]:
    raise RuntimeError(done["error"])
  return done["reward"]


if __name__ == "__main__":
  name, arguments, split = [*sys.argv[1:], "{}", ""][:3]
  env = environment(name, arguments)
  for row in env.get_eval_dataset() if split else env.get_dataset():
    of = {"environment": name, "arguments": arguments}
    print(json.dumps({"messages": row["prompt"], **of, "row": row}))

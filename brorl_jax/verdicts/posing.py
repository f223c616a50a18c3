"""Builds the conversation that the policy sees from an example."""

from __future__ import annotations

from brorl_jax.verdicts.base import Example


def posed(
  example: Example, *, system: str = "", instruction: str = ""
) -> list[dict[str, str]]:
  """The messages of an example with the texts of a config; "" adds nothing.

  Args:
    example: Its last message is the user's.
    system: A first message, unless the example has a system message.
    instruction: Lines after the last question.
  """
  messages = [dict(message) for message in example.messages]
  parts = (example.question, instruction)
  messages[-1]["content"] = "\n".join(part for part in parts if part)
  if system and all(message["role"] != "system" for message in messages):
    messages.insert(0, {"role": "system", "content": system})
  return messages

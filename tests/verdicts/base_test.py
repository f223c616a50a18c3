import pytest

from brorl_jax.verdicts.base import Example, Verdict, posed


@pytest.mark.parametrize(
  "status, reward", [("pass", 1.0), ("fail", 0.0), ("invalid", 0.0)]
)
def test_reward_is_the_status_and_ignores_partial_credit(status, reward):
  assert Verdict(status, 0.75, "", "4").reward == reward


@pytest.mark.parametrize(
  "reason, code", [("", ""), ("wrong", "wrong"), ("too long: 5: 3", "too long")]
)
def test_the_code_is_the_reason_up_to_its_details(reason, code):
  assert Verdict("fail", 0.0, reason, "4").code == code


def test_the_question_is_what_the_user_asked_last():
  messages = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
  )
  assert Example("a", "math", "b", messages, {}).question == "1 + 1?"


def example(*said):
  messages = tuple({"role": role, "content": text} for role, text in said)
  return Example("a", "d", "t", messages, {})


ALONE = example(("user", "1 + 1?"))
TURNS = example(("user", "1 + 1?"), ("assistant", "2"), ("user", "2 + 2?"))
TOLD = example(("system", "Be kind."), ("user", "1 + 1?"))


@pytest.mark.parametrize(
  "which, added, want",
  [
    (ALONE, {}, [("user", "1 + 1?")]),
    (ALONE, {"instruction": "Box it."}, [("user", "1 + 1?\nBox it.")]),
    (ALONE, {"system": "Be brief.", "instruction": "Box."}, [("system",
      "Be brief."), ("user", "1 + 1?\nBox.")]),
    (TURNS, {"system": "Be brief.", "instruction": "I"}, [("system",
      "Be brief."), ("user", "1 + 1?"), ("assistant", "2"), ("user",
      "2 + 2?\nI")]),
    # An example that says it itself knows better.
    (TOLD, {"system": "Be brief."}, [("system", "Be kind."), ("user",
      "1 + 1?")]),
  ],
)  # fmt: skip
def test_what_is_added_and_where(which, added, want):
  before = [dict(message) for message in which.messages]
  got = [(m["role"], m["content"]) for m in posed(which, **added)]
  assert got == want
  assert [*which.messages] == before  # an example is never changed

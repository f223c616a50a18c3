"""Checkers from the library if-verifiable (0.1.2), `brorl_jax[if]`.

Its interface needs the package datasets (250 MB) only to download benchmarks:
pip install --no-deps if-verifiable; pip install emoji immutabledict langdetect
nltk syllapy. A few kinds also need data of nltk; `check` raises for those.
"""

import functools
import importlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Mapping
from typing import Any

from brorl_jax.verdicts.math import expressions

# 16,384 tokens have up to 80,000 characters; some checkers are quadratic.
MAX_RESPONSE = 100_000
INSTALL = 'pip install "brorl_jax[if]"'

# The language of the response, and the 58 kinds of IFBench
# (https://arxiv.org/abs/2507.02833).
KINDS = frozenset(expressions.table("ifbench.txt").split())

_NLTK_DATA = (
  "download it: python -m nltk.downloader punkt_tab stopwords"
  " averaged_perceptron_tagger_eng"
)
# Long enough that "the tenth sentence" exists, with paragraphs and lines.
_PROBE = "\n\n".join(["The first of two sentences. A second, in it?"] * 30)


def checked(kind: str, kwargs: Mapping[str, Any], response: str) -> bool:
  """Whether a response follows an instruction; runs in the jail.

  If the checker raises, or the response is longer than `MAX_RESPONSE`, it does
  not. ImportError or LookupError: the library or its data is not installed.
  """
  checker = _checker(kind)
  if len(response) > MAX_RESPONSE:
    return False
  try:
    if kind == "language:response_language":
      # Not the library's: it accepts "111", which has no language, in any.
      detect = importlib.import_module("langdetect").detect
      return detect(response) == kwargs["language"]
    checker.build_description(**kwargs)
    return bool(checker.check_following(response))
  except Exception as error:
    if type(error) is LookupError:  # nltk's, for data; not a KeyError
      raise
    return False


def check(kind: str, kwargs: Mapping[str, Any]) -> None:
  """Refuses an instruction that could not be checked later, by ValueError."""
  where = f"instruction {kind!r}"
  try:
    checker = _checker(kind)
  except LookupError as error:
    raise ValueError(f"{where}: {error.args[0]}") from error
  except ImportError as error:  # not an error of the example
    raise ImportError(f"{where}: {error}") from error
  parameters = inspect.signature(checker.build_description).parameters.values()
  wanted = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
  for name in sorted(kwargs.keys() - wanted):
    unknown = f"kwarg {name} = {kwargs[name]!r} is unknown"
    raise ValueError(f"{where}: {unknown}; use {', '.join(wanted) or 'none'}")
  for name in wanted:
    if name not in kwargs:  # the library would choose one at random
      raise ValueError(f"{where}: kwarg {name} is missing; add it")
  state = random.getstate()
  try:
    checker.build_description(**kwargs)
    if random.getstate() != state:
      # For example, it replaces a negative number by a random one per response.
      raise ValueError("the library would replace an argument at random")
    checker.check_following(_PROBE)
  except Exception as error:
    fault = f"kwargs = {dict(kwargs)!r}: {type(error).__name__} {error}"
    if type(error) is LookupError:
      fault = f"data of nltk is missing; {_NLTK_DATA}"
    raise ValueError(f"{where}: {fault}".replace("\n", " ")) from error
  finally:
    random.setstate(state)


def _checker(kind: str) -> Any:
  registry = _registry()
  if kind not in registry:
    raise LookupError(f"if-verifiable does not know it; {INSTALL}")
  return registry[kind](kind)


@functools.cache
def _registry() -> dict[str, Any]:
  """The checker classes by id; cached because the import takes 2 s."""
  try:
    _skip_package_init("if_verifiable")
    load = importlib.import_module
    # Without a seed, the language of a short text is random in each call.
    load("langdetect").DetectorFactory.seed = 0
    nltk: Any = load("nltk")
    # Importing IFBench's checkers would download data.
    download, nltk.download = nltk.download, lambda *_, **__: False
    try:
      bench = load("if_verifiable.ifbench.instructions_registry")
      ifeval = load("if_verifiable.ifeval.instructions_registry")
    finally:
      nltk.download = download
  except ImportError as error:
    needs = f"needs the library if-verifiable ({error})"
    raise ImportError(f"{needs}; {INSTALL}") from error
  return {**bench.INSTRUCTION_DICT, **ifeval.INSTRUCTION_DICT}


def _skip_package_init(name: str) -> None:
  """Registers a package without its __init__, which imports datasets."""
  if name in sys.modules:
    return
  spec = importlib.util.find_spec(name)
  if spec is None:
    raise ImportError(f"No module named {name!r}")
  sys.modules[name] = importlib.util.module_from_spec(spec)

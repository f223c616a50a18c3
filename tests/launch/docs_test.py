"""Tests of launch/docs.sh: a site of the READMEs and docstrings."""

import os
import pathlib
import re
import shutil
import sys

import pytest
from launchers import LAUNCH, ran

from launch.docs import pages


def test_a_docstring_by_hand():
  """What is indented, and examples, become blocks; arguments do not."""
  text = (
    "Adds.\n\n  a + b\n\nArgs:\n  a: One.\n\nIt is:\n  small\n\n>>> f(1)\n2"
  )
  assert pages.markdown(text) == (
    "Adds.\n\n```text\na + b\n```\n\nArgs:\n  a: One.\n\nIt is:\n\n"
    "```text\nsmall\n```\n\n```pycon\n>>> f(1)\n2\n```"
  )


def test_a_page_by_hand(tmp_path, monkeypatch):
  monkeypatch.setattr(pages, "ROOT", tmp_path)
  (tmp_path / "a" / "b").mkdir(parents=True)
  (tmp_path / "a" / "README.md").write_text("")
  text = "x [1](c.py) [2](a) [3](a/b#d) [4](e.md) ![5](f.png)\n- g\n- h\n"
  (tmp_path / "x.md").write_text(f"{text}```\n[1](c.py)\n```\n")
  page, linked = pages.page(pathlib.Path("x.md"))
  assert page == (
    "x [1](c.py.md) [2](a/README.md) [3](a/b.md) [4](e.md) ![5](f.png)\n\n"
    "- g\n- h\n```\n[1](c.py)\n```\n"
  )
  assert {*map(str, linked)} == {"c.py", "a/b", "f.png"}


def test_every_page_of_the_menu_is_written_and_every_document_in_it(tmp_path):
  pages.write(tmp_path)
  menu = (LAUNCH / "docs" / "mkdocs.yml").read_text().split("\nnav:\n")[1]
  named = set(re.findall(r"[\w/-]+\.md", menu))
  assert {name for name in named if not (tmp_path / name).exists()} == set()
  assert {*map(str, pages.documents())} - named == set()
  assert "::: brorl_jax.rl.losses" in (tmp_path / "api" / "rl.md").read_text()


@pytest.fixture(scope="module")
def site() -> pathlib.Path:
  for _ in range(2):
    env = os.environ | {"PYTHON": sys.executable}
    done = ran("bash", LAUNCH / "docs.sh", env=env)
    assert done.returncode == 0, done.stdout + done.stderr
  assert "installing" not in done.stdout  # the second time
  return LAUNCH.parent / "build" / "docs" / "site"


@pytest.mark.slow
def test_the_site_has_the_examples_and_nothing_from_elsewhere(site):
  text = (site / "api" / "rl.html").read_text()
  assert text.count("&gt;&gt;&gt; ") > 100 and "Raises ValueError" in text
  outside = re.compile(r"<(?:script|link|img|iframe)[^>]*https?://")
  assert not [p for p in site.rglob("*.html") if outside.search(p.read_text())]


@pytest.mark.slow
def test_the_site_is_searched_without_a_server(site, tmp_path):
  browser = shutil.which("chromium") or pytest.skip("there is no Chromium")
  flags = f"--headless --no-sandbox --user-data-dir={tmp_path} --dump-dom"
  flags = [*flags.split(), "--virtual-time-budget=9000"]
  done = ran(browser, *flags, f"{(site / 'index.html').as_uri()}?q=mass")
  assert re.search(r"[1-9]\d* matching documents", done.stdout)

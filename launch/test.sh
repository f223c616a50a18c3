#!/usr/bin/env bash
# Format, lint, types and tests. CI runs this with --all and nothing else.
#
#   bash launch/test.sh                  the tests of a desk: 3 to 5 minutes
#   bash launch/test.sh --all            all but the slow tests: 12 to 20 minutes
#   bash launch/test.sh -k losses        any flag of pytest
#
# PYTHON= and VENV= as in environment.sh.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

tier=()
if [[ ${1:-} == --all ]]; then
  tier=(-m "not slow")
  shift
fi
prepare requirements-dev.txt
cd "$root"
# Model-written code is judged in a jail; without bubblewrap only its inner walls
# are tested.
if ! command -v bwrap >/dev/null && command -v apt-get >/dev/null && ((EUID == 0)); then
  say "installing bubblewrap"
  { apt-get update -qq && apt-get install -y -qq bubblewrap; } >/dev/null ||
    say "bubblewrap could not be installed: tests of the full jail are skipped"
fi
# Named, so that an environment kept in the repository is not checked.
ours=(brorl_jax configs launch tests third_party)
say "ruff format --check"
"$python" -m ruff format --check "${ours[@]}" ||
  fail "not formatted; mend with: '$python' -m ruff format ${ours[*]}"
say "ruff check"
"$python" -m ruff check "${ours[@]}"
say "pyright"
"$python" -m pyright --pythonpath "$python"
# With byte code kept, or each worker and each command compiles all it imports.
unset PYTHONDONTWRITEBYTECODE
say "pytest${*:+ $*}"
# In the order of their names, in which the longest files are not the last.
exec "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
  ${tier[@]+"${tier[@]}"} "$@"

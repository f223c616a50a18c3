#!/usr/bin/env bash
# Format, lint, types and tests. CI runs this with --all and nothing else.
#
#   bash launch/test.sh                  the tests of a desk: 3 minutes
#   bash launch/test.sh --all            all but the slow tests: 12 minutes
#   bash launch/test.sh -k losses        any flag of pytest
#
# PYTHON= and VENV= as in environment.sh.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

tier=() ahead=""
if [[ ${1:-} == --all ]]; then
  tier=(-m "not slow")
  ahead=tests/plan/compiled_test.py
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
"$python" -m pyright --pythonpath "$python" &
types=$! # one core; what is installed below needs the other
# With byte code kept, or each worker and each command compiles all it imports.
unset PYTHONDONTWRITEBYTECODE
if [[ -n "$ahead" ]]; then
  # The paper's run, compiled for eight H100: alone, as it needs all cores. The
  # compiler lies aside of the environment, in which jax would look for a GPU:
  # what of jax[cuda12] it needs, 2.5 of 5.9 GB.
  export BRORL_AOT="${python%/bin/python}/ahead"
  jax="$("$python" -c 'import jax; print(jax.__version__)')"
  if [[ ! -f "$BRORL_AOT/$jax" ]]; then
    say "installing XLA's compiler for GPUs into $BRORL_AOT"
    rm -rf "$BRORL_AOT"
    { "$python" -m pip install --quiet --disable-pip-version-check --no-input \
      --no-deps --target "$BRORL_AOT" "jax-cuda12-plugin==$jax" \
      "jax-cuda12-pjrt==$jax" nvidia-cuda-nvcc-cu12 "nvidia-cudnn-cu12<10" \
      nvidia-cublas-cu12 && touch "$BRORL_AOT/$jax"; } ||
      say "it could not be installed: its test is skipped"
  fi
  wait "$types"
  say "pytest $ahead"
  "$python" -m pytest -rs --durations=1 -m "not slow" "$ahead"
  tier+=(--ignore "$ahead")
fi
wait "$types"
say "pytest${*:+ $*}"
# In the order of their names, in which the longest files are not the last.
exec "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
  ${tier[@]+"${tier[@]}"} "$@"

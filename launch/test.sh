#!/usr/bin/env bash
# Format, lint, types and tests. CI runs this with --all and nothing else.
#
#   bash launch/test.sh                  the tests of a desk: 3 to 5 minutes
#   bash launch/test.sh --all            all but the slow tests: 12 to 20 minutes
#   bash launch/test.sh -k losses        any flag of pytest
#
# With --all programs are also compiled for TPUs, by a libtpu that is installed
# into a folder of its own: in the environment jax would look for a TPU at every
# start.
#
# PYTHON= and VENV= as in environment.sh. BRORL_AOT= names another such folder.
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

# compiler_for_tpus: libtpu at the pin of the installed jax, into $BRORL_AOT.
compiler_for_tpus() {
  local pin
  pin="$("$python" - <<'PY'
import importlib.metadata, re

for line in importlib.metadata.requires("jax"):
  if re.match(r"libtpu\b", line) and re.search(r"extra == .tpu\b", line):
    print(line.split(";")[0].strip())
PY
)"
  export BRORL_AOT="${BRORL_AOT:-$("$python" -c 'import sys; print(sys.prefix)')/aot}"
  [[ "$(cat "$BRORL_AOT/pin" 2>/dev/null)" == "$pin" ]] && return
  say "installing $pin into $BRORL_AOT"
  rm -f "$BRORL_AOT/pin"
  if "$python" -m pip install --quiet --disable-pip-version-check --no-input \
    --no-deps --upgrade --target "$BRORL_AOT" "$pin"; then
    printf '%s\n' "$pin" >"$BRORL_AOT/pin"
  else
    say "$pin could not be installed: no program is compiled for TPUs"
  fi
}
if ((${#tier[@]})); then
  compiler_for_tpus
fi
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

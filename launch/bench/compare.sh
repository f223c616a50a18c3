#!/usr/bin/env bash
# Ours and a peer's take turns on this machine; one line of JSON says how
# they compare. The peers are the folders of third_party/peers.
#
#   bash launch/bench/compare.sh openvino
#   bash launch/bench/compare.sh tunix --workload=w2 --n=64 --dtype=bfloat16 --rounds=3
#   bash launch/bench/compare.sh trl --workload=l1 --n=512 --rounds=3
#
# Workloads w1 to w4 sample, l1 to l3 are whole steps of training. All flags are
# those of interleave.py, and of rollout.py or update.py.
#
# PYTHON= and VENV= as in environment.sh, for ours; for the peer:
#
#   PEER_PYTHON   interpreter to start from   (default: one that fits is looked for)
#   PEERS         folder of the environments  (default .venv-peers in the repository)
#
# Read the rates per CPU-second, and nothing from a machine that is busy.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
  awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "${BASH_SOURCE[0]}"
  exit
fi

known() { (cd "$root/third_party/peers" && ls -d -- */) | tr -d '/' | paste -sd ' ' -; }

# interpreter RELEASE: one of that release, or nothing.
interpreter() {
  local candidate
  for candidate in "${PEER_PYTHON:-}" "python$1" python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    if [[ -n "$candidate" && "$(release "$candidate")" == "$1" ]]; then
      printf '%s' "$candidate"
      return
    fi
    # Asked for: nothing else will do.
    if [[ -n "$candidate" && "$candidate" == "${PEER_PYTHON:-}" ]]; then
      return
    fi
  done
}

# digest FOLDER INTERPRETER: what an environment was installed from.
digest() {
  "$2" - "$1" <<'PY'
import hashlib, pathlib, sys

digest = hashlib.sha256(sys.version.encode())
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.txt")):
  digest.update(path.read_bytes())
print(digest.hexdigest())
PY
}

# prepare_peer NAME: its environment, as its lock says, and the interpreter in
# $python. The stamp is written last, as in environment.sh.
prepare_peer() {
  local folder="$root/third_party/peers/$1" venv version base now
  venv="$(absolute "${PEERS:-$root/.venv-peers}")/$1"
  python="$venv/bin/python"
  version="$(sed -n '1s/^# python //p' "$folder/requirements.txt")"
  if ! usable "$venv" || [[ "$(release "$python")" != "$version" ]]; then
    base="$(interpreter "$version")"
    [[ -n "$base" ]] ||
      fail "$1 needs Python $version${PEER_PYTHON:+, which PEER_PYTHON=$PEER_PYTHON is not}; give one: PEER_PYTHON=/path/to/python$version"
    make_venv "$base" "$version" "$venv"
  fi
  now="$(digest "$folder" "$python")"
  if [[ "$(cat "$venv/.brorl_jax.stamp" 2>/dev/null)" == "$now" ]]; then
    return
  fi
  rm -f "$venv/.brorl_jax.stamp"
  say "installing third_party/peers/$1/requirements.txt into $venv (up to 4 GB)"
  pip_install -r "$folder/requirements.txt" -c "$folder/lock.txt"
  if [[ -f "$folder/remove.txt" ]]; then
    "$python" -m pip uninstall --quiet --yes -r "$folder/remove.txt" ||
      fail "pip could not remove what remove.txt names, see above"
  fi
  printf '%s\n' "$now" >"$venv/.brorl_jax.stamp"
}

peer="${1:-}"
[[ "$peer" =~ ^[a-z0-9_]+$ && -d "$root/third_party/peers/$peer" ]] ||
  fail "which peer? one of: $(known)"
shift
# "--flag value" as one word: interleave.py would take the value for a command.
flags=()
while (($#)); do
  if [[ "$1" == --* && "$1" != *=* && $# -gt 1 && "$2" != --* ]]; then
    flags+=("$1=$2")
    shift
  else
    flags+=("$1")
  fi
  shift
done
set -- ${flags[@]+"${flags[@]}"} # none is an error to bash 3
# Refused before anything is installed.
for flag; do
  if [[ "$flag" == --rounds=* && ! "$flag" =~ =0*[1-9][0-9]*$ ]]; then
    fail "$flag must be at least 1"
  fi
done
ours_module=launch.bench.rollout theirs=run.py
if [[ " $* " == *" --workload=l"* ]]; then
  ours_module=launch.bench.update theirs=update.py
fi
[[ -f "$root/third_party/peers/$peer/$theirs" ]] ||
  fail "$peer has no $theirs: workloads w1 to w4 sample, l1 to l3 train"
# Standard output is for the result.
{
  prepare requirements.txt
  ours="$python"
  prepare_peer "$peer"
} >&2
cd "$root"
exec "$ours" -m launch.bench.interleave "$@" \
  "$ours" "$ours_module" "$python" "third_party/peers/$peer/$theirs"

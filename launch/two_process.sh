#!/usr/bin/env bash
# One run in two processes on the CPUs of this machine, as on two hosts: to try a
# config or a change before many machines wait for it.
#
#   bash launch/two_process.sh --config=configs/n512.py --workdir=runs/two
#   PROCESSES=4 bash launch/two_process.sh ...     any flag of brorl_jax.main
#
# Process 0 writes to the terminal, the others to files that the first line names.
# The exit status is the first that is neither 0 nor 75; else 75, after which the
# same command resumes, if any process said so; else 0.
#
#   PYTHON   interpreter with brorl_jax             (default python: the active one)
#   GRACE    seconds the others get after one died  (default 60)
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

processes="${PROCESSES:-2}" grace="${GRACE:-60}"
[[ "$processes" =~ ^[1-9][0-9]*$ ]] || fail "PROCESSES=$processes is not a number of at least 1"

# Below 32768, where the system takes ports for others from.
free_port() {
  local port
  while port=$((20000 + RANDOM % 10000)) && (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
    continue
  done
  printf '%s' "$port"
}

port="$(free_port)" logs="$(mktemp -d)"
say "processes 1 to $((processes - 1)) write to $logs/process_I.log"

# The index of pids is that of the process; one that ended is taken out. Written
# for the bash 3.2 of macOS, which has no wait -n.
pids=()
forward() { kill "-$1" ${pids[@]+"${pids[@]}"} 2>/dev/null || true; }
trap 'forward TERM' TERM
trap 'forward HUP' HUP
trap 'forward INT' INT

for ((i = 0; i < processes; i++)); do
  command=("${PYTHON:-python}" -m brorl_jax.main "$@"
    "--coordinator=127.0.0.1:$port" "--processes=$processes" "--process_id=$i")
  if ((i == 0)); then
    JAX_PLATFORMS=cpu "${command[@]}" &
  else
    JAX_PLATFORMS=cpu "${command[@]}" >"$logs/process_$i.log" 2>&1 &
  fi
  pids[i]=$!
done

status=0 deadline=""
while ((${#pids[@]})); do
  sleep .2 || true # Ctrl-C ends it too
  for i in "${!pids[@]}"; do
    kill -0 "${pids[i]}" 2>/dev/null && continue
    code=0
    wait "${pids[i]}" || code=$?
    unset "pids[i]"
    ((code)) || continue
    say "process $i ended with status $code"
    if ((status == 0 || status == 75)); then
      status=$code
    fi
    deadline="${deadline:-$((SECONDS + grace))}"
  done
  # KILL: on a TERM they would save a step, for which they need the one that died.
  if [[ -n "$deadline" ]] && ((SECONDS >= deadline)); then
    forward KILL
  fi
done
exit "$status"

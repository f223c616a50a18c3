#!/usr/bin/env bash
# N = 16 against N = 512 from one checkpoint, at equal hours: both arms are trained and
# evaluated, then the paper's tables are printed. launch/paper/README.md has the rest.
#
#   bash launch/paper/compare.sh
#   HOURS=20 bash launch/paper/compare.sh --config.run.seed=1 -- --config.eval.n=4
#
# Flags before "--" are those of both trainings, flags after it of the evaluations.
# Run it again and it resumes; with more HOURS it goes on from there.
#
#   HOURS       hours of steps and saving of each arm  (default 140, as the paper's t-test)
#   CHECKPOINT  where both begin   (default nvidia/Nemotron-Research-Reasoning-Qwen-1.5B@v2)
#   DATA        folder of --mode=prepare; empty: the preset's own data  (default data)
#   PRESET      of configs n16 and n512                                 (default 1p5b)
#   SUITE       config of the evaluations                               (default suite:all)
#   WORKDIR     where everything goes                                   (default runs/paper)
#   PYTHON, VENV  as in environment.sh
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"

case "${1:-}" in
  -h | --help) exec sed -n '2,18s/^# \{0,1\}//p' "$0" ;;
esac
hours="${HOURS:-140}" preset="${PRESET:-1p5b}" suite="${SUITE:-suite:all}"
[[ "$hours" =~ ^[0-9]*\.?[0-9]+$ && "$hours" =~ [1-9] ]] ||
  fail "HOURS=$hours is not a positive number; give hours, such as HOURS=140"
model="${CHECKPOINT-nvidia/Nemotron-Research-Reasoning-Qwen-1.5B@v2}"
data="${DATA-$PWD/data}" workdir="$(absolute "${WORKDIR:-$PWD/runs/paper}")"
[[ ! -e "$model" ]] || model="$(absolute "$model")"
[[ "$suite" != *,* ]] || suite="${suite%%,*},$(absolute "${suite#*,}")"
trained=() evaluated=()
while (($#)) && [[ "$1" != -- ]]; do
  trained+=("$1")
  shift
done
if (($#)); then
  evaluated=("${@:2}")
fi
if [[ -n "$data" ]]; then
  data="$(absolute "$data")" files=""
  for file in "$data"/*.jsonl; do
    [[ -e "$file" ]] || fail "DATA=$data has no .jsonl file; make them: brorl --mode=prepare --set=deepscaler,eurus2,scp116k,llama_nemotron_if --workdir=$data; or DATA= for the preset's own"
    [[ "$file" != *\'* ]] || fail "$file has an apostrophe; rename it"
    files+="'$file',"
  done
  trained=("--config.data.files=$files" --config.data.puzzles=True
    --config.data.skip_bad=True ${trained[@]+"${trained[@]}"})
fi
prepare requirements.txt
cd "$root"

brorl() { "$python" -m brorl_jax.main "$@"; }

# reached RUN: its last step, and whether it has had its hours, as the report counts them.
# Half a step early is as near as half a step late.
reached() {
  "$python" - "$1/metrics.jsonl" "$hours" <<'PY'
import json, pathlib, sys

path, seconds = pathlib.Path(sys.argv[1]), 3600 * float(sys.argv[2])
lines = path.read_text().splitlines(True) if path.exists() else []
steps = [json.loads(line) for line in lines if line.endswith("\n")]
each = [x["time/step_s"] + x["time/checkpoint_s"] - x["time/compile_s"] for x in steps]
half = sum(each) / len(each) / 2 if each else 0
print(steps[-1]["step"] if steps else 0, "yes" if sum(each) + half >= seconds else "no")
PY
}

# train NAME CONFIG: until its hours are over; a signal ends it like a run.
train() {
  local run="$workdir/$1" config="$2" pid status running=yes enough="" step
  read -r step enough < <(reached "$run")
  if [[ "$enough" == yes ]]; then
    say "$1 has had its $hours hours, at step $step"
    return
  fi
  say "$1: $config for $hours hours"
  # More steps than the hours have: the preset's number would end one arm early.
  # Not the function: the signal is for the run, not for a shell around it.
  "$python" -m brorl_jax.main --config="$config" --workdir="$run" \
    --config.policy.checkpoint="$model" --config.run.steps=100000 \
    ${trained[@]+"${trained[@]}"} &
  pid=$!
  trap 'kill -TERM "$pid" 2>/dev/null || true' TERM HUP INT
  while kill -0 "$pid" 2>/dev/null; do
    sleep 2 || true
    read -r step enough < <(reached "$run")
    if [[ "$enough" == yes ]]; then
      kill -TERM "$pid" 2>/dev/null || true
      break
    fi
  done
  # A trap ends a wait early, with a status above 128; of a process that has ended
  # wait still knows the status.
  status=128
  while ((status >= 128)); do
    kill -0 "$pid" 2>/dev/null || running=""
    status=0
    wait "$pid" || status=$?
    [[ -n "$running" ]] || break
  done
  trap - TERM HUP INT
  if ((status)) && [[ "$status" != 75 || "$enough" != yes ]]; then
    exit "$status"
  fi
}

# evaluate NAME CHECKPOINT: into a folder of its own.
evaluate() {
  say "evaluating $1"
  brorl --mode=evaluate --config="$suite" --workdir="$workdir/evals/$1" \
    --config.policy.checkpoint="$2" ${evaluated[@]+"${evaluated[@]}"}
  folders+=("--workdir=$workdir/evals/$1")
}

folders=("--workdir=$workdir/n16" "--workdir=$workdir/n512")
evaluate start "$model" # first: its sets must be there after the training too
train n16 "n16:$preset"
train n512 "n512:$preset"
for name in n16 n512; do
  read -r step _ < <(reached "$workdir/$name")
  evaluate "$name-step-$step" "$workdir/$name/checkpoints/$step"
done
brorl --mode=report --paper "${folders[@]}"

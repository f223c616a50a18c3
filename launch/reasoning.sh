#!/usr/bin/env bash
# What n512.py:steps teaches: the run, then the same policy before and after it, with 512
# samples of each held-out prompt, on harder puzzles, and answering at once.
#
#   bash launch/reasoning.sh
#   bash launch/reasoning.sh --config.run.seed=1        any flag of a run's config
#
# Run it again and it resumes. 20 to 30 minutes on 2 cores. WORKDIR=
# is where everything goes (default runs/reasoning); PYTHON= and VENV= as in
# environment.sh. The last line names the page.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

prepare requirements.txt
workdir="$(absolute "${WORKDIR:-$root/runs/reasoning}")"
cd "$root"
run="$workdir/n512"
flags=("$@")

brorl() { "$python" -m brorl_jax.main ${flags[@]+"${flags[@]}"} "$@"; }

# evaluate NAME CONFIG [FLAG...]: the policy at the start and at the end.
evaluate() {
  local name="$1" config="$2" at policy
  shift 2
  for at in start end; do
    policy=embedded:steps
    [[ "$at" == start ]] || policy="$run"
    say "$name, $at"
    brorl --mode=evaluate --config="configs/$config" --workdir="$workdir/$name-$at" \
      --config.policy.checkpoint="$policy" "$@"
  done
}

brorl --config=configs/n512.py:steps --workdir="$run"
evaluate harder harder.py
evaluate at-once n512.py:steps --config.data.domains.gym.instruction="Answer at once."
evaluate n512-of-512 n512.py:steps --config.eval.n=512
for name in harder at-once; do
  "$python" -m brorl_jax.main --mode=report --workdir="$workdir/$name-end" \
    --workdir="$workdir/$name-start"
done
"$python" -m brorl_jax.main --mode=report --workdir="$run" \
  --workdir="$workdir/n512-of-512-start" --workdir="$workdir/n512-of-512-end"

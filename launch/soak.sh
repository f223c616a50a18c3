#!/usr/bin/env bash
# Breaks hundreds of short runs, each in one way, to see that nothing is lost. On CPUs,
# under Linux.
#
#   bash launch/soak.sh --workdir=runs/soak                       about two hours on 2 cores
#   bash launch/soak.sh --kills=20 --workdir=DIR                  any flag of launch.faults
#
# One line of JSON per broken run, a table at the end. Status 0 only if every run ended
# as one that nobody disturbed, bit for bit. PYTHON= and VENV= as in environment.sh.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

workdir="" flags=()
for flag in "$@"; do
  case "$flag" in
    --workdir=*) workdir="$(absolute "${flag#--workdir=}")" ;;
    *) flags+=("$flag") ;;
  esac
done
[[ -n "$workdir" ]] || fail "--workdir=DIR is missing: a new folder for the runs"
prepare requirements.txt
cd "$root"
say "python -m launch.faults --workdir=$workdir ${flags[*]:-}"
JAX_PLATFORMS=cpu exec "$python" -m launch.faults --workdir="$workdir" \
  ${flags[@]+"${flags[@]}"}

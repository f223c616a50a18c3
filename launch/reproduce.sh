#!/usr/bin/env bash
# The revival experiment, unattended: does N = 512 revive what N = 16 left standing?
#
#   bash launch/reproduce.sh                 into runs/revival, at most 3 hours on 2 cores
#   WORKDIR=runs/trial bash launch/reproduce.sh --share=.05     in short, to see it work
#   bash launch/reproduce.sh --scale=4 --lanes=1     larger, for an accelerator
#
# Run it again and it goes on where it was. WORKDIR= is where it goes; PYTHON= and
# VENV= as in environment.sh. launch/revival/run.py describes the experiment and its flags.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

prepare requirements.txt
workdir="$(absolute "${WORKDIR:-$root/runs/revival}")"
cd "$root"
say "python -m launch.revival.run $workdir${*:+ $*}"
"$python" -m launch.revival.run "$workdir" "$@"
exec "$python" -m launch.revival.report "$workdir"

#!/usr/bin/env bash
# The frontier: how many rollouts per prompt, for which budget, on which prompts?
#
#   bash launch/frontier.sh                  a first answer: 2 hours on 2 cores
#   bash launch/frontier.sh --budget=10      resumes, for 10 hours
#   bash launch/frontier.sh --scale=4 --lanes=4     larger, four at once on a GPU
#
# Run it again and it resumes. WORKDIR= is where it goes (default
# runs/frontier); PYTHON= and VENV= as in environment.sh. launch/frontier/README.md
# tells what has been found. The last line names the page.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

prepare requirements.txt
workdir="$(absolute "${WORKDIR:-$root/runs/frontier}")"
cd "$root"
case " $* " in
  *" -h "* | *" --help "*) exec "$python" -m launch.frontier.run --help ;;
esac
"$python" -m launch.frontier.run "$workdir" "$@"
exec "$python" -m launch.frontier.report "$workdir/results" "$workdir/report"

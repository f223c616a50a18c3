#!/usr/bin/env bash
# The wall: which prompts does a run leave behind, and what protects them?
#
#   bash launch/wall.sh                        one hour on all cores
#   bash launch/wall.sh --hours=8              resumes, for 8 hours
#   bash launch/wall.sh --arms=n16,n512,need --seeds=2
#
# WORKDIR= is where it goes (default runs/wall); PYTHON= and VENV= as in
# environment.sh. launch/wall/README.md tells what has been found.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case " $* " in
  *" -h "* | *" --help "*) exec sed -n '2,9s/^# \{0,1\}//p' "$0" ;;
esac
prepare requirements.txt
workdir="$(absolute "${WORKDIR:-$root/runs/wall}")"
cd "$root"
"$python" -m launch.wall.run "$workdir" "$@"
exec "$python" -m launch.wall.report "$workdir/results" "$workdir/wall.png"

#!/usr/bin/env bash
# From a fresh machine to a trained policy: environment, installation, main job,
# and a table of what N = 512 buys.
#
#   bash launch/quickstart.sh                       configs/n512.py into runs/n512
#   bash launch/quickstart.sh --config.run.steps=5      any flag of brorl_jax.main
#
# Run it again and it resumes. PYTHON= and VENV= as in environment.sh;
# WORKDIR= is where the run goes. Relative paths in flags count from the repository.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

prepare requirements.txt
if command -v nvidia-smi >/dev/null && ! "$python" -c "import jax_plugins" 2>/dev/null; then
  say "a GPU is here, but jax runs on the CPU; for CUDA: '$python' -m pip install '${root}[cuda12]'"
fi
workdir="$(absolute "${WORKDIR:-$root/runs/n512}")"
cd "$root"
say "python -m launch.wall.first --config=configs/n512.py --workdir=$workdir${*:+ $*}"
# exec: a SIGTERM meant for the job reaches it.
exec "$python" -m launch.wall.first --config=configs/n512.py --workdir="$workdir" "$@"

#!/usr/bin/env bash
# One run on all workers of a TPU VM slice: installs this commit, then trains.
#
#   TPU=NAME ZONE=us-east5-a bash launch/tpu_vm.sh \
#     --config=n512:1p5b --workdir=/shared/runs/1p5b
#
# Flags are those of brorl_jax.main. --workdir is on a file system that all workers
# mount (Filestore). Needs gcloud; run ssh-add ~/.ssh/google_compute_engine first.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

[[ -n "${TPU:-}" && -n "${ZONE:-}" ]] || fail "set TPU= and ZONE=, the slice's name and zone"

everywhere() {
  gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$1"
}

# A commit, so that all workers have the same files.
folder="$(mktemp -d)" && trap 'rm -rf "$folder"' EXIT
git -C "$root" archive --output="$folder/brorl.tar.gz" HEAD
say "installing $(git -C "$root" rev-parse --short HEAD) on all workers of $TPU"
gcloud compute tpus tpu-vm scp "$folder/brorl.tar.gz" "$TPU:" --zone="$ZONE" --worker=all
# uv brings Python 3.12: the images have 3.10.
everywhere "set -e
sudo apt-get update -qq && sudo apt-get install -y -qq bubblewrap gcc
mkdir -p brorl && tar -xzf brorl.tar.gz -C brorl && cd brorl
python3 -m pip install --quiet --user uv
python3 -m uv venv --quiet --allow-existing --python 3.12 .venv
python3 -m uv pip install --quiet --python .venv/bin/python -c third_party/locks/cpu-py312.txt -e '.[gym,tpu]'"

# Quoted for the shell at the other end.
train="cd brorl && exec .venv/bin/python -m brorl_jax.main --distributed$(printf ' %q' "$@")"
status=75
while ((status == 75)); do
  say "training on all workers of $TPU"
  status=0
  everywhere "$train" || status=$?
done
exit "$status"

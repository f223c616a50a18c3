#!/usr/bin/env bash
# The documentation as a site of the READMEs and docstrings, which needs no
# server: build/docs/site/index.html. A link that leads nowhere is an error.
#
#   bash launch/docs.sh
#
# PYTHON= and VENV= as in environment.sh; VENV is by default .venv-docs, as jax is
# not needed (200 MB).
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

environment "$root/.venv-docs"
wanted="$root/launch/docs/requirements.txt" installed="$venv/.brorl_jax.docs"
if ! cmp -s "$wanted" "$installed"; then
  say "installing launch/docs/requirements.txt into $venv"
  rm -f "$installed"
  pip_install -r "$wanted"
  cp "$wanted" "$installed"
fi
cd "$root"
rm -rf build/docs
mkdir -p build/docs/pages
"$python" launch/docs/pages.py build/docs/pages
# Without a notice about the successor of mkdocs-material.
NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --strict \
  --config-file launch/docs/mkdocs.yml
say "open build/docs/site/index.html"

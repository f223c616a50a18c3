# shellcheck shell=bash
# Sourced by the scripts in this folder, which say what they need:
#
#   prepare requirements.txt    a virtual environment with that, brorl_jax and its
#                               extra "gym" in it
#
# and then find the repository in $root and the interpreter in $python.
#
#   PYTHON   interpreter to start from, 3.11 to 3.13   (default python3)
#   VENV     the virtual environment, made if missing  (default .venv in the repository)
#
# A relative path in either counts from the directory you call from.

unset CDPATH # or cd may print, and go elsewhere
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { printf '* %s\n' "$*"; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# absolute PATH: the path as seen from the caller's directory.
absolute() {
  case "$1" in
    /*) printf '%s' "$1" ;;
    *) printf '%s/%s' "$PWD" "$1" ;;
  esac
}

# release INTERPRETER: its version as 3.12, or nothing when it does not run.
release() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

# usable VENV: its Python runs and has pip, and making it was not interrupted.
usable() {
  [[ "$(cat "$1/.brorl_jax" 2>/dev/null)" != making ]] &&
    "$1/bin/python" -m pip --version >/dev/null 2>&1
}

prepare() {
  environment "$root/.venv"
  install "$1" "$venv"
}

# environment DEFAULT: $venv, made if it is missing, with $python in it.
environment() {
  local base="${PYTHON:-python3}" version
  venv="$(absolute "${VENV:-$1}")"
  python="$venv/bin/python"
  # An environment that is there decides, unless PYTHON is asked for.
  if [[ -z "${PYTHON:-}" ]] && usable "$venv"; then
    base="$python"
  fi
  version="$(release "$base")"
  case "$version" in
    3.11 | 3.12 | 3.13) ;;
    "") fail "PYTHON=$base does not run; give one that does: PYTHON=/path/to/python3.12" ;;
    *) fail "PYTHON=$base is Python $version; give 3.11 to 3.13: PYTHON=/path/to/python3.12" ;;
  esac
  if ! usable "$venv" || [[ "$(release "$python")" != "$version" ]]; then
    make_venv "$base" "$version" "$venv"
  fi
}

# make_venv BASE VERSION VENV: makes it, or makes it again if it was made here,
# which the file .brorl_jax in it marks. Other folders are never cleared.
make_venv() {
  local base="$1" version="$2" venv="$3" mark="$3/.brorl_jax"
  if [[ ! -f "$mark" && -n "$(ls -A "$venv" 2>/dev/null)" ]]; then
    fail "$venv is in use and not an environment of Python $version with pip; remove it or name another: VENV=/path/to/new"
  fi
  "$base" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$base has no venv module; on Debian or Ubuntu: apt install python$version-venv"
  say "making $venv with Python $version"
  mkdir -p "$venv"
  echo making >"$mark"
  find "$venv" -mindepth 1 -maxdepth 1 ! -name .brorl_jax -exec rm -rf {} +
  "$base" -m venv "$venv" || fail "could not make $venv, see above"
  echo made >"$mark"
}

# stamp FILE: what an environment was installed from.
stamp() {
  "$python" - "$root" "$1" <<'PY'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256((sys.version + str(root)).encode())
for name in sorted({"requirements.txt", "pyproject.toml", sys.argv[2]}):
  digest.update((root / name).read_bytes())
print(digest.hexdigest())
PY
}

# install FILE VENV: the stamp is removed first and written last, so that an
# interrupted installation is done again.
install() {
  local file="$1" stamps="$2/.brorl_jax.stamps" now
  now="$(stamp "$file")"
  if [[ "$(cat "$stamps/$file" 2>/dev/null)" == "$now" ]]; then
    return
  fi
  rm -rf "$stamps"
  check_compiler
  say "installing $file into $2 (about 1 GB, a few minutes the first time)"
  pip_install -r "$root/$file"
  say "installing brorl_jax from $root"
  pip_install --editable "${root}[gym]"
  mkdir -p "$stamps"
  printf '%s\n' "$now" >"$stamps/$file"
  # requirements-dev.txt includes requirements.txt.
  stamp requirements.txt >"$stamps/requirements.txt"
}

pip_install() {
  "$python" -m pip install --quiet --disable-pip-version-check --no-input "$@" ||
    fail "pip could not install, see above; run the same command again once that is mended"
}

# pycosat, needed by reasoning-gym, comes as C source. Better to hear of a missing
# compiler now than after the download of everything else.
check_compiler() {
  "$python" - <<'PY' && return
import os, shlex, shutil, sys, sysconfig

compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
header = os.path.join(sysconfig.get_path("include"), "Python.h")
sys.exit(not (shutil.which(shlex.split(compiler)[0]) and os.path.exists(header)))
PY
  # Installed already, or somebody provides a wheel.
  "$python" -m pip install --quiet --disable-pip-version-check --no-input pycosat \
    >/dev/null 2>&1 ||
    fail "pycosat needs a C compiler and Python's headers; on Debian or Ubuntu: apt install gcc python$(release "$python")-dev, on macOS: xcode-select --install"
}

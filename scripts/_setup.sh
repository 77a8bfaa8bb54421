# Sourced by quickstart and test: brings .venv up to date and leaves PYTHON pointing into it.
#
# .venv/primus-ext-stamp     written last; holds a hash of what was installed (fast second run)
# .venv/primus-ext-unfinished there while an installation runs: found later, it was killed
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv
PYTHON=$VENV/bin/python
STAMP=$VENV/primus-ext-stamp
UNFINISHED=$VENV/primus-ext-unfinished

say() { printf '%s\n' "$*" >&2; }

is_python312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

find_python312() {
  # A pyenv shim answers only for the version that .python-version selects, so pyenv's own folder
  # of versions is asked too.
  local candidate
  for candidate in python3.12 python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12; do
    if command -v "$candidate" >/dev/null 2>&1 && is_python312 "$candidate"; then
      printf '%s\n' "$candidate"
      return 0
    fi
  done
  say "No Python 3.12 found as python3.12, python3, python or a pyenv version;" \
    "install one (for example: pyenv install 3.12) and run this again."
  return 1
}

wanted_stamp() {
  # The folder stands in it because a moved or copied .venv holds scripts that start the old one.
  printf '%s\n' "$ROOT"
  find "$ROOT" -maxdepth 1 -name "*.pth" | cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" - |
    sha256sum
}

healthy() {
  # Cheap proof that .venv runs, imports this very tree and holds all that pyproject.toml names.
  [ -x "$PYTHON" ] && is_python312 "$PYTHON" && (cd / && "$PYTHON" - "$ROOT") <<'PY' 2>/dev/null
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import primus_ext

root = Path(sys.argv[1])
assert Path(primus_ext.__file__).is_relative_to(root)
project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
for spec in project["dependencies"] + project["optional-dependencies"]["dev"]:
    importlib.metadata.version(re.match(r"[A-Za-z0-9_.-]+", spec).group())
PY
}

up_to_date() {
  [ ! -e "$UNFINISHED" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$(wanted_stamp)" ] && healthy
}

usable() {
  # Worth keeping and only installing into: not killed half-way, runs, was not made for another
  # folder, and nothing was taken out of what its stamp promises.
  [ ! -e "$UNFINISHED" ] && [ -x "$PYTHON" ] && is_python312 "$PYTHON" &&
    "$PYTHON" -m pip --version >/dev/null 2>&1 || return 1
  [ -e "$STAMP" ] || return 0
  [ "$(head -n 1 "$STAMP")" = "$ROOT" ] || return 1
  [ "$(cat "$STAMP")" != "$(wanted_stamp)" ] || healthy
}

make_venv() {
  local python
  python=$(find_python312) || return 1
  rm -rf "$VENV"
  say "Making .venv with $("$python" --version)"
  if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "$VENV"
  else # distributions split ensurepip off; the pip of the same Python can seed the new one
    "$python" -m venv --without-pip "$VENV" && "$python" -m pip --python "$PYTHON" install -q pip
  fi || { say "Could not make .venv: $python needs the venv module, and pip."; return 1; }
}

install_all() {
  local fresh=$1 quiet=
  touch "$UNFINISHED"
  mkdir -p "$VENV/tmp" # pip's gigabytes of scratch go with .venv if this is killed
  say "Installing primus_ext and what it needs into .venv (about 6 GB, most of it torch)"
  [ -t 2 ] || quiet=--quiet # somebody who watches sees pip's own progress
  if ! TMPDIR=$VENV/tmp "$PYTHON" -m pip install $quiet --disable-pip-version-check \
    -c "$ROOT/constraints.txt" -e "$ROOT[dev]" >&2; then
    # pip that stops by itself leaves an older .venv as it was; a fresh one is begun anew.
    [ "$fresh" = yes ] || rm -f "$UNFINISHED"
    say "The installation failed; its last lines above say why.  Run this again when it is mended."
    return 1
  fi
  if ! healthy; then
    say "The installation ended but .venv does not work; run this again to rebuild it."
    return 1
  fi
  rm -rf "$VENV/tmp"
  wanted_stamp >"$STAMP"
  rm -f "$UNFINISHED"
}

set_up() {
  local fresh=no
  up_to_date && return 0
  # Only whoever holds the lock touches .venv; a pip that outlived its killed parent holds it too.
  if command -v flock >/dev/null 2>&1; then
    exec 9<"$ROOT/scripts"
    flock -n 9 || { say "Another run is setting up .venv; waiting for it."; flock 9; }
  fi
  if ! up_to_date; then
    usable || { fresh=yes && make_venv; } || return 1
    install_all "$fresh" || return 1
  fi
  exec 9<&-
}

set_up

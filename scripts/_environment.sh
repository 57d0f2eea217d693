# Sourced by the other scripts, from the repository's root: makes .venv once and sets PYTHON.
#
#   environment               the plain install
#   environment dev           with the tools that test and check
#   environment dev lowest    with the oldest libraries that pyproject.toml allows
#   python_of 3.11            prints an interpreter of this version
#   newest_python             prints the newest supported one, unless $PYTHON is that already
#
# DPJAX_VENV names another folder, DPJAX_PYTHON the interpreter to make it with.

# Run it: a name on the path may be a stub, too old, or lack the venv module.
usable() {
  "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${DPJAX_PYTHON:-python3.12 python3.11 python3.13 python3 python}; do
    if usable "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "dpjax needs Python 3.11 or newer with its venv module, and none of" \
    "${DPJAX_PYTHON:-python3.12 python3.11 python3.13 python3 python} is one." \
    "Install it (Debian and Ubuntu: apt install python3 python3-venv), or set DPJAX_PYTHON." >&2
  return 1
}

# An interpreter of one version. Version managers keep some that are not on the path.
python_of() {
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python \
    "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}/cpython-$1".*/bin/python; do
    if usable "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

# The newest of the versions that pyproject.toml lists, unless $PYTHON is of it.
newest_python() {
  local version current
  current=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  for version in $(sed -n 's/.*"Programming Language :: Python :: \(3\..*\)",/\1/p' pyproject.toml | sort -rV); do
    [ "$version" != "$current" ] || break
    ! python_of "$version" || return 0
  done
  echo "skipped: Python $current is in use, and none that is newer and supported is here" >&2
  return 1
}

# The oldest libraries that pyproject.toml allows, as constraints.
lowest() {
  "$PYTHON" - <<'PY'
import re
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
needed = sum((extras[name] for name in ("cluster", "contrib", "docs", "pretrained", "secure", "sites", "dev")), project["dependencies"])
for line in needed:
    if bound := re.match(r"([\w.-]+)[>=]=([\w.]+)", line):
        print("==".join(bound.groups()))
PY
}

environment() {
  local extra=${1:-} bounds=${2:-} venv=${DPJAX_VENV:-.venv} stamp hash target=. python
  stamp=$venv/.dpjax-environment
  PYTHON=$venv/bin/python
  hash=$(cat pyproject.toml scripts/_environment.sh | cksum)$bounds
  # The dev environment holds all of the plain one.
  if [ -f "$stamp" ] && "$PYTHON" -c '' 2>/dev/null; then
    case $(cat "$stamp") in
      "$hash dev" | "$hash $extra") return ;;
    esac
  fi
  [ -z "$extra" ] || target=".[$extra]"
  echo "Making the environment in $venv (about two minutes with the download, once) ..." >&2
  # uv reads none of pip's settings: where there are some, pip it is.
  if command -v uv >/dev/null 2>&1 && [ -z "${!PIP_*}" ]; then
    "$PYTHON" -c '' 2>/dev/null || uv venv --quiet --seed --python "${DPJAX_PYTHON:->=3.11}" "$venv"
    { [ "$bounds" != lowest ] || lowest; } >"$venv/constraints"
    uv pip install --quiet --python "$PYTHON" --constraints "$venv/constraints" --editable "$target"
  else
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
      python=$(find_python)
      "$python" -m venv --clear "$venv"
    fi
    { [ "$bounds" != lowest ] || lowest; } >"$venv/constraints"
    # Errors only: warnings here are about the machine's own pip settings. Bytecode is compiled
    # when it is first used, which halves the time.
    "$PYTHON" -m pip install -qq --disable-pip-version-check --no-compile \
      --constraint "$venv/constraints" --editable "$target"
  fi
  # Last, so that an environment half made is made again.
  echo "$hash $extra" >"$stamp"
}

# Sourced by the other scripts, from the repository's root: makes .venv once and sets PYTHON.
#
#   environment          the plain install
#   environment dev      with the tools that test and check
#
# DPJAX_VENV names another folder, DPJAX_PYTHON the interpreter to make it with.

find_python() {
  local candidate
  for candidate in ${DPJAX_PYTHON:-python3.12 python3.11 python3.13 python3 python}; do
    # Run it: a name on the path may be a stub, too old, or lack the venv module.
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
      >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  echo "dpjax needs Python 3.11 or newer with its venv module, and none of" \
    "${DPJAX_PYTHON:-python3.12 python3.11 python3.13 python3 python} is one." \
    "Install it (Debian and Ubuntu: apt install python3 python3-venv), or set DPJAX_PYTHON." >&2
  return 1
}

environment() {
  local extra=${1:-} venv=${DPJAX_VENV:-.venv} stamp hash target=. python
  stamp=$venv/.dpjax-environment
  PYTHON=$venv/bin/python
  hash=$(cat pyproject.toml scripts/_environment.sh | cksum)
  # The dev environment holds all of the plain one.
  if [ -f "$stamp" ] && "$PYTHON" -c '' 2>/dev/null; then
    case $(cat "$stamp") in
      "$hash dev" | "$hash $extra") return ;;
    esac
  fi
  [ -z "$extra" ] || target=".[$extra]"
  echo "Making the environment in $venv (about a minute, once) ..." >&2
  # uv reads none of pip's settings: where there are some, pip it is.
  if command -v uv >/dev/null 2>&1 && [ -z "${!PIP_*}" ]; then
    "$PYTHON" -c '' 2>/dev/null || uv venv --quiet --seed --python '>=3.11' "$venv"
    uv pip install --quiet --python "$PYTHON" --editable "$target"
  else
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
      python=$(find_python)
      "$python" -m venv --clear "$venv"
    fi
    # Errors only: warnings here are about the machine's own pip settings. Bytecode is compiled
    # when it is first used, which halves the time.
    "$PYTHON" -m pip install -qq --disable-pip-version-check --no-compile --editable "$target"
  fi
  # Last, so that an environment half made is made again.
  echo "$hash $extra" >"$stamp"
}

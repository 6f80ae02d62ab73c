#!/bin/sh
# Prints the path of a Python this project can use: 3.12 to 3.14, able to make virtual environments; $PYTHON if that is set.
# If there is none it says what to install and exits with status 1.

usable() {
  "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1
}

candidates() {
  if [ -n "$PYTHON" ]; then
    echo "$PYTHON"
    return
  fi
  for version in 3.12 3.13 3.14; do echo "python$version"; done
  root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")}
  for version in 3.12 3.13 3.14; do ls -d "$root/versions/$version".*/bin/python 2>/dev/null; done
  uv python find --no-python-downloads '>=3.12,<3.15' 2>/dev/null
  echo python3
}

candidates | while IFS= read -r python; do
  if usable "$python"; then
    "$python" -c 'import sys; print(sys.executable)'
    exit 3 # leaves the loop's subshell
  fi
done
[ $? -eq 3 ] && exit 0

if [ -n "$PYTHON" ]; then
  echo "PYTHON=$PYTHON is not a Python 3.12, 3.13 or 3.14 with venv; correct or unset it." >&2
  exit 1
fi
cat >&2 <<'TEXT'
No Python 3.12, 3.13 or 3.14 with venv was found on PATH, in pyenv or in uv. Install one, for example
  apt-get install python3.12-venv      (Debian, Ubuntu)
  pyenv install 3.12
  uv python install 3.12
or name one: PYTHON=/path/to/python make ...
TEXT
exit 1

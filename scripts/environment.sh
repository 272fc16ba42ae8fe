# shellcheck shell=bash
# Sourced by demo.sh, test.sh and docs.sh: make_environment EXTRA puts this checkout and the extra into ./.venv, in the
# versions of constraints.txt. A second call is quick and needs no network, unless pyproject.toml or constraints.txt has
# changed.

make_environment() {
    local extra=$1 python=${PYTHON:-python3} stamp
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "error: $python is older than Python 3.11; set PYTHON to a newer one" >&2
        return 2
    }
    stamp=.venv/installed-$extra-$(cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
    [ -e "$stamp" ] && return 0
    if [ ! -x .venv/bin/pip ]; then
        "$python" -m venv .venv || {
            echo "error: $python cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2
            return 2
        }
    fi
    echo "installing imagenet-fast[$extra] into .venv (about 6 GB the first time) ..."
    .venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$extra]"
    touch "$stamp"
}

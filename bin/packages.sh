# Installs system packages; sourced by the commands beside it.

missing=()

# need PACKAGE COMMAND...: PACKAGE is missing unless COMMAND succeeds.
need() {
    local package=$1
    shift
    "$@" >/dev/null 2>&1 || missing+=("$package")
}

# Programs of the system are not always on the PATH of ordinary users.
has_program() {
    PATH=$PATH:/usr/sbin:/sbin command -v "$1"
}

has_header() {
    "$1" -c 'import os, sysconfig
os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))'
}

# need_compiler PYTHON...: what it takes to build mysqlclient.
need_compiler() {
    need gcc has_program gcc
    need libc6-dev test -e /usr/include/stdio.h
    need libmariadb-dev has_program mariadb_config
    need pkg-config has_program pkg-config
    local python
    for python; do
        need "python$(version_of "$python")-dev" has_header "$python"
    done
}

# version_of PYTHON: "3.11", or an error if it can't be run.
version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

install_missing() {
    if ((${#missing[@]} == 0)); then
        return
    fi
    local install=(apt-get install --yes --no-install-recommends "${missing[@]}")
    if ! has_program apt-get >/dev/null; then
        echo "Please install what Debian calls: ${missing[*]}" >&2
        exit 1
    elif ((EUID != 0)); then
        echo "System packages are missing. Please run:" >&2
        echo "    sudo ${install[*]}" >&2
        exit 1
    fi
    echo "Installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update --quiet
    "${install[@]}" --quiet
    missing=()
}

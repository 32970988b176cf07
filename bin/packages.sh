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

has_libc_headers() {
    gcc -E - <<<'#include <stdio.h>'
}

# need_compiler PYTHON...: what it takes to build mysqlclient.
need_compiler() {
    need gcc has_program gcc
    need libc6-dev has_libc_headers
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

# in_fedora and in_homebrew PACKAGE: what Debian's package is called there, if it is
# of use where the tests look for it.
in_fedora() {
    case $1 in
        default-jre-headless | faketime | galera-4 | zookeeper) ;;
        libc6-dev) echo glibc-devel ;;
        libmariadb-dev) echo mariadb-connector-c-devel ;;
        pkg-config) echo pkgconf-pkg-config ;;
        postgresql) echo postgresql-server ;;
        python*-dev) echo "${1%-dev}-devel" ;;
        python*-venv) echo "${1%-venv}" ;;
        redis-server) echo valkey-compat-redis ;;
        *) echo "$1" ;;
    esac
}

in_homebrew() {
    case $1 in
        chromium | default-jre-headless | faketime | galera-4 | zookeeper) ;;
        gcc | libc6-dev) ;; # Apple's: xcode-select --install
        libmariadb-dev) echo mariadb-connector-c ;;
        mariadb-server) echo mariadb ;;
        pkg-config) echo pkgconf ;;
        python3) echo python ;;
        python*) echo "python@$(tr -cd 0-9. <<<"$1")" ;;
        redis-server) echo redis ;;
        *) echo "$1" ;;
    esac
}

# advise: says what to install where there is no apt.
advise() {
    local package name names=() unknown=() manager=
    if has_program brew >/dev/null; then
        manager="brew install"
        name=in_homebrew
    elif has_program dnf >/dev/null; then
        manager="sudo dnf install"
        name=in_fedora
    fi
    for package in "${missing[@]}"; do
        local there=
        [[ -z $manager ]] || there=$($name "$package")
        if [[ -n $there ]]; then
            names+=("$there")
        else
            unknown+=("$package")
        fi
    done
    if ((${#names[@]})); then
        echo "Packages are missing. Please run:"
        echo "    $manager ${names[*]}"
    fi
    if ((${#unknown[@]})); then
        echo "Please install what Debian calls: ${unknown[*]}"
    fi
}

# without_starting COMMAND...: servers that it installs are not started.
without_starting() (
    policy=/usr/sbin/policy-rc.d
    if [[ ! -e $policy ]]; then
        trap 'rm -f "$policy"' EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
    fi
    "$@"
)

install_missing() {
    if ((${#missing[@]} == 0)); then
        return
    fi
    local install=(apt-get install --yes --no-install-recommends "${missing[@]}")
    if ! has_program apt-get >/dev/null; then
        advise >&2
        exit 1
    elif ((EUID != 0)); then
        echo "System packages are missing. Please run:" >&2
        echo "    sudo ${install[*]}" >&2
        exit 1
    fi
    echo "Installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update --quiet
    without_starting "${install[@]}" --quiet
    missing=()
}

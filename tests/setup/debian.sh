#!/bin/sh
# debian.sh WHY PACKAGE...: install Debian packages unless they are there. Fails if they cannot be had.
why=$1
shift
dpkg-query --show "$@" >/dev/null 2>&1 && exit
echo "installing $* ($why)"
sudo=
test "$(id -u)" = 0 || sudo="sudo -n"
apt="$sudo apt-get --yes --quiet=2"
$apt install --no-install-recommends "$@" || { $apt update && $apt install --no-install-recommends "$@"; } || {
    echo "apt-get cannot install $*: tests that need them are skipped"
    exit 1
}

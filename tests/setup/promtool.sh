#!/bin/sh
# promtool.sh VENV: have promtool, which checks metrics and alerts, on the PATH or in VENV/bin. It is extracted from
# Debian's package, because installing that starts a server.
set -e
command -v promtool >/dev/null && exit
echo "fetching promtool (19 MB)"
sudo=
test "$(id -u)" = 0 || sudo="sudo -n"
cd "$1"
rm -f prometheus_*.deb
apt-get download --quiet=2 prometheus || { $sudo apt-get --yes --quiet=2 update && apt-get download --quiet=2 prometheus; }
dpkg-deb --fsys-tarfile prometheus_*.deb | tar -xO ./usr/bin/promtool >bin/promtool.new
chmod +x bin/promtool.new
mv bin/promtool.new bin/promtool
rm prometheus_*.deb

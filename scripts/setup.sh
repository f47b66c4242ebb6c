#!/bin/sh
# Installs what the tests use beyond Go, where a package manager of Debian's kind and
# the rights for it are there. Without them the tests that need more skip and say so.
set -eu

packages=""
need() { # COMMAND PACKAGE
	command -v "$1" >/dev/null 2>&1 || packages="$packages $2"
}
need git git
need curl curl
need gcc gcc
need ip iproute2
need protoc protobuf-compiler
[ -e /usr/include/google/protobuf/timestamp.proto ] || packages="$packages libprotobuf-dev"
need ssh openssh-client
[ -x /usr/sbin/sshd ] || packages="$packages openssh-server"
need rsync rsync
need node nodejs
need npm npm
need zstd zstd
need fsck.erofs erofs-utils
need dash dash
need fc-list fontconfig
[ -d /usr/share/fonts/truetype/dejavu ] || packages="$packages fonts-dejavu-core"
need python3 python3
[ -d /usr/lib/python3/dist-packages/matplotlib ] || packages="$packages python3-matplotlib"
[ -d /usr/lib/python3/dist-packages/requests ] || packages="$packages python3-requests"
need fish fish
need tcsh tcsh
need x86_64-linux-gnu-as binutils-x86-64-linux-gnu
need aarch64-linux-gnu-as binutils-aarch64-linux-gnu
need qemu-aarch64-static qemu-user-static
need qemu-system-x86_64 qemu-system-x86
need qemu-img qemu-utils
need lz4 lz4
need packer packer
need debootstrap debootstrap
need bwrap bubblewrap
need strace strace
need sudo sudo
need systemd-analyze systemd
need sqlite3 sqlite3
need redis-server redis-server
need chromium chromium
need mke2fs e2fsprogs
need mkfs.btrfs btrfs-progs
need mkfs.xfs xfsprogs
need dockerd docker.io
need docker-compose docker-compose
need podman podman
need podman-compose podman-compose
[ -x /usr/bin/busybox ] || packages="$packages busybox-static"

# The compose of today is a Go module; its tests call it as a plugin of docker.
plugin() {
	out=$(cd "$(dirname "$0")/.." && pwd)/bin/docker-compose
	[ -x "$out" ] && [ ! "$(dirname "$0")/compose/go.sum" -nt "$out" ] && return
	command -v go >/dev/null 2>&1 || return 0
	echo "setup: building docker compose"
	(cd "$(dirname "$0")/compose" && CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$out" github.com/docker/compose/v5/cmd) ||
		echo "setup: docker compose could not be built" >&2
}
plugin

[ -n "$packages" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
	echo "setup: not installed (needs root and apt-get):$packages" >&2
	exit 0
fi
echo "setup: installing$packages"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $packages >/dev/null

#!/bin/sh
# Installs what the tests use beyond Go, where a package manager of Debian's kind and
# the rights for it are there. Without them the tests that need more skip and say so.
set -eu

packages=""
need() { # COMMAND PACKAGE
	command -v "$1" >/dev/null 2>&1 || packages="$packages $2"
}
need git git
need gcc gcc
need ip iproute2
need protoc protobuf-compiler
need ssh openssh-client
[ -x /usr/sbin/sshd ] || packages="$packages openssh-server"
need rsync rsync
need node nodejs
need npm npm
need zstd zstd
need fsck.erofs erofs-utils
need dash dash
need fish fish
need tcsh tcsh
need x86_64-linux-gnu-as binutils-x86-64-linux-gnu
need aarch64-linux-gnu-as binutils-aarch64-linux-gnu
need qemu-aarch64-static qemu-user-static
need qemu-system-x86_64 qemu-system-x86
need qemu-img qemu-utils
need packer packer
need mke2fs e2fsprogs
[ -x /usr/bin/busybox ] || packages="$packages busybox-static"

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

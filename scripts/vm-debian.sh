#!/bin/sh
# vm-debian.sh DIR [FILES]: makes a virtual machine of Debian with debootstrap in DIR: vmlinuz,
# initrd and disk.qcow2, with systemd, OpenSSH's server and the real cloud-init. It is an
# image as people have them: nothing in it knows of sandboxer, unless the directory FILES, whose
# content is laid over its root, brings that. Needs root, debootstrap,
# mke2fs and qemu-img, two minutes and 1 GiB. VM_DEBIAN_SUITE and VM_DEBIAN_MIRROR say which.
set -eu
dir=$1
r=$(mktemp -d)
trap 'rm -rf "$r"' EXIT
mkdir -p "$dir"
# It does not know that what cloud-init needs provides something under another name.
debootstrap --variant=minbase \
	--include=systemd-sysv,udev,dbus,openssh-server,cloud-init,python3-cffi-backend,iproute2,linux-image-cloud-amd64 \
	"${VM_DEBIAN_SUITE:-bookworm}" "$r/root" "${VM_DEBIAN_MIRROR:-http://deb.debian.org/debian}" >"$r/log" 2>&1 || { tail -n 20 "$r/log" >&2; exit 1; }
d=$r/root
echo '/dev/vda / ext4 errors=remount-ro 0 1' >"$d/etc/fstab"
echo debian >"$d/etc/hostname"
printf '[Match]\nName=e*\n[Network]\nDHCP=yes\n' >"$d/etc/systemd/network/10-wired.network"
chroot "$d" systemctl -q enable systemd-networkd ssh
# The image is everybody's: keys and identity are the machine's own.
rm -f "$d"/etc/ssh/ssh_host_* "$d"/var/cache/apt/archives/*.deb
: >"$d/etc/machine-id"
# Where to look; else it asks the networks of several clouds first.
echo 'datasource_list: [NoCloud, None]' >"$d/etc/cloud/cloud.cfg.d/90-datasource.cfg"
[ -z "${2:-}" ] || cp -R "$2/." "$d/"
cp -L "$d"/boot/vmlinuz-* "$dir/vmlinuz"
cp -L "$d"/boot/initrd.img-* "$dir/initrd"
mke2fs -q -t ext4 -d "$d" "$r/disk.raw" 2G
qemu-img convert -O qcow2 "$r/disk.raw" "$dir/disk.qcow2"

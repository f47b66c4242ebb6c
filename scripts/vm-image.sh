#!/bin/sh
# vm-image.sh DIR AUTHORIZED_KEY: makes a small virtual machine of Debian's packages in
# DIR: vmlinuz, initrd and disk.qcow2, which boot under qemu in seconds, also without
# KVM. It is BusyBox with OpenSSH's server; the key lets root in, and so does the one on
# a NoCloud seed. Needs root (for device files nothing, for owners), apt-get download,
# mke2fs and qemu-img.
set -eu
dir=$1 key=$2
t=$(mktemp -d) && trap 'rm -rf "$t"' EXIT
mkdir -p "$dir"

# The kernel, and those of its modules that reach disk, seed and network.
kernel=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: *\(linux-image-[0-9].*\)/\1/p' | head -n 1)
deb=$(ls "${VM_IMAGE_CACHE:-/nonexistent}/${kernel}"_*.deb 2>/dev/null | head -n 1) || true
if [ -z "$deb" ]; then
	(cd "$t" && apt-get -o APT::Sandbox::User=root download -qq "$kernel" >/dev/null)
	deb=$(ls "$t"/*.deb)
	if [ -n "${VM_IMAGE_CACHE:-}" ]; then mkdir -p "$VM_IMAGE_CACHE" && cp "$deb" "$VM_IMAGE_CACHE/"; fi
fi
order="virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci virtio_blk failover net_failover virtio_net virtio-rng fat vfat nls_cp437 nls_ascii"
dpkg-deb --fsys-tarfile "$deb" | tar -xf - -C "$t" --wildcards './boot/vmlinuz-*' $(printf " */%s.ko" $order | sed 's/  */ /g') || [ -e "$t"/boot/vmlinuz-* ]
# Emulated, a kernel needs longer to unpack itself than to start, so it is unpacked here if
# its packing is known.
unpack() { # MAGIC COMMAND…
	m=$1; shift
	command -v "$1" >/dev/null || return 1
	for o in $(LC_ALL=C grep -obUaP "$m" "$t"/boot/vmlinuz-* | cut -d: -f1 | head -n 8); do
		tail -c +$((o+1)) "$t"/boot/vmlinuz-* | "$@" >"$dir/vmlinuz" 2>/dev/null || :
		[ "$(head -c 4 "$dir/vmlinuz" | tail -c 3)" != ELF ] || return 0
	done
	return 1
}
unpack '\x02\x21\x4c\x18' lz4 -dc || unpack '\xfd7zXZ\x00' xz -dc || unpack '\x28\xb5\x2f\xfd' zstd -dc || unpack '\x1f\x8b\x08' gzip -dc || cp "$t"/boot/vmlinuz-* "$dir/vmlinuz"
i=$t/initrd
mkdir -p "$i/bin" "$i/mod" "$i/proc" "$i/dev" "$i/root"
cp /bin/busybox "$i/bin/busybox" 2>/dev/null || cp /usr/bin/busybox "$i/bin/busybox"
for m in $order; do find "$t/lib/modules" -name "$m.ko" -exec cp {} "$i/mod/" \;; done
cat >"$i/init" <<-END
	#!/bin/busybox sh
	/bin/busybox mount -t devtmpfs none /dev
	for m in $order; do [ ! -e /mod/\$m.ko ] || /bin/busybox insmod /mod/\$m.ko; done
	n=0; until [ -e /dev/vda ] || [ \$n -ge 100 ]; do n=\$((n+1)); /bin/busybox usleep 50000; done
	/bin/busybox mount -t ext4 /dev/vda /root || exec /bin/busybox poweroff -f
	/bin/busybox umount -l /dev
	exec /bin/busybox switch_root /root /sbin/init
END
chmod 755 "$i/init"
(cd "$i" && find . | /bin/busybox cpio -o -H newc 2>/dev/null) >"$dir/initrd"

# The disk.
r=$t/disk
mkdir -p "$r/bin" "$r/sbin" "$r/usr/bin" "$r/usr/sbin" "$r/etc/ssh" "$r/root/.ssh" "$r/proc" "$r/sys" "$r/dev" "$r/run" "$r/tmp" "$r/var" "$r/mnt" "$r/lib64"
cp "$i/bin/busybox" "$r/bin/busybox"
for a in $("$r/bin/busybox" --list); do [ "$a" = busybox ] || ln -s busybox "$r/bin/$a"; done
put() { # FILE: a program with its libraries, where it is
	mkdir -p "$r$(dirname "$1")"
	cp -L "$1" "$r$1"
	ldd "$1" | sed -n 's/.*=> *\(\/[^ ]*\).*/\1/p; s/^[[:space:]]*\(\/lib64[^ ]*\).*/\1/p' | while read -r l; do
		mkdir -p "$r$(dirname "$l")"
		[ -e "$r$l" ] || cp -L "$l" "$r$l"
	done
}
put /usr/sbin/sshd
put /usr/bin/setpriv
rm -f "$r/bin/setpriv"
for l in /lib/x86_64-linux-gnu/libnss_files.so.2 /lib/x86_64-linux-gnu/libnss_compat.so.2; do [ ! -e "$l" ] || cp -L "$l" "$r$l"; done
ln -s /bin/busybox "$r/sbin/poweroff"
printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\nsshd:x:100:65534::/run/sshd:/bin/false\n' >"$r/etc/passwd"
printf 'root:*:19000:0:99999:7:::\nnobody:*:19000:0:99999:7:::\nsshd:*:19000:0:99999:7:::\n' >"$r/etc/shadow"
printf 'root:x:0:\nnogroup:x:65534:\n' >"$r/etc/group"
printf 'passwd: files\ngroup: files\nshadow: files\n' >"$r/etc/nsswitch.conf"
printf '127.0.0.1 localhost\n' >"$r/etc/hosts"
printf '%s\n' "$key" >"$r/root/.ssh/authorized_keys"
chmod 700 "$r/root" "$r/root/.ssh"; chmod 600 "$r/root/.ssh/authorized_keys" "$r/etc/shadow"
chmod 1777 "$r/tmp"
ssh-keygen -q -t ed25519 -N '' -C image -f "$r/etc/ssh/host"
cat >"$r/etc/ssh/sshd_config" <<-'END'
	HostKey /etc/ssh/host
	UsePAM no
	PasswordAuthentication no
	UseDNS no
	PermitRootLogin prohibit-password
	MaxStartups 100
	LoginGraceTime 0
	Subsystem sftp internal-sftp
END
cat >"$r/etc/inittab" <<-'END'
	::sysinit:/etc/rc
	::respawn:/usr/sbin/sshd -D -e
	::shutdown:/bin/sync
END
# What cloud-init does with a NoCloud seed, as far as it is used here: the authorized key,
# the host key and the name.
cat >"$r/etc/rc" <<-'END'
	#!/bin/sh
	mount -t proc none /proc; mount -t sysfs none /sys; mount -t devtmpfs none /dev
	mkdir -p /dev/pts /dev/shm; mount -t devpts -o ptmxmode=666 none /dev/pts; mount -t tmpfs none /run; mkdir -p /run/sshd
	mount -o remount,rw /
	ip link set lo up; ip link set eth0 up; ip addr add 10.0.2.15/24 dev eth0; ip route add default via 10.0.2.2
	if mount -t vfat -o ro /dev/vdb1 /mnt 2>/dev/null || mount -t vfat -o ro /dev/vdb /mnt 2>/dev/null; then
		u=/mnt/user-data
		sed -n '/^ssh_authorized_keys:/,/^[a-z]/s/^  - "\(.*\)"$/\1/p' $u >>/root/.ssh/authorized_keys
		k=$(sed -n '/^  ed25519_private: |/,/^  [a-z]/s/^    //p' $u)
		[ -z "$k" ] || (umask 077; printf '%s\n' "$k" >/etc/ssh/host)
		hostname "$(sed -n 's/^local-hostname: //p' /mnt/meta-data)"
		umount /mnt
	fi
END
chmod 755 "$r/etc/rc"
ln -s /bin/busybox "$r/sbin/init"
rm -f "$r/bin/init"
mke2fs -q -t ext4 -O ^has_journal -d "$r" -E root_owner=0:0 "$t/disk.raw" 256M
qemu-img convert -O qcow2 "$t/disk.raw" "$dir/disk.qcow2"

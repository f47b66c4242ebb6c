# Assembles and links the programs anew. Needs binutils and binutils-aarch64-linux-gnu.
set -eu
tmp=$(mktemp)
trap 'rm -f "$tmp"' EXIT
link() {
	"$2as" -o "$tmp" "$1.asm"
	"$2ld" -n -s --build-id=none -z noexecstack -o "$3/$1.elf" "$tmp"
	# A whole page: gVisor does not map the rest of a page of a file on EROFS, whose
	# builder stores it beside the inode.
	truncate -s 4096 "$3/$1.elf"
}
link amd64 x86_64-linux-gnu- "${1:-.}"
link arm64 aarch64-linux-gnu- "${1:-.}"

#!/bin/sh
# Usage: scripts/changelog.sh VERSION
# Moves the files of changes/unreleased into a new section above the last release in
# CHANGELOG.md, and removes the files with git rm. changes/README.md describes their form.
set -eu
LC_ALL=C
export LC_ALL
cd "$(dirname "$0")/.."

fail() {
	echo "changelog: $*" >&2
	exit 1
}

version=${1-}
echo "$version" | grep -Eqx '[0-9]+\.[0-9]+\.[0-9]+' || fail "give a version: make changelog VERSION=0.2.0"
! cut -d ' ' -f 1,2 CHANGELOG.md | grep -Fqx "## $version" || fail "CHANGELOG.md already has a section $version"
set -- changes/unreleased/*.md
[ -f "$1" ] || fail "changes/unreleased has no changes"
for f; do
	sed -n 1p "$f" | grep -Eqx 'Added|Changed|Fixed|Security' || fail "$f: the first line must be Added, Changed, Fixed or Security"
done

section=$(mktemp)
draft=$(mktemp)
trap 'rm -f "$section" "$draft"' EXIT
{
	echo "## $version ($(date -u +%Y-%m-%d))"
	for kind in Added Changed Fixed Security; do
		first=yes
		for f; do
			[ "$(sed -n 1p "$f")" = "$kind" ] || continue
			[ -z "$first" ] || printf '\n### %s\n\n' "$kind"
			first=
			# The first line of the text begins the bullet, the others are indented below it.
			awk 'NR > 2 && NF { print (n++ ? "  " : "- ") $0 }' "$f"
		done
	done
	echo
} >"$section"
awk -v section="$section" '/^## / && !done { while ((getline line < section) > 0) print line; done = 1 } { print }' CHANGELOG.md >"$draft"
git rm -q -- "$@"
cat "$draft" >CHANGELOG.md

#!/bin/sh
# Runs every fuzz target of the module for a while, one after another. What a target finds
# stays below its package's testdata/fuzz, as a seed of the ordinary tests.
#
#   scripts/fuzz.sh [TIME [TARGET]]   TIME for each (default 1m), TARGET a regular expression
set -eu
cd "$(dirname "$0")/.."
time=${1:-1m} want=${2:-.}

failed=0
for file in $(grep -l '^func Fuzz' $(git ls-files '*_test.go')); do
	pkg=./$(dirname "$file")
	for target in $(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' "$file" | grep -E "$want"); do
		echo "== $pkg $target"
		# To make every interesting input smaller takes a minute each by default, in which
		# a target that unpacks archives tries nothing new.
		go test -run '^$' -fuzz "^$target\$" -fuzztime "$time" -fuzzminimizetime 20x "$pkg" || failed=1
	done
done
exit "$failed"

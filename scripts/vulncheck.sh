#!/bin/sh
# Looks for known vulnerabilities in what the programs link. Where their database cannot be
# reached it says so and passes: it has found nothing out.
set -eu
cd "$(dirname "$0")/.."
tool=golang.org/x/vuln/cmd/govulncheck@v1.9.0

if ! go run "$tool" -version 2>&1 | grep -q '^DB updated:'; then
	echo "vulncheck: not checked, the vulnerability database cannot be reached"
	exit 0
fi
exec go run "$tool" ./cmd/...

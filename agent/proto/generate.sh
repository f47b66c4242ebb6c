#!/bin/sh
# Generates the Go code of this directory's .proto files into $1 (default: here).
# Needs protoc in PATH; the two plugins are built from the versions in go.mod.
set -eu
cd "$(dirname "$0")"
out=${1:-.}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
go build -o "$tmp/" google.golang.org/protobuf/cmd/protoc-gen-go connectrpc.com/connect/cmd/protoc-gen-connect-go
PATH="$tmp:$PATH" protoc -I . --go_out="$out" --go_opt=paths=source_relative \
	--connect-go_out="$out" --connect-go_opt=paths=source_relative \
	process/process.proto filesystem/filesystem.proto
# The version of protoc itself is not part of what we commit.
find "$out" \( -name "*.pb.go" -o -name "*.connect.go" \) -exec sed -i "/^\/\/ \tprotoc  *v/d" {} +

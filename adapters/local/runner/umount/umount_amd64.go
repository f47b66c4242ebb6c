package umount

import _ "embed" // for Program

// Program is the static ELF executable for this architecture.
//
//go:embed amd64.elf
var Program []byte

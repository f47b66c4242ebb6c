package umount

import _ "embed" // for Program

// Program is the static ELF executable for this architecture.
//
//go:embed arm64.elf
var Program []byte

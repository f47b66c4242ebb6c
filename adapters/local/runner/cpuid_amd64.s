//go:build linux

// Empty: Go takes declarations without a body (cpuid_amd64.go) only beside assembly.

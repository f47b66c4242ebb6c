//go:build !linux

package subprocess

// Elsewhere os/exec starts a child: an execve closes what this process opens there, and gVisor is Linux's.

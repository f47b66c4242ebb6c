// Package umount holds a program of a few dozen instructions that takes /proc away from
// the process that starts it, when a byte comes on descriptor 3.
//
// gVisor's kernel gives up the right to do so before it is done with /proc, and starts
// its own program a second time for it. To start that costs several times what it does,
// at the start of every sandbox; the kernel waits for its end.
package umount

//go:generate sh ../../pause/generate.sh

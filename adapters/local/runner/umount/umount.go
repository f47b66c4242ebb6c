// Package umount holds a program of a few dozen instructions that unmounts /proc for
// the process that starts it, when a byte comes on descriptor 3.
//
// gVisor's kernel drops the right to do so while it still needs /proc, and starts its
// own program a second time for the unmount. That start costs several times the
// unmount, for every new sandbox; and the kernel waits for its end.
package umount

//go:generate sh ../../pause/generate.sh

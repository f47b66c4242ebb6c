// Takes /proc away: see umount.go.

	.set SYS_umount2, 39
	.set SYS_read, 63
	.set SYS_exit_group, 94
	.set EINTR, 4
	.set MNT_DETACH, 2
	.set SYNC, 3				// descriptor

	.globl _start
_start:
	sub	sp, sp, #16
again:
	mov	x8, #SYS_read
	mov	x0, #SYNC
	mov	x1, sp
	mov	x2, #1
	svc	#0
	cmn	x0, #EINTR
	b.eq	again
	cmp	x0, #1
	b.ne	failed				// who starts us ended first
	mov	x8, #SYS_umount2
	adr	x0, proc
	mov	x1, #MNT_DETACH
	svc	#0
	cbz	x0, exit
failed:
	mov	x0, #1
exit:
	mov	x8, #SYS_exit_group
	svc	#0

proc:	.asciz	"/proc"

// The first process of a sandbox until its agent is needed: see pause.go.
//
//	pause SECONDS AGENT ARGS…
//	pause fuse SECONDS
//	pause donate SOCKET COUNT [PROCESS]
//
// Registers kept throughout: x20 &argv[2], x21 envp, x22 the fuse in seconds since 1970,
// x25 how many seconds of grace have begun since it burnt down.

	.set SYS_openat, 56
	.set SYS_close, 57
	.set SYS_read, 63
	.set SYS_exit_group, 94
	.set SYS_nanosleep, 101
	.set SYS_clock_gettime, 113
	.set SYS_rt_sigaction, 134
	.set SYS_rt_sigprocmask, 135
	.set SYS_rt_sigtimedwait, 137
	.set SYS_rt_sigqueueinfo, 138
	.set SYS_socket, 198
	.set SYS_connect, 203
	.set SYS_getsockopt, 209
	.set SYS_sendmsg, 211
	.set SYS_execve, 221
	.set SIGUSR1, 10
	.set SIGUSR2, 12
	.set SIGTERM, 15
	.set SIGCHLD, 17
	.set SIG_DFL, 0
	.set SIG_IGN, 1
	.set SIG_SETMASK, 2
	.set WAITED, (1 << (SIGUSR1 - 1)) | (1 << (SIGUSR2 - 1)) | (1 << (SIGTERM - 1))
	.set FUSES, 1 << (SIGUSR2 - 1)
	.set si_code, 8
	.set si_value, 24
	.set SI_QUEUE, -1
	.set GRACE, 10
	.set LOOKS, 10000			// at process 1, a millisecond apart
	.set AF_UNIX, 1
	.set SOCK_STREAM, 1
	.set SOL_SOCKET, 1
	.set SO_PEERCRED, 17
	.set EPERM, 1
	.set SCM_RIGHTS, 1
	.set MSG_NOSIGNAL, 0x4000
	.set ADDRESS, 110			// of a socket: its family, and a path of 107 bytes and a NUL
	.set FIRST, 3				// descriptor that is donated
	.set MOST, 64
	.set DIGITS, 20				// of the fuse that the agent is told
	.set told, 96				// where they stand

	.globl _start
_start:
	ldr	x0, [sp]			// argc
	add	x20, sp, #24
	add	x21, sp, x0, lsl #3
	add	x21, x21, #16
	ldr	x1, [sp, #16]
	ldr	x19, [sp, #24]
	ldr	x26, [sp, #32]			// NULL if there are but three
	sub	sp, sp, #256
	cmp	x0, #3
	b.lo	usage
	ldrb	w2, [x1]
	cmp	w2, #'d'
	b.eq	donate
	b.hi	fuse
	bl	number
	b	wait

// number reads decimal digits (x1) into x22.
number:
	mov	x22, #0
	mov	x3, #10
digit:
	ldrb	w2, [x1], #1
	sub	w2, w2, #'0'
	cmp	w2, #9
	b.hi	1f
	madd	x22, x22, x3, x2
	b	digit
1:	ret

// Tells process 1, which is one of us, its new fuse: a signal that carries a number.
fuse:
	mov	x1, x19
	bl	number
	// While it begins, and does not wait yet, it would die of the signal.
	mov	x25, #LOOKS
look:
	mov	x8, #SYS_openat
	adr	x1, stat
	mov	x2, #0
	svc	#0
	mov	x23, x0
	tbnz	w0, #31, tell
	mov	x8, #SYS_read
	mov	x1, sp
	mov	x2, #64				// more than its number and name
	svc	#0
	mov	x24, x0
	mov	x8, #SYS_close
	mov	x0, x23
	svc	#0
	mov	x1, sp
	add	x24, x24, x1
1:	cmp	x1, x24
	b.ge	tell
	ldrb	w2, [x1], #1
	cmp	w2, #')'
	b.ne	1b
	ldrb	w2, [x1, #1]
	cmp	w2, #'R'
	b.ne	tell
	str	xzr, [sp]
	mov	x2, #1000000 & 0xffff		// ns
	movk	x2, #1000000 >> 16, lsl #16
	str	x2, [sp, #8]
	mov	x8, #SYS_nanosleep
	mov	x0, sp
	mov	x1, #0
	svc	#0
	subs	x25, x25, #1
	b.ne	look
tell:
	add	x2, sp, #128			// siginfo
	mov	x3, #128
1:	sub	x3, x3, #8
	str	xzr, [x2, x3]
	cbnz	x3, 1b
	mov	w4, #SIGUSR2
	str	w4, [x2]
	mov	w4, #SI_QUEUE
	str	w4, [x2, #si_code]
	str	x22, [x2, #si_value]
	mov	x8, #SYS_rt_sigqueueinfo
	mov	x0, #1
	mov	x1, #SIGUSR2
	svc	#0
	neg	x0, x0				// an error's number, or 0
	b	exit

// Hands COUNT open descriptors, from FIRST on, to who listens at SOCKET.
donate:
	cbz	x26, usage
	sub	sp, sp, #512			// 0 address, 112 message, 168 vector, 192 control message
	mov	x3, #192
1:	sub	x3, x3, #8
	str	xzr, [sp, x3]
	cbnz	x3, 1b
	mov	x1, x26
	bl	number
	sub	x0, x22, #1
	cmp	x0, #MOST
	b.hs	usage
	mov	w0, #AF_UNIX
	strh	w0, [sp]
	add	x0, sp, #2
	mov	x3, #ADDRESS-3
1:	ldrb	w2, [x19], #1
	cbz	w2, 2f
	cbz	x3, usage			// too long
	strb	w2, [x0], #1
	sub	x3, x3, #1
	b	1b
2:	mov	x8, #SYS_socket
	mov	x0, #AF_UNIX
	mov	x1, #SOCK_STREAM
	mov	x2, #0
	svc	#0
	tbnz	w0, #31, failed
	mov	w23, w0
	mov	x8, #SYS_connect
	mov	x1, sp
	mov	x2, #ADDRESS
	svc	#0
	tbnz	w0, #31, failed
	ldr	x1, [x20, #16]
	cbz	x1, 4f
	// Who listens there must be that process: anybody could be at the path.
	mov	x24, x22
	bl	number
	mov	w4, #12				// of pid, uid, gid
	str	w4, [sp, #496]
	mov	x8, #SYS_getsockopt
	mov	w0, w23
	mov	x1, #SOL_SOCKET
	mov	x2, #SO_PEERCRED
	add	x3, sp, #480
	add	x4, sp, #496
	svc	#0
	tbnz	w0, #31, failed
	ldr	w1, [sp, #480]
	cmp	w1, w22
	mov	w0, #-EPERM
	b.ne	failed
	mov	x22, x24
4:
	mov	x0, sp				// one byte, whichever
	mov	x1, #1
	str	x0, [sp, #168]
	str	x1, [sp, #176]
	add	x0, sp, #168
	str	x0, [sp, #112+16]
	str	x1, [sp, #112+24]
	add	x2, sp, #192
	str	x2, [sp, #112+32]
	lsl	x0, x22, #2
	add	x0, x0, #16			// its head has 16 bytes
	str	x0, [x2]
	str	x0, [sp, #112+40]
	mov	w0, #SOL_SOCKET
	str	w0, [x2, #8]
	mov	w0, #SCM_RIGHTS
	str	w0, [x2, #12]
	add	x2, x2, #16
	mov	w0, #FIRST
3:	str	w0, [x2], #4
	add	w0, w0, #1
	sub	x22, x22, #1
	cbnz	x22, 3b
	mov	x8, #SYS_sendmsg
	mov	w0, w23
	add	x1, sp, #112
	mov	x2, #MSG_NOSIGNAL
	svc	#0
	tbz	w0, #31, end
failed:
	neg	w0, w0				// an error's number
	b	exit

wait:
	mov	x25, #0
	// Children nobody waits for, and orphans, vanish by themselves: SIGCHLD is ignored.
	mov	x0, #SIGCHLD
	mov	x23, #SIG_IGN
	bl	action
	mov	x24, #WAITED
	bl	mask
again:
	mov	x2, #0				// no time limit
	cbz	x22, 1f
	mov	x8, #SYS_clock_gettime
	mov	x0, #0				// CLOCK_REALTIME
	mov	x1, sp
	svc	#0
	ldr	x0, [sp]
	subs	x0, x22, x0
	b.gt	3f
	// The fuse has burnt down, perhaps while we were frozen or in a snapshot. The seconds of
	// grace are counted one by one: while the machine stands still, none goes by.
	cmp	x25, #GRACE
	b.eq	end
	add	x25, x25, #1
	mov	x0, #1
3:	stp	x0, xzr, [sp]
	mov	x2, sp
1:
	mov	x0, #WAITED
	str	x0, [sp, #16]
	mov	x8, #SYS_rt_sigtimedwait
	add	x0, sp, #16
	add	x1, sp, #128			// siginfo
	mov	x3, #8
	svc	#0
	cmp	w0, #SIGTERM
	b.eq	end
	cmp	w0, #SIGUSR2
	b.ne	2f
	ldr	w2, [sp, #128+si_code]
	cmn	w2, #1				// SI_QUEUE
	b.ne	again
	ldr	x22, [sp, #128+si_value]
	mov	x25, #0
	b	again
2:
	cmp	w0, #SIGUSR1
	b.ne	again

	// A fuse that came before it may still be there: of several signals the lowest comes first.
	mov	x0, #FUSES
	stp	xzr, xzr, [sp]
	str	x0, [sp, #16]
	mov	x8, #SYS_rt_sigtimedwait
	add	x0, sp, #16
	add	x1, sp, #128			// siginfo
	mov	x2, sp
	mov	x3, #8
	svc	#0
	cmp	w0, #SIGUSR2
	b.ne	2f
	ldr	w2, [sp, #128+si_code]
	cmn	w2, #1				// SI_QUEUE
	b.ne	2f
	ldr	x22, [sp, #128+si_value]
	mov	x25, #0
2:
	// Become the agent, with signals as a new program expects them; but those that we wait for
	// would end it until it catches them, and more of them may be on their way.
	mov	x0, #SIGUSR1
	mov	x23, #SIG_IGN
	bl	action
	mov	x0, #SIGUSR2
	bl	action
	mov	x0, #SIGCHLD
	mov	x23, #SIG_DFL
	bl	action
	mov	x24, #0
	bl	mask
	// The argument "@" is the fuse as it is now.
	mov	x2, x22
	add	x1, sp, #told
	add	x3, sp, #told+DIGITS
	strb	wzr, [x3]
	mov	x4, #10
3:	udiv	x5, x2, x4
	msub	x6, x5, x4, x2
	add	w6, w6, #'0'
	strb	w6, [x3, #-1]!
	mov	x2, x5
	cmp	x3, x1
	b.hi	3b
	mov	x3, x20
4:	ldr	x0, [x3], #8
	cbz	x0, 5f
	ldrb	w2, [x0]
	cmp	w2, #'@'
	b.ne	4b
	ldrb	w2, [x0, #1]
	cbnz	w2, 4b
	str	x1, [x3, #-8]
	b	4b
5:
	mov	x8, #SYS_execve
	ldr	x0, [x20]
	mov	x1, x20
	mov	x2, x21
	svc	#0
	b	wait				// no memory for it now, say: the next signal tries again

// action sets what becomes of a signal (x0) to x23.
action:
	add	x1, sp, #32			// struct sigaction: handler, flags, restorer, mask
	stp	x23, xzr, [x1]
	stp	xzr, xzr, [x1, #16]
	mov	x8, #SYS_rt_sigaction
	mov	x2, #0
	mov	x3, #8
	svc	#0
	ret

// mask sets which signals are blocked (x24).
mask:
	add	x1, sp, #32
	str	x24, [x1]
	mov	x8, #SYS_rt_sigprocmask
	mov	x0, #SIG_SETMASK
	mov	x2, #0
	mov	x3, #8
	svc	#0
	ret

usage:
	mov	x0, #2
	b	exit
end:
	mov	x0, #0
exit:
	mov	x8, #SYS_exit_group
	svc	#0

stat:	.asciz	"/proc/1/stat"

// The first process of a sandbox until its agent is needed: see pause.go.
//
//	pause SECONDS AGENT ARGS…
//	pause fuse SECONDS
//
// Registers kept throughout: x20 &argv[2], x21 envp, x22 the fuse in seconds since 1970,
// x25 whether it has burnt down and the time of grace runs.

	.set SYS_exit_group, 94
	.set SYS_clock_gettime, 113
	.set SYS_rt_sigaction, 134
	.set SYS_rt_sigprocmask, 135
	.set SYS_rt_sigtimedwait, 137
	.set SYS_rt_sigqueueinfo, 138
	.set SYS_execve, 221
	.set SIGUSR1, 10
	.set SIGUSR2, 12
	.set SIGTERM, 15
	.set SIGCHLD, 17
	.set SIG_SETMASK, 2
	.set WAITED, (1 << (SIGUSR1 - 1)) | (1 << (SIGUSR2 - 1)) | (1 << (SIGTERM - 1))
	.set si_code, 8
	.set si_value, 24
	.set SI_QUEUE, -1
	.set GRACE, 10

	.globl _start
_start:
	ldr	x0, [sp]			// argc
	add	x20, sp, #24
	add	x21, sp, x0, lsl #3
	add	x21, x21, #16
	ldr	x1, [sp, #16]
	ldr	x19, [sp, #24]
	sub	sp, sp, #256
	cmp	x0, #3
	b.lo	usage
	ldrb	w2, [x1]
	cmp	w2, #'9'
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

wait:
	mov	x25, #0
	// Children nobody waits for, and orphans, vanish by themselves: SIGCHLD is ignored.
	mov	x23, #1				// SIG_IGN
	mov	x24, #WAITED
	bl	signals
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
	// The fuse has burnt down, perhaps while we were frozen or in a snapshot.
	cbnz	x25, end
	mov	x25, #1
	mov	x0, #GRACE
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

	// Become the agent, with signals as a new program expects them.
	mov	x23, #0				// SIG_DFL
	mov	x24, #0
	bl	signals
	mov	x8, #SYS_execve
	ldr	x0, [x20]
	mov	x1, x20
	mov	x2, x21
	svc	#0
	b	wait				// no memory for it now, say: the next signal tries again

// signals sets what becomes of SIGCHLD (x23) and which signals are blocked (x24).
signals:
	add	x1, sp, #32			// struct sigaction: handler, flags, restorer, mask
	stp	x23, xzr, [x1]
	stp	xzr, xzr, [x1, #16]
	mov	x8, #SYS_rt_sigaction
	mov	x0, #SIGCHLD
	mov	x2, #0
	mov	x3, #8
	svc	#0
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

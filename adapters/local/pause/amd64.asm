# The first process of a sandbox until its agent is needed: see pause.go.
#
#	pause SECONDS AGENT ARGS…
#	pause fuse SECONDS
#
# Registers kept throughout: r12 &argv[2], r13 envp, r14 the fuse in seconds since 1970,
# rbp whether it has burnt down and the time of grace runs.

	.set SYS_rt_sigaction, 13
	.set SYS_rt_sigprocmask, 14
	.set SYS_execve, 59
	.set SYS_rt_sigtimedwait, 128
	.set SYS_rt_sigqueueinfo, 129
	.set SYS_clock_gettime, 228
	.set SYS_exit_group, 231
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
	mov	(%rsp), %rax			# argc
	lea	24(%rsp), %r12
	lea	16(%rsp, %rax, 8), %r13
	mov	%rsp, %rbp
	sub	$256, %rsp
	cmp	$3, %rax
	jb	usage
	mov	16(%rbp), %rsi
	cmpb	$'9', (%rsi)
	ja	fuse
	call	number
	jmp	wait

# number reads decimal digits (rsi) into r14.
number:
	xor	%r14d, %r14d
digit:
	movzbl	(%rsi), %eax
	inc	%rsi
	sub	$'0', %eax
	cmp	$9, %eax
	ja	1f
	imul	$10, %r14, %r14
	add	%rax, %r14
	jmp	digit
1:	ret

# Tells process 1, which is one of us, its new fuse: a signal that carries a number.
fuse:
	mov	24(%rbp), %rsi
	call	number
	lea	128(%rsp), %rdx			# siginfo
	xor	%eax, %eax
	mov	$16, %ecx
	mov	%rdx, %rdi
	rep stosq
	movl	$SIGUSR2, (%rdx)
	movl	$SI_QUEUE, si_code(%rdx)
	mov	%r14, si_value(%rdx)
	mov	$SYS_rt_sigqueueinfo, %eax
	mov	$1, %edi
	mov	$SIGUSR2, %esi
	syscall
	neg	%eax
	mov	%eax, %edi			# an error's number, or 0
	jmp	exit

wait:
	xor	%ebp, %ebp
	# Children nobody waits for, and orphans, vanish by themselves: SIGCHLD is ignored.
	mov	$1, %ebx			# SIG_IGN
	mov	$WAITED, %r15d
	call	signals
again:
	xor	%edx, %edx			# no time limit
	test	%r14, %r14
	jz	1f
	mov	$SYS_clock_gettime, %eax
	xor	%edi, %edi			# CLOCK_REALTIME
	mov	%rsp, %rsi
	syscall
	mov	%r14, %rax
	sub	(%rsp), %rax
	jg	3f
	# The fuse has burnt down, perhaps while we were frozen or in a snapshot.
	test	%ebp, %ebp
	jnz	end
	inc	%ebp
	mov	$GRACE, %eax
3:	mov	%rax, (%rsp)
	movq	$0, 8(%rsp)
	mov	%rsp, %rdx
1:
	movq	$WAITED, 16(%rsp)
	mov	$SYS_rt_sigtimedwait, %eax
	lea	16(%rsp), %rdi
	lea	128(%rsp), %rsi			# siginfo
	mov	$8, %r10d
	syscall
	cmp	$SIGTERM, %eax
	je	end
	cmp	$SIGUSR2, %eax
	jne	2f
	cmpl	$SI_QUEUE, 128+si_code(%rsp)
	jne	again
	mov	128+si_value(%rsp), %r14
	xor	%ebp, %ebp
	jmp	again
2:
	cmp	$SIGUSR1, %eax
	jne	again

	# Become the agent, with signals as a new program expects them.
	xor	%ebx, %ebx			# SIG_DFL
	xor	%r15d, %r15d
	call	signals
	mov	$SYS_execve, %eax
	mov	(%r12), %rdi
	mov	%r12, %rsi
	mov	%r13, %rdx
	syscall
	jmp	wait				# no memory for it now, say: the next signal tries again

# signals sets what becomes of SIGCHLD (ebx) and which signals are blocked (r15).
signals:
	lea	40(%rsp), %rsi			# struct sigaction: handler, flags, restorer, mask
	mov	%rbx, (%rsi)
	movq	$0, 8(%rsi)
	movq	$0, 16(%rsi)
	movq	$0, 24(%rsi)
	mov	$SYS_rt_sigaction, %eax
	mov	$SIGCHLD, %edi
	xor	%edx, %edx
	mov	$8, %r10d
	syscall
	lea	40(%rsp), %rsi
	mov	%r15, (%rsi)
	mov	$SYS_rt_sigprocmask, %eax
	mov	$SIG_SETMASK, %edi
	xor	%edx, %edx
	mov	$8, %r10d
	syscall
	ret

usage:
	mov	$2, %edi
	jmp	exit
end:
	xor	%edi, %edi
exit:
	mov	$SYS_exit_group, %eax
	syscall

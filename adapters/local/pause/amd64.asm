# The first process of a sandbox until its agent is needed: see pause.go.
#
#	pause SECONDS AGENT ARGS…
#	pause fuse SECONDS
#	pause donate SOCKET COUNT [PROCESS]
#
# Registers kept throughout: r12 &argv[2], r13 envp, r14 the fuse in seconds since 1970,
# rbp how many seconds of grace have begun since it burnt down.

	.set SYS_read, 0
	.set SYS_open, 2
	.set SYS_close, 3
	.set SYS_rt_sigaction, 13
	.set SYS_rt_sigprocmask, 14
	.set SYS_nanosleep, 35
	.set SYS_socket, 41
	.set SYS_connect, 42
	.set SYS_sendmsg, 46
	.set SYS_getsockopt, 55
	.set SYS_execve, 59
	.set SYS_rt_sigtimedwait, 128
	.set SYS_rt_sigqueueinfo, 129
	.set SYS_clock_gettime, 228
	.set SYS_exit_group, 231
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
	.set LOOKS, 10000			# at process 1, a millisecond apart
	.set AF_UNIX, 1
	.set SOCK_STREAM, 1
	.set SOL_SOCKET, 1
	.set SO_PEERCRED, 17
	.set EPERM, 1
	.set SCM_RIGHTS, 1
	.set MSG_NOSIGNAL, 0x4000
	.set ADDRESS, 110			# of a socket: its family, and a path of 107 bytes and a NUL
	.set FIRST, 3				# descriptor that is donated
	.set MOST, 64
	.set DIGITS, 20				# of the fuse that the agent is told
	.set told, 96				# where they stand

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
	cmpb	$'d', (%rsi)
	je	donate
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
	# While it begins, and does not wait yet, it would die of the signal.
	mov	$LOOKS, %ebp
look:
	mov	$SYS_open, %eax
	lea	stat(%rip), %rdi
	xor	%esi, %esi
	syscall
	mov	%eax, %ebx
	test	%eax, %eax
	js	tell
	mov	$SYS_read, %eax
	mov	%ebx, %edi
	mov	%rsp, %rsi
	mov	$64, %edx			# more than its number and name
	syscall
	mov	%eax, %r15d
	mov	$SYS_close, %eax
	mov	%ebx, %edi
	syscall
	mov	%rsp, %rdi
	mov	%r15d, %ecx
	test	%ecx, %ecx
	jle	tell
	mov	$')', %al
	repne scasb
	jne	tell
	cmpb	$'R', 1(%rdi)
	jne	tell
	movq	$0, (%rsp)
	movq	$1000000, 8(%rsp)		# ns
	mov	$SYS_nanosleep, %eax
	mov	%rsp, %rdi
	xor	%esi, %esi
	syscall
	dec	%ebp
	jnz	look
tell:
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

# Hands COUNT open descriptors, from FIRST on, to who listens at SOCKET.
donate:
	cmp	$4, %rax
	jb	usage
	sub	$512, %rsp			# 0 address, 112 message, 168 vector, 192 control message
	mov	%rsp, %rdi
	xor	%eax, %eax
	mov	$192/8, %ecx
	rep stosq
	mov	32(%rbp), %rsi
	call	number
	lea	-1(%r14), %eax
	cmp	$MOST, %eax
	jae	usage
	movw	$AF_UNIX, (%rsp)
	mov	24(%rbp), %rsi
	lea	2(%rsp), %rdi
	mov	$ADDRESS-3, %ecx
1:	mov	(%rsi), %al
	test	%al, %al
	jz	2f
	mov	%al, (%rdi)
	inc	%rsi
	inc	%rdi
	dec	%ecx
	jnz	1b
	cmpb	$0, (%rsi)
	jne	usage				# too long
2:	mov	$SYS_socket, %eax
	mov	$AF_UNIX, %edi
	mov	$SOCK_STREAM, %esi
	xor	%edx, %edx
	syscall
	test	%eax, %eax
	js	failed
	mov	%eax, %ebx
	mov	$SYS_connect, %eax
	mov	%ebx, %edi
	mov	%rsp, %rsi
	mov	$ADDRESS, %edx
	syscall
	test	%eax, %eax
	js	failed
	mov	40(%rbp), %rsi
	test	%rsi, %rsi
	jz	4f
	# Who listens there must be that process: anybody could be at the path.
	mov	%r14, %r15
	call	number
	movl	$12, 496(%rsp)			# of pid, uid, gid
	mov	$SYS_getsockopt, %eax
	mov	%ebx, %edi
	mov	$SOL_SOCKET, %esi
	mov	$SO_PEERCRED, %edx
	lea	480(%rsp), %r10
	lea	496(%rsp), %r8
	syscall
	test	%eax, %eax
	js	failed
	mov	$-EPERM, %eax
	cmp	%r14d, 480(%rsp)
	jne	failed
	mov	%r15, %r14
4:
	lea	168(%rsp), %rax			# one byte, whichever
	mov	%rsp, (%rax)
	movq	$1, 8(%rax)
	mov	%rax, 112+16(%rsp)
	movq	$1, 112+24(%rsp)
	lea	192(%rsp), %rdx
	mov	%rdx, 112+32(%rsp)
	lea	16(, %r14, 4), %rcx		# its head has 16 bytes
	mov	%rcx, (%rdx)
	mov	%rcx, 112+40(%rsp)
	movl	$SOL_SOCKET, 8(%rdx)
	movl	$SCM_RIGHTS, 12(%rdx)
	xor	%ecx, %ecx
3:	lea	FIRST(%rcx), %eax
	mov	%eax, 16(%rdx, %rcx, 4)
	inc	%ecx
	cmp	%r14d, %ecx
	jb	3b
	mov	$SYS_sendmsg, %eax
	mov	%ebx, %edi
	lea	112(%rsp), %rsi
	mov	$MSG_NOSIGNAL, %edx
	syscall
	test	%eax, %eax
	jns	end
failed:
	neg	%eax
	mov	%eax, %edi			# an error's number
	jmp	exit

wait:
	xor	%ebp, %ebp
	# Children nobody waits for, and orphans, vanish by themselves: SIGCHLD is ignored.
	mov	$SIGCHLD, %edi
	mov	$SIG_IGN, %ebx
	call	action
	mov	$WAITED, %r15d
	call	mask
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
	# The fuse has burnt down, perhaps while we were frozen or in a snapshot. The seconds of
	# grace are counted one by one: while the machine stands still, none goes by.
	cmp	$GRACE, %ebp
	je	end
	inc	%ebp
	mov	$1, %eax
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

	# A fuse that came before it may still be there: of several signals the lowest comes first.
	movq	$FUSES, 16(%rsp)
	movq	$0, (%rsp)
	movq	$0, 8(%rsp)
	mov	$SYS_rt_sigtimedwait, %eax
	lea	16(%rsp), %rdi
	lea	128(%rsp), %rsi			# siginfo
	mov	%rsp, %rdx
	mov	$8, %r10d
	syscall
	cmp	$SIGUSR2, %eax
	jne	2f
	cmpl	$SI_QUEUE, 128+si_code(%rsp)
	jne	2f
	mov	128+si_value(%rsp), %r14
	xor	%ebp, %ebp
2:
	# Become the agent, with signals as a new program expects them; but those that we wait for
	# would end it until it catches them, and more of them may be on their way.
	mov	$SIGUSR1, %edi
	mov	$SIG_IGN, %ebx
	call	action
	mov	$SIGUSR2, %edi
	call	action
	mov	$SIGCHLD, %edi
	mov	$SIG_DFL, %ebx
	call	action
	xor	%r15d, %r15d
	call	mask
	# The argument "@" is the fuse as it is now.
	mov	%r14, %rax
	lea	told(%rsp), %rsi
	lea	told+DIGITS(%rsp), %rdi
	movb	$0, (%rdi)
	mov	$10, %ecx
3:	xor	%edx, %edx
	div	%rcx
	add	$'0', %dl
	dec	%rdi
	mov	%dl, (%rdi)
	cmp	%rsi, %rdi
	ja	3b
	mov	%r12, %rdi
4:	mov	(%rdi), %rax
	test	%rax, %rax
	jz	5f
	cmpw	$'@', (%rax)
	jne	6f
	mov	%rsi, (%rdi)
6:	add	$8, %rdi
	jmp	4b
5:
	mov	$SYS_execve, %eax
	mov	(%r12), %rdi
	mov	%r12, %rsi
	mov	%r13, %rdx
	syscall
	jmp	wait				# no memory for it now, say: the next signal tries again

# action sets what becomes of a signal (edi) to ebx.
action:
	lea	40(%rsp), %rsi			# struct sigaction: handler, flags, restorer, mask
	mov	%rbx, (%rsi)
	movq	$0, 8(%rsi)
	movq	$0, 16(%rsi)
	movq	$0, 24(%rsi)
	mov	$SYS_rt_sigaction, %eax
	xor	%edx, %edx
	mov	$8, %r10d
	syscall
	ret

# mask sets which signals are blocked (r15).
mask:
	lea	40(%rsp), %rsi
	mov	%r15, (%rsi)
	mov	$SYS_rt_sigprocmask, %eax
	mov	$SIG_SETMASK, %edi
	xor	%edx, %edx
	mov	$8, %r10d
	syscall
	ret

stat:	.asciz	"/proc/1/stat"

usage:
	mov	$2, %edi
	jmp	exit
end:
	xor	%edi, %edi
exit:
	mov	$SYS_exit_group, %eax
	syscall

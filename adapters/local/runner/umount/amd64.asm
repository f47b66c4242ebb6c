# Takes /proc away: see umount.go.

	.set SYS_read, 0
	.set SYS_umount2, 166
	.set SYS_exit_group, 231
	.set EINTR, 4
	.set MNT_DETACH, 2
	.set SYNC, 3				# descriptor

	.globl _start
_start:
	lea	-1(%rsp), %rsi
again:
	mov	$SYS_read, %eax
	mov	$SYNC, %edi
	mov	$1, %edx
	syscall
	cmp	$-EINTR, %rax
	je	again
	cmp	$1, %rax
	jne	failed				# who starts us ended first
	mov	$SYS_umount2, %eax
	lea	proc(%rip), %rdi
	mov	$MNT_DETACH, %esi
	syscall
	test	%rax, %rax
	jnz	failed
	xor	%edi, %edi
	jmp	exit
failed:
	mov	$1, %edi
exit:
	mov	$SYS_exit_group, %eax
	syscall

proc:	.asciz	"/proc"

// The firmware of a PC: from the reset vector to 64-bit code with AVX-512, without an operating system.

    .globl _start, send, results
    .set results, 0x200000
    .set stack, 0x180000

    .section .reset, "ax"
    .code16
    jmp _start
    .balign 16, 0x90

    .section .start, "ax"
// Tables of the first 4 GiB, in pages of 1 GiB at their own addresses; the bits that a processor sets are set.
level_4:
    .quad level_3 + 0x23
    .balign 4096
level_3:
    .quad 0x000000e3, 0x400000e3, 0x800000e3, 0xc00000e3
    .balign 4096

segments:
    .quad 0, 0x00cf9b000000ffff, 0x00cf93000000ffff, 0x00af9b000000ffff  // none, 32-bit code, data, 64-bit code
segments_end:
segments_address:
    .word segments_end - segments - 1
    .long segments

    .code16
    .balign 16
_start:
    cli
    lgdtl %cs:segments_address - 0xffff0000
    movl %cr0, %eax
    orb $1, %al
    movl %eax, %cr0
    ljmpl $8, $protected

    .code32
protected:
    movl $16, %eax
    movl %eax, %ds
    movl %eax, %es
    movl %eax, %ss
    movl $0xffe00000, %esi
    movl $0x400000, %edi
    movl $0x1fc000 / 4, %ecx
    cld
    rep movsl
    movl $0x40620, %eax  // PAE, OSFXSR, OSXMMEXCPT, OSXSAVE
    movl %eax, %cr4
    movl $level_4, %eax
    movl %eax, %cr3
    movl $0xc0000080, %ecx  // EFER: long mode
    rdmsr
    orl $0x100, %eax
    wrmsr
    movl %cr0, %eax
    andl $0x9ffffffb, %eax  // caches on, no emulated floating point
    orl $0x80000002, %eax   // paging
    movl %eax, %cr0
    ljmpl $24, $long_mode

    .code64
long_mode:
    xorl %ecx, %ecx
    xorl %edx, %edx
    movl $0xe7, %eax  // x87, SSE, AVX, and the registers of AVX-512
    xsetbv
    movl $stack, %esp
    movl $guest, %eax
    call *%rax
    movl $off, %esi  // an address below 4 GiB
    movl $off_end - off, %ecx
    movw $0x8900, %dx  // the emulator ends
    rep outsb
1:
    hlt
    jmp 1b

off:
    .ascii "Shutdown"
off_end:

    .text
send:  // rdi: text, rsi: length
    movq %rsi, %rcx
    movq %rdi, %rsi
    movw $0xe9, %dx  // the emulator's console
    cld
    rep outsb
    ret

    .section .note.GNU-stack, "", @progbits

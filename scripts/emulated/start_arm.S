// A Linux program for Arm without a library.
    .text
    .globl _start, send
_start:
    bl guest
    mov x0, 0
    mov x8, 93  // exit
    svc 0

send:  // x0: text, x1: length
    mov x2, x1
    mov x1, x0
    mov x0, 1
    mov x8, 64  // write
    svc 0
    ret

    .bss
    .balign 64
    .globl results
results:
    .skip 1 << 20

    .section .note.GNU-stack, "", %progbits

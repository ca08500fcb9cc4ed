// The table of calls and the data that it points to, which emulate_products.py has written.
    .section .rodata
    .balign 64
data:
    .incbin "data.bin"
    .balign 64
    .globl calls, calls_end
calls:
#include "calls.inc"
calls_end:

    .section .note.GNU-stack, "", %progbits

/* Plays a tape: the calls of the driver and of cublasLt that one operation makes, written down once.
 *
 * An instruction is WORDS words of 64 bits: what to call, then its operands. An operand whose top byte is k, not 0, is
 * register k - 1 of this turn plus the other 56 bits; any other operand stands for itself. No address of a device or of
 * this process has a top byte that is not 0.
 *
 * No header of CUDA is needed: handles and pointers are 64-bit words, functions come as addresses.
 */

#include <stdint.h>

#define WORDS 16

typedef uint64_t word;
typedef uint32_t half;

enum { PATCH = 1, SUBMIT, FOLLOW, COPY, START, ATTRIBUTE, MULTIPLY, STORE };

struct functions {
    int (*submit)(word stream, half count, word operations, half flags);
    int (*record)(word event, word stream);
    int (*wait)(word stream, word event, half flags);
    int (*copy)(word target, word source, word bytes, word stream);
    int (*start)(word config, word function, word parameters, word extra);
    int (*attribute)(word product, int which, word *value, word bytes);
    int (*multiply)(word library, word product, word alpha, word a, word a_layout, word b, word b_layout, word beta,
                    word c, word c_layout, word d, word d_layout, word algorithm, word workspace, word workspace_bytes,
                    word stream);
};

struct patch {
    word *where;
    word value; /* an operand */
};

struct tape {
    const struct functions *functions;
    const word *code;
    const word *registers;
    word library; /* cublasLt's handle */
    word count;   /* of instructions */
    word at;      /* the instruction to begin with; the one that failed */
};

static inline word value_of(word operand, const word *registers) {
    word top = operand >> 56;
    return top ? registers[top - 1] + (operand & 0x00FFFFFFFFFFFFFFull) : operand;
}

#define V(n) value_of(i[n], r)

/* 0, or the status of the call that failed: nothing after it was called. To go on with it, play again. */
int tpoverlap_play(struct tape *tape) {
    const struct functions *f = tape->functions;
    const word *r = tape->registers;
    for (; tape->at < tape->count; tape->at++) {
        const word *i = tape->code + WORDS * tape->at;
        int status = 0;
        switch (i[0]) {
        case PATCH: {
            const struct patch *patches = (const struct patch *)i[1];
            for (word n = 0; n < i[2]; n++) *patches[n].where = value_of(patches[n].value, r);
            break;
        }
        case STORE: /* a parameter of 32 bits, whose neighbours stay */
            *(half *)i[1] = (half)V(2);
            break;
        case SUBMIT:
            status = f->submit(V(1), (half)i[2], i[3], 0);
            break;
        case FOLLOW:
            status = f->record(i[3], V(2));
            if (!status) status = f->wait(V(1), i[3], 0);
            break;
        case COPY:
            status = f->copy(V(2), V(3), i[4], V(1));
            break;
        case START:
            status = f->start(i[1], i[2], i[3], 0);
            break;
        case ATTRIBUTE: { /* kept in memory of the tape, so that it is set only when it changes */
            word *kept = (word *)i[3], wanted = V(4);
            if (*kept != wanted) {
                *kept = wanted;
                status = f->attribute(i[1], (int)i[2], kept, 8);
                if (status) *kept = 0;
            }
            break;
        }
        case MULTIPLY:
            status = f->multiply(tape->library, i[1], i[2], V(3), i[4], V(5), i[6], i[7], V(8), i[9], V(10), i[11],
                                 i[12], i[13], i[14], V(15));
            break;
        default:
            status = -1;
        }
        if (status) return status;
    }
    tape->at = 0;
    return 0;
}

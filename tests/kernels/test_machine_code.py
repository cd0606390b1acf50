"""Counting instructions per logit in listings written by hand."""

from kernels.machine_code import PerLogit, per_logit, read_amd, read_nvidia

# A masked loop, then the loop without masks, around a loop that waits; both have two exponentials.
# The words behind each instruction are its bits.
NVIDIA = """
        code for sm_90a
                Function : some_kernel
        /*0000*/                   LDC R1, c[0x0][0x28] ;      /* 0x00000a00ff017b82 */
                                                               /* 0x000e700000000800 */
        /*0010*/                   ISETP.GE.AND P0, PT, R1 ;   /* 0x00000a00ff017b82 */
        /*0020*/              @!P0 FSEL R2, R3, R4, P1 ;       /* 0x00000a00ff017b82 */
        /*0030*/                   MUFU.EX2 R2, R2 ;           /* 0x00000a00ff017b82 */
        /*0040*/                   MUFU.EX2 R3, R3 ;           /* 0x00000a00ff017b82 */
        /*0050*/                   FSEL R2, R3, R4, P1 ;       /* 0x00000a00ff017b82 */
        /*0060*/                   FSEL R2, R3, R4, P1 ;       /* 0x00000a00ff017b82 */
        /*0070*/              @!P3 BRA 0x10 ;                  /* 0x00000a00ff017b82 */
        /*0080*/                   SYNCS.TRYWAIT P0, [UR4] ;   /* 0x00000a00ff017b82 */
        /*0090*/              @!P0 BRA 0x80 ;                  /* 0x00000a00ff017b82 */
        /*00a0*/                   MUFU.EX2 R2, R2 ;           /* 0x00000a00ff017b82 */
        /*00b0*/              @!P0 BRA 0xd0 ;                  /* 0x00000a00ff017b82 */
        /*00c0*/                   MUFU.EX2 R3, R3 ;           /* 0x00000a00ff017b82 */
        /*00d0*/                   BRA.U !UP2, 0x80 ;          /* 0x00000a00ff017b82 */
        /*00e0*/                   BRA 0xe0;                   /* 0x00000a00ff017b82 */
"""

AMD = """
\t.text
some_kernel:                            ; @some_kernel
.Lfunc_begin0:
\t.loc\t1 82 31                         ; forward.py:82:31
\ts_mov_b32 s33, 0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
\tv_exp_f32_e32 v1, v1
.Ltmp3:
\t.loc\t1 83 31
\tv_exp_f32_e32 v2, v2
\ts_barrier
\ts_cbranch_scc1 .LBB0_1
; %bb.2:
\ts_cbranch_scc0 .LBB0_3
.LBB0_3:
\ts_endpgm
"""


def test_the_loop_without_masks_is_counted() -> None:
    code = read_nvidia(NVIDIA)
    assert len(code) == 15
    assert code[7] == ("BRA", 1)
    assert per_logit(code, 2) == PerLogit(6 / 2, 2 / 2)  # 0x80 to 0xd0


def test_exponentials_beyond_one_per_logit_show() -> None:
    assert per_logit(read_nvidia(NVIDIA), 1) == PerLogit(6.0, 2.0)


def test_a_loop_with_too_few_exponentials_is_another() -> None:
    assert per_logit(read_nvidia(NVIDIA), 1, exponentials_per_logit=3) is None


def test_code_without_exponentials_has_no_logits() -> None:
    assert per_logit(read_nvidia(NVIDIA.replace("MUFU.EX2", "MUFU.RCP")), 2) is None
    assert per_logit([], 2) is None


def test_assembly_for_amd_is_read() -> None:
    code = read_amd(AMD)
    assert [instruction.name for instruction in code if instruction.jump is not None] == [
        "s_cbranch_scc1",
        "s_cbranch_scc0",
    ]
    assert per_logit(code, 2) == PerLogit(4 / 2, 2 / 2)

"""Decoding in splits against the definition, in the interpreter."""

import pytest
import torch
from torch import Tensor

from kernels import eager, flash_decode_launch
from kernels.attention import AttentionOutput, AttentionSpec
from kernels.flash_decode_launch import can_decode, decode
from kernels.flash_launch import Rule
from kernels.visibility import document_ends, document_starts
from tests.kernels.cases import ALL_STATS, EVERYTHING, Case, Inputs, make_inputs
from tests.kernels.test_parity import assert_close as assert_backend_close
from tests.kernels.test_parity import error, largest, table_bound

LONG = {"S": 130, "B": 2, "H": 4, "Hkv": 2}


@pytest.fixture(autouse=True)
def many_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split short caches into several parts, as long ones are."""
    monkeypatch.setattr(flash_decode_launch, "KEYS_PER_SPLIT", 16)
    monkeypatch.setattr(flash_decode_launch, "DEFAULT_PROGRAMS", 12)


def make_rule(spec: AttentionSpec, head_size: int, kv_lengths: Tensor | None) -> Rule:
    documents = spec.documents
    return Rule(
        kv_lengths=kv_lengths,
        starts=None if documents is None else document_starts(documents).int(),
        ends=None if documents is None else document_ends(documents).int(),
        alibi_slopes=spec.alibi_slopes,
        sink_logit=spec.sink_logit,
        causal=spec.causal,
        window=spec.window,
        sinks=spec.sinks,
        prefix=spec.prefix,
        softcap=spec.softcap,
        scale=spec.scale_for(head_size),
        precision="ieee",
    )


def run_decode(inputs: Inputs) -> AttentionOutput:
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    rule = make_rule(inputs.spec, q.shape[3], inputs.kv_lengths)
    assert can_decode(q, k, rule)
    with torch.no_grad():
        return decode(q, k, v, rule, ALL_STATS.row_names, ALL_STATS.sink_mass)


def assert_close(inputs: Inputs) -> None:
    """Compare with the definition in float64, within the bounds of the other backends."""
    exact = inputs.to(torch.float64)
    truth = eager.attention(
        exact.q, exact.k, exact.v, exact.spec, exact.kv_lengths, ALL_STATS, None
    )._asdict()
    results = run_decode(inputs)._asdict()
    size = 1 + largest(truth["max_logit"]) / 10
    for name, true in truth.items():
        result, true = results[name], true.detach()
        assert result.shape == true.shape, name
        assert result.dtype == (inputs.q.dtype if name == "out" else torch.float32), name
        assert not result.isnan().any(), name
        assert (result.double() == true)[~true.isfinite()].all(), f"{name}: infinities differ"
        relative, absolute = error(result, true)
        bound = size * table_bound(name, inputs.q.dtype)
        assert relative <= bound or absolute <= 1e-6, f"{name}: {relative:.2e} or {absolute:.2e}"


DECODE_CASES = [
    Case(name="one query", T=1, **LONG),
    Case(name="one query, no groups", T=1, S=130, H=2, Hkv=2, Dv=40),
    Case(name="one key head, D 40", T=1, S=70, H=6, Hkv=1, D=40),
    Case(name="some queries", T=3, layout="rows_first", **LONG),
    Case(name="as many rows as a tile takes", T=16, S=70, B=1, H=4, Hkv=1),
    Case(name="bidirectional", T=2, options={"causal": False}, **LONG),
    Case(name="ragged, with empty splits", T=1, S=130, B=4, lengths=(130, 1, 40, 0)),
    Case(name="ragged, rows without keys", T=3, S=130, lengths=(2, 128), sink_logit="learned"),
    Case(name="window", T=2, options={"window": 40}, **LONG),
    Case(name="window and sinks", T=2, options={"window": 20, "sinks": 3}, **LONG),
    Case(name="window, prefix", T=2, S=130, options={"window": 9, "prefix": 129}),
    Case(name="documents", T=1, documents=((50, 80), (129, 1)), **LONG),
    Case(name="document, window, sinks", T=1, documents=((50, 80), (2, 128)),
         options={"window": 7, "sinks": 2}, **LONG),
    Case(name="sink logit far above", T=1, sink_logit="high", **LONG),
    Case(name="logits in the hundreds", T=1, logit_size=100.0, sink_logit="learned", **LONG),
    Case(name="equal keys", T=1, keys="equal", **LONG),
    Case(name="everything", T=3, lengths=(130, 61), **LONG, **EVERYTHING),
]  # fmt: skip


@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda case: case.name)
def test_decoding_agrees_with_the_definition(case: Case) -> None:
    assert_close(make_inputs(case, torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_the_output_once(dtype: torch.dtype) -> None:
    assert_close(make_inputs(Case(name="half", T=2, sink_logit="learned", **LONG), dtype))


@pytest.mark.parametrize("splits", [1, 3])
def test_the_number_of_splits_changes_nothing(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_decode_launch, "MAX_SPLITS", splits)
    assert_close(make_inputs(Case(name="splits", T=2, **LONG, **EVERYTHING), torch.float32))


@pytest.mark.parametrize("page_length", [16, 7])
def test_pages_hold_the_same_keys_anywhere(page_length: int) -> None:
    """The same numbers, bit for bit, from pages in any order; what lies past the end is unread."""
    case = Case(name="pages", T=2, S=126, lengths=(126, 45), options={"window": 60, "sinks": 3})
    inputs = make_inputs(case, torch.float32)
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    table = torch.full((2, -(-126 // page_length)), 10**6, dtype=torch.int32)
    used = [(0, p) for p in range(-(-126 // page_length))]
    used += [(1, p) for p in range(-(-45 // page_length))]
    order = torch.randperm(len(used), generator=torch.Generator().manual_seed(1)).tolist()
    pools = [torch.full((len(used), 2, page_length, 16), torch.nan) for _ in range(2)]
    for number, (b, p) in zip(order, used, strict=True):
        table[b, p] = number
        here = slice(p * page_length, min((p + 1) * page_length, case.lengths[b]))
        for pool, x in zip(pools, (k, v), strict=True):
            pool[number, :, : here.stop - here.start] = x[b, :, here]
    rule = make_rule(inputs.spec, 16, inputs.kv_lengths)
    chosen = ALL_STATS.row_names, ALL_STATS.sink_mass
    whole = decode(q, k, v, rule, *chosen)
    paged = decode(q, *pools, rule, *chosen, block_table=table)
    for name, x, y in zip(whole._fields, whole, paged, strict=True):
        assert x.equal(y), name


def test_a_view_of_a_larger_cache_needs_no_copy() -> None:
    inputs = make_inputs(Case(name="cache", T=1, **LONG), torch.float32)
    memory = torch.full((2, 2, 2, 300, 16), torch.nan)
    memory[0, :, :, :130], memory[1, :, :, :130] = inputs.k.detach(), inputs.v.detach()
    inputs.k, inputs.v = (x[:, :, :130] for x in memory)
    assert_close(inputs)


def test_only_what_was_asked_for_is_returned() -> None:
    inputs = make_inputs(Case(name="few", T=1, **LONG), torch.float32)
    rule = make_rule(inputs.spec, 16, None)
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    output = decode(q, k, v, rule, ["max_prob"], [])
    assert {n for n, x in output._asdict().items() if x is not None} == {"out", "lse", "max_prob"}


def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = torch.Tensor.new_empty

    def poisoned(self: Tensor, *shape: object, **options: object) -> Tensor:
        fresh = stock(self, *shape, **options)
        return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    case = Case(name="ragged", T=3, S=130, lengths=(2, 128), sink_logit="learned")
    for name, x in run_decode(make_inputs(case, torch.float32))._asdict().items():
        assert not x.isnan().any(), name


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"T": 1, "S": 17}, True),
        ({"T": 1, "S": 16}, False),  # nothing to split
        ({"T": 16, "S": 99, "H": 4, "Hkv": 1}, True),
        ({"T": 17, "S": 99, "H": 4, "Hkv": 1}, False),  # too many rows
        ({"T": 1, "S": 99, "documents": ((50, 49),) * 2}, True),
        ({"T": 2, "S": 99, "documents": ((50, 49),) * 2}, False),
    ],
)
def test_few_queries_against_many_keys_are_decoded(shape: dict, expected: bool) -> None:
    inputs = make_inputs(Case(name="gate", **shape), torch.float32)
    rule = make_rule(inputs.spec, 16, None)
    assert can_decode(inputs.q, inputs.k, rule) == expected


@pytest.mark.parametrize(
    "case",
    [
        Case(name="dispatch", T=2, **LONG, **EVERYTHING),
        Case(name="dispatch, ragged", T=1, lengths=(130, 9), **LONG),
    ],
    ids=lambda case: case.name,
)
def test_the_backend_decodes_by_itself_and_gradients_flow(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def spy(*arguments: object) -> AttentionOutput:
        calls.append(arguments)
        return decode(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(flash_decode_launch, "decode", spy)
    assert_backend_close("triton", make_inputs(case, torch.float32))
    assert calls

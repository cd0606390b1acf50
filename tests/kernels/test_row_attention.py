"""One query as sums: the definition's numbers, and the way taken only where it fits."""

from dataclasses import replace

import pytest
import torch

from kernels import row_attention
from tests.kernels.cases import EVERYTHING, Case, make_inputs, run
from tests.kernels.test_parity import error, table_bound

CASES = [
    Case(name="one key", T=1, S=1),
    Case(name="groups of two", T=1, S=67),
    Case(name="no groups, Dv above D", T=1, S=19, Hkv=4, Dv=40),
    Case(name="one key head, D 1", T=1, S=19, H=6, Hkv=1, D=1, Dv=1),
    Case(name="three rows, rows first", T=1, S=33, B=3, layout="rows_first"),
    Case(name="given scale", T=1, S=33, options={"scale": 0.5}),
    Case(name="bidirectional", T=1, S=33, options={"causal": False}),
    Case(name="window 1", T=1, S=33, options={"window": 1}),
    Case(name="window and sinks", T=1, S=67, options={"window": 8, "sinks": 2}),
    Case(name="prefix and window", T=1, S=20, options={"prefix": 7, "window": 3}),
    Case(name="alibi", T=1, S=65, slopes=True),
    Case(name="sink logit", T=1, S=65, sink_logit="learned"),
    Case(name="sink logit far above", T=1, S=65, sink_logit="high"),
    Case(name="sink logit far below", T=1, S=65, sink_logit="low"),
    Case(name="logits in the hundreds", T=1, S=65, logit_size=100.0, sink_logit="learned"),
    Case(name="equal keys", T=1, S=40, keys="equal"),
    Case(name="everything", T=1, S=65, **EVERYTHING),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_query_agrees_with_the_definition(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    truth = run(inputs.to(torch.float64), "eager", stats=None)["out"]
    own = error(run(inputs, "eager", stats=None)["out"], truth)[0]
    out = row_attention.attention(inputs.q, inputs.k, inputs.v, inputs.spec)
    assert out.shape == truth.shape
    assert out.dtype == dtype
    assert error(out, truth)[0] <= max(2 * own, table_bound("out", dtype))


def test_only_a_compiled_step_without_gradients_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(CASES[1], torch.float32)
    documents = replace(inputs.spec, documents=torch.zeros(2, 67, dtype=torch.int64))
    with torch.no_grad():
        assert not row_attention.fits(inputs.q, inputs.spec)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not row_attention.fits(inputs.q, inputs.spec)
    with torch.no_grad():
        assert row_attention.fits(inputs.q, inputs.spec)
        assert not row_attention.fits(inputs.q.expand(-1, -1, 2, -1), inputs.spec)
        assert not row_attention.fits(inputs.q, documents)
        assert not row_attention.fits(inputs.q.to("meta"), inputs.spec)

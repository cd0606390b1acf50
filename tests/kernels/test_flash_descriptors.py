"""The forward through tensor descriptors gives the very bits that it gives through pointers.

The interpreter is no GPU with a copy engine, so these tests choose the path themselves.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import flash_launch, flash_tiles
from kernels.attention import attention
from kernels.flash_launch import Rule, describable
from kernels.flash_tiles import Tile
from tests.kernels.cases import ALL_STATS, EVERYTHING, Case, Inputs, make_inputs, square

HALVES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)

SMALL: dict[str, Any] = {"B": 1, "H": 2, "Hkv": 1}
# Lengths beside a multiple of the tile, of 32 rows and keys. Documents go through pointers.
CASES = [
    square("one token", 1, D=8, Dv=8, **SMALL),
    square("causal 45, D 40, groups", 45, D=40, Dv=40, B=2, H=4, Hkv=2),
    square("causal 64, D 64", 64, D=64, Dv=64, **SMALL),
    square("causal 65, D 80", 65, D=80, Dv=80, B=1, H=2, Hkv=2),
    square("causal 33, D 128, rows first", 33, D=128, Dv=128, layout="rows_first", **SMALL),
    square("Dv above D", 45, D=16, Dv=40, layout="rows_first", **SMALL),
    square("Dv below D", 45, D=64, Dv=24, **SMALL),
    square("bidirectional", 61, options={"causal": False}, **SMALL),
    Case(name="fewer queries than keys", T=13, S=59, layout="rows_first", **SMALL),
    Case(name="more queries than keys", T=59, S=13, **SMALL),
    Case(name="rows without keys, sink logit", T=40, S=1, sink_logit="learned", **SMALL),
    Case(name="ragged", T=35, S=70, lengths=(70, 41, 0), B=3, H=2, Hkv=1),
    Case(
        name="ragged, bidirectional", T=9, S=40, lengths=(33,), options={"causal": False}, **SMALL
    ),
    square("window and sinks", 97, options={"window": 8, "sinks": 3}, **SMALL),
    square("prefix", 70, options={"prefix": 37}, **SMALL),
    square("alibi", 65, slopes=True, **SMALL),
    square("soft-cap", 65, options={"softcap": 2.0}, logit_size=3.0, **SMALL),
    square("sink logit", 65, sink_logit="learned", layout="rows_first", **SMALL),
    Case(name="everything", T=30, S=50, lengths=(33,), D=40, Dv=24, **EVERYTHING, **SMALL),  # type: ignore[arg-type]
]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The descriptors made so far."""
    found: list[Any] = []
    stock = flash_launch.TensorDescriptor
    monkeypatch.setattr(
        flash_launch, "TensorDescriptor", lambda *x: found.append(stock(*x)) or found[-1]
    )
    return found


def through(path: str, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Output and all statistics by way of "descriptors" or "pointers"."""
    monkeypatch.setattr(flash_launch, "describable", lambda *_: path == "descriptors")
    with torch.no_grad():
        output = attention(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.spec,
            kv_lengths=inputs.kv_lengths,
            stats=ALL_STATS,
            backend="triton",
        )
    return {name: x for name, x in output._asdict().items() if x is not None}


def assert_paths_agree(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = through("pointers", inputs, monkeypatch)
    results = through("descriptors", inputs, monkeypatch)
    assert results.keys() == expected.keys()
    for name, x in results.items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_descriptors_give_the_bits_that_pointers_give(
    case: Case, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = HALVES[len(case.name) % 2]
    assert_paths_agree(make_inputs(case, dtype), monkeypatch)
    assert len(made) == 4


@pytest.mark.parametrize("tile", [(16, 64), (64, 16)], ids=str)
def test_rows_and_keys_have_tiles_of_their_own(
    tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_tiles, "INTERPRETER", Tile(*tile, warps=4, stages=1))
    case = Case(name="ragged", T=40, S=70, lengths=(47,), D=24, Dv=40, **SMALL)
    assert_paths_agree(make_inputs(case, torch.bfloat16), monkeypatch)


@pytest.mark.parametrize("filler", [torch.nan, 1e30])
def test_keys_past_the_length_may_be_anything(
    filler: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(name="ragged", T=35, S=70, lengths=(41,), sink_logit="learned", **SMALL)
    inputs = make_inputs(case, torch.bfloat16)
    expected = through("descriptors", inputs, monkeypatch)
    with torch.no_grad():
        inputs.k[:, :, 41:] = filler
        inputs.v[:, :, 41:] = filler
    for name, x in through("descriptors", inputs, monkeypatch).items():
        assert torch.equal(x, expected[name]), name


def test_nothing_is_written_beside_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows past T lie in the last tile, columns past Dv in every tile."""
    inputs = make_inputs(square("causal", 35, D=40, Dv=24, **SMALL), torch.bfloat16)
    wide = torch.full((1, 40, 2, 32), 7.0, dtype=torch.bfloat16)
    monkeypatch.setattr(
        flash_launch, "_rows_first", lambda *_: wide[:, :35, :, :24].transpose(1, 2)
    )
    through("descriptors", inputs, monkeypatch)
    assert not (wide[:, :35, :, :24] == 7).any()
    assert (wide[:, 35:] == 7).all()
    assert (wide[:, :, :, 24:] == 7).all()


def rule(**others: Any) -> Rule:
    absent = dict.fromkeys(("kv_lengths", "starts", "ends", "alibi_slopes", "sink_logit"))
    numbers = {"window": None, "sinks": 0, "prefix": 0, "softcap": None, "scale": 1.0}
    return Rule(**absent | numbers | {"causal": True, "precision": "ieee"} | others)


@pytest.fixture
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = getattr(request, "param", "sm_90")
    monkeypatch.setattr(flash_launch, "architecture", lambda _: name)
    return name


@pytest.mark.parametrize(
    ("arch", "taken"),
    [
        ("sm_90", True),
        ("sm_100", True),
        ("sm_80", False),
        ("gfx942", False),
        ("interpreter", False),
    ],
    indirect=["arch"],
)
def test_descriptors_are_for_gpus_with_a_copy_engine(arch: str, taken: bool) -> None:
    x = memory(2, 3, 50, 40)
    assert describable((x, x), rule()) is taken


def memory(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


REFUSED = {
    "float32": memory(2, 3, 8, 16).float(),
    "rows of 24 bytes": memory(2, 3, 8, 12),
    "heads 24 bytes apart": memory(2, 8, 3, 12).transpose(1, 2),
    "an expanded batch": memory(1, 3, 8, 16).expand(2, 3, 8, 16),
    "a base in the middle of 16 bytes": memory(2, 3, 8, 24)[..., 4:20],
    "no rows": memory(2, 3, 0, 16),
}


@pytest.mark.usefixtures("arch")
@pytest.mark.parametrize("x", REFUSED.values(), ids=REFUSED)
def test_what_a_descriptor_cannot_hold_goes_through_pointers(x: Tensor) -> None:
    good = memory(2, 8, 3, 16).transpose(1, 2)
    assert describable((good, good), rule())
    assert not describable((good, x), rule())


@pytest.mark.usefixtures("arch")
def test_documents_go_through_pointers() -> None:
    x, bounds = memory(2, 3, 8, 16), torch.zeros(2, 8, dtype=torch.int32)
    assert describable((x, x), rule(kv_lengths=bounds[:, 0]))
    assert not describable((x, x), rule(starts=bounds, ends=bounds))

"""The covering set of attention calls that every backend is compared on, and their inputs."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kernels.attention import AttentionOutput, AttentionSpec, Stats, attention, column_mass

ALL_STATS = Stats(
    lse=True,
    entropy=True,
    entropy_tokens=True,
    max_logit=True,
    max_prob=True,
    null_mass=True,
    mean_distance=True,
    sink_mass=(1, 4, 16),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: shapes, the options of the spec, and what the numbers look like.

    Attributes:
        options: fields of AttentionSpec that are plain values.
        documents: lengths of the documents of each sequence.
        lengths: kv_lengths.
        slopes, sink_logit: whether there are learned ones; "zero" is a fixed sink logit of 0.
        logit_size: q is scaled to make logits about this large.
        keys: "random", "equal" (every key the same) or "one_huge" (the first stands out).
        layout: "heads_first", or "rows_first" for (B, T, H, D) tensors seen transposed.
    """

    name: str
    T: int
    S: int
    B: int = 2
    H: int = 4
    Hkv: int = 2
    D: int = 16
    Dv: int = 16
    options: dict[str, object] = field(default_factory=dict)
    documents: tuple[tuple[int, ...], ...] | None = None
    lengths: tuple[int, ...] | None = None
    slopes: bool = False
    sink_logit: str | None = None
    logit_size: float = 1.0
    keys: str = "random"
    layout: str = "heads_first"


def square(name: str, n: int, **others: object) -> Case:
    return Case(name=name, T=n, S=n, **others)  # type: ignore[arg-type]


EVERYTHING: dict[str, object] = {
    "options": {"window": 9, "sinks": 3, "prefix": 7, "softcap": 3.0, "scale": 0.2},
    "slopes": True,
    "sink_logit": "learned",
}

CASES = [
    # Lengths: one, around a tile, primes, and groups of 1, 2 and all heads.
    square("one token", 1),
    square("causal 15, one kv head", 15, Hkv=1),
    square("causal 16, no groups, D 40", 16, Hkv=4, D=40, Dv=40),
    square("causal 17, Dv above D", 17, D=16, Dv=40),
    square("causal 63, Dv below D", 63, D=64, Dv=16),
    square("causal 64, D 80", 64, D=80, Dv=80, B=1, H=2, Hkv=1),
    square("causal 65, D 128", 65, D=128, Dv=128, B=1, H=2, Hkv=1),
    square("causal 127, D 1", 127, D=1, Dv=1),
    square("causal 130", 130),
    square("six heads on three", 31, H=6, Hkv=3),
    square("causal, rows first", 47, layout="rows_first"),
    square("causal, given scale", 33, options={"scale": 0.5}),
    square("bidirectional 61", 61, options={"causal": False}),
    # Unequal lengths.
    Case(name="decode one token", T=1, S=67),
    Case(name="decode one token, bidirectional", T=1, S=67, options={"causal": False}),
    Case(name="fewer queries than keys", T=13, S=59, layout="rows_first"),
    Case(name="more queries than keys", T=29, S=11),
    Case(name="more queries than keys, bidirectional", T=29, S=11, options={"causal": False}),
    Case(name="one key", T=5, S=1),
    Case(name="rows without keys, sink logit", T=29, S=11, sink_logit="learned"),
    Case(name="ragged decode", T=1, S=40, B=4, lengths=(40, 1, 17, 23)),
    Case(name="ragged chunk", T=7, S=40, B=4, lengths=(40, 1, 17, 0)),
    Case(name="ragged bidirectional", T=9, S=9, lengths=(9, 4), options={"causal": False}),
    # Windows and sinks.
    square("window 1", 33, options={"window": 1}),
    square("window 7", 65, options={"window": 7}),
    square("window of the length", 40, options={"window": 40}),
    square("window above the length", 40, options={"window": 100}),
    square("window 8, sinks 3", 67, options={"window": 8, "sinks": 3}),
    square("window 8, sinks above the length", 33, options={"window": 8, "sinks": 50}),
    Case(name="decode in a window", T=1, S=67, options={"window": 8}),
    Case(name="decode in a window with sinks", T=1, S=67, options={"window": 8, "sinks": 2}),
    Case(name="decode in a window above the length", T=1, S=7, options={"window": 9}),
    Case(name="ragged window", T=3, S=50, lengths=(50, 21), options={"window": 8, "sinks": 2}),
    # Prefix.
    square("prefix 1", 30, options={"prefix": 1}),
    square("prefix 19", 50, options={"prefix": 19}),
    square("prefix above the length", 30, options={"prefix": 40}),
    Case(name="prefix behind the queries", T=9, S=50, options={"prefix": 45}),
    Case(name="prefix, one query in a window", T=1, S=20, options={"prefix": 40, "window": 3}),
    Case(name="prefix, ragged", T=20, S=20, lengths=(20, 6), options={"prefix": 9}),
    # Documents.
    square("documents of length 1", 20, documents=((1,) * 20, (1, 2) * 6 + (1, 1))),
    square("one document per row", 33, documents=((33,), (33,))),
    square("documents around a tile", 64, documents=((15, 17, 16, 16), (31, 33))),
    square(
        "documents, bidirectional",
        45,
        documents=((20, 25), (1, 40, 4)),
        options={"causal": False},
    ),
    square(
        "documents, window, sinks, prefix",
        64,
        documents=((20, 44), (1, 2, 61)),
        options={"window": 6, "sinks": 2, "prefix": 4},
    ),
    Case(name="documents, fewer queries", T=10, S=40, documents=((25, 15), (35, 5))),
    Case(
        name="documents, more queries than keys",
        T=17,
        S=12,
        documents=((5, 7), (12,)),
        options={"causal": False},
    ),
    Case(name="documents, ragged", T=9, S=30, documents=((12, 18), (3, 27)), lengths=(30, 14)),
    # Logits.
    square("alibi", 65, slopes=True),
    square("alibi, bidirectional", 30, slopes=True, options={"causal": False}),
    square("soft-cap", 65, options={"softcap": 2.0}, logit_size=3.0),
    square("fixed sink logit", 33, sink_logit="zero"),
    square("learned sink logit", 65, sink_logit="learned"),
    square("learned sink logit far above", 33, sink_logit="high"),
    square("learned sink logit far below", 33, sink_logit="low"),
    square("logits in the hundreds", 65, logit_size=100.0),
    square("logits in the hundreds, sink logit", 65, logit_size=100.0, sink_logit="learned"),
    square("logits in the hundreds, soft-cap", 33, logit_size=100.0, options={"softcap": 30.0}),
    square("logits in the hundreds, alibi", 33, logit_size=100.0, slopes=True),
    square("equal keys", 40, keys="equal"),
    square("one huge logit", 40, keys="one_huge"),
    square("one huge logit, sink logit", 40, keys="one_huge", sink_logit="learned"),
    # Everything at once.
    square("everything", 65, **EVERYTHING),
    square("everything, documents", 70, documents=((9, 61), (35, 35)), **EVERYTHING),
    Case(name="everything, ragged", T=30, S=50, lengths=(50, 33), **EVERYTHING),  # type: ignore[arg-type]
    Case(
        name="everything, dead rows",
        T=30,
        S=12,
        documents=((4, 8), (12,)),
        layout="rows_first",
        **EVERYTHING,  # type: ignore[arg-type]
    ),
]


@dataclass
class Inputs:
    """Tensors of one call; q, k, v and the learned vectors are leaves that want gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    kv_lengths: Tensor | None

    def leaves(self) -> dict[str, Tensor]:
        learned = {"alibi_slopes": self.spec.alibi_slopes, "sink_logit": self.spec.sink_logit}
        named = {"q": self.q, "k": self.k, "v": self.v, **learned}
        return {name: x for name, x in named.items() if x is not None and x.requires_grad}

    def to(self, dtype: torch.dtype) -> "Inputs":
        """The same numbers in another type; per-head vectors stay in float32 or better."""

        def leaf(x: Tensor, to: torch.dtype) -> Tensor:
            return x.detach().to(to).requires_grad_(x.requires_grad)

        vector_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        slopes, sink_logit = self.spec.alibi_slopes, self.spec.sink_logit
        spec = replace(
            self.spec,
            alibi_slopes=None if slopes is None else leaf(slopes, vector_dtype),
            sink_logit=None if sink_logit is None else leaf(sink_logit, vector_dtype),
        )
        q, k, v = (leaf(x, dtype) for x in (self.q, self.k, self.v))
        return Inputs(q, k, v, spec, self.kv_lengths)


def make_inputs(case: Case, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Draw the inputs of a case, rounded to dtype."""
    generator = torch.Generator().manual_seed(len(case.name) + 1000 * case.T + case.S)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def heads(n_heads: int, length: int, size: int) -> Tensor:
        if case.layout == "rows_first":
            return draw(case.B, length, n_heads, size).transpose(1, 2)
        return draw(case.B, n_heads, length, size)

    q = heads(case.H, case.T, case.D) * case.logit_size
    k, v = heads(case.Hkv, case.S, case.D), heads(case.Hkv, case.S, case.Dv)
    if case.keys == "equal":
        k[:] = k[:, :, :1].clone()
    if case.keys == "one_huge":
        k[:, :, 0] = 300.0
        q = q.abs()
    sink_logits = {
        "zero": torch.zeros(case.H),
        "learned": draw(case.H),
        "high": 30 + draw(case.H),
        "low": -30 + draw(case.H),
    }
    spec = AttentionSpec(
        **case.options,  # type: ignore[arg-type]
        documents=None if case.documents is None else document_ids(case.documents).to(device),
        alibi_slopes=vector(0.1 * draw(case.H).abs(), dtype, device) if case.slopes else None,
        sink_logit=None
        if case.sink_logit is None
        else vector(sink_logits[case.sink_logit], dtype, device, case.sink_logit != "zero"),
    )
    kv_lengths = None
    if case.lengths is not None:
        kv_lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    q, k, v = (x.to(device, dtype).requires_grad_() for x in (q, k, v))
    return Inputs(q, k, v, spec, kv_lengths)


def vector(x: Tensor, dtype: torch.dtype, device: str, learned: bool = True) -> Tensor:
    """A per-head vector: float32, or float64 beside float64 inputs."""
    x = x.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    return x.requires_grad_(learned)


def document_ids(lengths: tuple[tuple[int, ...], ...]) -> Tensor:
    """Ids (B, S) from the lengths of each sequence's documents; numbered from 7 downwards."""
    rows = [[7 - n for n, length in enumerate(row) for _ in range(length)] for row in lengths]
    return torch.tensor(rows, dtype=torch.int32)


def run(inputs: Inputs, backend: str, stats: Stats | None = ALL_STATS) -> dict[str, Tensor]:
    """Everything a backend makes of the inputs: output, statistics, column mass, gradients.

    The gradients are of one loss over output, lse and entropy with fixed random coefficients.
    The column mass is there twice: from its own pass, and as `received` from the backward.
    Without statistics there are only the output and the gradients through it.
    """
    q, k, v, spec, kv_lengths = inputs.q, inputs.k, inputs.v, inputs.spec, inputs.kv_lengths
    received = None if stats is None else unread(inputs)
    output = attention(
        q, k, v, spec, kv_lengths=kv_lengths, stats=stats, received=received, backend=backend
    )
    results = {name: x for name, x in output._asdict().items() if x is not None}
    if output.lse is not None:
        results["column_mass"] = column_mass(
            q, k, output.lse, spec, kv_lengths=kv_lengths, backend=backend
        )
    upstream = coefficients(output)
    wanted = {f"d_{name}": x for name, x in inputs.leaves().items()}
    if received is not None:
        wanted["received"] = received
    gradients = torch.autograd.grad(
        [results[name] for name in upstream], list(wanted.values()), list(upstream.values())
    )
    results |= dict(zip(wanted, gradients, strict=True))
    return {name: x.detach() for name, x in results.items()}


def unread(inputs: Inputs) -> Tensor:
    """A `received` for these inputs, (B, H, S); its values would spoil any sum that they joined."""
    q, k = inputs.q, inputs.k
    shape = (q.shape[0], q.shape[1], k.shape[2])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.full(shape, torch.nan, dtype=dtype, device=q.device, requires_grad=True)


def coefficients(output: AttentionOutput) -> dict[str, Tensor]:
    """Upstream gradients of the differentiable results, the same for every backend and type."""
    generator = torch.Generator().manual_seed(5)
    upstream = {}
    for name in ("out", "lse", "entropy"):
        x = getattr(output, name)
        if x is None:
            continue
        draw = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        upstream[name] = draw.to(torch.bfloat16).to(x.device, x.dtype)  # exact in every type
    return upstream

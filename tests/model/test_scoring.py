"""Losses of a text: every token once, from the context that its window or cache gives it."""

import pytest
import torch

from model.decoder import Decoder
from model.kv_cache import FullCache
from model.scoring import Losses, score_stream, score_windows
from model.streaming_cache import StreamingCache
from tests.model.slow_stream import SlowStream
from tests.model.tiny import OPTIONS, tiny_model, tiny_tokens

L = 32  # the tiny models' context
SCORED = [name for name in OPTIONS if name != "bidirectional"]


def text(length: int) -> torch.Tensor:
    return tiny_tokens(1, length)[0]


def joined(parts) -> Losses:
    """All losses in one, once they are known to follow each other without gap or overlap."""
    parts = list(parts)
    end = 1
    for part in parts:
        assert part.start == end
        assert len(part.nats) == len(part.counted)
        end += len(part.nats)
    return Losses(1, torch.cat([p.nats for p in parts]), torch.cat([p.counted for p in parts]))


@torch.no_grad()
def by_hand(model: Decoder, ids: torch.Tensor, stride: int) -> dict[int, float]:
    """Each token's loss from the first window that predicts it, one window at a time, in float64.

    Tokens that a window sees in its prefix are left out there, though the next may have them too.
    """
    losses: dict[int, float] = {}
    seen = 0  # targets before this one have had their turn
    start = 0
    while seen < len(ids) - 1:
        window = ids[start : min(start + L, len(ids) - 1)]
        logits = model(window[None]).logits[0].double()
        for place in range(len(window)):
            target = start + place + 1
            if target > seen and place + 1 >= model.config.prefix:
                losses[target] = float(-logits[place].log_softmax(-1)[ids[target]])
        seen = start + len(window)
        start += stride
    return losses


@pytest.mark.parametrize("stride", [1, 5, 16, 31, 32])
@pytest.mark.parametrize("length", [2, 3, 32, 33, 34, 65, 100])
def test_every_token_is_counted_once_from_its_window(length: int, stride: int) -> None:
    model, ids = tiny_model(), text(length)
    expected = by_hand(model, ids, stride)
    for batch_size in (1, 3, 100):
        found = joined(score_windows(model, ids, stride=stride, batch_size=batch_size))
        assert found.nats.dtype == torch.float64
        assert found.counted.all()
        assert len(found.nats) == length - 1
        torch.testing.assert_close(
            found.nats,
            torch.tensor(list(expected.values()), dtype=torch.float64),
            atol=1e-5,
            rtol=0,
        )


@pytest.mark.parametrize("option", SCORED)
def test_every_kind_of_model_is_scored(option: str) -> None:
    model, ids = tiny_model(**OPTIONS[option]), text(80)
    for stride in (10, L):
        expected = by_hand(model, ids, stride)
        found = joined(score_windows(model, ids, stride=stride))
        places = 1 + found.counted.nonzero()[:, 0]
        assert places.tolist() == list(expected)
        assert (found.nats[~found.counted] == 0).all()
        torch.testing.assert_close(
            found.nats[found.counted],
            torch.tensor(list(expected.values()), dtype=torch.float64),
            atol=1e-5,
            rtol=0,
        )


def test_the_default_stride_is_half_the_context() -> None:
    model, ids = tiny_model(), text(100)
    default = joined(score_windows(model, ids))
    assert torch.equal(default.nats, joined(score_windows(model, ids, stride=16)).nats)
    assert not torch.equal(default.nats, joined(score_windows(model, ids, stride=32)).nats)


def test_a_list_of_ids_and_a_half_precision_model_will_do() -> None:
    model, ids = tiny_model(), text(50)
    exact = joined(score_windows(model, ids))
    assert torch.equal(joined(score_windows(model, ids.tolist())).nats, exact.nats)
    half = joined(score_windows(model.to(torch.bfloat16), ids))
    torch.testing.assert_close(half.nats, exact.nats, atol=0.1, rtol=0.05)
    assert not torch.equal(half.nats, exact.nats)


def test_memory_does_not_grow_with_the_text(monkeypatch) -> None:
    """The default batch is what the limit on logits allows, whatever the length of the text."""
    monkeypatch.setattr("model.scoring.LOGITS_AT_ONCE", 3 * L * 17)
    model, rows = tiny_model(), []
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda tokens, **options: rows.append(len(tokens)) or forward(tokens)
    )
    list(score_windows(model, text(200), stride=L))
    assert rows == [3, 3, 1]


# Streams


@pytest.mark.parametrize("option", SCORED)
def test_a_stream_within_the_context_is_one_forward_pass(option: str) -> None:
    model, ids = tiny_model(**OPTIONS[option]), text(L)
    expected = by_hand(model, ids, L)
    found = joined(score_stream(model, ids, FullCache(model.config, capacity=L)))
    assert (1 + found.counted.nonzero()[:, 0]).tolist() == list(expected)
    torch.testing.assert_close(
        found.nats[found.counted],
        torch.tensor(list(expected.values()), dtype=torch.float64),
        atol=1e-5,
        rtol=0,
    )


class Forgetful(FullCache):
    """Starts anew whenever it has read `span` tokens: what the stream's caches may do."""

    span = 8

    def extend(self, n: int) -> torch.Tensor:
        if self.length + n > self.span:
            self.reset()
        return super().extend(n)


def test_a_cache_that_forgets_takes_any_length() -> None:
    model, ids = tiny_model(), text(100)
    found = joined(score_stream(model, ids, Forgetful(model.config)))
    pieces = [
        joined(score_windows(model, ids[start : start + 9])).nats for start in range(0, 99, 8)
    ]
    torch.testing.assert_close(found.nats, torch.cat(pieces), atol=1e-5, rtol=0)


@pytest.mark.parametrize("sinks", [0, 3])
def test_the_streaming_cache_takes_any_length(sinks: int) -> None:
    model, ids = tiny_model(dtype=torch.float64), text(60)
    cache = StreamingCache(model.config, capacity=9, sinks=sinks, dtype=torch.float64)
    found = joined(score_stream(model, ids, cache))
    logits = SlowStream(model, 9, sinks).all_logits(ids[None, :-1])[0].log_softmax(-1)
    expected = -logits.gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(found.nats, expected, atol=1e-6, rtol=0)


def test_a_full_cache_says_when_it_is_full() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="the cache holds 10 of at most 10 tokens; 1 more do not"):
        list(score_stream(model, text(20), FullCache(model.config, capacity=10)))


def test_a_used_cache_is_refused() -> None:
    model = tiny_model()
    cache = FullCache(model.config)
    cache.extend(3)
    with pytest.raises(ValueError, match="the cache holds 3 tokens of something else; reset it"):
        score_stream(model, text(20), cache)


# Errors


@pytest.mark.parametrize(
    "score", [score_windows, lambda m, t: score_stream(m, t, FullCache(m.config))]
)
def test_what_cannot_be_scored_is_refused_before_any_work(score) -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="a text of 0 tokens has nothing to score"):
        score(model, [])
    with pytest.raises(ValueError, match="a text of 1 tokens has nothing to score"):
        score(model, [3])
    with pytest.raises(ValueError, match="the text holds the id 17, the model knows 0 to 16"):
        score(model, [3, 17, 40])
    with pytest.raises(ValueError, match="the text holds the id -1"):
        score(model, [3, -1])
    with pytest.raises(ValueError, match=r"call model\.eval\(\) before scoring"):
        score(model.train(), [3, 4])
    with pytest.raises(ValueError, match=r"model\.mask=bidirectional sees the token"):
        score(tiny_model(mask="bidirectional"), [3, 4])
    with pytest.raises(ValueError, match=r"the text has 4 tokens, all inside model\.prefix=4"):
        score(tiny_model(mask="prefix", prefix=4), [1, 2, 3, 4])


@pytest.mark.parametrize("stride", [0, -1, 33])
def test_a_stride_outside_the_context_is_refused(stride: int) -> None:
    with pytest.raises(ValueError, match=f"stride={stride} must be from 1 to the context of 32"):
        score_windows(tiny_model(), text(40), stride=stride)
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        score_windows(tiny_model(), text(40), batch_size=0)

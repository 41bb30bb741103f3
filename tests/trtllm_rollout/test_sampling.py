"""Tokens are drawn with exactly the probability that temperature, top-k and top-p give them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import reference_logits, write_model
from tests.trtllm_rollout.engines import make_engine
from trtllm_rollout.embedded import sampling
from trtllm_rollout.protocol import Request, SamplingParams

SAMPLES = 3000


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), seed=11, vocab_size=101, hidden_size=32, intermediate_size=32, num_hidden_layers=1)


def exact(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> np.ndarray:
    """The definition, by a sort: temperature, the k largest, the smallest prefix of mass p of what is left, then what is not below min_p
    times the largest. [vocab]"""
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    keep = order[:top_k] if top_k else order
    mass = np.cumsum(p[keep] / p[keep].sum())
    keep = keep[:np.searchsorted(mass, top_p) + 1] if top_p < 1 else keep
    keep = keep[p[keep] >= min_p * p.max()]
    out = np.zeros_like(p)
    out[keep] = p[keep] / p[keep].sum()
    return out


def chi_square_z(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's statistic as a standard normal deviate (Wilson and Hilferty 1931); cells below 5 expected are merged."""
    expected = probabilities * counts.sum()
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5


CUTS = [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.7, 0, 1.0), (1.0, 12, 1.0), (1.0, 0, 0.7), (1.3, 20, 0.6)]


def _drawn(directory: Path, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Counts [vocab] of the first token of many samples of one prompt."""
    engine = make_engine(directory)
    request = Request(0, (5, 9, 4), SamplingParams(temperature, top_k, top_p, max_tokens=1), SAMPLES, (42, 1))
    return np.bincount([c.token_ids[0] for c in engine.generate([request])], minlength=101)


@pytest.mark.parametrize("cut", CUTS)
def test_drawn_tokens_have_the_exact_distribution(cut: tuple[float, int, float], directory: Path) -> None:
    probabilities = exact(reference_logits(directory, [[5, 9, 4]])[0, -1].double().numpy(), *cut)
    counts = _drawn(directory, *cut)
    assert counts[probabilities == 0].sum() == 0, "a token outside the cut was drawn"
    assert chi_square_z(counts, probabilities) < 3.5


SETTINGS = [(1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (1.7, 0, 1.0, 0.0), (1.0, 12, 1.0, 0.0), (1.0, 0, 0.7, 0.0), (1.0, 0, 1.0, 0.05),
            (1.3, 20, 0.9, 0.1)]
P_BELOW_1_IN_10_000 = 3.719  # standard deviations, one-sided


def _chi_squares(settings: tuple[float, int, float, float]) -> list[float]:
    """Of 20,000 draws from one row of logits, for 20 seeds; every draw has a stream of its own, as samples have."""
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)) * 1.5
    logits[0, -1] = 0.5  # inside every cut, not too likely
    probabilities = exact(logits[0].double().numpy(), *settings)
    temperature, top_k, top_p, min_p = (torch.tensor([value]).expand(20_000) for value in settings)
    rows = sampling.Settings(temperature.double(), top_k, top_p.double(), min_p.double())
    out = []
    for seed in range(20):
        uniform = torch.from_numpy(sampling.uniforms((seed, 7), 0, 20_000))
        ids, _ = sampling.sample(logits.expand(20_000, -1), rows, uniform)
        counts = np.bincount(ids.numpy(), minlength=40)
        assert counts[probabilities == 0].sum() == 0
        out.append(chi_square_z(counts, probabilities))
    return out


@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[-1], *(pytest.param(some, marks=pytest.mark.slow) for some in SETTINGS[1:-1])])
def test_20_000_draws_fit_the_exact_distribution_for_20_seeds(settings: tuple[float, int, float, float]) -> None:
    assert max(_chi_squares(settings)) < P_BELOW_1_IN_10_000


@pytest.mark.parametrize("distort", [lambda u: torch.where(u < 0.98, u / 0.98, 1 - 1e-12), lambda u: u * 0.98],
                         ids=["2 % to the last token", "2 % cut off"])
@pytest.mark.parametrize("settings", [SETTINGS[0], pytest.param(SETTINGS[-1], marks=pytest.mark.slow)])
def test_a_sampler_distorted_by_2_percent_fails_the_same_check(settings: tuple[float, int, float, float], distort: object,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    honest = sampling.inverse_transform
    monkeypatch.setattr(sampling, "inverse_transform", lambda weights, uniform: honest(weights, distort(uniform)))  # type: ignore[operator]
    assert min(_chi_squares(settings)) > P_BELOW_1_IN_10_000


@pytest.mark.parametrize("distort", [lambda u: u ** 1.3, lambda u: u * 0.9, lambda u: (u * 8).floor() / 8],
                         ids=["skewed", "short", "coarse"])
def test_a_distorted_sampler_fails_in_the_engine_too(distort: object, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = sampling.inverse_transform
    monkeypatch.setattr(sampling, "inverse_transform", lambda weights, uniform: honest(weights, distort(uniform)))  # type: ignore[operator]
    probabilities = exact(reference_logits(directory, [[5, 9, 4]])[0, -1].double().numpy(), 1.0, 0, 1.0)
    assert chi_square_z(_drawn(directory, 1.0, 0, 1.0), probabilities) > 6


def test_successive_tokens_are_independent(directory: Path) -> None:
    """Pairs of uniform numbers of one stream, and of neighbouring streams, fill the square evenly."""
    draws = np.stack([sampling.uniforms((7, 0, p), k, 4) for p in range(50) for k in range(100)])
    for pairs in (draws[:, :2], np.stack([draws[:-1, 0], draws[1:, 0]], 1)):
        cells = (pairs * 6).astype(int) @ [6, 1]
        assert chi_square_z(np.bincount(cells, minlength=36), np.full(36, 1 / 36)) < 3.5


def test_a_stream_is_named_by_its_words() -> None:
    assert (sampling.uniforms((1, 2), 3, 5) == sampling.uniforms((1, 2), 3, 50)[:5]).all()
    names = [((1,), 0), ((1, 0), 0), ((1,), 1), ((0, 1), 0), ((2**40,), 0), ((), 1), ((1, 0, 0), 0)]
    assert len({sampling.uniforms(s, k, 1)[0] for s, k in names}) == len(names)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 700), st.integers(0, 40), st.floats(0.01, 1.0), st.booleans())
def test_truncation_keeps_what_the_definition_keeps(seed: int, vocab: int, top_k: int, top_p: float, tied: bool) -> None:
    """Ties (bf16 logits tie often) are kept lowest id first."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(-3, 3, (3, vocab)).astype(np.float64) if tied else rng.normal(0, 2, (3, vocab))
    probs = torch.softmax(torch.tensor(logits), -1)
    k, p = torch.tensor([top_k, 0, 1]), torch.tensor([top_p, 0.5, 1.0], dtype=torch.float64)
    kept = sampling.truncate(probs, k, p) > 0
    for row in range(3):
        mass = np.sort(probs[row].numpy())[::-1][:int(k[row]) or None].cumsum()
        if np.abs(mass / mass[-1] - float(p[row])).min() < 1e-9 and p[row] < 1:
            continue  # the cut falls on a rounding error
        assert kept[row].tolist() == (exact(logits[row], 1.0, int(k[row]), float(p[row])) > 0).tolist()


def test_a_wide_nucleus_in_a_large_vocabulary_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path looks at few candidates; where they do not hold the mass, the result is that of the full sort."""
    probs = torch.softmax(torch.randn(6, 900, generator=torch.Generator().manual_seed(0)), -1)
    k, p = torch.tensor([0, 0, 3, 500, 0, 0]), torch.tensor([0.9, 0.01, 1.0, 0.95, 0.999, 0.3])
    full = sampling.truncate(probs, k, p)
    monkeypatch.setattr(sampling, "FIRST_CANDIDATES", 8)
    assert torch.equal(sampling.truncate(probs, k, p), full)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 1000), st.sampled_from([0.0, 0.5, 0.999999, 1 - 2**-53]))
def test_an_id_of_weight_zero_is_never_drawn(seed: int, vocab: int, uniform: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(4, vocab, generator=generator) * (torch.rand(4, vocab, generator=generator) < 0.1)
    weights[:, int(torch.randint(vocab, (1,), generator=generator))] = 1e-6
    ids, _ = sampling.inverse_transform(weights, torch.full((4,), uniform, dtype=torch.float64))
    assert (weights.gather(1, ids[:, None]) > 0).all()
    expected = (weights.double().cumsum(-1) > uniform * weights.double().sum(-1, keepdim=True)).int().argmax(-1)
    if uniform in (0.0, 0.5):
        assert torch.equal(ids, expected)

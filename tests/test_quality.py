"""Quality figures against torch's own functions, hand computations, and a simulated coverage of the interval."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from trtllm_workshop import quality
from trtllm_workshop.quality import bootstrap_interval, compare_logits, perplexity, quality_report, score_tokens


def logits(tokens=70, vocabulary=33, seed=0):
    return 3 * torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(seed))


def ids(tokens=70, vocabulary=33):
    return torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(9)).tolist()


def test_every_figure_is_torchs():
    a, b, text = logits(), logits(seed=1) * 0.1 + logits(), ids()
    found = compare_logits(a, b, text)
    target = torch.tensor(text[1:])
    assert np.allclose(found.nll_reference, F.cross_entropy(a[:-1].double(), target, reduction="none"))
    assert np.allclose(found.nll_candidate, F.cross_entropy(b[:-1].double(), target, reduction="none"))
    p, q = a[:-1].double().log_softmax(-1), b[:-1].double().log_softmax(-1)
    assert np.allclose(found.kl, F.kl_div(q, p, log_target=True, reduction="none").sum(-1))
    assert np.array_equal(found.agree, (a[:-1].argmax(-1) == b[:-1].argmax(-1)).numpy())
    top = a[:-1].double().topk(2).values
    assert np.allclose(found.margin, top[:, 0] - top[:, 1])
    assert np.allclose(score_tokens(a, text), found.nll_reference)
    assert perplexity(found.nll_reference) == pytest.approx(float(F.cross_entropy(a[:-1].double(), target).exp()))


def test_a_constant_added_to_all_logits_is_no_difference():
    found = compare_logits(logits(), logits() + 5, ids())
    assert found.kl.max() < 1e-9 and found.noise.max() < 1e-5 and found.agree.all()


def test_a_changed_best_token_needs_noise_of_half_the_margin():
    found = compare_logits(logits(), logits() + 0.5 * logits(seed=4), ids())
    assert not found.agree.all() and (2 * found.noise >= found.margin)[~found.agree].all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a[:-1], "not the same model"),
        (lambda a: a[:, :-1], "not the same model"),
        (lambda a: a * float("nan"), "NaN"),
        (lambda a: a[0], "not the same model"),
    ],
)
def test_logits_that_do_not_fit(change, said):
    with pytest.raises(ValueError, match=said):
        compare_logits(logits(), change(logits()), ids())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_torch_tensors_of_every_width(dtype):
    narrow = logits().to(dtype).requires_grad_()
    assert np.array_equal(score_tokens(narrow, torch.tensor(ids())), score_tokens(narrow.detach().float(), ids()))
    assert compare_logits(narrow, narrow, ids()).kl.max() == 0


def test_ids_that_do_not_fit():
    with pytest.raises(ValueError, match=r"shape \(2, 33\) for 3 tokens"):
        score_tokens(logits(2), [3, 4, 5])
    with pytest.raises(ValueError, match="at least two"):
        score_tokens(logits(1), [3])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        score_tokens(logits(2), [3, 40])
    with pytest.raises(ValueError, match="token -2 is outside"):
        score_tokens(logits(2), [3, -2])


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    generator, hits = np.random.default_rng(1), 0
    for trial in range(100):
        texts = [generator.normal(generator.normal(1.0, 0.5), 0.1, 30) for _ in range(25)]
        interval = bootstrap_interval(texts, np.mean, resamples=200, seed=trial)
        hits += interval.low <= 1.0 <= interval.high
    assert 84 <= hits <= 100


def test_texts_are_drawn_whole():
    """Tokens of a text are all alike here: drawing tokens would make the interval far too narrow."""
    texts = [np.full(100, float(value)) for value in range(10)]
    interval = bootstrap_interval(texts, np.mean)
    assert interval.high - interval.low > 2.5 and interval.estimate == 4.5
    with pytest.raises(ValueError, match="at least two"):
        bootstrap_interval(texts[:1], np.mean)
    with pytest.raises(ValueError, match="resamples is 0"):
        bootstrap_interval(texts, np.mean, resamples=0)
    with pytest.raises(ValueError, match="level is 95"):
        bootstrap_interval(texts, np.mean, level=95)


def test_a_report_says_worse_only_when_the_interval_does():
    plain = [logits(seed=n) for n in range(12)]
    same = [compare_logits(x, x + 0.01 * logits(seed=n + 50), ids()) for n, x in enumerate(plain)]
    report = quality_report(same, "float32", "bfloat16")
    assert "no difference found" in report.verdict and report.tokens == 12 * 69
    # A reference that knows the text, and a candidate that has forgotten half of it.
    known = [x + 8 * F.one_hot(torch.tensor([*ids()[1:], 0]), 33) for x in plain]
    worse = [compare_logits(k, 0.5 * k, ids()) for k in known]
    report = quality_report(worse, "float32", "fp8")
    assert report.verdict == "fp8 is worse than float32" and report.ratio.low > 1
    assert str(report).count("\n") == 4 and "perplexity" in str(report)
    assert len(quality.TokenComparison.concatenate(worse)) == 12 * 69

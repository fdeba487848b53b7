# SPDX-License-Identifier: MIT
"""The proofs, exactness first. Each test says what would break, and compares with what
does not depend on av.py: enumeration, brute force, numbers by hand, `model.generate`, a
forward without a cache. Tests that draw fail a right implementation with FALSE_ALARM."""
import collections
import copy
import functools
import gc
import itertools
import math
import pathlib
import re
import shutil
import subprocess
import sys
import tracemalloc
import types
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import logits_process as hf

import av
import demo

FALSE_ALARM = 1e-6
CPU, PLANS = torch.device("cpu"), ["fixed", "verification", "adaptive"]

@pytest.fixture
def idea(monkeypatch):
    """Part I of av.py, copied out to where there is no transformers; in float64."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    module = types.ModuleType("idea")
    monkeypatch.setitem(sys.modules, "idea", module)
    text = pathlib.Path(av.__file__).read_text(encoding="utf-8")
    exec(re.split("(?m)^# ==== Part II", text)[0], vars(module))
    module.COST_RATE = 0.0  # the clock of this machine shall decide about nothing
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    warp = module.warp  # (of temperature 0 the law is float32 by name)
    module.warp = lambda logits, *args, **law: warp(logits, *args, **law).double()
    torch.set_default_dtype(torch.float64)
    yield module
    torch.set_default_dtype(torch.float32)

class Table:
    """A model that is a table of probabilities: law(text) is that of the next token."""
    device = CPU

    def __init__(self, law, V):
        self.law, self.vocab_size = law, V

    def commit(self, slots, lengths):
        self.asked = []  # how many rows, by each call of a step

    def logits(self, tokens, lengths, slots, num_verified):
        texts = [tuple(tokens[s, :n + i].tolist())
                 for s, n, k in zip(slots, lengths, num_verified) for i in range(k + 1)]
        self.hidden = torch.tensor([[sum((t + 1) * 7.0**i for i, t in enumerate(text))]
                                    for text in texts])  # which says what the text is
        return torch.tensor(np.array([self.law(text) for text in texts])).log()

    def next_logits(self, tokens, lengths, slots, position, depth):
        self.asked.append(len(slots))
        return self.logits(tokens, lengths, slots, [0] * len(slots))

class Seeing(Table):
    """A drafter with `see`, which checks that it is given the state it starts from."""

    def see(self, slots, hidden):
        self.seen = torch.zeros(99, 1)
        self.seen[slots] = hidden

    def next_logits(self, tokens, lengths, slots, position, depth):
        if position == 0:
            self.logits(tokens, lengths - 1, slots, [0] * len(slots))
            assert (self.hidden == self.seen[slots]).all()
        return super().next_logits(tokens, lengths, slots, position, depth)

def random_law(seed, V, target=None):
    """A law of its own after each text, with zeros; often near the target's, or it."""
    @functools.cache
    def law(text):
        rng = np.random.default_rng([seed, len(text), *text])
        w = rng.dirichlet(np.full(V, 0.7))
        w[rng.integers(V)] *= rng.random() < 0.8
        share = rng.choice([0.0, 0.6, 1.0], p=[0.5, 0.4, 0.1]) if target else 0.0
        w = (1 - share) * w / w.sum() + (share * target(text) if target else 0.0)
        return w / w.sum()
    return law

def transformers_law(logits, temperature=1.0, top_k=0, top_p=1.0):
    if temperature == 0:
        return torch.eye(logits.shape[-1])[logits.argmax(-1)]
    logits = hf.TemperatureLogitsWarper(float(temperature))(None, logits)
    if top_k:
        logits = hf.TopKLogitsWarper(int(top_k))(None, logits)
    if top_p < 1:
        logits = hf.TopPLogitsWarper(float(top_p))(None, logits)
    return logits.softmax(-1)


# ---- The law of what is written, by enumeration.
def outcomes(program):
    """(result, probability) of each outcome of what draws by choose(weights)."""
    todo = [[]]  # choices to begin with; behind them the first possible one is taken
    while todo:
        path, at, weight = todo.pop(), 0, 1.0

        def choose(weights):
            nonlocal at, weight
            if at == len(path):
                first, *others = [i for i, w in enumerate(weights) if w > 0]
                todo.extend([*path, other] for other in others)
                path.append(first)
            pick, at = path[at], at + 1
            weight *= weights[pick] / sum(weights)
            return pick

        result = program(choose)
        yield result, weight

def laws(idea, make, steps=1):
    """{texts of all requests: probability} of what the real Decoder writes in some
    steps, and the counts of drafts that it verified.

    Draws of tokens branch over all of them. The uniform of a draft branches in two, just
    below and just above p/q: another threshold in `verify` would show in one of them."""
    total, seen, real = collections.Counter(), [], idea.verify

    def write(choose):
        def sample(weights, generator=None):
            return torch.tensor([choose(row) for row in weights.tolist()])

        def verify(p, q, drafts, num_verified, generator):
            u, row = torch.zeros(drafts.shape), 0
            for r, n in enumerate(num_verified.tolist()):
                for i, x in enumerate(drafts[r, :n]):
                    share = min(1.0, (p[row + i, x] / q[r, i, x]).item())
                    rejected = choose([share, 1 - share])
                    edge = share * (1 + (1e-9 if rejected else -1e-9))
                    u[r, i] = min(edge, 1 - 2**-53)
                    if rejected:
                        break
                row += n + 1
            seen.append(num_verified.tolist())
            with mock.patch("torch.rand", lambda *shape, **kw: u):
                return real(p, q, drafts, num_verified, generator)

        with mock.patch.multiple(idea, sample=sample, verify=verify):
            decoder = make()
            texts = [()] * int((decoder.request >= 0).sum())
            for _ in range(steps):
                if step := decoder.step():
                    for r, row, n in zip(step.requests, step.tokens, step.num_committed):
                        texts[r] += tuple(row[:n].tolist())
        return tuple(texts)

    for texts, weight in outcomes(write):
        total[texts] += weight
    return total, seen

def error(total, law, prompts, lengths, end=()):
    """Largest error of a probability, if the target goes on with what was written."""
    @functools.cache
    def whole(r, text):  # [(all of the text, probability)]
        if len(text) >= lengths[r] or set(text) & set(end):
            return [(text, 1.0)]
        ends = []
        for t, share in enumerate(law((*prompts[r], *text))):
            if share:
                ends += [(end, share * w) for end, w in whole(r, (*text, t))]
        return ends

    gap = collections.Counter()  # what came, less what the target does alone
    for texts, weight in [*total.items(), (((),) * len(prompts), -1.0)]:
        for ends in itertools.product(*map(whole, range(len(texts)), texts)):
            gap[tuple(text for text, _ in ends)] += weight * math.prod(w for _, w in ends)
    return max(map(abs, gap.values()))

EVEN = lambda text: np.array([0.5, 0.5])  # noqa: E731
SETTINGS = (dict(), dict(temperature=0.6), dict(top_p=0.8),
            dict(temperature=1.7, top_k=2), dict(temperature=0))

def start(idea, drafter, P, cost, prompts, K, new=9, expected=0.7, every=100, **options):
    """A decoder whose round has begun, with confidence = q_max."""
    estimator = idea.AcceptanceEstimator(K, refit_every=every, slope=1, intercept=0)
    estimator.steps = 1
    decoder = idea.Decoder(
        Table(P, drafter.vocab_size), drafter, max_batch_size=len(prompts), seed=0,
        max_length=12, num_speculative_tokens=K, estimator=estimator,
        cost=idea.CostTable({1: 1e-9}, cost), **options)
    for r, n in enumerate(np.broadcast_to(new, len(prompts)).tolist()):
        decoder.add(r, list(prompts[r]), n)
    decoder.expected[:] = expected
    return decoder

@pytest.mark.parametrize("drafter, cases", [(Table, 42), (Seeing, 24)])
@pytest.mark.parametrize("plan", PLANS)
def test_each_step_writes_exactly_the_target_law(plan, drafter, cases, idea):
    """Any decision, ratio, residual or row that is wrong shifts one of 198 exact laws.

    All draws for one or two requests are enumerated through the real `Decoder.step`; a
    drafter that sees takes two steps."""
    decided, rng, sees = set(), np.random.default_rng(0), drafter is Seeing
    for case in range(cases):
        R, V, K = ((1, 3, 2), (1, 2, 3), (2, 2, 1 + (case % 2 or not sees)))[case % 3]
        law, end = SETTINGS[case % 5], [0] * (case % 4 == 1)
        prompts = [(0,), (1, 1)][:R]
        P, new = random_law(case, V), rng.integers(1 + sees, K + 3, R)
        Q = random_law(1000 + case, V, P)
        stairs = (rng.integers(1, 5, R * (K + 1)).cumsum() / 3 + 2).tolist()
        cost = dict(enumerate(stairs, 1))
        expected, every = rng.random((R, K)), 100 if case % 7 else 1  # 1: it explores
        total, seen = laws(idea, lambda: start(
            idea, drafter(Q, V), P, cost, prompts, K, new, expected, every, plan=plan,
            eos_token_ids=end, **law), steps=1 + sees)
        decided |= {tuple(n) for n in seen}
        warped = functools.cache(lambda text: transformers_law(
            torch.tensor(P(text)[None]).log(), **law)[0].tolist())
        assert error(total, warped, prompts, new, end) < 1e-12, case
    assert len(decided) >= 8, "the plan never trimmed: the test would prove nothing"

def first_is(token, total):
    return sum(w for (text, *_), w in total.items() if text[0] == token)

@pytest.mark.parametrize("feature, want", [("q(x)", 0.4), ("q_max", 0.5)])
def test_worked_example_a_feature_of_the_drawn_token_biases(feature, want, idea):
    """To read q at the drawn token instead of its largest value makes P(a) .4, not .5.

    Spec 7.1: p = (1/2, 1/2), q = (1/5, 4/5), "trim if it is below 1/2". An a (1/5) is
    trimmed, and the target draws: a with 1/2. A b (4/5) is verified, and accepted with
    (1/2)/(4/5) = 5/8, else the residual (1, 0) gives a: 1/5 * 1/2 + 4/5 * 3/8 = .4."""
    class Looking(idea.Decoder):
        def survival(self, features, drafts, depths):
            if feature == "q_max":
                return super().survival(features, drafts, depths)
            return self.q[0, [0], drafts[0]][None].numpy()

    idea.trim, idea.Decoder = lambda survival, budget: (survival >= 0.5).sum(1), Looking
    Q = Table(lambda text: np.array([0.2, 0.8]), 2)
    total, _ = laws(idea, lambda: start(idea, Q, EVEN, {1: 1.0, 2: 1.1}, [(0,)], 1))
    assert first_is(0, total) == pytest.approx(want, abs=1e-12)

@pytest.mark.parametrize("ahead, want", [(True, 0.75), (False, 0.5)])
def test_worked_example_a_budget_from_this_step_biases(ahead, want, idea):
    """A budget from the survivals of this step, not of earlier ones, makes P(a) .75.

    Spec 7.2: p = q = (1/2, 1/2), but after a the next law of the drafter is (.99, .01).
    Costs 1, 1.9, 1.9 for 0, 1, 2 drafts. After a the survivals .5, .495 make 2 the best
    budget (1.995 / 1.9), and a is kept; after b .5, .25 make it 0, and the target draws
    anew: 1/2 + 1/2 * 1/2 = .75."""
    trim, cost = idea.trim, {1: 1.0, 2: 1.9, 3: 1.9, 4: 2.8}
    table = idea.CostTable({1: 1e-9}, cost)
    if ahead:
        idea.trim = lambda s, _: trim(s, idea.draft_budget(s, table)[1])
    Q = Table(lambda text: np.array([0.99, 0.01] if text == (0, 0) else [0.5, 0.5]), 2)
    for expected in (0.5, 0.9):  # of earlier steps, whatever it is
        total, seen = laws(idea, lambda: start(
            idea, Q, EVEN, cost, [(0,)], 2, expected=expected, plan="verification"))
        assert first_is(0, total) == pytest.approx(want, abs=1e-12)
        assert ahead or {n for n, in seen} == {0 if expected == 0.5 else 2}

@pytest.mark.parametrize("reads, want", [(True, 0.75), (False, 0.5)])
def test_worked_example_a_drafter_that_reads_a_neighbour_biases(reads, want, idea):
    """A law of request 2 that looks at the draft of request 1 makes its P(b) .75.

    p = q = (1/2, 1/2) for draft 1 of request 1: survival .5. Request 2 has .9, and then
    .9 if request 1 drew a, else .5: survival .81 or .45. Of budget 2, an a is outranked,
    not verified and drawn anew; a b is kept: P(b) = 1/2 * 1/2 + 1/2."""
    class Reading(Table):
        def next_logits(self, tokens, lengths, slots, position, depth):
            sure = position == 0 or not reads or tokens[0, 1] == 0
            laws = [[0.5, 0.5], [0.9, 0.1] if sure else [0.5, 0.5]]
            return torch.tensor(laws)[slots].log()

    cost = {2: 1.0, 4: 1.0001, 5: 99.0}
    total, seen = laws(idea, lambda: start(
        idea, Reading(None, 2), EVEN, cost, [(0,), (0,)], 2, plan="verification"))
    assert first_is(1, total) == pytest.approx(want, abs=1e-12)
    assert all(sum(n) == 2 for n in seen)


# ---- 1. Laws.
def chi_square(counts, probs):
    """P(a right sampler is at least this far off); cells of few draws are merged."""
    counts, expected = np.ravel(counts).astype(float), np.ravel(probs) * np.sum(counts)
    assert counts[expected == 0].sum() == 0, "drew something of probability zero"
    few = expected < 5
    counts, expected = (np.append(x[~few], x[few].sum()) for x in (counts, expected))
    kept = expected > 0
    x = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    half = torch.tensor([kept.sum() - 1, x], dtype=torch.float64) / 2
    return torch.special.gammaincc(*half).item()

def test_warp_is_transformers_law():
    """Another order or edge of temperature, top-k, top-p would make p another law."""
    logits = torch.randn(7, 500, generator=torch.Generator().manual_seed(0)) * 2
    grid = itertools.product((0.3, 1, 2), (0, 1, 5, 499, 600), (0.05, 0.5, 0.95, 1))
    for law in (*grid, (np.float32(0.7), np.uint8(5), np.float32(0.5)), (0,)):
        want = transformers_law(logits.double(), *law).float()
        assert torch.allclose(av.warp(logits, *law), want, atol=1e-6), law
        assert torch.allclose(av.warp(logits[0], *law), want[0], atol=1e-6), law
    # What ties with the last token kept is kept; if one reaches half, one is kept.
    logits = torch.tensor([[0.4, 0.2, 0.2, 0.2], [0.1, 0.1, 0.4, 0.4]]).log()
    want = torch.tensor([[0.4, 0.2, 0.2, 0.2], [0, 0, 0.5, 0.5]])
    for law in dict(top_k=2), dict(top_p=0.5):
        assert torch.allclose(av.warp(logits, **law), want), law
    logits = torch.tensor([0.25, 0.5, 0.25]).log()
    assert av.warp(logits, top_p=0.5).tolist() == [0, 1, 0]

def test_the_law_of_many_tokens_sums_to_one():
    """Shares that lack 5e-4, as a float32 softmax of 151,936, are compared by value."""
    logits = torch.zeros(3, 151_936)
    logits[torch.arange(3), torch.tensor([0, 7, 9])] = torch.tensor([14.0, 15.0, 10.0])
    exact = logits.double().softmax(-1)
    assert ((av.warp(logits) - exact) / exact).abs().max() < 2e-6
    odds = exact.amax(-1).logit().float()
    assert torch.allclose(av.logit_q_max(logits), odds, atol=1e-5)
    slope = torch.linspace(0, 0.1, 151_936).index_fill(0, torch.tensor([7]), 15.0)
    ordered = slope.double().softmax(-1).sort(descending=True).values
    nucleus = (ordered.cumsum(-1) - ordered < 0.97).sum()  # 1,013 more of a raw softmax
    assert abs((av.warp(slope, top_p=0.97) > 0).sum() - nucleus) < 10

@pytest.mark.parametrize("tiny", [1e-9, 1e-40, 1e-300, np.float32(1e-30)])
def test_tiny_settings_are_greedy_not_nan(tiny):
    """To divide before the maximum is taken off gives inf - inf; a top_p of 0, 0/0."""
    for logits in torch.tensor([3.0, 2, 1]), torch.tensor([3e9, 2e9, 1e9]):
        assert av.warp(logits, temperature=tiny).tolist() == [1, 0, 0]
        assert av.warp(logits, top_p=tiny).tolist() == [1, 0, 0]
        assert av.logit_q_max(logits, tiny).item() == av.MAX_LOG_ODDS

@pytest.mark.parametrize("V", [6, 1500, 2048])
def test_sample_draws_the_law_and_never_a_zero(V):
    """A sum searched from the wrong side draws tokens of weight 0, above all at the ends.

    Weights need not sum to one. 20,000 draws, false alarm 1e-6 per V."""
    weights, at = torch.zeros(V), torch.tensor([1, 3, 4]) * (V // 6)
    weights[at] = torch.tensor([1.0, 0.6, 0.4])
    draws = av.sample(weights.expand(20_000, V), torch.Generator().manual_seed(0))
    assert chi_square(np.bincount(draws, minlength=V), weights / 2) > FALSE_ALARM
    for u in (0, 1):
        with mock.patch("torch.Tensor.uniform_", lambda x, generator=None: x.fill_(u)):
            assert av.sample(weights[None]).item() == at[-u]


# ---- 2. The lossless rule.
@pytest.mark.parametrize("p, q, u, want", [
    ([0, 0, 1.0], [0.5, 0.5, 0], 0.0, 2),  # p(x) = 0 is rejected even at u = 0
    ([0.3, 0.5, 0.2], [0.3, 0.5, 0.2], 1 - 2.0**-53, 0),  # p = q is accepted at any u
    ([0, 1.0, 0], [0, 1.0, 0], 0.5, 1)])  # a forced rejection: no residual, so p
def test_verify_at_the_ends_of_the_uniform_and_of_the_residual(p, q, u, want):
    """`u <= p/q` would accept what the target never says; 0/0 would be token 0."""
    p, q, drafts = torch.tensor([p, p]), torch.tensor([[q]]), torch.tensor([[0]])
    with mock.patch("torch.rand", lambda *_, **kw: torch.tensor([[u]], dtype=torch.double)):
        accepted, token = av.verify(p, q, drafts, torch.tensor([1]))
    assert (0 if accepted else token.item()) == want

def test_verify_refuses_shapes_that_do_not_fit():
    """What broadcasts in silence would compare a draft with another draft's law."""
    p, q = torch.full((5, 4), 0.25), torch.full((2, 3, 4), 0.25)
    drafts, n = torch.zeros(2, 3, dtype=torch.long), torch.tensor([1, 2])
    accepted, token = av.verify(p, q, drafts, n)
    assert accepted.tolist() == [1, 2] and token.shape == (2,)
    for bad in ((p[:1], q, drafts, n), (p[:, :3], q, drafts, n), (p, q[:1], drafts, n),
                (p, q[:, :2], drafts, n), (p, q, drafts[:1], n), (p, q, drafts, n[:1])):
        with pytest.raises(ValueError, match="must fit"):
            av.verify(*bad)


# ---- 3. The estimator.
def test_feature_is_the_log_odds_of_the_largest_probability():
    """A feature of another law, or one that is infinite, would ruin the text or the fit.

    By hand: of a law (3/4, 1/4) it is log 3; at temperature 1/2 (.9, .1), so log 9."""
    logits = torch.tensor([0.75, 0.25]).log()
    for temperature, odds in (1, 3), (0.5, 9), (0, 3), (np.float32(0.5), 9):
        got = av.logit_q_max(logits, temperature).item()
        assert got == pytest.approx(math.log(odds))
    logits = torch.randn(4, 50, 9, generator=torch.Generator().manual_seed(0)) * 2
    for kind in torch.float32, torch.float64, torch.bfloat16:
        want = (logits.to(kind).double() / 0.7).softmax(-1).amax(-1).logit().float()
        assert torch.allclose(av.logit_q_max(logits.to(kind), 0.7), want, atol=1e-5)
    sure = torch.tensor([[500.0, 0, 0], [0, -math.inf, -math.inf], [3, 3, -math.inf]])
    assert av.logit_q_max(sure).tolist() == [av.MAX_LOG_ODDS, av.MAX_LOG_ODDS, 0]
    assert av.logit_q_max(torch.zeros(30_000)).item() == -av.MAX_LOG_ODDS

def theta_of(estimator):
    return np.append(estimator.slope, estimator.intercepts)

def test_refit_by_hand():
    """A label for what was trimmed would teach that it is rejected; so it stays trimmed.

    Two of three drafts are verified for 50 requests, of which 40 accept one. So there
    are 50, 40 and 0 labels. f = 0, c = 1/2: gradients 25 - 40 and 20 - 0, curvatures
    12.5 and 10, a ridge of .5. So steps of 15/13 and -20/10.5, damped to 1/2 and 4/9."""
    estimator = av.AcceptanceEstimator(3, intercept=0.0, ridge=0.5, damping=50)
    estimator.observe(np.zeros((50, 3)), np.full(50, 2), np.repeat([1, 0], [40, 10]))
    want = [0.5, 15 / 13 / 2, -20 / 10.5 * 4 / 9, 0.0]
    for _ in range(2):  # a round without labels leaves everything where it is
        estimator.refit()
        assert theta_of(estimator) == pytest.approx(want)
    # 1,000 doubtful drafts, all accepted: the floor alone would allow a step of 20.
    estimator.observe(np.full((1000, 3), -10.0), np.full(1000, 1), np.ones(1000, int))
    estimator.refit()
    assert abs(theta_of(estimator) - want).max() <= av.MAX_FIT_STEP + 1e-9
    # The sure half is rejected. A slope below 0 would rank it last; the intercept that
    # fits the slope of 0 is 0, as just half was accepted.
    estimator = av.AcceptanceEstimator(1, slope=0, intercept=0)
    estimator.observe(np.repeat([[2.0], [0.0]], 50, 0), np.ones(100), np.repeat([0, 1], 50))
    estimator.refit()
    assert theta_of(estimator) == pytest.approx([0, 0])

def test_sums_and_refit_are_those_of_stored_rows():
    """Censoring off by one, or sums not cleared, differ from a Newton step on all rows."""
    rng, estimator = np.random.default_rng(0), av.AcceptanceEstimator(4, refit_every=3)
    for _ in range(2):
        theta, H, (g, counts) = theta_of(estimator), np.eye(5) * 1e-3, np.zeros((2, 5))
        for step in range(3):
            f, n = rng.normal(1, 2, (16, 4)), rng.integers(0, 5, 16)
            hits = rng.random((16, 4)) < 1 / (1 + np.exp(-f))
            a = np.minimum(n, hits.cumprod(1).sum(1))
            f[np.arange(4) >= n[:, None]] = np.inf  # unverified, so it may be anything
            for b, i in itertools.product(range(16), range(4)):
                if i < n[b] and i <= a[b]:
                    x = np.append(f[b, i], np.arange(4) == i)
                    c = 1 / (1 + math.exp(-x @ theta))
                    H += max(c * (1 - c), 0.05) * np.outer(x, x)
                    g, counts = g + (c - (i < a[b])) * x, counts + (x != 0)
            assert (theta == theta_of(estimator)).all()
            estimator.observe(torch.tensor(f), torch.tensor(n), a)  # arrays or tensors
        want = theta - np.linalg.solve(H, g) * counts / (counts + 50)
        assert abs(want - theta).max() < av.MAX_FIT_STEP and want[0] > 0
        assert np.allclose(theta_of(estimator), want, atol=1e-12)

@pytest.mark.parametrize("spread", [0, 2])
@pytest.mark.parametrize("K", [1, 5])
def test_the_fit_survives_separable_labels(K, spread):
    """Labels that are all alike drive a plain Newton fit to infinity, never to return."""
    estimator, rng = av.AcceptanceEstimator(K, refit_every=1), np.random.default_rng(0)
    for accepted, mean in itertools.product((K, 0, K), (10, 2)):
        for _ in range(200):
            f = rng.normal(mean, spread, (8, K))
            estimator.observe(f, np.full(8, K), np.full(8, accepted))
            assert np.abs(theta_of(estimator)).max() < 20 and estimator.slope >= 0
        assert abs(estimator.predict([[mean]]).item() - (accepted > 0)) < 0.1

def test_the_estimator_refuses_what_does_not_fit():
    """A count out of range or a feature that is not finite would poison later rounds."""
    estimator, f = av.AcceptanceEstimator(np.int64(3)), np.ones((2, 3))
    for bad in ((f, [1, 4], [0, 0]), (f, [1, 2], [0, -1]), (f, [1], [0]), (f, [1, 2], 0),
                (f, [1, 2], [2, 2]),
                (np.ones((2, 4)), [1, 2], [0, 0]), (f * math.nan, [1, 1], [0, 0])):
        with pytest.raises(ValueError):
            estimator.observe(*bad)
    for name, value in (("num_speculative_tokens", True), ("ridge", 0), ("damping", -1),
                        ("refit_every", 0), ("slope", -1), ("intercept", "0")):
        with pytest.raises(ValueError, match=name):
            av.AcceptanceEstimator(**{"num_speculative_tokens": 3, name: value})


# ---- 4. Costs, budget, trim.
def test_costs_between_below_and_beyond_the_points():
    """A flat extension makes large batches look free, and a hiccup all others dear."""
    cost = av.CostTable({2: 1.0, 4: 3.0}, {4: 2.0, 16: 8.0, 20: 394.0, 24: 10.0})
    assert cost.draft_ms(np.arange(7)).tolist() == [0, 1, 1, 2, 3, 3.75, 4.5]
    # The hiccup at 20 counts as the 10 of the larger size, and moves nothing else.
    sizes = np.array([1, 4, 10, 16, 18, 20, 24])
    assert cost.verify_ms(sizes).tolist() == [2, 2, 5, 8, 9, 10, 10]
    assert cost.verify_ms(48) == pytest.approx(20)  # its end is flat: in proportion
    assert av.CostTable({1: 1}, {4: 2.0, 8: 3.0}).verify_ms(16) == pytest.approx(6)
    assert av.CostTable({1: 1}, {4: 2.0}).verify_ms(8) == pytest.approx(4)
    for bad in {}, [], {1: 0}, {1: math.nan}, {1: math.inf}, {0: 1.0}, {1.5: 1}, {1: "1"}:
        with pytest.raises(ValueError, match="draft"):
            av.CostTable(bad, {1: 1})
        with pytest.raises(ValueError, match="verify"):
            av.CostTable({1: 1}, bad)

def test_costs_follow_the_machine_but_no_hiccup():
    """A fixed table plans for another machine, one that follows each hiccup for none."""
    cost, hiccup = av.CostTable({1: 1, 7: 7}, {64: 10, 128: 14}), 2**av.COST_RATE
    assert cost.learn(3, 128, 3 * 3.0, 1.5 * 14.0) == 3 + 14  # as expected before
    for _ in range(400):
        cost.learn(3, 128, 3 * 3.0, 1.5 * 14.0)
    assert [cost.draft_ms(3), cost.verify_ms(128)] == pytest.approx([9, 21])
    cost.learn(3, 128, 9e2, 2e3)  # 100 times as much counts as twice
    assert [cost.draft_ms(3), cost.verify_ms(128)] == pytest.approx([9 * hiccup, 21 * hiccup])
    cost.learn(0, 128, 0.1, 1e-9)  # says nothing of drafting
    assert [cost.draft_ms(3), cost.verify_ms(128)] == pytest.approx([9 * hiccup, 21])
    cost.learn(3, 128, math.nan, math.inf)  # would stay for good
    assert np.isfinite(cost.factors).all()

@pytest.mark.parametrize("all_depths", [False, True])
def test_depth_and_budget_are_the_best_by_brute_force(all_depths):
    """A local argmax stops at the first stair; of equals the smallest is best."""
    rng = np.random.default_rng(0)
    for case in range(200):
        R, K = rng.integers(1, 5, 2)
        s = np.cumprod(rng.random((R, K)).round(1), 1)
        s[rng.random((R, K)).cumsum(1) > 1.2] = -1  # no draft can be used there
        stairs = np.repeat(rng.integers(1, 9, R * (K + 1)), 2)[:R * (K + 1)].cumsum()
        cost = av.CostTable({d: rng.choice([0.5, 1, 2]) * d for d in range(1, K + 1)},
                            {n: float(ms) for n, ms in enumerate(stairs, 1)})
        rates, deepest = {}, int((s >= 0).any(0).sum())
        for d in range(0 if all_depths else deepest, deepest + 1):
            best = sorted(s[:, :d][s[:, :d] >= 0])[::-1]
            for b in range(len(best) + 1):
                ms = cost.draft_ms(d) + cost.verify_ms(R + b)
                rates[d, b] = (R + sum(best[:b])) / ms
        top = max(rates.values())
        want = min(x for x, rate in rates.items() if rate >= top * (1 - 1e-12))
        assert av.draft_budget(s, cost, all_depths) == want, case
    equal = av.CostTable({1: 1e-300}, {1: 1.0, 2: 1.5, 3: 2.0})
    want = (0, 0) if all_depths else (2, 0)
    assert av.draft_budget(np.full((1, 2), 0.5), equal, all_depths) == want

def test_trim_takes_the_best_slots():
    """A slot left out may not be better than one taken; ties go by position."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        R, K = rng.integers(1, 5, 2)
        s = np.cumprod(rng.choice([1.0, 0.5, 0.9, 0.0], (R, K)), 1)
        budget = int(rng.integers(0, R * K + 1))
        values = {n: sum(s[r, :k].sum() for r, k in enumerate(n))
                  for n in itertools.product(range(K + 1), repeat=R) if sum(n) == budget}
        got = values[tuple(av.trim(s, budget).tolist())]  # a KeyError: too few or many
        assert got == pytest.approx(max(values.values()), abs=1e-12)
    assert av.trim(np.array([[0.5, -1, -1], [0, 0, 0]]), 4).tolist() == [1, 3]
    assert av.trim(np.ones((300, 2)), 310).tolist() == [2] * 10 + [1] * 290  # stable
    with pytest.raises(ValueError, match="budget"):
        av.trim(np.ones((3, 2)), 7)


# ---- 5. The loop.
class Coin(Table):
    """A law that is the same after each text, and may be changed while it is used."""

    def logits(self, tokens, lengths, slots, num_verified):
        return torch.tensor(self.law).log().expand(len(slots) + sum(num_verified), -1)

SURE = [0.8, 0.15, 0.05]  # of the drafter; the target's overlap with it is .95 or .05
EASY, HARD = [0.75, 0.15, 0.1], [0.0, 0.0, 1.0]

def coins(idea, K, cost, every, plan="adaptive", *, new, **law):
    """A decoder of coins, with a request for each number of new tokens."""
    decoder = idea.Decoder(
        Coin(EASY, 3), Coin(SURE, 3), max_batch_size=len(new), max_length=2**13,
        plan=plan, num_speculative_tokens=K, seed=0, cost=idea.CostTable(*cost),
        estimator=idea.AcceptanceEstimator(K, refit_every=every), **law)
    for r, n in enumerate(new):
        decoder.add(r, [0], n)
    return decoder

@pytest.mark.parametrize("plan, down, up", [("verification", 3, 3), ("adaptive", 7, 3)])
def test_a_switch_of_workload_is_followed_both_ways(plan, down, up, idea):
    """A fit that stays behind drafts too much after a switch, or too little for good.

    Acceptance is .95, .05, .95. After `down` and `up` refits it is predicted within .1,
    after 5 as much is verified as before. (Going down, only EXPLORERS give labels.)"""
    cost = {d: 0.3 * d for d in range(1, 8)}, {64: 10.0, 512: 40.0}
    decoder = coins(idea, 7, cost, 25, plan, new=[8000] * 64)
    depth, gap = np.zeros((2, 3, 7))
    for (i, law), refit in itertools.product(enumerate((EASY, HARD, EASY)), range(7)):
        decoder.target.law = law
        verified = [decoder.step().num_verified.mean() for _ in range(25)]
        depth[i, refit] = np.mean(verified[1:])
        c = decoder.estimator.predict([[math.log(4)]]).item()
        gap[i, refit] = abs(c - np.minimum(law, SURE).sum())
    assert (gap[0, 2:] < 0.1).all() and depth[0, -1] > 3
    assert (gap[1, down - 1:] < 0.1).all() and (depth[1, 3:] < 0.2).all()
    assert (gap[2, up - 1:] < 0.1).all() and abs(depth[2, 4:] - depth[0, -1]).max() <= 1

def test_exploring_steps_and_prompts(idea, monkeypatch):
    """Too few explorers learn nothing, too many cost time; prompts cost what no table has.

    By hand: drafts never pay. So only a step in which a round begins drafts: K for
    EXPLORERS requests, all verified. Costs learn from steps without prompts. A plan
    serves PLAN_EVERY steps: one for each would take a hundredth of all time."""
    learned = []
    budget = mock.Mock(side_effect=idea.draft_budget)
    monkeypatch.setattr(idea, "draft_budget", budget)
    monkeypatch.setattr(idea.CostTable, "learn", lambda _, *x: learned.append(x[:2]) or 5.0)
    cost = {1: 50.0}, {1: 1.0, 160: 500.0}
    decoder = coins(idea, 3, cost, 4, new=[99] * 20 + [1] * 20)  # 1: no room for a draft
    for step in range(9):
        if step == 5:
            decoder.add(99, [0], 9)
        learned.clear()
        done = decoder.step()
        want = [0] * (40 if step == 0 else 20 + (step >= 5))
        if step % 4 == 0:
            want[:idea.EXPLORERS] = [3] * idea.EXPLORERS
        assert done.num_verified.tolist() == want == (done.survival >= 0).sum(1).tolist()
        prompts = step in (0, 5)
        assert learned == ([] if prompts else [(max(want), len(want) + sum(want))])
        assert np.isnan(done.expected_ms) if prompts else done.expected_ms == 5.0
        assert budget.call_count == 1 + step // idea.PLAN_EVERY

def test_what_is_expected_by_hand(idea):
    """A forecast that forgets too fast, that reads the law after top-k, that counts who
    drew nothing, or that a new request takes over from the one before it, misplans.

    20 requests, 16 of them explore: the mean moves by 16 labels of 16 + MEMORY, each
    request's own forecast by 20 of 20 + MEMORY, towards what it drew or else that mean.
    All begin as the estimator has it for FIRST_FEATURE: a fitted one is not started anew."""
    cost = {1: 50.0}, {1: 1.0, 60: 99.0}
    decoder = coins(idea, 2, cost, 100, new=[99] * 20, top_k=1, temperature=0.5)
    assert decoder.expected == pytest.approx(1 / (1 + np.exp(0.2 - 0.5 * 2)))
    decoder.expected[:], decoder.usual[:] = 0.4, 0.6
    decoder.estimator.intercepts[:] = [0, 1]
    decoder.step()
    c = 1 / (1 + np.exp(-0.5 * math.log(0.8**2 / 0.025) - np.array([0, 1])))
    usual = 0.6 + (c - 0.6) * 16 / (16 + idea.MEMORY)
    want = 0.4 + (np.array([c] * 16 + [usual] * 4) - 0.4) * 20 / (20 + idea.MEMORY)
    assert decoder.expected == pytest.approx(want)
    decoder.request[3] = -1
    decoder.add(99, [0], 9)
    assert decoder.expected[3] == pytest.approx(usual)

def test_nothing_is_drafted_behind_an_end_token(idea):
    """Drafts behind a drafted end token can't be used: they would take others' slots.

    On a CPU they are not drafted; elsewhere their survival is zero, so last in `trim`."""
    P = Table(lambda text: np.eye(3)[2 if len(text) == 3 else 1], 3)  # token 3 ends
    decoder = start(idea, P, P.law, {1: 1.0}, [(0,), (0, 1)], 4, plan="fixed",
                    eos_token_ids=[2])
    done = decoder.step()
    assert (done.survival >= 0).sum(1).tolist() == done.num_verified.tolist() == [3, 2]
    assert P.asked == [2, 2, 1] and done.num_committed.tolist() == [3, 2]
    assert decoder.step() is None
    drafts = np.array([[1, 2, 1, 2], [2, 1, 1, 1]])
    survival = decoder.survival(np.zeros((2, 4)), drafts, np.array([4, 3]))
    assert survival.tolist() == [[0.5, 0.25, 0, 0], [0.5, 0, 0, -1]]

@pytest.mark.parametrize("fails", [(), (0, 3, 4, 6)])
@pytest.mark.parametrize("drafter", [Table, Seeing])
def test_a_step_that_raised_can_be_repeated(drafter, fails, idea):
    """A half-done step that moved a length or a state would give another text after it."""
    P, calls, raised = random_law(0, 5), itertools.count(), 0
    Q = drafter(random_law(1, 5, P), 5)
    decoder = start(idea, Q, P, {1: 1, 9: 2}, [(0,), (1, 2)], 3, temperature=0)
    honest = decoder.target.logits

    def logits(*args):
        call, out = next(calls), honest(*args)
        if call in fails[::2]:
            raise RuntimeError("of the device")
        if call in fails:
            out[-1] = -math.inf  # no token is likely: there is no law
        return out

    def see(*args):
        if fails and next(sights) == 1:
            raise RuntimeError("of the device")
        Seeing.see(Q, *args)

    decoder.target.logits, sights, texts = logits, itertools.count(), [[0], [1, 2]]
    if drafter is Seeing:
        Q.see = see
    while (decoder.request >= 0).any():
        try:
            done = decoder.step()
            for i, row, n in zip(done.requests, done.tokens, done.num_committed):
                texts[i] += row[:n].tolist()
        except (RuntimeError, FloatingPointError) as error:
            raised += str(error).startswith(("of the device", "the target"))
    for text, n in zip(texts, (1, 2)):
        assert len(text) == n + 9
        assert text[n:] == [P(tuple(text[:at])).argmax() for at in range(n, n + 9)]
    assert raised == len(fails) + (drafter is Seeing and fails != ())

@pytest.mark.parametrize("plan", PLANS)
def test_an_error_of_the_drafter_leaves_no_trace_in_the_forecasts(plan, idea):
    """A NaN behind a request's last draft would make all forecasts NaN, for good."""
    broken = [True]
    Q = Table(lambda text: EVEN(text) * (np.nan if broken and len(text) == 2 else 1), 2)
    decoder = start(idea, Q, EVEN, {1: 1, 6: 1.1}, [(0,), (0,)], 2, plan=plan)
    with pytest.raises(FloatingPointError, match="the drafter"):
        decoder.step()
    broken.clear()
    decoder.request[0] = -1
    decoder.add(2, [0], 2)  # it drafts one token, and the other request two
    assert (decoder.step().survival >= 0).sum(1).tolist() == [1, 2]
    assert np.isfinite(decoder.usual).all() and np.isfinite(decoder.expected).all()


# ==== Part II: on transformers models.
# ---- Small models.
torch.set_num_threads(1)  # threads would wait for each other
TINY = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
            head_dim=8, pad_token_id=None, bos_token_id=None, eos_token_id=None)

def llama(seed=0, **changes):
    """A random Llama whose greedy text is not constant."""
    config = LlamaConfig(**{**TINY, "initializer_range": 0.3, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()

def noisy(model, scale):
    """A drafter that mostly agrees: a copy of the target with noise on every weight."""
    drafter, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for w in drafter.parameters():
            w += torch.randn(w.shape, generator=generator) * w.std() * scale
    return drafter

def bigram(probs):
    """A Llama whose law after token t is exactly probs[t], whatever came before."""
    probs, V = torch.tensor(np.array(probs), dtype=torch.float64), len(probs)
    model = llama(vocab_size=V, hidden_size=V, num_hidden_layers=1, rms_norm_eps=1e-12,
                  num_attention_heads=1, num_key_value_heads=1)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(V))
        model.lm_head.weight.copy_((probs.log().clamp(min=-1e4) / V ** 0.5).T)
    return model

def cycle(V, by=1):
    """A bigram that always says (t + by) mod V."""
    return bigram(np.eye(V)[(np.arange(V) + by) % V] * (1 - V * 1e-9) + 1e-9)

def prompts_of(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 64, n).tolist() for n in lengths]

def greedy(model, prompts, new):
    """The judge: plain `model.generate`, one prompt at a time."""
    texts = []
    for prompt, n in zip(prompts, np.broadcast_to(new, len(prompts)).tolist()):
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n,
                             do_sample=False, pad_token_id=0) if n else ids
        texts.append(out[0, len(prompt):].tolist())
    return texts

def stairs():
    """Costs with steps, so that depth and budget vary; fresh, because tables learn."""
    return av.CostTable({1: 0.05, 64: 0.2},
                        {1: 1, 3: 1, 4: 1.6, 6: 1.6, 7: 2.2, 12: 2.2, 13: 9, 64: 40})

def write(target, drafter, prompts, new, K=4, plan="adaptive", **options):
    """`av.generate`, greedy and with the costs of `stairs` unless told otherwise."""
    options = dict(temperature=0, cost=stairs(), seed=0) | options
    return av.generate(target, drafter, prompts, max_new_tokens=new, plan=plan,
                       num_speculative_tokens=K, **options)

def decoder_of(target, drafter, B, length, K, **options):
    """A decoder of two models with B slots of so many tokens."""
    lms = [av.SlotLM(model, B, length) for model in (target, drafter)]
    return av.Decoder(*lms, max_batch_size=B, max_length=length, num_speculative_tokens=K,
                      **options)

def reads_of(model):
    """A list that grows by the ids of each forward of the model, first that of a trial."""
    ids = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: ids.append(args[0].flatten().tolist()))
    return ids


# ---- Greedy text.
@pytest.mark.parametrize("K", [0, 1, 4, 8])
def test_greedy_text_is_that_of_generate(K):
    """Any error of rows, positions, masks, caches or rollback changes greedy text."""
    target, prompts, uneven = llama(), prompts_of(5, 1, 17, 30, 2, 9), []
    drafter, new = noisy(target, 0.1), [24, 9, 17, 1, 26, 20]
    want = greedy(target, prompts, new)
    for plan, B in itertools.product(PLANS if K else ["fixed"], (1, 2, 5)):
        out = write(target, drafter, prompts, new, K, plan, max_batch_size=B,
                    on_step=lambda step: uneven.append(np.ptp(step.accepted)))
        assert out.tokens == want, (plan, B)
    assert K == 0 or sum(uneven) > 20

def test_prompts_longer_than_a_piece_are_read_to_the_token(monkeypatch):
    """A piece that is lost, doubled or shifted by one changes the text after it; and a
    mask of a whole prompt of 8,192 takes 512 MB, one of a piece 16."""
    target, attend, masks = llama(max_position_embeddings=2048), av.sdpa, [0]

    def record(*args, attn_mask, **options):
        masks.append(attn_mask.numel() if attn_mask is not None else 0)
        return attend(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(av, "sdpa", record)
    prompts = prompts_of(512, 3, 513, 1024, 600, 1025, 1, 511)
    want, drafter = greedy(target, prompts, 6), noisy(target, 0.05)
    for plan, K, B in (("fixed", 0, 5), ("adaptive", 4, 2), ("verification", 4, 5)):
        out = write(target, drafter, prompts, 6, K, plan, max_batch_size=B)
        assert out.tokens == want, (plan, K, B)
    assert max(masks) <= 2 * 520 * 1031  # of two heads that share a key

class Head(torch.nn.Module):
    """A small recurrent head, wider by one than the target, that is right at times."""

    def __init__(self, target):
        super().__init__()
        H, self.target, self.started = target.config.hidden_size, target, []
        self.mix = torch.nn.Linear(H, H + 1, bias=False)
        torch.nn.init.normal_(self.mix.weight, std=0.01)

    def start(self, hidden):
        self.started.append(hidden.clone())
        return self.mix(hidden)  # (r, H + 1)

    def step(self, state, tokens, position, depth):
        x = self.target.model.embed_tokens(tokens) + state[:, :-1]
        return 0.9 * state, self.target.lm_head(self.target.model.norm(x))

class Block(Head):
    """A block drafter, as `HeadDrafter` describes it: one pass for all positions."""

    def step(self, state, tokens, position, depth):
        if position == 0:
            state = super().step(state, tokens, 0, depth)[1][:, None].repeat(1, depth, 1)
        return state, state[:, position]

@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [Head, Block])
def test_a_head_starts_from_the_state_of_the_newest_token(kind, plan):
    """A state of another row, request or step makes drafts worse, and no text shows it."""
    target, prompts, new = llama(), prompts_of(5, 1, 17, 9, 2), [20, 12, 25, 2, 20]
    with torch.no_grad():  # the next token follows mostly from the last: easy to guess
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight *= 0.02
            layer.mlp.down_proj.weight *= 0.02
    drafter, steps = av.HeadDrafter(kind(target)), []
    out = write(target, drafter, prompts, new, plan=plan, max_batch_size=2,
                on_step=steps.append)
    assert out.tokens == greedy(target, prompts, new)
    hits = sum((s.accepted > 0).sum() for s in steps)
    assert 0.15 < hits / sum((s.num_verified > 0).sum() for s in steps) < 0.95
    assert plan != "adaptive" or {s.drafts.shape[1] for s in steps} & {1, 2, 3}
    texts, started = [list(p) for p in prompts], iter(drafter.head.started)
    for step in steps:
        for i, row, n, state in zip(step.requests, step.tokens, step.num_committed,
                                    next(started)):
            texts[i] += row[:n].tolist()
            base = target.model(torch.tensor([texts[i][:-1]])).last_hidden_state[0, -1]
            assert torch.allclose(state, base, atol=1e-4)
    assert next(started, None) is None
    drafter.head.started.clear()  # while costs are measured, it reads the target, too
    write(target, drafter, prompts, 12, 7, plan, cost=None)
    assert {x.shape[1] for x in drafter.head.started} == {32}

def test_a_head_drafts_from_the_state_of_its_own_slot():
    """If fewer slots draft than were seen, rows move: of a wrong one no text shows it."""
    head = types.SimpleNamespace(start=lambda hidden: 10 * hidden, step=lambda state, tokens,
                                 position, depth: (state + tokens, [*zip(state, tokens)]))
    drafter, tokens = av.HeadDrafter(head), torch.arange(12).view(6, 2)
    drafter.see(np.array([0, 2, 5]), torch.tensor([1, 2, 3]))
    drafter.commit(np.array([0, 2, 5]), np.array([2, 2, 2]))
    for slots, want in ([0, 2, 5], [(10, 1), (20, 5), (30, 11)]), ([2, 5], [
            (25, 5), (41, 11)]), ([5], [(52, 11)]):
        ends = np.full(len(slots), 2)
        assert drafter.next_logits(tokens, ends, np.array(slots), 0, 3) == want


# ---- The law, drawn.
def chance_of(texts, start, P):
    """P(texts of three tokens of the chain P are at least this far off)."""
    counts = np.zeros((len(P),) * 3)
    np.add.at(counts, tuple(np.array(texts).T), 1)
    return chi_square(counts, P[start][:, None, None] * P[:, :, None] * P)

@pytest.mark.parametrize("plan", ["verification", "adaptive"])
def test_generate_draws_the_target_law(plan):
    """All at once: 40,000 requests, refilled, refitted and trimmed, must not lean.

    The joint law of three tokens, in batches of 1,500. False alarm 1e-6 for each plan."""
    law, trims = dict(temperature=1.3, top_k=3, top_p=0.9), []
    P, Q = np.random.default_rng(3).dirichlet(np.full(4, 0.8), (2, 4))
    target, drafter = bigram(P), bigram(0.7 * P + 0.3 * Q)
    ms = {1: 1, 1500: 9, 1800: 9.5, 1801: 10, 2700: 11, 2701: 13, 4500: 17}
    out = write(target, drafter, [[0]] * 40_000, 3, 2, plan, max_batch_size=1500, **law,
                cost=av.CostTable({1: 0.01, 9: 0.5}, ms),
                estimator=av.AcceptanceEstimator(2, refit_every=7),
                on_step=lambda s: trims.append(s.num_verified.sum() < s.drafts.size))
    assert np.mean(trims) > 0.2, "nothing was trimmed"
    p = av.warp(target(torch.arange(4)[:, None]).logits[:, 0].detach(), **law)
    assert chance_of(out.tokens, 0, p.double().numpy()) > FALSE_ALARM

@pytest.mark.parametrize("V", [4, 8, "varies"])
def test_a_drafter_of_another_vocabulary_keeps_the_law(V):
    """An id that only one model has, or that the row before had, leans the text (F28).

    False alarm 1e-6 each. The warning comes once and names the caller's line, although
    costs are measured, too."""
    P, Q = (np.random.default_rng(i).dirichlet(np.ones(n), n)
            for i, n in enumerate((6, 6 if V == "varies" else V)))
    drafted, widths = set(), itertools.cycle([6, 3])

    def next_logits(tokens, lengths, slots, position, depth):
        return torch.tensor(Q).log()[tokens[slots, lengths - 1], :next(widths)]

    drafter = bigram(Q)
    if V == "varies":
        drafter = mock.Mock(spec=["commit", "next_logits"], next_logits=next_logits)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = write(bigram(P), drafter, [[5]] * 20_000, 3, 2, max_batch_size=1000,
                    temperature=1, cost=None, on_step=lambda s: drafted.update(s.drafts.flat))
    assert [(w.category, w.filename, f"6 (target) and {V} (drafter)" in str(w.message))
            for w in caught] == [(UserWarning, __file__, True)] * (V in (4, 8))
    assert max(drafted) < (4 if V == 4 else 6)
    assert chance_of(out.tokens, 5, P) > FALSE_ALARM

@pytest.mark.parametrize("law", [
    dict(temperature=0), dict(temperature=0.01), dict(temperature=1),
    dict(temperature=1, top_k=1), dict(temperature=1.5, top_p=0.9, top_k=20)])
def test_the_target_as_its_own_drafter_is_always_accepted(law):
    """A setting on one side, or a cache that lacks a token, shows as a rejection (F16).

    41 tokens at K = 4 take exactly ceil(41 / 5) = 9 passes with the prompt's (F19)."""
    target, drafter = llama(), llama()
    reads = reads_of(target)
    for K, steps in ((4, 9), (1, 21), (2, 14)):
        reads.clear()
        out = write(target, drafter, prompts_of(5, 1, 17), 41, K, "fixed", **law)
        assert out.steps == steps == len(reads) and out.accept_length == 41 / steps


# ---- Logits and attention.
@pytest.mark.parametrize("heads", [2, 4])
def test_logits_from_the_cache_are_those_without_it(heads):
    """Stale entries, wrong positions or a neighbour move logits after a rollback."""
    target, rng = llama(num_key_value_heads=heads), np.random.default_rng(0)
    lm, lengths = av.SlotLM(target, 4, 80), np.array([3, 30, 1, 9])
    tokens = torch.tensor(rng.integers(0, 64, (4, 80)))
    for _ in range(8):
        slots = np.flatnonzero(rng.random(4) < [0.7, 0.7, 0.7, 1])
        n = rng.integers(0, 6, len(slots))
        lm.commit(slots, lengths[slots])
        logits, want = lm.logits(tokens, lengths[slots], slots, n), []
        for s, end in zip(slots, lengths[slots] + n):
            with torch.no_grad():
                out = target(tokens[s:s + 1, :end], output_hidden_states=True)
            both = torch.cat([out.logits, out.hidden_states[-1]], 2)[0]
            want.append(both[lengths[s] - 1:])
        got = torch.cat([logits, lm.hidden], 1)
        assert torch.allclose(got, torch.cat(want), atol=1e-4)
        lengths[slots] += 1 + (rng.random(len(slots)) * (n + 1)).astype(int)
        fresh = torch.tensor(rng.integers(0, 64, (4, 80)))
        rejected = torch.arange(80) >= torch.tensor(lengths)[:, None] - 1
        tokens = torch.where(rejected, fresh, tokens)

def cover(start, counts):
    """What the calls read for each token; the batch; pairs of queries and keys."""
    batch, read = av.Ragged(start, counts, CPU), []
    for cache, queries, seen, keys in batch.calls:
        rows = torch.arange(len(start))[cache]
        assert queries.shape == (seen.numel(),) and len(rows) == len(seen)
        for row, index, at in zip(rows, queries.view(seen.shape), seen):
            read += [(int(row), int(p), int(q), keys) for q, p in zip(index, at)]
    area = sum(seen.numel() * keys for _, _, seen, keys in batch.calls)
    return [read[place] for place in batch.place], batch, area

def test_attention_calls_read_each_query_once_with_all_its_keys():
    """A query that no call holds, or whose call ends before its key, gives another text."""
    rng = np.random.default_rng(0)
    for _ in range(150):
        R = rng.integers(1, 12)
        start = rng.integers(0, np.where(rng.random(R) < 0.2, 2000, 40))
        known = rng.integers(1, np.where(rng.random(R) < 0.2, 60, 3))
        counts = known + rng.integers(0, 6, R) * (rng.random(R) < 0.6)
        read, batch, _ = cover(start, counts)
        want = [(row, start[row] + i) for row in range(R) for i in range(counts[row])]
        assert [x[:3] for x in read] == [(*x, t) for t, x in enumerate(want)]
        assert all(position < keys for _, position, _, keys in read)
        assert list(zip(batch.slots.tolist(), batch.positions.tolist())) == want

def test_slots_that_are_mostly_in_use_are_read_without_a_copy():
    """To gather the cache of 63 slots of 64 copies it in each layer of each pass."""
    for slots, whole in (([0, 1, 3], slice(0, 4)), ([5], slice(5, 6)), ([0, 9], None)):
        n = np.bincount(slots, minlength=12)
        (rows, *_), = av.Ragged(4 * n, n, CPU).calls
        assert rows == whole if whole else rows.tolist() == slots

def test_one_long_request_does_not_slow_down_the_others():
    """If all rows are as wide or long as the greatest, one of 4,000 costs what 32 do."""
    def area(start, known, drafts):
        start, counts = np.broadcast_arrays(start, np.add(known, drafts))
        return cover(start, counts)[2]

    for drafts in (0, 3):
        both = area([15] * 7 + [3999] + [15] * 24, 1, drafts)
        assert both <= 1.3 * (area([15] * 31, 1, drafts) + area([3999], 1, drafts))
    even = area([50] * 64, 1, 0)
    assert area([50] * 64, 1, [0] * 63 + [8]) <= 1.35 * even
    assert area([50] * 63 + [0], [1] * 63 + [200], 0) <= 1.35 * even + 200 * 200

def test_the_cache_grows_with_the_texts():
    """A cache for max_new_tokens, or laws of more drafts than fit, take gigabytes."""
    model = llama(max_position_embeddings=100_000)
    decoder = decoder_of(model, model, 2, 100_000, 0)
    decoder.add(0, [1] * 10, 99_000)
    for _ in range(200):
        decoder.step()
    sizes = {x.shape[1] for kv in decoder.target.kv.values() for x in kv}
    assert 209 <= min(sizes) <= max(sizes) <= 2 * 210
    assert decoder_of(model, model, 2, 5, 1000, plan="fixed").q.shape == (3, 2, 64)


# ---- Counts and ends.
@pytest.mark.parametrize("plan", PLANS)
def test_query_tokens_of_the_target_are_requests_plus_budget(plan):
    """A trimmed draft that reached the target would cost what it was to save (F43)."""
    target, steps, seen, want = llama(), [], set(), []
    drafter, reads, trimmed = noisy(target, 0.3), reads_of(target), 0
    write(target, drafter, prompts_of(*[3] * 6), [9, 20, 3, 20, 7, 18], 8, plan,
          max_batch_size=5, on_step=steps.append)
    for s in steps:
        trimmed += (s.survival >= 0).sum() - s.num_verified.sum()
        new = {*s.requests} - seen
        want.append(len(s.requests) + s.num_verified.sum() + 2 * len(new))
        seen |= new
    assert [*map(len, reads)] == want
    assert (trimmed > 0) == (plan != "fixed")

@pytest.mark.parametrize("plan", PLANS)
def test_a_stream_of_steps_is_the_result_to_the_token(plan):
    """Text goes on behind an end token amid a block (F24, F25), in the stream or at the
    end; steps that count only the requests that run are joined to the wrong prompts."""
    target, texts = llama(), [[] for _ in range(6)]
    prompts, new = prompts_of(4, 7, 2, 5, 3, 9), [30, 0, 30, 5, 22, 30]
    plain = greedy(target, prompts, new)
    eos = [plain[0][11], plain[2][6]]

    def on_step(step):
        for i, row, n in zip(step.requests, step.tokens, step.num_committed):
            texts[i] += row[:n].tolist()

    out = write(target, noisy(target, 0.05), prompts, new, 7, plan, max_batch_size=2,
                eos_token_id=eos, on_step=on_step)
    want = [t[:min([t.index(x) + 1 for x in eos if x in t] or [99])] for t in plain]
    assert texts == out.tokens == want != plain

def test_on_step_ends_the_requests_that_it_returns():
    """A request that its reader has left would hold a slot to the last token."""
    seen = []

    def on_step(step):
        seen.extend(step.requests)
        return frozenset({1, 2}) if len(seen) > 4 else len(seen)  # a count is no list of requests

    out = write(cycle(8), cycle(8), [[0]] * 4, 40, 1, "fixed", max_batch_size=2,
                on_step=on_step)
    assert [*map(len, out.tokens)] == [40, 6, 2, 40]

@pytest.mark.parametrize("plan", PLANS)
def test_generation_up_to_the_last_position(plan):
    """One look-ahead past a learned table of positions is an index error (F26, F27)."""
    model = family("GPT2", max_position_embeddings=32)
    for n, new in ((20, 12), (1, 31), (31, 1), (32, 0), (29, 3)):
        prompt, drafter = prompts_of(n), noisy(model, 0.1)
        out = write(model, drafter, prompt, new, 5, plan, cost=None)
        assert out.tokens == greedy(model, prompt, new), (n, new)
        refused(lambda: write(model, drafter, prompt, new + 1),
                rf"prompts\[0\].* 32 .*{n} and {new + 1}$")


# ---- What is the caller's.
def test_same_seed_same_tokens_and_nothing_of_the_caller_changes():
    """A reseeded loop must repeat, and what is the caller's must stay as it was.

    Two right runs of 64 tokens with different seeds are equal with less than 1e-12."""
    target, prompts, new, eos = llama(), prompts_of(4, 7), [32, 32], [3]
    drafter, table = noisy(target, 0.1), stairs()
    table.learn = lambda *args: None

    def state():
        return [[(m.config.to_dict(), m.config._attn_implementation, m.training,
                  m.generation_config.to_dict(), [p.tolist() for p in m.parameters()],
                  [{**s._forward_hooks, **s._forward_pre_hooks} for s in m.modules()])
                 for m in (target, drafter)], copy.deepcopy((prompts, new, eos)),
                torch.random.get_rng_state().tolist(), str(np.random.get_state())]

    def run(seed, K=7, **options):
        return write(target, drafter, prompts, new, K, seed=seed, eos_token_id=eos,
                     cost=table, temperature=1, **options).tokens

    before = state()
    for options in dict(K=0), dict(max_batch_size=1), *({"plan": x} for x in PLANS):
        assert run(1, **options) == run(1, **options) != run(2, **options), options
    assert run(None) != run(None) and state() == before
    target(torch.tensor(prompts[:1])).logits.sum().backward()  # no inference tensor
    mine, its = [[*m.parameters(), *m.buffers()]
                 for m in (target, av.SlotLM(target, 1, 9).model)]
    assert all(x is y for x, y in zip(mine, its))  # no copy of gigabytes

def test_odd_but_right_input():
    """Tensors, arrays or tuples are prompts or ends, too, K may be more than is asked; and
    with another default dtype q would not be what is drawn from."""
    target = cycle(8)
    target.lm_head.config = {}  # of a module's own, not a model's
    assert write(target, None, [], 3, 0).tokens == []
    assert write(target, cycle(8), [], 3).tokens == []
    one = write(target, cycle(8), [[1], [3]], [1, 0], cost=None)
    assert one.tokens == [[2], []] and one.cost is None  # nothing is measured in vain
    for prompts, new, cost, eos in (
            (torch.tensor([[1], [2]]), 3, stairs(), 4),
            ([torch.tensor([1]), (2,)], (3, np.int8(3)), None, {7, 4}),
            (np.array([[1], [2]]), torch.tensor([3, 3]), None, torch.tensor(4)),
            ([np.array([1], np.uint16), [2]], np.array([3, 2]), None, np.array([4]))):
        out = write(target, cycle(8), prompts, new, 12, cost=cost, eos_token_id=eos)
        assert out.tokens == [[2, 3, 4], [3, 4]]
    try:
        torch.set_default_dtype(torch.float64)
        out = write(target, cycle(8, by=2), [[1], [2]], (4, 2), cost=None).tokens
    finally:
        torch.set_default_dtype(torch.float32)
    assert out == [[2, 3, 4, 5], [3, 4]]


# ---- Devices and dtypes.
@pytest.mark.parametrize("see", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_no_device_is_mixed_and_a_step_waits_twice(plan, see, monkeypatch):
    """On a GPU an `.item()`, a boolean mask or an index on the CPU would wait or fail.

    On shapes alone (fake tensors on "meta") each of them raises here; what a step reads
    back, features and drafts and then the outcome, is answered by hand."""
    reads = []

    def read(tensor):
        reads.append(tuple(tensor.shape))
        outcome = np.array([[0], [1], [1]]).repeat(tensor.shape[1], 1)  # none accepted
        return types.SimpleNamespace(numpy=lambda: (
            outcome if len(reads) % 3 == 0 else np.zeros(tensor.shape, int)))

    monkeypatch.setattr(torch.Tensor, "cpu", read)
    fake = types.SimpleNamespace(seed=lambda: 0, manual_seed=lambda seed: fake)
    monkeypatch.setattr(torch, "Generator", lambda device: fake)
    draw, draw_in = torch.rand, torch.Tensor.uniform_  # a fake device has no generator
    monkeypatch.setattr(torch, "rand", lambda *n, generator, **kw: draw(*n, **kw))
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda x, *a, generator=None: draw_in(x, *a))
    with FakeTensorMode():
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**TINY)).eval()
            drafter = av.HeadDrafter(Head(model)) if see else av.SlotLM(model, 3, 20)
        decoder = av.Decoder(
            av.SlotLM(model, 3, 20), drafter, num_speculative_tokens=4, plan=plan, top_k=5,
            top_p=0.9, cost=stairs(), max_batch_size=3, max_length=20, seed=0,
            estimator=av.AcceptanceEstimator(4, refit_every=2), eos_token_ids=[7])
        for i, n in enumerate((3, 1, 7)):
            decoder.add(i, [1] * n, 9 - i)
        for i in range(5):
            done = decoder.step()
            assert reads[3 * i:] == [done.drafts.shape] * 2 + [(3, 3)]
            assert done.drafts.shape[1] or see or plan == "adaptive"

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_differs_only_at_near_ties(dtype):
    """A text that leaves that of `generate` where the two best logits differ by more than
    3 % of the spread of their row has a fault (F15)."""
    target, prompts = llama().to(dtype), prompts_of(5, 12, 1)
    for drafter in (noisy(llama(), 0.05), noisy(llama(), 0.05).to(dtype)):  # (F49)
        texts = write(target, drafter, prompts, 40).tokens
        for prompt, got, want in zip(prompts, texts, greedy(target, prompts, 40)):
            same = next((i for i in range(40) if got[i] != want[i]), 40)
            row = target(torch.tensor([prompt + want[:same]])).logits[0, -1].float()
            best = row.topk(2).values
            assert same == 40 or best[0] - best[1] < 0.03 * (row.max() - row.min())


# ---- Families.
MOE = dict(moe_intermediate_size=32, num_experts_per_tok=2)
WORKS = {
    "Llama": {}, "Qwen2": dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "Qwen3": {}, "Mistral": dict(sliding_window=8), "Mixtral": dict(num_local_experts=4),
    "Qwen3Moe": dict(num_experts=4, **MOE), "Gemma": {}, "Phi": {}, "GPT2": {}, "Glm4": {},
    "Phi3": dict(sliding_window=8), "OPT": dict(ffn_dim=64, word_embed_proj_dim=32),
    "Gemma3Text": dict(sliding_window=8, query_pre_attn_scalar=8), "GPTNeoX": {},
    "Olmo2": {}, "Cohere": {}, "Granite": {}, "SmolLM3": {}, "DeepseekV3": dict(
        num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1, v_head_dim=8,
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        first_k_dense_replace=1, n_shared_experts=1, **MOE)}
LONGROPE = dict(rope_type="longrope", rope_theta=1e4, factor=8.0, long_factor=[8.0] * 4,
                short_factor=[1.0] * 4, original_max_position_embeddings=32)
STATE, NONE = ("recurrent state", {}), ("attention interface", {})
REFUSED = {
    "Mamba": STATE, "Rwkv": STATE, "Jamba": STATE, "Bloom": NONE, "Mpt": NONE,
    "Falcon": NONE, "StableLm": NONE, "Bart": ("encoder-decoder|attention interface", {}),
    "Bert": ("not causal", {}), "GPTJ": ("ragged batch", {}), "Doge": ("of its own", {}),
    "Phimoe": ("", dict(num_local_experts=4, sliding_window=8)),
    "Nemotron": ("of its own", {}), "Phi3": ("longest request", dict(rope_parameters=LONGROPE)),
    "Qwen2Moe": ("window of its own", dict(
        use_sliding_window=True, sliding_window=8, num_experts=4, **MOE)),
    "Gemma2": ("softcap", dict(sliding_window=8, query_pre_attn_scalar=8)),
    "GptOss": ("s_aux", dict(sliding_window=8, num_local_experts=4, **MOE))}

def family(name, **changes):
    odd = name in ("Falcon", "Phimoe", "Doge")
    tiny = {k: v for k, v in TINY.items() if not odd or k != "head_dim"}
    config = getattr(transformers, name + "Config")(**{**tiny, **changes})
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for w in model.parameters():
            w.mul_(4 if w.ndim > 1 else 1)
    model.generation_config.eos_token_id = None
    return model

@pytest.mark.parametrize("name", WORKS)
def test_families_work_to_the_token(name):
    """A window that is not honoured, or another scale, changes text after 8 tokens."""
    target, prompts = family(name, **WORKS[name]), prompts_of(11, 3, 6)
    out = write(target, noisy(target, 0.05), prompts, 20, 3, max_batch_size=2)
    assert out.tokens == greedy(target, prompts, 20)
    ids = torch.tensor(prompts[:1])
    got = av.SlotLM(target, 1, 11).next_logits(ids, np.array([11]), np.array([0]))[0]
    assert torch.allclose(got, target(ids).logits[0, -1], atol=1e-5)

@pytest.mark.parametrize("name", REFUSED)
def test_families_are_refused_by_name(name):
    """What can't run as a ragged batch must say so at once, and not run wrong."""
    why, changes = REFUSED[name]
    model = family(name, **changes)
    for pair in ((model, llama()), (llama(), model)):
        with pytest.raises((ValueError, NotImplementedError), match=f"{name}.*({why})"):
            write(*pair, [[1, 2]], 9, plan="fixed")

def test_layers_that_hide_what_they_attend_to_are_refused():
    """A count or mixing of a layer's own would be ignored: a wrong text."""
    counting = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(
        **{**TINY, "pad_token_id": 0}, intermediate_size_mlp=64, num_local_experts=2,
        layer_types=["full_attention"] * 2, no_rope_layers=[0, 1])).eval()
    mixing, deaf = llama(num_hidden_layers=3), llama()
    mixer = mixing.model.layers[1].self_attn = torch.nn.Module().eval()
    mixer.forward = lambda hidden_states, **kwargs: (hidden_states.cumsum(1), None)
    deaf.__class__ = type("Deaf", (LlamaForCausalLM,), {
        "forward": lambda model, logits_to_keep, **kw: LlamaForCausalLM.forward(model, **kw)})
    for model, message in ((counting, "its layers count"), (deaf, "all logits"),
                           (mixing, "layers without attention")):
        lm = av.SlotLM(model, 1, 9)
        for _ in range(2):  # a second try is refused, too
            with pytest.raises(NotImplementedError, match=f"(LM|Deaf) .*{message}"):
                lm.next_logits(torch.zeros(1, 9).long(), np.array([2]), np.array([0]))

def test_an_error_in_mid_run_is_not_called_a_wrong_family():
    """Only a first pass can show that a model doesn't fit: other errors, and running out
    of memory, come out as they are."""
    def read(lm, forward):
        with mock.patch.object(lm.head, "forward", forward):
            lm.commit(np.array([0]), np.array([0]))  # a new request: nothing is cached
            lm.next_logits(torch.zeros(1, 9).long(), np.array([2]), np.array([0]))

    lm = av.SlotLM(llama(), 1, 9)
    with pytest.raises(torch.OutOfMemoryError):
        read(lm, mock.Mock(side_effect=torch.OutOfMemoryError))
    read(lm, lm.head.forward)
    with pytest.raises(RuntimeError, match="^mat1 and mat2"):
        read(lm, lambda hidden: hidden @ torch.zeros(3, 3))


# ---- Refusals.
def refused(call, message):
    """Is `call` refused by a ValueError, before any module ran?"""
    with mock.patch("torch.nn.Module.__call__", side_effect=AssertionError("it ran")):
        with pytest.raises(ValueError, match=message):
            call()

def llama_with(head=None, trains=False):
    model = llama()
    model.lm_head = head.eval() if head else model.lm_head
    model.model.layers[1].train(trains)
    return model

HEADLESS, ODD = (llama_with(head) for head in (
    torch.nn.Sequential(torch.nn.Linear(32, 64)), torch.nn.Linear(32, 70)))
BAD = [(name, value, rf"{name}.*{end}") for name, cases in dict(
    prompts=[([[1], []], r"\[1\].*got 0"), ([[64]], r"\[0\].*63.*64"), (None, "None"),
             ("text", "'text'"), (torch.tensor([1, 2]), "tensor"), ([3], r"\[0\].*3"),
             (["text"], r"'text'"), ([[-1]], "-1"), ([[1.0]], "1.0"), ([[True]], "True")],
    max_new_tokens=[(-1, "-1"), ([1, 2], "2 for 1"), ([[1]], r"\[1\]"), (None, "None")],
    num_speculative_tokens=[(-1, "-1"), (5000, "1000, got 5000"), ("2", "'2'")],
    max_batch_size=[(0, "0"), (1.5, "1.5")], on_step=[(3, "3")],
    temperature=[(-0.1, "-0.1"), (None, "None"), (math.nan, "nan"), (math.inf, "inf"),
                 (np.complex64(1), "1")], plan=[("joint", "joint")],
    top_p=[(0, "0"), (1.1, "1.1"), (math.nan, "nan")], top_k=[(-1, "-1"), (2.5, "2.5")],
    eos_token_id=[("</s>", "</s>"), (64, "0..63.*64"), ([1, 2.0], r"\.0")],
    estimator=[(av.AcceptanceEstimator(3), "K = 7.*3"), (0, "0")], cost=[({1: 2}, "{1: 2}")],
    seed=[("x", "'x'"), (-1, "-1"), (True, "True")],
    target=[("gpt2", "str"), (llama().train(), "training mode"), (ODD, "70.*64"),
            (llama().model, "no head"), (HEADLESS, "no head")],
    drafter=[(None, "NoneType"), (llama_with(trains=True), "training mode"),
             (llama().to("meta"), "meta")]).items() for value, end in cases] + [
    ("drafter", llama(max_position_embeddings=4), r"prompts\[0\].*4 tokens.*2 and 9$")]

@pytest.mark.parametrize("name, value, message", BAD)
def test_bad_input_is_refused_by_name_and_value(name, value, message):
    """Nothing may be changed or ignored in silence, and nothing run before a check."""
    good = dict(target=llama(), drafter=llama(), prompts=[[1, 2]], max_new_tokens=9)
    refused(lambda: av.generate(**{**good, name: value}), message)

def test_settings_that_are_not_here_are_refused_or_not_read():
    """A penalty that is ignored gives another text than was asked for (F31)."""
    target, drafter = llama(), noisy(llama(), 0.1)
    want = greedy(target, [[1, 2]], 20)
    with pytest.raises(TypeError, match="repetition_penalty"):
        write(target, drafter, [[1, 2]], 9, repetition_penalty=2.0)
    target.generation_config.update(repetition_penalty=9.0, eos_token_id=want[0][4])
    assert write(target, drafter, [[1, 2]], 20).tokens == want

def add(prompt=(1,), new=3, *, request=0, times=1, B=2, K=2):
    decoder = decoder_of(llama(), llama(), B, 20, K, plan="fixed")
    for _ in range(times):
        decoder.add(request, prompt, new)
    return decoder

def measure(prompts=((1,),), *, busy=False, K=2, **options):
    av.measure_costs(add(K=K, times=int(busy)), prompts, **options)

SLOTS = functools.partial(av.SlotLM, num_slots=1, max_length=9)

@pytest.mark.parametrize("call, name, value, message", [
    (add, "prompt", [], "request 0.* 0 and 3"), (add, "new", 0, "max_new_tokens.* 0$"),
    (add, "new", 20, "1 and 20.*2 slots of 20"), (add, "times", 3, "for 0 slots"),
    (add, "prompt", [64], "prompt.*64"), (add, "request", -1, "request.*-1"),
    (add, "B", 0, "batch.*0"), (measure, "repeats", 0, ", 0, "),
    (measure, "busy", True, "idle"), (measure, "K", 0, "drafts.*got 0"),
    (measure, "prompts", [], r"prompts.*\[\]"), (measure, "prompts", [[1], []], r"\[\]"),
    (measure, "prompts", [[99]], "prompt.*99"), (SLOTS, "model", None, "NoneType"),
    (SLOTS, "model", HEADLESS, "no head")])
def test_the_parts_refuse_too(call, name, value, message):
    """What is reached past `generate` is not checked by it."""
    refused(lambda: call(**{name: value}), message)


# ---- Measuring, memory.
def record_steps(monkeypatch):
    """[(lengths, slots in use, drafts of each)] of all steps that are run."""
    seen, step = [], av.Decoder.step

    def record(decoder):
        active = decoder.request >= 0
        drafts = (decoder.ends - decoder.lengths)[active] - 1
        seen.append((*decoder.lengths, active.sum(), *drafts[:1]))
        return step(decoder)

    monkeypatch.setattr(av.Decoder, "step", record)
    return seen

def test_costs_are_the_median_of_the_repeats_at_the_shapes_that_run(monkeypatch):
    """A hiccup, or a warm-up round, that is counted leads to wrong budgets for a run.

    A clock of our own moves by 3 ms a pass of the target and .5 a token, 2 and .25 of
    the drafter, times .1 in the first round, 1.1 and .9 in others; once by 500 ms more."""
    now, seen, target = [0.0], record_steps(monkeypatch), llama()
    drafter, estimator = noisy(target, 0.1), av.AcceptanceEstimator(8)

    def clock(ms, token_ms):
        def hook(module, args, out):
            rounds = sum(x[4:] == (4, 0) for x in seen)
            share = {1: 0.1, 3: 1.1, 4: 0.9}.get(rounds, 1)
            now[0] += 1e-3 * share * (ms + token_ms * args[0].numel())
            now[0] += 0.5 * (rounds == 3 and seen[-1][4:] == (4, 2))
        return hook

    monkeypatch.setattr(av, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    target.model.embed_tokens.register_forward_hook(clock(3, 0.5))
    drafter.model.embed_tokens.register_forward_hook(clock(2, 0.25))
    eos = [*range(64)]  # which would end each step's drafts
    decoder = decoder_of(target, drafter, 4, 60, 8, estimator=estimator, eos_token_ids=eos)

    before = decoder.generator.get_state()
    cost = av.measure_costs(decoder, [np.arange(1, 6), torch.tensor([7] * 9)], repeats=3)
    assert torch.equal(decoder.generator.get_state(), before) and estimator.steps == 0
    assert decoder.plan == "adaptive" and decoder.cost is None
    shapes = [x[4:] for x in seen]
    assert shapes[:9] * 4 == shapes and {*shapes} == {
        (1, 0), (2, 0), *((4, d) for d in (0, 1, 2, 3, 5, 7, 8))}
    depths, sizes = np.array([1, 2, 3, 5, 7, 8]), np.array([1, 2, 4, 8, 12, 16, 24, 36])
    assert np.allclose(cost.draft_ms(depths), depths * (2 + 0.25 * 4))
    assert np.allclose(cost.verify_ms(sizes), 3 + 0.5 * sizes)
    assert {x[:4] for x in seen} == {(5, 20, 35, 51)}  # shortest prompt to what fits
    decoder.target.logits = lambda *args: 1 / 0
    with pytest.raises(ZeroDivisionError):
        av.measure_costs(decoder, [[1]])
    assert decoder.step() is None  # what is measured must not stay in the slots

@pytest.mark.parametrize("limit", [300, 100_000])
def test_costs_are_measured_within_a_bounded_context(limit, monkeypatch):
    """A measurement up to max_new_tokens takes half a minute and gigabytes."""
    target, seen = llama(max_position_embeddings=100_000), record_steps(monkeypatch)
    decoder = decoder_of(target, noisy(target, 0.1), 2, limit, 3)
    av.measure_costs(decoder, [[1] * 400, [2] * 30], repeats=1)
    assert {x[:2] for x in seen} == {(30, av.CONTEXT)}
    for lm in decoder.target, decoder.drafter:
        assert lm.kv[0][0].shape[1] <= 2 * (av.CONTEXT + 4)

def test_a_request_that_gave_nan_leaves_none_in_its_slot():
    """What is void in a cache is masked, but 0 times nan is nan: a slot would be lost."""
    model = llama()
    model.model.embed_tokens.weight.data[13] = math.nan
    decoder = decoder_of(model, model, 2, 60, 3, plan="fixed", temperature=0)
    decoder.add(0, [1, 2, 13, *range(3, 11)], 9)
    decoder.add(1, [*range(20, 50)], 9)
    with pytest.raises(FloatingPointError):
        decoder.step()
    decoder.request[0] = -1
    decoder.add(2, [1, 2, 3], 9)
    while decoder.step():
        pass
    assert [decoder.tokens[0, 3:12].tolist()] == greedy(model, [[1, 2, 3]], 9)

def test_memory_and_state_do_not_grow():
    """A list kept for each step (60 kB in 30) or a hook left on the model grows (F44)."""
    target, sizes = llama(), []
    decoder = decoder_of(target, noisy(target, 0.1), 4, 8, 3, seed=0, cost=stairs())
    requests = ((i, [i % 16], 6) for i in itertools.count())
    tracemalloc.start()
    for _ in range(4):
        for _ in range(30):
            av.refill(decoder, requests)
            decoder.step()
        decoder.request[:] = -1
        av.measure_costs(decoder, [[1, 2]], repeats=1)
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[3] - sizes[2] < 20_000 and decoder.target.kv[0][0].shape[1] == 8


# ---- The study's statistics.
def test_auc_and_ece_by_hand():
    """Ties broken by memory, a lost bin at 1, or a mean over bins would shift them.

    By hand: in the bin at .8 .84 is predicted and 2/3 of 3 seen, at .2 .2 and 0, at 1 1
    and 1. So (3 |.84 - 2/3| + .2 + 0) / 5 = .144."""
    seen, predicted = np.array([1, 1, 0, 0, 1]), np.array([0.8, 0.88, 0.84, 0.2, 1])
    assert demo.ece(seen, predicted) == pytest.approx(0.144)
    rng = np.random.default_rng(0)
    seen, score = rng.random(200) < 0.6, rng.integers(0, 12, 200) / 3
    above = np.sign(score[seen][:, None] - score[~seen])
    assert demo.auc(seen, score) == pytest.approx((above.mean() + 1) / 2)

def test_logistic_fit_is_the_minimum():
    """A fit that stops early would be the optimum that the online fit is measured by."""
    rng = np.random.default_rng(1)
    x = demo.design(3 * rng.standard_normal(500), rng.integers(0, 3, 500), 3)
    seen = rng.random(500) < demo.sigmoid(x @ [0.7, 1.0, -0.5, 0.2])
    rest = demo.sigmoid(x @ demo.fit_logistic(x, seen)) - seen
    assert np.abs(x.T @ rest).max() < 1e-4
    # Of two groups 3 of 4 and 1 of 2 are accepted; separable labels stay finite.
    groups, seen = np.eye(2)[[0, 0, 0, 0, 1, 1]], np.array([1, 1, 1, 0, 1, 0])
    assert demo.fit_logistic(groups, seen) == pytest.approx([math.log(3), 0], abs=1e-5)
    assert 3 < demo.fit_logistic(np.array([[-1.0], [1]]), np.array([0, 1]), 1e-3)[0] < 20

def test_rules_that_look_at_the_drawn_token_are_biased():
    """The study must show what the worked examples say: .4 and .75, or .5 in use."""
    for rule, (law, _) in demo.biased_rules().items():
        want = 0.5 if "in use" in rule else 0.75 if "budget" in rule else 0.4
        assert law[0] == pytest.approx(want) == 1 - law[1], rule


# ---- The demo's pairs, and the README.
def test_a_pair_in_folders_is_loaded_and_a_broken_one_is_refused(tmp_path, monkeypatch):
    """A weight that the file lacks would be made up at random: a demo of nothing."""
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    for name in "target", "draft", "less", "other":
        model = llama(name == "draft", vocab_size=len(tokenizer))
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "lines").write_bytes("\ufeffab\n\ncd\n".encode())
    monkeypatch.chdir(tmp_path)

    def load(target):
        monkeypatch.setattr(sys, "argv", ["demo.py", "--target", f"./{target}", "--draft",
                                          "./draft", "--prompts", "lines"])
        return demo.find_pair(demo.arguments(), CPU)

    pair = load("target")
    assert pair.prompts == [tokenizer(line).input_ids for line in ("ab", "cd")]
    for seed, model in enumerate((pair.target, pair.drafter)):
        want = llama(seed, vocab_size=len(tokenizer)).state_dict()
        assert all(torch.equal(w, want[k]) for k, w in model.state_dict().items())
    weights = pair.target.state_dict()
    weights.pop("model.layers.1.mlp.up_proj.weight")
    pair.target.save_pretrained(tmp_path / "less", state_dict=weights)
    transformers.ByT5Tokenizer(extra_ids=3).save_pretrained(tmp_path / "other")
    for name, message in (("none", "cannot load"), ("other", "vocabularies differ"),
                          ("less", "lacks weights: model.layers.1.mlp.up_proj.w")):
        with pytest.raises(SystemExit, match=message):
            load(name)

def test_weights_in_a_changed_cache_file_are_not_used(tmp_path, monkeypatch, capsys):
    """Weights that are changed, not finite or of another shape must not be what runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, bad = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    before, file = copy.deepcopy(model.state_dict()), demo.cache_folder() / "x.pt"
    assert not demo.restore("x", bad) and not capsys.readouterr().out
    demo.keep("x", model)
    assert demo.restore("x", bad) and torch.equal(bad.weight, model.weight)

    def is_refused():
        kept = demo.restore("x", model)
        return not kept and "training anew" in capsys.readouterr().out

    kept = torch.load(file, weights_only=True)
    kept["weights"]["bias"][0] += 1
    torch.save(kept, file)
    assert is_refused()
    file.write_bytes(b"half a file")
    assert is_refused()
    with torch.no_grad():
        bad.bias[0] = math.nan
    for weights in (bad, torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 3)):
        demo.keep("x", weights)
        assert is_refused()
    assert all(torch.equal(w, before[k]) for k, w in model.state_dict().items())

README = pathlib.Path(av.__file__).with_name("README.md").read_text(encoding="utf-8")

def test_the_readme_runs():
    """A README whose code does not run, or that names tests which don't exist, is wrong."""
    code, here = re.findall(r"```python\n(.*?)```", README, re.S), pathlib.Path(av.__file__)
    assert {*re.findall(r"`(test_\w+)`", README)} <= {*globals()}
    subprocess.run([sys.executable, "-c", "\n".join(code)], check=True, cwd=here.parent)

def test_the_picture_in_the_readme():
    """A budget in the README that can't be redone by hand teaches nothing."""
    rows = re.findall(r"^  request \d+ +((?:0\.\d\d +){6}0\.\d\d)$", README, re.M)
    best = sorted((float(s) for row in rows for s in row.split()), reverse=True)
    draft = float(re.search(r"to draft 7: ([\d.]+)", README)[1])
    verify = {int(n): float(ms) for n, ms in re.findall(r"T\((\d+)\) = ([\d.]+)", README)}
    last = re.search(r"^ +(\d+) +([\d.]+) .* ([\d.]+) +<- the budget", README, re.M)
    budget, tokens, rate = map(float, last.groups())

    def per_ms(b):
        ms = draft + np.interp(len(rows) + b, [*verify], [*verify.values()])
        return (len(rows) + sum(best[:b])) / ms

    assert len(rows) == 4 and max(range(len(best) + 1), key=per_ms) == budget
    assert per_ms(int(budget)) == pytest.approx(rate, abs=1e-3)
    assert tokens == pytest.approx(len(rows) + sum(best[:int(budget)]), abs=0.02)

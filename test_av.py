# SPDX-License-Identifier: MIT
"""The proofs. Each test says what would break, and compares with something that does not
depend on av.py: exact enumeration, brute force, a fit in float64, `model.generate`, a
forward without a cache. Tests that draw state how often a right implementation fails them
(FALSE_ALARM each). First come those that hold exactness.    pytest -q test_av.py
"""
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
    device = torch.device("cpu")

    def __init__(self, law, V):
        self.law, self.vocab_size = law, V

    def commit(self, slots, lengths):
        self.asked = []  # how many rows, by each call of a step

    def logits(self, tokens, lengths, slots, num_verified):
        texts = [tokens[s, :n + i].tolist() for s, n, k in zip(slots, lengths, num_verified)
                 for i in range(k + 1)]
        self.hidden = torch.tensor([[sum((t + 1) * 7.0**i for i, t in enumerate(text))]
                                    for text in texts])  # which says what the text is
        return torch.tensor(np.array([self.law(tuple(text)) for text in texts])).log()

    def next_logits(self, tokens, lengths, slots, position, depth):
        self.asked.append(len(slots))
        return self.logits(tokens, lengths, slots, [0] * len(slots))


class Seeing(Table):
    """A drafter with `see`, which checks that it is given the state it should start from."""

    def see(self, slots, hidden):
        self.seen = torch.zeros(99, 1)
        self.seen[slots] = hidden

    def next_logits(self, tokens, lengths, slots, position, depth):
        logits = super().next_logits(tokens, lengths - (position == 0), slots, position, depth)
        assert position or (self.hidden == self.seen[slots]).all()
        return logits if position else self.logits(tokens, lengths, slots, [0] * len(slots))


def random_law(seed, V, target=None):
    """A law of its own after each text, with zeros; often near the target's, or just that."""
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
    logits = hf.TopKLogitsWarper(int(top_k))(None, logits) if top_k else logits
    return (hf.TopPLogitsWarper(float(top_p))(None, logits) if top_p < 1 else logits).softmax(-1)


# ---- The law of what is written, by enumeration. ------------------------------------


class Oracle:
    """Walks through all outcomes of a random program, depth first, with their weights."""

    def __init__(self):
        self.path, self.at, self.weight = [], 0, 1.0  # path: [choice, choices] each

    def choose(self, weights):
        options = [i for i, w in enumerate(weights) if w > 0]
        if self.at == len(self.path):
            self.path.append([0, len(options)])
        pick = options[self.path[self.at][0]]
        self.at, self.weight = self.at + 1, self.weight * weights[pick] / sum(weights)
        return pick

    def next(self):
        while self.path and self.path[-1][0] + 1 == self.path[-1][1]:
            self.path.pop()
        for last in self.path[-1:]:
            last[0] += 1
        self.at, self.weight = 0, 1.0
        return self.path


def laws(idea, make, steps=1):
    """{texts of all requests: probability} of what the real Decoder writes in some steps.

    Draws of tokens branch over all of them. The uniform of a draft branches in two, just
    below and just above p/q: any other threshold in `verify` would show in one of them."""
    oracle, total, real, seen = Oracle(), {}, idea.verify, []

    def sample(weights, generator=None):
        return torch.tensor([oracle.choose(row) for row in weights.tolist()])

    def verify(p, q, drafts, num_verified, generator):
        u, row = torch.zeros(drafts.shape), 0
        for r, n in enumerate(num_verified.tolist()):
            for i, x in enumerate(drafts[r, :n]):
                share = min(1.0, (p[row + i, x] / q[r, i, x]).item())
                rejected = oracle.choose([share, 1 - share])
                u[r, i] = min(share * (1 + (1e-9 if rejected else -1e-9)), 1 - 2**-53)
                if rejected:
                    break
            row += n + 1
        seen.append(num_verified.tolist())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", lambda *shape, **kw: u[:shape[0], :shape[1]])
            return real(p, q, drafts, num_verified, generator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(idea, "sample", sample)
        patch.setattr(idea, "verify", verify)
        while True:
            decoder = make()
            texts = [()] * int((decoder.request >= 0).sum())
            for _ in range(steps):
                if (done := decoder.step()) is not None:
                    for r, row, n in zip(done.requests, done.tokens, done.num_committed):
                        texts[r] += tuple(row[:n].tolist())
            key = tuple(texts)
            total[key] = total.get(key, 0.0) + oracle.weight
            if not oracle.next():
                return total, seen


def complete(text, law, prompt, length, end=()):
    """{whole text: probability} if the target itself goes on to `length` or an end token."""
    whole, open_ = {}, {tuple(text): 1.0}
    while open_:
        text, w = open_.popitem()
        if len(text) >= length or set(text) & set(end):
            whole[text] = w
        else:
            p = law((*prompt, *text))
            open_.update({(*text, t): w * p[t] for t in range(len(p)) if p[t] > 0})
    return whole


def error(total, law, prompts, lengths, end=()):
    """Largest error of a probability, of what was written and completed by the target."""
    got, want = {}, {}
    whole = functools.cache(lambda r, text: complete(text, law, prompts[r], lengths[r], end))
    for texts, w in [*total.items(), (((),) * len(prompts), -1.0)]:
        for ends in itertools.product(*(whole(r, text).items() for r, text in enumerate(texts))):
            key = tuple(text for text, _ in ends)
            got[key] = got.get(key, 0.0) + w * math.prod(p for _, p in ends)
    return max(map(abs, got.values()))


EVEN = lambda text: np.array([0.5, 0.5])  # noqa: E731
SETTINGS = (dict(), dict(temperature=0.6), dict(top_p=0.8), dict(temperature=1.7, top_k=2),
            dict(temperature=0))


def start(idea, drafter, P, cost, prompts, K, new=9, slope=1.0, **options):
    """A decoder whose round has begun, with confidence = q_max if the slope is 1."""
    estimator = idea.AcceptanceEstimator(K, refit_every=100, slope=slope, intercept=0.0)
    estimator.steps = 1
    decoder = idea.Decoder(Table(P, drafter.vocab_size), drafter, max_batch_size=len(prompts),
                           max_length=12, num_speculative_tokens=K, estimator=estimator,
                           cost=idea.CostTable({1: 1e-9}, cost), seed=0, **options)
    for r, prompt in enumerate(prompts):
        decoder.add(r, list(prompt), int(np.broadcast_to(new, len(prompts))[r]))
    return decoder


@pytest.mark.parametrize("drafter, cases", [(Table, 42), (Seeing, 24)])
@pytest.mark.parametrize("plan", ["fixed", "verification", "adaptive"])
def test_each_step_writes_exactly_the_target_law(plan, drafter, cases, idea):
    """Any decision, ratio, residual or row that is wrong shifts one of 198 exact laws.

    All draws for one or two requests are enumerated through the real `Decoder.step`; a
    drafter that sees takes two steps. Nothing is drawn, so there is no false alarm."""
    decided, rng, sees = set(), np.random.default_rng(0), drafter is Seeing
    for case in range(cases):
        R, V, K = ((1, 3, 2), (1, 2, 3), (2, 2, 1 + (case % 2 or not sees)))[case % 3]
        law, end, prompts = SETTINGS[case % 5], [0] * (case % 4 == 1), [(0,), (1, 1)][:R]
        P, new = random_law(case, V), rng.integers(1 + sees, K + 3, R)
        Q = random_law(1000 + case, V, P)
        stairs = (rng.integers(1, 5, R * (K + 1)).cumsum() / 3 + 2).tolist()
        expected, explore = rng.random((R, K)), case % 7 == 0

        def make():
            decoder = start(idea, drafter(Q, V), P, dict(enumerate(stairs, 1)), prompts, K, new,
                            plan=plan, eos_token_ids=end, **law)
            decoder.estimator.refit_every = 1 if explore else 100
            decoder.expected[:] = expected
            return decoder

        total, seen = laws(idea, make, steps=1 + sees)
        decided |= {tuple(n) for n in seen}
        warped = functools.cache(lambda text: transformers_law(
            torch.tensor(P(text)[None]).log(), **law)[0].tolist())
        assert error(total, warped, prompts, new, end) < 1e-12, case
    assert len(decided) >= 8, "the plan never trimmed: the test would prove nothing"


def first_is(token, total):
    return sum(w for (text, *_), w in total.items() if text[0] == token)


@pytest.mark.parametrize("feature, want", [("q(x)", 0.4), ("q_max", 0.5)])
def test_worked_example_a_feature_of_the_drawn_token_biases_the_text(feature, want, idea):
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
def test_worked_example_a_budget_from_this_step_biases_the_text(ahead, want, idea):
    """A budget from the survivals of this step, not of earlier ones, makes P(a) .75, not .5.

    Spec 7.2: p = q = (1/2, 1/2), but after a the next law of the drafter is (.99, .01).
    Costs 1, 1.9, 1.9 for 0, 1, 2 drafts. After a the survivals .5, .495 make 2 drafts the
    best budget (1.995 / 1.9), and a is kept; after b .5, .25 make it 0, and the target
    draws anew: 1/2 + 1/2 * 1/2 = .75."""
    trim, cost = idea.trim, {1: 1.0, 2: 1.9, 3: 1.9, 4: 2.8}
    table = idea.CostTable({1: 1e-9}, cost)
    if ahead:
        idea.trim = lambda s, _: trim(s, idea.draft_budget(s, table)[1])
    Q = Table(lambda text: np.array([0.99, 0.01] if text == (0, 0) else [0.5, 0.5]), 2)
    for expected in (0.5, 0.9):  # of earlier steps, whatever it is
        def make():
            decoder = start(idea, Q, EVEN, cost, [(0,)], 2, plan="verification")
            decoder.expected[:] = expected
            return decoder
        total, seen = laws(idea, make)
        assert first_is(0, total) == pytest.approx(want, abs=1e-12)
        assert ahead or {n for n, in seen} == {0 if expected == 0.5 else 2}


@pytest.mark.parametrize("reads", [True, False])
def test_worked_example_a_drafter_that_reads_another_request_biases_the_text(reads, idea):
    """A law of request 2 that looks at the draft of request 1 makes its P(b) .75, not .5.

    p = q = (1/2, 1/2) for draft 1 of request 1: survival .5. Request 2 has .9, and then .9
    if request 1 drew a, else .5: survival .81 or .45. Of budget 2, an a is outranked, not
    verified and drawn anew; a b is kept: P(b) = 1/2 * 1/2 + 1/2."""
    class Reading(Table):
        def next_logits(self, tokens, lengths, slots, position, depth):
            sure = position == 0 or not reads or tokens[0, 1] == 0
            laws = [[0.5, 0.5], [0.9, 0.1] if sure else [0.5, 0.5]]
            return torch.tensor(laws)[slots].log()

    total, seen = laws(idea, lambda: start(
        idea, Reading(None, 2), EVEN, {2: 1.0, 4: 1.0001, 5: 99.0}, [(0,), (0,)], 2,
        plan="verification"))
    assert first_is(1, total) == pytest.approx(0.75 if reads else 0.5, abs=1e-12)
    assert all(sum(n) == 2 for n in seen)



# ---- 1. Laws. -----------------------------------------------------------------------


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
    """A different order or edge of temperature, top-k, top-p would make p another law."""
    logits = torch.randn(7, 500, generator=torch.Generator().manual_seed(0)) * 2
    for law in itertools.product((0.3, 1.0, 2.0), (0, 1, 5, 499, 600), (0.05, 0.5, 0.95, 1.0)):
        want = transformers_law(logits.double(), *law)
        assert torch.allclose(av.warp(logits, *law).double(), want, atol=1e-6), law
        assert torch.allclose(av.warp(logits[0], *law).double(), want[0], atol=1e-6), law
    odd = np.float32(0.7), np.uint8(5), np.float32(0.5)
    assert torch.allclose(av.warp(logits, *odd), transformers_law(logits, *odd), atol=1e-6)
    assert torch.equal(av.warp(logits, 0), transformers_law(logits, 0))
    gone = torch.tensor([0.0, -1, -math.inf])
    assert torch.allclose(av.warp(gone), gone.softmax(-1))
    # What ties with the last token kept is kept; half is reached by one token: one is kept.
    logits = torch.tensor([[0.4, 0.2, 0.2, 0.2], [0.1, 0.1, 0.4, 0.4]]).log()
    want = torch.tensor([[0.4, 0.2, 0.2, 0.2], [0, 0, 0.5, 0.5]])
    for law in dict(top_k=2), dict(top_p=0.5):
        assert torch.allclose(av.warp(logits, **law), want), law
    assert av.warp(torch.tensor([0.25, 0.5, 0.25]).log(), top_p=0.5).tolist() == [0, 1, 0]
    for bad in (dict(temperature=-1), dict(temperature=math.nan), dict(temperature=True),
                dict(top_k=-1), dict(top_k=2.0), dict(top_p=0), dict(top_p=1.1)):
        with pytest.raises(ValueError, match=next(iter(bad))):
            av.warp(logits, **bad)


@pytest.mark.parametrize("V", [1025, 4099])
def test_a_large_vocabulary_is_cut_and_drawn_as_a_small_one(V):
    """Sums of many float32 would cut or draw another law than the one that was asked for.

    Against transformers in float64; 8,000 draws over 8 cells, false alarm 1e-6 per V."""
    generator = torch.Generator().manual_seed(V)
    logits = torch.randn(12, V, generator=generator) * torch.linspace(0.1, 9, 12)[:, None]
    for law in (dict(top_p=0.95), dict(top_p=0.3, temperature=0.7), dict(top_k=700, top_p=0.9)):
        want, got = transformers_law(logits.double(), **law), av.warp(logits, **law)
        assert (want > 0).sum(-1).max() > 64 > (want > 0).sum(-1).min()
        # An edge that rounding moves by a token moves at most that token's mass, twice.
        least = want.where(want > 0, 1).amin(-1).clamp(max=5e-4)
        assert ((got - want).abs().sum(-1) < 2 * least + 1e-5).all()
        draws = torch.stack([av.sample(got, generator) for _ in range(20)], 1)
        assert (got.gather(1, draws) > 0).all()
    law = torch.rand(V, generator=generator) ** 4 * torch.linspace(0, 1, V) ** 2
    cells = torch.arange(V) * 8 // V
    draws = av.sample(law.expand(8_000, V), generator)
    want = torch.zeros(8).index_add(0, cells, law / law.sum()).double().numpy()
    assert chi_square(torch.bincount(cells[draws], minlength=8).numpy(), want) > FALSE_ALARM


def test_the_law_of_many_tokens_sums_to_one():
    """Shares that lack 5e-4, as a float32 softmax of 151,936, are compared by their values."""
    logits = torch.zeros(3, 151_936)
    logits[torch.arange(3), torch.tensor([0, 7, 9])] = torch.tensor([14.0, 15.0, 10.0])
    exact = logits.double().softmax(-1)
    assert ((av.warp(logits) - exact) / exact).abs().max() < 2e-6
    slope = torch.linspace(0, 0.1, 151_936).index_fill(0, torch.tensor([7]), 15.0)
    ordered = slope.double().softmax(-1).sort(descending=True).values
    nucleus = (ordered.cumsum(-1) - ordered < 0.97).sum()  # 52,405; of the raw softmax 53,418
    assert abs((av.warp(slope, top_p=0.97) > 0).sum() - nucleus) < 10
    assert torch.allclose(av.logit_q_max(logits).double(), exact.amax(-1).logit(), atol=1e-5)


@pytest.mark.parametrize("temperature", [1e-9, 1e-40, 1e-300, np.float32(1e-30)])
def test_tiny_settings_are_greedy_not_nan(temperature):
    """To divide before the maximum is taken off gives inf - inf; a top_p of 0 gives 0 / 0."""
    for scale in (1, 1e9):
        logits = torch.tensor([[3.0, 2, 1]]) * scale
        assert av.warp(logits, temperature).tolist() == [[1, 0, 0]]
        assert av.logit_q_max(logits, temperature).item() == av.MAX_LOG_ODDS
    for top_p in (1e-50, 1e-6):
        assert av.warp(torch.tensor([[1.0, 3.0, 2.0]]), top_p=top_p).tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("V", [6, 1500, 2048])
@pytest.mark.parametrize("u", [None, 0.0, 1.0])
def test_sample_draws_the_law_and_never_a_zero(V, u, monkeypatch):
    """A sum searched from the wrong side draws tokens of weight 0, at u = 0 or 1 above all.

    Weights need not sum to one. 20,000 draws, false alarm 1e-6 per V."""
    weights = torch.zeros(V)
    at = torch.tensor([1, 3, 4]) * (V // 6)  # a block of 512 between them is empty
    weights[at] = torch.tensor([1.0, 0.6, 0.4])
    if u is None:
        draws = av.sample(weights.expand(20_000, V), torch.Generator().manual_seed(0))
        assert chi_square(np.bincount(draws, minlength=V), weights / 2) > FALSE_ALARM
    else:
        monkeypatch.setattr(torch.Tensor, "uniform_", lambda x, generator=None: x.fill_(u))
        assert av.sample(weights[None]).item() == at[-int(u)]


# ---- 2. The lossless rule. ----------------------------------------------------------


@pytest.mark.parametrize("p, q, u, want", [
    ([0, 0, 1.0], [0.5, 0.5, 0], 0.0, 2),  # p(x) = 0 is rejected even at u = 0
    ([0.3, 0.5, 0.2], [0.3, 0.5, 0.2], 1 - 2.0**-53, 0),  # p = q is accepted at any u
    ([0, 1.0, 0], [0, 1.0, 0], 0.5, 1)])  # a forced rejection: no residual, so p
def test_verify_at_the_ends_of_the_uniform_and_of_the_residual(p, q, u, want, monkeypatch):
    """`u <= p/q` would accept what the target never says; a residual of 0/0 is token 0."""
    monkeypatch.setattr(torch, "rand", lambda *shape, **kw: torch.full(shape, u, dtype=kw["dtype"]))
    p, one = torch.tensor([p, p]), torch.tensor([1])
    accepted, token = av.verify(p, torch.tensor([[q]]), torch.tensor([[0]]), one)
    assert (0 if accepted else token.item()) == want


def test_verify_refuses_shapes_that_do_not_fit():
    """What broadcasts in silence would compare a draft with another draft's law."""
    right = [torch.full((5, 4), 0.25), torch.full((2, 3, 4), 0.25),
             torch.zeros(2, 3, dtype=torch.long), torch.tensor([1, 2])]
    accepted, token = av.verify(*right)
    assert accepted.tolist() == [1, 2] and token.shape == (2,)
    for i, bad in ((0, right[0][:1]), (0, right[0][:, :3]), (1, right[1][:1]),
                   (1, right[1][:, :2]), (1, right[1][0]), (2, right[2][:, :1]),
                   (2, right[2][:1]), (3, right[3][:1]), (3, right[3][:, None])):
        with pytest.raises(ValueError, match="must fit"):
            av.verify(*right[:i], bad, *right[i + 1:])


# ---- 3. The estimator. --------------------------------------------------------------


def test_feature_is_the_log_odds_of_the_largest_probability():
    """A feature of another law, or one that is infinite, would ruin the text or the fit.

    By hand: of a law (3/4, 1/4) it is log 3; at temperature 1/2 (9/10, 1/10), so log 9."""
    logits = torch.tensor([0.75, 0.25]).log()
    for temperature, odds in (1, 3), (0.5, 9), (0, 3), (np.float32(0.5), 9):
        assert av.logit_q_max(logits, temperature).item() == pytest.approx(math.log(odds))
    logits = torch.randn(4, 50, 9, generator=torch.Generator().manual_seed(0)) * 2
    for kind in torch.float32, torch.float64, torch.bfloat16:
        want = (logits.to(kind).double() / 0.7).softmax(-1).amax(-1).logit()
        got = av.logit_q_max(logits.to(kind), 0.7)
        assert got.dtype == torch.float32 and torch.allclose(got.double(), want, atol=1e-5)
    sure = torch.tensor([[500.0, 0, 0], [0, -math.inf, -math.inf], [3, 3, -math.inf]])
    assert av.logit_q_max(sure).tolist() == [av.MAX_LOG_ODDS, av.MAX_LOG_ODDS, 0]
    assert av.logit_q_max(torch.zeros(30_000)).item() == -av.MAX_LOG_ODDS


def theta_of(estimator):
    return np.append(estimator.slope, estimator.intercepts)


def test_which_drafts_have_a_label():
    """A label 0 for what was trimmed teaches that it is rejected; so it would stay trimmed.

    At feature 0 and intercept 0 the residual of a label is 1/2 - hit."""
    for verified, accepted, labels, hits in (
            (3, 1, [1, 1, 0, 0], [1, 0, 0, 0]),  # the rejection is the last label
            (2, 2, [1, 1, 0, 0], [1, 1, 0, 0]),  # what was not verified has none, not label 0
            (0, 0, [0, 0, 0, 0], [0, 0, 0, 0])):
        estimator = av.AcceptanceEstimator(4, intercept=0.0)
        estimator.observe(np.zeros((1, 4)), [verified], [accepted])
        assert estimator.sums[5].tolist() == labels
        assert estimator.sums[4] == pytest.approx(0.5 * np.array(labels) - hits)


def test_sums_and_refit_are_those_of_stored_rows():
    """Censoring off by one, or sums not cleared, differ from a loop over the stored rows.

    Three steps of float64 rows, then the damped Newton step of the full Hessian; twice."""
    rng, estimator = np.random.default_rng(0), av.AcceptanceEstimator(4, refit_every=3)
    for _ in range(2):
        theta, H, g, counts = theta_of(estimator), np.eye(5) * 1e-3, np.zeros(5), np.zeros(5)
        for step in range(3):
            f, n = rng.normal(1, 2, (16, 4)), rng.integers(0, 5, 16)
            a = np.minimum(n, (rng.random((16, 4)) < 1 / (1 + np.exp(-f))).cumprod(1).sum(1))
            f[np.arange(4) >= n[:, None]] = np.inf  # what was not verified may be anything
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
        assert not estimator.sums.any()
    before = theta_of(estimator)
    for _ in range(3):  # of two positions only: those behind have no labels and stay
        estimator.observe(np.ones((9, 2)), [2] * 9, [1] * 9)
    assert ((theta_of(estimator) != before) == [True, True, True, False, False]).all()


def test_refit_by_hand():
    """A wrong sign, ridge, damping or bound would show where all can be written out.

    f = 0, c = 1/2; 50 labels, 40 accepted: g = 25 - 40 = -15, H = 12.5. The step is
    15 / (12.5 + ridge), halved by damping, 50 / (50 + 50)."""
    estimator = av.AcceptanceEstimator(2, intercept=0.0, ridge=0.5, damping=50)
    estimator.observe(np.zeros((50, 2)), np.full(50, 1), np.array([1] * 40 + [0] * 10))
    for _ in range(2):  # a round without labels leaves everything where it is
        estimator.refit()
        assert theta_of(estimator) == pytest.approx([0.5, 15 / 13 * 0.5, 0.0])
    # 1,000 doubtful drafts, all accepted: the floor alone would allow a step of 1 / .05.
    estimator.observe(np.full((1000, 2), -10.0), np.full(1000, 1), np.ones(1000, int))
    estimator.refit()
    assert abs(theta_of(estimator) - [0.5, 15 / 26, 0]).max() <= av.MAX_FIT_STEP + 1e-9


def test_repeated_refits_reach_the_maximum_likelihood_fit():
    """A wrong sign, weight or join of feature and label stops short of the float64 optimum."""
    rng, K, estimator = np.random.default_rng(1), 3, av.AcceptanceEstimator(3, refit_every=1)
    f, true = rng.normal(1, 2, (6000, K)), np.array([0.6, -0.3, 0.1])
    hit = rng.random((6000, K)) < 1 / (1 + np.exp(-(0.7 * f + true)))
    n, a = np.full(6000, K), np.cumprod(hit, 1).sum(1)
    for _ in range(30):
        estimator.observe(f, n, a)
    keep = np.arange(K) <= a[:, None]
    X = np.concatenate([f[..., None], np.broadcast_to(np.eye(K), (6000, K, K))], -1)[keep]
    y, theta = (np.arange(K) < a[:, None])[keep], np.zeros(K + 1)
    for _ in range(30):  # the reference: plain Newton on all rows
        c = 1 / (1 + np.exp(-X @ theta))
        theta -= np.linalg.solve((X * (c * (1 - c))[:, None]).T @ X, X.T @ (c - y))
    assert np.allclose(theta_of(estimator), theta, atol=2e-3)
    want = 1 / (1 + np.exp(-(estimator.slope * f + estimator.intercepts)))
    assert np.allclose(estimator.predict(f), want, atol=1e-12)
    assert np.allclose(estimator.predict(torch.tensor(f[:, :2])), want[:, :2], atol=1e-12)


@pytest.mark.parametrize("feature", [0.0, 10.0, None])
@pytest.mark.parametrize("K", [1, 5])
def test_the_fit_survives_separable_labels(K, feature):
    """Labels that are all alike drive a plain Newton fit to infinity, and it never returns."""
    estimator, rng = av.AcceptanceEstimator(K, refit_every=1), np.random.default_rng(0)
    for accepted in (K, 0, K):
        for _ in range(200):
            f = rng.normal(2, 2, (8, K)) if feature is None else np.full((8, K), feature)
            estimator.observe(f, np.full(8, K), np.full(8, accepted))
            assert np.abs(theta_of(estimator)).max() < 20 and estimator.slope >= 0
        rate = estimator.predict(np.full((1, K), 2.0 if feature is None else feature))
        assert abs(rate[0, 0] - float(accepted > 0)) < 0.1


@pytest.mark.parametrize("K, taught", [*itertools.product((1, 7), (0, 1, 50))])
def test_one_surprise_among_a_hundred_sure_drafts_moves_little(K, taught):
    """Without a floor of the curvature one surprise moves an intercept by hundreds.

    Then survival is 0, nothing is verified, and nothing is learned again. The first edition
    bounded a refit by 1; with the bound of 3 no intercept may move by more than there: by
    .114 at most, from the start or after sure drafts that were all accepted."""
    estimator = av.AcceptanceEstimator(K, refit_every=1)
    f, n, a = np.full((100, K), 10.0), np.full(100, K), np.full(100, K)
    for _ in range(taught):
        estimator.observe(f, n, a)
    before, estimator.refit_every, a[0] = theta_of(estimator), 2**40, 0
    estimator.observe(f, n, a)
    cff, cf, c, rf, r, labels = estimator.sums.copy()
    estimator.refit()
    H = np.diag(np.append(cff.sum(), c) + 1e-3)
    H[0, 1:] = H[1:, 0] = cf
    labels = np.append(labels.sum(), labels)
    old = -np.linalg.solve(H, np.append(rf.sum(), r)) * labels / (labels + 50)
    old /= max(np.abs(old).max(), 1.0)
    moved = np.abs(theta_of(estimator) - before)[1:].max()
    assert moved <= np.abs(old[1:]).max() + 1e-9 and moved < 0.12


def test_a_slope_never_turns_negative_and_recovers():
    """A negative slope would rank the doubtful drafts first.

    Errors are beyond 5 standard deviations of 3,200 labels: false alarm below 1e-6."""
    estimator, rng = av.AcceptanceEstimator(1, refit_every=1), np.random.default_rng(0)
    for sign, rounds in ((-1, 50), (1, 100)):
        for _ in range(rounds):
            f = rng.normal(1, 2, (64, 1))
            hit = rng.random(64) < 1 / (1 + np.exp(-sign * 0.6 * f[:, 0]))
            estimator.observe(f, np.ones(64, int), hit.astype(int))
            assert estimator.slope >= 0
        if sign < 0:  # with a slope of 0 the intercept is the log-odds of .39
            assert abs(estimator.predict([[0.0]]) - 0.39) < 0.1 and estimator.slope < 0.1
    assert estimator.slope == pytest.approx(0.6, abs=0.2)


def test_the_estimator_refuses_what_does_not_fit():
    """A count out of range or a feature that is not finite would poison all later rounds."""
    estimator = av.AcceptanceEstimator(np.int64(3), slope=np.float32(0.5), damping=0)
    f = np.ones((2, 3))
    for bad in ((f, [1, 4], [0, 0]), (f, [1, 2], [0, -1]), (f, [1], [0]), (f, [1, 2], [[0], [0]]),
                (np.ones((2, 4)), [1, 2], [0, 0]), (f * math.nan, [1, 1], [0, 0]),
                (f * math.inf, [1, 1], [0, 0]), (f * 1e7, [1, 1], [0, 0]), (f, [1, 2], 0)):
        with pytest.raises(ValueError):
            estimator.observe(*bad)
    assert not estimator.sums.any() and estimator.steps == 0
    for name, values in dict(num_speculative_tokens=(0, True, 2.0), ridge=(0,), damping=(-1,),
                             refit_every=(0, np.float32(1)), slope=(-1, math.nan, np.True_),
                             intercept=(math.inf, "0")).items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                av.AcceptanceEstimator(**{"num_speculative_tokens": 3, name: value})


# ---- 4. Costs, budget, trim. --------------------------------------------------------


def test_costs_between_below_and_beyond_the_points():
    """A flat extension makes large batches look free; one hiccup must not poison the rest."""
    cost = av.CostTable({2: 1.0, 4: 3.0}, {4: 2.0, 16: 8.0, 20: 394.0, 24: 10.0})
    assert cost.draft_ms(np.arange(6)).tolist() == [0, 1, 1, 2, 3, 4]
    # The hiccup at 20 counts as the 10 of the larger size, and moves nothing else.
    sizes = np.array([1, 4, 10, 16, 18, 20, 24])
    assert cost.verify_ms(sizes).tolist() == [2, 2, 5, 8, 9, 10, 10]
    assert cost.verify_ms(48) == pytest.approx(20)  # its end is flat: in proportion
    assert av.CostTable({1: 1}, {4: 2.0, 8: 3.0}).verify_ms(16) == pytest.approx(5)
    assert av.CostTable({1: 1}, {4: 2.0}).verify_ms(np.array([1, 8])) == pytest.approx([2, 4])
    for bad in ({}, [], {1: 0}, {1: -1.0}, {1: math.nan}, {1: math.inf}, {0: 1.0}, {1.5: 1.0},
                {1: True}, {1: "1"}):
        with pytest.raises(ValueError, match="draft"):
            av.CostTable(bad, {1: 1})
        with pytest.raises(ValueError, match="verify"):
            av.CostTable({1: 1}, bad)


def test_costs_follow_the_machine_but_no_hiccup():
    """A fixed table plans for another machine, and a hiccup that counts in full for none.

    Drafting 3 and the rest 1.5 times slower, both are within 3 % after 100 steps; a step of
    100 times the expected takes them up by 2^COST_RATE, 3.5 %."""
    cost = av.CostTable({1: 1.0, 7: 7.0}, {64: 10.0, 128: 14.0})
    for _ in range(100):
        cost.learn(3, 128, 3 * 3.0, 1.5 * 14.0)
    assert cost.factors == pytest.approx([3, 1.5], rel=0.03)
    before = cost.factors.copy()
    cost.learn(3, 128, 9e2, 2e3)
    assert cost.factors == pytest.approx(before * 2**av.COST_RATE)
    cost.learn(0, 128, 0.1, 1e-9)  # says nothing of drafting
    assert cost.factors == pytest.approx(before * [2**av.COST_RATE, 1])


@pytest.mark.parametrize("all_depths", [False, True])
def test_depth_and_budget_are_the_best_by_brute_force(all_depths):
    """A local argmax stops at the first stair; of equals the smallest is to be taken."""
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
                rates[d, b] = (R + sum(best[:b])) / (cost.draft_ms(d) + cost.verify_ms(R + b))
        top = max(rates.values())
        want = min(x for x, rate in rates.items() if rate >= top * (1 - 1e-12))
        assert av.draft_budget(s, cost, all_depths) == want, case
    equal = av.CostTable({1: 1e-300}, {1: 1.0, 2: 1.5, 3: 2.0})
    assert av.draft_budget(np.full((1, 2), 0.5), equal, all_depths) == (2 - 2 * all_depths, 0)


def test_trim_takes_the_best_slots():
    """No slot left out may be better than one taken; ties go by position, then by request."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        R, K = rng.integers(1, 5, 2)
        s = np.cumprod(rng.choice([1.0, 0.5, 0.9, 0.0], (R, K)), 1)
        budget = int(rng.integers(0, R * K + 1))
        values = {n: sum(s[r, :k].sum().item() for r, k in enumerate(n))
                  for n in itertools.product(range(K + 1), repeat=R) if sum(n) == budget}
        got = values[tuple(av.trim(s, budget).tolist())]  # a KeyError: not so many slots
        assert got == pytest.approx(max(values.values()), abs=1e-12)
    assert av.trim(np.array([[0.5, -1, -1], [0, 0, 0]]), 4).tolist() == [1, 3]
    assert av.trim(np.ones((300, 2)), 310).tolist() == [2] * 10 + [1] * 290  # a stable sort
    for bad in (-1, 7, 1.0, True):
        with pytest.raises(ValueError, match="budget"):
            av.trim(np.ones((3, 2)), bad)


# ---- 5. The loop. -------------------------------------------------------------------


class Coin(Table):
    """A law that is the same after each text, and may be changed while it is used."""

    def logits(self, tokens, lengths, slots, num_verified):
        self.hidden = torch.zeros(len(slots) + sum(num_verified), 1)
        return torch.tensor(self.law).log().expand(len(self.hidden), -1)


SURE = [0.8, 0.15, 0.05]  # of the drafter; the target's overlap with it is .95 or .05
EASY, HARD = [0.75, 0.15, 0.1], [0.0, 0.0, 1.0]


def coins(idea, R, K, cost, every, plan="adaptive"):
    decoder = idea.Decoder(Coin(EASY, 3), Coin(SURE, 3), max_batch_size=R, max_length=2**13,
                           num_speculative_tokens=K, plan=plan, seed=0, cost=idea.CostTable(*cost),
                           estimator=idea.AcceptanceEstimator(K, refit_every=every))
    for r in range(R):
        decoder.add(r, [0], 2**13 - 1)
    return decoder


@pytest.mark.parametrize("plan, down, up", [("verification", 3, 3), ("adaptive", 7, 3)])
def test_a_switch_of_workload_is_followed_both_ways(plan, down, up, idea):
    """A fit that stays behind drafts too much after a switch, or too little for good.

    64 requests, K = 7, rounds of 25 steps; acceptance .95, .05, .95. After `down` and `up`
    refits the first position is predicted within .1; 5 rounds after the way back as much is
    verified as before. (Downwards only EXPLORERS labels a round are left to adaptive.)"""
    cost = {d: 0.3 * d for d in range(1, 8)}, {64: 10.0, 512: 40.0}
    decoder, (depth, gap) = coins(idea, 64, 7, cost, 25, plan), np.zeros((2, 3, 7))
    for (i, law), refit in itertools.product(enumerate((EASY, HARD, EASY)), range(7)):
        decoder.target.law = law
        depth[i, refit] = np.mean([decoder.step().num_verified.mean() for _ in range(25)][1:])
        c = decoder.estimator.predict(np.full((1, 1), math.log(4))).item()
        gap[i, refit] = abs(c - np.minimum(law, SURE).sum())
    assert (gap[0, 2:] < 0.1).all() and depth[0, -1] > 3
    assert (gap[1, down - 1:] < 0.1).all() and (depth[1, 3:] < 0.2).all()
    assert (gap[2, up - 1:] < 0.1).all() and abs(depth[2, 4:] - depth[0, -1]).max() <= 1


@pytest.mark.parametrize("plan", ["verification", "adaptive"])
def test_no_position_is_forgotten_for_good(plan, idea):
    """What is never verified is never learned again, after 300 steps of rejections for good.

    Then 300 steps accept all: a mean of 4 or more of 6 drafts is verified in the last 100."""
    decoder = coins(idea, 1, 6, ({6: 0.3}, {1: 1.0, 7: 4.0}), 10, plan)
    decoder.target.law = HARD
    before = [decoder.step().num_verified.sum() for _ in range(300)]
    decoder.target.law = SURE
    after = [decoder.step().num_verified.sum() for _ in range(300)]
    assert np.mean(before[200:]) < 1 and np.mean(after[200:]) >= 4


def test_exploring_steps_and_prompts(idea, monkeypatch):
    """Too few explorers learn nothing, too many cost time; their steps are no usual ones.

    By hand: drafts never pay. So a step in which a round begins is the only one that drafts:
    K for EXPLORERS requests, all verified. Costs learn from all others without prompts."""
    learned = []
    monkeypatch.setattr(idea.CostTable, "learn", lambda self, *args: learned.append(args[:2]))
    decoder = coins(idea, 40, 3, ({1: 50.0}, {1: 1.0, 160: 500.0}), 4)
    decoder.ends[20:] = 2  # no room for a draft, and over after the first step
    for step in range(9):
        if step == 5:
            decoder.add(99, [0], 9)
        learned.clear()
        done = decoder.step()
        want = [0] * (40 if step == 0 else 20 + (step >= 5))
        if step % 4 == 0:
            want[:idea.EXPLORERS] = [3] * idea.EXPLORERS
        assert done.num_verified.tolist() == (done.survival >= 0).sum(1).tolist() == want
        assert learned == ([] if step in (0, 4, 5, 8) else [(0, len(want))])
        cost = decoder.cost.draft_ms(max(want)) + decoder.cost.verify_ms(sum(want) + len(want))
        prompt = step in (0, 5)  # of which the table knows nothing
        assert np.isnan(done.expected_ms) if prompt else done.expected_ms == pytest.approx(cost)


def test_what_is_expected_by_hand(idea):
    """A forecast that forgets too fast, or counts requests that drew nothing, misplans.

    20 requests, 16 of them explore: the mean moves by 16 labels of 16 + MEMORY, each
    request's own forecast by 20 of 20 + MEMORY, towards what it drew or else that mean."""
    decoder = coins(idea, 20, 2, ({1: 50.0}, {1: 1.0, 60: 99.0}), 100)
    decoder.expected[:], decoder.usual[:], decoder.estimator.intercepts[:] = 0.4, 0.6, [0, 1]
    decoder.step()
    c = 1 / (1 + np.exp(-0.5 * math.log(4) - np.array([0, 1])))
    usual = 0.6 + (c - 0.6) * 16 / (16 + idea.MEMORY)
    assert decoder.usual == pytest.approx(usual)
    want = 0.4 + (np.array([c] * 16 + [usual] * 4) - 0.4) * 20 / (20 + idea.MEMORY)
    assert decoder.expected == pytest.approx(want)


def test_nothing_is_drafted_behind_an_end_token(idea):
    """Drafts behind a drafted end token can't be used: they would win slots from others.

    On a CPU they are not drafted; elsewhere their survival is zero, and last in `trim`."""
    P = Table(lambda text: np.eye(3)[2 if len(text) == 3 else 1], 3)  # token 3 ends
    decoder = start(idea, P, P.law, {1: 1.0}, [(0,), (0, 1)], 4, plan="fixed", eos_token_ids=[2])
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
    """A half-done step that moved a length or a state would give another text after it.

    The judge takes the likeliest token, one after the other; there is no transformers."""
    with pytest.raises(ImportError):
        import transformers  # noqa: F401
    P, calls, raised = random_law(0, 5), itertools.count(), 0
    decoder = start(idea, drafter(random_law(1, 5, P), 5), P, {1: 1.0, 9: 2.0}, [(0,), (1, 2)], 3,
                    temperature=0)
    honest = decoder.target.logits

    def logits(*args):
        call, out = next(calls), honest(*args)
        if call in fails[::2]:
            raise RuntimeError("of the device")
        return out * math.nan if call in fails else out

    decoder.target.logits = logits
    while (decoder.request >= 0).any():
        try:
            decoder.step()
        except (RuntimeError, FloatingPointError):
            raised += 1
    for row, n in zip(decoder.tokens.tolist(), (1, 2)):
        text = row[:n]
        while len(text) < n + 9:
            text.append(int(P(tuple(text)).argmax()))
        assert row[:n + 9] == text
    assert raised == len(fails)


def test_an_error_leaves_no_trace_in_the_forecasts(idea):
    """A NaN behind a request's last draft would make all forecasts NaN, and end all drafting."""
    broken = [True]
    Q = Table(lambda text: EVEN(text) * (math.nan if broken and len(text) == 2 else 1), 2)
    decoder = start(idea, Q, EVEN, {1: 1.0, 6: 1.1}, [(0,), (0,)], 2, plan="verification")
    with pytest.raises(FloatingPointError, match="drafter"):
        decoder.step()
    broken.clear()
    decoder.request[0] = -1
    decoder.add(2, [0], 2)  # it drafts one token, and the other request two
    assert (decoder.step().survival >= 0).sum(1).tolist() == [1, 2]
    assert np.isfinite(decoder.usual).all() and np.isfinite(decoder.expected).all()


def test_a_row_without_any_likely_token_is_named(idea):
    """A row of -inf beside finite ones has no law, and some token would be drawn from it."""
    decoder = start(idea, Table(EVEN, 2), lambda text: EVEN(text) * (len(text) == 1),
                    {1: 1.0}, [(0,), (1, 1)], 1, plan="fixed")
    decoder.ends[:] = decoder.lengths + 1  # nothing to draft
    with pytest.raises(FloatingPointError, match="target"):
        decoder.step()


# ==== Part II: on transformers models.
PLANS = ["fixed", "verification", "adaptive"]
torch.set_num_threads(1)  # small models: threads would wait for each other


def stairs():
    """Costs with steps, so that depth and budget vary; a fresh table, because tables learn."""
    return av.CostTable({1: 0.05, 64: 0.2},
                        {1: 1, 3: 1, 4: 1.6, 6: 1.6, 7: 2.2, 12: 2.2, 13: 9, 64: 40})


# ---------------------------------------------------------------------- small models
TINY = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, head_dim=8,
            pad_token_id=None, bos_token_id=None, eos_token_id=None)


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


def cycle(V, wrong_at=()):
    """A bigram that always says (t + 1) mod V, but t + 2 after the tokens in wrong_at."""
    steps = [(t + 1 + (t in wrong_at)) % V for t in range(V)]
    return bigram(np.eye(V)[steps] * (1 - V * 1e-9) + 1e-9)


def greedy(model, prompt, n):
    """The judge: plain `model.generate`, one prompt at a time."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n,
                         do_sample=False, pad_token_id=0) if n else ids
    return out[0, len(prompt):].tolist()


def prompts_of(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 64, n).tolist() for n in lengths]


def tally(texts, shape):
    counts = np.zeros(shape)
    np.add.at(counts, tuple(np.array(texts).T), 1)
    return counts


def reads_of(model):
    """A list that grows by the ids of each forward of the model."""
    ids = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: ids.append(args[0].flatten().tolist()))
    return ids


# ---------------------------------------------------------------------- greedy text
@pytest.mark.parametrize("K", [0, 1, 4, 8])
def test_greedy_text_is_that_of_generate(K):
    """Any error of rows, positions, masks, caches or rollback changes greedy text somewhere.

    Ragged prompts and lengths, refilled slots, each plan and batch size, against `generate`
    one by one; so a request in a batch equals the request alone, too."""
    target, prompts = llama(), prompts_of(5, 1, 17, 30, 2, 9)
    drafter, new = noisy(target, 0.1), [24, 9, 17, 1, 26, 20]
    want = [greedy(target, p, n) for p, n in zip(prompts, new)]
    for plan, B in itertools.product(PLANS if K else ["fixed"], (1, 2, 5)):
        out = av.generate(target, drafter, prompts, max_new_tokens=new, temperature=0, seed=0,
                          num_speculative_tokens=K, plan=plan, max_batch_size=B, cost=stairs())
        assert out.tokens == want, (plan, B)


def test_prompts_longer_than_a_piece_are_read_to_the_token():
    """A piece that is lost, doubled or shifted by one at its edge changes the text after it."""
    target = llama(max_position_embeddings=2048)
    prompts = prompts_of(512, 3, 513, 1024, 600, 1025, 1, 511)
    want, drafter = [greedy(target, p, 6) for p in prompts], noisy(target, 0.05)
    for plan, K, B in (("fixed", 0, 5), ("adaptive", 4, 2), ("verification", 4, 5)):
        out = av.generate(target, drafter, prompts, max_new_tokens=6, temperature=0, seed=0,
                          num_speculative_tokens=K, plan=plan, max_batch_size=B, cost=stairs())
        assert out.tokens == want, (plan, K, B)


class Head(torch.nn.Module):
    """A small recurrent head, wider by one than the target, that is right fairly often."""

    def __init__(self, target):
        super().__init__()
        H, self.target, self.started = target.config.hidden_size, target, []
        self.mix = torch.nn.Linear(H, H + 1, bias=False)
        torch.nn.init.normal_(self.mix.weight, std=0.01)

    def start(self, hidden):
        self.started.append(hidden.clone())
        return self.mix(hidden)  # (r, H + 1)

    def step(self, state, tokens):
        x = self.target.model.norm(self.target.model.embed_tokens(tokens) + state[:, :-1])
        return 0.9 * state, self.target.lm_head(x)


class Block(av.HeadDrafter):
    """A block drafter, as the docstring of `HeadDrafter` shows: all asked positions at once."""
    computed = 0

    def next_logits(self, tokens, lengths, slots, position, depth):
        state, token = self.recall(position, tokens, lengths, slots)
        if position == 0:
            laws, (state, logits) = [], self.head.step(self.head.start(state), token)
            for _ in range(depth):
                laws.append(logits)
                state, logits = self.head.step(state, logits.argmax(-1))
            state = torch.stack(laws, 1)  # (r, depth, V)
            self.kept, self.depth, self.computed = (slots, state), depth, self.computed + depth
        assert position < depth == self.depth, "asked for more than was announced"
        return state[:, position]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [av.HeadDrafter, Block])
def test_a_head_starts_from_the_state_of_the_newest_token_and_the_text_stays(kind, plan):
    """A state of another row, request or step makes drafts worse, and no text would show it.

    Each state that a head starts from is compared with a forward without a cache. A block
    has to compute no more than the depth that the plan asks for."""
    target, prompts, new = llama(), prompts_of(5, 1, 17, 9, 2), [20, 12, 25, 2, 20]
    with torch.no_grad():  # the next token follows mostly from the last: heads can guess it
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.02), layer.mlp.down_proj.weight.mul_(0.02)
    drafter, steps = kind(Head(target)), []
    out = av.generate(target, drafter, prompts, max_new_tokens=new, temperature=0, plan=plan,
                      num_speculative_tokens=4, max_batch_size=2, cost=stairs(),
                      on_step=steps.append)
    assert out.tokens == [greedy(target, p, n) for p, n in zip(prompts, new)]
    checked = [(s.accepted, s.num_verified) for s in steps if s.drafts.size]
    hit, all_ = (sum((x > 0).sum() for x in each) for each in zip(*checked))
    assert 0.15 < hit / all_ < 0.95, "it proves nothing"
    texts, started = [list(p) for p in prompts], iter(drafter.head.started)
    for step in steps:
        drew = [i for i, s in zip(step.requests, step.survival) if (s >= 0).any()]
        for i, state in zip(drew, next(started) if drew else ()):
            base = target.model(torch.tensor([texts[i][:-1]])).last_hidden_state[0, -1]
            assert torch.allclose(state, base, atol=1e-4)
        for i, row, n in zip(step.requests, step.tokens, step.num_committed):
            texts[i] += row[:n].tolist()
    assert next(started, None) is None
    assert kind is not Block or drafter.computed == sum(s.drafts.shape[1] for s in steps)
    assert plan != "adaptive" or {s.drafts.shape[1] for s in steps} & {1, 2, 3}, "no choice"
    drafter.head.started.clear()  # while costs are measured, it starts from the target, too
    av.generate(target, drafter, prompts, max_new_tokens=12, plan=plan, temperature=0)
    assert {x.shape[1] for x in drafter.head.started} == {32}


# ---------------------------------------------------------------------- the law, drawn
@pytest.mark.parametrize("plan", ["verification", "adaptive"])
def test_generate_draws_the_target_law(plan):
    """All at once: 40,000 requests of 3 tokens, refilled, refitted and trimmed, must not lean.

    The joint law of the tokens (64 cells) against the exact one, with temperature, top-k and
    top-p, in batches of 1,500. False alarm 1e-6 for each plan."""
    rng, law, trims = np.random.default_rng(3), dict(temperature=1.3, top_k=3, top_p=0.9), []
    P, Q = rng.dirichlet(np.full(4, 0.8), 4), rng.dirichlet(np.full(4, 0.8), 4)
    cost = av.CostTable({1: 0.01, 9: 0.5}, {1: 1, 1500: 9, 1800: 9.5, 1801: 10, 2700: 11,
                                            2701: 13, 4500: 17})
    target = bigram(P)
    out = av.generate(target, bigram(0.7 * P + 0.3 * Q), [[0]] * 40_000, max_new_tokens=3,
                      cost=cost, plan=plan, num_speculative_tokens=2, max_batch_size=1500,
                      estimator=av.AcceptanceEstimator(2, refit_every=7), **law, seed=1,
                      on_step=lambda s: trims.append(s.num_verified.sum() < s.drafts.size))
    p = av.warp(target(torch.arange(4)[:, None]).logits[:, 0].detach(), **law).double().numpy()
    assert np.mean(trims) > 0.2, "nothing was trimmed"
    assert chi_square(tally(out.tokens, (4, 4, 4)),
                      p[0][:, None, None] * p[:, :, None] * p) > FALSE_ALARM


@pytest.mark.parametrize("V", [4, 8, "varies"])
def test_a_drafter_of_another_vocabulary_keeps_the_law(V):
    """An id that only one model has, or that the row before had, leans the text (F28).

    False alarm 1e-6 each. The warning comes once and names the caller's line, although costs
    are measured, too."""
    P, Q = (np.random.default_rng(i).dirichlet(np.ones(n), n)
            for i, n in enumerate((6, 6 if V == "varies" else V)))
    drafted, widths, own = set(), itertools.cycle([6, 3]), types.SimpleNamespace(commit=lambda *args: None)
    own.next_logits = lambda tokens, lengths, slots, position, depth: torch.tensor(
        Q).log()[tokens[slots, lengths - 1], :next(widths)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = av.generate(bigram(P), own if V == "varies" else bigram(Q), [[5]] * 20_000,
                          max_new_tokens=3, seed=1, num_speculative_tokens=2,
                          max_batch_size=1000, on_step=lambda s: drafted.update(s.drafts.flat))
    assert [(w.category, w.filename, f"6 (target) and {V} (drafter)" in str(w.message))
            for w in caught] == [(UserWarning, __file__, True)] * (V in (4, 8))
    assert max(drafted) < (4 if V == 4 else 6)
    assert chi_square(tally(out.tokens, (6, 6, 6)),
                      P[5][:, None, None] * P[:, :, None] * P) > FALSE_ALARM


@pytest.mark.parametrize("law", [dict(temperature=0), dict(top_p=0.9, top_k=20), dict(top_k=1),
                                 dict(temperature=1.5), dict(temperature=0.01), {}])
def test_the_target_as_its_own_drafter_is_always_accepted(law):
    """A setting on one side, or a draft cache that lacks a token, shows as a rejection (F16).

    41 tokens at K = 4 then take exactly ceil(41 / 5) = 9 passes with the prompt's own (F19)."""
    target, drafter = llama(), llama()
    reads = reads_of(target)
    for K, steps in ((4, 9), (1, 21), (2, 14)):
        reads.clear()
        out = av.generate(target, drafter, prompts_of(5, 1, 17), max_new_tokens=41, seed=0,
                          num_speculative_tokens=K, plan="fixed", **law)
        assert out.steps == steps == len(reads) and out.accept_length == 41 / steps


# ---------------------------------------------------------------------- logits and attention
@pytest.mark.parametrize("heads", [2, 4])
def test_logits_from_the_cache_are_those_without_it(heads):
    """Stale entries, wrong positions or a padded neighbour would move logits after a rollback."""
    target, rng = llama(num_key_value_heads=heads), np.random.default_rng(0)
    lm, draw = av.SlotLM(target, 4, 80), lambda: torch.tensor(rng.integers(0, 64, (4, 80)))
    lm.keep_hidden, lengths, tokens = True, np.array([3, 30, 1, 9]), draw()
    for _ in range(8):
        slots = np.flatnonzero(rng.random(4) < [0.7, 0.7, 0.7, 1])
        n = rng.integers(0, 6, len(slots))
        lm.commit(slots, lengths[slots])
        got = lm.logits(tokens, lengths[slots], slots, n)
        with torch.no_grad():
            full = [(lengths[s] - 1, target(tokens[s:s + 1, :lengths[s] + d],
                                            output_hidden_states=True)) for s, d in zip(slots, n)]
        for x, want in ((got, [x.logits[0, at:] for at, x in full]),
                        (lm.hidden, [x.hidden_states[-1][0, at:] for at, x in full])):
            assert torch.allclose(x, torch.cat(want), atol=1e-4)
        lengths[slots] += 1 + (rng.random(len(slots)) * (n + 1)).astype(int)
        rejected = torch.arange(80) >= torch.tensor(lengths)[:, None] - 1
        tokens = torch.where(rejected, draw(), tokens)


def cover(start, counts):
    """What the calls read for each token, and the pairs of queries and keys attended."""
    batch, read = av.Ragged(np.arange(len(start)), start, counts, torch.device("cpu")), []
    for cache, queries, seen, keys in batch.calls:
        rows = torch.arange(len(start))[cache]
        assert queries.shape == (seen.numel(),) and len(rows) == len(seen)
        for row, index, at in zip(rows, queries.view(seen.shape), seen):
            read += [(int(row), int(p), int(q), keys) for q, p in zip(index, at)]
    area = sum(seen.numel() * keys for _, _, seen, keys in batch.calls)
    return [read[place] for place in batch.place], batch, area


def test_attention_calls_read_each_query_once_with_all_its_keys():
    """A query that no call holds, or whose call ends before its key, would read a neighbour's
    output. Brute force over 150 random batches."""
    rng = np.random.default_rng(0)
    for _ in range(150):
        R = rng.integers(1, 12)
        start = np.where(rng.random(R) < 0.2, rng.integers(0, 2000, R), rng.integers(0, 40, R))
        known = np.where(rng.random(R) < 0.2, rng.integers(1, 60, R), rng.integers(1, 3, R))
        counts = known + rng.integers(0, 6, R) * (rng.random(R) < 0.6)
        read, batch, _ = cover(start, counts)
        want = [(row, start[row] + i) for row in range(R) for i in range(counts[row])]
        assert [x[:3] for x in read] == [(*x, t) for t, x in enumerate(want)]
        assert all(position < keys for _, position, _, keys in read)
        assert list(zip(batch.slots.tolist(), batch.positions.tolist())) == want


def test_slots_that_are_mostly_in_use_are_read_without_a_copy():
    """To gather the cache of 63 slots of 64 copies it in each layer of each pass."""
    for slots, whole in (([0, 1, 3], slice(0, 4)), ([5], slice(5, 6)), ([0, 9], None)):
        n = np.ones(len(slots), int)
        (rows, *_), = av.Ragged(np.array(slots), 4 * n, n, torch.device("cpu")).calls
        assert rows == whole if whole else rows.tolist() == slots


def test_one_long_request_does_not_slow_down_the_others():
    """If all rows are attended up to the longest, one request of 4,000 costs what 32 do.

    Counted in pairs of a query and a key. Likewise for a deep row, and for a prompt."""
    def area(start, known, drafts):
        start, counts = np.broadcast_arrays(start, np.add(known, drafts))
        return cover(start, counts)[2]

    for drafts in (0, 3):
        both = area([15] * 7 + [3999] + [15] * 24, 1, drafts)
        assert both <= 1.3 * (area([15] * 31, 1, drafts) + area([3999], 1, drafts))
    even = area([50] * 64, 1, 0)
    assert area([50] * 64, 1, [0] * 63 + [8]) <= 1.35 * even
    assert area([50] * 63 + [0], [1] * 63 + [200], 0) <= 1.35 * even + 200 * 200


def test_masks_of_a_long_prompt_are_bounded_by_pieces(monkeypatch):
    """A mask of a prompt of 8,192 against itself takes 512 MB, and one of a piece 16."""
    model = llama(num_hidden_layers=1, max_position_embeddings=8300, num_key_value_heads=4)
    sizes, make = [], av.Ragged.mask

    def record(self, *args):
        mask = make(self, *args)
        sizes.append(sum(m.numel() * m.element_size() for m in self.masks.values()))
        return mask

    monkeypatch.setattr(av.Ragged, "mask", record)
    lm, reads, tokens = av.SlotLM(model, 2, 8200), reads_of(model), torch.zeros(2, 8200).long()
    lm.logits(tokens, np.array([8192, 5]), np.array([0, 1]), np.array([2, 0]))
    assert max(sizes) <= 4 * av.PIECE * 8200 * 1.1
    assert [*map(len, reads)] == [av.PIECE] * 15 + [av.PIECE + 7]


def test_the_cache_grows_with_the_texts():
    """A cache for max_new_tokens, or laws of more drafts than fit, would take gigabytes."""
    lm = av.SlotLM(llama(max_position_embeddings=100_000), 2, 100_000)
    decoder = av.Decoder(lm, None, num_speculative_tokens=0, max_batch_size=2,
                         max_length=100_000)
    decoder.add(0, [1] * 10, 99_000)
    for _ in range(200):
        decoder.step()
    assert {x.shape[1] for kv in lm.kv.values() for x in kv} <= set(range(209, 2 * 210 + 1))
    decoder = av.Decoder(lm, lm, max_length=5, num_speculative_tokens=1000, plan="fixed",
                         max_batch_size=2)
    assert decoder.q.shape == decoder.draft_logits.shape == (3, 2, 64)


# ---------------------------------------------------------------------- counts
@pytest.mark.parametrize("plan", PLANS)
def test_query_tokens_of_the_target_are_requests_plus_budget(plan):
    """A trimmed draft that reached the target would cost what it was trimmed to save (F43),
    and an id that is not of the vocabulary, to fill a pad, would be an error (F23)."""
    target, drafter, steps, seen, want = llama(), noisy(llama(), 0.3), [], set(), []
    reads, others, trimmed = reads_of(target), reads_of(drafter), 0
    av.generate(target, drafter, prompts_of(*[3] * 6), max_new_tokens=[9, 20, 3, 20, 7, 18],
                max_batch_size=5, cost=stairs(), seed=0, num_speculative_tokens=8,
                plan=plan, on_step=steps.append)
    for s in steps:
        trimmed += (s.survival >= 0).sum() - s.num_verified.sum()
        new = {*s.requests} - seen
        want.append(len(s.requests) + s.num_verified.sum() + 2 * len(new))
        seen |= new
    assert [*map(len, reads)] == want
    assert (trimmed > 0) == (plan != "fixed")
    assert {*itertools.chain(*reads, *others)} <= {*range(64)}


def test_requests_that_accept_different_counts_do_not_touch_each_other():
    """One offset for all rows shifts the cache of whoever accepted less (F20, F22).

    Slot 0 has a right drafter, slot 1 a wrong one, slot 2 one right after even tokens."""
    target, prompts, steps = llama(), prompts_of(4, 7, 2, 5, 3, 9), []
    twin = av.SlotLM(llama(), 3, 60)

    def next_logits(tokens, lengths, slots, position, depth):
        logits = twin.next_logits(tokens, lengths, slots)
        odd = tokens[slots, lengths - 1].numpy() % 2
        wrong = torch.from_numpy((slots == 1) | (slots == 2) & (odd == 1))
        return torch.where(wrong[:, None], logits.roll(1, 1), logits)

    drafter = types.SimpleNamespace(commit=twin.commit, next_logits=next_logits)
    out = av.generate(target, drafter, prompts, max_new_tokens=24, max_batch_size=3, plan="fixed",
                      num_speculative_tokens=5, temperature=0, on_step=steps.append)
    assert out.tokens == [greedy(target, p, 24) for p in prompts]
    first = [(s.accepted, s.num_verified) for s in steps if s.requests.tolist() == [0, 1, 2]]
    assert all(a[0] == n[0] and a[1] == 0 for a, n in first) and len(first) > 2
    assert len({int(a[2]) for a, _ in first}) > 1


def test_a_new_request_inherits_nothing_of_its_slot():
    """A forecast of the request before it would decide about a new one (F22)."""
    lms = [av.SlotLM(m, 2, 40) for m in (llama(), noisy(llama(), 0.1))]
    decoder = av.Decoder(*lms, max_batch_size=2, max_length=40, num_speculative_tokens=3,
                         plan="verification", cost=stairs(), temperature=0)
    for i in range(2):
        decoder.add(i, [1 + i] * 9, 15 + i)
    while decoder.step():
        pass
    assert not np.allclose(decoder.expected, decoder.usual) and min(lms[0].cached) > 9
    decoder.add(7, [5, 6], 9)
    assert (decoder.expected[0] == decoder.usual).all()
    texts = []
    while done := decoder.step():
        texts += done.tokens[0, :done.num_committed[0]].tolist()
    assert texts == greedy(lms[0].model, [5, 6], 9)


# ---------------------------------------------------------------------- ends
@pytest.mark.parametrize("K", [0, 3, 8])
def test_end_tokens_cut_a_block_where_they_stand(K):
    """Text goes on behind an end token accepted in the middle of a block (F24, F25).

    The end is kept, at each place of a block, as an int, list, tensor or array."""
    target, drafter = cycle(12), cycle(12)
    for end, plan in itertools.product((1, 3, 8, 9), PLANS):
        for eos in (end, [end, 11], torch.tensor([end]), torch.tensor(end),
                    np.array([end]), np.int64(end), (end,), None, []):
            out = av.generate(target, drafter, [[0], [4]], max_new_tokens=9, temperature=0,
                              num_speculative_tokens=K, plan=plan, eos_token_id=eos,
                              cost=stairs())
            stops = () if eos is None else eos if isinstance(eos, list) else [end]
            for start, got in zip((0, 4), out.tokens):
                want = [(start + i) % 12 for i in range(1, 10)]
                cut = [i + 1 for i, t in enumerate(want) if t in stops]
                assert got == want[:cut[0] if cut else 9], (end, eos)


@pytest.mark.parametrize("plan", PLANS)
def test_a_stream_of_steps_is_the_result_to_the_token(plan):
    """A stream that holds tokens behind an end token shows what the result does not, and steps
    that count only the requests that run are joined to the wrong prompts."""
    target, texts = llama(), [[] for _ in range(6)]
    prompts, new = prompts_of(4, 7, 2, 5, 3, 9), [30, 0, 30, 5, 22, 30]
    plain = [greedy(target, p, n) for p, n in zip(prompts, new)]
    eos = [plain[0][11], plain[2][6]]

    def on_step(step):
        for i, row, n in zip(step.requests, step.tokens, step.num_committed):
            texts[i] += row[:n].tolist()

    out = av.generate(target, noisy(target, 0.05), prompts, max_new_tokens=new, temperature=0,
                      max_batch_size=2, eos_token_id=eos, cost=stairs(), plan=plan,
                      on_step=on_step)
    cut = [t[:next((i + 1 for i, x in enumerate(t) if x in eos), len(t))] for t in plain]
    assert texts == out.tokens == cut and sum(map(len, cut)) < sum(new)


@pytest.mark.parametrize("kind", [list, tuple, np.array, set])
def test_on_step_ends_the_requests_that_it_returns(kind):
    """A request that its reader has left would hold a slot to the last token."""
    seen = []

    def on_step(step):
        seen.extend(step.requests)
        return kind([1, 2]) if len(seen) > 4 else None

    out = av.generate(cycle(8), cycle(8), [[0], [1], [2], [3]], max_new_tokens=40, plan="fixed",
                      num_speculative_tokens=1, temperature=0, max_batch_size=2, on_step=on_step)
    assert out.tokens == [[(s + 1 + i) % 8 for i in range(n)]
                          for s, n in enumerate((40, 6, 2, 40))]


@pytest.mark.parametrize("new", [0, 1, 2, 4, 5, 6])
def test_nothing_is_drafted_that_cannot_be_used(new):
    """Drafts past max_new_tokens are wasted passes: the last token is a bonus token (F26)."""
    target, drafter, left = cycle(16), cycle(16), range(new, 0, -5)
    reads, drafted = reads_of(target), reads_of(drafter)
    for plan in PLANS:
        reads.clear(), drafted.clear()
        out = av.generate(target, drafter, [[0], [1]], max_new_tokens=new, plan=plan,
                          num_speculative_tokens=4, temperature=0,
                          cost=av.CostTable({1: 1e-3}, {1: 1, 99: 1.001}))
        assert [len(t) for t in out.tokens] == [new, new]
        assert len(drafted) == sum(min(4, n - 1) for n in left)
        assert len(reads) == len(left) == out.steps


@pytest.mark.parametrize("plan", PLANS)
def test_generation_up_to_the_last_position(plan):
    """One look-ahead past a learned table of positions is an index error (F27), be it in the
    text or while costs are measured."""
    model = family("GPT2", max_position_embeddings=32)
    for n, new in ((20, 12), (1, 31), (31, 1), (32, 0), (29, 3)):
        prompt, drafter = prompts_of(n), noisy(model, 0.1)
        out = av.generate(model, drafter, prompt, max_new_tokens=new, plan=plan,
                          num_speculative_tokens=5, temperature=0)
        assert out.tokens == [greedy(model, prompt[0], new)], (n, new)
        refused(lambda: av.generate(model, drafter, prompt, max_new_tokens=new + 1),
                rf"prompts\[0\].* 32 .*{n} and {new + 1}$")


# ---------------------------------------------------------------------- what is the caller's
def test_same_seed_same_tokens_and_nothing_of_the_caller_changes():
    """A reseeded loop must repeat, and what is the caller's must stay as it was.

    Two right runs of 64 tokens with different seeds are equal with less than 1e-12."""
    target, prompts, new, eos, table = llama(), prompts_of(4, 7), [32, 32], [3], stairs()
    drafter, table.learn = noisy(target, 0.1), lambda *args: None
    state = lambda: [(m.config.to_dict(), m.config._attn_implementation, m.training,
                      m.generation_config.to_dict(), [p.tolist() for p in m.parameters()],
                      [p.requires_grad for p in m.parameters()],
                      [{**s._forward_hooks, **s._forward_pre_hooks} for s in m.modules()])
                     for m in (target, drafter)] + [
        torch.random.get_rng_state().tolist(), np.random.get_state()[1].tolist(),
        copy.deepcopy((prompts, new, eos))]
    run = lambda seed, **kw: av.generate(target, drafter, prompts, max_new_tokens=new, seed=seed,
                                         eos_token_id=eos, cost=table, **kw).tokens
    before = state()
    for kw in (dict(num_speculative_tokens=0), dict(max_batch_size=1),
               *(dict(plan=plan) for plan in PLANS)):
        assert run(1, **kw) == run(1, **kw) != run(2, **kw), kw
    assert run(None) != run(None) and state() == before
    target(torch.tensor(prompts[:1])).logits.sum().backward()  # no inference tensor stayed


def test_odd_but_right_input():
    """Tensors, arrays or tuples of ids are prompts, K may be more than what is asked, and the
    caller's default dtype, in which q would not be what drafts are drawn from, is his own."""
    target = cycle(8)
    target.lm_head.config = {}  # of a module's own, not a model's
    assert av.generate(target, None, [], num_speculative_tokens=0).tokens == []
    assert av.generate(target, cycle(8), []).tokens == []
    for prompts in (torch.tensor([[1], [2]]), [torch.tensor([1]), (2,)], np.array([[1], [2]]),
                    [np.array([1], np.uint16), torch.tensor([2], dtype=torch.int32)]):
        for cost, new in ((stairs(), 3), (None, (3, 3)), (None, torch.tensor([3, 3]))):
            out = av.generate(target, cycle(8), prompts, max_new_tokens=new, temperature=0,
                              num_speculative_tokens=12, cost=cost)
            assert out.tokens == [[2, 3, 4], [3, 4, 5]]
    drafter = cycle(8, wrong_at=(3,))
    torch.set_default_dtype(torch.float64)
    try:
        assert len(av.generate(target, drafter, [[1, 2]], max_new_tokens=6).tokens[0]) == 6
    finally:
        torch.set_default_dtype(torch.float32)


# ---------------------------------------------------------------------- devices and dtypes
@pytest.mark.parametrize("see", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_no_device_is_mixed_and_a_step_waits_twice(plan, see, monkeypatch):
    """On a GPU an `.item()`, a boolean mask or an index on the CPU would wait in a step, or
    fail. On shapes alone (fake tensors on "meta") each of them raises here; what a step reads
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
    monkeypatch.setattr(torch, "rand", lambda *shape, generator, **kw: draw(*shape, **kw))
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda x, *a, generator=None: draw_in(x, *a))
    with FakeTensorMode():
        with torch.device("meta"):
            target, drafter = (LlamaForCausalLM(LlamaConfig(**TINY)).eval() for _ in range(2))
            drafter = av.HeadDrafter(Head(target)) if see else av.SlotLM(drafter, 3, 20)
        decoder = av.Decoder(
            av.SlotLM(target, 3, 20), drafter, num_speculative_tokens=4, plan=plan, top_k=5,
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
    """In 16 bits, a text that leaves that of `generate` where no near tie is has a fault (F15).

    A near tie: the two best logits are within 3 % of the spread of their row."""
    target, prompts = llama().to(dtype), prompts_of(5, 12, 1)
    for drafter in (noisy(llama(), 0.05), noisy(llama(), 0.05).to(dtype)):  # (F49)
        out = av.generate(target, drafter, prompts, max_new_tokens=40, temperature=0,
                          num_speculative_tokens=4, cost=stairs())
        for prompt, got in zip(prompts, out.tokens):
            want = greedy(target, prompt, 40)
            same = next((i for i in range(40) if got[i] != want[i]), 40)
            if same < 40:
                row = target(torch.tensor([prompt + want[:same]])).logits[0, -1].float()
                best = row.topk(2).values
                assert best[0] - best[1] < 0.03 * (row.max() - row.min())


# ---------------------------------------------------------------------- families
MOE = dict(moe_intermediate_size=32, num_experts_per_tok=2)
WORKS = {
    "Llama": {}, "Qwen2": dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "Qwen3": {}, "Mistral": dict(sliding_window=8), "Mixtral": dict(num_local_experts=4),
    "Qwen3Moe": dict(num_experts=4, **MOE), "Gemma": {}, "Phi": {}, "GPT2": {}, "GPTNeoX": {},
    "Phi3": dict(sliding_window=8), "OPT": dict(ffn_dim=64, word_embed_proj_dim=32),
    "Gemma3Text": dict(sliding_window=8, query_pre_attn_scalar=8), "Olmo2": {}, "Cohere": {},
    "Granite": {}, "SmolLM3": {}, "Glm4": {},
    "DeepseekV3": dict(num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1,
                       v_head_dim=8, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
                       qk_nope_head_dim=8, first_k_dense_replace=1, n_shared_experts=1, **MOE)}
LONGROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, factor=8.0,
                long_factor=[8.0] * 4, original_max_position_embeddings=32)
STATE, NONE = ("recurrent state", {}), ("attention interface", {})
REFUSED = {
    "Mamba": STATE, "Rwkv": STATE, "Jamba": STATE, "Bloom": NONE, "Mpt": NONE, "Falcon": NONE,
    "StableLm": NONE, "Bart": ("encoder-decoder|attention interface", {}),
    "Bert": ("not causal", {}), "GPTJ": ("ragged batch", {}), "Nemotron": ("of its own", {}),
    "Phi3": ("longest request", dict(rope_parameters=LONGROPE)),
    "Gemma2": ("softcap", dict(sliding_window=8, query_pre_attn_scalar=8)),
    "GptOss": ("s_aux", dict(sliding_window=8, num_local_experts=4, **MOE))}


def family(name, **changes):
    tiny = {k: v for k, v in TINY.items() if name != "Falcon" or k != "head_dim"}
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
    """A window that is not honoured, or another scale, changes greedy text past 8 positions."""
    target, prompts = family(name, **WORKS[name]), prompts_of(11, 3, 6)
    out = av.generate(target, noisy(target, 0.05), prompts, max_new_tokens=20, temperature=0,
                      num_speculative_tokens=3, max_batch_size=2, cost=stairs())
    assert out.tokens == [greedy(target, p, 20) for p in prompts]
    ids = torch.tensor(prompts[:1])
    got = av.SlotLM(target, 1, 11).next_logits(ids, np.array([11]), np.array([0]))[0]
    assert torch.allclose(got, target(ids).logits[0, -1], atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_families_are_refused_by_name(name):
    """What can't run as a ragged batch must say so before the first token, not run wrong."""
    why, changes = REFUSED[name]
    model = family(name, **changes)
    for pair in ((model, llama()), (llama(), model)):
        with pytest.raises((ValueError, NotImplementedError), match=f"{name}.*({why})"):
            av.generate(*pair, [[1, 2]], max_new_tokens=9, plan="fixed")


def test_layers_that_hide_what_they_attend_to_are_refused():
    """A mask, window, count or mixing of a layer's own would be ignored: a wrong text."""
    tiny = {k: v for k, v in TINY.items() if not k.endswith("_id") and k != "head_dim"}
    models = {name: getattr(transformers, name + "ForCausalLM")(getattr(
        transformers, name + "Config")(**tiny, **more)).eval() for name, more in (
            ("Phimoe", dict(num_local_experts=4, sliding_window=8)), ("Doge", {}))}
    models["layers that count"] = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(
        **tiny, intermediate_size_mlp=64, head_dim=8, num_local_experts=2, pad_token_id=0,
        layer_types=["full_attention"] * 2, no_rope_layers=[0, 1])).eval()
    models["layers with another kind"] = mixing = llama(num_hidden_layers=3)
    mixer = mixing.model.layers[1].self_attn = torch.nn.Module().eval()
    mixer.forward = lambda hidden_states, **kwargs: (hidden_states.cumsum(1), None)
    models["ignores logits_to_keep"] = deaf = llama()
    forward, deaf.forward = deaf.forward, lambda logits_to_keep, **kw: forward(**kw)
    for message, model in models.items():
        with pytest.raises((NotImplementedError, ValueError), match=message):
            av.generate(model, None, [[1, 2, 3]], max_new_tokens=4, num_speculative_tokens=0)


def raise_(error):
    raise error


def test_an_error_in_mid_run_is_not_called_a_wrong_family():
    """Only a first pass can show that a model doesn't fit; later errors come out as they are,
    and a config that keeps the ragged attention would make the caller's next forward fail."""
    lm, args = av.SlotLM(llama(), 1, 9), (np.array([2]), np.array([0]))
    healthy, lm.model.lm_head.forward = lm.model.lm_head.forward, lambda hidden: raise_(
        torch.OutOfMemoryError("of the device"))
    with pytest.raises(torch.OutOfMemoryError):
        lm.next_logits(torch.zeros(1, 9).long(), *args)
    lm.model.lm_head.forward, lm.kv = healthy, {}
    lm.next_logits(torch.zeros(1, 9).long(), *args)
    lm.commit(np.array([0]), np.array([0]))  # a new request: nothing is cached
    lm.model.lm_head.forward = lambda hidden: hidden @ torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match="^mat1 and mat2"):
        lm.next_logits(torch.zeros(1, 9).long(), *args)
    assert lm.model.config._attn_implementation == "sdpa"
    assert not lm.model.lm_head._forward_pre_hooks


# ---------------------------------------------------------------------- refusals
def refused(call, message):
    """Is `call` refused by a ValueError, before any module ran?"""
    ran = []
    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: ran.append(module))
    try:
        with pytest.raises(ValueError, match=message):
            call()
    finally:
        hook.remove()
    assert not ran


def headless():
    model = llama()
    model.lm_head = torch.nn.Sequential(model.lm_head).eval()
    return model


def top_heavy():
    model = llama()
    model.lm_head = torch.nn.Linear(32, 70).eval()
    return model


def half_trained():
    model = llama()
    model.model.layers[1].train()
    return model


BAD = [(name, value, rf"{name}.*{end}") for name, cases in dict(
    prompts=[([[]], r"\[0\].*got 0"), ([[1], []], r"\[1\].*got 0"), ([[64]], r"\[0\].*63.*64"),
             (torch.tensor([1, 2]), r"tensor"), ("text", "'text'"), (["text"], r"\[0\].*'text'"),
             (None, "None"), ([3], r"\[0\].*3"), ([[-1]], r"\[0\].*-1"), ([[1.0]], "1.0"),
             ([[True]], "True"), (torch.tensor(5), "tensor")],
    max_new_tokens=[(-1, "-1"), ([1, 2], "2 for 1"), ([[1]], r"\[1\]"), (2.5, "2.5"),
                    (None, "None"), (True, "True")],
    num_speculative_tokens=[(-1, "-1"), (5000, "1000, got 5000"), (True, "True"), ("2", "'2'")],
    max_batch_size=[(0, "0"), ("4", "'4'"), (1.5, "1.5")],
    temperature=[(-0.1, "-0.1"), (None, "None"), (math.nan, "nan"), (math.inf, "inf"),
                 (np.complex64(1), "1")],
    top_p=[(0, "0"), (1.1, "1.1"), (math.nan, "nan")], top_k=[(-1, "-1"), (2.5, "2.5")],
    plan=[("joint", "joint"), (None, "None")], cost=[({1: 2}, "{1: 2}")], on_step=[(3, "3")],
    eos_token_id=[(-2, "-2"), ("</s>", "</s>"), ("", "''"), (64, "0..63.*64"), ([1, 2.0], r"\.0")],
    estimator=[(av.AcceptanceEstimator(3), "K = 7.*3"), (3, "3"), (0, "0")],
    seed=[("x", "'x'"), (-1, "-1"), (True, "True")],
    target=[("gpt2", "str"), (None, "NoneType"), (llama().train(), "training mode"),
            (llama().model, "no head"), (headless(), "no head"), (top_heavy(), "70.*64")],
    drafter=[(None, "NoneType"), (half_trained(), "training mode"), (headless(), "no head"),
             (llama().to("meta"), "meta")],
).items() for value, end in cases] + [
    ("max_new_tokens", 255, r"prompts\[0\].*256 tokens.*2 and 255"),
    ("drafter", llama(max_position_embeddings=4), "1 to 4 tokens")]


@pytest.mark.parametrize("name, value, message", BAD)
def test_bad_input_is_refused_by_name_and_value(name, value, message):
    """Nothing may be changed or ignored in silence, and nothing run before it is checked."""
    good = dict(target=llama(), drafter=llama(), prompts=[[1, 2]], max_new_tokens=9)
    refused(lambda: av.generate(**{**good, name: value}), message)


def test_settings_that_are_not_here_are_refused_or_not_read():
    """A penalty that is ignored in silence gives another text than was asked for (F31)."""
    target, drafter = llama(), noisy(llama(), 0.1)
    want = greedy(target, [1, 2], 20)
    with pytest.raises(TypeError, match="repetition_penalty"):
        av.generate(target, drafter, [[1, 2]], repetition_penalty=2.0)
    target.generation_config.update(repetition_penalty=9.0, eos_token_id=want[4])
    assert av.generate(target, drafter, [[1, 2]], max_new_tokens=20, temperature=0).tokens == [want]


def decoder_of(**kw):
    return av.Decoder(av.SlotLM(llama(), 2, 20), av.SlotLM(llama(1), 2, 20), **{**dict(
        max_batch_size=2, max_length=20, num_speculative_tokens=2, plan="fixed"), **kw})


def add(prompt=(1,), new=3, *, request=0, times=1, step=False, **kw):
    decoder = decoder_of(**kw)
    for i in range(times):
        decoder.add(request, prompt, new)
    return decoder.step() if step else decoder


def measure(prompts=((1,),), *, busy=False, K=2, **kw):
    av.measure_costs(add(num_speculative_tokens=K, times=int(busy)), prompts, **kw)


PARTS = [(call, {name: value}, message) for call, cases in {
    add: [("prompt", [], "request 0.* 0 and 3"), ("new", 0, "max_new_tokens.* 0$"),
          ("new", -1, "-1"), ("new", 20, "1 and 20.*2 slots of 20"), ("times", 3, "for 0 slots"),
          ("prompt", [64], "prompt.*64"), ("prompt", [-1], "-1"), ("prompt", [1.5], "1.5"),
          ("prompt", "ab", "'ab'"), ("new", 2.5, "2.5"), ("request", -1, "request.*-1")],
    measure: [("repeats", 0, "repeats.* 0,"), ("busy", True, "idle"), ("K", 0, "K.*got 0"),
              ("context_lengths", (1, 18), r"contexts in 1..17.*\(1, 18\)"),
              ("context_lengths", (5, 3), r"\(5, 3\)"), ("prompts", [[1], []], r"\(0, 17\)"),
              ("prompts", [], r"prompts.*\[\]"), ("prompts", [[99]], "prompt.*99")],
    decoder_of: [("plan", "?", r"plan '\?'"), ("temperature", -1, "temperature.*-1"),
                 ("estimator", av.AcceptanceEstimator(3), "K = 2.* for 3"), ("cost", 3, "cost.*3"),
                 ("max_batch_size", 0, "batch.*0"), ("num_speculative_tokens", -1, "tokens.*-1"),
                 ("num_speculative_tokens", 1.5, "tokens.*1.5"), ("seed", -1, "seed.*-1"),
                 ("eos_token_ids", [99], "eos.*99"), ("estimator", 3, "estimator.*3")],
    lambda model: av.SlotLM(model, 1, 9): [
        ("model", llama().train(), "training"), ("model", None, "NoneType"),
        ("model", llama().model, "no head")]}.items() for name, value, message in cases]


@pytest.mark.parametrize("call, kw, message", PARTS)
def test_the_parts_refuse_too(call, kw, message):
    """What `generate` checks can be reached past it, so the parts have to name it as well."""
    refused(lambda: call(**kw), message)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["target", "drafter", "head"])
def test_logits_that_are_not_finite_are_named(name, plan):
    """NaN would become some token in silence, or reach the caller's estimator for good."""
    estimator, (target, drafter) = av.AcceptanceEstimator(3), (llama(), llama())
    with torch.no_grad():
        (target if name == "target" else drafter).lm_head.weight[3] = math.nan
    drafter = av.HeadDrafter(Head(drafter)) if name == "head" else drafter
    with pytest.raises(FloatingPointError, match=f"the {name.replace('head', 'drafter')}"):
        av.generate(target, drafter, [[1, 2]], max_new_tokens=6, num_speculative_tokens=3,
                    plan=plan, cost=stairs(), estimator=estimator)
    assert np.isfinite(estimator.sums).all() and np.isfinite(estimator.intercepts).all()


# ---------------------------------------------------------------------- measuring, memory
def record_steps(monkeypatch):
    """[(lengths, slots in use, drafts of each)] of all steps that are run."""
    seen, step = [], av.Decoder.step

    def record(decoder):
        rows = np.flatnonzero(decoder.request >= 0)
        seen.append((*decoder.lengths, len(rows), (decoder.ends - decoder.lengths)[rows[0]] - 1))
        return step(decoder)

    monkeypatch.setattr(av.Decoder, "step", record)
    return seen


def test_costs_are_the_least_of_the_repeats_at_the_shapes_that_run(monkeypatch):
    """A hiccup, or a warm-up round, that is counted leads to wrong budgets for a whole run.

    A clock of our own moves by 3 ms a pass of the target and .5 a token, 2 and .25 of the
    drafter; a tenth of it in the first round; and once by 500 ms more."""
    now, seen, target = [0.0], record_steps(monkeypatch), llama()
    drafter = noisy(target, 0.1)

    def clock(ms, token_ms):
        def hook(module, args, out):
            rounds = sum(x[4:] == (4, 0) for x in seen)
            now[0] += 1e-3 * (ms + token_ms * args[0].numel()) * (0.1 if rounds == 1 else 1)
            now[0] += 0.5 * (rounds == 3 and seen[-1][4:] == (4, 2))
        return hook

    monkeypatch.setattr(av, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    target.model.embed_tokens.register_forward_hook(clock(3, 0.5))
    drafter.model.embed_tokens.register_forward_hook(clock(2, 0.25))
    estimator = av.AcceptanceEstimator(8)
    decoder = av.Decoder(av.SlotLM(target, 4, 60), av.SlotLM(drafter, 4, 60), max_batch_size=4,
                         max_length=60, num_speculative_tokens=8, estimator=estimator,
                         eos_token_ids=[*range(64)])  # which would end each step's drafts
    state = lambda: copy.deepcopy([x.tolist() for x in (
        decoder.generator.get_state(), decoder.expected, decoder.usual, estimator.sums,
        decoder.request)]) + [estimator.steps, decoder.plan, decoder.cost]
    before = state()
    cost = av.measure_costs(decoder, [np.array([1, 2, 3, 4, 5]), torch.tensor([7] * 9)], repeats=3)
    assert state() == before and decoder.estimator is estimator
    shapes = [x[4:] for x in seen]
    assert shapes[:9] * 4 == shapes and {*shapes} == {
        (1, 0), (2, 0), *((4, d) for d in (0, 1, 2, 3, 5, 7, 8))}
    depths, sizes = (x[:-1] for x, _ in cost.curves)
    assert depths.tolist() == [1, 2, 3, 5, 7, 8]
    assert sizes.tolist() == [1, 2, 4, 8, 12, 16, 24, 32, 36]
    assert np.allclose(cost.draft_ms(depths), depths * (2 + 0.25 * 4))
    assert np.allclose(cost.verify_ms(sizes), 3 + 0.5 * sizes)
    assert {x[:4] for x in seen} == {(5, 20, 35, 51)}  # shortest prompt to what has room


def test_a_measurement_that_raised_leaves_the_decoder_idle(monkeypatch):
    """Requests of the measurement that stay in their slots would be decoded with one's own."""
    decoder = decoder_of()
    monkeypatch.setattr(decoder.target, "logits", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        av.measure_costs(decoder, [[1]])
    assert (decoder.request < 0).all()


@pytest.mark.parametrize("limit", [300, 100_000])
def test_costs_are_measured_within_a_bounded_context(limit, monkeypatch):
    """A measurement up to max_new_tokens takes half a minute and gigabytes before it starts."""
    target, seen = llama(max_position_embeddings=100_000), record_steps(monkeypatch)
    lms = [av.SlotLM(m, 2, limit) for m in (target, noisy(target, 0.1))]
    decoder = av.Decoder(*lms, max_batch_size=2, max_length=limit, num_speculative_tokens=3)
    av.measure_costs(decoder, [[1] * 400, [2] * 30], repeats=1)
    assert {x[:2] for x in seen} == {(30, av.CONTEXT)}
    assert all(lm.kv[0][0].shape[1] <= 2 * (av.CONTEXT + 4) for lm in lms)
    seen.clear()
    av.measure_costs(decoder, [[1] * 400], context_lengths=(7, 290), repeats=1)
    assert {x[:2] for x in seen} == {(7, 290)}


def test_memory_and_state_do_not_grow():
    """A list kept for each step, or a hook left on the model, grows with the run (F44).

    The 30 steps of a round would take 60 kB if they were kept."""
    lms = [av.SlotLM(m, 4, 8) for m in (cycle(16), cycle(16, wrong_at=(3,)))]
    decoder = av.Decoder(*lms, max_batch_size=4, max_length=8, num_speculative_tokens=3, seed=0,
                         cost=stairs(), estimator=av.AcceptanceEstimator(3))
    requests, sizes = ((i, [i % 16], 6) for i in range(10**9)), []
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
    assert sizes[3] - sizes[2] < 20_000 and lms[0].kv[0][0].shape[1] == 8


# ------------------------------------------------------------------------ the study's statistics


def test_auc_by_hand():
    """Ties broken by order of memory, or ranks off by one, would shift every AUC of the study.

    Accepted at .9, .5; rejected at .5, .1. Of the four pairs three are in order and one ties:
    3.5/4. All scores equal: 1/2. Against all pairs, on scores with many ties, to rounding.
    """
    seen = np.array([True, True, False, False])
    assert demo.auc(seen, np.array([0.9, 0.5, 0.5, 0.1])) == 3.5 / 4
    assert demo.auc(seen, np.array([0.1, 0.5, 0.5, 0.9])) == 0.5 / 4
    assert demo.auc(seen, np.full(4, 0.3)) == 0.5
    rng = np.random.default_rng(0)
    seen, score = rng.random(200) < 0.6, rng.integers(0, 12, 200) / 3
    above = score[seen][:, None] - score[~seen]
    assert demo.auc(seen, score) == pytest.approx(((above > 0) + 0.5 * (above == 0)).mean())


def test_ece_by_hand():
    """An error averaged over bins instead of drafts, or a lost bin at 1, would look calibrated.

    Ten bins. In .8 to .9: predicted .8, .88, .84 (mean .84), seen 2/3. In .2 to .3: .2, seen 0.
    In .9 to 1: 1, seen 1. So (3 |.84 - 2/3| + 1 |.2 - 0| + 0) / 5 = 0.144. In one bin it is the
    difference of the means: |3.72 - 3| / 5, the same here, as both bins err to one side.
    """
    predicted = np.array([0.8, 0.88, 0.84, 0.2, 1.0])
    seen = np.array([True, True, False, False, True])
    assert demo.ece(seen, predicted) == pytest.approx(0.144)
    assert demo.ece(seen, predicted, bins=1) == pytest.approx(0.144)
    assert demo.ece(np.array([True, False]), np.array([0.0, 1.0])) == 1.0
    assert demo.ece(np.array([True, False]), np.array([0.0, 1.0]), bins=1) == 0.0


def test_logistic_fit_by_hand():
    """A fit that stops early would be called the optimum that the online fit is measured by.

    One constant column, 3 of 4 accepted: log-odds log 3. A column of two groups, 3 of 4 and 1 of 2:
    log 3 and 0.
    """
    seen = np.array([True, True, True, False])
    assert demo.fit_logistic(np.ones((4, 1)), seen) == pytest.approx(np.log([3.0]), abs=1e-5)
    groups, seen = np.eye(2)[[0, 0, 0, 0, 1, 1]], np.append(seen, [True, False])
    assert demo.fit_logistic(groups, seen) == pytest.approx([np.log(3.0), 0.0], abs=1e-5)


def test_logistic_fit_is_the_minimum():
    """At the optimum the gradient vanishes and no neighbour is better; separable labels stay finite
    by the ridge."""
    rng = np.random.default_rng(1)
    x = demo.design(3 * rng.standard_normal(500), rng.integers(0, 3, 500), 3)
    seen = rng.random(500) < demo.sigmoid(x @ [0.7, 1.0, -0.5, 0.2])
    theta = demo.fit_logistic(x, seen)
    assert np.abs(x.T @ (demo.sigmoid(x @ theta) - seen)).max() < 1e-4
    best = demo.log_loss(seen, demo.sigmoid(x @ theta))
    for _ in range(100):
        assert demo.log_loss(seen, demo.sigmoid(x @ (theta + 0.01 * rng.standard_normal(4)))) > best
    separable = demo.fit_logistic(np.array([[-1.0], [1.0]]), np.array([False, True]), ridge=1e-3)
    assert 3 < separable[0] < 20


def test_rules_that_look_at_the_drawn_token_are_biased():
    """The study must show what the worked examples say: 0.4 and 0.75 for 0.5, and shipped 0.5."""
    first_is_a = {rule: law[0] for rule, (law, _) in demo.biased_rules().items()}
    assert first_is_a.pop("verify if q(drawn token) >= 0.5") == pytest.approx(0.4)
    assert first_is_a.pop("budget from this step's survivals") == pytest.approx(0.75)
    assert len(first_is_a) == 4 and all("in use" in rule for rule in first_is_a)
    assert list(first_is_a.values()) == pytest.approx([0.5] * 4)
    for law, _ in demo.biased_rules().values():
        assert law.sum() == pytest.approx(1.0)


# ------------------------------------------------------------------------ the demo's pairs


def test_a_pair_saved_to_a_folder_is_loaded_and_a_broken_one_is_refused(tmp_path, monkeypatch):
    """`--target` and `--draft`: what runs is what was saved. A weight that the file lacks would be
    made up at random, and a demo of such a pair would be a demo of nothing."""
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    for name, seed in ("target", 0), ("draft", 1):
        llama(seed, vocab_size=len(tokenizer)).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    lines = tmp_path / "lines.txt"
    lines.write_bytes("\ufeffab\n\ncd\n".encode())

    def load(target=tmp_path / "target"):
        monkeypatch.setattr(sys, "argv", ["demo.py", "--target", str(target), "--draft",
                                          str(tmp_path / "draft"), "--prompts", str(lines)])
        return demo.find_pair(demo.arguments(), torch.device("cpu"))

    pair = load()
    assert pair.prompts == [tokenizer(line).input_ids for line in ("ab", "cd")]
    for model, seed in (pair.target, 0), (pair.drafter, 1):
        want = llama(seed, vocab_size=len(tokenizer)).state_dict()
        assert all(torch.equal(w, want[k]) for k, w in model.state_dict().items())
    weights = pair.target.state_dict()
    weights.pop("model.layers.1.mlp.up_proj.weight")
    pair.target.save_pretrained(tmp_path / "less", state_dict=weights)
    tokenizer.save_pretrained(tmp_path / "less")
    broken = {"less": "lacks weights: model.layers.1.mlp.up_proj.weight", "none": "cannot load"}
    for name in "cut", "other":
        shutil.copytree(tmp_path / "target", tmp_path / name)
    (tmp_path / "cut/model.safetensors").write_bytes(b"12345678")
    transformers.ByT5Tokenizer(extra_ids=3).save_pretrained(tmp_path / "other")
    for name, message in (broken | {"cut": "cannot load", "other": "vocabularies differ"}).items():
        with pytest.raises(SystemExit, match=message):
            load(tmp_path / name)


def test_weights_in_a_cache_file_that_was_changed_are_not_used(tmp_path, monkeypatch, capsys):
    """Weights that are not finite, changed, or of another shape must not be what the demo runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, bad = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    before = copy.deepcopy(model.state_dict())
    demo.keep("x", model)
    assert demo.restore("x", bad) and torch.equal(bad.weight, model.weight)
    assert not demo.restore("none", bad) and not capsys.readouterr().out
    with torch.no_grad():
        bad.bias[0] = math.nan
    for weights in (bad, torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 3)):
        demo.keep("x", weights)
        assert not demo.restore("x", model) and "training anew" in capsys.readouterr().out
    demo.keep("x", model)
    file = demo.cache_folder() / "x.pt"
    kept = torch.load(file, weights_only=True)
    kept["weights"]["bias"][0] += 1
    torch.save(kept, file)
    assert not demo.restore("x", model) and "changed" in capsys.readouterr().out
    file.write_bytes(b"half a file")
    assert not demo.restore("x", model) and "training anew" in capsys.readouterr().out
    assert all(torch.equal(w, before[k]) for k, w in model.state_dict().items())


def test_the_readme_runs():
    """A README whose code does not run is a defect: its Python blocks are executed in order."""
    here = pathlib.Path(av.__file__).parent
    blocks = re.findall(r"```python\n(.*?)```", (here / "README.md").read_text(), re.S)
    assert blocks
    subprocess.run([sys.executable, "-c", "\n".join(blocks)], check=True, cwd=here, timeout=100)


def test_the_picture_in_the_readme():
    """A budget in the README that can't be redone by hand from its numbers teaches nothing."""
    text = (pathlib.Path(av.__file__).parent / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^  request \d+ +((?:0\.\d\d +){6}0\.\d\d)$", text, re.M)
    best = sorted((float(s) for row in rows for s in row.split()), reverse=True)
    draft = float(re.search(r"to draft 7: ([\d.]+)", text)[1])
    verify = {int(n): float(ms) for n, ms in re.findall(r"T\((\d+)\) = ([\d.]+)", text)}
    budget, tokens, rate = re.search(r"^ +(\d+) +([\d.]+) .* ([\d.]+) +<- the budget", text,
                                     re.M).groups()

    def per_ms(b):
        ms = draft + np.interp(len(rows) + b, [*verify], [*verify.values()])
        return (len(rows) + sum(best[:b])) / ms

    assert len(rows) == 4 and max(range(len(best) + 1), key=per_ms) == int(budget)
    assert per_ms(int(budget)) == pytest.approx(float(rate), abs=1e-3)
    assert float(tokens) == pytest.approx(len(rows) + sum(best[:int(budget)]), abs=0.02)

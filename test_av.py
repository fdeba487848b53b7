# SPDX-License-Identifier: MIT
"""The proofs. Each test says what would break, and compares with something independent of av.py:
exact enumeration, `model.generate`, transformers' own warpers, a float64 fit in numpy.

Tests that draw state the probability that a right implementation fails them (FALSE_ALARM each).
    pytest -q test_av.py
"""
import ast
import copy
import gc
import itertools
import math
import pathlib
import re
import shutil
import subprocess
import sys
import time
import types
import warnings

import numpy as np
import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import av
import demo

FALSE_ALARM = 1e-6
HERE = pathlib.Path(__file__).parent
STAIRS = av.CostTable({1: 0.05, 64: 0.2},
                      {1: 1, 3: 1, 4: 1.6, 6: 1.6, 7: 2.2, 12: 2.2, 13: 9, 64: 40})

# ------------------------------------------------------------------------ small models


def llama(seed=0, **changes):
    """A random Llama whose greedy text is not constant."""
    config = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                  num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                  initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**config, **changes})).eval()


def noisy(model, scale, seed=1):
    """A drafter that mostly agrees: a copy of the target with noise on every weight."""
    drafter, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for w in drafter.parameters():
            w += torch.randn(w.shape, generator=generator) * w.std() * scale
    return drafter


def bigram(probs):
    """A Llama whose next-token law after token t is exactly probs[t], whatever came before."""
    probs = torch.tensor(probs, dtype=torch.float64)
    V = len(probs)
    H = V + V % 2
    model = llama(vocab_size=V, hidden_size=H, num_hidden_layers=1, num_attention_heads=1,
                  num_key_value_heads=1, rms_norm_eps=1e-12)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(V, H))
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :V] = (probs.log().clamp(min=-1e4) / math.sqrt(H)).T.float()
    return model


def cycle(V, wrong_at=()):
    """A bigram that always says (t + 1) mod V, but t + 2 after the tokens in wrong_at."""
    rows = np.full((V, V), 1e-9)
    for t in range(V):
        rows[t, (t + 1 + (t in wrong_at)) % V] = 1.0
    return bigram(rows / rows.sum(1, keepdims=True))


def greedy(model, prompt, n, **kw):
    """The judge: plain `model.generate`, one prompt at a time."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n,
                         do_sample=False, pad_token_id=0, **kw)
    return out[0, len(prompt):].tolist()


def prompts_of(lengths, V=64, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, V, n).tolist() for n in lengths]


def chi_square(counts, probs):
    """P(a right sampler deviates at least this much); cells are merged to 5 expected draws."""
    counts, expected = np.ravel(counts).astype(float), np.ravel(probs) * np.sum(counts)
    assert counts[expected == 0].sum() == 0, "drew something of probability zero"
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    keep = expected > 0
    x = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    return torch.special.gammaincc(torch.tensor((keep.sum() - 1) / 2.0), torch.tensor(x / 2)).item()


# ------------------------------------------------------------------------ sampling


def test_warp_is_transformers_law():
    """A different order or edge of temperature, top-k, top-p would make p another law."""
    from transformers.generation.logits_process import (TemperatureLogitsWarper, TopKLogitsWarper,
                                                        TopPLogitsWarper)
    logits = torch.randn(7, 500, generator=torch.Generator().manual_seed(0)) * 2
    for temperature, k, p in itertools.product((0.3, 1.0, 2.0), (0, 1, 5, 499),
                                               (0.05, 0.5, 0.95, 1.0)):
        want = TemperatureLogitsWarper(temperature)(None, logits)
        want = TopKLogitsWarper(k)(None, want) if k else want
        want = TopPLogitsWarper(p)(None, want) if p < 1 else want
        got = av.warp(logits, temperature, k, p)
        assert torch.allclose(got, want.softmax(-1), atol=1e-6), (temperature, k, p)
    want = torch.tensor([0.0, -20, -math.inf]).softmax(-1)
    assert torch.allclose(av.warp(torch.tensor([0.0, -20, -30]), top_k=np.uint8(2)), want, 1e-5, 0)
    assert torch.equal(av.warp(logits, 0.0).argmax(-1), logits.argmax(-1))
    assert torch.equal(av.warp(logits, 0.0).sum(-1), torch.ones(7))
    for edge in torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]]):
        av._cut(edge, torch.ones(1, 1), 0, 0.5, 64)  # half is reached by one token: one is kept
        assert sorted(edge[0].tolist()) == [0, 0, 1]
    for law in ((0, 0, 1.0), (1.0, 0, 0.5), (1.0, 0, 1.0)):  # the buffer is used, logits are not
        out, before = torch.empty(7, 500), logits.clone()
        assert torch.equal(av.warp(logits, *law), av._warp(logits, *law, out)[0])
        assert torch.equal(out, av.warp(logits, *law)) and torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [1e-9, 1e-40, 1e-300])
def test_tiny_temperature_is_greedy_not_nan(temperature):
    """Dividing before the maximum is taken off gives inf - inf = NaN."""
    for scale in (1, 1e9):
        logits = torch.tensor([[3.0, 2, 1]]) * scale
        assert av.warp(logits, temperature).tolist() == [[1, 0, 0]]
        assert av.logit_q_max(logits, temperature).item() == 10


@pytest.mark.parametrize("V", [8192, 9000, 4099])
def test_a_large_vocabulary_is_cut_and_drawn_as_a_small_one(V):
    """Rows that need more than the few largest, ties across blocks or a block's edge: the law of
    top-k and top-p must be that of a full sort, and no token outside it drawn."""
    generator = torch.Generator().manual_seed(V)
    logits = torch.randn(12, V, generator=generator) * torch.linspace(0.1, 9, 12)[:, None]
    logits[3] = logits[3].round()  # many ties
    logits[4, ::64] = 20.0  # the first of each block
    for law in (dict(top_p=0.95), dict(top_p=0.3, temperature=0.7), dict(top_k=70, top_p=0.9)):
        probs = (logits.double() / law.get("temperature", 1)).softmax(-1)
        if "top_k" in law:
            probs = probs * (probs >= probs.topk(law["top_k"]).values[:, -1:])
            probs /= probs.sum(-1, keepdim=True)
        ordered = probs.sort(-1, descending=True).values
        inside = ordered.cumsum(-1) - ordered < law["top_p"]
        floor = ordered.masked_fill(~inside, 9).amin(-1, keepdim=True) * (1 - 1e-9)
        probs = probs * (probs >= floor)
        got = av.warp(logits, **law)
        assert (got - probs / probs.sum(-1, keepdim=True)).abs().sum(-1).max() < 1e-4
        draws = torch.stack([av.sample(got, generator) for _ in range(200)], 1)
        assert (got.gather(1, draws) > 0).all()
    # In blocks too it is the law: 40,000 draws over 8 cells. False alarm 1e-6.
    law = torch.rand(V, generator=generator) ** 4 * torch.linspace(0, 1, V) ** 2
    cells = torch.arange(V) * 8 // V
    draws = av.sample(law.expand(40_000, V), generator)
    want = torch.zeros(8).index_add(0, cells, law / law.sum()).double().numpy()
    assert chi_square(torch.bincount(cells[draws], minlength=8).numpy(), want) > FALSE_ALARM


def test_the_law_of_many_tokens_sums_to_one():
    """Summed in float32 in sequence, 150,000 small weights beside a large one lose 5e-4 of it: a
    law that is drawn from by its shares, but compared by its values, would no longer be lossless.
    """
    logits = torch.zeros(3, 151_936)
    logits[torch.arange(3), torch.tensor([0, 7, 9])] = torch.tensor([14.0, 15.0, 10.0])
    exact = logits.double().softmax(-1)
    assert ((av.warp(logits) - exact) / exact).abs().max() < 2e-6
    slope = torch.linspace(0, 0.1, 151_936).index_fill(0, torch.tensor([7]), 15.0)
    ordered = slope.double().softmax(-1).sort(descending=True).values
    nucleus = (ordered.cumsum(-1) - ordered < 0.97).sum()  # 52,405; of the raw softmax 53,418
    assert abs((av.warp(slope, top_p=0.97) > 0).sum() - nucleus) < 10
    assert torch.allclose(av.logit_q_max(logits).double(), exact.amax(-1).logit(), atol=1e-5)
    assert torch.allclose(av._warp(logits, 1.0, 0, 0.9)[1].double(), exact.amax(-1), atol=1e-6)


def test_a_tiny_nucleus_holds_one_token():
    """A top_p that float32 rounds to 0 leaves nothing, 0 / 0, and then some token at random."""
    for top_p in (1e-50, 1e-6):
        assert av.warp(torch.tensor([[1.0, 3.0, 2.0]]), top_p=top_p).tolist() == [[0, 1, 0]]


def test_sample_draws_the_law_and_never_a_zero():
    """A CDF searched from the wrong side draws tokens of probability zero. False alarm 1e-6."""
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    draws = av.sample(probs.expand(400_000, 6), torch.Generator().manual_seed(0))
    assert chi_square(np.bincount(draws, minlength=6), probs.numpy()) > FALSE_ALARM


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_sample_at_the_ends_of_the_uniform(u, monkeypatch):
    """u = 0 must not take a leading zero, u -> 1 not a trailing one."""
    monkeypatch.setattr(torch, "rand", lambda *shape, **kw: torch.full(shape, u, dtype=kw["dtype"]))
    assert av.sample(torch.tensor([[0.0, 0.3, 0.7, 0.0]])).item() == (1 if u == 0 else 2)


# ------------------------------------------------------------------------ the accept rule

GRID = 12  # p and q are multiples of 1/4: every ratio and residual breaks at multiples of 1/12


def verify_exactly(p, q, drafts, n, monkeypatch):
    """Run `verify` on one request for every cell of its uniforms: {emitted: probability}."""
    K, cells = len(q), (np.arange(GRID) + 0.5) / GRID
    u = np.array(list(itertools.product(cells, repeat=K + 1)))
    calls = iter([torch.tensor(u[:, :K]), torch.tensor(u[:, K:])])
    monkeypatch.setattr(torch, "rand", lambda *shape, **kw: next(calls))
    N = len(u)
    accepted, token = av.verify(
        torch.tensor(p[:n + 1]).float().repeat(N, 1), torch.tensor(q).float().expand(N, -1, -1),
        torch.tensor(drafts).expand(N, -1), torch.full((N,), n))
    monkeypatch.undo()
    ends, times = np.unique(np.stack([accepted, token]), axis=1, return_counts=True)
    return {(*drafts[:a], t): c / N for a, t, c in zip(*ends.tolist(), times)}


def complete(law, p_of, length):
    """Joint law of the first `length` tokens when the target itself draws what is missing."""
    out = {}
    for text, weight in law.items():
        for tail in itertools.product(range(len(p_of(()))), repeat=length - len(text)):
            w, all_ = weight, text
            for t in tail:
                w, all_ = w * p_of(all_)[t], (*all_, t)
            out[all_] = out.get(all_, 0) + w
    return out


def target_law(p_of, length):
    return complete({(): 1.0}, p_of, length)


def distance(a, b):
    return 0.5 * sum(abs(a.get(k, 0) - b.get(k, 0)) for k in set(a) | set(b))


def test_trim_and_verify_emit_exactly_the_target_law(monkeypatch):
    """Any change to the ratio, the residual, its row or its clamp shows in one of 300 exact laws.

    p and q depend on the prefix; how many drafts are verified is any function of the q rows, as the
    survival is. All drafts, acceptances and resamplings are enumerated; nothing is drawn.
    """
    rng, K, V = np.random.default_rng(0), 2, 3
    quarters = [np.array(c) / 4 for c in itertools.product(range(5), repeat=V) if sum(c) == 4]
    for case in range(300):
        rows = {s: (quarters[rng.integers(len(quarters))], quarters[rng.integers(len(quarters))])
                for m in range(K + 1) for s in itertools.product(range(V), repeat=m)}
        if case % 10 == 0:  # p = q everywhere
            rows = {s: (p, p) for s, (p, _) in rows.items()}
        depth = {s: rng.integers(K + 1) for s in rows}  # of the q rows, so of the prefix
        law = {}
        for x in itertools.product(range(V), repeat=K):
            weight = math.prod(rows[x[:i]][1][x[i]] for i in range(K))
            if not weight:
                continue
            n = 0
            while n < K and depth[x[:n]] > n:
                n += 1
            p, q = ([rows[x[:i]][0] for i in range(K + 1)],
                    np.array([rows[x[:i]][1] for i in range(K)]))
            for text, w in verify_exactly(np.array(p), q, x, n, monkeypatch).items():
                law[text] = law.get(text, 0) + weight * w
        p_of = lambda s: rows[s][0]
        assert distance(complete(law, p_of, K + 1), target_law(p_of, K + 1)) < 1e-6, case


def test_worked_example_a_feature_of_the_drawn_token_biases_the_output(monkeypatch):
    """Spec section 7.1. p = (1/2, 1/2), q = (1/5, 4/5), 'trim if q(x) < 1/2'.

    Drawing a (1/5) trims, so the target draws: a with 1/2. Drawing b (4/5) verifies: accepted with
    (1/2)/(4/5) = 5/8, else the residual (1, 0) gives a. P(a) = 1/5*1/2 + 4/5*3/8 = 0.4, not 0.5.
    With q_max in place of q(x) nothing is trimmed, and P(a) = 1/5 + 4/5*3/8 = 0.5.
    """
    p, q = np.array([[0.5, 0.5]] * 2), np.array([[0.2, 0.8]])

    def first_is_a(feature):
        total = 0.0
        for x in (0, 1):
            monkeypatch.setattr(sys.modules[__name__], "GRID", 40)
            law = verify_exactly(p, q, (x,), int(feature(x) >= 0.5), monkeypatch)
            total += q[0, x] * sum(w for text, w in law.items() if text[0] == 0)
        return total

    assert first_is_a(lambda x: q[0, x]) == pytest.approx(0.4, abs=1e-6)
    assert first_is_a(lambda x: q[0].max()) == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("p, q, u, want", [
    ([0, 0, 1.0], [0.5, 0.5, 0], 0.0, 2),  # p(x) = 0 is rejected even at u = 0
    ([0.3, 0.5, 0.2], [0.3, 0.5, 0.2], 1 - 2.0**-53, 0)])  # p = q is accepted at any u
def test_acceptance_at_the_ends_of_the_uniform(p, q, u, want, monkeypatch):
    """`u <= p/q` would accept what the target never says."""
    monkeypatch.setattr(torch, "rand", lambda *shape, **kw: torch.full(shape, u, dtype=kw["dtype"]))
    p, one = torch.tensor([p, p]), torch.tensor([1])
    accepted, token = av.verify(p, torch.tensor([[q]]), torch.tensor([[0]]), one)
    assert (0 if accepted else token.item()) == want


def test_a_residual_without_mass_falls_back_to_p():
    """0/0 in the residual is NaN, or token 0: after a rejection by rounding at p = q, p remains."""
    p = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    q = torch.tensor([[[0.0, 1.0, 0.0]]])
    accepted, token = av.verify(p, q, torch.tensor([[0]]), torch.tensor([1]))  # a forced rejection
    assert (accepted.item(), token.item()) == (0, 1)


# ------------------------------------------------------------------------ a whole step, enumerated


class Oracle:
    """Depth-first over every random choice: `choose(n)` answers, `next()` takes the next path."""

    def __init__(self):
        self.path, self.at = [], 0

    def choose(self, n):
        if self.at == len(self.path):
            self.path.append([0, n])
        self.at += 1
        return self.path[self.at - 1][0]

    def next(self):
        while self.path and self.path[-1][0] + 1 == self.path[-1][1]:
            self.path.pop()
        if self.path:
            self.path[-1][0] += 1
        self.at = 0
        return bool(self.path)


def laws_of_a_step(decoder, monkeypatch):
    """Every draft that `decoder.step` can draw: the joint law of each pair of requests' texts.

    `sample` is replaced by an oracle that walks through all drafts, `verify` by a recorder of what
    it was given; the emission law then follows from the textbook rule, written here once more.
    Returns {(text of request 0, text of request 1, ...): probability} and the set of num_verified.
    """
    oracle, total, seen, more = Oracle(), {}, set(), True
    before = copy.deepcopy({k: v for k, v in vars(decoder).items() if k not in (
        "generator", "requests", "models", "target", "drafter", "budget")})
    cached = [m.cached.copy() for m in decoder.models]
    while more:
        weight, given = [1.0], {}

        def sample(probs, generator):
            picks = []
            for row in probs.double():
                options = row.nonzero().flatten().tolist()
                picks.append(options[oracle.choose(len(options))])
                weight[0] *= row[picks[-1]].item() / row.sum().item()
            return torch.tensor(picks)

        def record(p, q, drafts, num_verified, generator):
            given.update(p=p.double(), q=q.double(), drafts=drafts, n=num_verified)
            return torch.zeros_like(num_verified), torch.zeros_like(num_verified)

        with monkeypatch.context() as m:
            m.setattr(av, "sample", sample)
            m.setattr(av, "verify", record)
            decoder.step()
        n = given["n"].tolist()
        seen.add(tuple(n))
        row, laws = 0, []
        for r in range(len(n)):
            law, alive = {}, 1.0
            for i in range(n[r] + 1):
                p = given["p"][row + i].numpy()
                x, q = ((given["drafts"][r, i].item(), given["q"][r, i].numpy()) if i < n[r]
                        else (0, 0))
                ok = min(1, p[x] / q[x]) if i < n[r] else 0
                rest = np.maximum(p - q, 0)
                rest = rest / rest.sum() if rest.sum() > 1e-12 else p
                for t in range(len(p)):
                    text = (*given["drafts"][r, :i].tolist(), t)
                    law[text] = law.get(text, 0) + alive * (1 - ok) * rest[t]
                alive *= ok
            laws.append(law)
            row += n[r] + 1
        for texts in itertools.product(*laws):
            w = weight[0] * math.prod(law[t] for law, t in zip(laws, texts))
            total[texts] = total.get(texts, 0) + w
        vars(decoder).update(copy.deepcopy(before))
        for m_, c in zip(decoder.models, cached):
            m_.cached[:] = c
        more = oracle.next()
    return total, seen


def step_decoder(plan, K, prompts, P, Q, cost, **kw):
    decoder = av.Decoder(bigram(P), bigram(Q), [(p, 9) for p in prompts], max_length=16, plan=plan,
                         max_batch_size=len(prompts), num_speculative_tokens=K, cost=cost, seed=0,
                         estimator=av.AcceptanceEstimator(K, slope=1.0, intercept=0.0), **kw)
    decoder.step()  # the first step of a round verifies everything; it also leaves a past behind
    return decoder


P3 = [[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]]
P2, Q2 = [[0.5, 0.5], [0.2, 0.8]], [[0.6, 0.4], [0.07, 0.93]]
Q3 = [[0.3, 0.6, 0.1], [0.05, 0.05, 0.9], [0.4, 0.35, 0.25]]  # the next row depends on the token


@pytest.mark.parametrize("plan", av.PLANS)
def test_a_step_of_the_real_loop_emits_exactly_the_target_law(plan, monkeypatch):
    """A budget, slot or stop that looks at a drafted token shifts the joint law of two requests.

    Two requests, stairs and a slope of costs, so that depths and budgets really vary; the law is
    that of the target to 1e-6. Joint looks at the confidences of this step, which depend on its
    tokens from the second on: so it has a third draft to decide about, and two words only.
    """
    varied, most, (K, P, Q) = set(), 0, (3, P2, Q2) if plan == "joint" else (2, P3, Q3)
    stairs = [{1: 1, 2 + b: 1.01, 3 + b: 9, 64: 90} for b in range(1, 2 * K)]
    for costs in (*stairs, {1: 1, 9: 2.6 if plan == "joint" else 3.2}):
        decoder = step_decoder(plan, K, [[0], [1]], P, Q, av.CostTable({1: 0.01}, costs))
        starts = [decoder.text[r, decoder.lengths[r] - 1] for r in range(2)]
        total, seen = laws_of_a_step(decoder, monkeypatch)
        varied, most = varied | seen, max(most, len(seen))
        got = {}
        after = lambda start: lambda s: P[(start, *s)[-1]]
        for (a, b), w in total.items():
            for (x, u), (y, v) in itertools.product(
                    complete({a: 1.0}, after(starts[0]), K + 1).items(),
                    complete({b: 1.0}, after(starts[1]), K + 1).items()):
                got[x, y] = got.get((x, y), 0) + w * u * v
        one, two = (target_law(after(s), K + 1) for s in starts)
        want = {(x, y): u * v for (x, u), (y, v) in itertools.product(one.items(), two.items())}
        assert distance(got, want) < 1e-6
    assert plan == "fixed" or len(varied) > 3, (
        "the plan never trimmed: the test would prove nothing")
    assert plan != "joint" or {(2, 3), (3, 2)} < varied, "one drafts on without the other"
    assert plan == "fixed" or most > 1, "this step's confidences decided about nothing"


def test_worked_example_a_drafter_that_reads_another_requests_draft_biases_the_output():
    """Why a drafter's rows may hang on their own request's drafts only (section 6 of av.py).

    p = q = (1/2, 1/2) for draft 1 of request 1, of survival .6; request 2 has .9, then c. Budget 2.
    If c is .8 after a and .3 after b of *request 1*, an a is never verified and drawn anew, and a b
    always kept: P(b) = 1/2 * 1/2 + 1/2 = 0.75. With a c that does not ask, whichever it is: 0.5.
    """
    for after_a, after_b, want in (0.8, 0.3, 0.75), (0.8, 0.8, 0.5), (0.3, 0.3, 0.5):
        b = 0.0
        for is_b, c in (0, after_a), (1, after_b):  # each drawn half the time
            verified = av.trim(torch.tensor([[0.6, 0.1], [0.9, c]]), 2)[0] > 0
            b += 0.5 * (is_b if verified else 0.5)  # p = q: kept for sure; or drawn anew from p
        assert b == want


def test_worked_example_a_budget_from_this_step_biases_the_output(monkeypatch):
    """Spec section 7.2. p = q = (1/2, 1/2), but after a the draft row is (.99, .01).

    Costs 1, 1.9, 1.9 for 0, 1, 2 drafts, confidence q_max. After a the survivals .5, .495 make
    2 drafts the best budget (1.995/1.9), a is verified and kept; after b .5, .25 make it 0, and the
    target draws anew: P(first = a) = 1/2 + 1/2 * 1/2 = 0.75. From last step's survivals: 0.5.
    """
    even = [0.5, 0.5]
    cost = av.CostTable({1: 1e-9}, {1: 1, 2: 1.9, 3: 1.9, 4: 2.8})
    decoder = step_decoder("verification", 2, [[1]], [even, even], [[0.99, 0.01], even], cost)
    decoder.text[0, decoder.lengths[0] - 1] = 1
    decoder.tokens[0, decoder.lengths[0] - 1] = 1
    decoder.confidence[:] = 0.5
    # logit(q_max) with slope 1 and intercept 0 is q_max itself.
    decoder.estimator.slope, decoder.estimator.intercepts = 1.0, np.zeros(2)

    def first_is_a():
        total, _ = laws_of_a_step(decoder, monkeypatch)
        return sum(w for (text,), w in total.items() if text[0] == 0)

    assert first_is_a() == pytest.approx(0.5, abs=1e-6)
    honest = av.trim
    monkeypatch.setattr(av, "trim", lambda s, b: honest(s, av.draft_budget(s.numpy(), cost)))
    logits = decoder.target.logits
    monkeypatch.setattr(decoder.target, "logits",
                        lambda t, l, s, n, b: logits(t, l, s, n, int(n.sum())))
    assert first_is_a() == pytest.approx(0.75, abs=1e-6)


# ------------------------------------------------------------------------ the law, drawn end to end


@pytest.mark.parametrize("plan", ["verification", "joint"])
def test_generate_draws_the_target_law(plan):
    """Everything at once in `generate`: 200,000 requests of 3 tokens, refilled, refitted, trimmed.

    The joint law of the three tokens (64 cells) against the exact one, with temperature, top-k and
    top-p, in batches of 2,500. False alarm 1e-6 per plan.
    """
    rng, law = np.random.default_rng(3), dict(temperature=1.3, top_k=3, top_p=0.9)
    P, Q = rng.dirichlet(np.full(4, 0.8), 4), rng.dirichlet(np.full(4, 0.8), 4)
    Q = 0.7 * P + 0.3 * Q
    target, N = bigram(P.tolist()), 200_000
    estimator = av.AcceptanceEstimator(2, refit_every=7)
    cost = av.CostTable({1: 0.01, 4000: 2}, {1: 1, 2500: 10, 3000: 10.5, 3001: 11, 4500: 12,
                                             4501: 14, 7500: 18})
    steps, most = [], 0 if plan == "verification" else 2 * 2500  # joint: of all that it may draft
    out = av.generate(target, bigram(Q.tolist()), [[0]] * N, max_new_tokens=3, cost=cost, plan=plan,
                      num_speculative_tokens=2, max_batch_size=2500, seed=1, estimator=estimator,
                      on_step=lambda s: steps.append(
                          s.num_verified.sum() / max((s.survival >= 0).sum(), most, 1)), **law)
    p = av.warp(target(torch.arange(4)[:, None]).logits[:, 0].detach(), **law).double().numpy()
    exact = p[0][:, None, None] * p[:, :, None] * p[None]
    counts = np.zeros((4, 4, 4))
    np.add.at(counts, tuple(np.array(out.tokens).T), 1)
    assert estimator.steps > 30 and 0.02 < np.mean(np.array(steps) < 1), "nothing was trimmed"
    assert chi_square(counts, exact) > FALSE_ALARM


def test_a_smaller_or_larger_drafter_vocabulary_keeps_the_law():
    """An id that only one model has: never drafted, still drawn by the target. False alarm 1e-6."""
    P = np.random.default_rng(0).dirichlet(np.ones(6), 6)
    target = bigram(P.tolist())
    for V in (4, 8):
        Q = np.random.default_rng(1).dirichlet(np.ones(V), V)
        drafter = bigram(Q.tolist())
        with pytest.warns(UserWarning, match="vocabulary sizes differ"):
            out = av.generate(target, av.SlotLM(drafter, 3000, 3) if V == 8 else drafter,
                              [[5]] * 60_000, max_new_tokens=2, plan="fixed",
                              num_speculative_tokens=2, max_batch_size=3000, seed=V)
        counts = np.zeros((6, 6))
        np.add.at(counts, tuple(np.array(out.tokens).T), 1)
        assert chi_square(counts, P[5][:, None] * P) > FALSE_ALARM


def test_a_drafter_whose_rows_change_their_width_keeps_the_law():
    """What an earlier, wider row left in the kept q would be taken out of the residual of a
    narrower one. False alarm 1e-6."""
    P, Q = (np.random.default_rng(seed).dirichlet(np.ones(6), 6) for seed in (0, 1))

    class Narrowing:
        widths = itertools.cycle([6, 3])
        commit = reset = lambda *args: None

        def logits(self, tokens, lengths, slots):
            return torch.tensor(Q).log()[tokens[slots, lengths - 1], :next(self.widths)]

    out = av.generate(bigram(P.tolist()), Narrowing(), [[5]] * 60_000, max_new_tokens=3, seed=0,
                      plan="fixed", num_speculative_tokens=1, max_batch_size=3000)
    counts = np.zeros((6, 6, 6))
    np.add.at(counts, tuple(np.array(out.tokens).T), 1)
    assert chi_square(counts, P[5][:, None, None] * P[:, :, None] * P) > FALSE_ALARM


# ------------------------------------------------------------------------ greedy, ragged, cached


@pytest.mark.parametrize("K", [0, 1, 4, 8])
def test_greedy_text_is_that_of_generate(K):
    """Any error of rows, positions, masks, caches or rollback changes greedy text somewhere.

    Ragged prompts, ragged lengths, refilled slots, every plan and batch size, against
    `model.generate` one prompt at a time; so a request in a batch also equals the request alone.
    """
    target, prompts = llama(), prompts_of((5, 1, 17, 30, 2, 9))
    drafter, new = noisy(target, 0.1), [40, 9, 25, 1, 40, 33]
    want = [greedy(target, p, n) for p, n in zip(prompts, new)]
    for plan, B in itertools.product(av.PLANS if K else ["fixed"], (1, 3, 6)):
        out = av.generate(target, drafter, prompts, max_new_tokens=new, num_speculative_tokens=K,
                          plan=plan, max_batch_size=B, temperature=0, cost=STAIRS, seed=0)
        assert out.tokens == want, (plan, B)


@pytest.mark.parametrize("free", [{"cpu"}, set()])  # widths read, or bounded as on a GPU
def test_logits_from_the_cache_are_those_without_it(free, monkeypatch):
    """Stale entries, wrong positions or a padded neighbour would move logits after a rollback."""
    target, rng = llama(num_key_value_heads=4), np.random.default_rng(0)
    monkeypatch.setattr(av, "READ_FREELY", free)
    lm, tokens = av.SlotLM(target, 4, 64), torch.randint(0, 64, (4, 64))
    lengths = np.array([3, 20, 1, 9])
    for _ in range(8):
        slots = np.flatnonzero(rng.random(4) < 0.7)
        if not len(slots):
            continue
        drafts = torch.tensor(rng.integers(0, 6, len(slots)))
        got = lm.logits(tokens, lengths[slots], slots, drafts, int(drafts.sum()))
        want = torch.cat([target(tokens[s:s + 1, :lengths[s] + d]).logits[0, lengths[s] - 1:]
                          for s, d in zip(slots, drafts.tolist())])
        assert torch.allclose(got, want, atol=1e-5)
        lengths[slots] += 1 + (rng.random(len(slots)) * (drafts.numpy() + 1)).astype(int)
        lm.commit(np.arange(4), lengths)  # the rejected ones become other tokens
        tokens = torch.where(torch.arange(64) < torch.tensor(lengths)[:, None] - 1, tokens,
                             torch.randint(0, 64, (4, 64)))


def test_attention_pads_little_more_than_there_are_tokens():
    """One deep row in a trimmed batch, or a prompt, must not make all the others as wide as it is;
    and where all the rows are long, with an idle one between, none of them gets lost."""
    def padded(pending, drafts):
        pending, drafts = np.array(pending), torch.tensor(drafts)
        batch = av.Ragged(np.arange(len(pending)), 0 * pending, pending, drafts, int(drafts.sum()),
                          9, torch.device("cpu"))
        return sum(seen.numel() for _, _, seen, _, _ in batch.calls)

    assert padded([1] * 64, [0] * 63 + [8]) == 64 + 9
    assert padded([1] * 63 + [200], [1] * 64) == 64 * 2 + 201
    assert padded([1] * 4, [0, 0, 0, 1]) == 4 * 2  # here a call would cost more than the padding
    target, tokens = llama(), torch.arange(40 * 64).reshape(40, 64) * 7 % 64
    for slots, lengths in (([0, 2], [40, 60]),
                           (range(40), [2] * 38 + [1, 3])):  # padding and excess cancel out
        got = av.SlotLM(target, 40, 64).logits(tokens, np.array(lengths), np.array(slots))
        want = [target(tokens[s:s + 1, :n]).logits[0, -1] for s, n in zip(slots, lengths)]
        assert torch.allclose(got, torch.stack(want), atol=1e-5)


@pytest.mark.parametrize("law", [dict(temperature=0), dict(top_p=0.9, top_k=20),
                                 dict(temperature=1.5), dict(temperature=0.01)])
def test_the_target_as_its_own_drafter_is_always_accepted(law):
    """A setting on one side only, or a draft cache that lacks a token, shows as a rejection.

    41 tokens at K = 4 then take exactly ceil(41 / 5) = 9 target passes, the prompt's included.
    """
    target = llama()
    out = av.generate(target, copy.deepcopy(target), prompts_of((5, 1, 17)), max_new_tokens=41,
                      seed=0, num_speculative_tokens=4, plan="fixed", **law)
    stats = out.stats
    assert stats.accepted.tolist() == stats.verified.tolist() == stats.proposed.tolist()
    assert stats.steps == 9 and stats.committed == 3 * 41


def test_counts_by_hand_on_a_scripted_drafter():
    """The target counts up; the drafter errs after token 2 (mod 5): it is right twice, then wrong.

    From 0 with K = 4 each step accepts 1, 2 and commits 3 as well: 3 tokens a step, and the row of
    the rejected draft (not row K) gives the third.
    """
    target, drafter = cycle(10), cycle(10, wrong_at=(2, 5, 8))
    out = av.generate(target, drafter, [[0]], max_new_tokens=9, num_speculative_tokens=4,
                      plan="fixed", temperature=0)
    assert out.tokens == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    s = out.stats
    assert (s.steps, s.committed, s.accept_length) == (3, 9, 3.0)
    assert s.accepted.tolist() == [3, 3, 0, 0] and s.proposed.tolist() == [3, 3, 2, 2]
    assert s.target_tokens == 3 + s.verified.sum() == 13


def test_target_query_tokens_are_requests_plus_budget():
    """A trimmed draft that still reached the target would cost what it was trimmed to save."""
    target, drafter, seen = llama(), noisy(llama(), 0.3), []
    hook = target.model.embed_tokens.register_forward_hook(
        lambda module, args, out: seen.append(
            (args[0].numel(), int(args[0].min()), int(args[0].max()))))
    steps = []
    out = av.generate(target, drafter, prompts_of((3,) * 6), max_new_tokens=20, max_batch_size=6,
                      cost=STAIRS, seed=0, on_step=steps.append)
    hook.remove()
    want = [len(s.requests) + s.num_verified.sum() + (12 if i == 0 else 0)
            for i, s in enumerate(steps)]
    assert [n for n, _, _ in seen] == want and out.stats.target_tokens == sum(want)
    assert out.stats.verified.sum() < out.stats.proposed.sum(), "nothing was trimmed"
    assert min(lo for _, lo, _ in seen) >= 0 and max(hi for _, _, hi in seen) < 64


def test_end_tokens_cut_a_block_where_they_stand():
    """An end token accepted in the middle of a block ends the request there; it is kept."""
    target = cycle(12)
    for end, K in itertools.product((1, 3, 5, 8, 9), (0, 3, 8)):
        for eos in (end, [end, 11], {end}, torch.tensor([end]), torch.tensor(end)):
            out = av.generate(target, cycle(12), [[0], [4]], max_new_tokens=9, temperature=0,
                              num_speculative_tokens=K, plan="fixed", eos_token_id=eos)
            counts = [(t + np.arange(1, 10)) % 12 for t in (0, 4)]
            stops = set(np.atleast_1d(list(eos) if isinstance(eos, set) else eos).tolist())
            want = [c[:next((i + 1 for i, t in enumerate(c) if t in stops), 9)].tolist()
                    for c in counts]
            assert out.tokens == want, (end, K)


@pytest.mark.parametrize("new", [0, 1, 2, 4, 5, 6])
def test_nothing_is_drafted_that_cannot_be_used(new):
    """Drafting past max_new_tokens wastes passes; the last token is always a bonus token."""
    out = av.generate(cycle(16), cycle(16), [[0], [1]], max_new_tokens=new,
                      num_speculative_tokens=4, plan="fixed", temperature=0)
    assert [len(t) for t in out.tokens] == [new, new]
    assert out.stats.proposed.sum() == 2 * sum(min(4, left - 1) for left in range(new, 0, -5))


def test_room_is_taken_for_what_can_be_drafted_only():
    """Buffers for 1,000 drafts of a vocabulary where three fit would take gigabytes."""
    decoder = av.Decoder(llama(), llama(), [], max_length=5, num_speculative_tokens=1000,
                         plan="fixed", max_batch_size=2)
    assert decoder.p.shape == (2 * 4, 64) and decoder.q.shape == (3, 2, 64)


def test_generation_up_to_the_last_position():
    """One look-ahead past a learned position table is an index error."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4,
                                       n_positions=32, bos_token_id=None, eos_token_id=None)).eval()
    prompt = prompts_of((20,), 99)
    out = av.generate(model, noisy(model, 0.1), prompt, max_new_tokens=12, num_speculative_tokens=5,
                      temperature=0, plan="fixed")
    assert out.tokens == [greedy(model, prompt[0], 12)]
    with pytest.raises(ValueError,
                       match=r"prompts\[0\] with max_new_tokens must be within.*32.*33"):
        av.generate(model, model, prompt, max_new_tokens=13)


def test_same_seed_same_tokens_and_nothing_of_the_caller_changes():
    """A reseeded loop repeats, a global one moves the caller's draws, a mutated config lingers."""
    target, prompts = llama(), prompts_of((4, 7))
    drafter, before = noisy(target, 0.1), copy.deepcopy(prompts)
    config, state = target.config.to_dict(), torch.random.get_rng_state()
    implementation = target.config._attn_implementation
    run = lambda seed: av.generate(target, drafter, prompts, max_new_tokens=32, cost=STAIRS,
                                   seed=seed)
    assert run(1).tokens == run(1).tokens != run(2).tokens
    assert run(None).tokens != run(None).tokens
    assert prompts == before and target.config.to_dict() == config
    assert target.config._attn_implementation == implementation
    assert torch.equal(torch.random.get_rng_state(), state)


# ------------------------------------------------------------------------ the estimator


def test_feature_is_the_log_odds_of_the_largest_probability():
    """Computed as log(q_max / (1 - q_max)) it is infinite for a sure draft, and kills the fit."""
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0)).double() * 2
    q = (logits / 0.7).softmax(-1).amax(-1)
    assert torch.allclose(av.logit_q_max(logits, 0.7).double(), torch.log(q / (1 - q)), atol=1e-5)
    q = logits.softmax(-1).amax(-1)  # temperature 0 uses the unscaled logits
    assert torch.allclose(av.logit_q_max(logits, 0).double(), torch.log(q / (1 - q)), atol=1e-5)
    sure = torch.tensor([[500.0, 0, 0], [0, -math.inf, -math.inf], [3, 3, -math.inf]])
    assert av.logit_q_max(sure).tolist() == [10, 10, 0]


def random_labels(B, K, seed=0):
    rng = np.random.default_rng(seed)
    n = rng.integers(0, K + 1, B)
    return rng.normal(1, 2, (B, K)), n, np.minimum(n, rng.integers(0, K + 1, B))


def theta_of(estimator):
    return np.append(estimator.slope, estimator.intercepts)


def feed(estimator, f, n, a):
    estimator.observe(torch.tensor(f).float(), torch.tensor(n), a)  # arrays or tensors


def test_sums_are_those_of_stored_rows():
    """Censoring off by one, a label 0 for what was trimmed, or sums not cleared: the sums differ.

    Three steps by loop in float64 from stored rows: labels are the verified positions up to and
    including the first rejection. After the refit the next round starts from zero.
    """
    K, estimator = 4, av.AcceptanceEstimator(4, refit_every=3)
    for round_ in range(2):
        theta, H, g, counts = (theta_of(estimator), np.zeros((5, 5)), np.zeros(5),
                               np.zeros(5))
        for step in range(3):
            f, n, a = random_labels(16, K, 10 * round_ + step)
            f[np.arange(K) >= n[:, None]] = np.inf  # what was not verified may be anything
            for b in range(16):
                for i in range(n[b]):
                    if i > a[b]:
                        break
                    x = np.zeros(K + 1)
                    x[0], x[i + 1] = np.float32(f[b, i]), 1
                    c = 1 / (1 + math.exp(-x @ theta))
                    H += max(c * (1 - c), 0.05) * np.outer(x, x)
                    g += (c - (i < a[b])) * x
                    counts += x != 0
            if step == 2:
                refit, estimator.refit = estimator.refit, lambda: None
            feed(estimator, f, n, a)
        assert all(map(np.allclose, estimator.system(), (H, g, counts)))
        assert np.allclose(H[1:, 1:], np.diag(np.diag(H)[1:])), "H is an arrowhead"
        estimator.refit = refit
        estimator.refit()
        assert not estimator.sums.any()


def test_the_loop_scores_the_law_that_it_draws_from():
    """Another row's feature, or one of another temperature, would be fitted to the wrong labels."""
    law, cost = dict(temperature=0.7, top_k=2), av.CostTable({1: 0.01}, {1: 1, 9: 9})
    decoder = step_decoder("fixed", 2, [[0], [1]], P3, Q3, cost, **law)
    last = torch.tensor(decoder.text[[0, 1], decoder.lengths - 1])
    done = decoder.step()
    for i, before in enumerate((last, torch.tensor(done.drafts[:, 0]))):
        with torch.no_grad():
            logits = decoder.drafter.model(before[:, None]).logits[:, 0]
        q_max = (logits / 0.7).double().softmax(-1).amax(-1)
        assert np.allclose(done.features[:, i], (q_max / (1 - q_max)).log(), atol=1e-4)


def test_host_and_device_predict_the_same():
    """A sigmoid that cancels is 0 below -37: what a step says of its drafts would not be what it
    trimmed by. (Large logits, which overflow an exponential, must not warn.)"""
    estimator = av.AcceptanceEstimator(3, slope=1.0, intercept=0.0)
    features = np.array([[-700.0, -40.0, -30.0], [-1e-9, 5.0, 700.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        host = estimator.predict(features)
    assert (0 < host).all() and np.exp(-40) == pytest.approx(host[0, 1], rel=1e-12)
    assert host == pytest.approx(estimator.predict(torch.tensor(features)).numpy(), rel=1e-12)


def test_a_position_alone_is_predicted_as_among_all():
    """Joint asks for one position at a time: another's intercept would misprice every pass."""
    estimator = av.AcceptanceEstimator(3)
    estimator.slope, estimator.intercepts = 0.6, np.array([0.5, -0.1, -0.8])
    features = torch.linspace(-3, 5, 12).view(4, 3)
    want = 1 / (1 + np.exp(-(0.6 * features.double().numpy() + estimator.intercepts)))
    assert np.allclose(estimator.predict(features), want)
    for i in range(3):
        assert np.allclose(estimator.predict(features[:, i], i), want[:, i])


def test_refit_by_hand():
    """One position, one label value: H, g, ridge and damping written out.

    f = 0, intercept 0: c = 1/2. 50 labels, 40 accepted: g = (0, 25 - 40) = (0, -15) and
    H = diag(0, 12.5). Newton: 15 / (12.5 + ridge), halved by damping 50 / (50 + 50); the slope
    has H = ridge, g = 0.
    """
    estimator = av.AcceptanceEstimator(2, intercept=0.0, ridge=0.5, damping=50)
    feed(estimator, np.zeros((50, 2)), np.full(50, 1), np.array([1] * 40 + [0] * 10))
    estimator.refit()
    assert estimator.intercepts == pytest.approx([15 / 13 * 0.5, 0.0])  # no label: no step
    assert estimator.slope == pytest.approx(0.5)
    before = estimator.intercepts
    estimator.refit()  # a round without labels leaves everything where it is
    assert (estimator.intercepts == before).all()
    # 1,000 sure drafts, all rejected: the floor alone would allow a step of 1 / 0.05 = 20.
    feed(estimator, np.full((1000, 2), 10.0), np.full(1000, 1), np.zeros(1000, int))
    estimator.refit()
    assert abs(np.subtract(estimator.intercepts, before)).max() <= 1


def test_repeated_refits_reach_the_maximum_likelihood_fit():
    """A wrong sign, weight or join of feature and label stops short of the float64 optimum."""
    rng, K = np.random.default_rng(1), 3
    true, f = np.array([0.7, 0.6, -0.3, 0.1]), rng.normal(1, 2, (6000, K)).astype(np.float32)
    hit = rng.random((6000, K)) < 1 / (1 + np.exp(-(true[0] * f + true[1:])))
    n, a = np.full(6000, K), np.cumprod(hit, 1).sum(1)
    estimator = av.AcceptanceEstimator(K)
    for _ in range(30):
        feed(estimator, f, n, a)
        estimator.refit()
    keep = np.arange(K) <= a[:, None]
    X = np.concatenate([f[..., None], np.broadcast_to(np.eye(K), (6000, K, K))], -1)[keep]
    y, theta = (np.arange(K) < a[:, None])[keep], np.zeros(K + 1)
    for _ in range(30):  # the reference: plain Newton on all rows
        c = 1 / (1 + np.exp(-X @ theta))
        theta -= np.linalg.solve((X * (c * (1 - c))[:, None]).T @ X, X.T @ (c - y))
    assert np.allclose(theta_of(estimator), theta, atol=2e-3)
    # Calibration on synthetic truth: 5 standard errors of 4 coefficients, false alarm below 1e-5.
    c = 1 / (1 + np.exp(-X @ theta))
    error = np.sqrt(np.diag(np.linalg.inv((X * (c * (1 - c))[:, None]).T @ X)))
    assert (np.abs(theta_of(estimator) - true) < 5 * error).all()


@pytest.mark.parametrize("feature", [0.0, 10.0, None])
@pytest.mark.parametrize("K", [1, 5])
def test_the_fit_survives_separable_labels_and_surprises(K, feature):
    """Newton without a floor on the curvature: one surprise moves an intercept by hundreds,
    survival is 0 from then on, nothing is verified and nothing is learned again."""
    estimator, rng = av.AcceptanceEstimator(K, refit_every=1), np.random.default_rng(0)
    values = lambda: rng.normal(2, 2, (8, K)) if feature is None else np.full((8, K), feature)
    for accepted in (K, 0, K):
        for i in range(400):
            feed(estimator, values(), np.full(8, K), np.full(8, accepted))
            assert np.abs(theta_of(estimator)).max() < 20 and estimator.slope >= 0
        rate = estimator.predict(torch.full((1, K), 2.0 if feature is None else feature))
        assert abs(rate[0, 0] - float(accepted > 0)) < 0.1
    before = estimator.intercepts[0]
    feed(estimator, np.full((100, K), 10.0), np.full(100, K), np.array([0] + [K] * 99))
    assert abs(estimator.intercepts[0] - before) < 1, "one rejection among a hundred sure drafts"


def test_a_slope_never_turns_negative_and_recovers():
    """A negative slope would rank doubtful drafts first."""
    estimator, rng = av.AcceptanceEstimator(1, refit_every=1), np.random.default_rng(0)
    for sign, rounds in ((-1, 50), (1, 100)):
        for _ in range(rounds):
            f = rng.normal(1, 2, (64, 1))
            hit = rng.random(64) < 1 / (1 + np.exp(-sign * 0.6 * f[:, 0]))
            feed(estimator, f, np.ones(64, int), hit.astype(int))
            assert estimator.slope >= 0
        if sign < 0:  # 5 standard errors of a mean of 12,800: false alarm below 1e-6
            assert (abs(1 / (1 + math.exp(-estimator.intercepts[0])) - 0.39) < 0.1
                    and estimator.slope < 0.1)
    assert estimator.slope == pytest.approx(0.6, abs=0.2)


def test_an_estimator_stands_alone_and_learns_in_generate():
    """Predictions must fit what the loop saw: features joined to other labels are uncalibrated."""
    rng = np.random.default_rng(5)
    P, Q = rng.dirichlet(np.full(8, 0.4), 8), rng.dirichlet(np.full(8, 0.4), 8)
    estimator, rows = av.AcceptanceEstimator(3, refit_every=20), []

    def keep(step):
        labelled = np.arange(3) < np.minimum(step.num_verified, step.accepted + 1)[:, None]
        rows.append((step.features, labelled, np.arange(3) < step.accepted[:, None]))

    out = av.generate(bigram(P.tolist()), bigram(((P + Q) / 2).tolist()), [[0]] * 400, plan="fixed",
                      max_new_tokens=40, num_speculative_tokens=3, seed=0, estimator=estimator,
                      max_batch_size=100, on_step=keep)
    f, labelled, hit = (np.concatenate(x) for x in zip(*rows[40:]))
    c = estimator.predict(torch.tensor(f)).numpy()
    for i in range(3):
        seen = hit[labelled[:, i], i]
        assert abs(c[labelled[:, i], i].mean() - seen.mean()) < 0.05  # 5 sd of > 2,500 labels
    assert out.stats.accepted[0] == sum(h[:, 0].sum() for _, _, h in rows)


def test_no_position_is_forgotten_for_good():
    """All rejected for 30 rounds, then all accepted: 20 rounds later full depth is verified again.

    One request, rounds of 10 steps; without the full step of each round it would stay at plain
    decoding for good.
    """
    V, depth = 40, []
    target, good, bad = cycle(V), cycle(V), cycle(V, wrong_at=range(V))
    for model in (target, good, bad):
        model.config.max_position_embeddings = 4000  # a bigram has no use for positions

    class Changing(av.SlotLM):
        def logits(self, *args, **kw):
            self.model = bad if len(depth) < 300 else good
            self.configs = [vars(self.model.config)]
            return super().logits(*args, **kw)

    cost = av.CostTable({1: 0.01}, {1: 1, 2: 1.5, 3: 2, 9: 5})
    for plan in ("verification", "joint"):
        depth.clear()
        av.generate(target, Changing(bad, 1, 1200), [[0]], max_new_tokens=1100, temperature=0,
                    cost=cost, num_speculative_tokens=6, plan=plan, seed=0,
                    estimator=av.AcceptanceEstimator(6, refit_every=10),
                    on_step=lambda s: depth.append(int(s.num_verified[0])))
        assert np.mean(depth[200:295]) < 1 and np.mean(depth[-60:-1]) > 4, (plan, depth)


def test_all_is_verified_once_a_round_but_not_in_each_step():
    """Never, and deep drafts are forgotten; in every step, and both adaptive plans are fixed ones
    (an estimator that refits after each step is allowed). By hand: here a draft never pays."""
    for plan, N, every in (("verification", 1, 10), ("verification", 15, 15), ("joint", 1, 20),
                           ("joint", 15, 30)):
        drafted = []
        av.generate(cycle(8), cycle(8, wrong_at=range(8)), [[0]], max_new_tokens=40, temperature=0,
                    plan=plan, num_speculative_tokens=3, cost=av.CostTable({1: 0.1}, {1: 1, 9: 17}),
                    estimator=av.AcceptanceEstimator(3, refit_every=N),
                    on_step=lambda s: drafted.append(int(s.num_verified[0])))
        assert drafted == [0 if step % every else 3 for step in range(40)], (plan, N)


def test_what_is_expected_of_deep_drafts_follows_the_few_that_were_drawn():
    """Joint's first step draws for 16 of 32 requests. Were the others counted as well, the mean of
    positions that are seldom drafted would take thousands of steps to follow a change."""
    decoder = av.Decoder(llama(), noisy(llama(), 0.3), [([1, 2], 20)] * 32, max_length=22, seed=0,
                         max_batch_size=32, num_speculative_tokens=3, plan="joint", cost=STAIRS)
    decoder.mean_confidence[:] = 0.5
    done = decoder.step()
    first = done.survival[:, 0]
    moved = (first[:16] - 0.5).sum() / (5 * 16 + 80)  # as 16 of the 5 x 16 + 80 that are remembered
    assert (first[16:] == -1).all() and abs(moved) > 1e-4
    assert decoder.mean_confidence[0] == pytest.approx(0.5 + moved)
    # A fifth of what a request showed in this step goes into what is expected of its next one.
    shown = done.survival[:16, 1] / first[:16]
    assert decoder.confidence[:16, 1] == pytest.approx(0.5 + (shown - 0.5) / 5)
    assert decoder.confidence[16:, 1] == pytest.approx(0.5) and abs(shown - first[:16]).max() > 0.01


# ------------------------------------------------------------------------ costs, budget, trim


def test_curve_between_below_and_beyond_its_points():
    """A flat extension makes large batches look free; an index error or wrap-around, worse."""
    curve = av.Curve("verify", {4: 2.0, 16: 8.0, 20: 7.0, 24: 10.0})  # the 7 is a noisy reading
    assert curve(np.array([0, 4, 10, 16, 18, 24, 34])).tolist() == [2, 2, 5, 8, 8, 10, 15]
    assert av.Curve("verify", {4: 2.0})(np.array([4, 8])).tolist() == [2, 4]
    assert av.Curve("verify", {1: 1.0, 32: 32.0, 64: 29.0})(127) == 32 + 63 * 31 / 63  # a flat end
    for points in ({}, {1: 0}, {1: -1.0}, {1: math.nan}, {1: math.inf}, {0: 1.0}, {1.5: 1.0}):
        with pytest.raises(ValueError, match="verify"):
            av.CostTable({1: 1}, points)
    with pytest.raises(ValueError, match="tokens"):
        curve(-1)
    with pytest.warns(UserWarning, match="flat"):
        av.CostTable({1: 1}, {1: 2.0, 9: 2.0})


def test_a_curve_learns_the_time_of_the_steps_that_run():
    """Contexts grow and machines get busy: a fixed table plans for another machine."""
    curve, rng = av.Curve("verify", {10: 1.0, 20: 2.0, 40: 3.0}), np.random.default_rng(0)
    for _ in range(3000):
        n = int(rng.integers(10, 41))
        curve.learn(n, 5 + 0.2 * n)
    assert np.allclose(curve(np.array([10, 20, 30, 40, 50])), [7, 9, 11, 13, 15], atol=0.2)
    spiky = av.Curve("verify", {1: 1.0, 3: 100.0, 10: 2.0})
    for _ in range(500):
        spiky.learn(10, 2.0)
    assert spiky(10) < 3, "a spike that holds a running maximum up must be learned away"
    steep = av.Curve("draft", {64: 1.0, 512: 6.0})
    for tokens, ms in [(288, 1.5)] * 60 + [(64, 1.0)] * 60:  # far below the line between its ends
        steep.learn(tokens, ms)
        assert steep(1) > 0
    assert steep(64) == pytest.approx(1.0, rel=0.05)
    before = curve(20)
    curve.learn(20, 1e6)  # a hiccup of the machine counts as half as much again, once
    assert before < curve(20) < 1.06 * before
    busy = av.Curve("verify", {10: 1.0, 20: 2.0, 40: 4.0})
    for _ in range(100):
        busy.learn(40, 8.0)  # half as fast a machine: what has not been seen lately slows down too
    assert busy(40) == pytest.approx(8, rel=0.01) and 1.3 < busy(10) < 2
    many = busy(60)
    busy.learn(500, 1.0)  # far beyond the points: many prompts; nothing is learned
    assert busy(60) == many
    noisy = av.Curve("verify", {8: 5.0, 64: 33.0})
    for _ in range(20_000):
        noisy.learn(8, 5 * rng.lognormal(0, 0.3))
    assert 30 < noisy(64) < 37, "chance at one size must not drive another away for good"


def test_passes_of_unlike_sizes_leave_a_true_table_as_it_is():
    """The mean time of unlike passes is not the time of a mean pass where costs are a staircase."""
    decoder = av.Decoder(llama(), llama(), [], max_length=9, plan="verification", cost=av.CostTable(
        {1: 1.0, 8: 1.0, 16: 20.0}, {1: 1.0, 9: 2.0}, learning=True))
    decoder.target.batch, decoder.passes = types.SimpleNamespace(positions=[0]), [16, 1]
    for ms, low, high in (21, 0.99, 1.01), (42, 1.9, 2.1):  # a machine half as fast, then
        for decoder.estimator.steps in range(200):
            decoder.began = time.perf_counter()
            decoder.account(types.SimpleNamespace(seconds={}), [0.0, ms / 1e3, ms / 1e3 + 1e-3])
        assert low < decoder.cost.draft(np.array([16, 1])).sum() / 21 < high, ms
        assert ms == 42 or decoder.cost.draft.ms == pytest.approx([1, 1, 20])


@pytest.mark.parametrize("seen", [0, 1])
def test_full_steps_are_learned_from_whatever_an_estimator_has_seen(monkeypatch, seen):
    """Every second step is timed: were it never a full one, its cost could only grow, unseen."""
    learned, estimator = [], av.AcceptanceEstimator(3, refit_every=10)
    for _ in range(seen):
        estimator.observe(np.zeros((1, 3)), [0], [0])
    monkeypatch.setattr(av.Curve, "learn", lambda self, n, ms: learned.append((self, n)))
    cost = av.CostTable({1: 0.01, 64: 0.02}, {1: 1.0, 4: 1.0, 16: 64.0}, learning=True)
    av.generate(cycle(8), cycle(8, wrong_at=range(8)), [[0]] * 4, max_new_tokens=80, cost=cost,
                num_speculative_tokens=3, temperature=0, plan="verification", estimator=estimator)
    assert learned.count((cost.verify, 16)) > 3, learned


def test_budget_is_the_best_by_brute_force():
    """A local argmax stops at the first stair; a tie must go to the smaller budget."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        B, K = rng.integers(1, 5), rng.integers(1, 5)
        survival = np.cumprod(rng.random((B, K)).round(1), 1)
        stairs = np.maximum.accumulate(rng.integers(1, 20, B * (K + 1))
                                       + np.arange(B * (K + 1)) / 9)
        cost = av.CostTable({1: rng.random() + 0.01}, dict(enumerate(stairs.tolist(), 1)))
        survival[rng.random((B, K)).cumsum(1) > 1] = -1  # no draft can be used there
        s = sorted(survival[survival >= 0])[::-1]
        passes = (survival >= 0).sum(0)  # how many requests draft in each
        draft = sum(cost.draft(n) for n in passes if n)
        value = np.round([(B + sum(s[:b])) / (draft + cost.verify(B + b))
                          for b in range(len(s) + 1)], 12)
        assert av.draft_budget(survival, cost) == np.argmax(value)
    half = np.full((2, 3), 0.5)
    line = lambda a: av.CostTable({1: 1e-300}, {n: a + n for n in range(1, 9)})
    assert av.draft_budget(half, line(0)) == 0  # in proportion: no draft can pay
    assert av.draft_budget(half * 0 + 1, line(0)) == 0  # a tie everywhere: the smallest
    assert av.draft_budget(half, line(1e6)) == 6  # all but free: all
    rounded = av.CostTable({1: 1e-300}, {1: 0.1, 10: 1.0})  # in proportion, but for rounding
    assert av.draft_budget(np.ones((3, 7)), rounded) == 0


def test_joint_drafts_for_the_requests_that_gain_most():
    """Of all subsets of the requests at least the best for one pass, in ms saved less ms spent; and
    where one pass does not pay, as in front of a stair in the costs, the best for several passes.
    """
    rng, sizes = np.random.default_rng(0), set()
    for _ in range(1000):
        n, K = rng.integers(1, 6), rng.integers(1, 4)
        steps = rng.choice([0.0, 0.1, 1.5], n * (K + 1))
        cost = av.CostTable({1: 0.1 + rng.random() / 5, 6: 0.4},
                            dict(enumerate((1 + (steps + 0.01).cumsum()).tolist(), 1)))
        usable = np.arange(K) < rng.integers(1, K + 1, n)[:, None]
        plan = av.JointPlan(rng.random((n, K)) ** 0.5 * usable, cost)
        token, survival = float(cost.verify(n)) / n, plan.usual.cumprod(1)
        pad = (cost.verify(n * (K + 1)) - cost.verify(n)) / (4 * n * K)  # ms of one query of it
        price = lambda k, m: (m * cost.draft(k) + cost.verify(n + m * k) - cost.verify(n)
                              + pad * min((n - k) * m, 16 * k))
        gain = lambda rows, m: (survival[list(rows), :m].sum() * token - price(len(rows), m)
                                if len(rows) else 0.0)
        now = max((rows for k in range(n + 1) for rows in itertools.combinations(range(n), k)),
                  key=lambda rows: gain(rows, 1))
        order = np.argsort(-survival[:, 0])
        ahead = max((order[:k] for k in range(n + 1)),
                    key=lambda rows: max(gain(rows, m) for m in range(1, K + 1)))
        chosen = plan.choose(np.arange(n), 0, np.ones(n, int))
        assert sorted(chosen) == max(sorted(now), sorted(ahead), key=len)
        assert plan.drawn == len(chosen)
        if len(chosen):
            assert plan.spent == pytest.approx(token + price(len(chosen), 1) / len(chosen))
        sizes.add((len(now) > 0, len(ahead) > len(now)))
    assert len(sizes) == 4, "one pass pays or not, more passes change it or not: all are to be seen"


def test_joint_expects_the_next_drafts_to_be_like_the_last_one():
    """By hand: a draft of confidence .8 where .4 is usual makes the next one likely by .75 * .8 +
    .25 * .4 = .7. And a token is worth what it costs, the step ended here: after that draft 3 ms
    bring 1.8 tokens, so a draft of .56 that costs .9 ms pays (.933), and one that costs 1 does not.
    """
    for ms, drawn in (0.9, 1), (1.0, 0):
        cost = av.CostTable({1: 0.5}, {1: 2.0, 2: 2.5, 3: 2.0 + ms, 4: 99.0})
        plan, one = av.JointPlan(np.full((1, 3), 0.4), cost), np.array([0])
        assert len(plan.choose(one, 0, np.array([1]))) == 0  # .4 * 2 ms is less than 1 ms
        plan.explored = 1
        assert len(plan.choose(one, 0, np.array([1]))) == 1 and plan.spent == 3.0
        plan.drew(one, 0, np.array([0.8]))
        assert plan.expected == pytest.approx(np.array([[0.8, 0.56, 0.392]]))
        plan.explored = 0
        assert len(plan.choose(one, 1, np.array([1]))) == drawn
        plan.drew(one, 1, np.array([0.5]))  # it survives only if the first does
        assert plan.expected[0, :2] == pytest.approx([0.8, 0.4])
    plan = av.JointPlan(np.array([[0.4, 0.4, 0]]), cost)  # its last token comes after two drafts
    plan.drew(one, 0, np.array([0.8]))
    assert plan.expected == pytest.approx(np.array([[0.8, 0.56, 0]]))


def test_joint_explores_at_any_price():
    """What is never drafted is never learned, so some requests draft whatever it costs. No others
    join because the pass is made anyway: the drafter may have all of their text to read first."""
    dear = av.CostTable({1: 1e200}, {1: 1e200, 9: 1e201})
    one_pass = av.CostTable({1: 5.0}, {1: 1.0, 3: 3.0, 9: 3.3})  # where one drafts, all gain by it
    for cost in dear, one_pass:
        plan = av.JointPlan(np.full((3, 2), 0.4), cost, explored=2)
        assert plan.choose(np.arange(3), 0, np.ones(3, int)).tolist() == [0, 1]
        assert plan.drawn == 2


def test_a_pass_is_charged_for_what_it_reads():
    """Prompts first; then of each request its last token, and before it the last draft if that was
    accepted; then one draft each. Other counts would teach the cost table wrong prices."""
    decoder = av.Decoder(cycle(8), cycle(8), [([1, 2, 3], 20), ([4], 20)], max_length=30,
                         num_speculative_tokens=3, max_batch_size=2, temperature=0, plan="fixed")
    for _ in range(2):
        decoder.step()
        assert decoder.passes == [4, 2, 2]
    decoder.drafter.reset(1)
    decoder.step()
    assert decoder.passes == [2 + decoder.lengths[1] - 4, 2, 2]


def test_prompts_in_a_step_do_not_change_what_is_verified():
    """A prompt's time in the ratio waters every draft's price down: with it all would pay.

    By hand: 2 / 12, 2.9 / 13, 3.2 / 14, 3.4 / 15 tokens per ms for 0 to 3 drafts: 2 are best,
    whether a request has one token pending or a prompt of 12 (of which 3 drafts would pay: 3.4 / 26
    is more than 3.2 / 25).
    """
    line = av.CostTable({1: 0.01}, {1: 11.0, 1000: 1010.0})
    for pending in (1, 12):
        decoder = step_decoder("verification", 2, [[0], [1]], P3, Q3, line)
        decoder.lengths[1], decoder.target.cached[1] = 14, 14 - pending
        decoder.confidence[:] = [[0.9, 2 / 9], [0.3, 1 / 3]]
        decoder.ends[:] = decoder.lengths + 9
        assert decoder.choose(np.array([2, 2])) == 2, pending
        # Joint: a slot costs 1.01 ms (.25 of it for pads, if one of the two is left out), and a
        # token 12 / 2: .9 pays, and of the others .15 (.9 ms for 1.01 - .25), but not .12 (.72).
        decoder.plan = "joint"
        assert decoder.choose(np.array([2, 1])).usual.tolist() == [[0.9, 2 / 9], [0.3, 0]]
        decoder.confidence[:, 1] = 0
        for second, depths in (0.15, [1, 1]), (0.12, [1, 0]):
            decoder.confidence[1, 0] = second
            decoder.drafter.commit(decoder.slots, decoder.lengths)
            joint = av.JointPlan(decoder.confidence, line)
            assert decoder.draw(np.array([1, 1]), joint)[3].tolist() == depths, pending


def test_trim_takes_the_best_slots_as_prefixes():
    """Ties broken by value or memory order tear prefixes apart: survivors must be prefixes, in
    total exactly the budget, and no slot left out may be better than one taken."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        B, K = rng.integers(1, 7), rng.integers(1, 6)
        s = torch.tensor(np.cumprod(rng.choice([1.0, 0.5, 0.9, 0.0], (B, K)), 1))
        budget = int(rng.integers(0, B * K + 1))
        n = av.trim(s, budget)
        taken = torch.arange(K) < n[:, None]
        assert n.sum() == budget == taken.sum()
        if 0 < budget < B * K:
            assert s[taken].min() >= s[~taken].max()
    assert av.trim(torch.ones(3, 2), 4).tolist() == [2, 1, 1]  # ties: by position, then by request


# ------------------------------------------------------------------------ range


TINY = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
            pad_token_id=None, bos_token_id=None, eos_token_id=None)
MOE = dict(moe_intermediate_size=32, num_experts_per_tok=2)
WORKS = {
    "Llama": {}, "Qwen2": dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "Qwen3": {}, "Mistral": dict(sliding_window=8), "Mixtral": dict(num_local_experts=4),
    "Qwen3Moe": dict(num_experts=4, **MOE), "Gemma": {}, "Phi": {}, "Phi3": dict(sliding_window=8),
    "Gemma2": dict(sliding_window=8, query_pre_attn_scalar=8, attn_logit_softcapping=0.02),
    "Gemma3Text": dict(sliding_window=8, query_pre_attn_scalar=8), "GPT2": {}, "GPTNeoX": {},
    "OPT": dict(ffn_dim=64, word_embed_proj_dim=32), "Olmo2": {}, "Cohere": {}, "Granite": {},
    "SmolLM3": {}, "Glm4": {}, "GptOss": dict(sliding_window=8, num_local_experts=4, **MOE),
    "DeepseekV3": dict(num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1,
                       v_head_dim=8, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
                       qk_nope_head_dim=8, first_k_dense_replace=1, n_shared_experts=1, **MOE)}
REFUSED = {"Mamba": "recurrent state", "Bloom": "attention interface", "Mpt": "attention interface",
           "Falcon": "attention interface", "Rwkv": "recurrent", "StableLm": "attention interface",
           "Bert": "not causal", "GPTJ": "ragged batch",
           "Bart": "encoder-decoder|attention interface",
           "Nemotron": "batch layout", "Phi3": "longest request", "Jamba": "recurrent state"}


def family(name, scale=4, **changes):
    tiny = {k: v for k, v in TINY.items() if name != "Falcon" or k != "head_dim"}
    config = getattr(transformers, name + "Config")(**{**tiny, **changes})
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for w in model.parameters():
            w.mul_(scale if w.ndim > 1 else 1)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("name", WORKS)
def test_families_work_to_the_token(name):
    """A window, a soft cap or a sink that is not honoured changes greedy text past 8 positions."""
    target, prompts = family(name, **WORKS[name]), prompts_of((11, 3, 6))
    out = av.generate(target, noisy(target, 0.05), prompts, max_new_tokens=24, temperature=0,
                      seed=0, num_speculative_tokens=3, max_batch_size=2, plan="joint", cost=STAIRS)
    assert out.tokens == [greedy(target, p, 24) for p in prompts]
    ids = torch.tensor(prompts[:1])
    got = av.SlotLM(target, 1, 11).logits(ids, np.array([11]), np.array([0]))[0]
    assert torch.allclose(got, target(ids).logits[0, -1], atol=1e-5)
    target(ids).logits.sum().backward()  # nothing that inference mode made has stayed in the model


@pytest.mark.parametrize("name", REFUSED)
def test_families_are_refused_by_name(name):
    """What cannot run as a ragged batch must say so before the first token, never run wrong."""
    longrope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, factor=8.0,
                    long_factor=[8.0] * 4, original_max_position_embeddings=32)
    model = family(name, **(dict(rope_parameters=longrope) if name == "Phi3" else {}))
    for pair in ((model, llama()), (llama(), model)):
        with pytest.raises((ValueError, NotImplementedError), match=f"{name}.*({REFUSED[name]})"):
            av.generate(*pair, [[1, 2]], max_new_tokens=4, cost=STAIRS)


def test_a_layer_without_attention_is_refused():
    """A layer that mixes tokens in its own way, between two that attend, would read the packed
    tokens of all requests as one text."""
    model = llama(num_hidden_layers=3)
    mixer = model.model.layers[1].self_attn = torch.nn.Module().eval()
    mixer.forward = lambda hidden_states, **kwargs: (hidden_states.cumsum(1), None)
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM has layers that do not attend"):
        av.generate(model, None, [[1, 2]], max_new_tokens=4, num_speculative_tokens=0)


def test_an_error_in_mid_run_is_not_called_a_wrong_family():
    """Only a first pass can show that a model does not fit; later errors must come out as are."""
    lm, tokens = av.SlotLM(llama(), 1, 9), torch.zeros(1, 9, dtype=torch.long)
    lm.logits(tokens, np.array([2]), np.array([0]))
    lm.reset(0)  # a new request: nothing is cached
    lm.model.lm_head.forward = lambda hidden: hidden @ torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match="^mat1 and mat2"):
        lm.logits(tokens, np.array([2]), np.array([0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_differs_only_at_near_ties(dtype):
    """In 16 bits greedy text may leave that of `generate` only where the two best logits are within
    3 % of the row's spread; q stays one float32 law, so the self-draft is accepted but there."""
    target = llama().to(dtype)
    prompts = prompts_of((5, 12, 1))
    out = av.generate(target, noisy(llama(), 0.05).float(), prompts, max_new_tokens=40,
                      temperature=0, num_speculative_tokens=4, cost=STAIRS, seed=0)
    for prompt, got in zip(prompts, out.tokens):
        want = greedy(target, prompt, 40)
        differ = next((i for i in range(40) if got[i] != want[i]), None)
        if differ is not None:
            row = target(torch.tensor([prompt + want[:differ]])).logits[0, -1].float()
            best = row.topk(2).values
            assert best[0] - best[1] < 0.03 * (row.max() - row.min())


@pytest.mark.parametrize("plan", av.PLANS)
def test_no_device_is_mixed_and_a_step_reads_back_once(plan, monkeypatch):
    """On shapes alone (fake tensors on "meta"): an `.item()`, a boolean mask or a CPU index in a
    step raises here, and would wait or fail on a GPU. The one read-back of the step is answered
    by hand."""
    reads, seen = [], []

    def answer(table):
        reads.append(tuple(table.shape))
        host = np.ones(table.shape)
        host[..., 2:4] = 0  # nothing verified, nothing accepted
        return host

    monkeypatch.setattr(av, "_read_back", answer)
    G = type("G", (), dict(seed=lambda g: 0, manual_seed=lambda g, seed: g))
    monkeypatch.setattr(torch, "Generator", lambda device: G())
    draw = torch.rand  # a fake device has no generator
    monkeypatch.setattr(torch, "rand", lambda *shape, generator, **kw: draw(*shape, **kw))
    with FakeTensorMode():
        with torch.device("meta"):
            target, drafter = (
                LlamaForCausalLM(LlamaConfig(**{**TINY, "num_hidden_layers": n})).eval()
                for n in (2, 1))
        estimator = av.AcceptanceEstimator(4, refit_every=2)
        estimator.observe = lambda *labels: seen.extend(map(type, labels))
        decoder = av.Decoder(target, drafter, [([1] * n, 9) for n in (3, 1, 7)], max_length=20,
                             num_speculative_tokens=4, plan=plan, cost=STAIRS, estimator=estimator,
                             max_batch_size=2, top_k=5, top_p=0.9)
        for i in range(5):
            decoder.step()
            assert len(reads) == i + 1 and len(reads[-1]) == 2
    assert set(seen) == {np.ndarray}, "learning is the host's: it gets what was read back"


def test_one_padded_block_as_on_a_gpu_gives_the_same_text(monkeypatch):
    """With widths unread an upper bound pads all requests alike; a wrong one cuts queries, and one
    beyond the end of the cache (the longest request at its last token) is out of step with it."""
    monkeypatch.setattr(av, "READ_FREELY", set())
    target, prompts, new = llama(), prompts_of((5, 1, 17, 3)), [30, 28, 6, 9]
    for plan in av.PLANS:
        out = av.generate(target, noisy(target, 0.1), prompts, max_new_tokens=new, temperature=0,
                          num_speculative_tokens=4, cost=STAIRS, max_batch_size=4, plan=plan)
        assert out.tokens == [greedy(target, p, n) for p, n in zip(prompts, new)]


def test_logits_that_are_not_finite_are_named():
    """NaN would silently become some token."""
    for name, index in (("target", 0), ("drafter", 1)):
        pair = [llama(), llama()]
        with torch.no_grad():
            pair[index].lm_head.weight[3] = math.nan
        with pytest.raises(FloatingPointError, match=f"the {name} returned logits"):
            av.generate(*pair, [[1, 2]], max_new_tokens=4, plan="fixed")


class Fixed:
    """A drafter that answers the same whatever it is asked."""

    def __init__(self, answer):
        self.logits = lambda tokens, lengths, slots: answer
        self.commit = self.reset = lambda *args: None


def spoilt(how):
    model = llama()
    how(model)
    return model


def wrap_head(model):
    model.lm_head = torch.nn.Sequential(model.lm_head).eval()


@pytest.mark.parametrize("change, message", [
    (dict(prompts=[[]]), r"prompts\[0\] must be a list of token ids, got \[\]"),
    (dict(prompts=[[1], []]), r"prompts\[1\]"),
    (dict(prompts=torch.tensor([1, 2])), r"prompts\[0\].*got 1"),
    (dict(prompts="text"), "prompts must be"), (dict(prompts=["text"]), r"prompts\[0\].*'text'"),
    (dict(prompts=[[64]]), r"prompts\[0\].*0..63.*64"), (dict(prompts=[[-1]]), r"prompts\[0\].*-1"),
    (dict(prompts=[[1.0]]), r"whole number.*1.0"), (dict(prompts=[[True]]), "True"),
    (dict(max_new_tokens=-1), "max_new_tokens.*-1"),
    (dict(max_new_tokens=[1, 2]), "max_new_tokens"),
    (dict(max_new_tokens=[[1], [2, 3]], prompts=[[1], [2]]), r"max_new_tokens.*\[1\]"),
    (dict(max_new_tokens=255), "256 positions.*257"),
    (dict(num_speculative_tokens=-1), "speculative.*-1"),
    (dict(temperature=-0.1), "temperature.*-0.1"), (dict(temperature=math.nan), "temperature.*nan"),
    (dict(temperature=math.inf), "temperature.*inf"), (dict(temperature=None), "temperature.*None"),
    (dict(top_p=0), "top_p.*0"), (dict(top_p=1.1), "top_p.*1.1"),
    (dict(top_p=math.nan), "top_p.*nan"), (dict(top_k=-1), "top_k.*-1"),
    (dict(top_k=2.5), "top_k.*2.5"), (dict(max_batch_size=0), "batch.*0"),
    (dict(max_batch_size="4"), "batch.*'4'"),
    (dict(plan="adaptive"), "plan.*adaptive"), (dict(eos_token_id=-2), "eos_token_id.*-2"),
    (dict(eos_token_id="</s>"), "eos_token_id"),
    (dict(estimator=av.AcceptanceEstimator(3)), "K = 7.*3"),
    (dict(cost={1: 2}), "cost must be a CostTable"), (dict(drafter=None), "drafter.*NoneType"),
    (dict(target="gpt2"), "target.*str"), (dict(prompts=torch.tensor(5)), "prompts must be.*5"),
    (dict(num_speculative_tokens=5000), "0..1000, got 5000"), (dict(eos_token_id=""), "eos.*''"),
    (dict(temperature=np.complex64(1)), "temperature"), (dict(eos_token_id=64), "eos.*0..63.*64"),
    (dict(drafter=llama(max_position_embeddings=4)), "4 positions"),
    (dict(target=llama().train()), "target.*training mode"), (dict(seed="x"), "seed.*'x'"),
    (dict(drafter=spoilt(lambda m: m.model.layers[1].train())), "drafter.*training mode"),
    (dict(estimator=3), "estimator"), (dict(on_step=3), "on_step"), (dict(seed=-1), "seed.*-1"),
    (dict(estimator=0, num_speculative_tokens=0), "estimator"),
    (dict(estimator="junk", num_speculative_tokens=0), "estimator.*junk"),
    (dict(drafter=type("D", (), dict(logits=0))()), "drafter must be one with")])
def test_bad_input_is_refused_by_name_and_value(change, message):
    """Nothing is silently changed or ignored; nothing runs before it is checked."""
    good = dict(target=llama(), drafter=llama(), prompts=[[1, 2]], max_new_tokens=4)
    with pytest.raises(ValueError, match=message):
        av.generate(**{**good, **change})
    with pytest.raises(TypeError):
        av.generate(**good, repetition_penalty=2.0)


@pytest.mark.parametrize("call, message", [
    (lambda: av.warp(torch.zeros(4), temperature=-1), "temperature.*-1"),
    (lambda: av.warp(torch.zeros(4), top_p=math.nan), "top_p.*nan"),
    (lambda: av.warp(torch.zeros(4), top_k=-1), "top_k.*-1"),
    (lambda: av.trim(torch.zeros(2, 2), 5), "budget.*0..4.*5"),
    (lambda: av.verify(torch.ones(3, 4), torch.ones(2, 1, 4), torch.zeros(1, 1), torch.ones(1)),
     r"q must be of shape \(1, 1, 4\), got \(2, 1, 4\)"),
    (lambda: av.verify(torch.ones(1, 4), torch.ones(2, 0, 4), torch.zeros(2, 0), torch.zeros(2)),
     "p must be 2 rows at least, got 1"),
    (lambda: av.AcceptanceEstimator(2).observe(torch.zeros(5, 3), *torch.zeros(2, 5)),
     r"features must be of shape \(B, 2\), got \(5, 3\)"),
    (lambda: av.AcceptanceEstimator("3"), "num_speculative_tokens.*'3'"),
    (lambda: av.AcceptanceEstimator(3, damping=math.nan), "damping.*nan"),
    (lambda: av.CostTable({"1": 1.0}, {1: 1.0}), "draft.*'1'"),
    (lambda: av.CostTable({1: 1.0}, {1: math.nan}), r"verify\[1\].*nan"),
    (lambda: av.CostTable({1: 1.0}, {}), "verify must be a dict"),
    (lambda: av.CostTable({1: 1.0}, {1: 1e290}), "1e-300..1e\\+280, got 1e\\+290"),
    (lambda: av.CostTable({2**41: 1.0}, {1: 1.0}), "tokens of draft.*2199023255552"),
    (lambda: av.measure_costs(llama(), llama(), []), "prompts"),
    (lambda: av.measure_costs(llama(), llama(), [[1]], repeats=0), "repeats.*0"),
    (lambda: av.measure_costs(llama(), llama(), [[1]], context_length=999),
     "max_length must be a whole number in 0..256, got 1007"),
    (lambda: av.SlotLM(llama().train(), 1, 9), "training mode"),
    (lambda: av.SlotLM(llama(), 1.5, 9), "num_slots.*1.5"),
    (lambda: av.SlotLM(llama().model, 1, 9), "no head"),
    (lambda: av.SlotLM(spoilt(wrap_head), 1, 9), "no head"),
    (lambda: av.generate(llama(), Fixed(torch.zeros(1, 1, 64)), [[1]], plan="fixed"),
     r"drafter.logits must be \(1, V\), got \(1, 1, 64\)"),
    (lambda: av.generate(llama(), Fixed(torch.zeros(2, 64)), [[1]], plan="fixed"),
     r"drafter.logits must be \(1, V\), got \(2, 64\)"),
    (lambda: av.generate(llama(), Fixed(torch.tensor(0.0)), [[1]], plan="fixed"), r"got \(\)"),
    (lambda: av.generate(llama(), Fixed(torch.zeros(1, 0)), [[1]], plan="fixed"), r"got \(1, 0\)"),
    (lambda: av.AcceptanceEstimator(2).observe(torch.zeros(1, 2), torch.zeros(1), torch.zeros(3)),
     r"accepted must be 1 counts in 0..2, got \[0.0, 0.0, 0.0\]"),
    (lambda: av.AcceptanceEstimator(2).observe(torch.zeros(1, 2), [3], [0]), "num_verified.*3"),
    (lambda: av.AcceptanceEstimator(2).observe(torch.zeros(1, 2), [1], [math.nan]), "accepted.*n"),
    (lambda: av.AcceptanceEstimator(2).observe(torch.full((1, 2), 1e7), [1], [1]), "features.*1e6"),
    (lambda: av.CostTable({1: np.float32(0)}, {1: 1.0}), r"draft\[1\].*0.0"),
    (lambda: av.CostTable({1: 1.0}, {1: np.float32(math.inf)}), r"verify\[1\].*inf"),
    (lambda: av.warp(torch.zeros(3), np.float16(math.inf)), "temperature.*inf"),
    (lambda: av.logit_q_max(torch.zeros(3), -1.0), "temperature.*-1.0"),
    (lambda: av.AcceptanceEstimator(2).observe(torch.zeros(1, 2), torch.ones(1, 1), torch.ones(1)),
     r"num_verified must be 1 counts in 0..2, got \[\[1.0\]\]"),
    (lambda: av.AcceptanceEstimator(2).observe(torch.zeros(1, 2), 1, 1), "num_verified.*got 1"),
    (lambda: av.measure_costs(llama(), llama(), [[1], []]), r"prompts\[1\].*\[\]"),
    (lambda: av.measure_costs(llama(), llama(), None), "prompts.*None"),
    (lambda: av.measure_costs(None, llama(), [[1]]), "target.*NoneType"),
    (lambda: av.Decoder(llama(), av.SlotLM(llama(), 1, 9), [], max_length=9, plan="fixed"),
     "drafter must be of 64 slots"),
    (lambda: av.Decoder(llama(), None, [([64], 2)], max_length=9, num_speculative_tokens=0).step(),
     "a token of a prompt must be a whole number in 0..63, got 64"),
    (lambda: av.Decoder(llama(), None, [([1, 2], 9)], max_length=9, num_speculative_tokens=0,
                        plan="fixed").step(), "length.*1..9.*11"),
    (lambda: av.Decoder(llama(), llama(), [([1], 2)], max_length=9).step(), "given a cost"),
    (lambda: av.Decoder(llama(), llama(), [], max_length=9, plan="?"), "plan must be one of")])
def test_the_parts_refuse_too(call, message):
    """What `generate` checks can be reached past it: the parts name what does not fit as well."""
    with pytest.raises(ValueError, match=message):
        call()


def test_a_mask_or_window_that_the_attention_does_not_know_is_refused():
    """A model that hides keys by a mask of its own would be read without it, silently wrong."""
    config = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                  num_attention_heads=4, num_key_value_heads=2)
    for name, more in (("Phimoe", dict(num_local_experts=4, sliding_window=8)), ("Doge", {})):
        model = getattr(transformers, name + "ForCausalLM")(
            getattr(transformers, name + "Config")(**config, **more)).eval()
        with pytest.raises((NotImplementedError, ValueError), match=name):
            av.generate(model, None, [[1, 2, 3]], max_new_tokens=4, num_speculative_tokens=0)


def test_layers_that_count_positions_themselves_are_refused():
    """Llama 4 scales queries by positions that it asks the cache for: here they are packed ones."""
    model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, intermediate_size_mlp=64, head_dim=8,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2,
        layer_types=["full_attention"] * 2, no_rope_layers=[0, 1], pad_token_id=0)).eval()
    with pytest.raises(NotImplementedError, match="Llama4ForCausalLM counts positions"):
        av.generate(model, None, [[1, 2, 3]], max_new_tokens=4, num_speculative_tokens=0)


def test_a_decoder_that_failed_in_a_step_says_so(monkeypatch):
    """Its caches hold drafts that were never decided about; drawing again would not be exact."""
    decoder = av.Decoder(llama(), llama(), [([1, 2], 9)], max_length=11, plan="fixed")
    decoder.step()
    monkeypatch.setattr(av, "verify", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decoder.step()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="a new one after an error"):
        decoder.step()


def test_odd_but_right_input():
    """No prompts give nothing; tensors or tuples of ids are prompts; K may exceed what is asked."""
    target = cycle(8)
    assert av.generate(target, None, [], num_speculative_tokens=0).tokens == []
    assert av.generate(target, cycle(8), [], cost=STAIRS).tokens == []
    for prompts in (torch.tensor([[1], [2]]), [torch.tensor([1]), (2,)], np.array([[1], [2]]),
                    [np.array([1], np.uint16), torch.tensor([2], dtype=torch.int32)]):
        out = av.generate(target, cycle(8), prompts, max_new_tokens=3, num_speculative_tokens=12,
                          temperature=0, cost=STAIRS)
        assert out.tokens == [[2, 3, 4], [3, 4, 5]]


def test_costs_are_measured_within_the_context_that_there_is():
    """A measurement at 128 positions crashes a model, or a drafter's slots, that has fewer."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4,
                                       n_positions=16, bos_token_id=None, eos_token_id=None)).eval()
    for drafter in (noisy(model, 0.1), av.SlotLM(noisy(model, 0.1), 1, 8)):
        out = av.generate(model, drafter, [[1, 2, 3]], max_new_tokens=5, temperature=0)
        assert out.tokens == [greedy(model, [1, 2, 3], 5)]
    assert len(av.generate(model, noisy(model, 0.1), [[1]], max_new_tokens=1).tokens[0]) == 1


@pytest.mark.parametrize("temperature", [0, 0.7, 1])
def test_the_loop_reads_of_a_drafter_what_logit_q_max_says(temperature):
    """Copied out, the estimator is fed by `logit_q_max`; another feature needs another slope. And a
    pass of a drafter of one's own counts one token for each request, however long its text is."""
    for top in 1.0, 5.0, 30.0, -torch.inf:  # (sure beyond the clamp; unsure)
        logits = torch.linspace(-1, 1, 64)[None].index_fill(1, torch.tensor([3]), top)
        decoder = av.Decoder(llama(), Fixed(logits), [([1, 2, 3, 4], 3)], max_length=7,
                             plan="fixed", num_speculative_tokens=2, temperature=temperature)
        *others, most = (logits[0].double() / (temperature or 1)).sort().values
        want = float((most - torch.stack(others).logsumexp(0)).clamp(-10, 10))  # by definition
        assert float(av.logit_q_max(logits[0], temperature)) == pytest.approx(want, abs=1e-4)
        assert decoder.step().features == pytest.approx(want, abs=1e-4), (top, temperature)
        assert decoder.passes == [1, 1]


def test_an_estimator_outlives_a_failed_call():
    """A drafter's NaN must not reach the caller's estimator, nor a graph of its features stay."""
    estimator, broken = av.AcceptanceEstimator(3, refit_every=2), llama()
    with torch.no_grad():
        broken.lm_head.weight[3] = math.nan
    good = dict(max_new_tokens=6, num_speculative_tokens=3, cost=STAIRS, estimator=estimator)
    for plan in ("verification", "joint"):
        with pytest.raises(FloatingPointError, match="drafter"):
            av.generate(llama(), broken, [[1, 2]], plan=plan, **good)
        assert not estimator.sums.any()
        estimator.steps = 1  # joint: no first step of a round, which drafts whatever it costs
    estimator.steps = 0
    av.generate(llama(), llama(1), [[1, 2]], **good)
    assert np.isfinite(theta_of(estimator)).all() and estimator.steps > 2
    features = av.logit_q_max(torch.randn(1, 3, 9, requires_grad=True)).bfloat16()
    estimator.observe(features, torch.tensor([3]), torch.tensor([1]))
    before = estimator.sums.copy()
    with pytest.raises(ValueError, match="features must be finite.*nan"):
        estimator.observe(np.full((1, 3), math.nan), [3], np.array([1]))
    assert (estimator.sums == before).all()


def test_requests_keep_their_numbers_when_some_want_nothing():
    """Steps that number only the requests that ran are joined to the wrong prompts."""
    seen = set()
    out = av.generate(cycle(8), cycle(8), [[0], [1], [2]], max_new_tokens=[0, 3, 2], temperature=0,
                      plan="fixed", on_step=lambda step: seen.update(step.requests.tolist()))
    assert out.tokens == [[], [2, 3, 4], [3, 4]] and seen == {1, 2}


def test_a_refused_request_leaves_the_others_theirs():
    """What `step` refuses must not be answered with the text of the request before it, nor cost the
    requests behind it their turn."""
    for *bad, message in (([99], 4, "0..7, got 99"), ([1], 40, "1..20, got 41"), ([1], 2.5, "2.5"),
                          ([1], "index out of range")):  # a pair that is none, too
        decoder = av.Decoder(cycle(8), None, [([1, 2], 2), bad, ([5], 3)], max_length=20,
                             num_speculative_tokens=0, max_batch_size=1, temperature=0)
        for _ in range(2):
            decoder.step()
        with pytest.raises(ValueError if len(bad) == 2 else IndexError, match=message):
            decoder.step()
        while decoder.step():
            pass
        assert decoder.finished == [(0, [3, 4]), (2, [6, 7, 0])], bad


def test_a_default_dtype_is_nobodys_business():
    """q in the caller's default dtype would not be the law that was drawn from."""
    torch.set_default_dtype(torch.float64)
    try:
        out = av.generate(llama().float(), llama(1).float(), [[1, 2]], max_new_tokens=6,
                          cost=STAIRS)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(out.tokens[0]) == 6


def test_costs_are_measured_at_the_shapes_that_run(monkeypatch):
    """A table of another shape than the batch's lies about trimmed batches."""
    target, seen, layout = llama(), set(), av.Ragged.__init__

    def record(self, slots, cached, pending, drafts, budget, *rest):
        seen.add((drafts is None, int(pending.sum()) + budget))
        layout(self, slots, cached, pending, drafts, budget, *rest)

    monkeypatch.setattr(av.Ragged, "__init__", record)
    prompts = [np.array(prompts_of((5,))[0]), torch.tensor(prompts_of((9,))[0])]  # as generate's
    cost = av.measure_costs(target, noisy(target, 0.1), prompts,
                            num_speculative_tokens=3, max_batch_size=4,
                            context_length=20, repeats=1)
    assert (cost.verify.tokens.tolist() == [1, 2, 4, 5, 6, 7, 8, 10, 16]
            and cost.draft.tokens.tolist() == [1, 2, 4, 16])
    wanted = {(False, n) for n in cost.verify.tokens} | {(True, n) for n in cost.draft.tokens}
    assert wanted <= seen, "a pass of the target (False) or the drafter (True) that never ran"


def test_memory_and_state_do_not_grow():
    """A list kept per step, or finished requests kept in the batch, grows with the run."""
    import tracemalloc
    target = cycle(16)
    decoder = av.Decoder(target, cycle(16, wrong_at=(3,)), (([i % 16], 6) for i in range(10**9)),
                         max_length=8, max_batch_size=4, num_speculative_tokens=3, cost=STAIRS,
                         estimator=av.AcceptanceEstimator(3), seed=0)
    sizes = []
    tracemalloc.start()
    for i in range(240):
        decoder.step()
        decoder.finished.clear()
        if i % 60 == 59:
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[3] - sizes[2] < 12_000 and len(decoder.slots) == 4


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


def test_log_loss_by_hand():
    """A chance taken for the wrong outcome, or a logarithm of 0, would make the losses worthless.

    -log of .8, of 1 - .25 and of 1, over three: (0.22314 + 0.28768 + 0) / 3.
    """
    seen = np.array([True, False, True])
    assert demo.log_loss(seen, np.array([0.8, 0.25, 1.0])) == pytest.approx(0.170275, abs=1e-6)
    assert demo.log_loss(np.array([False]), np.array([1.0])) == pytest.approx(-np.log(1e-12))


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


def test_bootstrap_resamples_requests():
    """Labels of one request are no fresh draws: two requests, all 0 and all 1, give 0, 1/2 or 1."""
    group, value = np.array([7] * 50 + [9] * 50), np.array([0.0] * 50 + [1.0] * 50)
    draws = demo.bootstrap(group, lambda rows: value[rows].mean())
    assert set(draws) == {0.0, 0.5, 1.0}


def test_rules_that_look_at_the_drawn_token_are_biased():
    """The study must show what the worked examples say: 0.4 and 0.75 for 0.5, and shipped 0.5."""
    first_is_a = {rule: law[0] for rule, (law, _) in demo.biased_rules().items()}
    assert first_is_a.pop("verify if q(drawn token) >= 0.5") == pytest.approx(0.4)
    assert first_is_a.pop("budget from this step's survivals") == pytest.approx(0.75)
    assert len(first_is_a) == 4 and all("shipped" in rule for rule in first_is_a)
    assert list(first_is_a.values()) == pytest.approx([0.5] * 4)
    for law, _ in demo.biased_rules().values():
        assert law.sum() == pytest.approx(1.0)


def test_what_the_study_collects_is_what_happened():
    """A row off by one in the target's logits or the hidden states would spoil every table.

    With the target as its own drafter the true chance is 1 everywhere and all is accepted. With an
    unlike drafter, the labels are those of the steps, and the features those of av.
    """
    target = llama()
    pair = demo.Pair("", target, noisy(target, 0.3), [[1, 2, 3], [4, 5], [6]], str)
    run = demo.Run(pair, 3, dict(temperature=0.8, top_p=0.9), [4], 0, 1, True)
    same, _ = demo.collect(run, copy.deepcopy(target), run.law, 200, "")
    assert same.seen.all() and same.limit == pytest.approx(1.0, abs=1e-4)
    d, steps = demo.collect(run, pair.drafter, run.law, 1500, "")
    assert d.seen.sum() == sum(step.accepted.sum() for step in steps)
    features = np.concatenate([s.features[:, i][(i <= s.accepted) & (i < s.num_verified)]
                               for s in steps for i in range(3)])
    assert d.top == pytest.approx(features)
    # The true chance is calibrated: its mean is that of the labels (4.9 sd, FALSE_ALARM 1e-6).
    sd = np.sqrt((d.limit * (1 - d.limit)).sum()) / len(d.seen)
    assert abs(d.limit.mean() - d.seen.mean()) < 4.9 * sd
    logits = pair.drafter.get_output_embeddings()(torch.from_numpy(d.hidden))
    assert av.logit_q_max(logits, 0.8).detach().numpy() == pytest.approx(d.top, abs=1e-3)


def test_another_confidence_runs_in_the_loop():
    """A confidence that the loop does not really ask would be measured as if it had trimmed.

    The oracle's is the true chance: what steps say of their drafts, and trim by, until the last
    request ends, is sum(min(p, q)) of both models run on the whole text without a cache."""
    target, K, law = llama(), 3, dict(temperature=0.8, top_p=0.9)
    drafter, texts, verified = noisy(target, 0.3), [[1, 2, 3], [4, 5], [6]], set()
    pair = demo.Pair("", target, drafter, texts, str)
    oracle = demo.Oracle(demo.Run(pair, K, law, [3], 0, 1, True), 3)
    truth = demo.Fixed(K, lambda f: demo.by_pass(f, oracle.chances, lambda chance, i: chance))
    decoder = av.Decoder(target, oracle, [([1, 2, 3], 20), ([4, 5], 30), ([6], 30)], max_length=40,
                         max_batch_size=3, num_speculative_tokens=K, estimator=truth, seed=0,
                         cost=av.CostTable({1: 0.05}, {3: 1.0, 12: 2.2}), **law)
    while done := decoder.step():
        survival = torch.full(done.survival.shape, -1.0)
        for row, n in enumerate((done.survival >= 0).sum(1)):
            text, drafts = texts[done.requests[row]], done.drafts[row].tolist()
            with torch.no_grad():
                p, q = (av.warp(model(torch.tensor([text + drafts])).logits[0, -K - 1:-1], **law)
                        for model in (target, drafter))
            survival[row, :n] = torch.minimum(p, q).sum(1).cumprod(0)[:n]
            text += drafts[:done.accepted[row]] + [int(done.next_tokens[row])]
        assert done.survival == pytest.approx(survival.numpy(), abs=1e-4)
        want = av.trim(survival, int(done.num_verified.sum())).tolist()
        assert done.num_verified.tolist() == want
        verified.add(tuple(want))
    assert list(map(len, texts)) == [23, 32, 31] and len(verified) > 6


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


def test_a_cache_file_that_does_not_fit_leaves_the_model_as_it_was(tmp_path, monkeypatch, capsys):
    """Weights that are not finite, or fit in part only, must not be what training goes on from."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, bad = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    before = copy.deepcopy(model.state_dict())
    demo.keep("x", [model])
    assert torch.equal(demo.cached("x", [bad])[0].weight, model.weight)
    assert not capsys.readouterr().out
    with torch.no_grad():
        bad.bias[0] = math.nan
    for weights in (bad, torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 3)):
        demo.keep("x", [weights])
        assert demo.cached("x", [model]) is None and "no usable weights" in capsys.readouterr().out
        assert all(torch.equal(w, before[k]) for k, w in model.state_dict().items())


# ------------------------------------------------------------------------ the texts


def test_the_file_stays_small():
    """Minimal is a promise: a line budget, short functions, 100 columns."""
    source = (HERE / "av.py").read_text()
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    assert len(source.splitlines()) <= 1045 and max(map(len, source.splitlines())) <= 100
    assert max(f.end_lineno - f.body[0].lineno + 1 for f in functions) <= 46


def test_sections_can_be_copied_out():
    """The estimator and the budget stand alone: sections 3 and 4, and the helpers README names."""
    source, readme = (HERE / "av.py").read_text(), (HERE / "README.md").read_text()
    first, last = (source[:source.index(f"# ---- {n}.")].count("\n") for n in (3, 5))
    named = {"_need", "_whole", "_number", "_check_law", *re.search(
        r"with `(\w+)`, `(\w+)`, the checks", readme).groups()}
    code = [ast.unparse(n) for n in ast.parse(source).body
            if first < n.lineno < last or getattr(n, "name", "") in named
            or isinstance(n, (ast.Import, ast.ImportFrom)) and "transformers" not in ast.unparse(n)]
    code += [b.replace("av.", "") for b in re.findall(r"```python\n(.*?)```", readme, re.S)
             if "estimator.observe" in b]
    subprocess.run([sys.executable, "-c", "\n".join(code)], check=True, cwd="/", timeout=100)


def test_the_readme_runs():
    """A README whose code does not run is a defect: its Python blocks are executed in order."""
    blocks = re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.S)
    assert blocks
    subprocess.run([sys.executable, "-c", "\n".join(blocks)], check=True, cwd=HERE, timeout=100)

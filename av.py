# SPDX-License-Identifier: MIT
"""Adaptive verification for speculative decoding, without a confidence head, in one file.

A cheap drafter q proposes K tokens per request, the target p checks them in one pass, and rejection
sampling keeps the output distributed exactly as the target alone. In a large batch each checked
token costs real time, so each step checks only the drafts that are worth it: a logistic regression
on one number, logit(q_max), fitted online, says how likely each is to be accepted, and measured
costs say how many, over the whole batch, to send to the target.

Read `Decoder.step` first (one step, numbered), then `verify` (the lossless rule),
`AcceptanceEstimator` (the contribution), `draft_budget` and `trim`, then the machinery.

here             meaning                                               papers, vLLM
p, q             law of the TARGET, law of the DRAFTER (some swap)     target_probs, draft_probs
K                drafts per request and step                           gamma, num_speculative_tokens
confidence c_i   P(draft i is accepted, given that all before it were) acceptance rate, alpha
survival s_i     c_1 * ... * c_i                                       survival
draft budget     drafts sent to the target per step, all requests      draft budget
bonus token      the one more token that each step gives a request     bonus token
B, V, T          requests (in the loop: slots, of them R in use), vocabulary, tokens of a pass

    accept x_i   with probability min(1, p(x_i) / q(x_i)), else draw from norm(max(0, p - q))
    feature      f_i = logit(q_max,i) = max(logits) - logsumexp(the other logits)
    confidence   c_i = sigmoid(slope * f_i + intercept_i), by damped Newton steps on the log-loss
    budget       argmax_b (B + sum of the b best survivals) / (ms to draft + ms to verify B + b)
    joint        a drafter pass for the requests whose drafts save more ms than it costs; verify all

Not here: token trees, settings per request, paged memory, CUDA graphs, several devices, recurrent
models. vLLM has them; in its `v1/worker/gpu/spec_decode/`, `acceptance_estimator.py` and
`adaptive_verification.py` are the production counterparts of sections 3 and 4.
"""
import math
import time
import warnings
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface, PreTrainedModel

READ_FREELY = {"cpu"}  # where reading a tensor on the host waits for nothing


def _send(x, device):
    return torch.from_numpy(x).to(device, non_blocking=True)  # the host does not wait


def _need(ok, name, what, value):
    if not ok:
        raise ValueError(f"{name} must be {what}, got {value!r}")


def _whole(name, value, low, high=2**62):
    _number(name, value, low, high, "whole number", (int, np.integer))
    return int(value)


def _number(name, value, low, high, what="number", kinds=(int, float, np.integer, np.floating)):
    exact = value.item() if isinstance(value, np.generic) else value  # in float32, 1e-300 is 0
    if not isinstance(exact, kinds) or isinstance(exact, bool) or not low <= exact <= high:
        _need(False, name, f"a {what} in {low}..{high}", value)


def _check_law(temperature, top_k, top_p):
    _number("temperature", temperature, 0, 1e6)
    _number("top_p", top_p, 1e-300, 1)
    _whole("top_k", top_k, 0)


# ---- 1. Sampling: logits -> probabilities -> token. Every law in this file is one of these rows.


def warp(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Logits (..., V) to the float32 probabilities they are sampled with, (..., V).

    Temperature, then top-k (0: off), then top-p, as transformers and vLLM order them; what ties
    (float32) with the last one kept is kept. Temperature 0 is the one-hot case of the same law."""
    _check_law(temperature, top_k, top_p)
    return _warp(logits, temperature, int(top_k), top_p)[0]


def _warp(logits, temperature, top_k, top_p, out=None):
    """The law, in `out` if given, and (...,) its largest probability before any cut."""
    law, total = _softmax(logits, temperature, out)
    if temperature == 0:
        top = law.amax(-1)
        law.zero_().scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    elif top_p < 1 or 0 < top_k < logits.shape[-1]:
        top = _cut(law, total, top_k, top_p, max(64, logits.shape[-1] // 1024, top_k + 1))
    else:
        top = law.amax(-1)
        law.div_(total)
    return law, top / total[..., 0]


def _softmax(logits, temperature, out=None):
    """Probabilities but for their sums, which in float32 may be off by 5e-4 for a large V."""
    logits = logits.float()
    if temperature not in (0, 1):
        # Less the maximum: a tiny temperature then underflows to exp(-inf) = 0, never to inf - inf.
        logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)
    law = torch.softmax(logits, -1, out=out)
    return law, law.sum(-1, keepdim=True)


def _cut(law, total, top_k, top_p, n):
    """Leave `law`, of sum total, what top-k and then top-p keep; returns its largest from before.

    Looks at the n heaviest tokens of each row only, which needs no sort of V; a row that keeps all
    of them may need more, and is looked at again. Where reading that waits, n is V at once."""
    V = law.shape[-1]
    n = min(n, V) if law.device.type in READ_FREELY else V
    top, at = _largest(law, n)  # (..., n), descending
    by_k = 0 < top_k < V
    kept = few = top * (top >= top[..., top_k - 1, None]) if by_k else top
    if top_p < 1:  # (at 1 a float32 sum would reach the whole before the last one)
        whole = few.sum(-1, keepdim=True) if by_k else total
        last = torch.searchsorted(few.cumsum(-1), top_p * whole).clamp_(max=n - 1)
        kept = few * (few >= few.gather(-1, last))  # the first one stays however small top_p is
    short = (few if by_k else kept)[..., -1] > 0
    again = law[short] if n < V and short.any() else None
    law.zero_().scatter_(-1, at, kept / kept.sum(-1, keepdim=True))
    if again is not None:
        _cut(again, total[short], top_k, top_p, 8 * n)
        law[short] = again
    return top[..., 0]


def _largest(x, n):
    """x.topk(n), faster for many columns: the n largest lie in the n blocks of largest maximum."""
    size = math.gcd(x.shape[-1], 32)
    if x.shape[-1] < 2 * n * size or size == 1:
        return x.topk(n)
    blocks = x.unflatten(-1, (-1, size))
    best = blocks.amax(-1).topk(n).indices  # (..., n)
    top, at = blocks.take_along_dim(best[..., None], -2).flatten(-2).topk(n)
    return top, best.gather(-1, at // size) * size + at % size


def sample(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One draw per row from unnormalised probabilities, (..., V) -> (...,); no host read-back.

    Inverse CDF in float64: a uniform or two per row, not V exponentials. Of a large vocabulary
    first a block of tokens is drawn, then one in it: each is summed once, few are accumulated."""
    V = probs.shape[-1]
    if V > 1024 and (size := math.gcd(V, 512)) > 1:
        blocks = probs.unflatten(-1, (-1, size))  # (..., V / size, size)
        block = sample(blocks.sum(-1, dtype=torch.promote_types(probs.dtype, torch.float32)),
                       generator)
        inside = blocks.take_along_dim(block[..., None, None], -2).squeeze(-2)  # (..., size)
        return block * size + sample(inside, generator)
    cdf = probs.cumsum(-1, dtype=torch.float64)
    u = torch.rand(*probs.shape[:-1], 1, device=probs.device, dtype=cdf.dtype, generator=generator)
    # `right` steps over flat pieces, the point stays below the end: no token of weight 0 is drawn.
    point = u * (cdf[..., -1:] * (1 - 2**-52))
    return torch.searchsorted(cdf, point, right=True).squeeze(-1).clamp(max=V - 1)


# ---- 2. The lossless accept rule (Leviathan et al. 2023, algorithm 1; vLLM rejection_sampler).


def verify(p: Tensor, q: Tensor, drafts: Tensor, num_verified: Tensor,
           generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Accept a prefix of each request's verified drafts and draw the token that follows it.

    p: (B + sum(num_verified), V): the target rows of request 0, then of request 1, ...; its row i
    is the law of its draft i, the row after its last verified draft that of the token behind it.
    q: (B, K, V), row i is to the bit the law drafts[:, i] was drawn from; drafts (B, K);
    num_verified (B,) in 0..K, decided without looking at the drafts it decides about (values are
    not checked: that would be a read-back). Returns accepted (B,) and next_tokens (B,)."""
    B, K = drafts.shape
    _need(q.shape == (B, K, p.shape[1]), "q", f"of shape {B, K, p.shape[1]}", tuple(q.shape))
    _need(num_verified.shape == (B,), "num_verified", f"{B} counts", tuple(num_verified.shape))
    _need(len(p) >= B, "p", f"{B} rows at least", len(p))
    if K == 0:
        return num_verified, sample(p[:B], generator)
    rows, position = num_verified + 1, torch.arange(K, device=p.device)
    first = rows.cumsum(0) - rows  # (B,) p row of the first draft
    p_x = p[(first[:, None] + position).clamp(max=len(p) - 1), drafts]  # (B, K)
    q_x = q.gather(2, drafts[..., None]).squeeze(2)  # (B, K)
    u = torch.rand(B, K, device=p.device, dtype=torch.float64, generator=generator)
    # LOSSLESS: u < p/q, written without the division so that p(x) = 0 never passes, even at u = 0.
    accept = (u * q_x < p_x) & (position < num_verified[:, None])
    accepted = accept.cumprod(1).sum(1)  # (B,) up to the first rejection
    # subtle: the next token comes from row `accepted`, whichever draft was rejected there or none.
    p_next = p[first + accepted]  # (B, V)
    q_next = q[torch.arange(B, device=p.device), accepted.clamp(max=K - 1)]
    rejected = (accepted < num_verified)[:, None].to(q.dtype)
    residual = torch.addcmul(p_next, q_next, rejected, value=-1).clamp_(min=0)
    # subtle: rounding can leave a residual of zero mass (p = q): then p, as any law would do.
    residual = residual.where(residual.sum(-1, keepdim=True) > 0, p_next)
    return accepted, sample(residual, generator)


# ---- 3. The acceptance estimator (vLLM acceptance_estimator.py, OnlineAcceptanceEstimator).


def logit_q_max(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-odds of the drafter's most likely token, (..., V) -> (...,), clamped to +-10.

    LOSSLESS: reads the law, never the drawn token. Taken before top-k and top-p, which often leave
    one token (q_max = 1, no information); temperature 0 uses the unscaled logits."""
    _check_law(temperature, 0, 1)
    law, total = _softmax(logits, temperature)
    return (law.amax(-1) / total[..., 0]).logit().clamp(-10.0, 10.0)


class AcceptanceEstimator:
    """logit P(i accepted, if all before it were) = slope * logit(q_max) + intercepts[i], online.

    One slope for all positions, one intercept each: K + 1 parameters, O(K) state, float64. One per
    pair and sampling setting. Defaults are vLLM's, the start is its authors' median of five pairs.

    num_speculative_tokens: K >= 1. refit_every: N, decode steps per round, and how often all is
    verified (see `Decoder.choose`). ridge: keeps H regular where a position has no labels.
    damping: labels at which a coefficient takes half its step. Raises ValueError out of range."""

    def __init__(self, num_speculative_tokens: int, *, refit_every: int = 100, ridge: float = 1e-3,
                 damping: float = 50.0, slope: float = 0.5, intercept: float = -0.2):
        K = _whole("num_speculative_tokens", num_speculative_tokens, 1)
        self.refit_every = _whole("refit_every", refit_every, 1)
        for name, value, low in (("ridge", ridge, 1e-12), ("damping", damping, 0),
                                 ("slope", slope, 0), ("intercept", intercept, -1e6)):
            _number(name, value, low, 1e6)
        self.ridge, self.damping = float(ridge), float(damping)
        self.slope, self.intercepts = float(slope), np.full(K, float(intercept))
        self.num_speculative_tokens, self.steps, self.sums = K, 0, np.zeros((6, K))  # of a round

    def predict(self, features, position=slice(None)):
        """Confidence, float64, of features (..., K), or (...) of one position; array or tensor."""
        if not isinstance(features, Tensor):
            logit = self.slope * np.asarray(features, float) + self.intercepts[position]
            return np.exp(-np.logaddexp(0.0, -logit))  # sigmoid: no overflow, no cancelling
        intercepts = _send(self.intercepts, features.device)[position]
        return torch.sigmoid(self.slope * features.double() + intercepts)

    def observe(self, features, num_verified, accepted) -> None:
        """Add one step's labels: features (B, K), num_verified (B,), accepted (B,). Refits each N.

        Arrays or tensors, read on the host. A position has a label iff it was verified and all
        before it were accepted: the first rejection is the last label, and what was not verified
        has none (which is not label 0). Raises ValueError for other shapes, features not finite."""
        features, num_verified, accepted = (
            x.detach().cpu().double().numpy() if isinstance(x, Tensor) else np.asarray(x)
            for x in (features, num_verified, accepted))
        K, position = self.num_speculative_tokens, np.arange(self.num_speculative_tokens)
        _need(features.shape[1:] == (K,), "features", f"of shape (B, {K})", features.shape)
        for name, x in ("num_verified", num_verified), ("accepted", accepted):
            _need(x.shape == features.shape[:1] and ((0 <= x) & (x <= K)).all(), name,
                  f"{len(features)} counts in 0..{K}", x.tolist())
        labelled = (position < num_verified[:, None]) & (position <= accepted[:, None])  # (B, K)
        f = np.where(labelled, features, 0.0).astype(float)
        _need((np.abs(f) <= 1e6).all(), "features", "finite, 1e6 at most", f)
        c = self.predict(f)  # confidence
        # subtle: a sure draft has no curvature, yet a full residual if it fails: one such surprise
        # would move an intercept by hundreds. So curvature has a floor.
        curvature = labelled * np.maximum(c * (1 - c), 0.05)
        residual = labelled * (c - (position < accepted[:, None]))
        self.sums = self.sums + np.array([curvature * f * f, curvature * f, curvature,
                                          residual * f, residual, labelled]).sum(1)
        self.steps += 1
        if self.steps % self.refit_every == 0:
            self.refit()

    def system(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the round so far: H (K+1, K+1), g (K+1,), and the labels of each coefficient (K+1,).

        H is an arrowhead, dense in its first row and column only: a draft has one position."""
        cff, cf, c, rf, r, n = self.sums
        H = np.diag(np.append(cff.sum(), c))
        H[0, 1:] = H[1:, 0] = cf
        return H, np.append(rf.sum(), r), np.append(n.sum(), n)

    def refit(self) -> None:
        """One damped Newton step on the round's sums, which then start again from zero."""
        H, g, labels = self.system()
        H = H + self.ridge * np.eye(len(H))
        damp = labels / np.maximum(labels + self.damping, 1e-9)  # no labels: no step
        step = -np.linalg.lstsq(H, g, rcond=None)[0] * damp  # (a tiny ridge may leave H singular)
        # A negative slope would call the surer draft the worse one. It stops at zero, and the
        # intercepts then take the step that fits the slope really taken.
        if step[0] < -self.slope:
            step = np.append(-self.slope, (H[0] * self.slope - g)[1:] / H.diagonal()[1:] * damp[1:])
        # Nothing moves by more than 1 in a round: a bad spell must not bury a position.
        step /= max(np.abs(step).max(), 1.0)
        self.slope, self.intercepts = float(self.slope + step[0]), self.intercepts + step[1:]
        self.sums = np.zeros_like(self.sums)


# ---- 4. Costs, budget, trim (vLLM adaptive_verification.py, build_cost_tables_from_curves).


class Curve:
    """Milliseconds by number of query tokens, from measured points {tokens: ms}.

    A running maximum keeps it from falling with size; linear between the points; beyond the last
    the last slope goes on (flat would make large batches look free), below the first it is flat."""

    def __init__(self, name: str, points: dict[int, float]):
        _need(isinstance(points, dict) and points, name, "a dict {tokens: ms}", points)
        for n, ms in points.items():
            _whole(f"tokens of {name}", n, 1, 2**39)
            _number(f"{name}[{n}]", ms, 1e-300, 1e280)
        self.tokens, ms = np.array(sorted(points.items()), float).T
        self._set(ms)

    def _set(self, points):
        self.ms = np.maximum.accumulate(points)
        # Beyond the last point: its slope; of a flat piece that of all; one point: in proportion.
        x, y, far = self.tokens, self.ms, 2.0**40
        before = -2 if len(x) > 1 and y[-1] > y[-2] else 0
        slope = (y[-1] - y[before]) / (x[-1] - x[before]) if len(x) > 1 else y[0] / x[0]
        self.line = np.append(x, far), np.append(y, y[-1] + slope * (far - x[-1]))

    def __call__(self, tokens):
        """Milliseconds for `tokens` (an int or an array, >= 0)."""
        _need(np.asarray(tokens).min(initial=0) >= 0, "tokens", ">= 0", tokens)
        return np.interp(tokens, *self.line)

    def learn(self, tokens: float, ms: float):
        """Move all points, most those next to `tokens`, towards a step that really took `ms`."""
        if tokens > 2 * self.tokens[-1]:
            return  # many prompts, or much that a drafter missed, say little about the points
        expected, smaller = self(tokens), self.tokens < tokens
        change = 0.1 * min(max(ms / expected - 1, -0.5), 0.5)  # a share; hiccups count little
        index = np.arange(len(self.ms))
        away = np.abs(index - np.interp(tokens, self.tokens, index))  # 0: this very point
        # Half of it (a root: no drift by chance) everywhere: a machine slows down at all sizes.
        points = self.ms * (1 + change) ** np.maximum(0.5, 1 - away)
        # Fewer tokens take no longer; else the running maximum would undo every fall.
        points[smaller] = np.minimum(points[smaller], expected * (1 + change))
        self._set(points)


class CostTable:
    """Milliseconds: `draft(n)` of a drafter pass over n tokens, `verify(n)` of all the rest of a
    step with n target query tokens. `learning` (as `measure_costs` has it): from the steps run."""

    def __init__(self, draft: dict[int, float], verify: dict[int, float], learning: bool = False):
        self.draft, self.verify = Curve("draft", draft), Curve("verify", verify)
        self.learning = learning
        if len(verify) > 1 and self.verify.ms[-1] <= self.verify.ms[0] * 1.001:
            warnings.warn("verify costs are flat: trimming can never pay", stacklevel=2)


def draft_budget(survival: np.ndarray, cost: CostTable) -> int:
    """The published rule: how many drafts to verify, for the most tokens per millisecond.

    survival (B, K), negative where no draft can be used. A global argmax, for costs may be a
    staircase; of equally good ones the smallest. LOSSLESS: pass survivals of *earlier* steps. This
    step's depend on the tokens drawn: a budget made of them would look at what it decides about."""
    B, usable = len(survival), survival >= 0
    best = -np.sort(-survival[usable])
    passes = usable.sum(0)  # (K,) requests in each
    ms = cost.draft(passes[passes > 0]).sum() + cost.verify(B + np.arange(len(best) + 1))
    rate = (B + np.append(0.0, best.cumsum())) / ms
    return int(np.argmax(rate >= rate.max() * (1 - 1e-12)))  # rounding does not decide a tie


class JointPlan:
    """Joint: who drafts one token more, pass by pass of one step; R requests, K positions.

    confidence (R, K): usual ones, 0: can't be used. explored: the first so many draft at any price.
    LOSSLESS: whatever is drafted will be verified, so this decides about tokens that are not drawn
    yet, and may look at all that were, of this step too."""

    def __init__(self, confidence: np.ndarray, cost: CostTable, explored: int = 0):
        R, K = confidence.shape
        self.usual, self.expected = confidence, confidence.cumprod(1)  # chances to survive
        self.draft_ms = cost.draft(np.arange(2 * R + 1))  # of a pass over 0, 1, ... tokens
        self.verify_ms = cost.verify(np.arange(R, R * (K + 1) + 1))  # of 0, 1, ... drafts
        self.drawn, self.explored, self.spent = 0, explored, self.verify_ms[0] / R  # ms of each
        n, passes = np.arange(1, R + 1)[:, None], np.arange(1, K + 1)  # (R, 1), (K,)
        self.drafts, slope = n * passes, (self.verify_ms[-1] - self.verify_ms[0]) / (R * K)
        pads = slope / 4 * np.minimum((R - n) * passes, 16 * n)  # if n go deeper than the others
        self.more_ms = (passes - 1) * self.draft_ms[n] + pads  # (R, K) beside the first pass

    def choose(self, rows: np.ndarray, i: int, read: np.ndarray) -> np.ndarray:
        """Of `rows` (n,) those that draw draft i now: the explored, and as many as pay, if any do.

        read (n,): what the pass reads of each. A draft that survives saves what a token costs, if
        the step ends here. Looks ahead, to the last position, for costs may be a staircase."""
        token = self.spent / (1 + self.expected[rows, :i].sum(1, keepdims=True))  # (n, 1) ms
        worth = self.expected[rows, i:] * token  # (n, L) of this draft, the next, ...
        order = (-worth[:, 0]).argsort(kind="stable")
        n, L = worth.shape
        ms = (self.draft_ms[read[order].cumsum(), None] + self.more_ms[:n, :L]
              + self.verify_ms[self.drawn + self.drafts[:n, :L]] - self.verify_ms[self.drawn])
        gain = worth[order].cumsum(0).cumsum(1) - ms  # of the best 1, 2, ... in 1, 2, ... passes
        best = max([g.argmax() + 1 for g in (gain[:, 0], gain.max(1)) if g.max() > 0], default=0)
        draws = rows < self.explored  # (n,) at any price; the best as if these paid theirs
        draws[order[:best]] = True
        count = int(draws.sum())
        self.spent += ms[count - 1, 0] / count if count else 0
        self.drawn += count
        return rows[draws]

    def drew(self, rows: np.ndarray, i: int, confidence: np.ndarray):
        """Draft i of `rows` turned out so sure; the next ones will be more like it than usual."""
        usual = self.usual[rows, i:]
        c = (0.75 * confidence[:, None] + 0.25 * usual) * (usual > 0)
        c[:, 0] = confidence * (self.expected[rows, i - 1] if i else 1)
        self.expected[rows, i:] = c.cumprod(1)


def trim(survival: Tensor, budget: int) -> Tensor:
    """Verified drafts per request (B,): how many of the `budget` best slots each one holds.

    survival (B, K) never rises along a request, so its best are a prefix; -1: not drafted, so pass
    no budget above the number that was. subtle: ties go by position, then request (a stable sort
    of the position-major list): they neither break a prefix nor ask which token was drawn."""
    B = len(survival)
    _whole("budget", budget, 0, survival.numel())
    # LOSSLESS: whatever outranks a slot has a survival that the slot's own draft cannot change.
    best = survival.T.flatten().sort(descending=True, stable=True).indices[:budget]
    return best.new_zeros(B).scatter_add_(0, best % B, torch.ones_like(best))


# ---- 5. The ragged batch: any number of query tokens per request, on unmodified models. All tokens
#    travel as one row (1, T): linear layers see real tokens only, and attention unpacks them.


class Ragged:
    """Where the T packed tokens of one forward pass belong; `ragged_attention` reads it.

    Request i, in slot slots[i], brings pending[i] tokens that are not cached yet, then drafts[i]
    drafts, `budget` of them in all, at most max_drafts each (0: not known)."""

    def __init__(self, slots, cached, pending, drafts, budget, max_drafts, device):
        R, T = len(slots), int(pending.sum()) + budget
        # Slots mostly in use are read as one view of the cache, idle ones as rows without tokens.
        dense = slots[-1] + 1 - slots[0] < 2 * R
        rows = slots - slots[0] if dense else np.arange(R)
        table = np.zeros((3, rows[-1] + 1), int)
        table[:, rows] = slots, cached, pending
        free = device.type in READ_FREELY  # then in numpy, in a third of torch's time
        put = (lambda x: x) if free else (lambda x: _send(x, device))
        xp, slot, start, known = np if free else torch, *put(table)  # (r,), r >= R
        counts = known + 0  # (r,) query tokens
        if drafts is not None:
            # subtle: the host need not know them, only T: so one read-back per step is enough.
            counts[put(rows)] += drafts.numpy() if free else drafts
        ends = counts.cumsum(0)
        first, at = ends - counts, xp.arange(T, device=str(device))  # (r,) its first token, (T,)
        row = xp.searchsorted(ends, at, side="right")  # (T,) the row of each token
        offset = at - first[row]
        self.slots, self.positions = map(torch.as_tensor, (slot[row], start[row] + offset))  # (T,)
        # Logits are wanted after the last pending token (the law of draft 0) and after each draft:
        # their number is known, so a sort finds them without a read-back.
        self.keep = 0 if T == R + budget else torch.as_tensor(  # 0: all
            (1 * (offset < known[row] - 1)).argsort(stable=True)[:R + budget])
        # Attention pads: one call for all rows, and one more for each row longer than `width` (a
        # prompt, a drafter left behind, a deep row). Where counts are not free: an upper bound.
        _, cached, pending = table
        widths = counts if free else pending + min(budget, max_drafts or budget)
        n, width = len(widths), widths.max()
        if T < n * width:  # the cheapest: n * width, and for each longer row its own + 16 or so
            at = np.maximum(np.sort(widths), 1)
            width = at[np.argmin(n * at - (at + 16).cumsum())]
        long = np.flatnonzero(widths > width)
        self.unpadded = not len(long) and T == n * width
        self.layers, self.calls = set(), []  # layers: that have attended
        for lo, hi, w in [(0, n, width)] + [(i, i + 1, widths[i]) for i in long]:
            at = xp.arange(w, device=str(device))
            keys = (cached + np.minimum(widths, w))[lo:hi]
            masks = {None: None} if w == 1 and free and keys.min() == keys.max() else {}
            self.calls.append((  # cache rows, packed queries, their positions, keys to see, masks
                slice(slots[0] + lo, slots[0] + hi) if dense else torch.as_tensor(slot[lo:hi]),
                None if self.unpadded else torch.as_tensor(
                    xp.clip(first[lo:hi, None] + at, None, T - 1).reshape(-1)),
                torch.as_tensor(start[lo:hi, None] + at), int(keys.max()), masks))
        if not self.unpadded:  # where each token is in the outputs of all calls
            starts = np.arange(n) * width
            starts[long] = n * width + np.cumsum(widths[long]) - widths[long]
            self.place = torch.as_tensor(put(starts)[row] + offset)


def ragged_attention(module, query, key, value, attention_mask=None, *, ragged=None, scaling=None,
                     dropout=0.0, sliding_window=None, softcap=None, s_aux=None, **kwargs):
    """Attention of packed queries (1, H, T, D) over cache slots (slots, H_kv, S, D).

    transformers calls it through `AttentionInterface`; returns ((1, T, H, D_v), None). Grouped
    heads, sliding windows, soft caps and sinks are supported; all else is refused by name."""
    more = [k for k, v in kwargs.items() if v is not None and k not in _HARMLESS]
    more += ["a mask of its own"] * (attention_mask is not None)
    if sliding_window is None and getattr(module.config, "sliding_window", None) and not getattr(
            module.config, "layer_types", None):
        more.append("a sliding window that it does not pass on")
    if ragged is None or dropout or more or not getattr(module, "is_causal", True):
        why = ("does not pass on the batch layout" if ragged is None else
               f"uses {more}" if more else f"is not causal, or drops out ({dropout})")
        raise NotImplementedError(f"{type(module).__name__}: an attention that {why} is not here")
    ragged.layers.add(module.layer_idx)
    query, G, outputs = query[0].transpose(0, 1), query.shape[1] // key.shape[1], []  # (T, H, D)
    for rows, take, seen, length, masks in ragged.calls:
        (r, w), k, v = seen.shape, key[rows, :, :length], value[rows, :, :length]
        length = k.shape[2]  # an upper bound may have passed the end of the cache
        # Heads that share a key head become queries of it: (r, H_kv, w * G, D), no key is repeated.
        q = (query if ragged.unpadded else query[take]).reshape(r, w, -1, G, query.shape[2])
        q = q.transpose(1, 2).flatten(2, 3)
        if sliding_window not in masks:  # layers share one of a few (None where all is seen)
            at = torch.arange(length, device=query.device)  # key positions
            hidden = at > seen[..., None]  # (r, w, length): the future, and stale entries behind
            if sliding_window is not None:
                hidden |= at <= seen[..., None] - sliding_window
            mask = query.new_zeros(r, w, length).masked_fill_(hidden, torch.finfo(query.dtype).min)
            masks[sliding_window] = mask.repeat_interleave(G, 1)[:, None]
        mask = masks[sliding_window]  # (r, 1, w * G, length)
        if softcap is None and s_aux is None:
            out = sdpa(q, k, v, attn_mask=mask, scale=scaling)
        else:
            scores = q @ k.mT * scaling
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            scores = scores if mask is None else scores + mask
            if s_aux is not None:  # a column per head that takes weight and gives nothing (gpt-oss)
                sink = s_aux.view(1, -1, 1, G).expand(-1, -1, w, -1).reshape(1, -1, w * G, 1)
                scores = torch.cat([scores, sink.expand(r, -1, -1, 1)], -1)
            out = scores.softmax(-1, dtype=torch.float32)[..., :length].to(v.dtype) @ v
        out = out.reshape(r, -1, w, G, v.shape[3]).transpose(1, 2)  # (r, w, H_kv, G, D_v)
        outputs.append(out.reshape(r * w, -1, v.shape[3]))
    out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]  # (r * w, H, D) of each call
    return (out if ragged.unpadded else out[ragged.place])[None], None  # (1, T, H, D)


_HARMLESS = {"position_ids", "use_cache", "output_attentions", "output_router_logits", "is_causal"}
AttentionInterface.register("ragged", ragged_attention)


def _vocabulary(model):
    return len(model.get_output_embeddings().weight), len(model.get_input_embeddings().weight)


# ---- 6. A causal LM over request slots: the target, and the drafter.
#    The loop knows a drafter by three verbs: `logits(tokens, lengths, slots)` gives a row of V for
#    the next token of each slot (`lengths` includes the drafts so far), and the loop draws it;
#    `commit(slots, lengths)`: beyond `lengths` all is void; `reset(slot)`. LOSSLESS: a row may hang
#    on its own slot's tokens and on committed ones, not on another slot's drafts. One that drafts
#    in parallel computes in the first call; one that reads the target's states takes a hook.


class SlotLM:
    """A decoder-only transformers model, unmodified, with a KV cache over slots.

    This is the cache that the model is given (`update`), for one Decoder at a time. No prefix is
    computed twice; to roll a draft back, `cached` sinks: its entry is overwritten before a read."""

    def __init__(self, model, num_slots: int, max_length: int, max_drafts: int = 0):
        _check_model("model", model)
        _whole("num_slots", num_slots, 1), _whole("max_drafts", max_drafts, 0)
        _whole("max_length", max_length, 0, _positions(model))
        self.model, self.shape, self.max_drafts = model, (num_slots, max_length), max_drafts
        self.vocab_size, self.embedded = _vocabulary(model)
        configs = (m.config for m in model.modules() if hasattr(m, "config"))
        self.configs = list({id(config): vars(config) for config in configs}.values())
        self.layers, self.kv = set(range(model.config.num_hidden_layers)), {}  # kv: by layer
        self.cached = np.zeros(num_slots, int)  # tokens of each slot that the cache holds

    @torch.inference_mode()
    def logits(self, tokens: Tensor, lengths: np.ndarray, slots: np.ndarray,
               drafts: Tensor | None = None, budget: int = 0) -> Tensor:
        """(R + budget, V): logits after each slot's last known token and after each of its drafts.

        tokens (slots, S): of each slot `lengths` (R,) known tokens, then its drafts; slots (R,)
        ascending; drafts (R,): how many to verify, summing to budget. Feeds all that the cache
        lacks: a prompt, the last token, and (subtle: after a full acceptance) the last draft."""
        cached = self.cached[slots]
        self.batch = Ragged(slots, cached, lengths - cached, drafts, budget, self.max_drafts,
                            tokens.device)
        # subtle: an id that only the target has is fed as the last one; q may be anything.
        ids = tokens[self.batch.slots, self.batch.positions].clamp(max=self.embedded - 1)
        names = [config["_attn_implementation_internal"] for config in self.configs]
        try:
            for config in self.configs:
                config["_attn_implementation_internal"] = "ragged"  # (public setters are slow)
            out = self.model(input_ids=ids[None], position_ids=self.batch.positions[None],
                             cache=self, use_cache=True, ragged=self.batch,
                             logits_to_keep=self.batch.keep)
        except (AttributeError, TypeError, RuntimeError, ValueError) as error:
            known = isinstance(error, (torch.OutOfMemoryError, NotImplementedError))
            if known or len(self.kv) == len(self.layers):
                raise  # only of a first pass may one say that the model is of the wrong kind
            raise NotImplementedError(f"{type(self.model).__name__} cannot run as a ragged batch: "
                                      f"{error}") from error
        finally:  # the model's configs are as they were, come what may
            for config, name in zip(self.configs, names):
                config["_attn_implementation_internal"] = name
        if not self.batch.layers == self.kv.keys() == self.layers:
            raise NotImplementedError(f"{type(self.model).__name__} has layers that do not attend "
                                      "through the attention interface, or not as many as it says")
        self.cached[slots] = lengths + budget  # at least what is there; commit() makes it exact
        return out.logits[0]

    def update(self, key, value, layer_idx, *args, **kwargs):
        """What a model calls on its cache: store (1, H_kv, T, D) twice, return all the slots."""
        if layer_idx not in self.kv:
            self.kv[layer_idx] = [x.new_zeros(*self.shape, *x.shape[1::2]) for x in (key, value)]
        for cache, new in zip(self.kv[layer_idx], (key, value)):  # (slots, S, H_kv, D)
            cache[self.batch.slots, self.batch.positions] = new[0].transpose(0, 1)
        return [cache.transpose(1, 2) for cache in self.kv[layer_idx]]

    def get_seq_length(self, layer_idx=None):
        """What a model may ask to derive positions from; ours are given to it, not its layers."""
        if layer_idx is not None:
            raise NotImplementedError(f"{type(self.model).__name__} counts positions in its layers")
        return 0

    def commit(self, slots: np.ndarray, lengths: np.ndarray):
        """Each of `slots` now has `lengths` tokens, the last of them not fed yet."""
        self.cached[slots] = np.minimum(self.cached[slots], lengths - 1)

    def reset(self, slot: int):
        """A new request starts in `slot`."""
        self.cached[slot] = 0


# ---- 7. The loop. A plan is what `choose` says: a budget, or a JointPlan: each pass has to pay.


@dataclass
class Stats:
    """Counts so far; the arrays are per draft position, (K,), what an end token cuts included."""
    proposed: np.ndarray
    verified: np.ndarray
    accepted: np.ndarray
    steps: int = 0
    request_steps: int = 0  # requests in the batch, summed over the steps
    committed: int = 0  # tokens given out, bonus tokens included
    target_tokens: int = 0  # query tokens: prompts, one per request and step, verified drafts
    seconds: dict = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    # Tokens per request and step, the bonus token included: 1 for plain decoding.
    accept_length = property(lambda self: self.committed / max(self.request_steps, 1))


class Step(NamedTuple):
    """One step of R requests, on the host: (R,) arrays, then (R, K) ones, then a dict."""
    requests: np.ndarray  # index of each
    num_verified: np.ndarray
    accepted: np.ndarray
    next_tokens: np.ndarray  # the bonus token: instead of a rejected draft, or after the last
    drafts: np.ndarray
    features: np.ndarray  # logit(q_max)
    survival: np.ndarray  # -1 where nothing was drafted
    seconds: dict  # PHASES; predicted: what the cost table said of their sum


class Result(NamedTuple):
    """What `generate` returns: the new tokens of each prompt (an end token included), and how."""
    tokens: list[list[int]]
    stats: Stats
    estimator: AcceptanceEstimator | None
    cost: CostTable | None


PLANS = ("fixed", "verification", "joint")
PHASES = ("draft", "verify", "rest")  # of a step's time


class Decoder:
    """Requests in slots, and one step of all of them; arguments as in `generate`.

    requests: an iterator of (prompt, max_new_tokens), endless if you like; one that wants 0 tokens
    is passed over. max_length: the most tokens of a request, its prompt included. cost: not needed
    by "fixed". finished: (number, new tokens) of those that ended; empty it now and then."""

    def __init__(self, target, drafter, requests, *, max_length, max_batch_size=64,
                 num_speculative_tokens=7, plan="verification", estimator=None, cost=None,
                 temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, seed=None):
        B = _whole("max_batch_size", max_batch_size, 1)
        K = self.K = _whole("num_speculative_tokens", num_speculative_tokens, 0, 1000)
        _check_law(temperature, top_k, top_p)
        _need(plan in PLANS, "plan", f"one of {PLANS}", plan)
        _need(cost is None or isinstance(cost, CostTable), "cost", "a CostTable", cost)
        V, _ = _check_pair(target, drafter, K)
        self.eos = _end_tokens(eos_token_id, V)
        self.device, g = target.device, torch.Generator(target.device)
        self.generator = g.manual_seed(g.seed() if seed is None else _whole("seed", seed, 0))
        self.plan, self.cost = plan if K else "fixed", cost
        k = getattr(estimator, "num_speculative_tokens", estimator)
        _need(estimator is None or isinstance(estimator, AcceptanceEstimator) and k == K,
              "estimator", f"an AcceptanceEstimator of K = {K}", k)
        self.estimator = estimator or (None if self.plan == "fixed" else AcceptanceEstimator(K))
        self.target = SlotLM(target, B, max_length, K)
        if isinstance(drafter, SlotLM):
            _need(drafter.shape[0] >= B and drafter.shape[1] >= max_length, "drafter",
                  f"of {B} slots for {max_length} tokens at least", drafter.shape)
        own = K == 0 or hasattr(drafter, "logits")
        self.drafter = drafter if own else SlotLM(drafter, B, max_length)
        self.models = [self.target, self.drafter] if K else [self.target]
        self.sampling = dict(temperature=temperature, top_k=int(top_k), top_p=top_p)
        self.requests = filter(lambda x: x[1][1] != 0, enumerate(requests))  # who wants any tokens
        # By slot. Committed text, then this step's drafts, which count once they are accepted.
        self.tokens = torch.zeros(B, max_length, dtype=torch.long, device=self.device)
        self.text = np.zeros((B, max_length), int)  # the host's copy, without drafts
        self.start, self.lengths, self.ends = np.zeros((3, B), int)
        self.index, self.slots = np.full(B, -1), np.arange(0)  # request of each slot; those in use
        self.confidence = np.ones((B, K))  # to be expected of each request's next step
        k, room = max(0, min(K, max_length - 2)), dict(device=self.device, dtype=torch.float32)
        self.p, self.q = torch.zeros(B * (k + 1), V, **room), torch.zeros(k, B, V, **room)
        self.mean_confidence = np.full(K, 0.7)  # by position, lately; at first: a usual acceptance
        self.stats, self.finished, self.began = Stats(*np.zeros((3, K), int)), [], None

    @torch.inference_mode()
    def step(self) -> Step | None:
        """Admit, then one step for every request; None when there are none. Numbers: README.

        ValueError: no costs, or a refused request (others go on). After any other error: spent."""
        _need(self.began is None, "a Decoder", "a new one after an error in a step", self)
        _need(self.cost or self.plan == "fixed", f"plan={self.plan!r}", "given a cost", self.cost)
        if not self.admit():
            return None
        slots, K, device, self.began = self.slots, self.K, self.device, time.perf_counter()
        R, lengths, clock = len(slots), self.lengths[slots], [_mark(device)]
        # 0. plan. LOSSLESS: a budget is fixed before anything of this step is drawn.
        limits = np.minimum(K, self.ends[slots] - lengths - 1)  # the very last is a bonus token
        plan = self.choose(limits)
        # 1. draft, each token with its feature f (README's 2.)
        drafts, q, features, depths = self.draw(limits, plan)
        budget = plan.drawn if isinstance(plan, JointPlan) else plan  # LOSSLESS: joint checks all
        d, drawn = depths.max(), np.arange(K) < depths[:, None]  # columns in use, (R, K)
        clock.append(_mark(device))
        # 2 + 3. score, trim (nothing hangs on a score if all is verified: see the read-back)
        num_verified = _send(depths, device)  # (R,)
        if budget < depths.sum():
            survival = self.estimator.predict(features).cumprod(1).where(_send(drawn, device), -1.0)
            num_verified = trim(survival[:, :d], budget)
        # 4. verify: (requests + budget) query tokens; a trimmed draft is not among them
        logits = self.target.logits(self.tokens, lengths, slots, num_verified, budget)
        clock.append(_mark(device))
        # 5. accept
        p, top = _warp(logits, **self.sampling, out=self.p[:len(logits)])  # (R + budget, V)
        accepted, next_tokens = verify(p, q[:, :d], drafts[:, :d], num_verified, self.generator)
        self.tokens[_send(slots, device), _send(lengths, device) + accepted] = next_tokens
        finite = top.sum(dtype=torch.float64).expand(R)  # iff logits are (but -inf beside others)
        columns = finite, num_verified, accepted, next_tokens, drafts, features
        # The one read-back: a float64 table that holds ids and counts exactly.
        host = _read_back(torch.cat([x.view(R, -1) for x in columns], 1))
        ids, features = host[:, 1:4 + K].astype(int), host[:, 4 + K:]
        if not np.isfinite(host.sum()):
            name = "drafter" if np.isfinite(host[0, 0]) else "target"
            raise FloatingPointError(f"the {name} returned logits that are not finite")
        confidence = self.estimator.predict(features) if self.estimator else drawn  # (R, K)
        done = Step(self.index[slots], *ids[:, :3].T, ids[:, 3:], features,
                    np.where(drawn, confidence.cumprod(1), -1.0), {})
        # 6. learn
        if self.estimator:
            self.estimator.observe(done.features, done.num_verified, done.accepted)
        self.commit(done, confidence)
        self.account(done, clock)
        return done

    def choose(self, limits):
        """Budget of this step, LOSSLESS from earlier steps only; or a JointPlan (verifies all).

        limits (R,): drafts each can use. Once a round, of 10 steps at least, all is drafted and
        verified: what never is, is never learned again. (Joint: each second round, 16 requests.)"""
        if self.plan == "fixed":
            return int(limits.sum())
        usable, confidence = np.arange(self.K) < limits[:, None], self.confidence[self.slots]
        steps, every = self.estimator.steps, max(self.estimator.refit_every, 10)
        if self.plan == "joint":
            return JointPlan(confidence * usable, self.cost, 16 * (steps % (2 * every) == 0))
        if steps % every == 0:
            return int(limits.sum())
        return draft_budget(np.where(usable, confidence.cumprod(1), -1.0), self.cost)

    def draw(self, limits, plan):
        """Up to `limits` (R,) tokens per request; with a JointPlan no more than pay.

        Returns drafts (R, K), q (R, <= K, V; void where nothing was drafted), features, depths."""
        joint = plan if isinstance(plan, JointPlan) else None
        R, K, V, device = len(self.slots), self.K, self.target.vocab_size, self.device
        drafts = torch.zeros(R, K, dtype=torch.long, device=device)
        features = torch.zeros(R, K, dtype=torch.float32, device=device)
        q, depths, self.passes = self.q[:, :R].transpose(0, 1), np.zeros(R, int), []  # (R, K, V)
        read = (self.lengths[self.slots] - self.drafter.cached[self.slots]  # (R,) by the next pass
                if isinstance(self.drafter, SlotLM) else np.ones(R, int))
        for i in range(limits.max()):
            rows = np.flatnonzero((depths == i) & (limits > i))
            if joint and len(rows):
                # A first pass also reads a last draft that was accepted. What else the drafter has
                # missed is not charged: it has to be read once, and would keep it behind for ever.
                rows = joint.choose(rows, i, np.minimum(read[rows], 2))
            if not len(rows):
                break
            slots, ends = self.slots[rows], self.lengths[self.slots[rows]] + i
            self.passes.append(int(read[rows].sum()))  # tokens of each
            depths[rows], read[rows] = i + 1, 1
            logits = self.drafter.logits(self.tokens, ends, slots)
            n, got = len(rows), tuple(getattr(logits, "shape", ()))
            _need(len(got) == 2 and got[0] == n and got[1], "drafter.logits", f"({n}, V)", got)
            in_q = n == R and got[1] >= V  # then the law is made where it is kept
            law, q_max = _warp(logits[:, :V], **self.sampling, out=q[:, i] if in_q else None)
            row = slice(None) if n == R else _send(rows, device)
            x = sample(law, self.generator)
            features[row, i] = q_max.logit().clamp(-10.0, 10.0)  # LOSSLESS: not of q(x)
            self.tokens[_send(slots, device), _send(ends, device)] = drafts[row, i] = x
            # LOSSLESS: to the bit what x was drawn from. What the drafter lacks has q = 0.
            if not in_q:
                q[row, i, :law.shape[1]], q[row, i, law.shape[1]:] = law, 0.0
            self.stats.proposed[i] += n
            if joint and device.type in READ_FREELY:
                joint.drew(rows, i, self.estimator.predict(features[row, i].numpy(), i))
        return drafts, q, features, depths

    def commit(self, done: Step, confidence: np.ndarray):
        """The host's side of a step: text, lengths, caches, counts, and what the plans look at."""
        slots, K, stats, position = self.slots, self.K, self.stats, np.arange(self.K + 1)
        emitted = np.concatenate([done.drafts, done.next_tokens[:, None]], 1)  # (R, K+1)
        emitted[np.arange(len(slots)), done.accepted] = done.next_tokens
        count = done.accepted + 1
        if self.eos:  # cut behind the first end token
            stop = (emitted[..., None] == self.eos).any(2) & (position < count[:, None])
            count = np.where(stop.any(1), stop.argmax(1) + 1, count)
            self.ends[slots[stop.any(1)]] = 0  # it is over
        rows, columns = np.nonzero(position < count[:, None])
        self.text[slots[rows], self.lengths[slots[rows]] + columns] = emitted[rows, columns]
        self.lengths[slots] += count
        for model in self.models:
            model.commit(slots, self.lengths[slots])
        stats.verified += (position[:K] < done.num_verified[:, None]).sum(0)
        stats.accepted += (position[:K] < done.accepted[:, None]).sum(0)
        stats.steps, stats.request_steps = stats.steps + 1, stats.request_steps + len(slots)
        stats.committed += int(count.sum())
        if self.plan == "fixed":
            return
        # What the next step may expect, by position: what the request showed in this one, and where
        # nothing was drafted, what requests do: their mean, over some 5 steps or 80 drafts.
        drawn = done.survival >= 0  # (R, K)
        confidence = np.where(drawn, confidence, self.mean_confidence)
        self.mean_confidence += (confidence - self.mean_confidence).sum(0) / (5 * drawn.sum(0) + 80)
        # A budget wants the spread of one step (as published), joint a forecast of each request.
        share = 1.0 if self.plan == "verification" else 0.2
        self.confidence[slots] += share * (confidence - self.confidence[slots])

    def account(self, done: Step, clock: list):
        """Where the time went, and what the cost table had said; it learns from the difference."""
        seconds, queries = done.seconds, len(self.target.batch.positions)
        for name, a, b in zip(PHASES, clock, clock[1:]):
            seconds[name] = b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3
        seconds["rest"] = time.perf_counter() - self.began - sum(seconds.values())
        for name in PHASES:
            self.stats.seconds[name] += seconds[name]
        self.stats.target_tokens, self.began = self.stats.target_tokens + queries, None  # over
        if self.cost is None:
            return
        draft, verify, passes = self.cost.draft, self.cost.verify, np.array(self.passes)
        drafting = draft(passes).sum()
        seconds["predicted"] = (drafting + verify(queries)) / 1e3
        if self.cost.learning and (self.estimator or self.stats).steps % 2:  # (full ones are, too)
            if len(passes):  # of unlike sizes: as much more or less as all together took
                usual = passes.mean()
                draft.learn(usual, draft(usual) * seconds["draft"] * 1e3 / drafting)
            verify.learn(queries, 1e3 * (seconds["verify"] + seconds["rest"]))

    def admit(self):
        """Hand out finished requests, put new ones in their slots; the number in slots."""
        for slot in np.flatnonzero(self.lengths >= self.ends):
            if self.index[slot] >= 0:
                text = self.text[slot, self.start[slot]:self.lengths[slot]].tolist()
                self.finished.append((int(self.index[slot]), text))
            self.index[slot] = -1
            number, (prompt, new) = next(self.requests, (-1, ((), 0)))
            if number < 0:
                continue
            prompt, n = _token_ids("a prompt", prompt, self.target.vocab_size), len(prompt)
            new = _whole("max_new_tokens of a request", new, 1)
            _whole("length of a request, its new tokens included,", n + new, 1, self.text.shape[1])
            self.index[slot], self.start[slot], self.lengths[slot] = number, n, n
            self.ends[slot], self.text[slot, :n] = n + new, prompt
            self.tokens[slot, :n] = _send(self.text[slot, :n], self.device)
            self.confidence[slot] = self.mean_confidence  # nothing else is known
            for model in self.models:
                model.reset(slot)
        self.slots = np.flatnonzero(self.index >= 0)
        return len(self.slots)


def _read_back(table):
    return table.cpu().numpy()  # the only way from device to host, where the host has to wait


def _mark(device):
    """A point in time; on CUDA an event in the stream, looked at after the read-back only."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def measure_costs(target, drafter, prompts, *, num_speculative_tokens=7, max_batch_size=64,
                  context_length=128, repeats=5, **law) -> CostTable:
    """Time real steps of this pair at the shapes they will have; arguments as in `generate`.

    prompts are repeated up to context_length tokens. Medians of `repeats` steps after a warm-up:
    no draft verified in smaller batches, budgets from none to all with max_batch_size requests."""
    K, B, n, _ = (_whole(name, value, 1) for name, value in (
        ("num_speculative_tokens", num_speculative_tokens), ("max_batch_size", max_batch_size),
        ("context_length", context_length), ("repeats", repeats)))
    requests = _check_prompts(prompts, 0, *_check_pair(target, drafter, K))
    _need(requests, "prompts", "one at least", prompts)
    decoder = Decoder(target, drafter, [((requests[i % len(requests)][0] * n)[:n], K + 1)
                                        for i in range(B)], max_length=n + K + 1, max_batch_size=B,
                      num_speculative_tokens=K, plan="fixed", seed=0, **law)
    decoder.estimator = AcceptanceEstimator(K)  # its time counts too
    decoder.admit()
    # Of this decoder two decisions are replaced: these requests stay, and the budget is listed.
    decoder.admit, draft, verify = lambda: True, {}, {}
    # Requests, drafts and budget, and tokens of each request that the first drafter pass reads.
    shapes = [(R, K, 0, 1) for R in sorted({1, -(-B // 4), -(-B // 2), B})]
    # (From B + 1 to 8 tokens each number: where a matrix library changes its ways, costs jump.)
    budgets = {int(K * B * share) for share in (1 / 32, 1 / 8, 1 / 4, 1 / 2, 1)}
    shapes += [(B, K, b, 1) for b in budgets.union(range(1, min(K * B, 8 - B) + 1))]
    times = {shape: [] for shape in (*shapes, (B, 1, 0, min(n, 4)))}
    for _ in range(repeats + 1):  # they take turns, so that a busy moment of the machine hits all
        for (R, depth, budget, read), rounds in times.items():
            decoder.slots, decoder.choose = np.arange(R), lambda limits, b=budget: b
            decoder.lengths[:], decoder.ends[:] = n, n + depth + 1
            for model, new in zip(decoder.models, (1, read)):
                model.commit(np.arange(B), decoder.lengths + 1 - new)
            seconds = decoder.step().seconds
            rounds.append((seconds["draft"] / depth, seconds["verify"] + seconds["rest"]))
    for (R, depth, budget, read), rounds in times.items():
        drafting, verifying = 1e3 * np.median(rounds[1:], axis=0)
        draft.setdefault(R * read, drafting)
        verify.setdefault(R + budget, verifying)
    return CostTable(draft, verify, learning=True)


def generate(target, drafter, prompts, *, max_new_tokens=128, num_speculative_tokens=7,
             plan="verification", max_batch_size=64, temperature=1.0, top_k=0, top_p=1.0,
             eos_token_id=None, seed=None, estimator=None, cost=None, on_step=None) -> Result:
    """Generate from the target, sped up by the drafter: each token has the target's distribution.

    target, drafter: decoder-only transformers models on one device, in any floating dtypes (the
    drafter may be an object of your own with the three verbs; None at K = 0). prompts: id lists.
    max_new_tokens: a number, or one per prompt. num_speculative_tokens: K; 0 is plain decoding.
    plan: "fixed" verifies all K drafts; "verification" drafts K and trims (as published); "joint"
    drafts only what pays and verifies that. max_batch_size: requests at once; one that ends is
    replaced before the next step. temperature, top_k (0: off), top_p: of both models, whose own
    generation configs are not read. eos_token_id: none, one or several. estimator, cost: go on with
    these, which learn on; default: a fresh one, and costs measured now. on_step: gets every `Step`.

    Same seed, inputs, device, estimator and cost table built from points: same tokens (a measured
    table learns from the clock: same distribution). ValueError before any work (own drafters: when
    they answer); NotImplementedError: an unfit model; FloatingPointError: logits not finite."""
    K = _whole("num_speculative_tokens", num_speculative_tokens, 0, 1000)
    law = dict(temperature=temperature, top_k=top_k, top_p=top_p)
    _need(on_step is None or callable(on_step), "on_step", "None or callable", on_step)
    requests = _check_prompts(prompts, max_new_tokens, *_check_pair(target, drafter, K))
    longest = max([len(p) + new for p, new in requests if new], default=0)
    B = min(_whole("max_batch_size", max_batch_size, 1), max(1, len(requests)))
    decoder = Decoder(target, drafter, requests, max_batch_size=B, max_length=longest, seed=seed,
                      num_speculative_tokens=K, plan=plan, estimator=estimator, cost=cost,
                      eos_token_id=eos_token_id, **law)
    usable = min(K, max([new for _, new in requests], default=0) - 1)  # drafts of a request
    if usable < 1:
        decoder.plan = "fixed"
    elif decoder.plan != "fixed" and cost is None:
        middle = sum(len(p) + new / 2 for p, new in requests) / len(requests)
        decoder.cost = measure_costs(
            target, drafter, [p for p, _ in requests], num_speculative_tokens=usable,
            max_batch_size=B, context_length=int(min(middle, longest - usable - 1)), **law)
    while done := decoder.step():
        if on_step:
            on_step(done)
    tokens = dict(decoder.finished)
    return Result([tokens.get(i, []) for i in range(len(requests))], decoder.stats,
                  decoder.estimator, decoder.cost)


# ---- 8. Refusals: by name and value, before any work.


def _check_pair(target, drafter, K):
    """Whether the two can run together; returns the vocabulary and their position limit."""
    models, verbs = {"target": target}, ("logits", "commit", "reset")
    if K and hasattr(drafter, "logits") and not isinstance(drafter, SlotLM):
        _need(all(hasattr(drafter, v) for v in verbs), "drafter", f"one with {verbs}", drafter)
    elif K:
        models["drafter"] = drafter.model if isinstance(drafter, SlotLM) else drafter
    for name, model in models.items():
        _check_model(name, model)
        _need(model.device == target.device, f"{name}.device", f"{target.device}", model.device)
    sizes = {name: _vocabulary(model)[0] for name, model in models.items()}
    _need(_vocabulary(target)[1] >= sizes["target"], "target", "able to read all that it can say",
          _vocabulary(target))
    if len(set(sizes.values())) > 1:
        warnings.warn(f"vocabulary sizes differ: {sizes}; what only one has is never drafted",
                      stacklevel=3)
    return sizes["target"], min(map(_positions, models.values()))


def _check_prompts(prompts, max_new_tokens, V, limit):
    """Prompts and numbers of new tokens, as lists of whole numbers that fit the models."""
    _need(isinstance(prompts, (list, tuple)) or getattr(prompts, "ndim", 0), "prompts",
          "lists of ids", prompts)
    each = isinstance(max_new_tokens, (list, tuple)) or getattr(max_new_tokens, "ndim", 0)
    new = list(max_new_tokens) if each else [max_new_tokens] * len(prompts)
    _need(len(new) == len(prompts), "max_new_tokens", f"one number or {len(prompts)}", new)
    requests = [(_token_ids(f"prompts[{i}]", prompt, V), _whole("max_new_tokens", n, 0))
                for i, (prompt, n) in enumerate(zip(prompts, new))]
    for i, (prompt, n) in enumerate(requests):
        _need(len(prompt) + n <= limit, f"prompts[{i}] with max_new_tokens",
              f"within the models' {limit} positions", len(prompt) + n)
    return requests


def _token_ids(name, prompt, V):
    prompt = prompt.tolist() if isinstance(prompt, (Tensor, np.ndarray)) else prompt
    _need(isinstance(prompt, (list, tuple)) and prompt, name, "a list of token ids", prompt)
    return [_whole(f"a token of {name}", t, 0, V - 1) for t in prompt]


def _end_tokens(eos, V):
    eos = eos.flatten().tolist() if isinstance(eos, Tensor) else eos
    eos = [] if eos is None else [eos] if isinstance(eos, str) or not np.iterable(eos) else eos
    return [_whole("eos_token_id", t, 0, V - 1) for t in eos]


def _positions(model):
    return getattr(model.config, "max_position_embeddings", 0) or 2**62


def _check_model(name, model):
    _need(isinstance(model, PreTrainedModel), name, "a transformers model", type(model).__name__)
    config = model.config
    kinds = set(getattr(config, "layer_types", 0) or ()) - {"full_attention", "sliding_attention"}
    ropes = str(getattr(config, "rope_parameters", ""))  # flat, or one for each kind of layer
    for bad, why in ((any(m.training for m in model.modules()), "is in training mode: .eval()"),
                     (config.is_encoder_decoder, "is an encoder-decoder"),
                     (not isinstance(getattr(model.get_output_embeddings(), "weight", 0), Tensor),
                      "has no head with a weight tensor, which gives logits"),
                     (not hasattr(config, "num_hidden_layers"), "is made of several models: pass "
                      "its language model"),
                     (model._is_stateful, "keeps a recurrent state, which cannot forget a draft"),
                     (not model._supports_attention_backend, "has no attention interface"),
                     ("'longrope'" in ropes or "'dynamic'" in ropes, "has rotary positions that "
                      "depend on the longest request of a pass (longrope, dynamic)"),
                     (kinds, f"has layers of kind {sorted(kinds)}")):
        if bad:
            raise ValueError(f"{name}: {type(model).__name__} {why}")

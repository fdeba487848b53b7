# SPDX-License-Identifier: MIT
"""Adaptive verification for speculative decoding without a confidence head: one file.

A drafter proposes up to K tokens for each request, and the target checks them in one
pass. In a large batch each check costs time, so only drafts that are worth it are
checked. A draft's confidence is the chance that it is accepted if all before it were,
its survival is the product of the confidences up to it. Survivals and measured costs
say how many drafts to check: the draft budget.

What keeps it LOSSLESS: rejection sampling is exact if a draft, *given that it is
verified*, is still drawn from q. So whether draft x_2 is verified may depend on anything
that x_2 does not influence, and on nothing that it does:

    position                 1            2            3
    draft and its law        x_1 ~ q_1    x_2 ~ q_2    x_3 ~ q_3
    may decide about x_2     earlier steps, costs, other requests, q_1, x_1, q_2
    may not                  x_2, nor q_3 and x_3, which x_2 influences

Exact: "verify x_2 if the largest probability of q_2 is high", as x_2 is not drawn yet.
Biased: "verify x_2 if q_2(x_2) is high", as it makes likely tokens too frequent.

p is the law of the target, q of the drafter. V: tokens of the vocabulary; R: requests
of a step, in some of B slots; D <= K: drafts of each; T: tokens of a pass. Laws stay on
the models' device; the host decides, in numpy."""
import copy
import time
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

# The numbers that are a choice, and why. Those of the fit are its arguments.
MAX_LOG_ODDS = 10.0  # features end here: beyond it all drafts are sure
MIN_CURVATURE = 0.05  # of a label in the fit: `observe` says why
MAX_FIT_STEP = 3.0  # of a coefficient: two refits reach a new workload; 5 overshoots
FIRST_FEATURE = 2.0  # is assumed until a draft is seen: a q_max of .88
EXPLORERS = 16  # requests that draft all of K once a round: enough labels, little time
MEMORY = 8  # with 8 requests a step renews half of the forecast, with one a ninth
PLAN_EVERY = 4  # steps that a plan lasts, as planning takes time
COST_RATE = 0.1  # how far a step moves the cost factors: 10 steps follow the machine
PIECE = 512  # tokens of a prompt per pass: masks stay small however long it is
CALL_WIDTH = 100  # the price of one more attention call, in padded tokens
CALL_LENGTH = 1000  # the same, in cached tokens
DEPTHS = 0, 1, 2, 3, 5, 7  # drafts of each request at which costs are measured; and K
CONTEXT = 256  # costs are measured up to this length, to start soon

def _send(x, device):
    x = torch.from_numpy(x)  # to a GPU it is copied while the host goes on
    return x if device.type == "cpu" else x.to(device, non_blocking=True)

def _check(ok, message, *values):
    if not ok:
        raise ValueError(message.format(*values) if values else message)

def _number(name, value, low, high, kinds=(int, float)):
    """The value as a Python number if it is one in low..high, else a ValueError."""
    exact = value.item() if isinstance(value, np.generic) else value
    good = isinstance(exact, kinds) and not isinstance(exact, bool) and low <= exact <= high
    what = "whole number" if kinds is int else "number"
    _check(good, "{} must be a {} in {}..{}, got {!r}", name, what, low, high, value)
    return exact

def _token_ids(name, ids, V):
    ids = ids.tolist() if isinstance(ids, (Tensor, np.ndarray)) else ids
    _check(isinstance(ids, (list, tuple)), "{} must be a list of ids, got {!r}", name, ids)
    return [_number(f"a token of {name}", token, 0, V - 1, int) for token in ids]

# ==== Part I: the idea. All down to Part II needs torch and numpy only, and copies out.
# ---- 1. Laws: from logits to probabilities, and from probabilities to a token.
def warp(logits: Tensor, temperature=1.0, top_k=0, top_p=1.0) -> Tensor:
    """Logits (..., V) to the float32 law that is drawn from: by temperature (0: one has
    all mass), top-k (0: off), top-p. What ties with the last token kept stays."""
    _number("temperature", temperature, 0, 1e6)
    _number("top_k", top_k, 0, 2**62, int)
    _number("top_p", top_p, 1e-300, 1)
    if temperature == 0:
        law = torch.zeros_like(logits, dtype=torch.float32)
        return law.scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    law = _softmax(logits, temperature)
    if 0 < top_k < law.shape[-1]:
        law = law.where(law >= law.topk(top_k).values[..., -1:], 0.0)
    if top_p < 1:  # the least probable go, while they hold 1 - top_p at most
        host = law.device.type == "cpu"  # where numpy sorts faster
        rising = torch.from_numpy(np.sort(law.detach())) if host else law.sort().values
        rest = (1 - top_p) * law.sum(-1, keepdim=True)
        edge = torch.searchsorted(rising.cumsum(-1), rest, right=True)
        law = law.where(law >= rising.gather(-1, edge.clamp(max=law.shape[-1] - 1)), 0.0)
    return law / law.sum(-1, keepdim=True)  # softmax is off by 5e-4

def _softmax(logits, temperature):
    logits = logits.float()
    if temperature not in (0, 1):
        # Less the maximum: a tiny temperature then gives exp(-inf), not inf - inf.
        logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)
    return logits.softmax(-1)

def sample(weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One draw per row of weights, which need not sum to one, (..., V) -> (...,)."""
    mass = weights.cumsum(-1, dtype=torch.float64)
    u = torch.empty_like(mass[..., :1]).uniform_(generator=generator)
    # Never a token of weight 0: the point is below the end, and `right` skips ties.
    point = u * (mass[..., -1:] * (1 - 2**-52))
    token = torch.searchsorted(mass, point, right=True).squeeze(-1)
    return token.clamp(max=weights.shape[-1] - 1)

# ---- 2. The lossless rule (Leviathan et al. 2023, algorithm 1; rejection_sampler.py).
def verify(p: Tensor, q: Tensor, drafts: Tensor, num_verified: Tensor,
           generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Accept each draft x with probability min(1, p(x) / q(x)) up to the first rejection,
    then draw the bonus token from norm(max(0, p - q)), or from p if none was rejected.

    p: (R + sum(num_verified), V), for each request the target's laws of its verified
    drafts and of the token behind them. q: (R, D, V), to the bit what drafts (R, D) were
    drawn from. num_verified: (R,) in 0..D. Returns (R,) accepted and (R,) next tokens."""
    R, D = drafts.shape
    shapes = tuple(p.shape), tuple(q.shape), tuple(num_verified.shape)
    _check(shapes[1:] == ((R, D, p.shape[1]), (R,)) and len(p) >= R,
           "p, q, num_verified must fit {} requests of {} drafts, got {}", R, D, shapes)
    if D == 0:
        return num_verified, sample(p[:R], generator)
    position = torch.arange(D, device=p.device)
    first = (num_verified + 1).cumsum(0) - num_verified - 1  # (R,) first row of each
    p_x = p[(first[:, None] + position).clamp(max=len(p) - 1), drafts]  # (R, D)
    q_x = q.gather(2, drafts[..., None]).squeeze(2)  # (R, D)
    u = torch.rand(R, D, dtype=torch.float64, device=p.device, generator=generator)
    # LOSSLESS: u < p/q, without a division: p(x) = 0 is rejected even at u = 0.
    accept = (u * q_x < p_x) & (position < num_verified[:, None])
    accepted = accept.cumprod(1).sum(1)  # (R,) drafts before the first rejection
    # subtle: row `accepted` gives the next token, whether a draft was rejected or not.
    p_next = p[first + accepted]  # (R, V)
    q_next = q[torch.arange(R, device=p.device), accepted.clamp(max=D - 1)]
    rejected = (accepted < num_verified)[:, None]
    residual = (p_next - q_next).clamp(min=0).where(rejected, p_next)
    # subtle: if p = q, rounding may leave no residual; then p is drawn from.
    residual = residual.where(residual.sum(-1, keepdim=True) > 0, p_next)
    return accepted, sample(residual, generator)

# ---- 3. The acceptance estimator (vLLM: OnlineAcceptanceEstimator).
def logit_q_max(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-odds of the likeliest token, (..., V) -> (...,), in +-MAX_LOG_ODDS.

    LOSSLESS: it reads the law, not the token drawn from it. It is the law before top-k
    and top-p, which often leave one token; as temperature 0 would: there 1 is used."""
    _number("temperature", temperature, 0, 1e6)
    law = _softmax(logits, temperature)
    return (law.amax(-1) / law.sum(-1)).logit().clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)

class AcceptanceEstimator:
    """confidence_i = sigmoid(slope * feature_i + intercept_i), i a draft's position.

    Fitted online to one pair and sampling setting. ridge keeps it solvable without
    labels; with `damping` labels a coefficient moves half as far (vLLM's defaults)."""

    def __init__(self, num_speculative_tokens, *, refit_every=100, ridge=1e-3,
                 damping=50.0, slope=0.5, intercept=-0.2):
        K = _number("num_speculative_tokens", num_speculative_tokens, 1, 1000, int)
        self.refit_every = _number("refit_every", refit_every, 1, 2**62, int)
        self.ridge = _number("ridge", ridge, 1e-12, 1e6)
        self.damping = _number("damping", damping, 0, 1e6)
        self.slope = float(_number("slope", slope, 0, 1e6))
        self.intercepts = np.full(K, float(_number("intercept", intercept, -1e6, 1e6)))
        self.num_speculative_tokens, self.steps, self.sums = K, 0, np.zeros((6, K))

    def predict(self, features) -> np.ndarray:
        """Confidences of features (..., D) of the first D positions, (..., D)."""
        features = np.asarray(features)
        log_odds = self.slope * features + self.intercepts[:features.shape[-1]]
        return 0.5 + 0.5 * np.tanh(0.5 * log_odds)  # sigmoid, without an overflow

    def observe(self, features, num_verified, accepted):
        """Add the labels of a step, (R, D), (R,), (R,), and refit after a round.

        A draft has a label if it was verified and all before it were accepted."""
        (R, D), counts = np.shape(features), np.array([num_verified, accepted])
        bounds = np.vstack([np.full(R, D), counts, np.zeros(R)])
        _check(D <= self.num_speculative_tokens and (np.diff(bounds, axis=0) <= 0).all(),
               "of {} drafts 0 <= accepted <= num_verified must hold, got {}", D, counts)
        num_verified, accepted = counts[..., None]  # (R, 1)
        position = np.arange(D)
        labelled = (position < num_verified) & (position <= accepted)  # (R, D)
        f = np.where(labelled, features, 0.0)
        _check((np.abs(f) <= 1e6).all(), "features must be within 1e6, got {}", f)
        c = self.predict(f)
        # subtle: a sure draft that is rejected has a full error and no curvature.
        # Without a floor, this one surprise would move an intercept by hundreds.
        curvature = labelled * np.maximum(c * (1 - c), MIN_CURVATURE)
        error = labelled * (c - (position < accepted))
        self.sums[:, :D] += np.array([curvature * f * f, curvature * f, curvature,
                                      error * f, error, labelled]).sum(1)
        self.steps += 1
        if self.steps % self.refit_every == 0:
            self.refit()

    def refit(self):
        """One damped Newton step on the sums of the round, which then start from zero.

        A draft has one position, so of the Hessian (K+1, K+1) only the first row, first
        column and diagonal are not zero. Six sums per position hold all of a round."""
        hff, hf, h, ef, e, labels = self.sums
        hessian = np.diag(np.append(hff.sum(), h) + self.ridge)
        hessian[0, 1:] = hessian[1:, 0] = hf
        gradient, labels = np.append(ef.sum(), e), np.append(labels.sum(), labels)
        damp = labels / np.maximum(labels + self.damping, 1e-9)  # no labels: no move
        move = -np.linalg.lstsq(hessian, gradient, rcond=None)[0] * damp
        # A negative slope would rank a surer draft lower: it is kept at zero, and the
        # intercepts are solved for that.
        if move[0] < -self.slope:
            move[0] = -self.slope
            move[1:] = (hf * self.slope - e) / hessian.diagonal()[1:] * damp[1:]
        move *= min(1.0, MAX_FIT_STEP / max(np.abs(move).max(), 1e-9))
        self.slope += float(move[0])
        self.intercepts = self.intercepts + move[1:]
        self.sums[:] = 0

# ---- 4. Costs, budget, trim (vLLM: build_cost_tables_from_curves).
class CostTable:
    """Milliseconds of a step, by straight lines between the points that were measured.

    draft: {depth: ms}, to draft so many tokens for each request. verify: {tokens: ms},
    the rest of a step whose target reads so many. Beyond them ms grow in proportion."""

    def __init__(self, draft, verify):
        self.curves = []
        self.factors = np.ones(2)  # of drafting, of the rest: latest over measured ms
        for name, points in ("draft", draft), ("verify", verify):
            _check(isinstance(points, dict) and points, f"{name} must be a dict: {points}")
            for size, ms in points.items():
                _number(f"a size of {name}", size, 1, 2**39, int)
                _number(f"{name}[{size}]", ms, 1e-300, 1e280)
            x, y = np.array(sorted(points.items()), float).T
            y = np.minimum.accumulate(y[::-1])[::-1]  # a larger size is no cheaper
            end = 2.0**40
            self.curves.append((np.append(x, end), np.append(y, y[-1] / x[-1] * end)))

    def draft_ms(self, depth):
        return np.sign(depth) * self.factors[0] * np.interp(depth, *self.curves[0])

    def verify_ms(self, tokens):
        return self.factors[1] * np.interp(tokens, *self.curves[1])

    def learn(self, depth, tokens, draft_ms, verify_ms):
        """Move the factors towards a step's times; returns the ms that were expected."""
        expected = self.draft_ms(depth), self.verify_ms(tokens)
        for i, ms in enumerate((draft_ms, verify_ms)):
            if expected[i]:
                ratio = min(2.0, max(0.5, ms / expected[i]))  # a hiccup counts little
                self.factors[i] *= ratio**COST_RATE
        return sum(expected)

def draft_budget(survival, cost: CostTable, all_depths=False) -> tuple[int, int]:
    """(depth, budget), how far to draft and how much to verify, for most tokens per ms:
    argmax of (R + sum of best survivals) / (draft_ms(depth) + verify_ms(R + budget)).

    survival: (R, K), negative where none can be drafted. LOSSLESS: forecast by *earlier*
    steps, because this step's depend on the drafts that are chosen. The published rule
    drafts K; with `all_depths` the depth is chosen, too."""
    R, K = survival.shape
    deepest = int((survival >= 0).any(0).sum())  # that any request can use
    choice, fastest = (0, 0), 0.0
    for depth in range(0 if all_depths else deepest, deepest + 1):
        best = np.sort(survival[:, :depth], axis=None)[::-1]  # negative ones are last
        tokens = np.append(R, best).cumsum()  # by budget, from 0 on
        ms = cost.draft_ms(depth) + cost.verify_ms(R + np.arange(len(tokens)))
        budget = int((tokens / ms).argmax())
        if (rate := tokens[budget] / ms[budget]) > fastest:
            choice, fastest = (depth, budget), rate
    return choice

def trim(survival: np.ndarray, budget: int) -> np.ndarray:
    """Verified drafts of each request (R,): its share of the `budget` best of all.
    survival: (R, D), never rising along a request; -1 where nothing was drafted."""
    _number("budget", budget, 0, survival.size, int)
    # LOSSLESS: a draft changes only the survivals behind it in its request, which never
    # rank above its own, so it has no say in whether it is verified. subtle: a stable
    # sort breaks ties by position, so the best drafts of a request are its first.
    best = np.argsort(-survival.T, axis=None, kind="stable")[:budget]
    return np.bincount(best % len(survival), minlength=len(survival))

# ---- 5. The loop. Plain decoding (K = 0) and fixed K are special cases of the step.
#    It knows models by these verbs. slots (r,) ascending, lengths and num_verified (r,)
#    are host arrays; tokens (B, max_length) hold texts, then drafts.
#
#    both.commit(slots, lengths): before a step; what is behind is void. 0: a new text.
#    target.vocab_size, target.device
#    target.logits(tokens, lengths, slots, num_verified) -> (r + sum(num_verified), V)
#        Once a step: logits behind each text, and behind each verified draft.
#    target.hidden (the same rows, H): what its head read, for a drafter that sees.
#    drafter.next_logits(tokens, lengths, slots, position, depth) -> (r, any width)
#        For each position < depth: logits behind `lengths` tokens, drafts included.
#        LOSSLESS: it may look at the text, and at the drafts of its own slot.
#    drafter.see(slots, hidden (r, H)): optional, after a step: the state that gave each
#        bonus token. A new request has none: it drafts nothing in its first step.
@dataclass
class Step:
    """What a step did to its R requests: host arrays, void where there was no draft."""
    requests: np.ndarray  # (R,) as numbered by `add`
    tokens: np.ndarray  # (R, D + 1) accepted drafts, then the bonus token, then void
    num_committed: np.ndarray  # (R,) of `tokens`, nothing behind an end token
    drafts: np.ndarray  # (R, D)
    num_verified: np.ndarray  # (R,)
    accepted: np.ndarray  # (R,)
    features: np.ndarray  # (R, D) logit(q_max)
    survival: np.ndarray  # (R, D) as estimated, -1 where nothing was drafted
    ms: float = np.nan  # what the step took, up to learning
    draft_ms: float = np.nan  # of it, to draft and to score
    expected_ms: float = np.nan  # by the cost table; none if a prompt was read

class Decoder:
    """Requests in slots, and one step of them all. max_length: tokens of a request.

    plan: "fixed" verifies all K drafts, "verification" (the published rule) trims them,
    "adaptive" also chooses how far to draft; both need a `cost`."""

    def __init__(self, target, drafter, *, max_batch_size, max_length, plan="adaptive",
                 num_speculative_tokens=7, estimator=None, cost=None, eos_token_ids=(),
                 seed=None, **sampling):
        K = _number("num_speculative_tokens", num_speculative_tokens, 0, 1000, int)
        B = _number("max_batch_size", max_batch_size, 1, 2**31, int)
        V, self.device = target.vocab_size, target.device
        _check(plan in ("fixed", "verification", "adaptive"), f"unknown plan {plan!r}")
        warp(torch.zeros(1, device=self.device), **sampling)  # refuses bad settings
        self.plan, self.K = plan if K else "fixed", K
        self.sampling, self.cost = sampling, cost
        if estimator is None and self.plan != "fixed":
            estimator = AcceptanceEstimator(K)
        of = getattr(estimator, "num_speculative_tokens", repr(estimator))
        _check(estimator is None or of == K, f"estimator must be for K = {K}, is for {of}")
        _check(isinstance(cost, CostTable | None), f"cost must be a CostTable: {cost!r}")
        self.target, self.drafter, self.estimator = target, drafter, estimator
        self.sees = hasattr(drafter, "see")
        self.generator = torch.Generator(self.device)
        seed = self.generator.seed() if seed is None else seed
        self.generator.manual_seed(_number("seed", seed, 0, 2**64 - 1, int))
        self.eos = np.array(_token_ids("eos_token_ids", eos_token_ids, V), int)
        self.tokens = torch.zeros(B, max_length, dtype=torch.long, device=self.device)
        room = max(0, min(K, max_length - 2)), B, V
        self.q, self.draft_logits = torch.zeros(2, *room, device=self.device).float()
        self.request, self.lengths, self.ends = np.full((3, B), -1)  # by slot; -1: free
        self.fresh = np.zeros(B, bool)  # slots whose prompt has not been read
        # Forecasts of confidences: of a new request, and of each slot.
        self.usual = estimator.predict(np.full(K, FIRST_FEATURE)) if estimator else np.ones(K)
        self.expected = np.tile(self.usual, (B, 1))
        self.planned = None  # or depth, budget

    def add(self, request: int, prompt: list[int], max_new_tokens: int):
        """Put a request into a free slot, where it takes part from the next step on."""
        _number("request", request, 0, 2**62, int)
        prompt = _token_ids("prompt", prompt, self.target.vocab_size)
        new = _number("max_new_tokens", max_new_tokens, 1, 2**31, int)
        n, end, room = len(prompt), len(prompt) + new, self.tokens.shape[1]
        free = np.flatnonzero(self.request < 0)
        _check(len(free) and n and end <= room, f"request {request} must fit in a slot, got"
               f" {n} and {new} new tokens for {len(free)} slots of {room}")
        slot = free[0]
        self.request[slot], self.lengths[slot], self.ends[slot] = request, n, end
        self.tokens[slot, :n] = torch.tensor(prompt)
        self.fresh[slot], self.expected[slot] = True, self.usual

    @torch.inference_mode()
    def step(self) -> Step | None:
        """One step of all requests, or None without any. Raises FloatingPointError if
        logits are not finite. After an error it can be called again."""
        began, send = time.perf_counter(), lambda x: _send(x, self.device)
        slots = np.flatnonzero(self.request >= 0)  # (R,)
        if not len(slots):
            return None
        lengths = self.lengths[slots]
        for model in (self.target, self.drafter) if self.K else (self.target,):
            model.commit(slots, np.where(self.fresh[slots], 0, lengths))
        # 0. plan. LOSSLESS: from earlier steps, before anything of this one is drawn.
        depths, budget = self.choose(slots)  # (R,) to draft of each; to verify in all
        # 1. draft
        drafting = time.perf_counter()
        drafts, q, draft_logits, depths = self.draft(slots, depths)  # (R, D, V)
        # 2. score
        features = logit_q_max(draft_logits, self.sampling.get("temperature", 1.0))
        features, host_drafts = features.cpu().numpy(), drafts.cpu().numpy()  # (R, D)
        survival = self.survival(features, host_drafts, depths)  # (R, D)
        drafted = time.perf_counter()
        # 3. trim. (What was not drafted ranks last, so `min` changes no choice.)
        num_verified = trim(survival, min(budget, int(depths.sum())))  # (R,)
        # 4. verify. What was trimmed is not among the tokens that the target reads.
        logits = self.target.logits(self.tokens, lengths, slots, num_verified)
        p = warp(logits, **self.sampling)  # (R + sum(num_verified), V)
        # 5. accept
        accepted, next_tokens = verify(p, q, drafts, send(num_verified), self.generator)
        finite = logits.amax(-1).isfinite().all().expand(len(slots))
        outcome = torch.stack([accepted, next_tokens, finite.long()]).cpu().numpy()
        accepted, host_next, finite = outcome  # (R,) each
        if not finite.all():
            raise FloatingPointError("the target gave logits that are not finite")
        self.tokens[send(slots), send(lengths + accepted)] = next_tokens
        if self.sees:
            first = (num_verified + 1).cumsum() - num_verified - 1  # (R,) row of each
            self.drafter.see(slots, self.target.hidden[send(first + accepted)])
        # From here on nothing can fail: a step counts as a whole or not at all.
        done = self.write(slots, host_drafts, features, survival, num_verified,
                          accepted, host_next)
        # 6. learn
        done.draft_ms = 1e3 * (drafted - drafting)
        done.ms = 1e3 * (time.perf_counter() - began)
        self.learn(slots, done)
        return done

    def choose(self, slots):
        """Drafts of each request (R,), and how many of them all to verify."""
        room = self.ends[slots] - self.lengths[slots] - 1  # which is the bonus token's
        most = np.minimum(self.K, room)
        if self.sees:
            most[self.fresh[slots]] = 0  # there is no state to draft from
        if self.plan == "fixed" or not most.any():
            return most, int(most.sum())
        _check(self.cost, "plan {} needs a cost table, got {}", self.plan, self.cost)
        if self.planned is None or self.estimator.steps % PLAN_EVERY == 0:
            usable = np.arange(self.K) < most[:, None]
            survival = np.where(usable, self.expected[slots].cumprod(1), -1.0)
            self.planned = draft_budget(survival, self.cost, self.plan == "adaptive")
        depth, budget = self.planned
        depths = np.minimum(most, depth)
        # What is never verified is never learned again: in the first step of a round
        # some requests draft all, and nothing is trimmed.
        if self.estimator.steps % self.estimator.refit_every == 0:
            depths[:EXPLORERS] = most[:EXPLORERS]
            budget = int(depths.sum())
        return depths, budget

    def draft(self, slots, depths):
        """Drafts, their laws and logits, and depths, which end tokens may have cut."""
        R, D, V = len(slots), depths.max(), self.target.vocab_size
        drafts, i = torch.zeros(R, D, dtype=torch.long, device=self.device), 0
        while len(rows := np.flatnonzero(depths > i)):
            slot, ends = slots[rows], self.lengths[slots[rows]] + i
            logits = self.drafter.next_logits(self.tokens, ends, slot, i, D).float()
            # What it doesn't know gets q = 0; a negative pad cuts what only it knows.
            logits = pad(logits, (0, V - logits.shape[1]), value=-torch.inf)
            law = warp(logits, **self.sampling)
            x = sample(law, self.generator)
            row = slice(R) if len(rows) == R else _send(rows, self.device)
            # LOSSLESS: q is to the bit what x is drawn from.
            self.q[i, row], self.draft_logits[i, row], drafts[row, i] = law, logits, x
            self.tokens[_send(slot, self.device), _send(ends, self.device)] = x
            i += 1
            if self.device.type == "cpu":  # elsewhere, to look at the tokens is to wait
                depths[rows[self.is_end(x.numpy())]] = i
        q, logits = (x[:D, :R].transpose(0, 1) for x in (self.q, self.draft_logits))
        return drafts, q, logits, depths

    def is_end(self, tokens):
        return (tokens[..., None] == self.eos).any(-1)

    def survival(self, features, drafts, depths):
        """(R, D), 0 behind an end token, -1 where nothing was drafted.
        LOSSLESS: it depends on a draft's law and on the drafts before it, not on itself."""
        if not drafts.size:
            return np.zeros(drafts.shape)
        drawn = np.arange(drafts.shape[1]) < depths[:, None]
        if not np.isfinite(features[drawn]).all():
            raise FloatingPointError("the drafter gave logits that are not finite")
        c = self.estimator.predict(features) if self.estimator else np.ones(drafts.shape)
        ended = self.is_end(drafts)
        c[ended.cumsum(1) > ended] = 0.0
        return np.where(drawn, c.cumprod(1), -1.0)

    def write(self, slots, drafts, features, survival, num_verified, accepted,
              next_tokens):
        """Write down the tokens, and free the slots of requests that have all."""
        R, D = drafts.shape
        tokens = np.column_stack([drafts, next_tokens])  # (R, D + 1)
        tokens[np.arange(R), accepted] = next_tokens
        stop = self.is_end(tokens) & (np.arange(D + 1) <= accepted[:, None])
        count = np.where(stop.any(1), stop.argmax(1), accepted) + 1
        self.lengths[slots] += count
        done = Step(self.request[slots], tokens, count, drafts, num_verified, accepted,
                    features, survival)
        over = stop.any(1) | (self.lengths[slots] >= self.ends[slots])
        self.request[slots[over]] = -1
        return done

    def learn(self, slots, done):
        """Labels to the estimator, forecasts to the next plan, times to the costs."""
        (R, D), drawn = done.drafts.shape, done.survival >= 0
        if self.estimator:
            self.estimator.observe(done.features, done.num_verified, done.accepted)
            c = self.estimator.predict(done.features)
            gap = np.where(drawn, c - self.usual[:D], 0.0).sum(0)
            self.usual[:D] += gap / (drawn.sum(0) + MEMORY)
            latest = np.tile(self.usual, (R, 1))  # (R, K)
            latest[:, :D][drawn] = c[drawn]
            self.expected[slots] += R / (R + MEMORY) * (latest - self.expected[slots])
        if self.cost and not self.fresh[slots].any():  # no prompt was read
            done.expected_ms = self.cost.learn(
                D, R + done.num_verified.sum(), done.draft_ms, done.ms - done.draft_ms)
        self.fresh[slots] = False

def refill(decoder: Decoder, requests):
    """Fill free slots from an iterator of (number, prompt, max_new_tokens)."""
    # subtle: zip asks for a slot first, so no request is taken that has none.
    for _, request in zip(np.flatnonzero(decoder.request < 0), requests):
        decoder.add(*request)

# ==== Part II: the machinery that makes it fast on unmodified transformers models.
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface, PreTrainedModel

# ---- 6. The ragged batch: all tokens travel as one row (1, T), so that linear layers
#    see no padding; attention unpacks them.
class Ragged:
    """Where the T tokens of a pass belong: counts (B,) to each slot, from start (B,).
    Attention pads, so there are `calls`: (cache rows, queries, positions, keys)."""

    def __init__(self, start, counts, device):
        slot, first = np.arange(len(counts)).repeat(counts), counts.cumsum() - counts
        position, place, size = np.arange(len(slot)) - first[slot], first.copy(), 0
        self.calls, self.layers, self.masks = [], set(), {}
        for rows, width, keys in _attention_calls(counts, start + counts):
            place[rows] = size + np.arange(len(rows)) * width  # a later call counts
            size += len(rows) * width
            low, high, column = rows[0], rows[-1] + 1, np.arange(width)
            cache = slice(low, high) if high - low == len(rows) else _send(rows, device)
            queries = np.minimum(first[rows, None] + column, len(slot) - 1).ravel()
            at = _send(start[rows, None] + column, device)
            self.calls.append((cache, _send(queries, device), at, keys))
        self.even = size == len(slot)
        self.longest = (start + counts).max()
        self.slots, self.positions, self.place = (_send(x, device) for x in (
            slot, start[slot] + position, place[slot] + position))  # (T,) each

    def mask(self, number, window, dtype):
        """(rows, 1, width, keys) of a call, made once; None: all is seen."""
        at, keys = self.calls[number][2:]
        if window is None and at.numel() == 1:
            return None
        if (number, window) not in self.masks:
            key = torch.arange(keys, device=at.device)
            hidden = key > at[..., None]  # (rows, width, keys): later tokens, or void
            if window is not None:
                hidden |= key <= at[..., None] - window
            mask = hidden.to(dtype) * torch.finfo(dtype).min
            self.masks[number, window] = mask[:, None]
        return self.masks[number, window]

def _attention_calls(widths, ends):
    """[(rows, width, keys)]: all rows at the usual width and length, then alone each
    that is wider, as a prompt is, or longer."""
    def usual(sizes, call):  # of least cost, as a larger row costs itself and `call`
        if len(sizes) == 1:
            return int(sizes[0])
        sizes = np.sort(sizes)[::-1]
        larger = (sizes + call).cumsum() - sizes - call
        return int(sizes[np.argmin(len(sizes) * sizes + larger)])

    rows = np.flatnonzero(widths)
    width, keys = usual(widths[rows], CALL_WIDTH), usual(ends[rows], CALL_LENGTH)
    alone = rows[(widths[rows] > width) | (ends[rows] > keys)]
    if (span := rows[-1] + 1 - rows[0]) < 2 * len(rows):
        rows = rows[0] + np.arange(span)  # idle slots, too: a slice needs no copy
    return [(rows, width, keys)] + [
        (np.array([i]), int(widths[i]), int(ends[i])) for i in alone]

def ragged_attention(module, query, key, value, attention_mask=None, *, ragged=None,
                     scaling=None, dropout=0.0, sliding_window=None, **kwargs):
    """Attention of packed queries (1, H, T, E) to cached keys (slots, H_kv, S, E), as
    transformers' `AttentionInterface` calls it; returns ((1, T, H, E_v), None)."""
    odd = {k for k, x in kwargs.items() if x is not None} - {
        "position_ids", "use_cache", "output_attentions", "output_router_logits", "is_causal"}
    kinds, window = (getattr(module.config, x, None) for x in ("layer_types", "sliding_window"))
    window = kinds[module.layer_idx] == "sliding_attention" if kinds else window
    if odd or (window and not sliding_window) or ragged is None or dropout or (
            attention_mask is not None or not getattr(module, "is_causal", True)):
        raise NotImplementedError(f"{type(module).__name__}: attention with {odd}, a mask "
                                  "or window of its own, dropout, or not causal")
    ragged.layers.add(module.layer_idx)
    query, outputs = query[0].transpose(0, 1), []  # (T, H, E)
    for number, (rows, queries, at, keys) in enumerate(ragged.calls):
        k, v = key[rows, :, :keys], value[rows, :, :keys]
        q = query if ragged.even else query[queries]
        q = q.reshape(*at.shape, *query.shape[1:]).transpose(1, 2)  # (rows, H, width, E)
        mask = ragged.mask(number, sliding_window, q.dtype)
        grouped = q.shape[1] > k.shape[1]
        out = sdpa(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return (out if ragged.even else out[ragged.place])[None], None

AttentionInterface.register("ragged", ragged_attention)

# ---- 7. Models with these verbs: a causal LM as target or drafter, a head as drafter.
class SlotLM:
    """A decoder-only transformers model and its KV cache over slots: target or drafter.

    A rejected draft stays in the cache, but `cached` no longer counts it: it is masked
    until the next token at its position overwrites it. The caller's model stays as it
    is, because a copy of its modules runs, with the same weights."""

    def __init__(self, model, num_slots: int, max_length: int):
        _check_model("model", model)
        self.device, (self.vocab_size, self.readable) = model.device, _vocabulary(model)
        shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
        self.model = copy.deepcopy(model, shared)
        self.model.set_attn_implementation("ragged")
        self.head = self.model.get_output_embeddings()
        self.head.register_forward_pre_hook(lambda head, x: setattr(head, "seen", x[0][0]))
        self.layers = {*range(self.model.config.num_hidden_layers)}
        self.shape, self.kv = (num_slots, max_length), {}  # keys, values by layer
        self.cached, self.fits = np.zeros(num_slots, int), False  # until a pass shows it

    @torch.inference_mode()
    def commit(self, slots, lengths):
        self.cached[slots] = np.minimum(self.cached[slots], np.maximum(lengths - 1, 0))
        if len(new := slots[lengths == 0]):  # void is masked, but 0 * nan is nan
            for cache in sum(self.kv.values(), []):
                cache[_send(new, self.device)] = 0

    def next_logits(self, tokens, lengths, slots, position=0, depth=0):
        return self.logits(tokens, lengths, slots, np.zeros_like(slots))

    @torch.inference_mode()
    def logits(self, tokens, lengths, slots, num_verified):
        """Read what the cache lacks: a prompt or the last token, and drafts."""
        while len(long := slots[lengths - self.cached[slots] > PIECE]):
            self._forward(tokens, long[:1], PIECE, np.array([0]))
        counts = lengths - self.cached[slots] + num_verified
        at, from_last = np.arange(counts.sum()), counts.cumsum() - num_verified - 1
        return self._forward(tokens, slots, counts, at[at >= from_last.repeat(counts)])

    def _forward(self, tokens, slots, counts, keep):
        """Read the next counts (r,) tokens of slots (r,); logits of those to keep."""
        widths = np.zeros_like(self.cached)
        widths[slots] = counts
        self.batch = batch = Ragged(self.cached, widths, self.device)
        # subtle: an id that a drafter lacks becomes its highest id: any q is lossless.
        ids = tokens[batch.slots, batch.positions].clamp(max=self.readable - 1)
        some = _send(keep, self.device) if len(keep) < len(ids) else 0  # 0: all
        try:
            logits = self.model(
                input_ids=ids[None], position_ids=batch.positions[None], cache=self,
                use_cache=True, ragged=batch, logits_to_keep=some).logits[0]
            if not batch.layers == self.kv.keys() == self.layers or len(logits) > len(keep):
                raise NotImplementedError("layers without attention, or all logits")
        except (AttributeError, TypeError, RuntimeError, ValueError) as error:
            if self.fits or isinstance(error, torch.OutOfMemoryError):
                raise
            name = type(self.model).__name__
            raise NotImplementedError(f"{name} as a ragged batch: {error}") from error
        self.hidden, self.fits = self.head.seen, True
        self.cached[slots] += counts
        return logits

    def update(self, key, value, layer_idx, *args, **kwargs):
        """For models: keep key, value (1, H_kv, T, E), return those of all slots."""
        kv = self.kv.get(layer_idx) or [
            x.new_zeros(self.shape[0], 0, *x.shape[1::2]) for x in (key, value)]
        if (size := kv[0].shape[1]) < self.batch.longest:  # of (slots, S, H_kv, E)
            # It grows with the texts: limits that no text reaches take no memory.
            more = min(max(2 * size, self.batch.longest, 64), self.shape[1]) - size
            kv = [pad(x, (0, 0, 0, 0, 0, more)) for x in kv]
        self.kv[layer_idx] = kv
        for cache, new in zip(kv, (key, value)):
            cache[self.batch.slots, self.batch.positions] = new[0].transpose(0, 1)
        return [cache.transpose(1, 2) for cache in kv]

    def get_seq_length(self, layer_idx=None):
        if layer_idx is not None:  # a layer's own positions would be wrong here
            raise TypeError("its layers count tokens")
        return 0

class HeadDrafter:
    """A head on the target's hidden state (EAGLE, MTP), for one decoder at a time.

    head.start(hidden (r, H)) -> state (r, ...), of which drafting starts;
    head.step(state, newest tokens (r,), position, depth) -> next state, logits (r, V).
    A block drafter makes all drafts at once, and its state is their logits:

        def step(self, state, tokens, position, depth):
            state = self.block(state, tokens, depth) if position == 0 else state
            return state, state[:, position]  # (r, depth, V), (r, V)"""

    def __init__(self, head):
        self.head, self.seen = head, None

    def see(self, slots, hidden):
        self.seen = slots, self.head.start(hidden)

    def commit(self, slots, lengths):
        self.kept = self.seen  # a state that each draft replaces

    def next_logits(self, tokens, lengths, slots, position, depth):
        known, state = self.kept
        row, slot, last = (_send(x, tokens.device) for x in (
            np.searchsorted(known, slots), slots, lengths - 1))
        state, logits = self.head.step(state[row], tokens[slot, last], position, depth)
        self.kept = slots, state
        return logits

# ---- 8. Measure, and generate.
def measure_costs(decoder, prompts, *, repeats=5) -> CostTable:
    """Time steps of an idle decoder in which all draft and verify each of DEPTHS and K.

    Attention reads up to the longest context, so they are spread as in a real batch,
    from the shortest prompt to CONTEXT. The median of `repeats` counts."""
    (B, room), K = decoder.tokens.shape, len(decoder.q)
    high = min(room - K - 1, CONTEXT)  # K drafts and a bonus token follow
    contexts = np.linspace(min([high, *map(len, prompts)]), high, B).astype(int)
    _check(K and len(prompts) and contexts[0] and repeats > 0 and max(decoder.request) < 0,
           "measuring takes drafts, prompts, repeats, an idle decoder, got {}, {}, {}, {}",
           K, prompts, repeats, decoder.request)
    probe = copy.copy(decoder)  # which shares models and slots, and learns nothing
    probe.plan, probe.cost, probe.estimator = "fixed", None, None
    probe.eos, probe.request = probe.eos[:0], np.full(B, -1)  # no end token cuts a step
    probe.generator = torch.Generator(probe.device).manual_seed(0)
    for i, n in enumerate(contexts):
        prompt = np.asarray(prompts[i % len(prompts)]).tolist()
        probe.add(i, (prompt[:n] * int(n))[:n], 1)
    shapes = [(B, d) for d in range(K + 1) if d in (*DEPTHS, K)]
    shapes += [(n, 0) for n in {1, B // 4, B // 2} - {0, B}]  # as when requests run out
    times = np.zeros((repeats + 1, len(shapes), 2))
    for index in np.ndindex(times.shape[:2]):
        n, depth = shapes[index[1]]
        slots = np.linspace(0, B - 1, n).astype(int)
        probe.lengths[:], probe.ends[:] = contexts, contexts + depth + 1
        probe.request[:] = np.where(np.isin(range(B), slots), 0, -1)
        done = probe.step()
        times[index] = done.draft_ms, done.ms - done.draft_ms
    drafting, rest = np.median(times[1:], 0).T  # the first repeat warms up
    return CostTable({d: ms for (_, d), ms in zip(shapes, drafting) if d},
                     {n * (1 + d): ms for (n, d), ms in zip(shapes, rest)})

@dataclass
class Result:
    """What `generate` returns."""
    tokens: list[list[int]]  # the new ones of each prompt, an end token included
    steps: int
    accept_length: float  # tokens of a request per step, the bonus token included
    estimator: AcceptanceEstimator | None
    cost: CostTable | None

def generate(target, drafter, prompts, *, max_new_tokens=128, num_speculative_tokens=7,
             plan="adaptive", max_batch_size=64, eos_token_id=None, seed=None, cost=None,
             estimator=None, on_step=None, **sampling) -> Result:
    """Text of the target, sped up by the drafter: each token has the target's law.

    target, drafter: decoder-only transformers models on one device; a drafter may have
    the verbs of section 5 instead. prompts: lists of ids. max_new_tokens: of each, or one
    number. max_batch_size: how many run at once. eos_token_id: none, one or several.
    cost, estimator: to go on with. on_step: gets each `Step`, may return requests to end.
    sampling: temperature, top_k, top_p of both; generation configs are not read. A seed
    gives the same tokens with "fixed"; other plans follow the clock. Raises ValueError
    (input), NotImplementedError (models), FloatingPointError (logits)."""
    own = hasattr(drafter, "next_logits") or not num_speculative_tokens
    models = {"target": target, **({} if own else {"drafter": drafter})}
    requests = _check_requests(models, prompts, max_new_tokens)
    _check(on_step is None or callable(on_step), f"on_step must be callable: {on_step}")
    eos = list(eos_token_id) if isinstance(eos_token_id, set) else eos_token_id
    eos = [] if eos is None else np.ravel(eos).tolist()
    B = min(_number("max_batch_size", max_batch_size, 1, 2**31, int), len(requests) or 1)
    longest = max([len(prompt) + n for prompt, n in requests] or [1])
    decoder = Decoder(
        SlotLM(target, B, longest), drafter if own else SlotLM(drafter, B, longest),
        num_speculative_tokens=num_speculative_tokens, max_batch_size=B, max_length=longest,
        plan=plan, cost=cost, estimator=estimator, eos_token_ids=eos, seed=seed, **sampling)
    if cost is None and decoder.plan != "fixed" and any(n > 1 for _, n in requests):
        decoder.cost = measure_costs(decoder, [prompt for prompt, _ in requests])
    waiting = iter([(i, prompt, n) for i, (prompt, n) in enumerate(requests) if n])
    tokens, steps, request_steps = [[] for _ in requests], 0, 0
    refill(decoder, waiting)
    while done := decoder.step():
        steps, request_steps = steps + 1, request_steps + len(done.requests)
        for i, row, n in zip(done.requests, done.tokens, done.num_committed):
            tokens[i] += row[:n].tolist()
        if on_step and hasattr(ended := on_step(done), "__iter__"):
            decoder.request[np.isin(decoder.request, list(ended))] = -1
        refill(decoder, waiting)
    length = sum(map(len, tokens)) / max(request_steps, 1)
    return Result(tokens, steps, length, decoder.estimator, decoder.cost)

# ---- 9. Refusals, by name and value, before any work.
def _vocabulary(model):
    """Tokens that it gives logits of, and tokens that it reads."""
    ends = model.get_output_embeddings(), model.get_input_embeddings()
    return [len(end.weight) for end in ends]

def _check_requests(models, prompts, max_new_tokens):
    """[(prompt, new tokens)], checked against models {name: model} and each other."""
    device = getattr(models["target"], "device", None)
    for name, model in models.items():
        _check_model(name, model)
        _check(model.device == device, f"{name} must be on {device}, is on {model.device}")
    (V, readable), *others = map(_vocabulary, models.values())
    _check(readable >= V, f"target must read all of its {V} tokens, reads {readable}")
    if others and others[0][0] != V:
        warnings.warn(f"vocabularies of {V} (target) and {others[0][0]} (drafter): "
                      "what only one of them has is never drafted", stacklevel=3)
    limit = min(getattr(model.config, "max_position_embeddings", 0) or 2**31
                for model in models.values())
    _check(isinstance(prompts, (list, tuple)) or getattr(prompts, "ndim", 0) == 2,
           "prompts must be lists of token ids, got {!r}", prompts)
    new = getattr(max_new_tokens, "tolist", lambda: max_new_tokens)()
    new = new if isinstance(new, (list, tuple)) else [new] * len(prompts)
    _check(len(new) == len(prompts), f"max_new_tokens: {len(new)} for {len(prompts)}")
    ids = [_token_ids(f"prompts[{i}]", prompt, V) for i, prompt in enumerate(prompts)]
    new = [_number("max_new_tokens", n, 0, 2**31, int) for n in new]
    for i, n in enumerate(new):
        _check(ids[i] and len(ids[i]) + n <= limit, f"prompts[{i}] must have 1 to {limit} "
               f"tokens, the new ones included, got {len(ids[i])} and {n}")
    return list(zip(ids, new))

def _check_model(name, model):
    kind = type(model).__name__
    _check(isinstance(model, PreTrainedModel), f"{name} is no transformers model: {kind}")
    head, config = getattr(model.get_output_embeddings(), "weight", None), model.config
    layers = {*(getattr(config, "layer_types", 0) or ())} - {
        "full_attention", "sliding_attention"}
    ropes = str(getattr(config, "rope_parameters", ""))  # flat, or one per kind of layer
    refused = {
        "is in training mode: call .eval()": any(m.training for m in model.modules()),
        "has no head with a weight, to give logits": not isinstance(head, Tensor),
        "is several models: pass one": not hasattr(config, "num_hidden_layers"),
        "keeps a recurrent state, which can't forget a draft": model._is_stateful,
        "has no attention interface": not model._supports_attention_backend,
        "has rotary positions that depend on the longest request of a pass":
            "'longrope'" in ropes or "'dynamic'" in ropes,
        f"has layers of kind {sorted(layers)}": layers}
    for why, bad in refused.items():
        _check(not bad, f"{name}: {kind} {why}")

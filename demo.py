# SPDX-License-Identifier: MIT
"""Adaptive verification on a real pair of models: `python demo.py`.

It shows what a step costs; one real step as a grid, with its budget worked out; a text
being written; the table of plain decoding, fixed K, the published rule (verification)
and adaptive, which also chooses how far to draft; and whether the estimator is right.
`sweep` tries every fixed K, `study` compares drafters, features and fits. No GPU and no
network are needed: a small pair is trained on first use. `--target NAME --draft NAME`
takes two causal LMs of one vocabulary.
"""
import argparse
import copy
import hashlib
import itertools
import math
import os
import pathlib
import platform
import random
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import av

# ---- 1. The built-in pair: a Llama on bytes and a drafter, trained on first use.
LENGTH = 256  # bytes per training sequence: positions beyond it are untrained
DEPTH = 7  # drafts per step that the drafters learn to make
STRIDE = 4  # drafters learn at every fourth byte: its neighbours teach much the same
VOCAB = 256
KINDS = {"block": "one pass, then a bias each (as DSpark)",
         "block-unbiased": "one pass (as DFlash)",
         "head": "a pass per draft (as EAGLE, MTP)", "lm": "a language model"}

def status(text: str = ""):
    """A passing line on a terminal, replaced by the next one; nothing in a file."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

def workloads(held_out: bool = False) -> dict[str, bytes]:
    """Three texts of unlike difficulty from Python's library: 90 %, or the rest."""
    lib = pathlib.Path(sysconfig.get_path("stdlib"))
    code = [*lib.glob("*.py")]
    for package in ("asyncio concurrent email html http importlib json logging "
                    "unittest urllib xml").split():
        code += lib.glob(f"{package}/**/*.py")
    tables = [*lib.glob("encodings/cp*.py"), *lib.glob("encodings/iso*.py")]
    documents, texts = {name: [file.read_bytes() for file in sorted(files)]
                        for name, files in (("tables", tables), ("code", code))}, {}
    documents["prose"] = [text.encode() for _, text in sorted(topics.items())]
    for name, parts in documents.items():
        limit, size, split = 0.9 * sum(map(len, parts)), 0, 0
        while size < limit:  # whole documents, so that none is half seen
            size, split = size + len(parts[split]), split + 1
        texts[name] = b"\n".join(parts[split:] if held_out else parts[:split])
    return texts

class Block(nn.Module):
    """Drafts a whole block in one pass, from the target's hidden state (DFlash-like);
    if biased, the token drawn before a position adds to its logits (DSpark-like)."""

    def __init__(self, hidden_size: int, biased: bool = True):
        super().__init__()
        d, rank, self.biased = hidden_size * 3 // 4, 64, biased
        self.start = nn.Identity()  # the state before draft 0
        self.read = nn.Linear(hidden_size, d, bias=False)
        self.embed = nn.Embedding(VOCAB, d)
        self.position_embed = nn.Parameter(torch.randn(DEPTH, d) * 0.3)
        self.norm = nn.RMSNorm(d, elementwise_affine=False)
        self.up = nn.Linear(d, 2 * d, bias=False)
        self.down = nn.Linear(2 * d, d, bias=False)
        self.head = nn.Linear(d, VOCAB, bias=False)
        if biased:
            self.bias_embed = nn.Embedding(VOCAB, rank)
            self.bias_head = nn.Linear(rank, VOCAB, bias=False)
            nn.init.zeros_(self.bias_head.weight)  # no bias until one is learned

    def states(self, hidden: Tensor, token: Tensor, depth: int) -> Tensor:
        """What the last layer reads, (..., H) and (...,) -> (..., depth, d)."""
        both = self.read(hidden) + self.embed(token)
        z = both[..., None, :] + self.position_embed[:depth]
        return self.norm(z + self.down(F.silu(self.up(self.norm(z)))))

    def forward(self, hidden: Tensor, token: Tensor, depth: int = DEPTH) -> Tensor:
        """Logits of the first positions, (..., H) and (...,) -> (..., depth, V)."""
        return self.head(self.states(hidden, token, depth))

    def step(self, state: Tensor, token: Tensor, position: int, depth: int):
        """The logits of the block as the state, and of the draft at a position."""
        if position == 0:
            state = self(state, token, depth)  # (..., depth, V)
        bias = self.bias_head(self.bias_embed(token)) if self.biased and position else 0
        return state, state[..., position, :] + bias

class RecurrentHead(nn.Module):
    """Drafts one token at a time from a state read off the target (MTP-like)."""

    def __init__(self, hidden_size: int):
        super().__init__()
        d = hidden_size // 2
        self.start = nn.Linear(hidden_size, d, bias=False)  # the state before draft 0
        self.embed = nn.Embedding(VOCAB, d)
        self.norm = nn.RMSNorm(2 * d, elementwise_affine=False)
        self.up = nn.Linear(2 * d, 2 * d, bias=False)
        self.down = nn.Linear(2 * d, d, bias=False)
        self.last_norm = nn.RMSNorm(d, elementwise_affine=False)
        self.head = nn.Linear(d, VOCAB, bias=False)

    def step(self, state: Tensor, token: Tensor, position: int, depth: int):
        """Read the newest token: the state after it, and logits of the next one."""
        both = torch.cat([state, self.embed(token).to(state.dtype)], -1)
        state = state + self.down(F.silu(self.up(self.norm(both))))
        return state, self.head(self.last_norm(state))

def build(what: str, hidden_size: int) -> nn.Module:
    """An untrained target, or a kind of drafter for it."""
    llamas = {"target": (hidden_size, 3 if hidden_size == 256 else 12, 4 * hidden_size),
              "lm": (hidden_size // 2, 1, hidden_size * 4 // 3)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if what in llamas:
            width, layers, mlp = llamas[what]
            return LlamaForCausalLM(LlamaConfig(
                hidden_size=width, num_hidden_layers=layers, intermediate_size=mlp,
                num_attention_heads=max(2, width // 128), num_key_value_heads=1,
                head_dim=64, vocab_size=VOCAB, max_position_embeddings=512,
                tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
                pad_token_id=None))
        if what == "head":
            return RecurrentHead(hidden_size)
        return Block(hidden_size, biased=what == "block")

def drafting(drafter: nn.Module, hidden: Tensor) -> Callable:
    """A function of (i, the token before), to be called in order: logits of draft i."""
    state = drafter.start(hidden)

    def step(i, before):
        nonlocal state
        state, logits = drafter.step(state, before, i, DEPTH)
        return logits
    return step

def loss_of(target, drafter=None) -> Callable:
    """A function of (ids, fraction of the time): what to descend, a text to show."""
    starts = itertools.cycle(range(STRIDE))

    def target_loss(ids, fraction):
        logits = target(input_ids=ids[:, :-1], use_cache=False).logits.float()
        nats = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        return nats, f"target: {nats:.2f} nats per byte"

    def drafter_loss(ids, fraction):  # as if the drafts before had been the text
        text, imitation, accepted = ids[:, :-1], 0.0, []
        with torch.no_grad():
            hidden = target.model(input_ids=text, use_cache=False).last_hidden_state
            p = target.lm_head(hidden).float().softmax(-1)
        if isinstance(drafter, LlamaForCausalLM):
            pairs = [(drafter(input_ids=text, use_cache=False).logits, p)]
        else:
            at = torch.arange(next(starts), LENGTH - DEPTH, STRIDE, device=ids.device)
            draft = drafting(drafter, hidden[:, at])
            pairs = ((draft(i, text[:, at + 1 + i]), p[:, at + 1 + i])
                     for i in range(DEPTH))
        for logits, law in pairs:
            log_q = logits.float().log_softmax(-1)
            # A later draft counts less: an earlier one, rejected, takes it along.
            weight = 0.8 ** len(accepted)
            imitation = imitation - weight * (law * log_q).sum(-1).mean()
            accepted.append(torch.minimum(law, log_q.exp()).sum(-1))
        # Cross entropy starts the drafter off, then the number of accepted drafts.
        late = 0.8 * min(1.0, 2 * fraction)
        length = torch.stack(accepted).cumprod(0).sum(0).mean()
        words = f"drafter: {accepted[0].mean():.0%} of first drafts accepted"
        return (1 - late) * imitation / 3 - late * length, words
    return drafter_loss if drafter else target_loss

def train(model, loss: Callable, seconds: float, device: torch.device) -> int:
    """Train until the time is up; the number of steps that this took."""
    generator, texts = torch.Generator().manual_seed(0), list(workloads().values())
    # Muon for the matrices inside, AdamW for embeddings, norms and output heads.
    rest = {name: weight for name, weight in model.named_parameters()
            if weight.ndim != 2 or "embed" in name or "head" in name}
    inner = [weight for name, weight in model.named_parameters() if name not in rest]
    is_llama = isinstance(model, LlamaForCausalLM)
    # With more, a Llama ends .2 nats worse.
    matrix_lr, other_lr = (5e-3, 6e-3) if is_llama else (1e-2, 1e-2)
    optims = [torch.optim.Muon(inner, lr=matrix_lr, adjust_lr_fn="match_rms_adamw"),
              torch.optim.AdamW(rest.values(), lr=other_lr, betas=(0.9, 0.98),
                                weight_decay=0.0, fused=True)]
    groups = [(group, group["lr"]) for optim in optims for group in optim.param_groups]

    def batch():
        rows = []  # sequences from random places, the texts in turns
        for text in texts * 3:
            at = int(torch.randint(len(text) - LENGTH, (), generator=generator))
            rows.append(list(text[at:at + LENGTH + 1]))
        return torch.tensor(rows).to(device)

    def backward(ids, fraction, bfloat16):
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            value, text = loss(ids, fraction)
        value.backward()
        return text

    def least_time(ids, bfloat16):
        times, end = [], time.monotonic() + min(1.0, seconds / 20)
        while len(times) < 2 or time.monotonic() < end:  # the first step is a slow one
            start = time.monotonic()
            backward(ids, 0.5, bfloat16)
            if ids.is_cuda:  # the clock of the host must not run ahead
                torch.cuda.synchronize()
            times.append(time.monotonic() - start)
            model.zero_grad()
        return min(times)

    model.train()
    if is_llama:  # the fused backward is slow on a CPU
        model.set_attn_implementation("eager")
    ids = batch()
    bfloat16 = least_time(ids, False) > least_time(ids, True)  # some CPUs imitate it
    steps, start, shown = 0, time.monotonic(), 0.0
    while (now := time.monotonic() - start) < seconds:
        done = now / seconds
        for group, peak in groups:  # by the clock: a slow machine decays in time too
            group["lr"] = peak * min(1.0, done / 0.03 + 0.03, (1 - done) / 0.6)
        text = backward(batch(), done, bfloat16)
        for optim in optims:
            optim.step()
            optim.zero_grad()
        steps += 1
        if now - shown > 0.5:
            shown = now
            status(f"[{'#' * round(30 * done):30}] {seconds - now:3.0f} s left  {text}")
    status()
    if is_llama:
        model.set_attn_implementation("sdpa")
    return steps

@torch.no_grad()
def report_training(target, drafter, kind: str, steps: str):
    """Show nats per byte and the accept length, from sum(min(p, q)), on unseen text."""
    nats, lengths, device, law = [], [], target.device, partial(av.warp, top_p=0.95)
    texts = workloads(held_out=True)
    for text in texts.values():
        generator = torch.Generator().manual_seed(1)
        places = torch.randint(len(text) - 100, (100,), generator=generator)
        ids = torch.tensor([list(text[at:at + 100]) for at in places]).to(device)
        hidden = target.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = target.lm_head(hidden)
        nats.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
        generator, laws = torch.Generator(device).manual_seed(1), []
        token = av.sample(law(logits[:, -1]), generator)
        draft = kind != "lm" and drafting(drafter, hidden[:, -1])
        for i in range(DEPTH):
            ids = torch.cat([ids, token[:, None]], 1)
            logits = draft(i, token) if draft else drafter(input_ids=ids).logits[:, -1]
            laws.append(law(logits))
            token = av.sample(laws[-1], generator)
        p = law(target(input_ids=ids, use_cache=False).logits[:, -DEPTH:])
        confidence = torch.minimum(p, torch.stack(laws, 1)).sum(-1).clamp(max=1)
        lengths.append(1 + confidence.cumprod(1).sum(1).mean())
    print(f"after {steps}, on unseen text:\n{'':42}"
          + "".join(f"{name:>8}" for name in texts))
    for what, values in (("target, nats per byte", nats),
                         (f"{kind}, accept length at K = {DEPTH}", lengths)):
        print(f"  {what:40}" + "".join(f"{x:8.2f}" for x in values), flush=True)
    if min(lengths) < 2.5 or max(nats) > 2.2:
        print("That is little: this machine was too slow or busy, or training --quick.")

def cache_folder() -> pathlib.Path:
    """Where trained models are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "adaptive-verification"

def checksum(weights: dict[str, Tensor]) -> str:
    """A hash of names, shapes, types and values."""
    digest = hashlib.sha256()
    for name, w in sorted(weights.items()):
        digest.update(f"{name} {tuple(w.shape)} {w.dtype}".encode())
        digest.update(w.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

def restore(name: str, model: nn.Module) -> bool:
    """Load the weights kept under a name, or say no and leave the model as it is."""
    file = cache_folder() / f"{name}.pt"
    if not file.exists():
        return False
    try:
        kept = torch.load(file, map_location="cpu", weights_only=True)
        weights = kept["weights"]
        finite = all(w.isfinite().all() for w in weights.values())
        copy.deepcopy(model).load_state_dict(weights)  # raises if of other shapes
        if kept["checksum"] != checksum(weights) or not finite:
            raise ValueError
        model.load_state_dict(weights)
        return True
    except Exception:  # whatever is wrong, the cure is the same
        print(f"{file} is broken, changed or of another kind: training anew")
        return False

def keep(name: str, model: nn.Module):
    """Keep the weights under a name; if that cannot be, say so and go on."""
    file, weights = cache_folder() / f"{name}.pt", model.state_dict()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")  # never half a file
        torch.save({"weights": weights, "checksum": checksum(weights)}, new)
        new.replace(file)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as the latter
        print(f"what was trained cannot be kept ({error}): it will be trained again")

def built_in_models(device: torch.device, kind: str, quick: bool) -> list[nn.Module]:
    """The built-in target and drafter, from the cache, or trained now."""
    origin = hashlib.sha256(b"".join(workloads().values())).hexdigest()[:8]
    models, words, hidden_size = [], [], 768 if device.type == "cuda" else 256
    for what, seconds in (("target", 7 if quick else 92), (kind, 3 if quick else 44)):
        models.append(build(what, hidden_size).to(device))
        size = sum(w.numel() for w in models[-1].parameters())
        name = f"{'quick-' * quick}{what}-{size}-seed0-{origin}"
        if not restore(name, models[-1]):
            print(f"training the built-in {what} for {seconds} s; to be kept in",
                  cache_folder(), flush=True)
            steps = train(models[-1], loss_of(*models), seconds, device)
            words.append(f"{steps} steps of the {what}")
            keep(name, models[-1])
        models[-1].eval()
        origin += f"-{checksum(models[-1].state_dict())[:8]}"
    if words:
        report_training(*models, kind, ", ".join(words))
    return models


# ---- 2. Pairs, prompts, requests.
PROMPT, NEW = 48, (128, 192)  # bytes of a built-in prompt; new tokens, from and to
FEW = 4  # below this, requests are shorter: so each round sees several of each kind
HUB_PROMPTS = [f"{ask} about {what}." for what in ("tides", "chess", "bread", "primes")
               for ask in ("Write Python code", "Tell me a short story", "List facts")]

class Pair(NamedTuple):
    """Two models, what they are asked, and how to read their tokens."""
    name: str
    kind: str  # of the drafter
    target: nn.Module
    drafter: nn.Module
    prompts: list[list[int]]
    decode: Callable[[list[int]], str]
    eos: list[int] = []
    kinds: list[str] = []  # of the prompts, which take turns

    def verbs(self, load: int):
        """The drafter as the loop knows it."""
        if self.kind == "lm":
            return av.SlotLM(self.drafter, load, self.longest)
        return av.HeadDrafter(self.drafter)

    @property
    def longest(self) -> int:
        """The most tokens of a request, within the positions that the models have."""
        configs = [getattr(m, "config", None) for m in (self.target, self.drafter)]
        limits = [getattr(c, "max_position_embeddings", 0) or 10**9 for c in configs]
        return min(*limits, max(map(len, self.prompts)) + NEW[1])

def byte_pair(device, kind: str, quick: bool, lines: list[str], seed: int) -> Pair:
    """The built-in pair, to go on with the ends of lines, or with unseen text."""
    texts, rng = {} if lines else workloads(held_out=True), random.Random(seed)
    prompts = [list(line.encode()[NEW[1] - LENGTH:]) for line in lines]
    for text in list(texts.values()) * 100:
        start = rng.randrange(len(text) - PROMPT)
        prompts.append(list(text[start:start + PROMPT]))
    return Pair("built in, its tokens are bytes", kind,
                *built_in_models(device, kind, quick), prompts,
                lambda ids: bytes(ids).decode("utf-8", "replace"), kinds=list(texts))

def named_pair(names: list[str], device, lines: list[str]) -> Pair:
    """Any two causal LMs of one vocabulary, by hub name or folder."""
    tokenizers = [transformers.AutoTokenizer.from_pretrained(name) for name in names]
    ours, theirs = [tokenizer.get_vocab().items() for tokenizer in tokenizers]
    if ours != theirs:
        raise ValueError(f"the vocabularies differ, as in {min(ours ^ theirs)}")
    models, prompts, tokenizer = [], [], tokenizers[0]
    for name in names:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True)
        if missing := sorted(info["missing_keys"]):  # transformers would make them up
            raise ValueError(f"{name} lacks weights: {', '.join(missing)}")
        models.append(model.to(device).eval())
    for line in lines or HUB_PROMPTS:
        if chat := bool(tokenizer.chat_template):
            line = tokenizer.apply_chat_template(
                [{"role": "user", "content": line}], tokenize=False,
                add_generation_prompt=True)
        # subtle: a chat template brings its own start token.
        prompts.append(tokenizer(line, add_special_tokens=not chat).input_ids)
    eos = models[0].generation_config.eos_token_id
    return Pair(" + ".join(names), "lm", *models, prompts, tokenizer.decode,
                [] if eos is None else np.ravel(eos).tolist())

def find_pair(args, device: torch.device) -> Pair:
    """The pair that the flags name, or the built-in one."""
    lines, what = [], f"--prompts {args.prompts}"
    try:
        if args.prompts:
            text = pathlib.Path(args.prompts).read_text(encoding="utf-8-sig")
            lines = [line for line in text.splitlines() if line.strip()]
            if not lines:
                raise ValueError("no line with a prompt in it")
        what = f"{args.target} with {args.draft}"
        if args.target:
            return named_pair([args.target, args.draft], device, lines)
    except Exception as error:  # each file of a folder has its own ways to be broken
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        sys.exit(f"cannot load {what}: {why}")
    return byte_pair(device, args.drafter, args.quick, lines, args.seed)

def requests(pair: Pair, load: int, seed: int):
    """Endless (number, prompt, max_new_tokens), the same for every arm."""
    rng = random.Random(seed)
    for i in itertools.count():
        prompt, new = pair.prompts[i % len(pair.prompts)], rng.randint(*NEW)
        new = min(new // (3 if load < FEW else 1), pair.longest - len(prompt))
        # The first ones are cut short at random: else they would all end at once.
        yield i, prompt, rng.randint(1, new) if i < load else new

@dataclass
class Run:
    """A pair, and the settings it runs with."""
    pair: Pair
    K: int
    law: dict  # temperature, top_p
    loads: list[int]  # requests at once
    seed: int
    rounds: int
    quick: bool
    turns: int = 3  # slices of each arm in a round: a slow moment then slows all alike
    estimator: av.AcceptanceEstimator | None = None  # fitted, by `fit`

    def depths(self) -> list[int]:
        """Drafts of each request at which costs are measured."""
        return [d for d in range(self.K + 1) if d in (*av.DEPTHS, self.K)]

    def decoder(self, load: int, plan="fixed", K=None, cls=av.Decoder, **more):
        """An idle decoder for `load` requests at once; K = 0 is plain decoding."""
        pair, K = self.pair, self.K if K is None else K
        return cls(av.SlotLM(pair.target, load, pair.longest),
                   pair.verbs(load) if K else None, max_batch_size=load,
                   max_length=pair.longest, plan=plan, num_speculative_tokens=K,
                   seed=self.seed, eos_token_ids=pair.eos, **self.law, **more)


# ---- 3. The race: all arms take turns, so that noise falls on all of them alike.
def after_steps(run: Run, load: int, steps: int, **more) -> av.Decoder:
    """A decoder that has drafted and verified all of K for some steps."""
    decoder, stream = run.decoder(load, **more), requests(run.pair, load, run.seed)
    for _ in range(steps):
        av.refill(decoder, stream)
        decoder.step()
    return decoder

def fit(run: Run) -> av.AcceptanceEstimator:
    """An estimator that has seen this pair, as its start knows none: for two refits."""
    load, estimator = min(16, max(run.loads)), av.AcceptanceEstimator(run.K)
    after_steps(run, load, 2 * estimator.refit_every, estimator=estimator)
    return estimator

def measure(run: Run, load: int) -> av.CostTable:
    """The costs at a load, with contexts spread as those of the requests will be."""
    status(f"{load} requests: measuring costs")
    repeats = 3 if run.quick else 30 if load < 64 else 20 if load == 64 else 8
    return av.measure_costs(run.decoder(load), run.pair.prompts, repeats=repeats)

class Arm:
    """One way to decode at one load: a decoder that lives on from slice to slice."""

    def __init__(self, run: Run, load: int, cost: av.CostTable, begun: list[tuple],
                 name: str, K: int, plan: str, more: dict | None = None):
        self.name, self.load, self.K, self.steps, self.rates = name, load, K, [], []
        estimator = None if plan == "fixed" else copy.deepcopy(run.estimator)
        self.decoder = run.decoder(load, plan, K, cost=copy.deepcopy(cost),
                                   **{"estimator": estimator, **(more or {})})
        first = max((number for number, *_ in begun), default=-1) + 1
        later = itertools.islice(requests(run.pair, load, run.seed), first, None)
        self.requests = itertools.chain(begun, later)
        self.seconds = (0.2 + load / 400) / (1 + run.quick) / run.turns
        self.tokens, self.spent = 0, 0.0  # of this round
        for _ in range(3 if run.quick else 10):
            self.step()
        self.steps.clear()

    def step(self) -> av.Step:
        """A step, the places of those that ended filled before it."""
        av.refill(self.decoder, self.requests)
        done = self.decoder.step()
        self.steps.append(done)
        return done

    def slice(self):
        """Steps for some time; or until a request has ended, if they are few."""
        began, more = self.now(), True
        while more:
            self.tokens += self.step().num_committed.sum()
            more = ((self.decoder.request >= 0).all() if self.load < FEW
                    else self.now() < began + self.seconds)
        self.spent += self.now() - began

    def end_round(self):
        """The rate of a round's slices."""
        self.rates.append(self.tokens / self.spent)
        self.tokens, self.spent = 0, 0.0

    def now(self) -> float:
        """Seconds, by a clock that stands still for what an arm need not pay for."""
        return time.perf_counter() - getattr(self.decoder, "free_seconds", 0.0)

    @property
    def rate(self) -> float:
        """Tokens per second, the median over the rounds."""
        return float(np.median(self.rates))

    def over(self, other: "Arm") -> tuple[float, float, float]:
        """The ratio of the medians, the least and the largest ratio of a round."""
        ratios = [mine / its for mine, its in zip(self.rates, other.rates)]
        return self.rate / other.rate, min(ratios), max(ratios)

    def clock(self) -> float:
        """Real over expected ms of a step, the median over those without a prompt."""
        return float(np.nanmedian([done.ms / done.expected_ms for done in self.steps]))

    def per_step(self) -> np.ndarray:
        """Tokens out, drafts drawn, drafts verified, each per request and step."""
        return np.concatenate([
            [done.num_committed, (done.survival >= 0).sum(1), done.num_verified]
            for done in self.steps], 1).mean(1)

def best_fixed(arms: list[Arm]) -> Arm:
    """The fastest of all but the two rules, which are the last two."""
    return max(arms[:-2], key=lambda arm: arm.rate)

def contestants(run: Run, fixed: list[int]) -> list[tuple]:
    """(name, K, plan) of some fixed K and of both rules."""
    return [*((f"fixed {k}" if k else "plain", k, "fixed") for k in sorted({*fixed})),
            *((plan, run.K, plan) for plan in ("verification", "adaptive"))]

def race(run: Run, load: int, cost: av.CostTable, arms: list[tuple], report: Callable):
    """Let the arms take turns; then `report(load, arms)`, after Ctrl-C too."""
    # All begin with requests (number, text, tokens to come) that are spread over texts.
    ahead = after_steps(run, load, 1 if load < FEW else 10 if run.quick else 40)
    begun = [(int(ahead.request[i]), ahead.tokens[i, :n].tolist(), int(end - n))
             for i, (n, end) in enumerate(zip(ahead.lengths, ahead.ends))
             if ahead.request[i] >= 0]
    arms = [Arm(run, load, cost, begun, *arm) for arm in arms]
    try:
        for i in range(run.rounds * run.turns):
            status(f"{load} requests: {i / run.turns:.0f} of {run.rounds} rounds")
            for arm in arms[i % len(arms):] + arms[:i % len(arms)]:
                arm.slice()
                if i % run.turns == run.turns - 1:
                    arm.end_round()
    finally:
        status()
        if all(arm.rates for arm in arms):
            report(load, arms)


# ---- 4. `python demo.py`: one step, a text, the table, in at most 80 columns.
PICTURE = 4  # requests in the step that is shown

def title(text: str, *notes: str):
    """A headline, and what has to be known to read on."""
    status()
    print("", text, *notes, sep="\n", flush=True)

def introduce(run: Run):
    """Which machine, pair and settings."""
    pair, law, c = run.pair, run.law, run.pair.target.config
    target, drafter = [sum(w.numel() for w in model.parameters()) / 1e6
                       for model in (pair.target, pair.drafter)]
    machine = (torch.cuda.get_device_name() if torch.cuda.is_available() else
               f"{platform.machine()} CPU, {torch.get_num_threads()} threads")
    print("QUICK: a check, with nothing to quote\n" * run.quick
          + f"machine   {machine}, torch {torch.__version__}\n"
          f"pair      {pair.name}, {len(pair.prompts)} prompts\n"
          f"target    {type(pair.target).__name__}, {c.num_hidden_layers} layers of "
          f"{c.hidden_size}, {target:.2f} M weights, {c.vocab_size} tokens\n"
          f"drafter   {pair.kind}, {drafter:.2f} M weights; {KINDS[pair.kind]}\n"
          f"settings  K = {run.K}, temperature {law['temperature']:g}, top-p "
          f"{law['top_p']:g}, seed {run.seed}", flush=True)

def print_costs(run: Run, loads: list[int]) -> dict[int, av.CostTable]:
    """Measure and show what a step costs: {requests: table}."""
    title("What a step costs here, in ms: drafting, and the rest of it, in which the",
          "target reads a token and so many drafts of each request",
          f"requests   draft 1 draft {run.K}  |"
          + "".join(f"{d:7}" for d in run.depths()) + " per draft")
    costs = {load: measure(run, load) for load in loads}
    for load, cost in costs.items():
        ms = [float(cost.verify_ms(load * (1 + d))) for d in run.depths()]
        print(f"{load:8}{cost.draft_ms(1):10.2f}{cost.draft_ms(run.K):8.2f}  |"
              + "".join(f"{x:7.2f}" for x in ms)
              + f"{(ms[-1] - ms[0]) / load / run.K:10.3f}", flush=True)
    return costs

def print_one_step(run: Run, cost: av.CostTable):
    """A step whose budget comes out the same from the rounded numbers shown."""
    title(f"One real step of {PICTURE} requests, by the published rule (verification)")
    arm = Arm(run, PICTURE, cost, [], "a step", run.K, "verification")
    decoder, estimator = arm.decoder, arm.decoder.estimator
    for tries in range(300):
        survival = decoder.expected.cumprod(1).round(2)
        draft = round(float(decoder.cost.draft_ms(run.K)), 2)
        verify = {n: round(float(decoder.cost.verify_ms(n)), 2)
                  for n in (PICTURE * (1 + d) for d in run.depths())}
        room = (decoder.request >= 0) & (decoder.ends - decoder.lengths > run.K)
        # A plan serves some steps; here is one that was made for its own.
        usual = room.all() and (estimator.steps % estimator.refit_every
                                and estimator.steps % av.PLAN_EVERY == 0)
        done = arm.step()
        _, budget = av.draft_budget(survival, av.CostTable({run.K: draft}, verify))
        if (usual and budget == done.num_verified.sum() and done.accepted.any()
                and (done.accepted < done.num_verified).any()
                and (budget < survival.size or tries > 150)  # trimmed, if it ever is
                and done.survival.shape[1] == run.K and (done.survival >= 0).all()):
            break
    else:
        return print("  (no step found with a budget that rounded numbers give, too)")
    R, K = survival.shape
    print("plan: survivals as forecast by earlier steps (the chance that this draft and\n"
          f"all before it are accepted){'of draft 1 to':>50} {K}")
    for number, row in zip(done.requests, survival):
        print(f"  request {number:<8}" + "".join(f"{s:8.2f}" for s in row))
    print(f"costs in ms: to draft {K}: {draft:.2f}; to verify, linear between\n  "
          + ", ".join(f"T({n}) = {ms:.2f}" for n, ms in verify.items()))
    print("   best   tokens, with one    ms: drafting            tokens\n"
          f" drafts   for each request    {f'and T({R} + drafts)':24}per ms")
    tokens = R + np.append(0, -np.sort(-survival, axis=None)).cumsum()
    ms = draft + np.interp(R + np.arange(len(tokens)), [*verify], [*verify.values()])
    near = {max(0, budget - 1), budget, min(budget + 1, R * K)}
    for b in sorted({n - R for n in verify} | near):
        print(f"{b:7}   {tokens[b]:<20.2f}{draft:.2f} + {ms[b] - draft:<17.2f}"
              f"{tokens[b] / ms[b]:.4f}" + "   <- the budget" * (b == budget))
    print(f"draft, score, trim: of this step's survivals the {budget} best are verified"
          "\n  + accepted   x rejected   - behind a rejection   . trimmed, never read")
    for number, row, verified, accepted in zip(
            done.requests, done.survival, done.num_verified, done.accepted):
        marks = ("+" * accepted + "x" + "-" * K)[:verified].ljust(K, ".")
        print(f"  request {number:<8}"
              + "".join(f"{s:7.2f}{mark}" for s, mark in zip(row, marks))
              + f"  {accepted}+1")
    print(f"accept: {done.accepted.sum()} drafts and {R} tokens of the target's own in "
          f"{done.ms:.2f} ms;\n{tokens[budget]:.1f} in {ms[budget]:.2f} were expected")

def quoted(pair: Pair, before: list[int], ids: list[int], width: int = 68) -> str:
    """What ids add to a text; incomplete characters are left to their last token."""
    if not ids:
        return ""
    old, new = [pair.decode(x).rstrip("\ufffd") for x in (before, before + ids)]
    text = repr(new[len(old):])[1:-1]
    return f'"{text}"' if len(text) < width - 1 else f'"{text[:width - 5]}..."'

def print_text(run: Run, cost: av.CostTable, load: int):
    """The first steps of one request among `load`, by the published rule."""
    title(f"A text being written, one of {load} requests, with verification")
    arm, pair = Arm(run, load, cost, [], "a text", run.K, "verification"), run.pair
    first = int(arm.step().requests.max()) + 1
    watched = first + (1 - first) % 3  # of the built-in prompts one of code
    prompt = text = pair.prompts[watched % len(pair.prompts)]
    print(f"prompt    {quoted(pair, [], prompt)}\n"
          f"  step  {'accepted':20}{'the target adds':18}{'rejected':16}trimmed")
    step = 0
    while step < 8 and (text is prompt or watched in arm.decoder.request):
        done = arm.step()
        if watched not in done.requests:
            continue
        row = done.requests.tolist().index(watched)
        verified, accepted = done.num_verified[row], done.accepted[row]
        drafts = done.drafts[row, :(done.survival[row] >= 0).sum()].tolist()
        new = done.tokens[row, :done.num_committed[row]].tolist()
        step += 1
        columns = [(19, new, 0, accepted), (17, new, accepted, None),
                   (15, drafts, accepted, verified), (15, drafts, verified, None)]
        print(f"  {step:4}  " + " ".join(
            quoted(pair, text + ids[:start], ids[start:end], width).ljust(width)
            for width, ids, start, end in columns).rstrip())
        text = text + new
    print(f"so far    {quoted(pair, prompt, text[len(prompt):])}")

def print_race(run: Run, costs: dict, fixed: list[int], base: Callable, end: Callable,
               *notes: str):
    """The arms of each load, their gain over `base(arms)`; then `end({load: arms})`."""
    title(f"Tokens per second at steady load, medians of {run.rounds} rounds", *notes,
          f"requests{'tokens/s':>23}  {'gain':22}out  drafted verified")
    results = {}

    def report(load, arms):
        results[load] = arms
        for arm in arms:
            gain = "{:.2f} [{:.2f}..{:.2f}]".format(*arm.over(base(arms)))
            out, drafted, verified = arm.per_step()
            print(f"{load:8} {arm.name:14}{arm.rate:8.0f}  {gain:19}{out:6.2f}"
                  f"{drafted:9.2f}{verified:9.2f}")
        best, adaptive = best_fixed(arms), arms[-1]
        print(f"{load} request{'s' * (load > 1)}: adaptive verifies {verified:.1f} of "
              f"{run.K} drafts; that is {adaptive.over(arms[0])[0]:.2f} times\n"
              f"plain decoding, {adaptive.over(arms[-3])[0]:.2f} times fixed {run.K}, "
              f"{adaptive.over(best)[0]:.2f} times the best ({best.name}).\n"
              f"Its steps without a prompt took {adaptive.clock():.2f} times what the cost "
              "table said.", flush=True)

    try:
        for load in run.loads:
            race(run, load, costs[load], contestants(run, fixed), report)
    finally:
        if results:
            end(results)

def labelled(done: av.Step) -> tuple[np.ndarray, np.ndarray]:
    """Which drafts (R, D) have a label, up to the first rejection; and are accepted."""
    position = np.arange(done.drafts.shape[1])
    verified, accepted = done.num_verified[:, None], done.accepted[:, None]
    return (position < verified) & (position <= accepted), position < accepted

def print_estimator(results: dict[int, list[Arm]]):
    """Whether what the estimator of verification said came true."""
    predicted, seen, bins = [], [], 10
    for done in itertools.chain(*(arms[-2].steps for arms in results.values())):
        some, accepted = labelled(done)
        before = np.pad(done.survival, ((0, 0), (1, 0)), constant_values=1)[:, :-1]
        predicted.append(done.survival[some] / before[some])
        seen.append(accepted[some])
    predicted, seen = np.concatenate(predicted), np.concatenate(seen)
    title(f"Did it come true? The {len(seen):,} drafts that verification checked",
          "  predicted    mean    seen   drafts   seen (#), predicted (|)")
    which = np.minimum((predicted * bins).astype(int), bins - 1)
    for b in np.unique(which):
        mean, share = predicted[which == b].mean(), seen[which == b].mean()
        bar, at = "#" * round(30 * share), round(30 * mean)
        print(f"  {b / bins:.1f} to {(b + 1) / bins:.1f} {mean:6.2f}  {share:6.2f} "
              f"{(which == b).sum():8}   {bar[:at]:{at}}|{bar[at + 1:]}")
    print(f"  expected calibration error {ece(seen, predicted):.3f} (published: 0.010)")

def show(run: Run, args):
    """The screens, in the order of the module's docstring."""
    load = max([n for n in run.loads if n <= 16], default=min(run.loads))
    costs = print_costs(run, sorted({PICTURE, *run.loads}))
    run.estimator = fit(run)
    print_one_step(run, costs[PICTURE])
    print_text(run, costs[load], load)
    print_race(
        run, costs, [0, min(2, run.K), run.K], lambda arms: arms[0], print_estimator,
        "gain: over plain decoding, ratio of the medians [least..most of the rounds];",
        "out, drafted, verified: tokens per request and step")
    print("\nWhat to try next\n"
          "  python demo.py sweep           every fixed K at 1 to 256 requests\n"
          "  python demo.py study           what the estimator is worth\n"
          "  python demo.py --drafter head  drafts made one by one: less to gain?")


# ---- 5. `python demo.py sweep`: is adaptive on the frontier, or is some fixed K?
def sweep(run: Run, args):
    """Every fixed K and both rules at each load."""
    run = replace(run, turns=3 if run.quick else 6)
    costs = print_costs(run, run.loads)
    run.estimator = fit(run)
    print_race(run, costs, range(run.K + 1), best_fixed, partial(frontier, args.csv),
               "gain: over the best fixed K, ratio of medians [least..most of rounds]")
    for load in sorted({1, 16, 64} & {*run.loads}) if args.peers else ():
        peers(run, load, costs[load])

def frontier(file: str | None, results: dict[int, list[Arm]]):
    """The arms as a chart, and in a CSV file if there is a name for it."""
    title("The frontier: up, more tokens in all; right, faster for each request",
          "log scales; 0, 1, ...: that fixed K; V, A: verification, adaptive")
    arms = [arm for arms in results.values() for arm in arms]
    rates = np.array([[arm.rate / arm.load, arm.rate] for arm in arms])
    low, high, width, height = rates.min(0), rates.max(0), 66, 18
    places = np.log(rates / low) / np.log(high / low).clip(1e-9) * (width, height)
    grid = np.full((height + 1, width + 1), " ")
    for arm, (x, y) in zip(arms, places.round().astype(int)):
        rule = arm.name in ("verification", "adaptive")
        grid[height - y, x] = arm.name[0].upper() if rule else str(arm.K % 10)
    for row in grid:
        print(f"  |{''.join(row).rstrip()}")
    print(f"  +{'-' * width}\n   right: {low[0]:.0f} to {high[0]:.0f} tokens/s of each "
          f"request; up: {low[1]:.0f} to {high[1]:.0f} in all")
    if file:
        lines = ["load,arm,tokens_per_s,least,most,accept_length,drafted,verified"]
        for arm in arms:
            numbers = arm.rate, min(arm.rates), max(arm.rates), *arm.per_step()
            cells = arm.load, arm.name, *np.round(numbers, 3)
            lines.append(",".join(map(str, cells)))
        pathlib.Path(file).write_text("\n".join(lines) + "\n")

def peers(run: Run, load: int, cost: av.CostTable):
    """transformers' own generation: same pair, prompts, settings, numbers of tokens."""
    pair, shortest = run.pair, min(map(len, run.pair.prompts))
    new = min(NEW[0], pair.longest - shortest)
    prompts = [pair.prompts[i % len(pair.prompts)][-shortest:]  # no padding to pay for
               for i in range(max(load, 3))]
    title(f"Beside transformers, tokens per second: {load} requests, {new} tokens each")

    def ours(K, plan):
        estimator = None if plan == "fixed" else copy.deepcopy(run.estimator)
        av.generate(pair.target, pair.verbs(load), prompts, num_speculative_tokens=K,
                    plan=plan, max_new_tokens=new, max_batch_size=load, seed=run.seed,
                    cost=copy.deepcopy(cost), estimator=estimator, **run.law)

    def theirs(**assistant):
        for i in range(0, len(prompts), load):
            ids = torch.tensor(prompts[i:i + load], device=pair.target.device)
            pair.target.generate(
                ids, attention_mask=torch.ones_like(ids), pad_token_id=0, top_k=0,
                max_new_tokens=new, min_new_tokens=new, **run.law, **assistant,
                do_sample=run.law["temperature"] > 0)

    ways = {"generate": theirs}
    if load == 1 and pair.kind == "lm":  # assisted generation takes one at a time
        ways["assisted generation"] = partial(theirs, assistant_model=pair.drafter)
    for name, K, plan in contestants(run, [0, run.K]):
        ways[name] = partial(ours, K, plan)
    rates = {name: [] for name in ways}
    for name, way in list(ways.items()) * (run.rounds + 1):
        began = time.perf_counter()
        way()
        rates[name].append(len(prompts) * new / (time.perf_counter() - began))
    base = np.median(rates["generate"][1:])  # without the first, which warms up
    for name, (_, *measured) in rates.items():
        print(f"{load:8} {name:22}{np.median(measured):8.0f} [{min(measured):.0f}.."
              f"{max(measured):.0f}]   {np.median(measured) / base:.2f} of generate")


# ---- 6. `python demo.py study`. `seen` (n,): whether each draft was accepted.
def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0, -x))

def auc(seen: np.ndarray, score: np.ndarray) -> float:
    """P(an accepted draft scores above a rejected one), a tie counting half."""
    _, which, count = np.unique(score, return_inverse=True, return_counts=True)
    ranks, n = (np.cumsum(count) - (count - 1) / 2)[which], int(seen.sum())
    return (ranks[seen].sum() - n * (n + 1) / 2) / max(n * (len(seen) - n), 1)

def ece(seen: np.ndarray, predicted: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error: |mean predicted - share seen| over equal bins."""
    which = np.minimum((predicted * bins).astype(int), bins - 1)
    return np.abs(np.bincount(which, predicted - seen)).sum() / max(len(seen), 1)

def fit_logistic(x: np.ndarray, seen: np.ndarray, ridge: float = 1e-6) -> np.ndarray:
    """theta (d,) of least summed log-loss + ridge/2 |theta|^2, by Newton's method."""
    def loss(theta):
        return (np.logaddexp(0, (1 - 2 * seen) * (x @ theta)).sum()
                + ridge / 2 * theta @ theta)

    theta, step = np.zeros(x.shape[1]), np.ones(1)
    while np.abs(step).max() > 1e-8:
        p = sigmoid(x @ theta)
        hessian = (x * (p * (1 - p))[:, None]).T @ x + ridge * np.eye(len(theta))
        step = np.linalg.solve(hessian, x.T @ (seen - p) - ridge * theta)
        while loss(theta + step) > loss(theta) and np.abs(step).max() > 1e-9:
            step = step / 2
        theta = theta + step
    return theta

def design(feature: np.ndarray, position: np.ndarray, K: int) -> np.ndarray:
    """Columns of a regression: the feature (or features), an indicator per position."""
    return np.column_stack([feature, np.eye(K)[position]])

def given(look: Callable) -> type:
    """A loop with log-odds from `look(decoder, features, drafts, depths)`, for free."""
    class Given(av.Decoder):
        free_seconds = spent = 0.0

        def survival(self, features, drafts, depths):
            began = time.perf_counter()
            if drafts.size:
                on_device = torch.from_numpy(drafts).to(self.device)
                features[:] = look(self, features, on_device, depths)
            self.spent = time.perf_counter() - began
            self.free_seconds += self.spent
            return super().survival(features, drafts, depths)

        def learn(self, slots, done):
            done.ms -= 1e3 * self.spent
            done.draft_ms -= 1e3 * self.spent
            super().learn(slots, done)
    return Given

def truth(run: Run) -> Callable:
    """The log-odds of sum(min(p, q)), from a second run of the target: the ceiling."""
    shadow = av.SlotLM(run.pair.target, max(run.loads), run.pair.longest)

    def look(decoder, features, drafts, depths):
        (R, D), slots = drafts.shape, np.flatnonzero(decoder.request >= 0)
        lengths = decoder.lengths[slots]
        shadow.commit(slots, np.where(decoder.fresh[slots], 0, lengths))
        logits = shadow.logits(decoder.tokens, lengths, slots, depths)
        rows = ((depths + 1).cumsum() - depths - 1)[:, None] + np.arange(D)
        p = av.warp(logits, **decoder.sampling)[rows.clip(max=len(logits) - 1)]
        chance = torch.minimum(p, decoder.q[:D, :R].transpose(0, 1)).sum(-1)
        return chance.clamp(max=1).logit().clamp(-10, 10).cpu().numpy()
    return look

def head_inputs(decoder, features, drafts, depths) -> np.ndarray:
    """What a confidence head reads, (R, D, H): the block, and the draft before."""
    block, rows = decoder.drafter.head, np.flatnonzero(depths)
    slots = np.flatnonzero(decoder.request >= 0)[rows]
    known, hidden = decoder.drafter.seen
    hidden = hidden[np.searchsorted(known, slots)]
    newest = decoder.tokens[slots, decoder.lengths[slots] - 1]
    before = block.bias_embed(F.pad(drafts, (1, 0))[:, :-1])
    states = before.new_zeros(*drafts.shape, block.head.in_features)
    states[rows] = block.states(hidden, newest, drafts.shape[1])
    return torch.cat([states, before], -1).float().cpu().numpy()

def collect(run: Run) -> tuple[dict, dict, list[av.Step]]:
    """{what: (n, ...)} of drafts of even prompts, and of odd ones; and the steps."""
    now, parts, steps, load, ceiling = {}, [], [], max(run.loads), truth(run)

    def look(decoder, features, drafts, depths):
        (R, D), temperature = drafts.shape, decoder.sampling["temperature"] or 1
        q = (decoder.draft_logits[:D, :R].transpose(0, 1) / temperature).softmax(-1)
        drawn = q.gather(2, drafts[..., None])[..., 0]
        now.update({
            "logit q_max": features, "entropy of q": torch.special.entr(q).sum(-1),
            "log q_max - log q_2nd": -q.topk(2).values.log().diff()[..., 0],
            "q(drawn), NOT lossless": drawn.logit().clamp(-10, 10),
            "truth": ceiling(decoder, features, drafts, depths)})
        if run.pair.kind == "block":
            now["trained head"] = head_inputs(decoder, features, drafts, depths)
        return features

    decoder = run.decoder(load, cls=given(look))
    stream, n = requests(run.pair, load, run.seed), 0
    while n < (3_000 if run.quick else 20_000):
        av.refill(decoder, stream)
        done = decoder.step()
        some, accepted = labelled(done)
        row, position = np.nonzero(some)
        steps.append(done)
        n += len(row)
        if len(row):
            parts.append({"seen": accepted[some], "position": position,
                          "prompt": done.requests[row] % len(run.pair.prompts),
                          **{name: np.asarray(x)[some] for name, x in now.items()}})
    drafts = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return *(({name: x[drafts["prompt"] % 2 == odd] for name, x in drafts.items()})
             for odd in range(2)), steps

def batch_fit(K: int, drafts: dict, name="logit q_max") -> np.ndarray:
    """The best fit to all labels: a feature's slopes, an intercept per position."""
    x = design(drafts[name], drafts["position"], K)
    return fit_logistic(x, drafts["seen"], 1.0 if name == "trained head" else 1e-6)

def chances(K: int, drafts: dict, theta: np.ndarray, name="logit q_max") -> np.ndarray:
    """What a fit makes of some drafts."""
    return sigmoid(design(drafts[name], drafts["position"], K) @ theta)

def online_fit(run: Run, steps: list[av.Step], most=None, **settings) -> np.ndarray:
    """That of the estimator, shown the even prompts of each step, or some of them."""
    estimator = av.AcceptanceEstimator(run.K, **settings)
    for done in steps:
        rows = np.flatnonzero(done.requests % len(run.pair.prompts) % 2 == 0)[:most]
        labels = done.features, done.num_verified, done.accepted
        estimator.observe(*(x[rows] for x in labels))
    return np.append(estimator.slope, estimator.intercepts)

def line(name: str, *cells):
    """A line of a table: what it is about, and cells of eight columns."""
    texts = [cell if isinstance(cell, str) else f"{cell:.3f}" for cell in cells]
    print(f"{name:24}" + "".join(f"{text:>8}" for text in texts), flush=True)

def print_kinds(run: Run) -> tuple:
    """How each kind of drafter is accepted; what `collect` gave of the pair's own."""
    K, kinds = run.K, dict.fromkeys([run.pair.kind, *(KINDS if run.pair.kinds else [])])
    for kind in kinds:
        mine = run if kind == run.pair.kind else replace(run, pair=byte_pair(
            run.pair.target.device, kind, run.quick, [], run.seed))
        mine.estimator = fit(mine)
        kinds[kind] = mine, *collect(mine)
    title(f"Kinds of drafters: all {K} drafts verified, {max(run.loads)} requests",
          "accepted: draft 1 to K, if all before it were; AUC, ECE: of the online fit")
    line("", "length", "AUC", "ECE", "slope")
    for kind, (_, fitted, held, steps) in kinds.items():
        theta = batch_fit(K, fitted)
        online = chances(K, held, online_fit(run, steps, refit_every=10))
        line(kind, np.concatenate([done.num_committed for done in steps]).mean(),
             auc(held["seen"], online), ece(held["seen"], online), theta[0])
        line("  accepted", *(fitted["seen"][fitted["position"] == i].mean()
                             for i in range(K)))
        line("  intercepts", *theta[1:])
    title(f"What they gain, over fixed {K} and over the best fixed K (plain included)",
          "drafting: its share of a step in which all is drafted and verified",
          f"{'verification':>56}{'adaptive':>16}")
    line("", "drafting", "best K", *2 * [f"over {K}", "best"])
    for (kind, (mine, *_)), load in itertools.product(kinds.items(), run.loads):
        cost = measure(mine, load)
        share = 1 / (1 + cost.verify_ms(load * (K + 1)) / cost.draft_ms(K))

        def report(load, arms):
            others = arms[-3], best_fixed(arms)
            line(f"{kind} at {load}", f"{share:.0%}", f"{others[1].K}",
                 *(rule.over(other)[0] for rule in arms[-2:] for other in others))

        race(mine, load, cost, contestants(run, [0, 1, 2, min(3, K), K]), report)
    return kinds[run.pair.kind][1:]

def print_features(run: Run, fitted: dict, held: dict, steps: list[av.Step]):
    """What tells which drafts will be accepted, and what each fit of it is worth."""
    def scores(name, predicted):
        line(name, *(score(held["seen"], predicted) for score in (auc, ece)))

    title(f"Which feature tells what will be accepted? Drafter: {run.pair.kind}",
          f"fitted on half of the prompts, scored on {len(held['seen']):,} drafts of "
          "others", "trained head: DSpark's, on the block; truth: sum(min(p, q))")
    line("", "AUC", "ECE")
    predicted = {name: chances(run.K, held, batch_fit(run.K, fitted, name), name)
                 for name in fitted if name not in ("seen", "position", "prompt")}
    predicted["truth"] = sigmoid(held["truth"])
    for name, chance in predicted.items():
        scores(name, chance)
    scores("q_max without a fit", sigmoid(held["logit q_max"]))
    print("online fits of logit q_max, refitted every n steps; few: of one request")
    for n, most, damping in (50, None, 50), (10, None, 50), (10, 1, 50), (10, 1, 0):
        name = f"  every {n}, damp {damping}{', few' * bool(most)}"
        theta = online_fit(run, steps, most, refit_every=n, damping=damping)
        scores(name, chances(run.K, held, theta))
    print("AUC by position")
    here = [held["position"] == i for i in range(run.K)]
    for name, chance in predicted.items():
        line("  " + name, *(auc(held["seen"][i], chance[i]) for i in here))

def biased_rules() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{rule: (law of the next token, the target's)}, by trying all drafts."""
    p, cost = np.full(2, 0.5), av.CostTable({2: 1e-9}, {1: 1, 2: 1.9, 3: 1.9, 4: 2.8})
    one = {(): np.array([0.2, 0.8])}  # the drafter's law by the drafts before
    two = {(): p, (0,): np.array([0.99, 0.01]), (1,): p}  # sure of itself after a

    def law(q, K, verified):
        total, q_0 = np.zeros(2), q[()]
        for drafts in itertools.product(range(2), repeat=K):
            chance = math.prod(q[drafts[:i]][x] for i, x in enumerate(drafts))
            accept = min(1, p[drafts[0]] / q_0[drafts[0]])
            residual = np.maximum(p - q_0, 0)
            checked = (1 - accept) * residual / max(residual.sum(), 1e-300)
            checked[drafts[0]] += accept
            total += chance * (checked if verified(drafts) else p)
        return total, p

    def trimmed(drafts, budget=None):  # with q_max itself as the confidence
        survival = np.cumprod([[two[drafts[:i]].max() for i in range(2)]], 1)
        budget = av.draft_budget(survival, cost)[1] if budget is None else budget
        return av.trim(survival, budget).item()

    laws = {"verify if q(drawn token) >= 0.5": law(one, 1, lambda x: one[()][x] >= 0.5),
            "verify if q_max >= 0.5 (in use)": law(one, 1, lambda _: max(one[()]) > .5),
            "budget from this step's survivals": law(two, 2, trimmed)}
    for budget in range(3):
        laws[f"a budget of {budget} from before (in use)"] = law(
            two, 2, partial(trimmed, budget=budget))
    return laws

def print_ingredients(run: Run, fitted: dict):
    """What verification gains with each confidence."""
    K, load = run.K, max(run.loads)
    looks = {"q_max without a fit": lambda decoder, features, *_: features,
             "q_max >= .5": lambda decoder, features, *_: 10 * np.sign(features),
             "truth": truth(run)}
    if "trained head" in fitted:
        theta = batch_fit(K, fitted, "trained head")
        looks["trained head"] = lambda decoder, features, *more: (
            head_inputs(decoder, features, *more) @ theta[:-K]
            + theta[-K:][:features.shape[1]]).clip(-10, 10)
    arms = [(f"fixed {K}", K, "fixed"), ("online fit", K, "verification")]
    for name, look in looks.items():  # damped so much that it does not learn
        still = av.AcceptanceEstimator(K, slope=1, intercept=0, ridge=1e6, damping=1e6)
        arms.append((name, K, "verification", {"estimator": still, "cls": given(look)}))
    title(f"What a good confidence buys: verification, {load} requests at once",
          f"gain over fixed {K}, its least and most of the rounds")
    line("", "tokens/s", "gain", "least", "most", "out", "checked")

    def report(load, arms):
        for arm in arms:
            line(arm.name, f"{arm.rate:.0f}", *arm.over(arms[0]), *arm.per_step()[::2])

    race(replace(run, rounds=2 * run.rounds), load, measure(run, load), arms, report)

def study(run: Run, args):
    """All of it, each table as soon as it is measured."""
    if len(run.pair.prompts) < 2:
        raise ValueError("the study fits on some prompts and scores on others: give 2")
    fitted, held, steps = print_kinds(run)
    print_features(run, fitted, held, steps)
    if run.pair.kinds:
        title("Slope and first intercept by kind of text: which of them follows it?")
    for i, kind in enumerate(run.pair.kinds):
        here = fitted["prompt"] % len(run.pair.kinds) == i
        line(kind, *batch_fit(run.K, {name: x[here] for name, x in fitted.items()})[:2])
    title("What a rule does that looks at the drawn token: P(first token is a), for .5")
    for rule, (law, _) in biased_rules().items():
        print(f"  {rule:38}{law[0]:.3f}")
    print_ingredients(run, fitted)


# ---- 7. The command line.
COMMANDS = {  # name: what it calls; loads, rounds, loads of --quick
    "show": (show, "1,16,64", 4, "1,16"), "sweep": (sweep, "1,16,64,256", 11, "1,16"),
    "study": (study, "16,64", 5, "16,64")}

def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("command", nargs="?", choices=COMMANDS, default="show")
    flag("--quick", action="store_true", help="a check, in half a minute")
    flag("--drafter", choices=KINDS, default="block", help="of the built-in pair")
    flag("--target", metavar="NAME", help="hub name or folder of a causal LM")
    flag("--draft", metavar="NAME", help="a smaller one, of the same vocabulary")
    flag("--prompts", metavar="FILE", help="your own prompts, one per line")
    flag("--loads", metavar="N,N,N", help="requests at once")
    flag("-k", metavar="K", type=int, default=7, help="drafts per request: 7")
    flag("--temperature", type=float, default=1.0)
    flag("--top-p", type=float, default=0.95)
    flag("--seed", type=int, default=0)
    flag("--rounds", type=int, help="of the race: 4, study 5, sweep 11, --quick 2")
    flag("--csv", metavar="FILE", help="sweep: where to write its table, too")
    flag("--peers", action="store_true", help="sweep: transformers' generate, too")
    args = parser.parse_args()
    args.call, loads, rounds, few = COMMANDS[args.command]
    args.loads = args.loads or (few if args.quick else loads)
    args.rounds = args.rounds or (2 if args.quick else rounds)
    if (args.target is None) != (args.draft is None):
        parser.error("--target and --draft go together")
    if args.target is None and args.drafter.startswith("block") and args.k > DEPTH:
        parser.error(f"the built-in block drafts {DEPTH} tokens at most")
    if args.command != "sweep" and (args.csv or args.peers):
        parser.error("--csv and --peers belong to sweep")
    try:  # now, not after the measurement
        args.loads = sorted({int(n) for n in args.loads.split(",")})
        if min(args.k, args.rounds, *args.loads) < 1:
            raise ValueError("-k, --loads and --rounds start at 1")
        av.warp(torch.zeros(1), args.temperature, top_p=args.top_p)
        torch.manual_seed(args.seed)
        if args.csv:
            open(args.csv, "a").close()
    except (OSError, ValueError, RuntimeError) as error:
        parser.error(str(error))
    return args

def main():
    """Do what the command line asks for."""
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a sign shows "?"
    args, device = arguments(), "cuda" if torch.cuda.is_available() else "cpu"
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        pair = find_pair(args, torch.device(device))
        run = Run(pair, args.k, dict(temperature=args.temperature, top_p=args.top_p),
                  args.loads, args.seed, args.rounds, args.quick)
        introduce(run)
        if device == "cuda":
            pair.target.bfloat16(), pair.drafter.bfloat16()  # from here on speed counts
        args.call(run, args)
    except KeyboardInterrupt:
        sys.exit("\nstopped; what was measured so far stands above")
    except (ValueError, NotImplementedError, FloatingPointError) as error:
        sys.exit(f"cannot run this pair: {error}")  # as av.py says what and why
    except BrokenPipeError:  # the reader of a pipe has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

if __name__ == "__main__":
    main()

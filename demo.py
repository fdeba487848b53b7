# SPDX-License-Identifier: MIT
"""Adaptive verification on a real pair of models: `python demo.py`.

What you will see, in this order:
  1. the machine and the pair, and that greedy decoding writes what `generate` writes;
  2. what a step costs here, measured;
  3. one real step of four requests as a grid: which drafts were verified, and how the
     budget follows from survivals and costs, in numbers that you can redo;
  4. a text being written: drafts accepted, rejected and trimmed;
  5. THE TABLE: plain decoding, fixed K, the published rule (verification) and adaptive,
     which also chooses how far to draft, at 1, 16 and 64 requests at once;
  6. what the estimator learned, and whether its predictions came true.

`python demo.py sweep` tries every fixed K at 1 to 256 requests.
`python demo.py study` compares kinds of drafters and repeats the published study.
No GPU and no network are needed: a small pair, whose tokens are bytes, is trained on
first use and kept. `--drafter block | head | lm` chooses its drafter, and `--target NAME
--draft NAME` any two causal LMs of one vocabulary, by hub name or folder.
It is no benchmark of large models. `--quick` is a check and measures nothing to quote.
"""
# ruff: noqa: E402
import os
import signal

if __name__ == "__main__":  # the libraries below take seconds: Ctrl-C is quiet then too
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import copy
import csv
import hashlib
import itertools
import math
import pathlib
import platform
import pydoc_data.topics
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import av


# ------------------------------------------------------------------------------------
# 1. The built-in pair: a byte-level Llama and a drafter for it, trained on first use on
#    texts of Python's library.

LENGTH = 256  # bytes per training sequence: positions beyond it are untrained
BATCH = 9  # three sequences of each workload
DEPTH = 7  # drafts per step that the drafters learn to make
STRIDE = 4  # drafters learn at every fourth byte: its neighbours teach much the same
VOCAB = 256
# What two CPU cores reach on unseen text, at least, as (tables, code, prose): nats per
# byte for the target, accept length at K = 7 for the drafters.
USUAL = {"target": (0.95, 1.95, 1.65), "block": (3.9, 3.2, 3.5), "lm": (5.2, 4.7, 4.8),
         "block-unbiased": (3.7, 2.9, 3.3), "head": (4.8, 4.5, 4.7)}


def status(text: str = ""):
    """A passing line on a terminal, replaced by the next one; nothing in a file."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def workloads(held_out: bool = False) -> dict[str, bytes]:
    """Three texts of unlike difficulty from Python's library: 90 % or the rest."""
    lib = pathlib.Path(sysconfig.get_path("stdlib"))
    tables = [*lib.glob("encodings/cp*.py"), *lib.glob("encodings/iso*.py")]
    code = [*lib.glob("*.py")]
    for package in ("asyncio concurrent email html http importlib json logging "
                    "unittest urllib xml").split():
        code += lib.glob(f"{package}/**/*.py")
    topics = pydoc_data.topics.topics
    documents = {
        "tables": [file.read_bytes() for file in sorted(tables)],
        "code": [file.read_bytes() for file in sorted(code)],
        "prose": [topics[name].encode() for name in sorted(topics)],
    }
    texts = {}
    for name, parts in documents.items():
        limit, size, split = 0.9 * sum(map(len, parts)), 0, 0
        while size < limit:  # whole documents, so that none is half seen
            size, split = size + len(parts[split]), split + 1
        texts[name] = b"\n".join(parts[split:] if held_out else parts[:split])
    return texts


def llama(hidden_size: int, layers: int, mlp: int) -> LlamaForCausalLM:
    """An untrained Llama on bytes; few heads keep attention and cache small."""
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=hidden_size, num_hidden_layers=layers, intermediate_size=mlp,
        num_attention_heads=max(2, hidden_size // 128), num_key_value_heads=1,
        head_dim=64, vocab_size=VOCAB, max_position_embeddings=512,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        pad_token_id=None))


def build_target(seed: int = 0, large: bool = False) -> LlamaForCausalLM:
    """An untrained target: 3 layers of 256; large, for a GPU: 12 layers of 768."""
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it was
        torch.manual_seed(seed)
        return llama(768, 12, 3072) if large else llama(256, 3, 1024)


class Block(nn.Module):
    """Drafts a whole block in one pass (DFlash-like), from the target's hidden state.

    No position sees the drafts before it. biased (DSpark-like): the token drawn just
    before a position adds a low-rank bias to its logits, one small product per draft.
    """

    def __init__(self, hidden_size: int, biased: bool = True):
        super().__init__()
        d, rank = hidden_size * 3 // 4, 64
        self.biased = biased
        self.read = nn.Linear(hidden_size, d, bias=False)
        self.embed = nn.Embedding(VOCAB, d)
        self.position_embed = nn.Parameter(torch.randn(DEPTH, d) * 0.3)
        # The norms have no weights of their own: the matrix behind each can learn them.
        self.norm = nn.RMSNorm(d, elementwise_affine=False)
        self.up = nn.Linear(d, 2 * d, bias=False)
        self.down = nn.Linear(2 * d, d, bias=False)
        self.head = nn.Linear(d, VOCAB, bias=False)
        if biased:
            self.bias_embed = nn.Embedding(VOCAB, rank)
            self.bias_head = nn.Linear(rank, VOCAB, bias=False)
            nn.init.zeros_(self.bias_head.weight)  # no bias until there is one to learn

    def forward(self, hidden: Tensor, token: Tensor, depth: int = DEPTH) -> Tensor:
        """Logits of the first positions, (..., H) and (...,) -> (..., depth, V)."""
        both = self.read(hidden) + self.embed(token)
        z = both[..., None, :] + self.position_embed[:depth]
        z = z + self.down(F.silu(self.up(self.norm(z))))
        return self.head(self.norm(z))

    def bias(self, token: Tensor) -> Tensor:
        """To add to the logits behind this token, (...,) -> (..., V)."""
        return self.bias_head(self.bias_embed(token))


class RecurrentHead(nn.Module):
    """Drafts one token at a time from a state read off the target (MTP-like)."""

    def __init__(self, hidden_size: int):
        super().__init__()
        d = hidden_size // 2
        self.read = nn.Linear(hidden_size, d, bias=False)
        self.embed = nn.Embedding(VOCAB, d)
        self.norm = nn.RMSNorm(2 * d, elementwise_affine=False)
        self.up = nn.Linear(2 * d, 2 * d, bias=False)
        self.down = nn.Linear(2 * d, d, bias=False)
        self.last_norm = nn.RMSNorm(d, elementwise_affine=False)
        self.head = nn.Linear(d, VOCAB, bias=False)

    def start(self, hidden: Tensor) -> Tensor:
        """The state before the first draft, (..., H) -> (..., S)."""
        return self.read(hidden)

    def step(self, state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Read the newest token: the state after it, and the logits of the next one."""
        both = torch.cat([state, self.embed(token).to(state.dtype)], -1)
        state = state + self.down(F.silu(self.up(self.norm(both))))
        return state, self.head(self.last_norm(state))


def build_drafter(kind: str, hidden_size: int, seed: int = 0) -> nn.Module:
    """An untrained drafter for a target of this hidden size."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "lm":
            return llama(hidden_size // 2, 1, hidden_size * 4 // 3)
        if kind == "head":
            return RecurrentHead(hidden_size)
        return Block(hidden_size, biased={"block": True, "block-unbiased": False}[kind])


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside, AdamW for embeddings, norms and output heads."""
    rest = {name: weight for name, weight in model.named_parameters()
            if weight.ndim != 2 or "embed" in name or "head" in name}
    inner = [weight for name, weight in model.named_parameters() if name not in rest]
    # A Llama wants gentle rates: after 190 steps the target is at .83 / 1.86 / 1.57
    # nats with these, at 1.09 / 2.05 / 1.72 with (1e-2, 6e-3).
    fast = not isinstance(model, LlamaForCausalLM)
    matrix_lr, other_lr = (1e-2, 1e-2) if fast else (5e-3, 6e-3)
    return [torch.optim.Muon(inner, lr=matrix_lr, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest.values(), lr=other_lr, betas=(0.9, 0.98),
                              weight_decay=0.0, fused=True)]


def training_bytes(texts: list[bytes], generator: torch.Generator) -> Tensor:
    """Sequences from random places, the texts in turns: (BATCH, LENGTH + 1)."""
    rows = []
    for i in range(BATCH):
        text = texts[i % len(texts)]
        at = int(torch.randint(len(text) - LENGTH, (), generator=generator))
        rows.append(list(text[at:at + LENGTH + 1]))
    return torch.tensor(rows)


def target_loss(target) -> Callable:
    """The target learns to predict the next byte."""
    def loss(ids, fraction):
        logits = target(input_ids=ids[:, :-1], use_cache=False).logits.float()
        nats = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        return nats, f"target: {nats:.2f} nats per byte"
    return loss


def drafting(drafter: nn.Module, hidden: Tensor, token: Tensor) -> Callable:
    """A function of (i, the token before) that gives the logits of draft i, from 0 on.

    hidden: the target's, after the last token it read; token: the one it then drew.
    """
    if isinstance(drafter, Block):
        block = drafter(hidden, token)
        bias = drafter.bias if drafter.biased else lambda token: 0
        return lambda i, before: block[..., i, :] + (bias(before) if i else 0)
    state = drafter.start(hidden)

    def step(i, before):
        nonlocal state
        state, logits = drafter.step(state, before)
        return logits
    return step


def drafter_loss(target, drafter) -> Callable:
    """The drafter learns the laws p of a target that no longer changes."""
    starts = itertools.cycle(range(STRIDE))

    def pairs(text, hidden, p):
        """The drafter's logits and the target's law for draft 0, 1, ... at many places.

        As if the drafts before had been the text's own bytes, so that one pass of the
        target will do. For an LM, which does not know how deep it drafts: draft 0 only.
        """
        if isinstance(drafter, LlamaForCausalLM):
            yield drafter(input_ids=text, use_cache=False).logits, p
            return
        at = torch.arange(next(starts), LENGTH - DEPTH, STRIDE, device=text.device)
        logits = drafting(drafter, hidden[:, at], text[:, at + 1])
        for i in range(DEPTH):
            yield logits(i, text[:, at + 1 + i]), p[:, at + 1 + i]

    def loss(ids, fraction):
        text, imitation, accepted = ids[:, :-1], 0.0, []
        with torch.no_grad():
            hidden = target.model(input_ids=text, use_cache=False).last_hidden_state
            p = target.lm_head(hidden).float().softmax(-1)
        for logits, law in pairs(text, hidden, p):
            log_q = logits.float().log_softmax(-1)
            # A later draft counts less: an earlier one, rejected, often takes it along.
            weight = 0.8 ** len(accepted)
            imitation = imitation - weight * (law * log_q).sum(-1).mean()
            accepted.append(torch.minimum(law, log_q.exp()).sum(-1))
        # Cross entropy starts the drafter off. Then the number of accepted drafts takes
        # over, which is what counts in use.
        late = 0.8 * min(1.0, 2 * fraction)
        length = torch.stack(accepted).cumprod(0).sum(0).mean()
        words = f"drafter: {accepted[0].mean():.0%} of first drafts accepted"
        return (1 - late) * imitation / 3 - late * length, words
    return loss


def faster_in_bfloat16(model, loss: Callable, ids: Tensor, seconds: float) -> bool:
    """Whether this machine trains faster in bfloat16; some CPUs only imitate it."""
    best = {}
    for bfloat16 in (False, True):
        times, end = [], time.monotonic() + seconds
        while len(times) < 2 or time.monotonic() < end:  # the first step is a slow one
            start = time.monotonic()
            with torch.autocast(ids.device.type, torch.bfloat16, enabled=bfloat16):
                value, _ = loss(ids, 0.5)
            value.backward()
            if ids.is_cuda:  # the clock of the host must not run ahead
                torch.cuda.synchronize()
            times.append(time.monotonic() - start)
            model.zero_grad()
        best[bfloat16] = min(times)
    return best[True] < best[False]


def train(model, loss: Callable, seconds: float, show: Callable = status) -> int:
    """Train until the time is up; the number of steps that this took.

    loss(ids, fraction of the time) gives what to descend and a text; show displays it.
    """
    generator, texts = torch.Generator().manual_seed(0), list(workloads().values())
    optims, device = optimizers(model), next(model.parameters()).device
    groups = [(group, group["lr"]) for optim in optims for group in optim.param_groups]
    model.train()
    if isinstance(model, LlamaForCausalLM):  # the fused one's backward is slow on a CPU
        model.set_attn_implementation("eager")
    trial = training_bytes(texts, generator).to(device)
    bfloat16 = faster_in_bfloat16(model, loss, trial, min(1.0, seconds / 20))
    steps, start, shown = 0, time.monotonic(), 0.0
    while (now := time.monotonic() - start) < seconds:
        done = now / seconds
        for group, peak in groups:  # by the clock: a slow machine decays in time too
            group["lr"] = peak * min(1.0, done / 0.03 + 0.03, (1 - done) / 0.6)
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            value, text = loss(training_bytes(texts, generator).to(device), done)
        value.backward()
        for optim in optims:
            optim.step()
            optim.zero_grad()
        steps += 1
        if now - shown > 0.5:
            shown = now
            show(f"[{'#' * round(30 * done):30}] {seconds - now:3.0f} s left  {text}")
    show("")
    model.eval()
    if isinstance(model, LlamaForCausalLM):
        model.set_attn_implementation("sdpa")
    return steps


@torch.no_grad()
def held_out(target, drafter, kind: str, rows: int = 100, context: int = 100) -> dict:
    """On unseen text by workload: (target's nats per byte, accept length at K = DEPTH).

    A draft is accepted with probability sum(min(p, q)). Adding these up needs fewer
    rows than counting accepted drafts. Temperature 1 and top-p .95, as in the demo.
    """
    results, device = {}, target.device
    for name, text in workloads(held_out=True).items():
        generator = torch.Generator().manual_seed(1)
        places = torch.randint(len(text) - context, (rows,), generator=generator)
        ids = torch.tensor([list(text[at:at + context]) for at in places]).to(device)
        hidden = target.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = target.lm_head(hidden)
        nats = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        generator, laws = torch.Generator(device).manual_seed(1), []
        token = av.sample(av.warp(logits[:, -1], top_p=0.95), generator)
        if kind != "lm":
            draft = drafting(drafter, hidden[:, -1], token)
        for i in range(DEPTH):
            ids = torch.cat([ids, token[:, None]], 1)
            if kind == "lm":
                logits = drafter(input_ids=ids, use_cache=False).logits[:, -1]
            else:
                logits = draft(i, token)
            laws.append(av.warp(logits, top_p=0.95))
            token = av.sample(laws[-1], generator)
        scored = target(input_ids=ids, use_cache=False).logits[:, -DEPTH:]
        p, q = av.warp(scored, top_p=0.95), torch.stack(laws, 1)
        confidence = torch.minimum(p, q).sum(-1).clamp(max=1)
        results[name] = nats.item(), 1 + confidence.cumprod(1).sum(1).mean().item()
    return results


def report(target, drafter, kind: str, steps: str, quick: bool):
    """Show what the training has come to, or that the machine was too slow for it."""
    results = held_out(target, drafter, kind, rows=30 if quick else 100)
    nats, lengths = zip(*results.values(), strict=True)
    print(f"after {steps}, on unseen text:")
    print(" " * 38 + "".join(f"{name:>8}" for name in results))
    print(f"  {'target, nats per byte':36}" + "".join(f"{x:8.2f}" for x in nats))
    accept = f"{kind}, accept length at K = {DEPTH}"
    print(f"  {accept:36}" + "".join(f"{x:8.1f}" for x in lengths))
    far = [x > usual + 0.25 for x, usual in zip(nats, USUAL["target"], strict=True)]
    far += [x < 0.8 * usual for x, usual in zip(lengths, USUAL[kind], strict=True)]
    if any(far) and not quick:
        print("This machine was too slow or too busy to train the pair well in time:\n"
              "fewer drafts than usual are accepted, and drafting gains less.")


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
    """Load the weights kept under a name; or leave the model as it is and say why."""
    file = cache_folder() / f"{name}.pt"
    try:
        kept = torch.load(file, map_location="cpu", weights_only=True)
        weights, wanted = kept["weights"], model.state_dict()
        shapes, others = [{n: w.shape for n, w in x.items()} for x in (weights, wanted)]
        if shapes != others:
            raise ValueError("other shapes")
        if kept["checksum"] != checksum(weights):
            raise ValueError("changed since it was written")
        if not all(w.isfinite().all() for w in weights.values()):
            raise ValueError("not finite")
        model.load_state_dict(weights)
    except FileNotFoundError:
        return False
    except Exception as error:  # whatever is wrong with it, the cure is the same
        why = error if type(error) is ValueError else type(error).__name__
        print(f"{file} is of no use ({why}): training anew")
        return False
    return True


def keep(name: str, model: nn.Module):
    """Keep the weights under a name; if that cannot be, say so and go on."""
    folder, weights = cache_folder(), model.state_dict()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept = {"weights": weights, "checksum": checksum(weights)}
        with tempfile.TemporaryDirectory(dir=folder) as temp:  # never half a file
            torch.save(kept, f"{temp}/new.pt")
            os.replace(f"{temp}/new.pt", folder / f"{name}.pt")
    except (OSError, RuntimeError) as error:  # torch reports a full disk as the latter
        print(f"what was trained cannot be kept ({error}): it will be trained again")


def trained(what: str, model, origin: str, loss: Callable, quick: bool) -> str:
    """Give a model its weights, from the cache ("") or by training (a word on that).

    origin: what they come from, a part of the file's name: for another text or another
    target they are not found.
    """
    size = sum(w.numel() for w in model.parameters())
    name = f"{'quick-' * quick}{what}-{size}-seed0-{origin}"
    if restore(name, model):
        model.eval()
        return ""
    seconds = (7 if quick else 92) if what == "target" else (3 if quick else 44)
    print(f"training the built-in {what} for {seconds} s, this once; to be kept in",
          cache_folder(), flush=True)
    steps = train(model, loss, seconds)
    keep(name, model)
    return f"{steps} steps of the {what}"


def built_in_pair(device: torch.device, kind: str = "block",
                  quick: bool = False) -> tuple[LlamaForCausalLM, nn.Module]:
    """The built-in target and drafter, from the cache, or trained now and kept there.

    First the one, then the other: beside a target that still learns a drafter chases a
    moving law, and needs far longer. quick: ten seconds in all, under names of its own.
    """
    text = hashlib.sha256(b"".join(workloads().values())).hexdigest()[:8]
    target = build_target(large=device.type == "cuda").to(device)
    drafter = build_drafter(kind, target.config.hidden_size).to(device)
    words = [trained("target", target, text, target_loss(target), quick)]
    origin = f"{text}-{checksum(target.state_dict())[:8]}"
    words.append(trained(kind, drafter, origin, drafter_loss(target, drafter), quick))
    if any(words):
        report(target, drafter, kind, ", ".join(filter(None, words)), quick)
    return target, drafter


# ------------------------------------------------------------------------------------
# 2. Pairs, prompts, requests.

PROMPT, NEW = 48, (128, 192)  # bytes of a built-in prompt; new tokens, from and to
FEW = 4  # below this, requests are shorter: so each round sees several of each kind
HUB_PROMPTS = [f"{ask} {what}." for what in (
    "the tides", "the game of chess", "binary search", "bread", "prime numbers") for ask in (
    "Write commented Python code about", "Tell me a short story about", "List facts about")]


class BlockDrafter(av.HeadDrafter):
    """The block by the loop's verbs: one pass for all positions, and then a bias each."""

    def next_logits(self, tokens, lengths, slots, position, depth):
        state, token = self.recall(position, tokens, lengths, slots)
        if position == 0:
            state = self.head(state, token, depth)  # (r, depth, V)
            self.kept = slots, state
        bias = self.head.bias(token) if position and self.head.biased else 0
        return state[:, position] + bias


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
        return (av.HeadDrafter if self.kind == "head" else BlockDrafter)(self.drafter)

    @property
    def longest(self) -> int:
        """The most tokens of a request, within the positions that the models have."""
        configs = [getattr(model, "config", None) for model in (self.target, self.drafter)]
        limit = min(getattr(c, "max_position_embeddings", 0) or 10**9 for c in configs)
        most = max(map(len, self.prompts))
        if most + 32 > limit:
            raise ValueError(f"a prompt of {most} tokens leaves too little of {limit} positions")
        return min(limit, most + NEW[1])


def decode_bytes(ids: list[int]) -> str:
    """A text of bytes, also where it is no UTF-8."""
    return bytes(ids).decode("utf-8", "replace")


def byte_pair(device: torch.device, kind: str, quick: bool, lines: list[str],
              seed: int) -> Pair:
    """The built-in pair, to go on with given lines or with unseen text of three kinds."""
    models, name = built_in_pair(device, kind, quick), "built in, its tokens are bytes"
    if lines:  # their ends, because only these positions were trained
        prompts = [list(line.encode()[-(LENGTH - NEW[1]):]) for line in lines]
        return Pair(name, kind, *models, prompts, decode_bytes)
    rng, prompts, texts = random.Random(seed), [], workloads(held_out=True)
    for text in list(texts.values()) * 100:
        start = rng.randrange(len(text) - PROMPT)
        prompts.append(list(text[start:start + PROMPT]))
    return Pair(name, kind, *models, prompts, decode_bytes, kinds=list(texts))


def named_pair(names: tuple[str, str], device: torch.device, lines: list[str]) -> Pair:
    """Any two causal LMs of one vocabulary, by hub name or folder, in float32 at first."""
    tokenizer, other = [transformers.AutoTokenizer.from_pretrained(name) for name in names]
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if ours != theirs:
        odd = min(ours.items() ^ theirs.items())[0]
        sys.exit(f"the vocabularies differ: {names[0]} has {len(ours)} tokens, {names[1]} has "
                 f"{len(theirs)}; {odd!r} is {ours.get(odd)} in the first and "
                 f"{theirs.get(odd)} in the second. A drafter must speak the target's tokens.")
    models, prompts = [], []
    for name in names:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True)
        if info["missing_keys"]:  # transformers would make them up
            raise ValueError(f"{name} lacks weights: {', '.join(sorted(info['missing_keys']))}")
        models.append(model.to(device).eval())
    for line in lines or HUB_PROMPTS:
        if chat := tokenizer.chat_template:
            line = tokenizer.apply_chat_template([{"role": "user", "content": line}],
                                                 tokenize=False, add_generation_prompt=True)
        # subtle: a chat template brings its own start token; two were never trained on.
        prompts.append(tokenizer(line, add_special_tokens=not chat).input_ids)
        if not prompts[-1]:
            raise ValueError(f"the tokenizer makes no token of the prompt {line!r}")
    eos = models[0].generation_config.eos_token_id
    return Pair(" + ".join(names), "lm", *models, prompts, tokenizer.decode,
                eos if isinstance(eos, list) else [] if eos is None else [eos])


def find_pair(args, device: torch.device) -> Pair:
    """The pair that the flags name, or the built-in one."""
    lines = []
    if args.prompts is not None:
        try:
            lines = pathlib.Path(args.prompts).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            sys.exit(f"cannot read --prompts {args.prompts}: {error}")
        lines = [line for line in lines if line.strip()]
        if not lines:
            sys.exit(f"--prompts {args.prompts}: no line with a prompt in it")
    if args.target is None:
        return byte_pair(device, args.drafter, args.quick, lines, args.seed)
    try:
        return named_pair((args.target, args.draft), device, lines)
    except Exception as error:  # each file of a folder has its own ways to be broken
        sys.exit(f"cannot load {args.target} with {args.draft}: {type(error).__name__}: "
                 f"{' '.join(str(error).split())[:400]}")


def requests(pair: Pair, load: int, seed: int):
    """Endless (number, prompt, max_new_tokens), the same for every arm."""
    rng = random.Random(seed)
    for i in itertools.count():
        prompt = pair.prompts[i % len(pair.prompts)]
        new = min(rng.randint(*NEW) // (3 if load < FEW else 1), pair.longest - len(prompt))
        # The first ones are cut short at random: else they would all end at once.
        yield i, prompt, rng.randint(1, new) if i < load else new


@dataclass
class Run:
    """A pair, and the settings it runs with."""
    pair: Pair
    K: int
    law: dict  # temperature, top_p
    loads: list[int]  # requests at once
    seed: int = 0
    rounds: int = 7
    quick: bool = False
    estimator: av.AcceptanceEstimator | None = None  # fitted, by `fit`

    def decoder(self, load: int, plan="fixed", K=None, cls=av.Decoder, **more) -> av.Decoder:
        """An idle decoder for so many requests at once; K = 0 is plain decoding."""
        pair, K = self.pair, self.K if K is None else K
        return cls(av.SlotLM(pair.target, load, pair.longest), pair.verbs(load) if K else None,
                   max_batch_size=load, max_length=pair.longest, plan=plan, seed=self.seed,
                   num_speculative_tokens=K, eos_token_ids=pair.eos, **self.law, **more)


# ------------------------------------------------------------------------------------
# 3. Screens: at most 80 columns, and readable without colour.

COLOURS = {"+": "32", "x": "31", "-": "33", ".": "90", "bold": "1", "dim": "2"}


def paint(text: str, colour: str) -> str:
    """Coloured on a terminal; as it is when piped, or with NO_COLOR set."""
    if (not sys.stdout.isatty() or os.environ.get("NO_COLOR")
            or os.environ.get("TERM") == "dumb"):
        return text
    return f"\033[{COLOURS[colour]}m{text}\033[0m"


def title(run: Run, text: str, *notes: str):
    """A headline, and what has to be known to read what stands under it."""
    status()
    print("\n" + paint(text, "bold") + " (QUICK: nothing to quote)" * run.quick)
    for note in notes:
        print(paint(note, "dim"))
    sys.stdout.flush()


def machine(device: torch.device) -> str:
    """The hardware in words."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    cpuinfo = pathlib.Path("/proc/cpuinfo")  # on Linux; elsewhere Python may know the name
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return (f"{name}, {torch.get_num_threads()} of {os.cpu_count()} cores, "
            f"torch {torch.__version__}")


def visible(text: str, width: int) -> str:
    """A text as it can stand in a column; the middle of a long one is left out."""
    signs = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    text = "".join(signs.get(c, c if c.isprintable() else "?") for c in text)
    return text if len(text) <= width else f"{text[:width - 7]}...{text[4 - width:][-4:]}"


def added(decode: Callable, before: list[int], ids: list[int]) -> str:
    """What ids add to a text. They are decoded with it, and a character that is not yet
    complete is left to the tokens that complete it, for it may take several."""
    old = decode(before).rstrip("\ufffd")
    return decode(before + ids).rstrip("\ufffd")[len(old):]


def introduce(run: Run):
    """Which machine, pair and settings."""
    pair, c = run.pair, run.pair.target.config
    weights = [sum(w.numel() for w in model.parameters()) / 1e6
               for model in (pair.target, pair.drafter)]
    print(f"machine   {machine(pair.target.device)}")
    print(f"pair      {pair.name}")
    print(f"target    {type(pair.target).__name__}, {c.num_hidden_layers} layers of "
          f"{c.hidden_size}, {weights[0]:.2f} M weights, {c.vocab_size} tokens")
    what = {"block": "all drafts in one pass, and a light bias each (as DSpark)",
            "block-unbiased": "all drafts in one pass (as DFlash)",
            "head": "one draft per pass, from the target's state (as EAGLE, MTP)",
            "lm": "a language model, one draft per pass"}[pair.kind]
    print(f"drafter   {pair.kind}, {weights[1]:.2f} M weights: {what}")
    mean = statistics.mean(map(len, pair.prompts))
    kinds = f": {', '.join(pair.kinds)}" if pair.kinds else ""
    print(f"settings  K = {run.K}, temperature {run.law['temperature']:g}, top-p "
          f"{run.law['top_p']:g}, seed {run.seed};\n          "
          f"{len(pair.prompts)} prompts of about {mean:.0f} tokens{kinds}")


def greedy_check(run: Run):
    """Temperature 0, float32: every plan must write what transformers' generate writes."""
    pair, ids = run.pair, run.pair.prompts[:3 if run.quick else 6]
    new = min(48, pair.longest - max(map(len, ids)))
    # A made-up table, steep enough to trim and to draft less than K.
    cost, wanted = av.CostTable({1: 1.0, run.K: 2.0}, {1: 10.0, 64: 40.0}), []
    for prompt in ids:
        text = torch.tensor([prompt], device=pair.target.device)
        out = pair.target.generate(text, attention_mask=torch.ones_like(text), top_p=None,
                                   do_sample=False, max_new_tokens=new, pad_token_id=0)
        wanted.append(out[0, len(prompt):].tolist())
    for K, plan in (0, "fixed"), (run.K, "fixed"), (run.K, "verification"), (run.K, "adaptive"):
        drafter = pair.drafter if pair.kind == "lm" else pair.verbs(4)
        out = av.generate(pair.target, drafter, ids, num_speculative_tokens=K, plan=plan,
                          max_new_tokens=new, max_batch_size=4, temperature=0, cost=cost,
                          eos_token_id=pair.eos).tokens
        if out != wanted:
            print(f"check     NOT THE SAME: greedy text of plan {plan}, K = {K}, differs "
                  "from generate's")
            return
    print(f"check     greedy: plain, fixed, verification and adaptive write the same "
          f"{sum(map(len, wanted))}\n          tokens as transformers' generate", flush=True)


# ------------------------------------------------------------------------------------
# 4. The race. All arms of a load live at once and take turns in short slices, so that
#    what else the machine does falls on all of them alike.

SPREAD = 40  # steps after which requests that began together are spread over their texts
REFITS = 2  # of the estimator before a race, because its start knows no pair


def fit(run: Run) -> av.AcceptanceEstimator:
    """An estimator that has seen this pair, with everything verified."""
    load = min(16, max(run.loads))
    decoder = run.decoder(load, estimator=av.AcceptanceEstimator(run.K))
    stream, estimator = requests(run.pair, load, run.seed), decoder.estimator
    while estimator.steps < REFITS * estimator.refit_every:
        status(f"fitting the estimator: step {estimator.steps}")
        av.refill(decoder, stream)
        decoder.step()
    status()
    return estimator


def measure(run: Run, load: int) -> av.CostTable:
    """The costs at a load, with contexts spread as those of the requests will be."""
    status(f"{load} requests: measuring costs")
    shortest, most = min(map(len, run.pair.prompts)), run.pair.longest - run.K - 1
    if most < shortest:
        raise ValueError(f"K = {run.K} is too much for {run.pair.longest} positions")
    # Steps of few requests are short, and differ by less than the noise of five.
    repeats = 2 if run.quick else 15 if load < FEW else 5 if load <= 64 else 3
    cost = av.measure_costs(run.decoder(load), run.pair.prompts, repeats=repeats,
                            context_lengths=(shortest, most))
    status()
    return cost


def under_way(run: Run, load: int) -> list[tuple]:
    """Requests (number, text so far, tokens to come), spread as in a running service.

    Every arm starts from these: with the same texts, and with caches as full."""
    status(f"{load} requests: beginning")
    decoder, stream = run.decoder(load), requests(run.pair, load, run.seed)
    for _ in range(1 if load < FEW else SPREAD // 4 if run.quick else SPREAD):
        av.refill(decoder, stream)
        decoder.step()
    return [(int(decoder.request[i]), decoder.tokens[i, :n].tolist(), int(end - n))
            for i, (n, end) in enumerate(zip(decoder.lengths, decoder.ends))
            if decoder.request[i] >= 0]


class Arm:
    """One way to decode at one load: a decoder that lives on from slice to slice."""

    def __init__(self, run: Run, load: int, cost: av.CostTable, begun: list[tuple], name: str,
                 K: int, plan: str, **more):
        status(f"{load} requests: warming up {name}")
        self.name, self.load, self.K, self.steps, self.rates = name, load, K, [], []
        estimator = None if plan == "fixed" else copy.deepcopy(run.estimator)
        self.decoder = run.decoder(load, plan, K, cost=copy.deepcopy(cost),
                                   **{"estimator": estimator, **more})
        first = max((number for number, *_ in begun), default=-1) + 1
        self.requests = itertools.chain(begun, itertools.islice(
            requests(run.pair, load, run.seed), first, None))
        self.seconds, self.ended = (0.2 + load / 400) / (1 + run.quick), 0
        for _ in range(3 if run.quick else 10):
            self.step()
        self.steps.clear()

    def step(self) -> av.Step:
        """A step, the places of those that ended filled before it."""
        before = (self.decoder.request < 0).sum()
        av.refill(self.decoder, self.requests)
        done = self.decoder.step()
        self.ended += (self.decoder.request < 0).sum()
        self.steps.append((done, before == 0))  # without a prompt to read, or with one
        return done

    def slice(self):
        """Some time's steps; of few requests three whole ones, one of each kind of text."""
        began, tokens, self.ended = self.now(), 0, 0
        while (self.ended < 3 if self.load < FEW else self.now() < began + self.seconds):
            tokens += self.step().num_committed.sum()
        self.rates.append(tokens / (self.now() - began))

    def now(self) -> float:
        """Seconds, by a clock that stands still for what an arm need not pay for."""
        return time.perf_counter() - getattr(self.decoder, "free_seconds", 0.0)

    @property
    def rate(self) -> float:
        """Tokens per second, the median over the slices."""
        return statistics.median(self.rates)

    def over(self, other: "Arm") -> tuple[float, float, float]:
        """The ratio of the medians, the least and the largest ratio of a round."""
        ratios = [mine / its for mine, its in zip(self.rates, other.rates)]
        return self.rate / other.rate, min(ratios), max(ratios)

    def gain(self, other: "Arm") -> str:
        """That in words: 1.21 [1.15..1.27]."""
        return "{:.2f} [{:.2f}..{:.2f}]".format(*self.over(other))

    def per_step(self) -> np.ndarray:
        """Tokens out, drafts drawn, drafts verified, each per request and step."""
        return np.array([[done.num_committed.sum(), (done.survival >= 0).sum(),
                          done.num_verified.sum()] for done, _ in self.steps]
                        ).sum(0) / sum(len(done.requests) for done, _ in self.steps)

    def clock_error(self) -> float:
        """How far the expected time of a step is off, the median of steps without a prompt
        (as the cost table does not know those with one)."""
        return float(np.median([abs(done.expected_ms / done.ms - 1)
                                for done, plain in self.steps if plain] or [np.nan]))


def race(run: Run, load: int, cost: av.CostTable, arms: list[tuple], report: Callable):
    """Let the arms take turns, in each round from another one on; then `report` them.

    After Ctrl-C too, if each has had a slice: what has been measured is shown."""
    begun = under_way(run, load)
    arms = [Arm(run, load, cost, begun, *arm[:3], **dict(arm[3:])) for arm in arms]
    try:
        for i in range(run.rounds):
            for arm in arms[i % len(arms):] + arms[:i % len(arms)]:
                status(f"{load} requests: round {i + 1} of {run.rounds}, {arm.name}")
                arm.slice()
    finally:
        status()
        if all(arm.rates for arm in arms):
            report(load, arms)
    return arms


# ------------------------------------------------------------------------------------
# 5. `python demo.py`: one step, a text, the table.

PICTURE = 4  # requests in the step that is shown


def depths(K: int) -> list[int]:
    """Drafts of each request at which costs are measured."""
    return [d for d in range(K + 1) if d in (0, 1, 2, 3, 5, 7, K)]


def print_costs(run: Run, loads: list[int]) -> dict[int, av.CostTable]:
    """Measure and show what a step costs: {requests: table}."""
    title(run, "What a step costs here, in ms", "drafting, and the rest of a step (nearly "
          "all of it is the target's pass)", "in which the target reads a token and so many "
          "drafts of each request")
    print(f"requests   draft 1 draft {run.K}  |" + "".join(f"{d:7}" for d in depths(run.K))
          + "   per draft")
    costs = {}
    for load in loads:
        cost = costs[load] = measure(run, load)
        ms = [float(cost.verify_ms(load * (1 + d))) for d in depths(run.K)]
        print(f"{load:8}{cost.draft_ms(1):10.2f}{cost.draft_ms(run.K):8.2f}  |"
              + "".join(f"{x:7.2f}" for x in ms)
              + f"{(ms[-1] - ms[0]) / load / run.K:12.3f}", flush=True)
    return costs


def interesting_step(run: Run, cost: av.CostTable, steps: int = 300) -> tuple:
    """A step of the published rule: (expected survivals, ms to draft, ms to verify, Step).

    One with drafts accepted, rejected and trimmed, if there is any, and one whose budget
    comes out the same from the rounded numbers that are shown."""
    arm, found = Arm(run, PICTURE, cost, [], "a step", run.K, "verification"), None
    decoder = arm.decoder
    for _ in range(steps):
        survival = decoder.expected.cumprod(1).round(2)
        draft = round(float(decoder.cost.draft_ms(run.K)), 2)
        verify = {n: round(float(decoder.cost.verify_ms(n)), 2)
                  for n in (PICTURE * (1 + d) for d in depths(run.K))}
        usual = (decoder.ends - decoder.lengths > run.K).all() and (decoder.request >= 0).all()
        usual &= decoder.estimator.steps % decoder.estimator.refit_every != 0
        done = arm.step()
        verified, accepted = done.num_verified, done.accepted
        _, budget = av.draft_budget(survival, av.CostTable({run.K: draft}, verify))
        if not usual or done.drafts.shape[1] < run.K or budget != verified.sum():
            continue
        found = survival, draft, verify, done
        if (done.survival >= 0).all() and accepted.any() and (
                accepted < verified).any() and (verified < run.K).sum() > 1:
            break
    return found


def print_one_step(run: Run, cost: av.CostTable):
    """The grid: expected survivals, the budget that follows, and what came of the drafts."""
    title(run, f"One real step of {PICTURE} requests, by the published rule (verification)")
    found = interesting_step(run, cost)
    if not found:
        print("  (no step found whose budget can be redone from rounded numbers)")
        return
    survival, draft, verify, done = found
    R, K = survival.shape
    print("plan: the survivals that earlier steps let expect, each the chance that this and\n"
          "all drafts before it are accepted" + " " * 33 + "of draft 1 to " + str(K))
    for number, row in zip(done.requests, survival):
        print(f"  request {number:<8}" + "".join(f"{s:8.2f}" for s in row))
    print(f"costs in ms: to draft {K}: {draft:.2f}; to verify, linear between\n  "
          + ", ".join(f"T({n}) = {ms:.2f}" for n, ms in verify.items()))
    print(f"{'best':>7}   {'tokens, with one':20}{'ms: drafting':24}tokens\n"
          f"{'drafts':>7}   {'for each request':20}{'and T(' + str(R) + ' + drafts)':24}per ms")
    best = -np.sort(-survival, axis=None)
    tokens = R + np.append(0, best.cumsum())
    ms = draft + np.interp(R + np.arange(len(tokens)), *np.array(list(verify.items())).T)
    budget = int(done.num_verified.sum())
    for b in sorted({n - R for n in verify} | {max(0, budget - 1), budget,
                                               min(budget + 1, R * K)}):
        print(f"{b:7}   {tokens[b]:<20.2f}{draft:.2f} + {ms[b] - draft:<17.2f}"
              f"{tokens[b] / ms[b]:.4f}" + "   <- the budget" * (b == budget))
    print(f"draft, score, trim: of this step's survivals the {budget} best are verified\n"
          "  " + "   ".join(paint(f"{mark} {word}", mark) for mark, word in (
              ("+", "accepted"), ("x", "rejected"), ("-", "behind a rejection"),
              (".", "trimmed, never read"))))
    for row, number in enumerate(done.requests):
        verified, accepted = done.num_verified[row], done.accepted[row]
        marks = ["." if i >= verified else "+" if i < accepted else "x" if i == accepted
                 else "-" for i in range(K)]
        print(f"  request {number:<8}" + "".join(
            paint(f"{s:7.2f}{mark}", mark) for s, mark in zip(done.survival[row], marks))
            + f"  {accepted}+1")
    print(f"accept: {done.accepted.sum()} drafts and {R} tokens of the target's own in "
          f"{done.ms:.2f} ms; {tokens[budget]:.1f} in {ms[budget]:.2f} were expected")


def print_text(run: Run, cost: av.CostTable, load: int, lines: int = 8):
    """The first steps of one request among `load`, by the published rule."""
    title(run, f"A text being written, one of {load} requests, with verification")
    arm = Arm(run, load, cost, [], "a text", run.K, "verification")
    first, decode = arm.step().requests.max() + 1, run.pair.decode
    watched = next(i for i in itertools.count(first) if i % 3 == 1)  # built in: code
    prompt = run.pair.prompts[watched % len(run.pair.prompts)]
    print(f'prompt    "{visible(decode(prompt), 66)}"')
    print(f"  step  {'accepted':20}{'the target adds':18}{'rejected':16}trimmed")
    text, shown = list(prompt), 0
    while shown < lines and watched not in arm.decoder.request:
        arm.step()  # until it has been admitted, and its prompt read
    while shown < lines and watched in arm.decoder.request:
        done = arm.step()
        row = int(np.flatnonzero(done.requests == watched)[0])
        verified, accepted = done.num_verified[row], done.accepted[row]
        drafts = done.drafts[row, :(done.survival[row] >= 0).sum()].tolist()
        new = done.tokens[row, :done.num_committed[row]].tolist()
        columns = (("+", 20, [], new[:accepted]), ("bold", 18, new[:accepted], new[accepted:]),
                   ("x", 16, drafts[:accepted], drafts[accepted:verified]),
                   (".", 14, drafts[:verified], drafts[verified:]))
        line = ""
        for colour, width, before, ids in columns:
            said = f'"{visible(added(decode, text + before, ids), width - 3)}"' if ids else ""
            line += paint(said, colour) + " " * (width - len(said))
        shown, text = shown + 1, text + new
        print(f"  {shown:4}  {line.rstrip()}")
    print(f'so far    "{visible(added(decode, prompt, text[len(prompt):]), 66)}"')


def show(run: Run, args):
    """The screens, in the order of the module's docstring."""
    load = max([n for n in run.loads if n <= 16], default=min(run.loads))
    costs, results = print_costs(run, sorted({PICTURE, *run.loads})), {}
    run.estimator = fit(run)
    print_one_step(run, costs[PICTURE])
    print_text(run, costs[load], load)
    title(run, f"Tokens per second at steady load, medians of {run.rounds} rounds",
          "gain: over plain decoding, ratio of the medians [least..most of the rounds];",
          "out, drafted, verified: tokens per request and step; clock: how far the",
          "cost table's time of a step is off, median")
    print(f"{'requests':9}{'':14}{'tokens/s':>8}  {'gain':19}{'out':>6}{'drafted':>9}"
          f"{'verified':>9}{'clock':>6}")
    arms = [("plain", 0, "fixed"), *((f"fixed {k}", k, "fixed") for k in sorted({
        min(2, run.K), run.K})), *((plan, run.K, plan) for plan in ("verification", "adaptive"))]

    def rows(load, arms):
        results[load] = arms
        print_rows(arms, arms[0])
        adaptive = arms[-1]
        _, _, verified = adaptive.per_step()
        print(paint(f"{load} request{'s' * (load > 1)}: adaptive verifies {verified:.1f} drafts of {run.K} per "
                    f"request; that is {adaptive.over(arms[0])[0]:.2f}\ntimes plain decoding, "
                    f"and {adaptive.over(arms[-3])[0]:.2f} times fixed {run.K}.", "bold"))

    try:
        for load in run.loads:
            race(run, load, costs[load], arms, rows)
    finally:
        if results:
            print_estimator(run, results)
    print("\nWhat to try next\n  python demo.py sweep     every fixed K at 1 to 256 requests, "
          "and the frontier\n  python demo.py study     kinds of drafters, and what the "
          "estimator is worth\n  python demo.py --drafter head     drafts that are made one "
          "by one: is there less to gain?")


def print_rows(arms: list[Arm], base: Arm):
    """A line for each arm of a load."""
    for arm in arms:
        out, drafted, verified = arm.per_step()
        row = (f"{arm.load:8} {arm.name:14}{arm.rate:8.0f}  {arm.gain(base):19}{out:6.2f}"
               f"{drafted:9.2f}{verified:9.2f}{arm.clock_error():6.0%}")
        print(paint(row, "bold") if arm.rate == max(a.rate for a in arms) else row, flush=True)


def labels(steps: list[tuple]) -> tuple[np.ndarray, np.ndarray]:
    """For each verified draft up to the first rejection: its confidence, and if accepted."""
    predicted, seen = [np.zeros(0)], [np.zeros(0, bool)]
    for done, _ in steps:
        position = np.arange(done.drafts.shape[1])
        some = (position < done.num_verified[:, None]) & (position <= done.accepted[:, None])
        before = np.pad(done.survival, ((0, 0), (1, 0)), constant_values=1)[:, :-1]
        predicted.append(done.survival[some] / before[some])
        seen.append((position < done.accepted[:, None])[some])
    return np.concatenate(predicted), np.concatenate(seen)


def diagram(predicted: np.ndarray, seen: np.ndarray, bins: int = 10):
    """Predicted against seen: the chance to be accepted, in bins of equal width."""
    print("  predicted    mean    seen   drafts   seen (#), predicted (|)")
    which = np.minimum((predicted * bins).astype(int), bins - 1)
    for b in np.unique(which):
        here = which == b
        mean, share = predicted[here].mean(), seen[here].mean()
        bar = list(f"{'#' * round(30 * share):31}")
        bar[round(30 * mean)] = "|"
        print(f"  {b / bins:.1f} to {(b + 1) / bins:.1f} {mean:6.2f}  {share:6.2f} "
              f"{here.sum():8}   " + "".join(bar).rstrip())
    print(f"  expected calibration error {ece(seen, predicted, bins):.3f} (published: 0.010)")


def print_estimator(run: Run, results: dict[int, list[Arm]]):
    """What was learned, and whether it came true."""
    load, arms = list(results.items())[-1]
    learned = arms[-2].decoder.estimator
    title(run, "What was learned: log-odds of acceptance = slope * logit(q_max) + b_i")
    print(f"  slope {learned.slope:.2f} (at the start 0.50; published for other pairs: 0.44 to "
          f"0.59)\n  b_1 to b_{run.K}: " + " ".join(f"{b:+.2f}" for b in learned.intercepts)
          + " (at the start -0.20)")
    predicted, seen = labels([step for arms in results.values() for step in arms[-2].steps])
    title(run, f"Did it come true? The {len(seen):,} drafts that verification checked")
    diagram(predicted, seen)


# ------------------------------------------------------------------------------------
# 6. `python demo.py sweep`: is adaptive on the frontier, or does some fixed K beat it?


def sweep(run: Run, args):
    """Every fixed K and both rules at each load."""
    costs, points = print_costs(run, run.loads), {}
    run.estimator = fit(run)
    arms = [(f"fixed {k}" if k else "plain", k, "fixed") for k in range(run.K + 1)]
    arms += [(plan, run.K, plan) for plan in ("verification", "adaptive")]
    title(run, f"Tokens per second at steady load, medians of {run.rounds} rounds",
          "gain: over the best fixed K, ratio of the medians [least..most of the rounds]")
    print(f"{'requests':9}{'':14}{'tokens/s':>8}  {'gain':19}{'out':>6}{'drafted':>9}"
          f"{'verified':>9}{'clock':>6}")

    def rows(load, arms):
        points[load], best = arms, max(arms[:-2], key=lambda arm: arm.rate)
        print_rows(arms, best)
        plain, fixed = arms[0], arms[-3]
        print(paint(f"{load} requests: the best fixed K is {best.K}; verification reaches "
                    f"{arms[-2].over(best)[0]:.2f} of it, adaptive\n{arms[-1].over(best)[0]:.2f}; "
                    f"adaptive is {arms[-1].over(plain)[0]:.2f} times plain decoding and "
                    f"{arms[-1].over(fixed)[0]:.2f} times {fixed.name}.", "bold"), flush=True)

    try:
        for load in run.loads:
            race(run, load, costs[load], arms, rows)
    finally:
        if points:
            frontier(run, points)
        if points and args.csv:
            write_csv(args.csv, points)
    if args.peers:
        for load in sorted({1, 16, 64} & set(run.loads)):
            peers(run, load, costs[load])


def frontier(run: Run, points: dict[int, list[Arm]], width: int = 66, height: int = 18):
    """The points as a chart, and at which loads the rules are on the frontier."""
    title(run, "The frontier: up, more tokens in all; right, faster for each request",
          f"log scales; 0 to {run.K}: that fixed K (0: plain); V: verification; A: adaptive")
    marks = [str(k % 10) for k in range(run.K + 1)] + ["V", "A"]
    dots = [(math.log(arm.rate / load), math.log(arm.rate), mark)
            for load, arms in points.items() for arm, mark in zip(arms, marks)]
    (left, right), (low, high) = [(min(v), max(v)) for v in list(zip(*dots))[:2]]
    grid = [[" "] * (width + 1) for _ in range(height + 1)]
    for x, y, mark in dots:
        row, column = (high - y) / max(high - low, 1e-9), (x - left) / max(right - left, 1e-9)
        grid[round(height * row)][round(width * column)] = mark
    for i, line in enumerate(grid):
        edge = {0: f"{math.exp(high):.0f}", height: f"{math.exp(low):.0f}"}.get(i, "")
        print(f"{edge:>7} |{''.join(line).rstrip()}")
    print(f"{'':8}+{'-' * width}\n{'':9}{math.exp(left):<{width - 8}.0f}{math.exp(right):>8.0f}")
    for load, arms in points.items():
        for arm in arms[-2:]:
            ahead = [f"{a.name} at {n}" for n, others in points.items() for a in others[:-2]
                     if a.rate > arm.rate and a.rate / n > arm.rate / load]
            print(f"{load:8} {arm.name:14}"
                  + (f"behind {', '.join(ahead)}" if ahead else "on the frontier"))


def write_csv(file: str, points: dict[int, list[Arm]]):
    """One line per load and arm."""
    with open(file, "w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow("load arm tokens_per_s least most accept_length drafted "
                        "verified".split())
        for load, arms in points.items():
            for arm in arms:
                numbers = (arm.rate, min(arm.rates), max(arm.rates), *arm.per_step())
                writer.writerow([load, arm.name, *(f"{x:.3f}" for x in numbers)])
    print(f"written: {file}")


def peers(run: Run, load: int, cost: av.CostTable):
    """transformers' own generation: same pair, prompts, settings and numbers of tokens."""
    pair, new = run.pair, min(NEW[0], run.pair.longest - max(map(len, run.pair.prompts)))
    shortest = min(map(len, pair.prompts))  # equal lengths: nobody pays for padding
    prompts = [pair.prompts[i % len(pair.prompts)][-shortest:] for i in range(max(load, 3))]
    title(run, f"Beside transformers' generate, tokens per second: {load} requests at once, "
          f"{new} new tokens each")

    def ours(K, plan):
        drafter = pair.drafter if pair.kind == "lm" else pair.verbs(load)
        more = {} if plan == "fixed" else {"estimator": copy.deepcopy(run.estimator)}
        av.generate(pair.target, drafter, prompts, max_new_tokens=new, max_batch_size=load,
                    num_speculative_tokens=K, plan=plan, cost=copy.deepcopy(cost),
                    seed=run.seed, **more, **run.law)

    def theirs(**assistant):
        for i in range(0, len(prompts), load):
            ids = torch.tensor(prompts[i:i + load], device=pair.target.device)
            sampling = dict(do_sample=True, top_k=0, **run.law)
            pair.target.generate(
                ids, attention_mask=torch.ones_like(ids), pad_token_id=0, max_new_tokens=new,
                min_new_tokens=new, **assistant,
                **(sampling if run.law["temperature"] else dict(do_sample=False)))

    arms = {"generate": theirs}
    if load == 1 and pair.kind == "lm":  # assisted generation takes one request at a time
        arms["assisted generation"] = lambda: theirs(assistant_model=pair.drafter)
    for name, K, plan in (("plain", 0, "fixed"), (f"fixed {run.K}", run.K, "fixed"),
                          ("adaptive", run.K, "adaptive")):
        arms[f"here: {name}"] = lambda K=K, plan=plan: ours(K, plan)
    rates = {name: [] for name in arms}
    for _ in range(run.rounds + 1):  # the first round warms up
        for name, arm in arms.items():
            status(f"{load} requests: {name}")
            began = time.perf_counter()
            arm()
            rates[name].append(len(prompts) * new / (time.perf_counter() - began))
    status()
    base = statistics.median(rates["generate"][1:])
    for name, (_, *measured) in rates.items():
        rate = statistics.median(measured)
        print(f"{load:8} {name:22}{rate:8.0f} [{min(measured):.0f}..{max(measured):.0f}]"
              f"   {rate / base:.2f} of generate", flush=True)


# ------------------------------------------------------------------------------------
# 7. `python demo.py study`. First the statistics: `seen` is whether each draft was
#    accepted, a bool (n,); predictions and scores are (n,) too.


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0, -x))


def auc(seen: np.ndarray, score: np.ndarray) -> float:
    """P(an accepted draft scores above a rejected one), a tie counting half: mid-ranks."""
    _, which, count = np.unique(score, return_inverse=True, return_counts=True)
    ranks, n = (np.cumsum(count) - (count - 1) / 2)[which], int(seen.sum())
    return (ranks[seen].sum() - n * (n + 1) / 2) / max(n * (len(seen) - n), 1)


def log_loss(seen: np.ndarray, predicted: np.ndarray) -> float:
    """Mean of -log(the chance that was given to what happened), in nats."""
    return -np.log(np.where(seen, predicted, 1 - predicted).clip(1e-12)).mean()


def ece(seen: np.ndarray, predicted: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error: |mean predicted - share seen| over equal bins."""
    which = np.minimum((predicted * bins).astype(int), bins - 1)
    return np.abs(np.bincount(which, predicted - seen)).sum() / max(len(seen), 1)


def fit_logistic(x: np.ndarray, seen: np.ndarray, ridge: float = 1e-6) -> np.ndarray:
    """theta (d,) of least summed log-loss of sigmoid(x @ theta) + ridge/2 |theta|^2.

    Newton's method in float64 on all labels; a step that would overshoot is halved."""
    def loss(theta):
        z = x @ theta
        return (np.logaddexp(0, z) - seen * z).sum() + ridge / 2 * theta @ theta

    theta = np.zeros(x.shape[1])
    for _ in range(50):
        p = sigmoid(x @ theta)
        hessian = (x * (p * (1 - p))[:, None]).T @ x + ridge * np.eye(len(theta))
        step = np.linalg.solve(hessian, x.T @ (seen - p) - ridge * theta)
        while loss(theta + step) > loss(theta) and np.abs(step).max() > 1e-9:
            step = step / 2
        theta = theta + step
        if np.abs(step).max() < 1e-8:
            break
    return theta


def bootstrap(group: np.ndarray, statistic: Callable, draws: int = 100) -> np.ndarray:
    """`statistic(rows)` of resampled requests, (draws, ...), as labels of one text are no
    fresh draws. The same draws at each call, so that differences are paired."""
    rng = np.random.default_rng(0)
    members = [np.flatnonzero(group == g) for g in np.unique(group)]
    return np.array([statistic(np.concatenate(
        [members[i] for i in rng.integers(len(members), size=len(members))]))
        for _ in range(draws)])


def design(feature: np.ndarray, position: np.ndarray, K: int) -> np.ndarray:
    """Columns of a regression: the feature (or features), an indicator per position."""
    return np.column_stack([feature, np.eye(K)[position]])


def scores(seen: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """AUC, log-loss, ECE."""
    return np.array([auc(seen, predicted), log_loss(seen, predicted), ece(seen, predicted)])


@dataclass
class Drafts:
    """Drafts that have a label, (n,) each, but hidden (n, H). Laws are before top-p."""
    seen: np.ndarray  # accepted?
    position: np.ndarray
    request: np.ndarray
    limit: np.ndarray  # the true chance, sum of min(p, q), after top-p
    top: np.ndarray  # logit(q_max)
    drawn: np.ndarray  # logit(q(x)) of the token that was drawn
    margin: np.ndarray  # log q_max - log q_2nd
    entropy: np.ndarray
    hidden: np.ndarray  # what a confidence head reads

    def where(self, rows: np.ndarray) -> "Drafts":
        """Some of them."""
        return Drafts(*(x[rows] for x in vars(self).values()))


def head_inputs(decoder, depths, drafts) -> Tensor:
    """What a confidence head on a block reads, (R, D, H): the state of each position, and
    of the draft before it what the bias reads. Of other drafters it reads nothing."""
    (R, D), block = drafts.shape, getattr(decoder.drafter, "head", None)
    if not hasattr(block, "states"):
        return torch.zeros(R, D, 0)
    out = torch.zeros(R, D, block.head.in_features, device=drafts.device)
    if depths.any():
        out[torch.from_numpy(depths > 0)] = block.states[:, :D].float()
    before = block.bias_embed(F.pad(drafts, (1, 0))[:, :-1]) if block.biased else out[..., :0]
    return torch.cat([out, before], -1)


class Watched(av.Decoder):
    """The same loop, which also keeps what the study asks of a step."""

    def survival(self, features, drafts, depths):
        self.inputs = head_inputs(self, depths, torch.from_numpy(drafts).to(self.device))
        return super().survival(features, drafts, depths)

    def accept(self, slots, drafts, *more):
        done = super().accept(slots, drafts, *more)
        position, law = np.arange(drafts.shape[1]), self.law
        drafts = torch.from_numpy(drafts).to(self.device)
        r, i = np.nonzero((position < done.num_verified[:, None])
                          & (position <= done.accepted[:, None]))
        first = np.cumsum(done.num_verified + 1) - done.num_verified - 1
        p = self.target.model.get_output_embeddings()(self.target.hidden[first[r] + i])
        p, logits = av.warp(p, **law), self.draft_logits[i, r]
        log_q = (logits.double() / (law["temperature"] or 1)).log_softmax(-1)
        best = log_q.topk(2).values
        log_x = log_q.gather(1, drafts[r, i][:, None])[:, 0]
        self.labels = [x.cpu().numpy() for x in (
            torch.from_numpy(done.accepted[r] > i), torch.from_numpy(i),
            torch.from_numpy(done.requests[r]),
            torch.minimum(p, self.q[i, r]).sum(-1).double().clamp(max=1),
            av.logit_q_max(logits, law["temperature"]).double(),
            log_x.exp().logit().clamp(-10, 10), best[:, 0] - best[:, 1],
            -(log_q.exp() * log_q.clamp(min=-1e3)).sum(-1), self.inputs[r, i])]
        return done


def collect(run: Run, wanted: int, load: int) -> tuple[Drafts, list[av.Step]]:
    """Decode with every draft verified until there are enough labels; and the steps."""
    decoder, parts, steps, n = run.decoder(load, cls=Watched), [], [], 0
    stream = requests(run.pair, load, run.seed)
    while n < wanted:
        av.refill(decoder, stream)
        steps.append(decoder.step())
        parts.append(decoder.labels)
        n += len(parts[-1][0])
        status(f"{run.pair.kind}, all verified: {n:,} of {wanted:,} labels")
    status()
    return Drafts(*map(np.concatenate, zip(*parts))), steps


def feed(estimator, steps: list[av.Step], keep: Callable):
    """Show recorded steps to an estimator, of each the rows that `keep(requests)` gives."""
    for done in steps:
        rows = keep(done.requests)
        estimator.observe(done.features[rows], done.num_verified[rows], done.accepted[rows])
    return estimator


def chance(estimator: av.AcceptanceEstimator, d: Drafts) -> np.ndarray:
    """What an estimator says of some drafts."""
    return sigmoid(estimator.slope * d.top + estimator.intercepts[d.position])


def even(run: Run) -> Callable:
    """Which requests are fitted on; the others are scored. No prompt is in both."""
    return lambda numbers: numbers % len(run.pair.prompts) % 2 == 0


# The kinds of drafters.

BY_PAIR = """DSV4-Flash + DSpark, 5 drafts: .501 +.279; MiMo-V2.5-Pro + DFlash, 8: .520 -1.000
Inkling + MTP, 8: .586 -.572; Muse-Glimmer-30B + DFlash2, 7: .445 +.167"""


def print_kinds(run: Run, wanted: int) -> dict:
    """A line or two for each kind of drafter; and what was collected of each."""
    built_in, results = bool(run.pair.kinds), {}
    for kind in dict.fromkeys([run.pair.kind, *("block", "block-unbiased", "head", "lm")]
                              if built_in else [run.pair.kind]):
        pair = run.pair if kind == run.pair.kind else byte_pair(
            run.pair.target.device, kind, run.quick, [], run.seed)
        mine = replace(run, pair=pair)
        mine.estimator = fit(mine)
        results[kind] = mine, *collect(mine, wanted, max(run.loads))
    title(run, f"Kinds of drafters: all {run.K} drafts verified, {max(run.loads)} requests",
          "share accepted of those whose drafts before were; the online fit on unseen texts")
    print(f"{'':15}{'length':>7}  share accepted, draft 1 to {run.K}{'AUC':>15}{'ECE':>7}"
          f"{'slope':>7}")
    for kind, (mine, d, steps) in results.items():
        odd, online = ~even(run)(d.request), mine.estimator
        share = [d.seen[d.position == i].mean() for i in range(run.K)]
        length = 1 + sum(s.accepted.sum() for s in steps) / sum(len(s.accepted) for s in steps)
        fitted = fit_logistic(design(d.top, d.position, run.K), d.seen)
        value = scores(d.seen[odd], chance(online, d)[odd])
        print(f"{kind:15}{length:7.2f}  " + " ".join(f"{x:.2f}" for x in share)
              + f"{value[0]:9.3f}{value[2]:7.3f}{fitted[0]:7.2f}")
        print(paint("    intercepts           " + " ".join(f"{b:+.1f}" for b in fitted[1:]),
                    "dim"), flush=True)
    print("published, slope and first intercept:\n" + BY_PAIR)
    return results


def print_kinds_race(run: Run, results: dict):
    """What each kind gains by both rules, at each load."""
    title(run, f"What they gain, over fixed {run.K} and over the best fixed K (plain included)",
          "drafting: its share of the time of a step in which all is drafted and verified")
    print(f"{'':15}requests drafting  best K {'verification':>20}{'adaptive':>20}\n{'':40}"
          + 2 * f"{'over ' + str(run.K):>11}{'over best':>10}")
    for kind, (mine, *_) in results.items():
        for load in run.loads:
            cost = measure(mine, load)
            draft, all_ = cost.draft_ms(run.K), cost.verify_ms(load * (run.K + 1))

            def row(load, arms, kind=kind, share=draft / (draft + all_)):
                best = max(arms[:-2], key=lambda arm: arm.rate)
                print(f"{kind:15}{load:8}{share:9.0%}{best.K:8}" + "".join(
                    f"{arm.over(arms[-3])[0]:11.2f}{arm.over(best)[0]:10.2f}"
                    for arm in arms[-2:]), flush=True)

            arms = [(f"fixed {k}", k, "fixed") for k in sorted({0, 1, 2, min(3, run.K), run.K})]
            race(mine, load, cost, [*arms, *((plan, run.K, plan) for plan in (
                "verification", "adaptive"))], row)
    print("published: drafters that draft one by one (MTP, EAGLE) gain less than those that\n"
          "draft in parallel (DFlash, DSpark), since they have paid for what is trimmed")


# Features. Each gets a slope and an intercept per position, as the one in use has.


def log_of(logit: np.ndarray) -> np.ndarray:
    """log q from logit(q), exact also where q is all but 1."""
    return -np.logaddexp(0, -logit)


FEATURES = {  # name: of a Drafts, lossless, published AUC, log-loss, ECE
    "log q_max": (lambda d: log_of(d.top), "yes", ".8069 .4813 .0592"),
    "log q_max - log q_2nd": (lambda d: d.margin, "yes", ".8156 .4437 .0105"),
    "entropy of q": (lambda d: d.entropy, "yes", ".8321 .4577 .0638"),
    "-log(-log q_max)": (lambda d: -np.log(-log_of(d.top)), "yes", ".8336 .4289 .0103"),
    "logit q_max (in use)": (lambda d: d.top, "yes", ".8336 .4284 .0100"),
    "logit q_drawn": (lambda d: d.drawn, "NO", ".8553 .4040 .0152"),
    "-log(-log q_drawn)": (lambda d: -np.log(-log_of(d.drawn)), "NO", ".8554 .4075 .0193")}


def predictions(K: int, fitted: Drafts, held: Drafts) -> dict[str, tuple]:
    """{name: (predicted chances of the held-out drafts, lossless, published figures)}."""
    def regress(feature, ridge=1e-6):
        theta = fit_logistic(design(feature(fitted), fitted.position, K), fitted.seen, ridge)
        return sigmoid(design(feature(held), held.position, K) @ theta)

    rows = {name: (regress(feature), *more) for name, (feature, *more) in FEATURES.items()}
    rows["q_max, no fit (EAGLE-2)"] = sigmoid(held.top), "yes", ".8259 .4880 .0736"
    if held.hidden.shape[1]:
        rows["trained head (DSpark)"] = regress(lambda d: d.hidden, 1.0), "yes", \
            ".8191 .4449 .0052"
    rows["position alone"] = regress(lambda d: 0 * d.top), "yes", ""
    rows["the truth, sum min(p, q)"] = held.limit, "-", ""
    return rows


def print_features(run: Run, held: Drafts, rows: dict[str, tuple]):
    """The table of features, and by position the estimator against a confidence head."""
    title(run, f"Which feature tells what will be accepted? Drafter: {run.pair.kind}",
          f"fitted on half of the requests, scored on {len(held.seen):,} drafts of the others")
    print(f"{'':26}lossless    AUC  log-loss   ECE    published: the same")
    for name, (predicted, lossless, published) in rows.items():
        print(f"{name:26}{lossless:8}"
              + "".join(f"{v:8.4f}" for v in scores(held.seen, predicted)) + f"    {published}")
    used = rows["logit q_max (in use)"][0]
    draws = bootstrap(held.request, lambda i: scores(held.seen[i], used[i]))
    low, high = np.percentile(draws, [2.5, 97.5], axis=0)
    print("(in use, half a 95 % interval over resampled requests: "
          + ", ".join(f"{x:.4f}" for x in (high - low) / 2) + ")")
    names = {"estimator": "logit q_max (in use)", "trained head": "trained head (DSpark)",
             "truth": "the truth, sum min(p, q)"}
    names = {what: name for what, name in names.items() if name in rows}
    print(f"AUC by position{'drafts':>9}" + "".join(f"{what:>14}" for what in names))
    for i in range(run.K):
        here = held.position == i
        print(f"{i + 1:8}{here.sum():16}" + "".join(
            f"{auc(held.seen[here], rows[name][0][here]):14.3f}" for name in names.values()))
    print("(published: the head leads at the first position, the estimator from the second\n"
          " on, by .08 at the seventh)")


def print_fit(run: Run, fitted: Drafts, held: Drafts, steps: list[av.Step]):
    """Online against all at once, one slope against several, and damping."""
    title(run, "The fit: online against the best of all labels at once, on unseen texts")
    K, keep, one_hot = run.K, even(run), np.eye(run.K)
    shared = fit_logistic(design(fitted.top, fitted.position, K), fitted.seen)
    several = fit_logistic(np.hstack([one_hot[fitted.position] * fitted.top[:, None],
                                      one_hot[fitted.position]]), fitted.seen)
    rows = {"the start: slope .5, intercepts -.2": chance(av.AcceptanceEstimator(K), held)}
    for n in (50, 10):
        online = feed(av.AcceptanceEstimator(K, refit_every=n), steps, keep)
        rows[f"online, {online.steps // n} refits of {n} steps"] = chance(online, held)
    rows["all labels, one slope"] = sigmoid(design(held.top, held.position, K) @ shared)
    rows["all labels, a slope per position"] = sigmoid(
        several[:K][held.position] * held.top + several[K:][held.position])
    print(f"{'':38}AUC  log-loss   ECE")
    for name, predicted in rows.items():
        print(f"{name:34}" + "".join(f"{x:8.4f}" for x in scores(held.seen, predicted)))
    print("(published: sharing the slope costs .0002 AUC and .0003 log-loss)")
    for few in (1, 4):  # requests at a time
        line = f"few labels, {few} at once, 5 refits of 10 steps: log-loss"
        for damping in (50, 0):
            losses = [log_loss(held.seen, chance(feed(
                av.AcceptanceEstimator(K, refit_every=10, damping=damping), steps[at:at + 50],
                lambda r: np.flatnonzero(keep(r))[:few]), held))
                for at in range(0, max(1, len(steps) - 49), 25)]
            line += f", damping {damping}: {np.mean(losses):.3f}"
        print(line)


BY_WORKLOAD = """gsm8k .781 .562 .537 +.478; humaneval .751 .669 .514 +.486;
speed-bench-low .755 .703 .509 +.610; mt-bench .714 .800 .550 +.181;
speed-bench-high .642 1.077 .520 -.089"""


def print_workloads(run: Run, drafts: Drafts):
    """Is it the slope or the intercepts that follow the text?"""
    title(run, "Slope and first intercept by kind of text")
    print(f"{'':24}accepted  entropy of q   slope   intercept")
    rows, kinds = [], run.pair.kinds
    for i, kind in enumerate(kinds):
        d = drafts.where(drafts.request % len(kinds) == i)
        theta = fit_logistic(design(d.top, d.position, run.K), d.seen)
        rows.append([kind, d.seen.mean(), d.entropy.mean(), *theta[:2]])
    published = [row.split() for row in BY_WORKLOAD.split(";")]
    for name, *x in rows + [[name + ", published", *x] for name, *x in published]:
        a, h, w, b = map(float, x)
        print(f"{name:27}{a:5.3f}{h:14.3f}{w:8.3f}{b:+12.3f}")


# What a rule does that looks at the drawn token, in examples small enough to enumerate.


def next_token_law(p, q: Callable, K: int, verified: Callable) -> np.ndarray:
    """Exact law of the next token (V,), target p everywhere, drafter q(drafts so far).

    `verified(drafts)` drafts are checked. Every draft that can be drawn is gone through."""
    law = np.zeros(len(p))
    for drafts in itertools.product(range(len(p)), repeat=K):
        weight = math.prod(q(drafts[:i])[x] for i, x in enumerate(drafts))
        if not verified(drafts):
            law += weight * p  # not one is checked: the target draws
            continue
        x, q_0 = drafts[0], q(())
        accept, residual = min(1, p[x] / q_0[x]), np.maximum(p - q_0, 0)
        law[x] += weight * accept
        law += weight * (1 - accept) * residual / max(residual.sum(), 1e-300)
    return law


def biased_rules() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{rule: (law of the next token, the target's)}, by enumeration."""
    p, one = np.array([0.5, 0.5]), np.array([0.2, 0.8])
    cost = av.CostTable({2: 1e-9}, {1: 1, 2: 1.9, 3: 1.9, 4: 2.8})  # 0, 1, 2 drafts

    def two(drafts):  # this drafter is sure of itself after token a
        return np.array([0.99, 0.01]) if drafts == (0,) else p

    def trimmed(drafts, budget=None):
        rows = torch.tensor(np.array([two(drafts[:i]) for i in range(2)])).log()
        # Slope 1, intercept 0: the confidence is q_max itself.
        survival = torch.sigmoid(av.logit_q_max(rows).double()).cumprod(0)[None].numpy()
        if budget is None:
            _, budget = av.draft_budget(survival, cost)
        return av.trim(survival, budget).item()

    laws = {"verify if q(drawn token) >= 0.5": next_token_law(
                p, lambda drafts: one, 1, lambda drafts: one[drafts[0]] >= 0.5),
            "verify if q_max >= 0.5 (in use)": next_token_law(
                p, lambda drafts: one, 1, lambda drafts: one.max() >= 0.5),
            "budget from this step's survivals": next_token_law(p, two, 2, trimmed)}
    for budget in range(3):
        laws[f"a budget of {budget} from before (in use)"] = next_token_law(
            p, two, 2, lambda drafts, budget=budget: trimmed(drafts, budget))
    return {rule: (law, p) for rule, law in laws.items()}


def print_biased(run: Run):
    """How far from the target each rule is."""
    title(run, "What a rule does that looks at the drawn token (enumerated, nothing is drawn)")
    for rule, (law, target) in biased_rules().items():
        print(f"  {rule:38}P(first token is a) {law[0]:.3f} for {target[0]:.3f}")


# The same loop with another confidence.


class Given(av.AcceptanceEstimator):
    """A confidence that comes from elsewhere and learns nothing: `Informed` asks for it."""

    def __init__(self, K: int, confidence: Callable):
        super().__init__(K)
        self.confidence = confidence  # (decoder, depths, drafts) -> (R, D)

    def predict(self, features):
        return self.given

    def observe(self, *labels):
        self.steps += 1


class Informed(av.Decoder):
    """The same loop, which is given its confidences, and need not pay for them in time."""
    free_seconds = spent = 0.0

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def survival(self, features, drafts, depths):
        began, on_device = self.now(), torch.from_numpy(drafts).to(self.device)
        given = self.estimator.confidence(self, depths, on_device)
        self.estimator.given = given.double().cpu().numpy()
        self.spent = self.now() - began
        self.free_seconds += self.spent
        return super().survival(features, drafts, depths)

    def learn(self, slots, done):
        done.ms -= 1e3 * self.spent
        done.draft_ms -= 1e3 * self.spent
        super().learn(slots, done)


def truth(shadow: av.SlotLM) -> Callable:
    """The chance of each draft, from a second run of the target: the ceiling."""
    def confidence(decoder, depths, drafts):
        (R, D), slots = drafts.shape, np.flatnonzero(decoder.request >= 0)
        lengths = decoder.lengths[slots]
        shadow.commit(slots, np.where(decoder.fresh[slots], 0, lengths))
        logits = shadow.logits(decoder.tokens, lengths, slots, depths)
        rows = ((depths + 1).cumsum() - depths - 1)[:, None] + np.arange(D)
        rows = torch.from_numpy(rows).clamp(max=len(logits) - 1).to(drafts.device)
        p = av.warp(logits, **decoder.law)[rows]
        return torch.minimum(p, decoder.q[:D, :R].transpose(0, 1)).sum(-1).clamp(max=1)
    return confidence


def print_ingredients(run: Run, fitted: Drafts):
    """Tokens per second of verification with each confidence, all at once by turns."""
    K, load = run.K, max(run.loads)

    def top(decoder, drafts):
        logits = decoder.draft_logits[:drafts.shape[1], :len(drafts)].transpose(0, 1)
        return av.logit_q_max(logits, decoder.law["temperature"])

    ways = {"q_max, no fit (EAGLE-2)": lambda d, _, drafts: torch.sigmoid(top(d, drafts)),
            "q_max >= .5 (Draft & Verify)": lambda d, _, drafts: (top(d, drafts) >= 0),
            "the truth, sum min(p, q)": truth(av.SlotLM(run.pair.target, load,
                                                        run.pair.longest))}
    if fitted.hidden.shape[1]:
        theta = torch.from_numpy(fit_logistic(design(
            fitted.hidden, fitted.position, K), fitted.seen, 1.0)).to(run.pair.target.device)
        ways["trained head (DSpark)"] = lambda d, depths, drafts: torch.sigmoid(head_inputs(
            d, depths, drafts).double() @ theta[:-K] + theta[len(theta) - K:][:drafts.shape[1]])
    arms = [(f"fixed {K}", K, "fixed"), ("online fit", K, "verification")]
    arms += [(name, K, "verification", {"estimator": Given(K, way), "cls": Informed})
             for name, way in ways.items()]
    title(run, f"What a good confidence buys: verification, {load} requests, all else equal",
          f"gain over fixed {K}; kept: of the drafts that were verified")

    def rows(load, arms):
        for arm in arms:
            out, _, verified = arm.per_step()
            print(f"{arm.name:30}{arm.rate:7.0f} tokens/s  {arm.gain(arms[0]):19}"
                  f"{(out - 1) / max(verified, 1e-9):6.0%} kept", flush=True)

    run = replace(run, rounds=2 * run.rounds)
    race(run, load, measure(run, load), arms, rows)


def study(run: Run, args):
    """All of it, each table as soon as it is measured."""
    if len(run.pair.prompts) < 2:
        raise ValueError("the study fits on some prompts and scores on others: give 2")
    if isinstance(block := run.pair.drafter, Block):  # it keeps what a head would read
        block.states = None
        block.head.register_forward_pre_hook(
            lambda _, inputs: setattr(block, "states", inputs[0]))
    results = print_kinds(run, 3_000 if run.quick else 20_000)
    print_kinds_race(run, results)
    run, drafts, steps = results[run.pair.kind]
    some = even(run)(drafts.request)
    fitted, held = drafts.where(some), drafts.where(~some)
    status("fitting each feature and the confidence head")
    print_features(run, held, predictions(run.K, fitted, held))
    print_fit(run, fitted, held, steps)
    if run.pair.kinds:
        print_workloads(run, drafts)
    print_biased(run)
    print_ingredients(run, fitted)


# ------------------------------------------------------------------------------------
# 8. Main.

COMMANDS = {"show": show, "sweep": sweep, "study": study}
LOADS = {"show": [1, 16, 64], "sweep": [1, 16, 64, 256], "study": [16, 64]}
ROUNDS = {"show": 7, "sweep": 11, "study": 5}


def loads(text: str) -> list[int]:
    """1,16,64"""
    return sorted({int(n) for n in text.split(",")})


def arguments() -> argparse.Namespace:
    """The command line; settings as published unless a flag says otherwise."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=COMMANDS, default="show")
    flag = parser.add_argument
    flag("--quick", action="store_true", help="a check, half a minute for the table")
    flag("--drafter", choices=("block", "block-unbiased", "head", "lm"), default="block",
         help="of the built-in pair")
    flag("--target", metavar="NAME", help="hub name or folder of a causal LM")
    flag("--draft", metavar="NAME", help="a smaller one with the same vocabulary")
    flag("--prompts", metavar="FILE", help="your own prompts, one per line")
    flag("--loads", metavar="N,N,N", help="requests at once", type=loads)
    flag("-k", "--num-speculative-tokens", dest="k", metavar="K", type=int, default=7)
    flag("--temperature", type=float, default=1.0)
    flag("--top-p", type=float, default=0.95)
    flag("--seed", type=int, default=0)
    flag("--rounds", type=int, help="slices per arm: 7, sweep 11, study 5, --quick 2")
    flag("--threads", type=int, help="CPU threads: all cores")
    flag("--csv", metavar="FILE", help="sweep: write its points to a file as well")
    flag("--peers", action="store_true", help="sweep: transformers' generate as well")
    args = parser.parse_args()
    counts = [args.k, *(args.loads or [1])] + [
        n for n in (args.rounds, args.threads) if n is not None]
    if min(counts) < 1 or not 0 <= args.temperature <= 1e6 or not 0 < args.top_p <= 1:
        parser.error("counts start at 1, the temperature is in 0..1e6, top-p in (0, 1]")
    if not 0 <= args.seed < 2**32:
        parser.error("the seed is in 0..2**32 - 1")
    if (args.target is None) != (args.draft is None):
        parser.error("--target and --draft go together")
    if args.target is None and args.drafter.startswith("block") and args.k > DEPTH:
        parser.error(f"the built-in block drafts {DEPTH} tokens at most")
    if args.command != "sweep" and (args.csv or args.peers):
        parser.error("--csv and --peers belong to sweep")
    if args.csv:
        try:
            open(args.csv, "a").close()  # before the measurement, not after it
        except OSError as error:
            parser.error(f"--csv: {error}")
    return args


def main() -> int:
    """Do what the command line asks for; the exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a sign shows "?"
    args = arguments()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    try:
        pair = find_pair(args, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        run = Run(pair, args.k, dict(temperature=args.temperature, top_p=args.top_p),
                  args.loads or LOADS[args.command][:2 if args.quick else None], args.seed,
                  args.rounds or (2 if args.quick else ROUNDS[args.command]), args.quick)
        introduce(run)
        greedy_check(run)
        if pair.target.device.type == "cuda":
            pair.target.bfloat16(), pair.drafter.bfloat16()  # from here on speed counts
        COMMANDS[args.command](run, args)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not spoil the end
        status()
        print("\nstopped; what was measured so far stands above")
        return 130
    except (ValueError, NotImplementedError, FloatingPointError) as error:
        sys.exit(f"cannot run this pair: {error}")  # as av.py says what and why
    except BrokenPipeError:  # the reader of a pipe has left: nothing more to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())

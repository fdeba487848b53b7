# SPDX-License-Identifier: MIT
"""Adaptive verification on a real pair of models: `python demo.py`.

What you will see, in this order:
  1. the pair of models, the machine, the settings, and that greedy decoding comes out the same
     token by token, whichever way of decoding is used;
  2. what a step costs here, measured: the target alone, with drafts to check, one drafter pass;
  3. one request, step by step: which drafts were accepted, rejected, or not worth verifying;
  4. THE table: plain decoding, fixed K, verification (the published rule) and joint (which also
     stops drafting where that does not pay) at several loads, then the reason for each gain;
  5. what the estimator learned, and whether its predictions came true.

`python demo.py sweep` tries every fixed K at more loads, with `--peers` transformers' generate too.
`python demo.py study` repeats the published study of the estimator on your pair, in four minutes:
features, a confidence head, the fit, slopes, what a biased rule does, what a good estimate buys.
No GPU and no network are needed: a small pair whose tokens are bytes is trained on first use (a
good two minutes) and kept. Your own pair: `--target NAME --draft NAME`, hub names or folders.
What it is not: a benchmark of large models. `--quick` is a check and measures nothing to quote.
"""
# ruff: noqa: E402
import os
import signal

if __name__ == "__main__":  # the libraries below take seconds to load: Ctrl-C is quiet then too
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import collections
import contextlib
import copy
import csv
import functools
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
from transformers import LlamaConfig, LlamaForCausalLM

import av

# ---------------------------------------------------------------------------------------------
# 1. The built-in pair: two byte-level Llamas, trained on first use on texts of Python's library.

LENGTH = 256  # bytes per training sequence: positions beyond it are untrained
BATCH = 9  # three sequences of each workload; more per step would leave the drafter fewer steps


def workloads(held_out: bool = False) -> dict[str, bytes]:
    """Three texts of unlike difficulty from Python's own library: their first 90 % or the rest."""
    lib = pathlib.Path(sysconfig.get_path("stdlib"))
    tables = [*lib.glob("encodings/cp*.py"), *lib.glob("encodings/iso*.py")]
    packages = "asyncio concurrent email html http importlib json logging unittest urllib xml"
    code = [*lib.glob("*.py"), *(f for p in packages.split() for f in lib.glob(f"{p}/**/*.py"))]
    topics = pydoc_data.topics.topics
    documents = {
        "tables": [f.read_bytes() for f in sorted(tables)],
        "code": [f.read_bytes() for f in sorted(code)],
        "prose": [topics[name].encode() for name in sorted(topics)],
    }
    texts = {}
    for name, parts in documents.items():
        limit, size, split = 0.9 * sum(map(len, parts)), 0, 0
        while size < limit:  # whole documents: nothing held out was half seen in training
            size, split = size + len(parts[split]), split + 1
        texts[name] = b"\n".join(parts[split:] if held_out else parts[:split])
    return texts


def build_pair(seed: int = 0, large: bool = False) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """An untrained target (4 layers of 640, 17.2 M weights) and drafter (1 layer of 128).

    Wide rather than deep: on a CPU the work outside the matrices goes by the number of layers.
    large: 12 layers of 768 and 1 of 256, for a GPU, where the small ones are all launches.
    """
    layers, size, width = (12, 768, 256) if large else (4, 640, 128)
    common = dict(vocab_size=256, max_position_embeddings=512, tie_word_embeddings=False,
                  num_key_value_heads=1,  # one shared key and value head keeps the cache small
                  bos_token_id=None, eos_token_id=None, pad_token_id=None)
    target = LlamaConfig(hidden_size=size, num_hidden_layers=layers, num_attention_heads=size // 64,
                         intermediate_size=size * 27 // 10, **common)
    drafter = LlamaConfig(hidden_size=width, num_hidden_layers=1, num_attention_heads=width // 64,
                          intermediate_size=width * 8 // 3, **common)
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it was
        torch.manual_seed(seed)
        return LlamaForCausalLM(target), LlamaForCausalLM(drafter)


def optimizers(model, matrix_lr: float, other_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, norms and the head."""
    inner = {n: p for n, p in model.named_parameters() if "layers." in n and p.ndim == 2}
    rest = [p for n, p in model.named_parameters() if n not in inner]
    return [torch.optim.Muon(inner.values(), lr=matrix_lr, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=other_lr, betas=(0.9, 0.98), weight_decay=0.0)]


def training_bytes(texts: list[bytes], generator: torch.Generator) -> torch.Tensor:
    """Sequences from random places, the texts in turns: (BATCH, LENGTH + 1)."""
    rows = []
    for i in range(BATCH):
        text = texts[i % len(texts)]
        at = int(torch.randint(len(text) - LENGTH, (), generator=generator))
        rows.append(list(text[at:at + LENGTH + 1]))
    return torch.tensor(rows)


def pair_losses(target, drafter, ids: torch.Tensor, fraction: float):
    """The loss to descend, and for display the target's nats per byte and the acceptance."""
    with torch.autocast(ids.device.type, torch.bfloat16):  # 1.3 times faster on a CPU with AMX
        logits = target(input_ids=ids[:, :-1], use_cache=False).logits.float()
        drafted = drafter(input_ids=ids[:, :-1], use_cache=False).logits.float()
    nats = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    p, log_q = logits.detach().softmax(-1), drafted.log_softmax(-1)
    imitation = -(p * log_q).sum(-1).mean()
    accepted = torch.minimum(p, log_q.exp()).sum(-1).mean()
    # Cross entropy starts the drafter off; later the acceptance itself, which is what counts in
    # use, takes over.
    early, late = max(0.1, 1 - 2 * fraction), 3 * min(1.0, 2 * fraction)
    return nats + early * imitation + late * (1 - accepted), nats, accepted


def descend(models: list, optims: list, loss: Callable, seconds: float, seed: int = 0):
    """Train models until the time is up: loss(ids, fraction) gives what to descend and a text.

    A bar and that text are on the screen meanwhile.
    """
    generator, texts = torch.Generator().manual_seed(seed), list(workloads().values())
    groups = [(group, group["lr"]) for optim in optims for group in optim.param_groups]
    for model in models:  # the fused attention's backward pass is slow on a CPU
        model.train().set_attn_implementation("eager")
    start = reported = time.monotonic()
    while (fraction := (time.monotonic() - start) / seconds) < 1:
        for group, peak in groups:  # by the clock, so that a slow machine decays in time too
            group["lr"] = peak * min(1.0, fraction / 0.03 + 0.03, (1 - fraction) / 0.6)
        value, text = loss(training_bytes(texts, generator).to(models[0].device), fraction)
        value.backward()
        for optim in optims:
            optim.step()
            optim.zero_grad()
        if time.monotonic() - reported > 0.5:
            reported = time.monotonic()
            status(f"[{'#' * round(30 * fraction):30}] {fraction:4.0%}  {text}")
    status()
    for model in models:
        model.eval().set_attn_implementation("sdpa")


def train_pair(target, drafter, seconds: float):
    """Train both in one loop that ends on time: the drafter imitates what the target learns."""
    def loss(ids, fraction):
        value, nats, accepted = pair_losses(target, drafter, ids, fraction)
        return value, f"target {nats:.2f} nats per byte, drafts accepted {accepted:.0%}"

    descend([target, drafter], optimizers(target, 1e-2, 3e-3) + optimizers(drafter, 1e-2, 1e-2),
            loss, seconds)


def cache_folder() -> pathlib.Path:
    """Where trained models are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "adaptive-verification"


def cached(name: str, models: list[torch.nn.Module]):
    """Copies with the weights kept under a name, or None; with a word if they do not fit."""
    file = cache_folder() / f"{name}.pt"
    if not file.exists():
        return None
    models = copy.deepcopy(models)  # what fits in part must not be trained on
    try:
        for model, weights in zip(models, torch.load(file, weights_only=True), strict=True):
            model.load_state_dict(weights)
            if not all(w.isfinite().all() for w in weights.values()):
                raise ValueError("not finite")
        return [model.eval() for model in models]
    except Exception as error:  # whatever is wrong with it, the cure is the same
        print(f"{file} holds no usable weights ({type(error).__name__}): it is not used")
        return None


def keep(name: str, models: list[torch.nn.Module]):
    """Keep their weights under a name; if that cannot be, say so and go on."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temp:  # killed here, nothing half is left
            torch.save([model.state_dict() for model in models], f"{temp}/models.pt")
            os.replace(f"{temp}/models.pt", folder / f"{name}.pt")
    except OSError as error:
        print(f"what was trained cannot be kept ({error}): next time it is trained again")


def built_in_pair(device: torch.device, quick: bool):
    """The built-in (target, drafter) on `device`: from the cache, or trained now and kept there."""
    large = device.type == "cuda"
    name = "pair-large" if large else "pair"
    pair = cached(name, build_pair(large=large))
    if quick and not pair:  # a hasty pair has its own name and never takes the real one's place
        name += "-quick"
        pair = cached(name, build_pair(large=large))
    if pair:
        return [model.to(device) for model in pair]
    seconds = 10 if quick else 135
    print(f"training the built-in pair for {seconds} s" + (" only (--quick)" if quick else "")
          + f", this once; it will be kept in {cache_folder()}", flush=True)
    pair = [model.to(device) for model in build_pair(large=large)]
    train_pair(*pair, seconds)
    keep(name, pair)
    return pair


def small_drafter(drafter, quick: bool):
    """A drafter of half the width, which learned the texts by itself and never saw the target."""
    c, device = drafter.config, drafter.device
    sizes = {name: getattr(c, name) // 2 for name in (
        "hidden_size", "intermediate_size", "num_attention_heads")}
    name = f"small-{c.hidden_size // 2}" + "-quick" * quick
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        small = LlamaForCausalLM(LlamaConfig(**{**c.to_dict(), **sizes}))
    if kept := cached(name, [small]):
        return kept[0].to(device, drafter.dtype)

    def loss(ids, fraction):
        logits = small(input_ids=ids[:, :-1], use_cache=False).logits
        nats = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        return nats, f"a second, smaller drafter, this once: {nats:.2f} nats per byte"

    descend([small.to(device)], optimizers(small, 1e-2, 1e-2), loss, 4 if quick else 20, seed=1)
    keep(name, [small])
    return small.to(drafter.dtype)


# ---------------------------------------------------------------------------------------------
# 2. Pairs, prompts, requests.

# Ungated, with one Llama vocabulary of 32,000 entries. The drafter has two layers: on a GPU a pass
# over a small model costs its launches, and these are counted in layers.
HUB_PAIR = "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "Felladrin/Llama-68M-Chat-v1"
HUB_PROMPTS = [f"{ask} {what}." for what in (
    "the tides", "the game of chess", "a lighthouse", "binary search", "bread", "prime numbers",
    "the moon", "sorting a list") for ask in (
    "Write commented Python code about", "Tell me a short story about", "List twenty facts about")]
PROMPT, NEW = 48, (128, 192)  # bytes of a built-in prompt; new tokens per request, from and to


class Pair(NamedTuple):
    """Two models, what they are asked, and how to show one of their tokens."""
    name: str
    target: torch.nn.Module
    drafter: torch.nn.Module
    prompts: list[list[int]]
    show: Callable[[int], str]
    eos: list[int] = []
    kinds: list[str] = []  # of the prompts, which take turns


def byte_pair(device: torch.device, quick: bool, lines: list[str], seed: int) -> Pair:
    """The built-in pair, to go on with the given lines or with held-out text of three kinds."""
    models, texts = built_in_pair(device, quick), workloads(held_out=True)
    if lines:  # their ends: all positions must be trained ones
        prompts = [list(line.encode()[-(LENGTH - NEW[1]):]) for line in lines]
        return Pair("built-in, tokens are bytes", *models, prompts, chr)
    rng, prompts = random.Random(seed), []
    for text in list(texts.values()) * 100:
        start = rng.randrange(len(text) - PROMPT)
        prompts.append(list(text[start:start + PROMPT]))
    return Pair("built-in, tokens are bytes", *models, prompts, chr, kinds=list(texts))


def named_pair(names: tuple[str, str], device: torch.device, lines: list[str]) -> Pair:
    """Any two causal LMs with one vocabulary, by hub name or folder, in float32 at first."""
    tokenizer, other = [transformers.AutoTokenizer.from_pretrained(name) for name in names]
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if ours != theirs:
        odd = min(ours.items() ^ theirs.items())[0]
        sys.exit(f"the vocabularies differ: {names[0]} has {len(ours)} tokens, {names[1]} has "
                 f"{len(theirs)}; {odd!r} is {ours.get(odd)} in the first and {theirs.get(odd)} in "
                 "the second. A drafter must speak the target's tokens.")
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
        # subtle: a chat template brings its own start token; a second one was never trained on.
        prompts.append(tokenizer(line, add_special_tokens=not chat).input_ids)
        if not prompts[-1]:
            raise ValueError(f"the tokenizer makes no token of the prompt {line!r}")
    eos = models[0].generation_config.eos_token_id
    return Pair(" + ".join(names), *models, prompts, lambda token: tokenizer.decode([token]),
                eos if isinstance(eos, list) else [] if eos is None else [eos])


def find_pair(args, device: torch.device) -> Pair:
    """The pair that the flags name; else on CUDA one from the hub, if it can be reached."""
    lines = []
    if args.prompts is not None:
        try:
            lines = pathlib.Path(args.prompts).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            sys.exit(f"cannot read --prompts {args.prompts}: {error}")
        lines = [line for line in lines if line.strip()]
        if not lines:
            sys.exit(f"--prompts {args.prompts}: no line with a prompt in it")
    if args.target is not None:
        try:
            return named_pair((args.target, args.draft), device, lines)
        except Exception as error:  # each file of a folder has its own ways to be broken
            sys.exit(f"cannot load {args.target} with {args.draft}: {type(error).__name__}: "
                     f"{' '.join(str(error).split())[:400]}")
    if device.type == "cuda" and not args.quick:
        try:
            return named_pair(HUB_PAIR, device, lines)
        except Exception as error:  # no network, a proxy, a full disk: the demo goes on without
            print(f"no pair from the hub ({type(error).__name__}): the built-in one serves instead")
    return byte_pair(device, args.quick, lines, args.seed)


def longest(pair: Pair) -> int:
    """The most tokens that a request can come to, within the positions that both models have."""
    limits = [getattr(model.config, "max_position_embeddings", 0) or 10**9
              for model in (pair.target, pair.drafter)]
    most, limit = max(map(len, pair.prompts)), min(limits)
    if most + 32 > limit:
        raise ValueError(f"a prompt of {most} tokens leaves too little of {limit} positions")
    return min(limit, most + NEW[1])


def requests(pair: Pair, load: int, seed: int):
    """Endless (prompt, max_new_tokens), the same ones for every arm; the prompts take turns."""
    rng, limit = random.Random(seed), longest(pair)
    for n in itertools.count():
        prompt = pair.prompts[n % len(pair.prompts)]
        new = min(rng.randint(*NEW) // (6 if load < FEW else 1), limit - len(prompt))
        # The first batch is cut short at random: else it would all end, and be refilled, at once.
        yield prompt, rng.randint(1, new) if n < load else new


# ---------------------------------------------------------------------------------------------
# 3. Screens.

COLOURS = {"+": "32", "x": "31", "-": "33", ".": "90", "*": "1;36", "bold": "1", "dim": "2"}


def paint(text: str, colour: str) -> str:
    """Coloured on a terminal; as it is when piped, or with NO_COLOR set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\033[{COLOURS[colour]}m{text}\033[0m"


def status(text: str = ""):
    """A passing line on a terminal, replaced by the next one; nothing in a file."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def visible(text: str) -> str:
    """A token as it can stand in a line."""
    signs = {" ": "_", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return "".join(signs.get(c, c if c.isprintable() else "?") for c in text) or "''"


def percent(ratios: list[float]) -> str:
    """The median gain and its range: +12 % [+10..+15]."""
    middle, low, high = [100 * (f(ratios) - 1) for f in (statistics.median, min, max)]
    return f"{middle:+4.0f} % [{low:+.0f}..{high:+.0f}]"


def machine(device: torch.device) -> str:
    """The hardware in words."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    cpuinfo = pathlib.Path("/proc/cpuinfo")  # Linux; elsewhere Python knows the name or it does not
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} of {os.cpu_count()} cores, torch {torch.__version__}"


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
    patient: bool = False  # longer warm-up and slices
    estimators: dict = field(default_factory=dict)  # one per arm, which goes on learning

    @property
    def arms(self) -> list[tuple[str, int, str]]:
        """Name, K and plan of the table's arms."""
        return [("plain", 0, "fixed"), (f"fixed {self.K}", self.K, "fixed"),
                ("verification", self.K, "verification"), ("joint", self.K, "joint")]

    def title(self, text: str, measured: str = ""):
        """A headline, and under it on what and how often was measured (default: the rounds)."""
        status()
        print("\n" + paint(text, "bold") + "  (QUICK CHECK: nothing to quote)" * self.quick)
        print(paint(f"[{machine(self.pair.target.device)}; seed {self.seed}, "
                    f"{measured or f'{self.rounds} rounds'}]", "dim"), flush=True)


def introduce(run: Run):
    """Which pair, device, sizes, settings."""
    print(paint(f"pair      {run.pair.name}", "bold"))
    for name, model in (("target", run.pair.target), ("drafter", run.pair.drafter)):
        c, size = model.config, sum(w.numel() for w in model.parameters()) / 1e6
        print(f"  {name:8}{type(model).__name__}, layers: {c.num_hidden_layers} of width "
              f"{c.hidden_size}, {size:.1f} M weights, vocabulary {c.vocab_size}")
    mean = statistics.mean(map(len, run.pair.prompts))
    print(f"device    {machine(run.pair.target.device)}")
    print(f"settings  K = {run.K}, temperature {run.law['temperature']:g}, top-p "
          f"{run.law['top_p']:g}, seed {run.seed}; {len(run.pair.prompts)} prompts of about "
          f"{mean:.0f} tokens" + (f": {', '.join(run.pair.kinds)}" if run.pair.kinds else ""))


def greedy_check(run: Run):
    """Temperature 0, float32: each arm must give, token for token, what the target alone gives."""
    pair, ids, outputs = run.pair, run.pair.prompts[:3 if run.quick else 6], {}
    # A made-up table, steep enough to trim and to stop drafting; the true one is not measured yet.
    cost = av.CostTable({1: 1.0, 64: 2.0}, {1: 10.0, 64: 40.0})
    for name, K, plan in run.arms:
        outputs[name] = av.generate(
            pair.target, pair.drafter if K else None, ids, num_speculative_tokens=K, plan=plan,
            max_new_tokens=min(48, longest(pair) - max(map(len, ids))), max_batch_size=4,
            temperature=0, eos_token_id=pair.eos,
            cost=cost).tokens
        assert outputs[name] == outputs["plain"], f"greedy decoding: {name} differs from plain"
    print(f"check     greedy, {len(ids)} prompts, the same for all: fixed, verification and joint "
          f"gave the {sum(map(len, outputs['plain']))} tokens of plain decoding", flush=True)


def draft_ms(cost: av.CostTable, load: int, K: int) -> float:
    """Milliseconds to verify one more draft, on the average from none to all."""
    return (cost.verify(load * (K + 1)) - cost.verify(load)) / (load * K)


def measure(run: Run) -> dict[int, av.CostTable]:
    """Measure and show a cost table for each load: {requests: table}."""
    if longest(run.pair) < 2 * run.K + 2:
        raise ValueError(f"K = {run.K} is too much for {longest(run.pair)} positions")
    run.title("What a step costs in ms, by load (requests at once). T(n): n tokens into the target")
    print(f"  load{'a drafter pass':>17}{'no drafts':>21}{f'{run.K} drafts each':>21}"
          f"{'one more draft':>18}")
    context, costs = min(round(statistics.mean(map(len, run.pair.prompts)) + sum(NEW) / 4),
                         longest(run.pair) - run.K - 1), {}
    for load in run.loads:
        status(f"{load} requests: timing real steps")
        # Steps of one request are cheap, and their sizes differ by less than the noise of five.
        cost = costs[load] = av.measure_costs(
            run.pair.target, run.pair.drafter, run.pair.prompts, num_speculative_tokens=run.K,
            max_batch_size=load, context_length=context,
            repeats=2 if run.quick else 15 if load == 1 else 5 if load <= 16 else 3, **run.law)
        status()
        every = load * (run.K + 1)
        print(f"{load:6}{cost.draft(load):17.2f}{f'T({load})':>12}{cost.verify(load):9.2f}"
              f"{f'T({every})':>12}{cost.verify(every):9.2f}{draft_ms(cost, load, run.K):18.3f}",
              flush=True)
    return costs


def trace(run: Run, cost: av.CostTable, load: int, steps: int = 8):
    """The first steps of one request among `load`, under the published rule."""
    run.title(f"One request among {load}, step by step, with verification")
    print("  ".join(paint(f"{mark} {word}", mark) for mark, word in (
        ("+", "accepted"), ("x", "rejected"), ("-", "verified in vain, behind a rejection"),
        (".", "not verified"), ("*", "bonus, drawn from the target"))))
    print(paint("under each draft: its estimated chance to be kept, in %   (_ is a space)", "dim"))
    decoder = Arm(run, load, cost, *run.arms[2]).decoder
    watched = next(i for i in itertools.count(decoder.step().requests.max() + 1) if i % 3 == 1)
    shown = 0
    while shown < steps:
        done = decoder.step()
        for row in np.flatnonzero(done.requests == watched):
            if not shown:
                prompt = run.pair.prompts[watched % len(run.pair.prompts)]
                print("prompt   ..." + visible("".join(map(run.pair.show, prompt)))[-80:])
            shown += 1
            print_step(shown, done, row, run.pair.show)
        if done.requests.max() > watched + load:  # it ended early
            break


def print_step(number: int, done: av.Step, row: int, show: Callable[[int], str]):
    """A line of marked tokens, and under them their estimated survivals."""
    verified, accepted = done.num_verified[row], done.accepted[row]
    tokens, chances = f"step {number:2}  ", " " * 10
    for i in range((done.survival[row] >= 0).sum()):
        mark = "+" if i < accepted else "." if i >= verified else "x" if i == accepted else "-"
        text = visible(show(done.drafts[row, i]))
        tokens += paint(mark + text, mark) + " " * max(5 - len(text), 2)
        chances += f"{100 * done.survival[row, i]:<{max(len(text) + 1, 4) + 2}.0f}"
    print(tokens + paint("*" + visible(show(done.next_tokens[row])), "*"))
    print(paint(chances.rstrip(), "dim"))


# ---------------------------------------------------------------------------------------------
# 4. Measuring. All arms of a load are alive at once and take turns in short slices, so that what
#    else the machine does falls on all of them alike. A slice lasts until some requests have ended,
#    the same ones for each arm: easy and hard texts differ by more than the arms do.

FEW = 4  # with fewer requests at once than this they are shorter, or it would take minutes


class Arm:
    """One way to decode at one load: a decoder that lives on from slice to slice."""

    def __init__(self, run: Run, load: int, cost: av.CostTable, name: str, K: int, plan: str,
                 drafter=None):
        status(f"{load} requests: warming up {name}")
        pair, began = run.pair, time.perf_counter()
        estimator = None if plan == "fixed" else run.estimators.setdefault(
            name, av.AcceptanceEstimator(K))
        self.name, self.load = name, load
        self.whole = 9 if run.patient else 1 if run.quick else 3  # requests a slice, if few
        self.seconds = (2 if run.patient else 0.6 + load / 200) / (1 + run.quick)

        def start(cost):
            return av.Decoder(
                pair.target, drafter or (pair.drafter if K else None),
                requests(pair, load, run.seed), max_length=longest(pair), max_batch_size=load,
                num_speculative_tokens=K, plan=plan, estimator=estimator, cost=cost,
                eos_token_id=pair.eos, seed=run.seed, **run.law)

        self.decoder = start(copy.deepcopy(cost) if estimator else None)  # learns from its steps
        # Until the estimator has been refitted once (or five times), but not for ever.
        most, refits = (1.5, 1) if run.quick else (12, 5) if run.patient else (5, 1)
        while (spent := time.perf_counter() - began) < 0.5 or (
                estimator and estimator.steps < refits * estimator.refit_every and spent < most):
            self.decoder.step()
        # Every arm then starts anew, whatever its warm-up took: with the same texts, read by one
        # step, and caches as full. (An arm with requests just begun looked 3 % faster at 256.)
        self.decoder = start(self.decoder.cost)
        self.decoder.step()
        while load < FEW and not self.decoder.finished:  # and at the start of a request
            self.decoder.step()
        self.decoder.finished.clear()
        self.stats = self.decoder.stats = av.Stats(*np.zeros((3, K), int))
        self.rates, self.steps = [], []  # tokens/s by slice; (Step, seconds)

    def slice(self):
        """Some time's steps, their tokens per second; of few requests `whole` ones.

        (As many of each kind of text, but for --quick: within a second, one arm might just meet
        the easiest.)
        """
        began, tokens, few = self.now(), self.stats.committed, self.load < FEW
        while (then := self.now()) < began + self.seconds * (not few) or (
                few and len(self.decoder.finished) < self.whole):
            done = self.decoder.step()
            self.steps.append((done, self.now() - then))
        self.decoder.finished.clear()
        self.rates.append((self.stats.committed - tokens) / (self.now() - began))

    def now(self) -> float:
        """Seconds, by a clock that stands still while a drafter does what it need not pay for."""
        return time.perf_counter() - getattr(self.decoder.drafter, "free_seconds", 0.0)

    @property
    def rate(self) -> float:
        """Tokens per second, the median over the slices."""
        return statistics.median(self.rates)

    @property
    def spread(self) -> str:
        """Its least and its most."""
        return f"[{min(self.rates):.0f}..{max(self.rates):.0f}]"

    def over(self, other: "Arm") -> list[float]:
        """Rate over another arm's, round by round."""
        return [mine / its for mine, its in zip(self.rates, other.rates)]

    def per_step(self) -> tuple[float, float, float]:
        """Tokens out, drafts drawn, drafts verified, each per request and step."""
        drawn, verified = self.stats.proposed.sum(), self.stats.verified.sum()
        steps = max(self.stats.request_steps, 1)
        return self.stats.accept_length, drawn / steps, verified / steps


def race(run: Run, load: int, arms: list[tuple], cost: av.CostTable, report: Callable) -> list[Arm]:
    """Warm up, then let the arms take turns, each round from another one on; then `report` them.

    After Ctrl-C too, if each arm has had a slice: what has been measured is shown.
    """
    arms = [Arm(run, load, cost, *arm) for arm in arms]
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


# ---------------------------------------------------------------------------------------------
# 5. `python demo.py`


def show(run: Run, args):
    """The screens, in the order of the module's docstring."""
    costs, results = measure(run), {}
    load = max([n for n in run.loads if n <= 16], default=min(run.loads))
    trace(run, costs[load], load)
    run.title("Tokens per second, load (requests at once) kept up: median of slices [least..most]")
    print(f"  load  {'arm':13}{'tokens/s':>8}{'':15}{f'gain over fixed {run.K}':23}"
          "tokens out  drafted  verified")

    def rows(load, arms):
        results[load] = arms
        for arm in arms:
            gain = "baseline" if arm is arms[1] else percent(arm.over(arms[1]))
            out, drafted, verified = arm.per_step()
            row = (f"{load:6}  {arm.name:13}{arm.rate:8.0f} {arm.spread:14}{gain:23}{out:10.2f}"
                   f"{drafted:9.2f}{verified:10.2f}")
            best = arm.rate == max(other.rate for other in arms)
            print(paint(row, "bold") if best else row, flush=True)

    try:
        for load in run.loads:
            race(run, load, run.arms, costs[load], rows)
    finally:
        if results:
            print(f"{'':45}(per request and step; tokens out: the bonus token included)")
            explain(run, results)
            print_estimators(run)
            print_calibration(run, results)


def explain(run: Run, results: dict[int, list[Arm]]):
    """By load: the price of a draft from the cost table, how many bring less, what an arm does."""
    run.title("Why: a draft brings its chance to be kept; it costs time, which is worth tokens too")
    print(f"  load  {'arm':13}{'a draft costs, in tokens':27}bring less   so it{'':19}"
          f"gain over fixed {run.K}")
    for load, (_, fixed, verification, joint) in results.items():
        cost = verification.decoder.cost  # as it has learned on
        check, draw = [ms * verification.rate / 1e3 for ms in (
            draft_ms(cost, load, run.K), cost.draft(load) / load)]
        chance = np.concatenate([done.survival.ravel() for done, _ in verification.steps])
        chance = chance[chance >= 0]
        (_, drawn, verified), depth = verification.per_step(), joint.per_step()[1]
        for price, what, so, arm in (
                (check, "to verify", f"verifies {verified:.1f} of {drawn:.1f}", verification),
                (check + draw, "to draw and verify", f"draws {depth:.1f} of {drawn:.1f}", joint)):
            print(f"{load:6}  {arm.name:13}{price:.2f} {what:22}{(chance < price).mean():10.0%}"
                  f"   {so:24}{percent(arm.over(fixed))}")
    print(f"{'':13}(bring less: drafts whose estimated chance to be kept is below what they cost)")


def print_estimators(run: Run):
    """Slopes and intercepts."""
    run.title("What was learned: logit P(draft i is accepted) = w logit(q_max) + b_i")
    for name, estimator in run.estimators.items():
        print(f"  {name:14}w {estimator.slope:.2f}    b_0 to b_{run.K - 1}: "
              + " ".join(f"{b:+.2f}" for b in estimator.intercepts)
              + f"    ({estimator.steps} steps)")
    print("  (both start at w 0.50, b -0.20; published for other pairs: w 0.44 to 0.59)")


def labels(steps: list[tuple]) -> tuple[np.ndarray, np.ndarray]:
    """For each verified draft up to the first rejection: predicted confidence, and if accepted."""
    predicted, seen = [], []
    for done, _ in steps:
        position = np.arange(done.drafts.shape[1])
        labelled = (position < done.num_verified[:, None]) & (position <= done.accepted[:, None])
        before = np.pad(done.survival, ((0, 0), (1, 0)), constant_values=1)[:, :-1]
        predicted.append((done.survival / before)[labelled])
        seen.append((position < done.accepted[:, None])[labelled])
    return np.concatenate(predicted), np.concatenate(seen)


def diagram(predicted: np.ndarray, seen: np.ndarray, bins: int = 10):
    """Predicted against seen: the chance to be accepted, in bins of equal width."""
    print("  predicted    mean    seen   drafts   seen (#), predicted (|)")
    which = np.minimum((predicted * bins).astype(int), bins - 1)
    for b in np.unique(which):
        mean, share, n = predicted[which == b].mean(), seen[which == b].mean(), (which == b).sum()
        bar = list(f"{'#' * round(40 * share):41}")
        bar[round(40 * mean)] = "|"
        print(f"  {b / bins:.1f} to {(b + 1) / bins:.1f} {mean:6.2f}  {share:6.2f} {n:8}   "
              + "".join(bar).rstrip())
    print(f"  expected calibration error {ece(seen, predicted, bins):.3f} (published: 0.010)")


def print_calibration(run: Run, results: dict):
    """Predicted against seen, and so for the time of a step."""
    predicted, seen = labels([step for arms in results.values() for step in arms[2].steps])
    run.title(f"Did it come true? The {len(seen):,} drafts that verification checked, all loads")
    diagram(predicted, seen)
    ratios = {n: statistics.median(clock(arms[2:])) for n, arms in results.items()}
    print("  time of a step, as the cost table predicts it / as it was, median: "
          + ", ".join(f"{ratio:.2f} at {load}" for load, ratio in ratios.items()))


def clock(arms: list[Arm]) -> list[float]:
    """Of each step of some arms: the time that the cost table had said over the time it took."""
    return [done.seconds["predicted"] / seconds for arm in arms for done, seconds in arm.steps]


# ---------------------------------------------------------------------------------------------
# 6. `python demo.py sweep`: is adaptive on the frontier, or does some fixed K beat it?


def sweep(run: Run, args):
    """Every fixed K and both adaptive rules at each load; then text by text; then the peers."""
    arms = [(f"fixed {k}" if k else "plain", k, "fixed") for k in range(run.K + 1)] + run.arms[2:]
    run = replace(run, patient=True)
    costs, points = measure(run), {}
    run.title("Tokens per second, and per second and request, at steady load: median [least..most]")
    print(f"  load  {'arm':13}{'tokens/s':>8}{'':17}{'per request':>11}   of the best fixed K")

    def rows(load, arms):
        points[load], best = arms, max(arms[:-2], key=lambda arm: arm.rate)
        spread = lambda x: f"{statistics.median(x):.2f} [{min(x):.2f}..{max(x):.2f}]"
        for arm in arms:
            print(f"{load:6}  {arm.name:13}{arm.rate:8.0f} {arm.spread:16}{arm.rate / load:11.1f}"
                  f"   {spread(arm.over(best))}" + " <- best fixed K" * (arm is best), flush=True)
        # The best of eight by the same noisy rounds flatters the eight: so chosen by the others.
        for arm in arms[-2:] if run.rounds > 1 else ():
            share = [rate / max(arms[:-2], key=lambda a: statistics.median(
                a.rates[:i] + a.rates[i + 1:])).rates[i] for i, rate in enumerate(arm.rates)]
            print(f"{'':8}{arm.name} against the fixed K that is best in all other rounds: "
                  f"{spread(share)}")

    try:
        for load in run.loads:
            race(run, load, arms, costs[load], rows)
    finally:
        if points:
            frontier(run, points)
        if points and args.csv:
            write_csv(args.csv, points)
    if run.pair.kinds:
        by_kind(run, costs)
    if args.peers:
        for load in sorted({1, 16, 64} & set(run.loads)):
            peers(run, load, costs[load])
            if load > 1:
                peers(run, load, costs[load], mixed=True)


def frontier(run: Run, points: dict[int, list[Arm]]):
    """The points as a chart, and at which loads the adaptive rules are on the frontier."""
    run.title("The frontier: up, more tokens in all; right, faster for each request (log scales)")
    marks = [str(k % 10) for k in range(run.K + 1)] + ["V", "J"]
    dots = [(math.log(arm.rate / load), math.log(arm.rate), mark)
            for load, arms in points.items() for arm, mark in zip(arms, marks)]
    (left, right), (low, high) = [(min(v), max(v)) for v in list(zip(*dots))[:2]]
    grid = [[" "] * 80 for _ in range(21)]
    for x, y, mark in dots:
        row, column = (high - y) / max(high - low, 1e-9), (x - left) / max(right - left, 1e-9)
        grid[round(20 * row)][round(79 * column)] = mark
    for i, line in enumerate(grid):
        edge = {0: f"{math.exp(high):.0f}", 20: f"{math.exp(low):.0f}"}.get(i, "")
        print(f"{edge:>7} ┤{''.join(line).rstrip()}")
    print(f"{'':8}└{'─' * 80}\n{'':9}{math.exp(left):<73.0f}{math.exp(right):>7.0f}")
    print(f"{'':9}0 to {run.K}: that fixed K (0 is plain decoding)   V: verification   J: joint")
    for load, arms in points.items():
        best = max(arms[:-2], key=lambda arm: arm.rate)
        for arm in arms[-2:]:
            ahead = [f"{a.name} at {n}" for n, others in points.items() for a in others[:-2]
                     if a.rate > arm.rate and a.rate / n > arm.rate / load]
            print(f"{load:6}  {arm.name:13}" + (f"behind {', '.join(ahead)}" if ahead else
                  "on the frontier") + f"; against {best.name} here {percent(arm.over(best))}")


def write_csv(file: str, points: dict[int, list[Arm]]):
    """One line per load and arm."""
    with open(file, "w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow("load arm tokens_per_s least most accept_length drafted verified".split())
        for load, arms in points.items():
            for arm in arms:
                numbers = (arm.rate, min(arm.rates), max(arm.rates), *arm.per_step())
                writer.writerow([load, arm.name, *(f"{x:.3f}" for x in numbers)])
    print(f"written: {file}")


def by_kind(run: Run, costs: dict[int, av.CostTable]):
    """The gain of each rule on one kind of text at a time, at the load nearest to 64."""
    load = min(run.loads, key=lambda n: abs(n - 64))
    run.title(f"Gain over fixed {run.K} on one kind of text at a time, {load} requests")
    for i, kind in enumerate(run.pair.kinds):
        prompts = run.pair.prompts[i::len(run.pair.kinds)]
        alone = replace(run, pair=run.pair._replace(prompts=prompts), estimators={})

        def rows(load, arms):
            for arm in arms[1:]:
                gain = arm.over(arms[0])
                bar = "█" * round(50 * max(0, statistics.median(gain) - 1))
                print(f"{kind:>8}  {arm.name:13}{percent(gain):22}{bar}", flush=True)

        race(alone, load, run.arms[1:], costs[load], rows)


def peers(run: Run, load: int, cost: av.CostTable, mixed: bool = False):
    """transformers' own generation on the same pair, prompts, settings and token counts.

    All of one length, which suits a static batch best; or mixed ones, thrice as many as run at
    once: `generate` then runs each batch to its longest, and only what was asked for is counted.
    """
    pair, most = run.pair, longest(run.pair) - max(map(len, run.pair.prompts))
    before, rng = pair.drafter.generation_config, random.Random(run.seed)
    shortest = min(map(len, pair.prompts))  # equal prompts: nobody pays for padding
    prompts = [pair.prompts[i % len(pair.prompts)][-shortest:]
               for i in range(max(load * (3 if mixed else 1), 3))]
    new = [min(rng.randint(NEW[0], NEW[mixed]), most) for _ in prompts]
    run.title(f"Beside transformers' generate, tokens per second: {load} requests at once, "
              f"{min(new)} to {max(new)} new tokens each")

    def ours(K, plan):
        adaptive = dict(cost=cost, estimator=run.estimators.get(plan)) if plan != "fixed" else {}
        av.generate(pair.target, pair.drafter if K else None, prompts, max_new_tokens=new,
                    num_speculative_tokens=K, max_batch_size=load, plan=plan, seed=run.seed,
                    **adaptive, **run.law)

    def theirs(**assistant):
        pair.drafter.generation_config = copy.deepcopy(before)
        pair.drafter.generation_config.update(**assistant)
        helper = dict(assistant_model=pair.drafter) if assistant else {}
        for i in range(0, len(prompts), load):
            ids = torch.tensor(prompts[i:i + load], device=pair.target.device)
            length = max(new[i:i + load])
            sampling = dict(do_sample=True, top_k=0, **run.law)
            pair.target.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0,
                                 max_new_tokens=length, min_new_tokens=length, **helper,
                                 **(sampling if run.law["temperature"] else dict(do_sample=False)))

    arms = {"generate": theirs}
    if load == 1:  # assisted generation takes one request at a time; 20 tokens are its default
        arms["assisted, its defaults"] = functools.partial(theirs, num_assistant_tokens=20)
        arms[f"assisted, constant {run.K}"] = functools.partial(
            theirs, num_assistant_tokens=run.K, assistant_confidence_threshold=0.0)
    arms |= {f"here: {name}": functools.partial(ours, K, plan) for name, K, plan in run.arms}
    rates = {name: [] for name in arms}
    try:
        for _ in range(run.rounds + 1):  # the first round warms up
            for name, arm in arms.items():
                status(f"{load} requests: {name}")
                began = time.perf_counter()
                arm()
                rates[name].append(sum(new) / (time.perf_counter() - began))
    finally:
        status()
        pair.drafter.generation_config = before
        for name, (_, *measured) in ((n, r) for n, r in rates.items() if len(r) > 1):
            print(f"{load:6}  {name:24}{statistics.median(measured):8.0f} "
                  f"[{min(measured):.0f}..{max(measured):.0f}]", flush=True)


# ---------------------------------------------------------------------------------------------
# 7. `python demo.py study`: the published study, on this pair. First the statistics: `seen` is
#    whether each draft was accepted, a bool (n,); predictions and scores are (n,) too.


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0, -x))


def auc(seen: np.ndarray, score: np.ndarray) -> float:
    """P(an accepted draft scores above a rejected one), a tie counting half: from mid-ranks."""
    _, which, count = np.unique(score, return_inverse=True, return_counts=True)
    ranks, n = (np.cumsum(count) - (count - 1) / 2)[which], int(seen.sum())
    return (ranks[seen].sum() - n * (n + 1) / 2) / max(n * (len(seen) - n), 1)


def log_loss(seen: np.ndarray, predicted: np.ndarray) -> float:
    """Mean of -log(the chance that was given to what happened), in nats."""
    return -np.log(np.where(seen, predicted, 1 - predicted).clip(1e-12)).mean()


def ece(seen: np.ndarray, predicted: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error: |mean predicted - share seen| over bins of equal width."""
    which = np.minimum((predicted * bins).astype(int), bins - 1)
    return np.abs(np.bincount(which, predicted - seen)).sum() / len(seen)


def fit_logistic(x: np.ndarray, seen: np.ndarray, ridge: float = 1e-6) -> np.ndarray:
    """theta (d,) that minimises the summed log-loss of sigmoid(x @ theta) + ridge/2 |theta|^2.

    Newton's method in float64 on all labels at once; a step that would overshoot is halved.
    """
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
    """`statistic(rows)` of resampled requests, (draws, ...): labels of one text are no fresh draws.

    The same draws at each call, so that differences between two statistics are paired.
    """
    rng = np.random.default_rng(0)
    members = [np.flatnonzero(group == g) for g in np.unique(group)]
    return np.array([statistic(np.concatenate(
        [members[i] for i in rng.integers(len(members), size=len(members))]))
        for _ in range(draws)])


def spread(draws: np.ndarray) -> np.ndarray:
    """Half the width of the 95 % interval of bootstrap draws."""
    low, high = np.percentile(draws, [2.5, 97.5], axis=0)
    return (high - low) / 2


# Collecting: every draft of a full verification that has a label, and what was known of it.


@dataclass
class Drafts:
    """Labelled drafts: (n,) each, but hidden (n, H). Rows are temperature-scaled, before top-p."""
    seen: np.ndarray  # accepted?
    position: np.ndarray
    request: np.ndarray
    limit: np.ndarray  # the true chance, sum of min(p, q) over the vocabulary, after top-p
    top: np.ndarray  # logit(q_max)
    drawn: np.ndarray  # logit(q(x)) of the token that was drawn
    margin: np.ndarray  # log q_max - log q_2nd
    entropy: np.ndarray
    hidden: np.ndarray  # what the drafter's last layer gave to its output embedding

    def where(self, rows: np.ndarray) -> "Drafts":
        """Some of them."""
        return Drafts(*(x[rows] for x in vars(self).values()))


@contextlib.contextmanager
def last_hidden(model, passes: int):
    """While it is open: the inputs (R, H) of the output embedding in the last passes."""
    kept = collections.deque(maxlen=passes)
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda module, inputs: kept.append(inputs[0][0].float()))
    try:
        yield kept
    finally:
        hook.remove()


def watch(lm) -> list:
    """Make a model of a decoder keep, for each call of `logits`, its slots and what it returned."""
    calls, logits = [], lm.logits

    def kept(tokens, lengths, slots, *more):
        calls.append((slots, logits(tokens, lengths, slots, *more)))
        return calls[-1][1]

    lm.logits = kept
    return calls


def overlap(checked: torch.Tensor, drafted: torch.Tensor, law: dict) -> torch.Tensor:
    """The chance that a draft is accepted, sum of min(p, q), from rows of logits (n, V): (n,)."""
    p, q = (av.warp(logits, **law) for logits in (checked, drafted[:, :checked.shape[1]]))
    return torch.minimum(p[:, :q.shape[1]], q).sum(-1).double().clamp(max=1)


def labelled(done: av.Step, law: dict, drafted: list, checked: torch.Tensor, hidden):
    """Of one step, pass by pass, the columns of `Drafts`; as tensors."""
    first = np.cumsum(done.num_verified + 1) - (done.num_verified + 1)  # target row of draft 0
    for i, ((slots, logits), last) in enumerate(zip(drafted, hidden)):
        some = (i < done.num_verified[slots]) & (i <= done.accepted[slots])
        rows, some = slots[some], torch.from_numpy(some).to(logits.device)
        logits = logits[some][:, :checked.shape[1]]
        log_q = (logits.double() / (law["temperature"] or 1)).log_softmax(-1)
        x = torch.from_numpy(done.drafts[rows, i]).to(logits.device)
        best = log_q.topk(2).values
        target_rows = torch.from_numpy(first[rows] + i).to(logits.device)
        yield (torch.from_numpy(done.accepted[rows] > i), torch.full((len(rows),), i),
               torch.from_numpy(done.requests[rows]), overlap(checked[target_rows], logits, law),
               av.logit_q_max(logits, law["temperature"]).double(),
               log_q.gather(1, x[:, None])[:, 0].exp().logit().clamp(-10, 10),
               best[:, 0] - best[:, 1], -(log_q.exp() * log_q.clamp(min=-1e3)).sum(-1), last[some])


@torch.no_grad()
def collect(run: Run, drafter, law: dict, wanted: int, what: str) -> tuple[Drafts, list[av.Step]]:
    """Decode with every draft verified until there are enough labels; and the steps themselves."""
    pair, load, parts, steps, n = run.pair, run.loads[-1], [], [], 0
    decoder = av.Decoder(pair.target, drafter, requests(pair, load, run.seed), plan="fixed",
                         max_length=longest(pair), max_batch_size=load, eos_token_id=pair.eos,
                         num_speculative_tokens=run.K, seed=run.seed, **law)
    drafted, checked = watch(decoder.drafter), watch(decoder.target)
    with last_hidden(drafter, run.K) as hidden:
        while n < wanted:
            for calls in (drafted, checked, hidden):
                calls.clear()
            steps.append(decoder.step())
            for columns in labelled(steps[-1], law, drafted, checked[0][1], hidden):
                parts.append([x.cpu().numpy() for x in columns])
                n += len(parts[-1][0])
            status(f"{what}: {n:,} of {wanted:,} labels")
    status()
    return Drafts(*map(np.concatenate, zip(*parts))), steps


# 1. Features. Each gets a slope and an intercept per position, as the shipped one has.


def log_of(logit: np.ndarray) -> np.ndarray:
    """log q from logit(q), exact also where q is all but 1."""
    return -np.logaddexp(0, -logit)


FEATURES = [  # name, of a Drafts, lossless, published AUC, log-loss, ECE
    ("log q_max", lambda d: log_of(d.top), "yes", (0.8069, 0.4813, 0.0592)),
    ("log q_max - log q_2nd", lambda d: d.margin, "yes", (0.8156, 0.4437, 0.0105)),
    ("entropy H(q)", lambda d: d.entropy, "yes", (0.8321, 0.4577, 0.0638)),
    ("-log(-log q_max)", lambda d: -np.log(-log_of(d.top)), "yes", (0.8336, 0.4289, 0.0103)),
    ("logit q_max (shipped)", lambda d: d.top, "yes", (0.8336, 0.4284, 0.0100)),
    ("logit q_drawn", lambda d: d.drawn, "NO", (0.8553, 0.4040, 0.0152)),
    ("-log(-log q_drawn)", lambda d: -np.log(-log_of(d.drawn)), "NO",
     (0.8554, 0.4075, 0.0193)),
]


def design(feature: np.ndarray, position: np.ndarray, K: int) -> np.ndarray:
    """Columns of a regression: the feature (or features), then one indicator per position."""
    return np.column_stack([feature, np.eye(K)[position]])


def predictions(K: int, fit: Drafts, held: Drafts) -> dict[str, tuple]:
    """{name: (predicted chances on the held-out half, lossless, published figures)}."""
    def fitted(feature, ridge=1e-6):
        theta = fit_logistic(design(feature(fit), fit.position, K), fit.seen, ridge)
        return sigmoid(design(feature(held), held.position, K) @ theta)

    rows = {name: (fitted(feature), *more) for name, feature, *more in FEATURES}
    rows["q_max, no fit"] = sigmoid(held.top), "yes", (0.8259, 0.4880, 0.0736)
    rows["trained head"] = fitted(lambda d: d.hidden, 1.0), "yes", (0.8191, 0.4449, 0.0052)
    rows["the limit: sum min(p, q)"] = held.limit, "-", ()
    rows["position alone"] = fitted(lambda d: 0 * d.top), "yes", ()
    rows["base rate"] = np.full(len(held.seen), fit.seen.mean()), "yes", ()
    return rows


def scores(seen: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """AUC, log-loss, ECE."""
    return np.array([auc(seen, predicted), log_loss(seen, predicted), ece(seen, predicted)])


def print_features(run: Run, held: Drafts, rows: dict[str, tuple], measured: str):
    """The table of features, the published figures beside it."""
    run.title("Which feature tells what will be accepted?", measured)
    print("(fitted on half of the requests, scored on the others; ± half a 95 % interval, by "
          "bootstrap over requests;\n ECE in 10 bins of equal width; head: linear on the drafter's "
          "last hidden state, and an intercept per position)")
    print(f"{'':25}lossless  AUC           log-loss      ECE            published: the same")
    for name, (predicted, lossless, published) in rows.items():
        value = scores(held.seen, predicted)
        error = spread(bootstrap(
            held.request, lambda i, p=predicted: scores(held.seen[i], p[i])))
        row = f"{name:25}{lossless:10}" + "".join(
            f"{v:.4f} ±{e:.4f}"[:13] + " " for v, e in zip(value, error))
        row += "  " + " ".join(f"{x:.4f}" for x in published)
        print(paint(row, "bold") if "shipped" in name else row, flush=True)
    loss = {name: log_loss(held.seen, predicted) for name, (predicted, *_) in rows.items()}
    way = loss["base rate"] - loss["the limit: sum min(p, q)"]
    print("of the way in log-loss from the base rate to the limit: " + ", ".join(
        f"{name} covers {(loss['base rate'] - loss[name]) / way:.0%}"
        for name in ("logit q_max (shipped)", "trained head", "position alone")))
    print(f"q_max as it is predicts {sigmoid(held.top).mean():.3f}, seen {held.seen.mean():.3f} "
          "(published: 0.784, 0.723)")


# 2. The estimator against a confidence head.


def print_head(run: Run, held: Drafts, rows: dict[str, tuple], measured: str):
    """Overall, without the first position, and the AUC of each position as a chart."""
    run.title("Against a trained confidence head", measured)
    names = {"e": "logit q_max (shipped)", "h": "trained head", "l": "the limit: sum min(p, q)"}
    later = held.position > 0
    print(f"{'AUC, log-loss, ECE':20}{'estimator':23}{'published':23}{'head':23}published")
    for what, some, *published in (
            ("all positions", later | True, "0.8336 0.4284 0.0100", "0.8191 0.4449 0.0052"),
            ("without the first", later, "0.8352 0.4420 0.0103", "0.8075 0.4743 0.0090")):
        ours = [scores(held.seen[some], rows[names[mark]][0][some]) for mark in "eh"]
        print(f"  {what:18}" + "   ".join(" ".join(f"{x:.4f}" for x in our) + f"   {theirs}"
                                          for our, theirs in zip(ours, published)))
    print("AUC by position   0.5" + " " * 43 + "1.0    e: estimator   h: head   l: limit")
    for i in range(run.K):
        here, line = held.position == i, [" "] * 51
        value = {m: auc(held.seen[here], rows[name][0][here]) for m, name in names.items()}
        for mark, x in value.items():
            line[round(100 * max(0, x - 0.5))] = mark
        print(f"  {i + 1}  {here.sum():7} drafts |{''.join(line)}| "
              + "  ".join(f"{mark} {x:.3f}" for mark, x in value.items()))


# 3. The fit.


def feed(estimator: av.AcceptanceEstimator, steps: list[av.Step], keep: Callable):
    """Show recorded steps to an estimator: of each those rows for whose requests `keep` is true."""
    for done in steps:
        rows = keep(done.requests)
        estimator.observe(done.features[rows], done.num_verified[rows], done.accepted[rows])
    return estimator


def chance(estimator: av.AcceptanceEstimator, d: Drafts) -> np.ndarray:
    """What an estimator says of some drafts."""
    return sigmoid(estimator.slope * d.top + np.array(estimator.intercepts)[d.position])


def print_fit(run: Run, fit: Drafts, held: Drafts, optimum: np.ndarray, steps: list[av.Step],
              keep: Callable, measured: str) -> av.AcceptanceEstimator:
    """Online against all at once, one slope against several, and a calibration diagram."""
    run.title("The fit: online, as shipped, against the optimum of all labels at once", measured)
    K, one_hot = run.K, np.eye(run.K)
    online = {n: feed(av.AcceptanceEstimator(K, refit_every=n), steps, keep) for n in (100, 10)}
    several = fit_logistic(np.hstack([one_hot[fit.position] * fit.top[:, None],
                                      one_hot[fit.position]]), fit.seen)
    rows = {"the start: 0.5, -0.2": chance(av.AcceptanceEstimator(K), held)}
    rows |= {f"online, refits: {e.steps // n}, one every {n} steps": chance(e, held)
             for n, e in online.items()}
    rows["all labels, one slope"] = optimum
    rows["all labels, a slope per position"] = sigmoid(
        several[:K][held.position] * held.top + several[K:][held.position])
    best = log_loss(held.seen, optimum)
    print(f"{'':45}AUC      log-loss   ECE      log-loss above the optimum")
    for name, predicted in rows.items():
        value = scores(held.seen, predicted)
        print(f"  {name:40}" + "".join(f"{x:9.4f}" for x in value) + f"{value[1] - best:+12.4f}")
    print("  (published: sharing the slope costs 0.0002 AUC and 0.0003 log-loss)")
    diagram(chance(online[100], held), held.seen)
    return online[100]


def print_damping(run: Run, held: Drafts, steps: list[av.Step], keep: Callable, rounds: int = 5):
    """Few requests at a time: is a coefficient with few labels better moved with care?"""
    every = min(10, len(steps) // rounds)
    run.title("Few labels: held-out log-loss after some refits from the start", f"{rounds} refits, "
              f"one every {every} steps; mean (worst) of trials on different requests")

    def trial(at, group, few, damping):
        estimator = av.AcceptanceEstimator(run.K, refit_every=every, damping=damping)
        rows = slice(group * few, (group + 1) * few)
        feed(estimator, steps[at:at + rounds * every], lambda r: np.flatnonzero(keep(r))[rows])
        return log_loss(held.seen, chance(estimator, held))

    starts = range(0, len(steps) - rounds * every + 1, rounds * every)
    for few in [n for n in (1, 4, 12) if 4 * n <= run.loads[-1]] or [1]:  # of half the requests
        line = f"  requests at once: {few:2}"
        for damping, what in ((50, "damping 50"), (0, "off")):
            losses = [trial(at, group, few, damping) for at in starts for group in range(2)]
            line += f"   {what} {np.mean(losses):.4f} ({max(losses):.4f})"
        print(line + f"   {len(losses)} trials", flush=True)


def print_switch(run: Run, drafts: Drafts, steps: list[av.Step], rounds: int = 5):
    """The kind of text changes under the online fit: easy, hard, easy. A round is one refit."""
    kinds = len(run.pair.kinds)
    rate = [drafts.seen[drafts.request % kinds == k].mean() for k in range(kinds)]
    easy, hard = int(np.argmax(rate)), int(np.argmin(rate))
    request, *columns = (np.concatenate([getattr(done, name) for done in steps])
                         for name in ("requests", "features", "num_verified", "accepted"))
    first, last = np.array_split(np.flatnonzero(request % kinds == easy), 2)
    between = np.flatnonzero(request % kinds == hard)[:len(first)]
    phases = (easy, first), (hard, between), (easy, last)
    run.title("The online fit follows a switch of workload: predicted (p) and seen (s) acceptance",
              f"one refit a round, on about {len(drafts.seen) // kinds // 2 // rounds:,} labels")
    estimator, late = av.AcceptanceEstimator(run.K, refit_every=1), []
    for kind, rows in phases:
        gaps = []
        for part in np.array_split(rows, rounds):
            features, verified, accepted = (torch.from_numpy(x[part]) for x in columns)
            position = torch.arange(run.K)
            some = (position < verified[:, None]) & (position <= accepted[:, None])
            p = estimator.predict(features)[some].mean().item()
            s = (position < accepted[:, None])[some].double().mean().item()
            estimator.observe(features, verified, accepted)
            gaps.append(abs(p - s))
            line = [" "] * 51
            line[round(50 * s)], line[round(50 * p)] = "s", "p"
            print(f"  {run.pair.kinds[kind]:8} {p:.3f} {s:.3f}  |{''.join(line)}|", flush=True)
        late.append(next((i for i, gap in enumerate(gaps) if gap < 0.03), None))
    print("  refits until predicted and seen are within 0.03 of each other, by phase: "
          + ", ".join("none was enough" if n is None else str(n) for n in late))


# 4. Slopes and intercepts, text by text and pair by pair.

BY_WORKLOAD = """gsm8k 0.781 0.562 0.5365 +0.478; humaneval 0.751 0.669 0.5135 +0.486;
speed-bench low 0.755 0.703 0.5087 +0.610; mt-bench 0.714 0.800 0.5495 +0.181;
speed-bench high 0.642 1.077 0.5197 -0.089"""
BY_PAIR = """DSV4-Flash + DSpark (5 drafts) 0.5013 0.0250 +0.279;
MiMo-V2.5-Pro + DFlash (8) 0.5197 0.0415 -1.000; Inkling + MTP (8) 0.5859 0.0349 -0.572;
Muse-Glimmer-30B + DFlash2 (7) 0.4450 0.0323 +0.167"""


def slopes(d: Drafts, K: int) -> np.ndarray:
    """Acceptance, mean draft entropy, slope, intercepts."""
    return np.array([d.seen.mean(), d.entropy.mean(),
                     *fit_logistic(design(d.top, d.position, K), d.seen)])


def print_workloads(run: Run, drafts: Drafts, measured: str):
    """A row per kind of text; is it the slope or the intercept that follows the entropy?"""
    run.title("Slope and intercepts by workload, all labels of each", measured)
    print(f"{'':20}accepted  entropy   slope    b_0     (b_1 ...)")
    kinds = run.pair.kinds
    ours = [slopes(drafts.where(drafts.request % len(kinds) == k), run.K)
            for k in range(len(kinds))]
    for kind, (a, h, w, b, *more) in zip(kinds, ours):
        print(f"  {kind:18}{a:7.3f}{h:10.3f}{w:9.4f}{b:+9.3f}    "
              + " ".join(f"{x:+.2f}" for x in more))
    published = [row.split() for row in BY_WORKLOAD.split(";")]
    for *name, a, h, w, b in published:
        print(paint(f"  {' '.join(name):18}{a:>7}{h:>10}{w:>9}{b:>9}    published", "dim"))
    for what, table in (("here", np.array(ours)[:, :4]),
                        ("published", np.array([row[-4:] for row in published], float))):
        r = np.corrcoef(table.T)[1, 2:]
        print(f"  correlation with entropy, {what}: slope {r[0]:+.2f}, b_0 {r[1]:+.2f} "
              f"({len(table)} points)")


def print_pairs(run: Run, drafts: Drafts, wanted: int):
    """A row per pair: this one, one with a smaller drafter, this one at another temperature."""
    run.title("Slope and first intercept by pair", "sd: over bootstrap draws of the requests")
    print(f"{'':35}accepted  entropy   slope    sd       b_0     labels")
    other = 0.7 if run.law["temperature"] != 0.7 else 1.0
    pairs = {"this pair": (None, run.law),
             f"temperature {other}": (run.pair.drafter, {**run.law, "temperature": other})}
    if run.pair.kinds:
        pairs["a drafter of half the width"] = small_drafter(run.pair.drafter, run.quick), run.law
    for name, (drafter, law) in pairs.items():
        d = collect(run, drafter, law, wanted, name)[0] if drafter else drafts
        a, h, w, b, *_ = slopes(d, run.K)
        sd = bootstrap(d.request, lambda i, d=d: slopes(d.where(i), run.K)[2], 20).std()
        print(f"  {name:33}{a:7.3f}{h:10.3f}{w:9.4f}{sd:9.4f}{b:+9.3f}{len(d.seen):10,}",
              flush=True)
    for *name, w, sd, b in (row.split() for row in BY_PAIR.split(";")):
        print(paint(f"  {' '.join(name):50}{w:>9}{sd:>9}{b:>9} published", "dim"))


# 5. What a rule does that looks at the drawn token: two examples small enough to enumerate.


def next_token_law(p, q: Callable, K: int, verified: Callable) -> np.ndarray:
    """Exact law of the next token (V,): target p at each position, drafter q(drafts so far).

    `verified(drafts)` drafts are checked. Every draft that can be drawn is gone through.
    """
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
    cost = av.CostTable({1: 1e-9}, {1: 1, 2: 1.9, 3: 1.9, 4: 2.8})  # 0, 1, 2 drafts: 1, 1.9, 1.9

    def two(drafts):  # this drafter is sure of itself after token a
        return np.array([0.99, 0.01]) if drafts == (0,) else p

    def trimmed(drafts, budget=None):
        rows = torch.tensor(np.array([two(drafts[:i]) for i in range(2)])).log()
        # Slope 1, intercept 0: the confidence is q_max itself.
        survival = torch.sigmoid(av.logit_q_max(rows).double()).cumprod(0)[None]
        if budget is None:
            budget = av.draft_budget(survival.numpy(), cost)
        return av.trim(survival, budget).item()

    laws = {"verify if q(drawn token) >= 0.5": next_token_law(
                p, lambda drafts: one, 1, lambda drafts: one[drafts[0]] >= 0.5),
            "verify if q_max >= 0.5 (shipped)": next_token_law(
                p, lambda drafts: one, 1, lambda drafts: one.max() >= 0.5),
            "budget from this step's survivals": next_token_law(p, two, 2, trimmed)}
    for budget in range(3):
        laws[f"a budget of {budget} from before (shipped)"] = next_token_law(
            p, two, 2, functools.partial(trimmed, budget=budget))
    return {rule: (law, p) for rule, law in laws.items()}


def print_biased(run: Run):
    """How far from the target each rule is."""
    run.title("What a rule does that looks at the drawn token: the next token, two small examples",
              "enumerated, nothing is drawn")
    for rule, (law, target) in biased_rules().items():
        far = np.abs(law - target).sum() / 2
        print(f"  {rule:40}P(a) {law[0]:.3f} for {target[0]:.3f}   total variation {far:.3f}")


# 6. The same loop with another confidence.


class Fixed(av.AcceptanceEstimator):
    """A confidence that comes from elsewhere and learns nothing, from the features (R, K)."""

    def __init__(self, K: int, confidence: Callable):
        super().__init__(K)
        self.confidence = confidence
        self.steps = self.refit_every + 1  # nothing to wait for

    def predict(self, features):
        """Takes a tensor or an array, returns its kind."""
        confidence = self.confidence(torch.as_tensor(features).double())
        return confidence if isinstance(features, torch.Tensor) else confidence.numpy()

    def observe(self, *labels):
        """Count the step."""
        self.steps += 1


def by_pass(features: torch.Tensor, kept: collections.deque, confidence: Callable):
    """Confidences (R, K) from what was kept of a step's passes, each of the rows then drafted."""
    drafted, out = features != 0, torch.zeros_like(features)
    for i, values in enumerate(list(kept)[len(kept) - int(drafted.any(0).sum()):]):
        out[drafted[:, i], i] = confidence(values, i).to(out)
    return out


class Oracle:
    """The drafter, which also runs the target to know the chance of each draft: the ceiling.

    What it would never be given in use takes no time on its arm's clock (`free_seconds`).
    """

    def __init__(self, run: Run, load: int):
        self.drafter, self.target = (av.SlotLM(model, load, longest(run.pair))
                                     for model in (run.pair.drafter, run.pair.target))
        self.law, self.device, self.free_seconds = run.law, run.pair.target.device, 0.0
        self.chances = collections.deque(maxlen=run.K)

    def time(self) -> float:
        """Now, with all that was asked of the device done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def logits(self, tokens, lengths, slots):
        """The drafter's; and on the side the chance to be accepted of what will be drawn."""
        logits, began = self.drafter.logits(tokens, lengths, slots), self.time()
        self.chances.append(overlap(self.target.logits(tokens, lengths, slots), logits, self.law))
        self.free_seconds += self.time() - began
        return logits

    def commit(self, slots, lengths):
        """To both."""
        self.drafter.commit(slots, lengths), self.target.commit(slots, lengths)

    def reset(self, slot):
        """To both."""
        self.drafter.reset(slot), self.target.reset(slot)


def print_ingredients(run: Run, fit: Drafts, online: av.AcceptanceEstimator):
    """Tokens per second of verification with each confidence, all at once by turns."""
    K, load, device = run.K, run.loads[-1], run.pair.target.device
    head = torch.from_numpy(fit_logistic(design(fit.hidden, fit.position, K), fit.seen, 1.0)).to(
        device)
    oracle, plan = Oracle(run, load), (K, "verification")
    learned = av.AcceptanceEstimator(K)
    learned.slope, learned.intercepts = online.slope, online.intercepts
    learned.steps = learned.refit_every + 1
    with last_hidden(run.pair.drafter, K) as hidden:
        confidences = {
            "q_max, no fit (EAGLE-2)": torch.sigmoid,
            "trained head": lambda f: by_pass(f, hidden, lambda h, i: torch.sigmoid(
                h.double() @ head[:-K] + head[i - K])),
            "q_max >= 0.5 (Draft & Verify)": lambda f: (f >= 0).double(),
            "the truth, sum min(p, q)": lambda f: by_pass(f, oracle.chances, lambda c, i: c)}
        run = replace(run, estimators={"online fit": learned} | {
            name: Fixed(K, confidence) for name, confidence in confidences.items()})
        arms = [(f"fixed {K}", K, "fixed"), *((name, *plan) for name in run.estimators)]
        arms[-1] += (oracle,)
        run.rounds *= 3  # the arms differ by a few per cent only
        run.pair = run.pair._replace(prompts=run.pair.prompts[1::2])  # none that was fitted on
        status("measuring costs")
        cost = av.measure_costs(run.pair.target, run.pair.drafter, run.pair.prompts,
                                num_speculative_tokens=K, max_batch_size=load,
                                context_length=longest(run.pair) // 2, **run.law)
        first = Arm(run, load, cost, *arms[1])  # its steps show what the table still gets wrong
        for _ in range(4 if run.quick else 30):
            first.decoder.step()
        cost = first.decoder.cost
        cost.learning = False  # the same costs for all: the oracle's steps take other times
        run.title(f"What a good confidence buys: verification, {load} requests, all else equal")
        print(f"{'':32}tokens/s               over fixed {K}, ± 95 %     out  verified  kept")
        race(run, load, arms, cost, print_arms)


def print_arms(load: int, arms: list[Arm]):
    """The rows of that table; out, verified: per request and step."""
    for arm in arms:
        out, _, verified = arm.per_step()
        ratios = arm.over(arms[0])
        error = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5
        gain = f"{statistics.mean(ratios) - 1:+7.1%} ± {error:.1%}" if arm is not arms[0] else ""
        print(f"  {arm.name:30}{arm.rate:8.0f} {arm.spread:16}{gain:21}{out:7.2f}{verified:8.2f}"
              f"{(out - 1) / verified:8.0%}", flush=True)


def study(run: Run, args):
    """All of it, each table as soon as it is measured."""
    prompts, wanted = len(run.pair.prompts), 4_000 if run.quick else 50_000

    def half(requests):  # no prompt is in both
        return requests % prompts % 2 == 0

    if prompts < 2:
        raise ValueError("the study fits on some prompts and scores on others: give at least 2")
    drafts, steps = collect(run, run.pair.drafter, run.law, wanted, "decoding, all verified")
    fit, held = drafts.where(half(drafts.request)), drafts.where(~half(drafts.request))
    measured = (f"{len(drafts.seen):,} labels of {len(np.unique(drafts.request))} requests, "
                f"{len(held.seen):,} held out; all {run.K} drafts verified, load {run.loads[-1]}")
    status("fitting each feature and the confidence head")
    rows = predictions(run.K, fit, held)
    print_features(run, held, rows, measured)
    print_head(run, held, rows, measured)
    online = print_fit(run, fit, held, rows["logit q_max (shipped)"][0], steps, half, measured)
    print_damping(run, held, steps, half)
    if run.pair.kinds:
        print_switch(run, drafts, steps)
        print_workloads(run, drafts, measured)
    else:
        print("\n(no kinds of text here: the switch and the table by workload are left out, and "
              "so is a smaller drafter)")
    print_pairs(run, drafts, wanted // 5)
    print_biased(run)
    print_ingredients(run, fit, online)


# ---------------------------------------------------------------------------------------------
# 8. Main.

COMMANDS = {"show": show, "sweep": sweep, "study": study}
LOADS = {"show": [1, 16, 64], "sweep": [1, 4, 16, 64, 256], "study": [64]}


def concurrencies(text: str) -> list[int]:
    """1,16,64"""
    return sorted({int(n) for n in text.split(",")})


def arguments() -> argparse.Namespace:
    """The command line; settings as published unless a flag says otherwise."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=COMMANDS, default="show")
    flag = parser.add_argument
    flag("--quick", action="store_true", help="a check, half a minute for the table")
    flag("--target", metavar="NAME", help="hub name or folder of a causal LM")
    flag("--draft", metavar="NAME", help="a smaller one with the same vocabulary")
    flag("--prompts", metavar="FILE", help="your own prompts, one per line")
    flag("--concurrency", metavar="N,N,N", help="requests at once", type=concurrencies)
    flag("-k", "--num-speculative-tokens", dest="k", metavar="K", type=int, default=7)
    flag("--temperature", type=float, default=1.0)
    flag("--top-p", type=float, default=0.95)
    flag("--seed", type=int, default=0)
    flag("--rounds", type=int, help="slices per arm: 5, with --quick 2")
    flag("--threads", type=int, help="CPU threads: all cores")
    flag("--csv", metavar="FILE", help="sweep: write its points to a file as well")
    flag("--peers", action="store_true", help="sweep: transformers' generate as well")
    args = parser.parse_args()
    counts = [args.k, *(args.concurrency or [1])] + [
        n for n in (args.rounds, args.threads) if n is not None]
    if min(counts) < 1 or not 0 <= args.temperature <= 1e6 or not 0 < args.top_p <= 1:
        parser.error("counts start at 1, the temperature is in 0..1e6, and top-p in (0, 1]")
    if not 0 <= args.seed < 2**32:
        parser.error("the seed is in 0..2**32 - 1")
    if (args.target is None) != (args.draft is None):
        parser.error("--target and --draft go together")
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
        loads = args.concurrency or LOADS[args.command][:3 if args.quick else None]
        run = Run(pair, args.k, dict(temperature=args.temperature, top_p=args.top_p), loads,
                  args.seed, args.rounds or (2 if args.quick else 5), args.quick)
        introduce(run)
        greedy_check(run)
        if pair.target.device.type == "cuda":
            pair.target.bfloat16(), pair.drafter.bfloat16()  # from here on speed counts
        COMMANDS[args.command](run, args)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not spoil the ending
        status()
        print("\nstopped; what was measured so far stands above")
        return 130
    except (ValueError, NotImplementedError, FloatingPointError) as error:  # of av.py: what and why
        sys.exit(f"cannot run this pair: {error}")
    except BrokenPipeError:  # the reader of a pipe has left: nothing more to say, even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
